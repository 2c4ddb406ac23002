"""Where it falls: predicted in training | replayed as declared | as the engine reads it | reference decoder | served.

    locate("path/to/draft", target, "vllm", questions, how, k=4, served=result["acceptance"])

All but the first are of the same prompts and count rounds as the engine does, so that in float32 they are equal where
nothing is wrong. The first row that falls is the place.   pytest tests/test_measure_locate.py
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..errors import EyasError
from .asking import How, Question
from .counting import FITTING, fitting

EXACT = 0.01
"""Of tau: float32, greedy, one order of sums or another decides no more (docs/experiments.md)."""
LOOSE = 0.1
"""Of accepted drafts a round: bf16 chooses other words."""
OTHER_TEXT = 0.5
"""Training measured on text of its own: a draft of prose accepts less code than this allows for."""
ROWS = {
    "training": "predicted in training, on text of its own",
    "declared": "replayed as declared",
    "as_read": "replayed as the engine reads it",
    "served": "served",
}
SAYS = {
    "declared": "Far less than training predicted: the files may say something else than what was trained (`eyas "
                "doctor` tries what they may have meant), or these prompts are unlike its text",
    "as_read": "The engine reads the directory otherwise than it declares: export it for this engine",
    "served": "The files are right and read rightly; what is served falls short: the launch's flags, the engine, or "
              "the target that it runs",
}  # fmt: skip


def locate(
    draft: str | Path, target: Path, engine: str, questions: Sequence[Question], how: How, k: int,
    served: Mapping[str, Any] | None, *, launch: Mapping[str, Any] | None = None, training: str | Path | None = None,
    dtype: str = "float32", reference: bool = True, tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:  # fmt: skip
    """{"rows": [{row, what, tau, rounds, accepted, why}], "falls": row or "", "says"}; tau None: it cannot be said.

    served: `acceptance` of a measurement. Raises BadInput where the draft's files cannot be read at all.
    """
    fits = (served or {}).get("rule") == FITTING
    rows = [_trained(draft, training)]
    rows += _replayed(draft, target, engine, questions, how, k, fits, launch or {}, tell)
    if reference:
        tell("decoding with the reference decoder")
        rows.append(_decoded(draft, target, questions, how, k, fits))
    rows.append({"row": "served", "what": ROWS["served"], "why": "" if served else "the server did not say",
                 **{name: (served or {}).get(name) for name in ("tau", "rounds", "accepted")}})  # fmt: skip
    exact = dtype == "float32" and how.temperature == 0 and not (served or {}).get("at_most")
    exact = exact and (how.ignore_eos or not fits)  # how those engines count what a stop cuts off was not measured
    fallen, says = judged({row["row"]: row["tau"] for row in rows}, exact)
    return {"rows": rows, "falls": fallen, "says": says, "engine": engine}


def judged(taus: Mapping[str, float | None], exact: bool) -> tuple[str, str]:
    """(the first row that falls, what that says); ("", ...) where none does. exact: float32 and greedy."""
    above: str | None = None
    for row in ROWS:
        tau = taus.get(row)
        if tau is None:
            continue
        if above is not None:
            before = taus[above]
            assert before is not None
            if above == "training":
                fell = tau - 1 < OTHER_TEXT * (before - 1)
            else:
                fell = tau < (1 - EXACT) * before if exact else tau - 1 < (1 - LOOSE) * (before - 1)
            if fell:
                return row, SAYS[row]
            if exact and above != "training" and tau > (1 + EXACT) * before:
                return row, f"More than {ROWS[above]}: two different models run there, whichever is the better one"
        above = row
    return "", "No row falls: what is served is what the files say"


def _row(row: str, tau: float | None, rounds: int | None = None, accepted: int | None = None, why: str = "",
         what: str = "") -> dict[str, Any]:  # fmt: skip
    return {"row": row, "what": what or ROWS[row], "tau": None if tau is None else round(tau, 4), "rounds": rounds,
            "accepted": accepted, "why": why}  # fmt: skip


def _trained(draft: str | Path, training: str | Path | None) -> dict[str, Any]:
    from ..doctor.training import predicted_tau
    from ..draft.files import open_folder

    try:
        tau = predicted_tau(training, open_folder(draft).eyas or {})
    except EyasError as error:
        return _row("training", None, why=str(error))
    return _row("training", tau, why="" if tau is not None else "nobody wrote it down (--training RUN)")


def _replayed(
    draft: str | Path, target: Path, engine: str, questions: Sequence[Question], how: How, k: int, fits: bool,
    launch: Mapping[str, Any], tell: Callable[[str], None],
) -> list[dict[str, Any]]:  # fmt: skip
    """The rows `declared` and `as_read`."""
    import dataclasses

    import torch

    from ..doctor.readings import Readings
    from ..doctor.record import answers
    from ..doctor.trial import Bench
    from ..target.facts import read_facts

    tell(f"replaying it as {engine} reads it")
    readings = Readings.open(draft, target, [engine], launch)
    specimens = {"declared": readings.declared, "as_read": readings.as_read.get(engine)}
    why = {"declared": readings.refusal, "as_read": ""}
    read = readings.engines[engine]
    if engine in ("llamacpp", "openvino"):  # they run a converted copy of an export, which says more than the draft may
        specimens["as_read"], why["as_read"] = _exported(draft, target, engine)
    elif read.failure is not None:
        why["as_read"] = f"it does not start: {read.failure.what}"
    if how.temperature:
        specimens, why = {}, dict.fromkeys(("declared", "as_read"), "sampled text cannot be replayed: ask greedily")
    wanted = {name: s for name, s in specimens.items() if s is not None}
    out = {name: _row(name, None, why=why.get(name) or "its taps are not known") for name in ("declared", "as_read")}
    if wanted:
        facts = read_facts(target)
        taps = sorted({t for s in wanted.values() for t in s.slices if 0 <= t <= facts.num_layers})
        # An engine counts every round that it begins before the last token: the text must go on until that one's end.
        text = answers(target, [list(q.ids) for q in questions], taps or [0], tokens=how.max_tokens + k - 1, ends=False,
                       dtype="float32")  # fmt: skip
        if len(text.offsets) - 1 != len(questions):
            return [_row(name, None, why="the target's context does not hold all prompts and answers") for name in out]
        eos = () if how.ignore_eos else facts.eos_ids
        bench = Bench(dataclasses.replace(text), torch.float32)
        for name, specimen in wanted.items():
            if name == "as_read" and specimen is specimens.get("declared"):
                continue
            rounds, accepted = _walked(bench, specimen, k, how.max_tokens, eos, fits)
            out[name] = _row(name, 1 + accepted / rounds if rounds else None, rounds, accepted)
    return [out["declared"], out["as_read"]]


def _walked(bench: Any, specimen: Any, k: int, limit: int, eos: Collection[int], fits: bool) -> tuple[int, int]:
    """(rounds, accepted) of answers of `limit` tokens, or until one of `eos`; fits: no more is drafted than fits.

    The text goes on behind the end, so that the last round is whole, as engines count it; none begins there.
    """
    import torch

    from ..decode.replay import rounds

    material = bench.material
    at, n = rounds(bench.accepted(specimen, k), material.run, k)
    document = material.packing.document[at]
    first, ends = [], []
    for a, b in zip(material.offsets[:-1].tolist(), material.offsets[1:].tolist(), strict=True):
        first.append(a + int(material.mask[a:b].nonzero()[0, 0]))
        answer = material.ids[first[-1] : b].tolist()
        ends.append(min(limit, next((i + 1 for i, token in enumerate(answer) if token in eos), limit)))
    begun = at + 2 - torch.tensor(first)[document]  # tokens of the answer before the round
    kept = begun < torch.tensor(ends)[document]
    begun, n = begun[kept], n[kept]
    return fitting(begun.tolist(), n.tolist(), limit) if fits else (len(n), int(n.sum()))


def _exported(draft: str | Path, target: Path, engine: str) -> tuple[Any, str]:
    """(the specimen that a converted export is, "") or (None, why there is none)."""
    import dataclasses

    from ..doctor.as_read import as_read
    from ..doctor.readings import Readings
    from ..export import export_draft

    with TemporaryDirectory(prefix="eyas-") as scratch:
        try:
            export_draft(draft, Path(scratch) / "export", to=engine, target_dir=target, verify=False)
        except EyasError as error:
            return None, str(error)
        readings = Readings.open(Path(scratch) / "export", target, [engine], {})
        read, declared, ends = readings.engines[engine], readings.declared, readings.ends
        if readings.reading is None or declared is None or ends is None:
            return None, readings.refusal or "it cannot be replayed"
        if engine == "openvino":  # its own default is one layer off, or none; the conversion mends that
            read = dataclasses.replace(read, values={**read.values, "taps": declared.slices})
        specimen = as_read(readings.reading, read, declared, ends.embedding, ends.head)
        if specimen is None:
            return None, f"it does not start: {read.failure.what}" if read.failure else "it does not start"
        tensors = {name: t.clone() for name, t in specimen.tensors.items()}  # the files go away
        return dataclasses.replace(specimen, tensors=tensors), ""


def _decoded(
    draft: str | Path, target_dir: Path, questions: Sequence[Question], how: How, k: int, fits: bool
) -> dict[str, Any]:
    """The reference decoder's own rounds: draft and target run together, nothing replayed."""
    import torch

    from ..decode.answers import decode
    from ..decode.step import ChainDrafter
    from ..draft.checkpoint import load_draft
    from ..target.model import Target

    what = "decoded by the reference, as declared"
    if how.temperature:
        return _row("reference", None, why="sampled text differs from run to run", what=what)
    try:
        target = Target.load(target_dir, dtype=torch.float32)
        module, vocab_map, _ = load_draft(draft, target_dir, dtype=torch.float32)
        eos = () if how.ignore_eos else target.facts.eos_ids
        done = decode(target, [list(q.ids) for q in questions], ChainDrafter(module, vocab_map), k=k,
                      max_new_tokens=how.max_tokens, eos_ids=eos)  # fmt: skip
    except EyasError as error:
        return _row("reference", None, why=str(error), what=what)
    if fits:
        begun = [start for a in done.answers for start in [1, *a.ends[:-1]][: len(a.accepted)]]
        rounds, accepted = fitting(begun, [n for a in done.answers for n in a.accepted], how.max_tokens)
    else:
        rounds = sum(len(a.accepted) for a in done.answers)
        accepted = sum(sum(a.accepted) for a in done.answers)
    return _row("reference", 1 + accepted / rounds if rounds else None, rounds, accepted, what=what)
