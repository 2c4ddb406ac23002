"""Does a draft go together with its target and with an engine, as it would be launched? Asked before anything starts.

    for warning in check(launch): ...

What cannot start is refused, and so is what would serve another model than was trained, which starts, answers rightly
and accepts little.   pytest tests/test_serve_command.py
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..draft.dialects import Reading
from ..draft.directory import check_target, read_draft
from ..engines.compare import Difference, differences
from ..engines.launch import options
from ..engines.profiles import profile
from ..engines.reading import EngineReading, Seen
from ..errors import BadInput, Mismatch
from ..target.facts import TargetFacts, read_facts
from .launch import Launch
from .prepare import IR, as_it_is, hugging_face

APPLIED = ('"method": "eagle3"', "--spec-type", "hidden_layers_list")  # needs that the command, or `prepare`, meets
AS_IT_IS = ("vllm", "sglang")  # they read the directory itself; the others need it converted, which refuses
LIMIT = "--max-model-len "  # a need that Launch.context must meet


def check(launch: Launch, *, force: bool = False, here: bool = True) -> list[str]:
    """Warnings, a sentence each. `force`: another model than was trained is a warning, too. `here`: on this CPU.

    Raises BadInput or Mismatch, naming the flag or the field and the way out, for what is refused.
    """
    facts = target_facts(launch)
    if facts is not None and facts.max_position and launch.context > facts.max_position:
        raise BadInput(
            f"--context-length {launch.context}: the target's positions end at {facts.max_position}; give that or less"
        )
    if launch.draft is None:
        return []
    if as_it_is(launch.engine, launch.draft):
        return _converted(launch, facts)
    reading = read_draft(launch.draft, _config_folder(launch.target))
    if facts is not None:
        check_target(reading, facts.vocab_size, facts.hidden_size, launch.target)
    warnings = _fingerprint(launch, reading, force)
    read, found = as_launched(launch, reading, facts)
    refused = [d for d in found if d.certain]
    who = profile(launch.engine).name
    if any(d.what == "start" for d in found):
        why = _sentences(refused) + _by_options(launch, reading, facts, refused)
        raise Mismatch(f"{launch.draft}: {who} would not serve it. {why}")
    if refused and (not force or launch.engine not in AS_IT_IS):
        anyway = ". --force serves it all the same" if launch.engine in AS_IT_IS else ""
        what = f"{who} would serve another model than was trained. {_sentences(refused)}{anyway}"
        raise Mismatch(f"{launch.draft}: {what}{_by_options(launch, reading, facts, refused)}")
    warnings += [d.sentence for d in found]
    return warnings + _needs(launch, read.needs if read is not None else (), force, here)


def as_launched(
    launch: Launch, reading: Reading, facts: TargetFacts | None
) -> tuple[EngineReading | None, list[Difference]]:
    """(the reading, what differs from what was trained); for engines with a format of their own there is a plan only.

    Raises NotExpressible for latent attention where it would have to be converted.
    """
    if launch.engine in AS_IT_IS:
        read = profile(launch.engine).read(Seen(reading.folder, facts, flags(launch)))
        return read, differences(reading, read)
    from ..draft.dialects.spellings import SPELLINGS
    from ..export.plan import engine_differences, make_plan

    source = _config_folder(launch.target)
    weights = source if source is not None and _has_weights(source) else None
    plan = make_plan(reading, SPELLINGS[launch.engine], "keep", facts, weights)
    found = engine_differences(plan, launch.draft or source or Path(), (launch.engine,))[launch.engine]
    if weights is None:  # a copy of the target's embedding cannot be told from another one
        found = [d for d in found if d.what != "embedding"]
    return None, found


def flags(launch: Launch) -> dict[str, Any]:
    """What of the command line changes a reading; `extra` wins."""
    drafting = {"method": "eagle3", "model": str(launch.draft), "num_speculative_tokens": launch.k}
    said: dict[str, dict[str, Any]] = {
        "vllm": {"max-model-len": launch.context, "speculative-config": drafting},
        "sglang": {"context-length": launch.context, "speculative-algorithm": "EAGLE3"},
    }
    return said.get(launch.engine, {}) | options(shlex.join(launch.extra))


def longest(launch: Launch) -> int | None:
    """The longest context that both models know, in tokens; None where neither says."""
    limits = []
    facts = target_facts(launch)
    if facts is not None and facts.max_position:
        limits.append(facts.max_position)
    if launch.draft is not None and not as_it_is(launch.engine, launch.draft) and launch.engine in AS_IT_IS:
        limits.append(read_draft(launch.draft, _config_folder(launch.target)).conventions.max_position)
    return min(limits, default=None)


# ---------------------------------------------------------------- the parts


def _config_folder(target: Path) -> Path | None:
    """Where the target's config.json lies."""
    if (target / IR).is_file():
        return target if (target / "config.json").is_file() else None
    return hugging_face(target)


