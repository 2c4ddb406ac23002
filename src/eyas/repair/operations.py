"""Operations on a draft: what each mends, when it may be done, what it changes, and which one undoes it.

An operation looks at the bytes before it touches anything. "Absolute ids to offsets" refuses a map that is right as
offsets, which is how a week was once lost.   pytest tests/test_repair.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..doctor.case import Case
from ..errors import BadInput

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


@dataclass
class Change:
    """What an operation wants: tensors by stored name (None: left out) and config fields (`...`: removed)."""

    tensors: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)
    """What it found and what it writes, as a careful engineer would say it."""


@dataclass(frozen=True)
class Operation:
    """`plan(case, reference)` gives the change, or raises BadInput saying why it must not be done."""

    name: str
    what: str
    mends: tuple[str, ...]
    """Findings of the doctor."""
    inverse: str | None
    """The operation that undoes it, None where only the original directory can."""
    plan: Callable[[Case, Case | None], Change]


def _map(case: Case) -> tuple[Array, Array | None, int]:
    """d2t as int64, the ids that t2d marks (None where there is no usable t2d), V."""
    import numpy as np

    d2t, t2d, vocab = case.array("d2t"), case.array("t2d"), case.vocab
    if d2t is None or d2t.ndim != 1 or d2t.dtype.kind not in "iu":
        raise BadInput(f"{case.folder.path}: there is no d2t of whole numbers to work on")
    if vocab is None:
        raise BadInput(f"{case.folder.path}: the size of the target's vocabulary is not known; give --target")
    usable = t2d is not None and t2d.ndim == 1 and len(t2d) == vocab
    marks = np.flatnonzero(t2d) if usable and t2d is not None else None
    return np.asarray(d2t).astype(np.int64), marks, vocab


def _is_map(ids: Array, marks: Array | None, vocab: int) -> bool:
    """Ascending, in range, and what t2d marks, where it does."""
    import numpy as np

    possible = bool(len(ids) and ids[0] >= 0 and ids[-1] < vocab and np.all(np.diff(ids) > 0))
    return possible and (marks is None or np.array_equal(ids, marks))


def _stored(case: Case, name: str) -> str:
    """The name under which a canonical tensor lies in the file."""
    return case.tensors[name].name if name in case.tensors else name


def _shift(times: int, wanted: str) -> Callable[[Case, Case | None], Change]:
    """Add `times * arange(D)` to d2t, if that makes a map and what is there is none."""

    def plan(case: Case, _: Case | None) -> Change:
        import numpy as np

        d2t, marks, vocab = _map(case)
        place = np.arange(len(d2t))
        if _is_map(place + d2t, marks, vocab):
            said = ", and t2d marks exactly these ids" if marks is not None else ""
            raise BadInput(
                f"{case.folder.path}: d2t is right as it stands: read as offsets it gives ascending target ids in "
                f"range{said} ({quote(d2t)}). Zeros at its beginning only say that the first ids coincide. Nothing was "
                f"changed"
            )
        new = d2t + times * place
        if not _is_map(place + new, marks, vocab):
            raise BadInput(
                f"{case.folder.path}: that would not make a map of d2t ({quote(d2t)}): the ids would still not ascend, "
                f"leave the target's {vocab:,} ids, or differ from those that t2d marks. {wanted}"
            )
        return _map_change(case, d2t, new)

    return plan


def _from_t2d(case: Case, _: Case | None) -> Change:
    """Rebuild d2t from the ids that t2d marks, if they are as many as the head has rows."""
    import numpy as np

    t2d, size, vocab = case.array("t2d"), case.draft_vocab, case.vocab
    if t2d is None or t2d.ndim != 1 or len(t2d) != vocab:
        raise BadInput(f"{case.folder.path}: there is no t2d with one entry a target id to rebuild d2t from")
    marks = np.flatnonzero(t2d)
    if len(marks) != size:
        raise BadInput(
            f"{case.folder.path}: t2d marks {len(marks):,} ids, the draft vocabulary has {size or 0:,}: it is of "
            f"another map, so rebuilding d2t from it would be wrong"
        )
    old = case.array("d2t")
    return _map_change(case, old, marks - np.arange(len(marks)))


def _marks_from_d2t(case: Case, _: Case | None) -> Change:
    """Rebuild t2d from a d2t that is a map by itself."""
    import numpy as np

    d2t, _marks, vocab = _map(case)
    ids = np.arange(len(d2t)) + d2t
    if not _is_map(ids, None, vocab):
        raise BadInput(f"{case.folder.path}: d2t ({quote(d2t)}) is no map itself, so t2d cannot be rebuilt from it")
    marks = np.zeros(vocab, dtype=bool)
    marks[ids] = True
    told = f"t2d: marks {len(ids):,} ids of d2t, {int(ids[0]):,} to {int(ids[-1]):,}"
    return Change({_stored(case, "t2d"): marks}, {}, [told])


def _from_reference(case: Case, reference: Case | None) -> Change:
    """Take both maps of another checkpoint of the same sizes."""
    import numpy as np

    if reference is None:
        raise BadInput("this repair copies the map of another checkpoint: name it with --reference")
    theirs, marks, vocab = _map(reference)
    size = case.draft_vocab
    if len(theirs) != size or vocab != case.vocab:
        raise BadInput(
            f"{reference.folder.path} maps {len(theirs):,} of {vocab:,} ids, {case.folder.path} needs {size or 0:,} of "
            f"{case.vocab or 0:,}: they are not of the same draft"
        )
    ids = np.arange(len(theirs)) + theirs
    if not _is_map(ids, marks, vocab):
        raise BadInput(f"{reference.folder.path}: its own map is broken ({quote(theirs)}); examine it first")
    old = case.array("d2t")
    change = _map_change(case, old, theirs)
    full = np.zeros(vocab, dtype=bool)
    full[ids] = True
    change.tensors[_stored(case, "t2d")] = full
    return change


def _map_change(case: Case, old: Array | None, new: Array) -> Change:
    import numpy as np

    found = f"found d2t: {quote(old)}" if old is not None else "found no d2t"
    value = np.ascontiguousarray(new.astype(np.int64))
    return Change({_stored(case, "d2t"): value}, {}, [found, f"writes d2t: {quote(value)}"])


def _field(**values: Any) -> Callable[[Case, Case | None], Change]:
    def plan(case: Case, _: Case | None) -> Change:
        told = [f"{name}: {case.config.get(name, 'absent')!r} -> {value!r}" for name, value in values.items()]
        return Change({}, values, told)

    return plan


def _name_head(case: Case, _: Case | None) -> Change:
    head = case.tensors.get("lm_head.weight")
    if head is None or not head.shape:
        raise BadInput(f"{case.folder.path}: there is no lm_head.weight whose rows could be counted")
    return _field(draft_vocab_size=head.shape[0])(case, None)


def _flag_norms(case: Case, _: Case | None) -> Change:
    flags = {"norm_before_fc": "input_norm.", "fc_norm": "fc_norm."}
    wanted = {f: True for f, prefix in flags.items() if any(name.startswith(prefix) for name in case.tensors)}
    if len(wanted) != 1:
        raise BadInput(f"{case.folder.path}: the tensors do not belong to one of {', '.join(flags)} alone")
    return _field(**wanted)(case, None)


def quote(values: Array) -> str:
    """First values, the one at 1,000, how many."""
    text = f"{len(values):,} numbers, it begins {values[:4].tolist()}"
    return text + (f", d2t[1000] = {int(values[1000])}" if len(values) > 1000 else "")


OPERATIONS = (
    Operation(
        "absolute-to-offset", "subtract arange(D) from d2t, once", ("EY-D2T-ABSOLUTE",), "add-arange",
        _shift(-1, "If it holds absolute ids, they are of another target"),
    ),
    Operation(
        "add-arange", "add arange(D) to d2t, once: undoes a needless subtraction", ("EY-D2T-TWICE",),
        "absolute-to-offset", _shift(1, "Another mistake was made"),
    ),
    Operation(
        "d2t-from-t2d", "rebuild d2t from the ids that t2d marks",
        ("EY-D2T-ARANGE", "EY-D2T-ZEROS", "EY-D2T-MISSING", "EY-D2T-RANGE", "EY-D2T-DUPLICATE", "EY-D2T-SIZE",
         "EY-D2T-DTYPE"),
        None, _from_t2d,
    ),
    Operation("t2d-from-d2t", "rebuild t2d from d2t", ("EY-T2D-SIZE",), None, _marks_from_d2t),
    Operation("map-from-reference", "take the map of another checkpoint", ("EY-D2T-T2D",), None, _from_reference),
    Operation("untie", "tie_word_embeddings = false", ("EY-TIED-PRUNED",), None, _field(tie_word_embeddings=False)),
    Operation("name-draft-vocabulary", "draft_vocab_size = rows of the head", ("EY-VOCAB-UNNAMED",), None, _name_head),
    Operation("flag-norms", "set the flag of the norms that are there", ("EY-NORM-UNFLAGGED",), None, _flag_norms),
)  # fmt: skip
BY_NAME = {operation.name: operation for operation in OPERATIONS}


def mending(finding: str) -> Operation | None:
    """The operation for a finding, None where there is none yet."""
    return next((operation for operation in OPERATIONS if finding in operation.mends), None)
