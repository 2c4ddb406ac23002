"""RunConfig: everything that decides a run, one pydantic model read from YAML; errors name file, field and value.

A recipe names only what differs from the defaults below; `--override train.steps=100` changes one value from the
command line. YAML 1.1 reads 1e-3, without a dot, as text; pydantic makes a number of it where a number belongs.

    pytest tests/test_config.py
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import pydantic
import yaml
from pydantic import BaseModel, ConfigDict, Field

from eyas.errors import BadInput
from eyas.machine import Precision, choose_precision
from eyas.train.settings import TrainSettings
from eyas.untrusted import LONGEST_RECIPE, parse_yaml, text

RECIPES = ("demo", "quick", "long")


class Section(BaseModel):
    """A section of a recipe: unknown fields are errors, values do not change once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class TargetConfig(Section):
    """The frozen large model."""

    source: str = "smollm2"
    """A Hugging Face directory, a .gguf file, a hub id, or `smollm2` for the embedded default."""
    device: str = "cpu"
    """Where target and draft run: cpu, cuda, cuda:1."""
    dtype: Precision = "float32"
    """Precision in which the target answers and its states are computed. `auto`: bfloat16 where the machine has
    instructions for it, else float32. The proof is always in float32."""
    trust_remote_code: bool = False
    """Run modelling code that comes with the target."""
    template_args: dict[str, bool | int | float | str | None] = {}
    """For the chat template, when the target answers, when its states are computed and in the proof:
    `target.template_args.enable_thinking=false`."""


class AskConfig(Section):
    """Requests that the target writes itself, as further training prompts."""

    count: int | None = Field(default=None, ge=1)
    """Messages to begin; most are usable. None are asked for when absent."""
    openings: list[str] = Field(default=[""], min_length=1)
    """First words of a message, taken in turn: what the draft will be used for. An empty one leaves the choice open."""
    max_new_tokens: int = Field(default=48, ge=1)
    """Longer messages are shortened to their last whole sentence or line."""
    temperature: float = Field(default=1.0, gt=0.0)
    top_k: int = Field(default=50, ge=1)


class PromptsConfig(Section):
    """Where the training prompts come from."""

    sources: list[str] = ["builtin"]
    """Prompt files (JSONL, Parquet), dataset ids, or `builtin` for those of the packages in requirements-data.txt."""
    limit: int | None = Field(default=None, ge=1)
    """At most so many prompts, after shuffling with the run's seed."""
    per_source: int | None = Field(default=None, ge=1)
    """At most so many of each source, the target's own prompts (`ask`) being one, so that none drowns the others."""
    max_chars: int | None = Field(default=None, ge=1)
    """Leave longer prompts out. Long ones cost much of the target's time and bring no more answer tokens."""
    skip_bad: bool = False
    """Set malformed lines aside and count them instead of stopping."""


class RegenerateConfig(Section):
    """How the target answers the prompts."""

    conversations: str | None = None
    """A conversations file to use as it is; nothing is generated then."""
    base_url: str | None = None
    """An OpenAI-compatible server that answers instead of the local model."""
    model: str | None = None
    """The model's name on that server."""
    max_new_tokens: int = Field(default=192, ge=1)
    temperature: float = Field(default=0.0, ge=0.0)
    """0 is greedy."""
    slots: int = Field(default=96, ge=1)
    """Answers that the local model generates side by side."""
    concurrency: int = Field(default=32, ge=1)
    """Requests that a server gets side by side."""
    max_supervised_tokens: int | None = Field(default=None, ge=1)
    """Stop with the prompt that brings so many answer tokens together."""
    record_states: bool = True
    """Keep the local target's states while it answers, so that extract need not compute them (equal up to rounding)."""
    keep_states: bool = False
    """Leave them on the disk once the features are made, for another extraction with the same taps."""


class ExtractConfig(Section):
    """How the target's states are recorded."""

    taps: list[int] | None = None
    """Residual streams that feed the draft; the default is (2, n//2, n-3) of a target with n blocks."""
    heldout: int = Field(default=64, ge=1)
    """Conversations kept out of training, for the predicted accept length."""
    max_length: int | None = Field(default=None, ge=8)
    """Conversations longer than this, in tokens, are set aside; the default is the target's context."""
    batch_tokens: int = Field(default=4096, ge=1)
    """Tokens of one forward pass, padding included."""
    supervise: Literal["answers", "all"] = "answers"
    """What training learns from: the answers, or all that follows the template's opening, prompts included. What is
    held out is always answers."""
    skip_bad: bool = False
    """Set conversations that cannot be used aside and count them instead of stopping."""


class VocabConfig(Section):
    """How the draft vocabulary is chosen."""

    size: int = Field(default=8192, ge=1)
    """Ids in the draft vocabulary (D); at most the target's, then the map is the identity."""
    always: list[int] = []
    """Target ids that are in it whatever their counts; special tokens always are."""


class ExportConfig(Section):
    """How the draft is written for engines."""

    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """How weights are stored."""
    engines: list[str] = []
    """Refuse a draft that one of these cannot run as trained: sglang, vllm, llamacpp."""


