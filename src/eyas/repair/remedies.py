"""From a doctor's finding to what may be done about it.

    for step in steps_for(finding, Overlay.of("draft", facts), target="path/to/target"): perform(overlay, step)

`steps_for` gives alternatives, the likeliest first, each a whole remedy whose precondition holds on these bytes.
`unrepairable` says of the others why not, and what to do instead.   pytest tests/test_repair_remedies.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import EyasError
from ..target.facts import read_facts
from . import remedies_measured, remedies_static
from .operations import perform
from .overlay import Overlay
from .situation import Situation
from .step import Step

DONE = ("ok", "info")
"""Severities that ask for nothing."""
REFERENCE = "name a checkpoint that has it with --reference"
RETRAIN = "train again, or fine-tune shortly (eyas train --init-from)"


def steps_for(
    finding: Mapping[str, Any],
    overlay: Overlay,
    *,
    target: str | Path | None = None,
    reference: str | Path | None = None,
) -> list[Step]:
    """Alternatives against one element of `diagnose()["findings"]`, the likeliest first; [] where nothing can be done.

    Each is a whole remedy, and has been performed on `overlay` without a refusal. `Step.sure` is false for what only a
    measurement may keep. target, reference: directories (a reference may be a saved map). The
    finding must be of this overlay: after a step, diagnose again.
    """
    overlay = with_target(overlay, target)
    return [
        step for step in candidates(finding, overlay, target=target, reference=reference) if not refusal(overlay, step)
    ]


def candidates(
    finding: Mapping[str, Any],
    overlay: Overlay,
    *,
    target: str | Path | None = None,
    reference: str | Path | None = None,
) -> list[Step]:
    """As `steps_for`, with those whose precondition does not hold."""
    status, severity = finding.get("status", "static"), finding.get("severity")
    suspected = status == "inconclusive" and severity == "warning"  # the files say so, and one text did not decide it
    if (not suspected and status not in ("static", "confirmed")) or (status == "static" and severity in DONE):
        return []
    s = Situation(
        finding, with_target(overlay, target), Path(target) if target else None, Path(reference) if reference else None
    )
    measured = remedies_measured.steps(s) if s.confirmed else []
    known = [(step.operation, step.arguments) for step in measured]
    return [*measured, *(x for x in remedies_static.steps(s) if (x.operation, x.arguments) not in known)]


def known(finding: Mapping[str, Any]) -> bool:
    """Is there an operation that might mend it? Whether it may be done here is for `steps_for` to say."""
    convention = str(finding.get("convention") or "")
    measured = convention in remedies_measured.REMEDIES or convention.startswith("name of ")
    return finding.get("id") in remedies_static.REMEDIES or (finding.get("status") == "confirmed" and measured)


def refusal(overlay: Overlay, step: Step) -> str:
    """Why a step must not be done here, "" where it may."""
    try:
        perform(overlay, step)
    except EyasError as error:
        return str(error)
    return ""


def refusals(
    finding: Mapping[str, Any],
    overlay: Overlay,
    *,
    target: str | Path | None = None,
    reference: str | Path | None = None,
) -> dict[str, str]:
    """Step -> why it must not be done, for those candidates that `steps_for` leaves out."""
    overlay = with_target(overlay, target)
    found = (
        (step, refusal(overlay, step)) for step in candidates(finding, overlay, target=target, reference=reference)
    )
    return {str(step): why for step, why in found if why}


def with_target(overlay: Overlay, target: str | Path | None) -> Overlay:
    """The overlay with the target's facts, which preconditions ask for."""
    return overlay if overlay.facts is not None or target is None else replace(overlay, facts=read_facts(Path(target)))


# ---------------------------------------------------------------- what no operation mends


