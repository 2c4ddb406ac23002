"""The model card of a draft: README.md with what eyas.json says, for people who find it on the hub.

    card(eyas, About("me/my-draft", "me/my-draft", "org/target"), proof)         eyas export RUN OUT --card

Nothing in it is written by hand: what is not known is left out, and nothing is claimed that no file says.
    pytest tests/test_hub.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..artifacts import MANIFEST
from ..digests import sha256_file
from ..draft.directory import WEIGHTS
from ..engines.setup import ENGINES
from ..errors import BadInput, Mismatch
from ..hub import is_id, split
from ..serve.launch import Launch
from ..serve.printed import There, printed

TAGS = ("eagle3", "speculative-decoding", "draft-model", "eyas")
DEFAULT_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
RESULT = "result.json"
PROVEN = ("prove", "proof")  # where a run keeps it


@dataclass(frozen=True)
class About:
    """What a card says that no file of the draft knows."""

    title: str
    repo: str | None = None
    """OWNER/NAME on the hub; None where it is not pushed."""
    base_model: str | None = None
    """The target's hub id."""
    target: str | None = None
    """What the target was called, where it has no id."""


def hub_name(target: str | None) -> str | None:
    """The hub id of what was given as --target, without its revision; None for folders and files."""
    if target == "smollm2":
        return DEFAULT_ID
    return split(target)[0] if target is not None and is_id(target) else None


# ---------------------------------------------------------------- the proof


def proof_of(given: Path | None, source: Path, exported: Path) -> dict[str, Any] | None:
    """What `eyas prove --out` measured of this very draft: of `given` (a folder, or its result.json), else the run's.

    Raises BadInput where `given` is none, Mismatch where it is of other weights. Another draft's in the run's own
    folder is passed over.
    """
    places = [given] if given is not None else [source / name for name in PROVEN]
    for place in places:
        folder = place.parent if place.name == RESULT else place
        try:
            result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
            proven = {str(v) for k, v in json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["inputs"].items()
                      if k.startswith("draft")}  # fmt: skip
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if given is None:
                continue
            raise BadInput(
                f"--proof {given}: expected a folder that `eyas prove --out` wrote ({error}); prove the draft first"
            ) from error
        weights = {sha256_file(file) for file in (exported / WEIGHTS, source / WEIGHTS) if file.is_file()}
        if proven & weights:
            return dict(result)
        if given is not None:
            raise Mismatch(
                f"--proof {given} measured other weights than these; `eyas prove {source} --out` anew, or leave it out"
            )
    return None


# ---------------------------------------------------------------- the card


def card(eyas: Mapping[str, Any], about: About, proof: Mapping[str, Any] | None = None) -> str:
    """The whole text: front matter for the hub, then Markdown."""
    parts = [*_what(eyas, about), *_proven(proof), *_predicted(eyas), *_serving(eyas, about, proof), *_read(eyas),
             *_data(eyas), *_checking(about)]  # fmt: skip
    return f"---\n{_front(about)}\n---\n\n" + "\n\n".join(parts) + "\n"


def _front(about: About) -> str:
    from huggingface_hub import ModelCardData

    values: dict[str, Any] = {"library_name": "eyas", "pipeline_tag": "text-generation", "tags": list(TAGS)}
    if about.base_model is not None:
        values["base_model"] = about.base_model
    return str(ModelCardData(**values).to_yaml()).rstrip()


def _what(eyas: Mapping[str, Any], about: About) -> Iterator[str]:
    yield f"# {about.title.rpartition('/')[2]}"
    link = f"[{about.base_model}](https://huggingface.co/{about.base_model})"
    target = link if about.base_model else f"`{about.target}`" if about.target else "its target"
    yield (
        f"An EAGLE-3 draft model for {target}: it guesses the next tokens, the target checks them in one forward pass. "
        f"The text is the target's own, whatever the draft says; what changes is how fast it comes. It does not run "
        f"alone."
    )


def _proven(proof: Mapping[str, Any] | None) -> Iterator[str]:
    if proof is None or proof.get("tau_mean") is None:
        return
    settings = proof["settings"]
    how = f"temperature {settings['temperature']:g}" if settings["temperature"] else "greedy"
    rows = [f"| {name} | {row['tau']:.3f} | {row['low']:.2f}–{row['high']:.2f} | {row['prompts']} | {row['rounds']:,} |"
            for name, row in proof["tau"].items() if row["tau"] is not None]  # fmt: skip
    yield "## Accept length"
    yield (
        f"Measured by `eyas prove`, {settings['k']} tokens drafted a round, {how}, {settings['dtype']}: a mean of "
        f"**{proof['tau_mean']:.3f}** tokens for each forward pass of the target (1 is decoding without a draft)."
    )
    yield "\n".join(["| prompts | τ | 95 % | answers | rounds |", "|---|---|---|---|---|", *rows])
    if proof.get("lossless") is not None:
        same = f"{proof['identical']} of {proof['compared']} answers are token for token those without the draft"
        yield f"Lossless: {'yes' if proof['lossless'] else 'NO'}; {same}."


