"""What an engine would run, as a specimen: its profile's reading, with the weights that it loads and what stands in for
those that it does not.   pytest tests/test_doctor_as_read.py
"""

from __future__ import annotations

import dataclasses

import torch

from ..draft.dialects import Reading
from ..draft.dialects.keys import FUSED, canonical_name
from ..draft.expected import expected_tensors
from ..engines.reading import EngineReading
from .specimen import EMBEDDING, HEAD, Specimen, stored_ids

NOISE = 0.02  # spread of what stands for memory that nobody wrote: any numbers serve, acceptance is gone


def as_read(
    reading: Reading, read: EngineReading, base: Specimen, embedding: torch.Tensor | None, head: torch.Tensor | None
) -> Specimen | None:
    """`base`, the draft as declared, the way `read` says that the engine runs it; None where it does not start, or its
    taps are not known. embedding, head: the target's."""
    try:
        c = read.conventions
    except ValueError:  # layers that the target does not have, say: it stops when it looks for them
        return None
    if c is None:
        return None
    loaded = {key for p in read.parameters.values() for key in p.keys}
    sources = reading.canonical.sources
    tensors = {name: t for name, t in base.tensors.items() if name not in sources or sources[name].ref.name in loaded}
    tensors = {name: t for name, t in tensors.items() if name in sources}
    blanks = _blanks(read)
    generator = torch.Generator().manual_seed(0)
    for name, size in expected_tensors(base.shape, c).items():
        if name in tensors:
            continue
        instead = blanks.get(name, "")
        if instead.startswith("ones"):
            tensors[name] = torch.ones(size)
        elif instead.startswith("zeros"):
            tensors[name] = torch.zeros(size)
        elif name == HEAD and "target" in instead:
            if head is None:
                return None
            tensors[name] = head[: size[0]]
        else:
            tensors[name] = torch.randn(size, generator=generator) * NOISE
    table = base.tensors.get(EMBEDDING) if c.embedding == "own" and EMBEDDING in tensors else embedding
    maps = {name: t for name, t in tensors.items() if name == "d2t"} if c.d2t != "none" else {}
    ids = stored_ids(maps, base.shape)
    shape = base.shape
    if shape.mla is not None:  # both engines' classes rotate neighbours, whatever `rope_interleave` says
        shape = dataclasses.replace(shape, mla=dataclasses.replace(shape.mla, rope_interleave=True))
    changed = {f"as {read.engine} reads it": read.name}
    return Specimen(shape, c, tensors, ids, table, c.taps, changed=changed)


def _blanks(read: EngineReading) -> dict[str, str]:
    """Canonical name -> what stands there where the file does not fill it."""
    out = {}
    for name, parameter in read.parameters.items():
        if not parameter.instead:
            continue
        plain = canonical_name(name)
        kind = next((k for k in FUSED if f".{k}." in plain), None)
        for part in FUSED[kind] if kind else [""]:
            out[plain.replace(kind, part) if kind else plain] = parameter.instead
    return out
