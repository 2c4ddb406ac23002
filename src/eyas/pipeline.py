"""`eyas run`: the stages in order, from prompts to a proven draft. Read `run` to follow one token of data.

    target, ask, prompts → regenerate → split → extract, heldout → vocab → train → export → prove → summary.json

Each stage is a function of another module; here stand only their order, what each one reads, and one line of counts.
What is skipped, resumed or done afresh is decided in stages.py.

    eyas run demo --out runs/demo          pytest tests/test_pipeline.py
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from eyas.answers import CONVERSATIONS, STATES
from eyas.artifacts import write_manifest
from eyas.ask import PROMPTS
from eyas.config import RunConfig
from eyas.digests import sha256_file
from eyas.gather import HELD_OUT, TRAIN, collect_prompts, prompt_inputs, set_names, split_conversations
from eyas.locks import inside
from eyas.report.summary import summarise
from eyas.rows import content
from eyas.stages import StageRunner
from eyas.terminal import echo
from eyas.writes import atomic_write_json, remove_leftovers

SUMMARY = "summary.json"
RESULT = "result.json"
RECIPE = "recipe.json"
"""All settings of the run's last start, by section: what a reader of its folder wants to know."""

# Raise one where a change of code changes what the same inputs and settings give; finished stages are then done again.
SCHEMAS = dict.fromkeys(
    ("target", "ask", "prompts", "regenerate", "split", "extract", "heldout", "vocab", "train", "export", "prove"), "1"
) | {"prove": "2"}  # 2: keeps the rounds of a few answers


def run(config: RunConfig, run_dir: Path, say: Callable[[str], None] = echo) -> dict[str, Any]:
    """Run all stages in `run_dir`; return the summary, which is also written there. `say` gets one line a stage.

    Raises what the stages raise; called again, it goes on from there.
    """
    from eyas.target.source import identify, resolve_target
    from eyas.train.trackers import check_trackers

    config = config.on_this_machine()
    check_trackers(config.train.track)
    with inside(run_dir):
        (run_dir / SUMMARY).unlink(missing_ok=True)  # it would speak of another run until this one ends
        remove_leftovers(run_dir)
        atomic_write_json(run_dir / RECIPE, config.model_dump(mode="json"))
        runner = StageRunner(run_dir, say, SCHEMAS)
        began = time.monotonic()
        target = resolve_target(config.target.source)  # the first time this may download or convert
        identity = identify(target)
        runner.stage("target", partial(describe_target, target, identity), inputs=identity, began=began)
        machine = config.target.model_dump(exclude={"source"})  # content decides, not the place that it lies in
        if not machine["template_args"]:  # stages of before this choice stay current
            del machine["template_args"]
        templated = [machine["template_args"]] if "template_args" in machine else []

        own = {}
        if config.ask.count is not None and config.regenerate.conversations is None:
            runner.stage(
                "ask", partial(ask, config, target), inputs=identity, config=[config.ask, machine, config.seed]
            )
            own = {"own": runner.digest("ask")}
        runner.stage(
            "prompts",
            partial(collect_prompts, config, own=run_dir / "ask" / PROMPTS if own else None),
            inputs=prompt_inputs(config) | own,
            config=[config.prompts, config.prove.sets, config.prove.prompts, config.seed],
        )
        conversations, said = _conversations(config, runner, target, identity, machine)
        runner.stage(
            "split",
            partial(split_conversations, conversations, config.extract.heldout, config.seed),
            inputs={"conversations": said},
            config=[config.extract.heldout, config.seed],
        )
        for name, part, supervise in (("extract", TRAIN, config.extract.supervise), ("heldout", HELD_OUT, "answers")):
            runner.stage(
                name,
                partial(extract, config, target, run_dir / "split" / part, run_dir / "regenerate" / STATES, supervise),
                inputs={**identity, "conversations": runner.digest("split", part)},
                config=[config.extract, machine],
            )
        if not config.regenerate.keep_states:
            shutil.rmtree(run_dir / "regenerate" / STATES, ignore_errors=True)
        features = {"features": runner.digest("extract"), "held_out": runner.digest("heldout")}
        runner.stage("vocab", partial(vocab, config, target, run_dir), inputs=features | identity, config=config.vocab)
        runner.stage(
            "train",
            partial(train, config, target, run_dir),
            inputs={**features, **identity, "vocab": runner.digest("vocab")},
            config=[config.train.model_dump(exclude={"track"}), config.target.device, config.seed],
        )
        runner.stage(
            "export",
            partial(export, config, target, run_dir),
            inputs={**features, **identity, "draft": runner.digest("train", "draft/")},
            config=config.export,
        )
        asked = {name: runner.digest("prompts", f"{name}.jsonl") for name in set_names(config)}
        runner.stage(
            "prove",
            partial(prove, config, target, run_dir),
            inputs={**asked, **identity, "draft": runner.digest("export")},
            config=[config.prove, config.target.device, config.seed, *templated],
        )
        proof = json.loads((run_dir / "prove" / RESULT).read_text(encoding="utf-8"))
        summary = summarise(runner.done, proof, config)
        atomic_write_json(run_dir / SUMMARY, summary)
        return summary