def _predicted(eyas: Mapping[str, Any]) -> Iterator[str]:
    predicted = eyas.get("predicted") or {}
    if predicted.get("accept_length") is not None:
        drafted = f" with {predicted['draft_tokens']} tokens drafted" if predicted.get("draft_tokens") else ""
        yield f"Training predicted an accept length of {predicted['accept_length']:.3f} on held-out answers{drafted}."


def _serving(eyas: Mapping[str, Any], about: About, proof: Mapping[str, Any] | None) -> Iterator[str]:
    engines = {name: differences for name, differences in (eyas.get("engines") or {}).items() if name in ENGINES}
    if not engines:
        return
    facts = (eyas.get("target") or {}).get("facts") or {}
    settings = (proof or {}).get("settings") or {}
    k = int(settings.get("k") or (eyas.get("predicted") or {}).get("draft_tokens") or 4)
    context = int(facts.get("max_position") or eyas["conventions"].get("max_position") or 4096)
    target, draft = about.base_model or "TARGET", about.repo or "DRAFT"
    there = There(target, draft, tuple(eyas["conventions"]["taps"]))
    yield "## Serving"
    for name, differences in engines.items():
        if differences:
            yield f"**{name}** does not run it as it was trained: {'; '.join(differences)}"
        else:
            launch = Launch(name, Path(target), Path(draft), k=k, dtype="auto", context=context)
            lines = "\n".join(f"    {line}" for line in "\n".join(printed(launch, there)).splitlines())
            yield f"**{name}**:\n\n{lines}"


def _read(eyas: Mapping[str, Any]) -> Iterator[str]:
    shape, conventions = eyas["shape"], eyas["conventions"]
    how = conventions.get("how") or {}
    yield "## How it is to be read"
    yield (
        f"{shape['num_layers']} layer{'s' * (shape['num_layers'] != 1)}, {shape['hidden_size']:,} wide; "
        f"{shape['draft_vocab_size']:,} of the target's {shape['vocab_size']:,} ids. It reads the residual stream of "
        f"the target after {_listed(conventions['taps'])} blocks."
    )
    rows = [f"| {name} | {_cell(value)} | {how.get(name, 'default')} |" for name, value in conventions.items()
            if name != "how" and (name == "taps" or how.get(name, "default") != "default")]  # fmt: skip
    yield "\n".join(["| convention | value | known |", "|---|---|---|", *rows])


def _data(eyas: Mapping[str, Any]) -> Iterator[str]:
    told = eyas.get("provenance") or {}
    data, lines = told.get("data") or {}, []
    if data.get("documents"):
        lines.append(
            f"{data['documents']:,} conversations, {data['tokens']:,} tokens, {data['supervised_tokens']:,} of them "
            f"supervised"
        )
    if data.get("coverage") is not None:
        lines.append(f"the draft vocabulary covers {data['coverage']:.1%} of the tokens that it was counted on")
    if told.get("steps"):
        lines.append(f"{told['steps']:,} optimizer steps over {told['tokens_seen']:,} tokens")
    if told.get("converted_from"):
        lines.append(f"converted from the {told['converted_from']} dialect; how it was trained is not known")
    prints = {name: value for name, value in (eyas.get("target") or {}).items() if isinstance(value, str)}
    if prints.get("target"):
        lines.append(f"target's fingerprint `{prints['target'][:32]}`")
    if lines:
        yield "## Training"
        yield "\n".join(f"- {line}" for line in lines)


def _checking(about: About) -> Iterator[str]:
    name = about.repo or "DRAFT"
    target = about.base_model or "TARGET"
    yield "## Checking a copy"
    yield (
        "`eyas.json` declares all of the above, with a digest of every tensor:\n\n"
        f"    eyas verify {name}\n    eyas prove {name} --target {target}\n    eyas doctor {name} --target {target}"
    )


def _listed(values: Any) -> str:
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _cell(value: Any) -> str:
    text = {True: "yes", False: "no", None: "none"}.get(value) if value is None or isinstance(value, bool) else None
    return (text or (", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value))).replace("|", "\\|")
