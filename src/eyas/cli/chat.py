"""`eyas chat`: talk to a target that has a draft, and see who says what.

eyas chat runs/demo/export                              # pytest tests/test_chat_cli.py
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eyas.signals import Terminated
from eyas.terminal import echo

if TYPE_CHECKING:
    from eyas.report.talk_text import Marks
    from eyas.talk import Conversation, Turn

HELP = """Talk to a target with its DRAFT in the terminal: what was drafted and accepted stands in one colour, what the
target said itself in another.

Under each answer stands its accept length τ = 1 + accepted / rounds; its last round, which the end of the answer may
have cut off, is left out. --explain walks one round of it in words: what was drafted, what the target says to it, and
why the round ends where it does. The text is the target's own, whatever the draft: greedy, or sampled at --temperature.
A chain of --k tokens is drafted each round; with --topk or --nodes it is EAGLE-2's tree of that depth (see eyas prove
--help).

With --url a running engine answers instead of DRAFT and the reference decoder; the target is then read for its chat
template and tokenizer alone. vLLM and SGLang send a round at a time, so what was drafted shows; others send token by
token, and nobody knows.

While talking: /explain [ROUND] of the last answer, /reset the conversation, /quit (or Ctrl-D). Ctrl-C ends an answer.

\b
Examples:
  eyas chat runs/demo/export
  eyas chat my-draft --target Qwen/Qwen3-1.7B --topk 4 --nodes 16 --temperature 0.7 --explain
  eyas chat my-draft --say "What is a hawk?" --say "And an eyas?" --json
  eyas chat --url http://127.0.0.1:8000 --target path/to/target