def _conversations(
    config: RunConfig, runner: StageRunner, target: Path, identity: dict[str, str], machine: dict[str, Any]
) -> tuple[Path, str]:
    """The conversations to learn from, and their digest: given ones as they are, else the target's own answers."""
    if config.regenerate.conversations is not None:
        given = Path(config.regenerate.conversations)
        return given, content(given) or f"by name {given}"
    runner.stage(
        "regenerate",
        partial(regenerate, config, target, runner.folder / "prompts" / TRAIN),
        inputs={**identity, "prompts": runner.digest("prompts", TRAIN)},
        config=[config.regenerate.model_dump(exclude={"record_states", "keep_states"}), machine, config.seed],
    )
    return runner.folder / "regenerate" / CONVERSATIONS, runner.digest("regenerate", CONVERSATIONS)


# ---------------------------------------------------------------- what the stages do


def describe_target(target: Path, identity: Mapping[str, str], out: Path) -> dict[str, Any]:
    """target.json: what the run is for, so that its folder can be read without the target at hand."""
    from eyas.target.facts import read_facts

    facts = read_facts(target)
    atomic_write_json(out / "target.json", {**identity, "facts": facts.to_dict()})
    counts = {"kind": facts.model_type, "layers": facts.num_layers, "wide": facts.hidden_size, "ids": facts.vocab_size}
    write_manifest(out, "target", inputs=identity, counts=counts, files=["target.json"])
    return counts


def ask(config: RunConfig, target: Path, out: Path) -> dict[str, Any]:
    """Requests that the target writes itself."""
    from eyas.ask import Asking
    from eyas.ask import ask as stage
    from eyas.console import bar

    assert config.ask.count is not None
    how = Asking(
        **config.ask.model_dump(exclude={"count"}), seed=config.seed, slots=config.regenerate.slots,
        **config.target.model_dump(exclude={"source", "template_args"}),
    )  # fmt: skip
    with bar(total=config.ask.count, desc="ask", unit="message") as shown:
        return stage(target, out, config.ask.count, how, shown.update)


def regenerate(config: RunConfig, target: Path, prompts: Path, out: Path) -> dict[str, Any]:
    """The target's own answers to the prompts, by the local model or a server."""
    from eyas.console import bar
    from eyas.prompts import load_prompts
    from eyas.regenerate import regenerate as stage

    section = config.regenerate
    server = None
    if section.base_url is not None:
        from eyas.target.server import ServerOptions

        server = ServerOptions(base_url=section.base_url, model=section.model, concurrency=section.concurrency)
    loaded = load_prompts(prompts)
    total = section.max_supervised_tokens
    with bar(total=total, desc="regenerate", unit="token", unit_scale=True) as shown:

        def show(counts: Mapping[str, int]) -> None:
            written = counts["tokens"] + counts["underway"]  # less than before where an answer is set aside
            shown.update(max(0, (written if total is None else min(written, total)) - shown.n))

        counts = stage(
            loaded,
            target,
            out,
            max_new_tokens=section.max_new_tokens,
            temperature=section.temperature,
            seed=config.seed,
            slots=section.slots,
            max_supervised_tokens=total,
            server=server,
            device=config.target.device,
            dtype=config.target.dtype,
            trust_remote_code=config.target.trust_remote_code,
            template_kwargs=config.target.template_args,
            record_states=section.record_states,
            taps=config.extract.taps,
            progress=show,
        )
    return {name: counts[name] for name in ("prompts", "kept", "supervised_tokens", "set_aside", "finish")}


