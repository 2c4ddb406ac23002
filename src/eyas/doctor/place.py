"""In which link of the chain it went wrong, and the verdict in two sentences.

Pure functions of their arguments.   pytest tests/test_doctor_verdict.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .finding import Severity
from .groups import group
from .verdict import BLIND, ENGINE, NOTHING, Told

if TYPE_CHECKING:
    from .located import Located
    from .measure import Measured


def where(
    told: Sequence[Told], measured: Measured | None, taus: Mapping[str, float | None], served: float | None,
    engine_off: Sequence[str], located: Located | None = None,
) -> str:  # fmt: skip
    """In which link of the chain it went wrong. taus: declared, best, training, engine names -> accept length."""
    errors = [t for t in told if t.severity is Severity.ERROR]
    confirmed = [t for t in errors if t.status == "confirmed" and t.id != ENGINE]
    elsewhere = ("EY-LAUNCH-", "EY-SERVED-", "EY-ENGINE", "EY-FEATURES-")
    in_files = any(t.status == "static" and not t.id.startswith(elsewhere) for t in errors)
    if any(t.id in (NOTHING, BLIND) for t in confirmed):
        if in_files:
            return "checkpoint"  # what the files lack is why
        trained = taus.get("training")
        return "export" if trained is not None and trained > 1.15 else "training" if len(confirmed) == 1 else "unknown"
    if confirmed:
        return group(confirmed[0].convention or "").where
    if any(t.id.startswith("EY-LAUNCH-") for t in errors):
        return "launch"
    if in_files:
        return "checkpoint"
    if any(t.id.startswith("EY-FEATURES-") for t in errors):
        return "data"
    if engine_off or any(t.id == "EY-ENGINE" for t in errors):
        return "export"
    declared, trained = taus.get("declared"), taus.get("training")
    short = _short(declared, served, located)
    if short:
        return "launch" if any(t.id.startswith("EY-LAUNCH-") for t in told) else "engine"
    if short is not None and declared is not None:
        return "training" if declared < LOW else "none"
    if trained is not None and declared is not None and declared - 1 < OTHER_TEXT * (trained - 1):
        return "data"
    return "unknown" if errors or (served is not None and measured is None) else "none"


def _short(declared: float | None, served: float | None, located: Located | None) -> bool | None:
    """Is less served than the files are worth? None where nothing was served.

    What was replayed over the same prompts decides; on other prompts only a wide gap means anything.
    """
    if located is not None and (located.off or located.settled):
        return located.off
    return None if served is None or declared is None else served - 1 < 0.75 * (declared - 1)


OTHER_TEXT = 1 / 3
"""Of what training predicted on its own held-out answers, healthy drafts keep more than this on the doctor's text (the
least seen: 0.46 of the accepted tokens a round, of a draft of minutes, predicted on eight answers)."""
LOW = 2.0
"""Accept length of four drafted tokens under which more training is the thing to do; public drafts reach 2.5 to 3.5."""
FORMS = {
    "checkpoint": "The weights are good and the files say something else about them",
    "export": "The files are right by themselves, but an engine reads them otherwise",
    "data": "What the draft is fed does not fit what it was trained on",
    "training": "The files and the engine do what they should; the draft itself is what limits",
    "launch": "The draft is right; the command that serves it is not",
    "engine": "The draft is right and read rightly; what is served falls short of it",
    "unknown": "What was given does not decide where it went wrong",
}


def summary(
    told: Sequence[Told], place: str, measured: Measured | None, taus: Mapping[str, float | None], served: float | None
) -> str:
    """The verdict in two sentences."""
    errors = [t for t in told if t.severity is Severity.ERROR]
    declared, best = taus.get("declared"), taus.get("best")
    if errors:
        first = errors[0]
        sure = "measured" if first.status == "confirmed" else "seen in the files"
        more = f" and {len(errors) - 1} more" if len(errors) > 1 else ""
        gain = ""
        if declared is not None and best is not None and best > declared + 0.005:
            gain = f" With what was measured in its place the accept length goes from {declared:.2f} to {best:.2f}."
        then = gain or f" {first.consequence[:1].upper()}{first.consequence[1:]}."
        said = "" if first.id.startswith("EY-MEASURED-") else first.evidence.split(" (")[0].split(": ")[0]
        said = f"{said.rstrip('.')}. " if said else ""  # what was measured has its own words for it below
        return f"{first.id} ({sure}){more}: {said}{FORMS.get(place, FORMS['unknown'])}.{then}"
    if place in ("engine", "launch", "export", "data"):
        return f"The draft itself is healthy (replayed accept length {_number(declared)}). {FORMS[place]}."
    if measured is None:
        return "No fault in the files. Nothing was replayed, so what the weights are worth is not known."
    if declared is not None and declared < LOW:
        return (
            f"Your draft is healthy: no other reading of it is better, and it reaches an accept length of "
            f"{declared:.2f} on this text. It is undertrained rather than broken; it needs more data, or more of the "
            f"kind that is served."
        )
    return f"Your draft is healthy. Its accept length on this text is {_number(declared)}."


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"
