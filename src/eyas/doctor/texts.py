"""The text that trials run on: recorded by the target now, recorded features, or the draft's own probe.

pytest tests/test_doctor_diagnosis.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import BadInput, EyasError
from .material import Material
from .readings import Readings


def probe(draft: str | Path, readings: Readings) -> Material | None:
    """The probe, whose few embedding rows are all that is known of the target."""
    import torch

    from .material import Material

    assert readings.reading is not None
    try:
        material = Material.of_probe(draft, readings.reading.conventions.taps)
    except EyasError:
        return None
    from .specimen import declared

    known, rows = material.embedding or (torch.empty(0), torch.empty(0))
    table = torch.zeros(readings.reading.shape.vocab_size, rows.shape[1], dtype=rows.dtype)
    table[known] = rows
    readings.declared = declared(readings.reading, table)
    return material


def text(
    readings: Readings, target: str | Path | None, features: str | Path | None, prompts: Sequence[str] | None,
    device: str, trust: bool, missing: list[dict[str, str]], tell: Callable[[str], None],
) -> Material | None:  # fmt: skip

    if features is not None:
        missing.append({"what": "layers other than those of the features", "supply": "--target T without --features"})
        assert readings.declared is not None
        return _features(Path(features), target, readings.declared.slices, tell)
    if target is None:
        missing.append({"what": "trials and hypotheses", "supply": "--target T, or --features DIR"})
        return None
    from .prompts import KINDS, PROMPTS
    from .record import record, useful_taps

    assert readings.facts is not None and readings.declared is not None
    near = {t + shift for t in readings.declared.slices for shift in (-2, -1, 0, 1, 2)}
    for read in readings.as_read.values():
        near |= set(read.slices)
    if readings.facts.num_layers >= 7:
        near |= {t + shift for t in readings.facts.default_taps for shift in (-1, 0, 1)} | {readings.facts.num_layers}
    taps = useful_taps(readings.facts, sorted(near))
    kinds = KINDS if prompts is None else None
    return record(
        target, taps, prompts or PROMPTS, kinds=kinds, device=device, trust_remote_code=trust, tell=tell
    )  # fmt: skip


def _features(folder: Path, target: str | Path | None, taps: Sequence[int], tell: Callable[[str], None]) -> Material:
    """Eyas's own features, or a sample of what speculators or SpecForge recorded."""
    from tempfile import TemporaryDirectory

    from ..features.foreign import Kind, import_foreign
    from ..features.reader import FeatureSet
    from .material import Material

    kind: Kind | None = None
    if not (folder / "manifest.json").is_file():
        kind = "speculators" if next(folder.rglob("hs_*.safetensors"), None) else None
        kind = kind or ("specforge" if next(folder.rglob("*.ckpt*"), None) else None)
    if kind is None:
        return Material.of_features(FeatureSet.open(folder))
    if target is None:
        raise BadInput(f"{folder} holds features of {kind}, which say neither taps nor template: give --target, too")
    tell(f"reading {kind}'s features")
    with TemporaryDirectory(prefix="eyas-") as scratch:
        import_foreign(kind, folder, target, scratch, taps, limit=FOREIGN_DOCUMENTS, skip_bad=True, progress=False)
        material = Material.of_features(FeatureSet.open(scratch))
        return replace(material.first(range(material.documents)), source=f"{folder} ({kind})")


FOREIGN_DOCUMENTS = 96
