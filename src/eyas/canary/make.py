"""Make a canary: record, train, export, write down what a deployment must give.

    make("path/to/target", "runs/canary")                 eyas canary --target smollm2 --out runs/canary

`out` becomes a folder of its own: `draft/`, an ordinary draft directory that every engine loads, and `canary.json`, the
prompts, the expected tokens, K, what each way of counting must show, and what every neighbour would give instead.

    pytest tests/test_canary.py
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..doctor.hypothesis import Context
from ..doctor.prompts import PROMPTS
from ..doctor.specimen import Specimen
from ..draft.checkpoint import save_draft
from ..draft.model import Draft
from ..errors import BadInput, EyasError
from ..export.write import export_draft
from ..locks import beside
from ..machine import reuse_large_allocations
from ..target import source
from ..target.facts import read_facts
from ..target.weights import load_ends
from ..untrusted import content, parse_json
from ..vocab import VocabMap
from ..writes import atomic_dir, atomic_write_json
from . import start, text
from .neighbours import ORDER, TAPS, neighbours
from .rows import Rows
from .train import STEPS, Trained, train

SCHEMA = "eyas-canary/1"
FILE, DRAFT = "canary.json", "draft"
COUNT, CANDIDATES = 8, 24
ROUNDS = 13


def make(
    target: str | Path,
    out_dir: str | Path,
    *,
    k: int = 4,
    taps: Sequence[int] | None = None,
    prompts: Sequence[text.Messages] | None = None,
    count: int = COUNT,
    rounds: int = ROUNDS,
    steps: int = STEPS,
    budget: float = math.inf,
    seed: int = 0,
    device: str = "cpu",
    trust_remote_code: bool = False,
    force: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Write the folder; returns what canary.json holds. budget: seconds of training.

    Raises BadInput where `out_dir` is taken (a canary is replaced with `force` only), EyasError where the right reading
    could not be learnt: nothing is written then.
    """
    started, folder, out = time.monotonic(), Path(target), Path(out_dir)
    check_free(out, force)
    with beside(out):
        reuse_large_allocations()
        facts, ends = read_facts(folder), load_ends(folder)
        chosen = tuple(sorted(taps)) if taps else facts.default_taps
        recorded = text.needed_taps(facts, chosen)
        asked = list(prompts) if prompts is not None else text.messages_of(PROMPTS[:CANDIDATES])
        told = text.record(folder, asked, recorded, count=count, k=k, rounds=rounds, device=device,
                           trust_remote_code=trust_remote_code, tell=tell)  # fmt: skip
        material = told.material
        vocab_map = start.vocabulary(material.ids[material.mask], facts.vocab_size, seed)
        base = start.new_specimen(facts, chosen, vocab_map, ends.embedding, seed)
        context = Context(facts=facts, embedding=ends.embedding, head=ends.head, taps=frozenset(recorded))
        near = list(neighbours(base, context))
        base = start.with_fc(base, material, [n.apply(base).slices for n in near if n.group in (TAPS, ORDER)], seed)
        tell(f"training against {len(near)} neighbours")
        trained = train(Rows(material, k), base, near, seed=seed, steps=steps, budget=budget, tell=tell)
        if not trained.whole:
            raise EyasError(
                f"after {trained.steps} steps ({trained.seconds:.0f} s) only {trained.healthy.accepted} of "
                f"{trained.healthy.rounds * k} drafts are accepted under the right reading; give it more time "
                f"(--budget) or fewer prompts (--count)"
            )
        described = _described(told, trained, base, k, seed)
        described["target"] = {name: source.identify(folder)[name] for name in ("target", "tokenizer")}
        with atomic_dir(out) as temporary:
            report = _write(base, vocab_map, folder, temporary / DRAFT)
            described["draft"] = {"bytes": report.bytes, "engines": report.engines}
            described["seconds"] = round(time.monotonic() - started, 1)
            atomic_write_json(temporary / FILE, described)
        return described


def check_free(out: Path, force: bool) -> None:
    """Raise BadInput unless `out` can be written."""
    if not out.exists() and not out.is_symlink():
        return
    if out.is_dir() and not any(out.iterdir()):
        return
    ours = (out / FILE).is_file() and {p.name for p in out.iterdir()} <= {FILE, DRAFT}
    if not ours:
        raise BadInput(f"{out} holds something that is no canary; choose another --out")
    if not force:
        raise BadInput(f"{out} holds a finished canary; use it, replace it with --force, or choose another --out")


def read(out_dir: str | Path) -> dict[str, Any]:
    """canary.json. Raises BadInput where there is none, or another version's."""
    file = Path(out_dir) / FILE
    try:
        value = parse_json(content(file))
    except (OSError, ValueError) as error:
        raise BadInput(
            f"{file} cannot be read ({error}); make a canary with `eyas canary --target T --out DIR`"
        ) from None
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        raise BadInput(f"{file} is no {SCHEMA}; make the canary again with --force")
    return value


def _write(base: Specimen, vocab_map: VocabMap, target: Path, out: Path) -> Any:
    """By the way every draft takes: the canonical directory, then the export that reads it back."""
    draft = Draft(base.shape, base.conventions)
    weights = {name: base.tensors[name].detach() for name in draft.state_dict()}
    draft.load_state_dict(weights)
    with TemporaryDirectory(prefix="eyas-") as scratch:
        plain = save_draft(draft, vocab_map, Path(scratch) / DRAFT, facts=read_facts(target),
                           fingerprints=source.identify(target), provenance={"canary": SCHEMA})  # fmt: skip
        report = export_draft(plain, out, dtype="keep", target_dir=target)
    shutil.rmtree(out / "eyas", ignore_errors=True)
    return report


def _described(told: text.Text, trained: Trained, base: Specimen, k: int, seed: int) -> dict[str, Any]:
    healthy = trained.healthy
    tokens = len(told.asked[0].tokens)
    return {
        "schema": SCHEMA,
        "k": k,
        "taps": list(base.slices),
        "seed": seed,
        "tokens": tokens,
        "prompts": text.to_json(told.asked),
        "expected": {
            "rounds": healthy.rounds,
            "accepted": healthy.accepted,
            "tau": round(healthy.tau, 4),
            "at_least": list(healthy.at_least[1:]),
            # SGLang's spec_accept_length: prefill's token counts, too.
            "tokens_per_round": round(tokens * len(told.asked) / healthy.rounds, 4),
        },
        "least_probability": round(trained.least, 4),
        "training": {"steps": trained.steps, "seconds": round(trained.seconds, 1)},
        "neighbours": [
            {"name": n.name, "group": n.group, "about": n.about, "since": n.since, **a.to_dict()}
            for n, a in trained.found
        ],
        "not_told_apart": [n.name for n, _ in trained.close],
    }