def target_facts(launch: Launch) -> TargetFacts | None:
    """Of its config.json; None where it has none."""
    folder = _config_folder(launch.target)
    return None if folder is None else read_facts(folder)


def _has_weights(folder: Path) -> bool:
    return any(any(folder.glob(kind)) for kind in ("*.safetensors", "*.bin")) and not (folder / IR).is_file()


def _fingerprint(launch: Launch, reading: Reading, force: bool) -> list[str]:
    """Raises Mismatch where eyas.json names another target than the one at hand."""
    told = (reading.folder.eyas or {}).get("target") or {}
    declared = told.get("target")
    folder = _config_folder(launch.target)
    if not declared or folder is None or not _has_weights(folder):
        return []
    from ..target.source import other_target

    other = other_target(declared, told.get("ends") or "", folder)
    if other is None:
        return []
    text = f"{launch.draft} was trained for target {other[0][:16]}, {launch.target} is {other[1][:16]}"
    if not force:
        raise Mismatch(f"{text}; name the target that it was trained for (--target), or give --force")
    return [text]


def _needs(launch: Launch, needs: tuple[str, ...], force: bool, here: bool) -> list[str]:
    out = []
    for need in needs:
        if need.startswith(APPLIED):
            continue
        if need.startswith(LIMIT):
            most = need.removeprefix(LIMIT).split()[0]
            if not force:
                raise BadInput(
                    f"--context-length {launch.context}: the draft's max_position_embeddings is {most}, and past it "
                    f"{launch.engine} drafts nothing, in silence; give --context-length {most} or less, export the "
                    f"draft with its target (eyas export), or give --force"
                )
            out.append(f"{launch.engine} drafts nothing past {most} tokens")
        elif need.startswith("CUDA") and here:
            raise BadInput(f"{launch.engine} needs {need}, which is not here; --print shows the command for elsewhere")
        else:
            out.append(f"{launch.engine} needs {need}")
    return out


def _converted(launch: Launch, facts: TargetFacts | None) -> list[str]:
    """Of a draft that somebody converted."""
    draft = launch.draft
    assert draft is not None
    out = [f"{draft} is converted already: whether it is run as it was trained is not checked"]
    if launch.engine == "openvino" and "<hidden_layers_list" not in (draft / IR).read_text(errors="replace"):
        taps = f": {3}, {facts.num_layers // 2 + 1} and {facts.num_layers - 2}" if facts is not None else ""
        out.append(
            f"{draft / IR} has no hidden_layers_list, so OpenVINO takes taps one layer further than everybody's{taps}; "
            f"give the draft's own folder instead, which is converted with its taps"
        )
    return out


def _by_options(launch: Launch, reading: Reading, facts: TargetFacts | None, refused: list[Difference]) -> str:
    """A hint where it is the engine's own options that do it."""
    if not launch.extra:
        return ""
    _, without = as_launched(replace(launch, extra=()), reading, facts)
    return "" if set(refused) & set(without) else ". It is the options after `--` that do it: leave them out"


def _sentences(found: list[Difference]) -> str:
    return ". ".join(d.sentence.removeprefix(f"{d.engine}: ") for d in found)