"""


@click.command("chat", help=HELP)
@click.argument("draft", type=click.Path(path_type=Path), required=False)
@click.option("--target", default="smollm2", show_default=True, help="Folder, .gguf file, hub id or 'smollm2'.")
@click.option("--url", help="Address of a running engine that answers instead.")
@click.option("--engine", help="Which engine runs there, where it does not say so: vllm, sglang, llamacpp, openvino.")
@click.option("--model", help="Which of its models is meant.")
@click.option("--k", type=click.IntRange(min=1), default=4, show_default=True, help="Tokens drafted; depth of a tree.")
@click.option("--topk", type=click.IntRange(min=1), help="Draft a tree: children of a node.  [default: 4 with --nodes]")
@click.option("--nodes", type=click.IntRange(min=1), help="Draft a tree: its nodes.  [default: topk * k with --topk]")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of sampling.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="Tokens an answer.")
@click.option("--system", metavar="TEXT", help="The system's message.")
@click.option("--say", "says", multiple=True, metavar="TEXT", help="Say this and leave; repeatable, turn by turn.")
@click.option("--explain", is_flag=True, help="Walk one round of each answer in words, and draw its tree.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object of all turns; needs --say.")
@click.option("--no-color", is_flag=True, help="Mark words without colours, as where NO_COLOR is set or in a pipe.")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda, cuda:1.")
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32", show_default=True,
    help="In which both models run.",
)  # fmt: skip
@click.option("--trust-remote-code", is_flag=True, help="Run modelling code that comes with the target.")
def command(
    draft: Path | None, url: str | None, says: tuple[str, ...], explain: bool, as_json: bool, no_color: bool,
    **settings: Any,
) -> None:  # fmt: skip
    if (draft is None) == (url is None):
        raise click.UsageError("give a DRAFT to decode with, or the --url of an engine that runs one")
    if url is not None and (settings["topk"] or settings["nodes"]):
        raise click.UsageError(
            "--topk and --nodes are the reference decoder's; an engine drafts as it was started; leave them out"
        )
    if as_json and not says:
        raise click.UsageError("--json has one object to print in the end: say what there is to say with --say")
    from eyas.report.talk_text import Marks
    from eyas.terminal import wants_color

    marks = Marks(not no_color and wants_color(sys.stdout))
    talk = _served(url, settings) if url is not None else _local(draft, settings)
    try:
        if as_json:
            echo(json.dumps(_silent(talk, says, explain, {**settings, "url": url})))
        elif says:
            echo(marks.faint(marks.legend), styled=True)
            for say in says:
                echo(f"\n> {say}")
                _answer(talk, say, marks, explain)
        else:
            _converse(talk, marks, explain)
    finally:
        if url is not None:
            talk.source.close()  # type: ignore[attr-defined]


# ---------------------------------------------------------------- who answers


def _local(draft_dir: Path | None, settings: dict[str, Any]) -> Conversation:
    import torch

    from eyas.cli.pairs import note_other_target
    from eyas.decode.rules import Greedy, Rule, Sampling
    from eyas.decode.step import refuse_uncroppable
    from eyas.decode.tree import make_drafter
    from eyas.draft.checkpoint import load_draft
    from eyas.draft.source import resolve_draft
    from eyas.machine import reuse_large_allocations
    from eyas.talk import Conversation, Local
    from eyas.target.model import Target
    from eyas.target.source import resolve_target

    assert draft_dir is not None
    draft_dir = resolve_draft(draft_dir)  # before a target is loaded
    reuse_large_allocations()
    folder, k = resolve_target(settings["target"]), settings["k"]
    note_other_target(draft_dir, folder)
    dtype, device = getattr(torch, settings["dtype"]), settings["device"]
    target = Target.load(folder, device=device, dtype=dtype, trust_remote_code=settings["trust_remote_code"])
    refuse_uncroppable(target)
    draft, vocab_map, _ = load_draft(draft_dir, folder, device=device, dtype=dtype)
    drafter = make_drafter(draft, vocab_map, k, settings["topk"], settings["nodes"])
    hot = settings["temperature"]
    rule: Rule = Sampling(hot, settings["seed"], target.device) if hot > 0 else Greedy()
    eos, room = target.facts.eos_ids, target.facts.max_position
    return Conversation(
        target.tokenizer, Local(target, drafter, k=k, rule=rule, eos_ids=eos), system=settings["system"], eos_ids=eos,
        max_new_tokens=settings["max_new_tokens"], room=max(1, room - k) if room else 0,
    )  # fmt: skip


def _served(url: str, settings: dict[str, Any]) -> Conversation:
    from transformers import AutoTokenizer

    from eyas.serve.client import Client
    from eyas.talk import Conversation, Served
    from eyas.target.facts import read_facts
    from eyas.target.gguf import quiet
    from eyas.target.source import resolve_target

    folder = resolve_target(settings["target"])
    facts, trust = read_facts(folder), settings["trust_remote_code"]
    with quiet():
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)
    client = Client(url, engine=settings["engine"], model=settings["model"])
    seed = settings["seed"] if settings["temperature"] > 0 else None
    source = Served(client, temperature=settings["temperature"], seed=seed, eos_ids=facts.eos_ids)
    return Conversation(
        tokenizer, source, system=settings["system"], eos_ids=facts.eos_ids,
        max_new_tokens=settings["max_new_tokens"], room=facts.max_position,
    )  # fmt: skip


# ---------------------------------------------------------------- talking


def _answer(talk: Conversation, say: str, marks: Marks, explain: bool) -> None:
    """One turn, written as its rounds come. Ctrl-C ends the answer; what was said by then is kept."""
    from eyas.decode.pieces import Pieces
    from eyas.errors import EyasError
    from eyas.report.talk_text import status
    from eyas.talk import tau

    turn = talk.begin(say)
    pieces = Pieces(talk.tokenizer, turn.ids)
    try:
        for done in talk.rounds(turn):
            parts = [
                ("" if token in talk.eos_ids else pieces.push(token), own)
                for token, own in zip(done.tokens, done.own, strict=True)
            ]
            echo(marks.pieces(parts), nl=False, styled=True)
    except KeyboardInterrupt as error:
        if isinstance(error, Terminated):
            raise
        turn.finish = "interrupted"
    except EyasError:
        echo()  # whatever is reported begins on a line of its own
        raise
    if turn.rounds:
        echo(marks.piece(pieces.flush(), turn.own[-1]), styled=True)
    talk.end(turn)
    so_far = tau(talk.turns) if len(talk.turns) > 1 else None
    echo(marks.faint(status(turn, so_far, talk.source)), styled=True)
    if explain:
        _explain(talk, marks)


def _explain(talk: Conversation, marks: Marks, number: str = "") -> None:
    """Write a round of the last answer in words: that of the number, else the one that shows most."""
    from eyas.report.talk_text import explained, telling

    looks = [done.look for done in talk.turns[-1].rounds[1:]] if talk.turns else []
    chosen = int(number) - 1 if number.isdigit() else telling(looks)
    look = looks[chosen] if chosen is not None and 0 <= chosen < len(looks) else None
    if look is None or chosen is None:
        have = f"it has rounds 1 to {len(looks)}" if any(looks) else "no round of it was seen from inside"
        echo(marks.faint(f"Nothing to explain in the last answer: {have}."), styled=True)
        return
    echo(explained(look, chosen + 1, lambda token: talk.tokenizer.decode([token]), marks), styled=True)


def _silent(talk: Conversation, says: tuple[str, ...], explain: bool, settings: dict[str, Any]) -> dict[str, Any]:
    """All turns as plain JSON values."""
    from eyas.report.talk_text import telling, turn_dict
    from eyas.talk import DEFINITION, tau

    def one(say: str) -> dict[str, Any]:
        turn: Turn = talk.begin(say)
        for _ in talk.rounds(turn):
            pass
        talk.end(turn)
        looks = [done.look for done in turn.rounds[1:]]
        chosen = telling(looks) if explain else None
        look = None if chosen is None else (chosen + 1, looks[chosen])
        return turn_dict(turn, talk.text(turn), look, getattr(talk.source, "counted", None))

    turns = [one(say) for say in says]
    whole = tau(talk.turns) if talk.source.visible else None
    names = ["temperature", "max_new_tokens"]
    if settings["url"] is None:
        names += ["k", "topk", "nodes", "dtype"]
    return {
        "turns": turns,
        "tau": None if whole is None else round(whole, 4),
        "settings": {name: settings[name] for name in names},
        "definition": DEFINITION,
    }


def _converse(talk: Conversation, marks: Marks, explain: bool) -> None:
    """Read and answer until the user leaves."""
    from eyas.errors import EyasError

    with contextlib.suppress(ImportError):  # Windows has none
        import readline  # noqa: F401  # line editing and history for input()
    echo(marks.faint(marks.legend), styled=True)
    echo(marks.faint("/explain [ROUND], /reset, /quit; Ctrl-C ends an answer, Ctrl-D the conversation."), styled=True)
    while True:
        try:
            say = input("\n> ").strip()
        except KeyboardInterrupt as error:
            if isinstance(error, Terminated):
                raise
            continue
        except EOFError:
            echo()
            return
        verb, _, rest = say.partition(" ")
        if verb == "/quit":
            return
        if verb == "/reset":
            talk.reset()
            echo(marks.faint("A new conversation."), styled=True)
        elif verb == "/explain":
            _explain(talk, marks, rest.strip())
        elif verb.startswith("/") and verb[1:].isalpha():
            echo(marks.faint(f"No command {verb}: /explain [ROUND], /reset, /quit."), styled=True)
        elif say:
            try:
                _answer(talk, say, marks, explain)
            except EyasError as error:  # the conversation goes on without this turn
                echo(f"eyas: {error}", err=True)