class ProveConfig(Section):
    """How the finished draft is measured."""

    sets: list[str] = ["mt_bench", "humaneval", "gsm8k"]
    """Held-out prompt sets, by name or as prompt files."""
    prompts: int = Field(default=16, ge=1)
    """The first so many of each set."""
    max_new_tokens: int = Field(default=64, ge=1)
    draft_tokens: int = Field(default=4, ge=1)
    """Tokens drafted a round (K)."""
    temperature: float = Field(default=0.0, ge=0.0)
    """0 is greedy."""
    timed: int = Field(default=1, ge=0)
    """Prompts of each set that run one at a time, to measure the speed-up; the others run side by side."""


class RunConfig(Section):
    """One run from prompts to a proven draft."""

    name: str = "run"
    """For the reader only."""
    seed: int = 0
    """Of every random choice in the run."""
    target: TargetConfig = TargetConfig()
    ask: AskConfig = AskConfig()
    prompts: PromptsConfig = PromptsConfig()
    regenerate: RegenerateConfig = RegenerateConfig()
    extract: ExtractConfig = ExtractConfig()
    vocab: VocabConfig = VocabConfig()
    train: TrainSettings = TrainSettings()
    export: ExportConfig = ExportConfig()
    prove: ProveConfig = ProveConfig()

    def on_this_machine(self) -> RunConfig:
        """With every precision that is left to the machine decided: a run depends on what it computed in."""
        device = self.target.device
        target = self.target.model_copy(update={"dtype": choose_precision(self.target.dtype, device)})
        train = self.train.model_copy(update={"dtype": choose_precision(self.train.dtype, device)})
        return self.model_copy(update={"target": target, "train": train})


# ---------------------------------------------------------------- reading


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML that refuses a key given twice: the second would silently win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key '{key}' is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> RunConfig:
    """Read a recipe: a YAML file, or the name of a shipped one (`demo`, `long`). Relative paths in it are the caller's.

    overrides: `section.field=value`, the value in YAML (`1e-3`, `[2, 15, 27]`, `null`). Raises BadInput naming file,
    field and value.
    """
    where = str(path)
    if where in RECIPES and not Path(where).exists():
        source = (resources.files("eyas") / "recipes" / f"{where}.yaml").read_text(encoding="utf-8")
        where = f"recipe '{where}'"
    else:
        try:
            source = text(path, LONGEST_RECIPE)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise BadInput(
                f"{path} cannot be read: {reason}. Give a YAML file or a shipped recipe ({', '.join(RECIPES)})."
            ) from error
    try:
        values = parse_yaml(source, _UniqueKeyLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise BadInput(
            f"{where}{line}: not valid YAML ({getattr(error, 'problem', None) or error}); mend the line."
        ) from error
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise BadInput(f"{where}: expected sections like 'target:' and 'train:', found a {type(values).__name__}.")
    for override in overrides:
        apply_override(values, override)
    return validate(values, f"{where} with --override" if overrides else where)


def apply_override(values: dict[str, Any], override: str) -> None:
    """Set `a.b=value` in nested dicts, in place. Raises BadInput for anything that is not of that form."""
    key, equals, given = override.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise BadInput(f"--override '{override}': expected section.field=value, for example train.steps=100.")
    try:
        value = parse_yaml(given)
    except yaml.YAMLError as error:
        raise BadInput(f"--override '{override}': '{given}' is not a YAML value; quote it.") from error
    inner = values
    for part in path[:-1]:
        if inner.get(part) is None:
            inner[part] = {}
        inner = inner[part]
        if not isinstance(inner, dict):
            raise BadInput(
                f"--override '{override}': '{part}' is a single value, not a section; name the field itself."
            )
    inner[path[-1]] = value


def validate(values: dict[str, Any], where: str = "configuration") -> RunConfig:
    """Check values against RunConfig. Raises BadInput that names every wrong field, its value and what was expected."""
    try:
        return RunConfig.model_validate(values)
    except pydantic.ValidationError as error:
        lines = [_explain(item) for item in error.errors()]
        raise BadInput(f"{where}: " + "; ".join(lines) + ".") from error


def _explain(item: Any) -> str:
    """One wrong field as a clause."""
    location = [str(part) for part in item["loc"]]
    name = ".".join(location)
    if item["type"] == "extra_forbidden":
        known = _fields_at(location[:-1])
        near = difflib.get_close_matches(location[-1], known, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known there: {', '.join(known)}"
        return f"unknown field '{name}' ({hint})"
    message = item["msg"][0].lower() + item["msg"][1:]
    return f"'{name}' is {item['input']!r}: {message}"


def _fields_at(location: Sequence[str]) -> list[str]:
    """Names of the fields of the section at `location`."""
    model: type[BaseModel] = RunConfig
    for part in location:
        inner = model.model_fields[part].annotation if part in model.model_fields else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        model = inner
    return list(model.model_fields)