def extract(
    config: RunConfig, target: Path, conversations: Path, recorded: Path, supervise: str, out: Path
) -> dict[str, Any]:
    """Features of the target on conversations; states that were recorded while it answered are not computed again."""
    from eyas.features.extract import extract as stage

    section = config.extract
    counts = stage(
        target,
        conversations,
        out,
        section.taps,
        max_length=section.max_length,
        batch_tokens=section.batch_tokens,
        supervise=supervise,
        skip_bad=section.skip_bad,
        recorded=recorded,
        device=config.target.device,
        dtype=config.target.dtype,
        trust_remote_code=config.target.trust_remote_code,
        template_kwargs=config.target.template_args,
    )
    told = ("documents", "tokens", "supervised_tokens", "set_aside", "recorded", "computed")
    return {name: counts[name] for name in told if name in counts}


def vocab(config: RunConfig, target: Path, run_dir: Path, out: Path) -> dict[str, Any]:
    """The draft vocabulary: the most frequent ids of the answers, and the target's special ones."""
    from eyas.features.count import make_vocab
    from eyas.target.facts import read_facts
    from eyas.target.tokens import special_ids

    size = min(config.vocab.size, read_facts(target).vocab_size)
    always = {*config.vocab.always, *special_ids(target)}
    report = make_vocab(run_dir / "extract", out, size, always=always, held_out=run_dir / "heldout")
    return {"ids": report.size, "coverage": report.coverage, "held_out_coverage": report.held_out_coverage}


def train(config: RunConfig, target: Path, run_dir: Path, out: Path) -> dict[str, Any]:
    """A draft that has learnt from the features, with the accept length that held-out ones predict for it."""
    from eyas.features.reader import FeatureSet
    from eyas.train.loop import train as stage
    from eyas.vocab import VocabMap

    return stage(
        FeatureSet.open(run_dir / "extract"),
        out,
        target_dir=target,
        vocab_map=None if config.train.init_from else VocabMap.load(run_dir / "vocab"),
        held_out=FeatureSet.open(run_dir / "heldout"),
        settings=config.train,
        seed=config.seed,
        device=config.target.device,
    )


def export(config: RunConfig, target: Path, run_dir: Path, out: Path) -> dict[str, Any]:
    """The draft as the directory that engines load."""
    from eyas.export import export_draft
    from eyas.features.reader import FeatureSet

    report = export_draft(
        run_dir / "train" / "draft",
        out,
        dtype=config.export.dtype,
        engines=config.export.engines,
        target_dir=target,
        features=FeatureSet.open(run_dir / "heldout"),
    )
    loads = [name for name, obstacles in report.engines.items() if not obstacles]
    return {"tensors": report.tensors, "bytes": report.bytes, "loads_in": ", ".join(loads) or "no engine"}


def prove(config: RunConfig, target: Path, run_dir: Path, out: Path) -> dict[str, Any]:
    """Plain against speculative decoding with the exported draft, on the sets to prove on."""
    from eyas.console import bar
    from eyas.decode.prove import prove as stage
    from eyas.prompts import read_prompts

    section = config.prove
    started = time.monotonic()
    sets = {
        name: [p.messages for p in read_prompts(run_dir / "prompts" / f"{name}.jsonl")] for name in set_names(config)
    }
    with bar(total=2 * sum(map(len, sets.values())), desc="prove", unit="answer") as shown:
        result = stage(
            run_dir / "export",
            target,
            sets,
            k=section.draft_tokens,
            max_new_tokens=section.max_new_tokens,
            temperature=section.temperature,
            timed=section.timed,
            seed=config.seed,
            device=config.target.device,
            trust_remote_code=config.target.trust_remote_code,
            template_kwargs=config.target.template_args,
            on_answer=shown.update,
        )
    atomic_write_json(out / RESULT, result)
    counts = {"tau_mean": result["tau_mean"], "rounds": result["rounds"], "lossless": result["lossless"]}
    write_manifest(
        out,
        "prove",
        inputs={"draft": sha256_file(run_dir / "export" / "model.safetensors")},
        config=section,
        counts=counts,
        duration_s=time.monotonic() - started,
        files=[RESULT],
        seed=config.seed,
    )
    return counts
