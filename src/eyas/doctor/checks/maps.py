"""The vocabulary map: what `d2t` says when it is read as offsets, as every engine does, and what else it may be.

Target id of draft id i: `i + d2t[i]` (SGLang models/llama_eagle3.py:350, vLLM models/llama_eagle3.py:385, llama.cpp's
converter). `t2d` marks the same ids; with it, a wrong map can be told from its repair for certain.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..case import Case
from ..finding import Finding, Severity

if TYPE_CHECKING:
    import numpy as np

    Ids = np.ndarray[Any, Any]

ENGINES_READ = ("SGLang 0.5.23 llama_eagle3.py:350", "vLLM 0.32 llama_eagle3.py:385")
ALMOST_NOTHING = "Each draft token is turned into another token than was meant: an accept length of 1.0 to 1.2"
SUSPICIOUS = 8  # so many offsets without a repetition look like ids: offsets of real maps rise in long steps


def check(case: Case) -> Iterator[Finding]:
    """All findings about `d2t` and `t2d`."""
    import numpy as np

    size, vocab = case.draft_vocab, case.vocab
    d2t, t2d = case.array("d2t"), case.array("t2d")
    marks = None
    if t2d is not None and vocab is not None:
        if t2d.ndim == 1 and len(t2d) == vocab:
            marks = np.flatnonzero(t2d)
        else:
            yield Finding(
                "EY-T2D-SIZE",
                Severity.ERROR,
                f"t2d has the shape {list(t2d.shape)}, the target {vocab:,} ids",
                "Engines do not read it, but training and repair rely on it",
                "Rebuild it from d2t; where that has another size, too, the map is of another target",
            )
    if d2t is None:
        yield from _missing(size, vocab, marks)
        return
    stored = case.tensors["d2t"].dtype
    if d2t.ndim != 1 or stored[0] not in "IU":  # floats of 16 bits come as bits
        yield Finding(
            "EY-D2T-DTYPE",
            Severity.ERROR,
            f"d2t is stored as {stored} {list(d2t.shape)}",
            "Engines index with it: a list of whole numbers is needed",
            "Store the offsets as int64",
        )
        return
    d2t = d2t.astype(np.int64)
    if size is not None and len(d2t) != size:
        yield Finding(
            "EY-D2T-SIZE",
            Severity.ERROR,
            f"d2t has {len(d2t):,} entries, the draft vocabulary {size:,}",
            "Engines refuse to load it, or read past its end",
            "Take the map of the same training run; a head and its map belong together",
        )
        return
    if vocab is None or not len(d2t):
        return
    if size is not None and size == vocab and case.number("draft_vocab_size") is not None and np.any(d2t):
        yield Finding(
            "EY-D2T-FULL",
            Severity.ERROR,
            f"the draft vocabulary is the target's ({vocab:,}), yet d2t moves ids ({_quote(d2t)})",
            "A full vocabulary needs no map: " + ALMOST_NOTHING,
            "Remove d2t and t2d",
        )
        return
    yield from _judge(d2t, marks, vocab)


def _missing(size: int | None, vocab: int | None, marks: Ids | None) -> Iterator[Finding]:
    if size is None or vocab is None or size >= vocab:
        return
    remedy = "Take it from the training run: without it nobody can say which token a row of the head means"
    if marks is not None and len(marks) == size:
        remedy = "Rebuild it from t2d, which marks as many ids as the head has rows"
    yield Finding(
        "EY-D2T-MISSING",
        Severity.ERROR,
        f"there is no d2t, though the draft vocabulary ({size:,}) is smaller than the target's ({vocab:,})",
        "vLLM and SGLang then take draft ids for target ids: an accept length of about 1.1",
        remedy,
        ("vllm-project/vllm#18909",),
    )


def _judge(d2t: Ids, marks: Ids | None, vocab: int) -> Iterator[Finding]:
    import numpy as np

    place = np.arange(len(d2t))

    def fits(ids: Ids) -> bool:
        """A possible map: in range and ascending, and the one that t2d marks where there is one."""
        possible = bool(ids[0] >= 0 and ids[-1] < vocab and np.all(np.diff(ids) > 0))
        return possible and (marks is None or np.array_equal(ids, marks))

    ids = place + d2t
    seen = _quote(d2t)
    zeros = not np.any(d2t) and len(d2t) < vocab
    counting = np.array_equal(d2t, place) and len(d2t) >= SUSPICIOUS and (marks is None or not fits(ids))
    if fits(ids) and not zeros and not counting:
        strictly = len(d2t) >= SUSPICIOUS and bool(np.all(np.diff(d2t) > 0))
        if strictly and marks is None and fits(d2t):
            yield Finding(
                "EY-D2T-AMBIGUOUS",
                Severity.WARNING,
                f"d2t ({seen}) is a possible map both as offsets and as absolute ids, and there is no t2d to decide",
                "Engines read offsets. If these are ids: " + ALMOST_NOTHING,
                "Compare with the training run's map, or replay the draft under both",
            )
            return
        prefix = int(np.flatnonzero(d2t)[0]) if np.any(d2t) else len(d2t)
        if prefix > 1:
            yield Finding(
                "EY-D2T-ZERO-PREFIX",
                Severity.OK,
                f"the first {prefix:,} offsets are zero because the first {prefix:,} draft ids are the target's own "
                f"({seen}): this is right",
                "Leave it as it is: subtracting arange from such a map would break it",
            )
        return
    if zeros:
        known = marks is not None
        if marks is not None and np.array_equal(ids, marks):
            yield Finding(
                "EY-D2T-PREFIX-VOCABULARY",
                Severity.WARNING,
                f"the draft vocabulary is the first {len(d2t):,} of {vocab:,} ids (d2t is all zeros, t2d agrees)",
                "Seldom meant: a tokenizer's first ids are not the most frequent tokens",
                "Count the target's own answers (eyas vocab) and train with that map",
                ("verl-project/verl-SpeCo#66",),
            )
        else:
            yield Finding(
                "EY-D2T-ZEROS",
                Severity.ERROR if known else Severity.WARNING,
                "d2t is all zeros, so draft id i is read as target id i" + (", but t2d marks others" if known else ""),
                ALMOST_NOTHING,
                "Rebuild d2t from t2d" if known else "Take the map of the training run; was one ever written?",
                ("verl-project/verl-SpeCo#66",),
            )
        return
    if counting:
        yield Finding(
            "EY-D2T-ARANGE",
            Severity.ERROR,
            f"d2t is 0, 1, 2, ...: read as offsets, draft id i means 2i, up to {2 * len(d2t) - 2:,} of {vocab:,}",
            ALMOST_NOTHING,
            "Rebuild d2t from t2d or from the training run; a map of the first ids would be all zeros",
            ("verl-project/verl-SpeCo#67",),
        )
    elif fits(d2t):
        yield Finding(
            "EY-D2T-ABSOLUTE",
            Severity.ERROR,
            f"d2t holds absolute target ids ({seen}), "
            + ("exactly those that t2d marks" if marks is not None else "ascending and in range")
            + f"; read as offsets they reach {int(ids.max()):,} of {vocab:,}",
            ALMOST_NOTHING + ", or an index out of range",
            "Subtract arange(D), once",
            ENGINES_READ,
        )
    elif fits(ids + place):
        yield Finding(
            "EY-D2T-TWICE",
            Severity.ERROR,
            f"arange was subtracted twice ({seen}): d2t + arange(D) is a right map"
            + (", exactly the one that t2d marks" if marks is not None else ""),
            ALMOST_NOTHING,
            "Add arange(D) once: that undoes the needless fix",
            ENGINES_READ,
        )
    else:
        yield from _plainly_wrong(d2t, ids, marks, vocab)


def _plainly_wrong(d2t: Ids, ids: Ids, marks: Ids | None, vocab: int) -> Iterator[Finding]:
    """No known mistake explains the numbers: say what is wrong with them."""
    import numpy as np

    whole = marks is not None and len(marks) == len(d2t)
    remedy = "Rebuild d2t from t2d, if that is of the same run" if whole else "Take the map of the training run"
    outside = (ids < 0) | (ids >= vocab)
    if np.any(outside):
        first = int(np.flatnonzero(outside)[0])
        yield Finding(
            "EY-D2T-RANGE",
            Severity.ERROR,
            f"{int(outside.sum()):,} of {len(d2t):,} entries lead out of the target's {vocab:,} ids, first "
            f"d2t[{first}] = {int(d2t[first])}, which makes id {int(ids[first]):,}",
            "llama.cpp refuses it; others read another token, or memory that is not theirs",
            remedy,
            ("mobilint/mblt-model-zoo#110",),
        )
        return
    values, counts = np.unique(ids, return_counts=True)
    if len(values) < len(ids):
        twice = int(values[counts > 1][0])
        yield Finding(
            "EY-D2T-DUPLICATE",
            Severity.ERROR,
            f"{len(ids) - len(values):,} draft ids mean a token that another one means, first target id {twice:,} "
            f"({_quote(d2t)})",
            "llama.cpp refuses it; elsewhere the tokens that are lost can never be drafted",
            remedy,
        )
        return
    if np.any(np.diff(ids) < 0):
        same = marks is not None and np.array_equal(values, marks)
        first = int(np.flatnonzero(np.diff(ids) < 0)[0]) + 1
        yield Finding(
            "EY-D2T-UNSORTED",
            Severity.WARNING,
            f"the target ids do not ascend, first at draft id {first:,}" + ("; t2d marks the same ids" if same else ""),
            "Engines do not mind if the head's rows are in this order; a map rebuilt from t2d would be in another one",
            "Compare with the training run's map before changing anything",
        )
        if same or marks is None:
            return
    if marks is not None:
        missing = np.setdiff1d(marks, values)
        extra = np.setdiff1d(values, marks)
        yield Finding(
            "EY-D2T-T2D",
            Severity.ERROR,
            f"d2t and t2d are of different maps: t2d marks {len(marks):,} ids, d2t makes {len(values):,}; "
            f"{len(missing):,} only in t2d, {len(extra):,} only in d2t"
            + (f", first {int(extra[0]):,}" if len(extra) else ""),
            "One of them is of another run; if it is d2t: " + ALMOST_NOTHING,
            "Restore both from the run that trained the head",
        )


def _quote(d2t: Ids) -> str:
    text = f"it begins {d2t[:4].tolist()}"
    return text + (f", d2t[1000] = {int(d2t[1000])}" if len(d2t) > 1000 else "")
