"""What a run's folder says of itself, as plain values: the data of `eyas report`, whatever of it is there yet.

    read_run(Path("runs/demo"), tokenizer=None)          pytest tests/test_report_run.py

A run's folder is what `eyas run` writes (stages.json, a folder a stage), or the folder of `eyas train` alone. Nothing
is changed there and nothing is computed but sums. What is not there is None, and is told in `missing`.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyas.artifacts import MANIFEST, read_manifest
from eyas.errors import BadInput, EyasError
from eyas.report.run_curve import read_training
from eyas.report.summary import story

ORDER = ("target", "ask", "prompts", "regenerate", "split", "extract", "heldout", "vocab", "train", "export", "prove")
OPTIONAL = ("ask", "regenerate")
"""Stages that a recipe may do without."""
STAGES, RECIPE, SUMMARY, METRICS, RESULT = "stages.json", "recipe.json", "summary.json", "metrics.jsonl", "result.json"
MISSING = {
    "vocab": "No draft vocabulary has been cut yet, so nothing is known of its coverage.",
    "train": "Training has not begun.",
    "prove": "The draft has not been proved: there is no measured accept length yet, only what training predicts.",
    "features": "No features have been extracted yet, so there is no loss mask to show.",
    "tokenizer": "The masks cannot be shown as text, because the target's tokenizer is not at hand: name it with "
    "--target.",
    "samples": "The proof kept no rounds of its answers (it was made by an earlier version of Eyas).",
}
ALONE = (
    "This is the folder of `eyas train` alone: features, draft vocabulary and proof lie elsewhere. `eyas prove` "
    "measures the accept length of the draft in it."
)


def read_run(folder: Path, tokenizer: Any = None) -> dict[str, Any]:
    """One run. `tokenizer`: (tokenizer, its fingerprint) of the target, or None where it is not at hand.

    Raises BadInput where `folder` is neither a run nor a training, or a record in it cannot be read.
    """
    if not folder.is_dir():
        raise BadInput(f"{folder} is no folder; name what `eyas run` or `eyas train` wrote with --out")
    if (folder / STAGES).is_file():
        return _run(folder, tokenizer)
    if (folder / METRICS).is_file() or _stage_of(folder) == "train":
        return _training_alone(folder)
    raise BadInput(
        f"{folder} holds no run: expected {STAGES} (of `eyas run`) or {METRICS} (of `eyas train`). Name the folder "
        f"that one of them was given with --out."
    )


def target_of(folder: Path) -> str | None:
    """The target that a run was asked for, as it was spelled; None where the folder does not say."""
    recipe, summary = read_json(folder / RECIPE), read_json(folder / SUMMARY)
    told = mapping(mapping(recipe).get("target")).get("source") or mapping(summary).get("target")
    return told if isinstance(told, str) else None


def _run(folder: Path, tokenizer: Any) -> dict[str, Any]:
    from eyas.report.run_text import read_conversations
    from eyas.report.run_vocab import read_vocabulary

    records = mapping(mapping(read_json(folder / STAGES)).get("stages"))
    working = at_work(folder)
    recipe, summary = mapping(read_json(folder / RECIPE)), mapping(read_json(folder / SUMMARY))
    stages = _stages(folder, records, working)
    state = {row["name"]: row["state"] for row in stages}
    settings = _settings(recipe, records)
    missing: dict[str, str] = {}

    training = read_training(folder / "train" / METRICS)
    if training is not None:
        training["planned_tokens"] = _planned(settings, mapping(mapping(records.get("extract")).get("counts")))
        training["planned_steps"] = settings.get("train.steps")
        if state.get("train") != "done":
            missing["training"] = "Training is not finished: the curves end where it stands."
    else:
        missing["training"] = MISSING["train"]

    vocabulary = None
    if state.get("vocab") == "done":
        vocabulary = read_vocabulary(folder / "vocab", folder / "heldout", tokenizer)
    else:
        missing["vocabulary"] = MISSING["vocab"]

    proof = read_json(folder / "prove" / RESULT) if state.get("prove") == "done" else None
    samples = mapping(proof).get("samples") or []
    if proof is None:
        missing["proof"] = MISSING["prove"]
    missing |= {} if samples else {"samples": MISSING["samples" if proof else "prove"]}

    conversations = None
    if state.get("extract") != "done":
        missing["conversations"] = MISSING["features"]
    elif tokenizer is None:
        missing["conversations"] = MISSING["tokenizer"]
    else:
        conversations = read_conversations(folder / "extract", folder / "vocab", tokenizer)

    finished = all(row["state"] in ("done", "left out") for row in stages)
    peaks = [row["peak_memory_gib"] for row in stages if row["peak_memory_gib"]]
    return {
        "folder": str(folder),
        "name": recipe.get("name") or summary.get("name") or folder.name,
        "kind": "run",
        "state": "working" if working else "finished" if finished else "stopped",
        "target": target_of(folder),
        "story": _story(summary),
        "seconds": round(sum(row["seconds"] or 0 for row in stages), 1),
        "peak_memory_gib": max(peaks, default=None),
        "stages": stages,
        "training": training,
        "proof": {name: value for name, value in proof.items() if name != "samples"} if proof else None,
        "samples": samples,
        "vocabulary": vocabulary,
        "conversations": conversations,
        "settings": settings,
        "inputs": {name: dict(mapping(mapping(r).get("inputs"))) for name, r in records.items()},
        "versions": sorted({row["eyas"] for row in stages if row["eyas"]}),
        "missing": missing,
    }


def _stages(folder: Path, records: Mapping[str, Any], working: bool) -> list[dict[str, Any]]:
    """A row a stage, in the order of the work: done, working, stopped, not yet, or left out by the recipe."""
    names = [*ORDER, *(name for name in records if name not in ORDER)]
    begun = [i for i, name in enumerate(names) if name in records]
    rows = []
    for place, name in enumerate(names):
        record = mapping(records.get(name))
        if not record:
            passed = name in OPTIONAL and any(i > place for i in begun)
            state = "left out" if passed else "not yet"
        elif record.get("finished"):
            state = "done"
        else:
            state = "working" if working else "stopped"
        manifest = _manifest(folder / name) if state == "done" else {}
        rows.append({
            "name": name,
            "state": state,
            "seconds": record.get("duration_s") or (0.0 if state == "done" else None),  # of a killed call: not known
            "peak_memory_gib": record.get("peak_memory_gib") or None,
            "counts": dict(mapping(record.get("counts"))),
            "ended": manifest.get("created"),
            "eyas": manifest.get("code_version"),
            "output": record.get("output") or None,
        })  # fmt: skip
    return rows


def _training_alone(folder: Path) -> dict[str, Any]:
    manifest, working = _manifest(folder), at_work(folder)
    training = read_training(folder / METRICS)
    identity = mapping(mapping(_newest_checkpoint(folder)).get("identity"))
    config = mapping(manifest.get("config")) or {**mapping(identity.get("settings")), "seed": identity.get("seed")}
    settings = _flat({"train": config})
    missing = dict.fromkeys(("proof", "samples", "vocabulary", "conversations"), ALONE)
    state = "done" if manifest else "working" if working else "stopped"
    if training is None:
        missing["training"] = MISSING["train"]
    else:
        training["planned_tokens"], training["planned_steps"] = None, settings.get("train.steps")
        if not manifest:
            missing["training"] = "Training is not finished: the curves end where it stands."
    row = {
        "name": "train", "state": state, "counts": dict(mapping(manifest.get("counts"))), "peak_memory_gib": None,
        "seconds": manifest.get("duration_s"), "ended": manifest.get("created"), "output": None,
        "eyas": manifest.get("code_version"),
    }  # fmt: skip
    return {
        "folder": str(folder), "name": folder.resolve().name, "kind": "train",
        "state": "finished" if state == "done" else state, "target": None, "story": [],
        "seconds": manifest.get("duration_s"), "peak_memory_gib": None, "stages": [row], "training": training,
        "proof": None, "samples": [], "vocabulary": None, "conversations": None, "settings": settings,
        "inputs": {"train": dict(mapping(manifest.get("inputs")) or mapping(identity.get("inputs")))},
        "versions": [manifest["code_version"]] if manifest.get("code_version") else [], "missing": missing,
    }  # fmt: skip


# ---------------------------------------------------------------- parts


def _story(summary: Mapping[str, Any]) -> list[str]:
    """The run in sentences, where it is finished."""
    try:
        return story(summary).split("\n") if summary else []
    except (KeyError, TypeError):  # a summary of another version; its numbers are in the page anyway
        return []


def at_work(folder: Path) -> bool:
    """Does a living process hold the folder's lock?"""
    try:
        with open(folder / ".lock", "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _settings(recipe: Mapping[str, Any], records: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted name. Without recipe.json (a run of an earlier Eyas) what the stages' records hold of them."""
    if recipe:
        return _flat({name: value for name, value in recipe.items() if name != "name"})
    told: dict[str, Any] = {}
    for stage, record in records.items():
        config = mapping(record).get("config")
        for part in config if isinstance(config, list) else [config]:
            told |= _flat({stage: part}) if isinstance(part, Mapping) else {}
    return told


def _flat(value: Any, before: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value:
        return {before: value}
    out: dict[str, Any] = {}
    for name, inner in value.items():
        out |= _flat(inner, f"{before}.{name}" if before else str(name))
    return out


def _planned(settings: Mapping[str, Any], extracted: Mapping[str, Any]) -> int | None:
    """Tokens that training will have seen, where passes and not steps were asked for."""
    epochs, tokens = settings.get("train.epochs"), extracted.get("tokens")
    if settings.get("train.steps") or not isinstance(epochs, int | float) or not isinstance(tokens, int):
        return None
    return round(epochs * tokens)


def _stage_of(folder: Path) -> str | None:
    return mapping(_manifest(folder)).get("stage")


def _manifest(folder: Path) -> dict[str, Any]:
    if not (folder / MANIFEST).is_file():
        return {}
    try:
        return read_manifest(folder)
    except EyasError:
        return {}


def _newest_checkpoint(folder: Path) -> Any:
    states = sorted((folder / "checkpoints").glob("step-*/state.json"))
    return read_json(states[-1]) if states else None


def read_json(path: Path) -> Any:
    """A JSON file; None where there is none. Raises BadInput naming a file that is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read as JSON ({error}). Run its stage again.") from error


def mapping(value: Any) -> Mapping[str, Any]:
    """`value` where it is an object, else an empty one."""
    return value if isinstance(value, Mapping) else {}