BY_CONVENTION = {
    "state_shift": "the states were recorded beside the wrong tokens, and the weights have learnt it: extract the "
    "features again and train, or serve with an engine that shifts them likewise",
    "label_shift": f"the head was trained to say another token than the next one, which no file can say: {RETRAIN}",
    "norm_before_head": f"no checkpoint and no engine can leave out the norm before the head: {RETRAIN} "
    "with --set change.norm_before_head=true",
    "rope_step": "it was trained with positions that stand still while it drafts, and every engine advances them: "
    f"{RETRAIN} with --set change.rope_step=1",
    "embedding_scale": f"the embedding is the target's, which engines put as it is: {RETRAIN} "
    "with --set change.embedding_scale=1",
    "fc_norm": f"the weights of fc_norm are not in the file, and three norms of ones are no guess to keep: {REFERENCE}",
    "head": f"there is no target and no reference to take a head from: give --target, or {REFERENCE}",
    "rope_type": "the numbers of the target's RoPE are needed: give --target",
}
BY_ID = {
    "EY-D2T-OTHER": "the map belongs to another run, and the text shows only where its commonest tokens went: "
    "name this run's d2t.pt, vocab_mapping.pt or a checkpoint of it with --reference",
    "EY-D2T-MISSING": f"neither d2t nor t2d says which token a row of the head means: {REFERENCE}",
    "EY-D2T-T2D": f"d2t and t2d are of different maps, and the files do not say which was trained: {REFERENCE}",
    "EY-D2T-PREFIX-VOCABULARY": "the map is what it was trained with, only badly chosen: count the target's own "
    "answers (eyas vocab) and train with that map",
    "EY-TENSOR-MISSING": f"the numbers are not in the files: {REFERENCE}, or export again from where it was trained",
    "EY-TENSOR-NAN": f"what stood there is lost: {REFERENCE}, an earlier one of the same run",
    "EY-TENSOR-ZERO": f"what stood there is lost: {REFERENCE}",
    "EY-TENSOR-FRESH": f"the numbers are random, nobody trained them or they were made anew: {REFERENCE}",
    "EY-TENSOR-DTYPE": "it is quantised or damaged, and its scales are not known here: export the weights in bfloat16, "
    f"or {REFERENCE}",
    "EY-NORM-UNTRAINED": f"a freshly initialised model was saved: {REFERENCE}, or export the finished training run",
    "EY-MEASURED-NOTHING": "under no reading do the weights know the target's text: look for those of the finished "
    f"training run, and {REFERENCE} to find the tensor that is wrong",
    "EY-MEASURED-BLIND": "the weights do not use the target's states: look at fc, hidden_norm and the halves of q, k "
    f"and v, and {REFERENCE}",
    "EY-WIDTH-TARGET": "the draft was trained for a target of another width: name its own target",
    "EY-TAPS-WIDTH": "what fc reads is no whole number of states: the draft is of another target, or fc of another one",
    "EY-FILES-BESIDE": "which of the files was meant is not in them: move the others elsewhere",
    "EY-HEAD-MISSING": f"there is no head in the file: {REFERENCE}, or give --target to try the target's rows",
    "EY-NORM-MISSING": f"the weights of the norm are not in the file: {REFERENCE}, or give --target so that the draft "
    "can be measured without it",
    "EY-MEASURED-LONG": f"it falls off in long texts as it was trained: {RETRAIN} on longer ones",
}
BY_BEGINNING = {
    "EY-D2T-": f"the right map is not in the files: {REFERENCE}, or its d2t.pt or vocab_mapping.pt",
    "EY-T2D-": f"t2d can be rebuilt only from a d2t that is a right map, for the right target: {REFERENCE}",
    "EY-VOCAB-TARGET": "the draft's map and head are of another vocabulary than this target's: name its own target",
    "EY-TENSOR-SHAPE": f"no sizes fit all of its tensors, so they are of several drafts: {REFERENCE}",
    "EY-READ": "config and tensors contradict each other in a way that no size mends: correct what the message names",
    "EY-EMBED-": "the draft is of another width than its target and must own its embedding, which only the run that "
    "trained it has",
    "EY-UNDECIDED": "nothing speaks against what is declared: more text, or a longer trained draft, tells more",
    "EY-LAUNCH-": "the files are not at fault but the command that serves them: change its flags",
    "EY-SERVED-": "it was seen in what a server reports, not in the files: replay the draft with --target",
    "EY-FEATURES-": "the recorded features are at fault, not the draft: record them again (eyas extract)",
    "EY-NOT-EVALUATED": "nothing was found because nothing was looked at: supply what is named",
    "EY-AS-READ": "the engine reads no file in which this could be said: choose another engine, or fine-tune under its "
    "convention (eyas train --init-from, --set change.…)",
    "EY-ENGINE": "the engine reads no file in which this could be said: choose another engine, or fine-tune under its "
    "convention (eyas train --init-from, --set change.…)",
    "EY-TAPS-": "the layers that it was trained on are not in the files: give --target so that the likely ones can be "
    "measured, or look them up where it was trained",
}


def unrepairable(finding: Mapping[str, Any]) -> str | None:
    """Why no operation mends this finding, with the way out, in one sentence; None where one always may.

    Some are mended by what only a reference, or the target, knows: ask where `steps_for` gave nothing.
    """
    id_, convention = str(finding.get("id", "")), str(finding.get("convention") or "")
    if convention == "rope_step" and finding.get("best") == 1:
        return None
    if convention in ("state_shift", "label_shift", "norm_before_head", "rope_step"):
        return BY_CONVENTION[convention]
    if id_ in BY_ID:
        return BY_ID[id_]
    for begin, why in BY_BEGINNING.items():
        if id_.startswith(begin):
            return why
    if convention.startswith("tensor "):
        return f"what stood there is lost: {REFERENCE}"
    return BY_CONVENTION.get(convention)
