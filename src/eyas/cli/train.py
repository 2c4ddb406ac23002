"""`eyas train`: features and a vocabulary map to a draft.

eyas train runs/demo/extract --vocab runs/demo/vocab --target smollm2 --out runs/demo/train
"""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path
from typing import Any

import click

from eyas.terminal import echo

HELP = """Train a draft on FEATURES (a folder written by `eyas extract`).

The same command goes on where a killed one stopped and ends in the same weights. OUT gets draft/ (the canonical draft
directory in float32; `eyas export` rounds it for engines), metrics.jsonl, tensorboard/ and checkpoints/. With
--held-out, the accept length is predicted while training, by chain drafting on features kept out of it.

Under torchrun several processes, on any number of machines that see the same files, train one draft: the same steps
over the same documents as one process, shared out. Each holds the whole draft (DDP), or a shard of its weights and
optimizer with --set parallel=fsdp. A killed run goes on with any other number of processes.

Settings come from --config (the `train:` section of a recipe, or a whole recipe) and from --set, which wins.

\b
Examples:
  eyas train runs/demo/features --vocab runs/demo/vocab --target smollm2 --out runs/demo/train
  eyas train FEATURES --vocab VOCAB --target T --held-out HELDOUT --set epochs=4 --set lr=2e-3 --out RUN
  eyas train FEATURES --target T --init-from OLD_DRAFT --set epochs=1 --out RUN    # fine-tune, keeps its map
  torchrun --nproc-per-node 8 -m eyas train FEATURES --vocab VOCAB --target T --device cuda --out RUN
"""


@click.command("train", help=HELP)
@click.argument("features", required=False, type=click.Path(path_type=Path))
@click.option("--target", help="Folder, .gguf file, hub id or 'smollm2': embedding, head, final norm.")
@click.option(
    "--vocab", "vocab", type=click.Path(path_type=Path), help="Vocabulary map (folder or file) of `eyas vocab`."
)
@click.option("--held-out", type=click.Path(path_type=Path), help="Features kept out of training, to predict on.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder of the run.")
@click.option("--config", type=click.Path(path_type=Path), help="YAML with the settings, or with a `train:` section.")
@click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE", help="One setting (see --show-settings); repeatable."
)
@click.option("--init-from", type=click.Path(path_type=Path), help="A draft to go on from; its map is kept.")
@click.option(
    "--track",
    multiple=True,
    type=click.Choice(["tensorboard", "wandb", "trackio"]),
    help="Where metrics go beside metrics.jsonl (train.track); repeatable  [default: tensorboard].",
)
@click.option("--seed", default=0, show_default=True, help="Of initial weights and data order.")
@click.option(
    "--device", default="cpu", show_default=True, help="cpu, cuda (under torchrun: one for each process), cuda:1."
)
@click.option("--show-settings", is_flag=True, help="Print all settings with their values and meaning, and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: counts and predicted accept length.")
@click.pass_context
def command(
    ctx: click.Context,
    features: Path | None,
    target: str | None,
    vocab: Path | None,
    held_out: Path | None,
    out: Path | None,
    config: Path | None,
    settings: tuple[str, ...],
    init_from: Path | None,
    track: tuple[str, ...],
    seed: int,
    device: str,
    show_settings: bool,
    as_json: bool,
) -> None:
    chosen = read_settings(config, settings, init_from, track)
    if show_settings:
        show(chosen, as_json)
        return
    for name, value in {"features": features, "target": target, "out": out}.items():
        if value is None:
            param = next(p for p in command.params if p.name == name)
            raise click.MissingParameter(ctx=ctx, param=param)
    assert features is not None and out is not None
    from eyas.train.trackers import check_trackers

    check_trackers(chosen.track)
    from eyas.features.reader import FeatureSet
    from eyas.target.source import resolve_target
    from eyas.train.loop import train
    from eyas.vocab import VocabMap

    counts = train(
        FeatureSet.open(features), out, target_dir=resolve_target(target, part="ends"),
        vocab_map=VocabMap.load(vocab) if vocab else None,
        held_out=FeatureSet.open(held_out) if held_out else None, settings=chosen, seed=seed, device=device,
    )  # fmt: skip
    if os.environ.get("RANK", "0") != "0":  # of several processes one speaks
        return
    if as_json:
        echo(json.dumps({**counts, "draft": str(out / "draft")}))
        return
    echo(f"{counts['steps']} steps over {counts['tokens_seen']:,} tokens; the draft is in {out / 'draft'}")
    if predicted := counts.get("predicted"):
        rates = " ".join(f"{rate:.3f}" for rate in predicted["per_position"])
        echo(f"predicted accept length {predicted['accept_length']:.3f} at K = {predicted['draft_tokens']} "
                   f"(per position {rates}; {predicted['definition']})")  # fmt: skip


def show(chosen: Any, as_json: bool) -> None:
    """All settings with their values; for people with their meaning, wrapped to the terminal."""
    if as_json:
        echo(json.dumps(chosen.model_dump(mode="json")))
        return
    formatter = click.HelpFormatter(max_width=110)
    rows = []
    for name, info in type(chosen).model_fields.items():
        value = getattr(chosen, name)
        text = " ".join(map(str, value)) if isinstance(value, tuple) else "none" if value is None else str(value)
        rows.append((f"{name} = {text}", " ".join((info.description or "").split())))
    formatter.write_dl(rows, col_max=34)
    echo(formatter.getvalue().rstrip())


def read_settings(
    config: Path | None, assignments: tuple[str, ...], init_from: Path | None, track: tuple[str, ...] = ()
) -> Any:
    """TrainSettings from a YAML file and NAME=VALUE pairs. Raises BadInput naming the field and the value."""
    import pydantic
    import yaml

    from eyas.errors import BadInput
    from eyas.train.settings import TrainSettings
    from eyas.untrusted import LONGEST_RECIPE, parse_yaml, text

    values: dict[str, Any] = {}
    if config is not None:
        try:
            read = parse_yaml(text(config, LONGEST_RECIPE)) or {}
        except OSError as error:
            raise BadInput(
                f"--config {config} cannot be read ({error.strerror}); name a YAML file of settings"
            ) from error
        except (ValueError, yaml.YAMLError) as error:
            raise BadInput(f"--config {config} is not valid YAML ({' '.join(str(error).split())}); mend it") from error
        section = (read.get("train", read) or {}) if isinstance(read, dict) else None
        if not isinstance(section, dict):
            raise BadInput(f"{config}: expected settings like 'lr: 0.004', or a section 'train:' with them")
        values = dict(section)
    for assignment in assignments:
        name, equals, given = assignment.partition("=")
        if not equals:
            raise BadInput(f"--set {assignment!r}: expected NAME=VALUE, for example --set lr=2e-3")
        try:
            outer, dot, inner = name.strip().partition(".")
            if dot:  # change.NAME
                values[outer] = {**(values.get(outer) or {}), inner: parse_yaml(given)}
            else:
                values[outer] = parse_yaml(given)
        except yaml.YAMLError as error:
            raise BadInput(f"--set {assignment!r}: {given!r} is no YAML value; quote what is meant as text") from error
    if init_from is not None:
        values["init_from"] = str(init_from)
    if track:
        values["track"] = track
    try:
        return TrainSettings.model_validate(values)
    except pydantic.ValidationError as error:
        lines = [_wrong(item, list(TrainSettings.model_fields)) for item in error.errors()]
        raise BadInput(
            f"{config or 'training settings'}: {'; '.join(lines)}. `eyas train --show-settings` lists all settings"
        ) from error


def _wrong(item: Any, known: list[str]) -> str:
    """One setting that pydantic refused, as a clause."""
    name = ".".join(map(str, item["loc"]))
    if not name:
        return str(item["msg"])
    if item["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, known, n=1)
        return f"there is no setting {name!r}" + (f" (did you mean {near[0]!r}?)" if near else "")
    return f"{name} = {item['input']!r}: {item['msg'][0].lower()}{item['msg'][1:]}"
