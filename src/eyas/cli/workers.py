"""Options of the data stages: who does the work (`--engine`, `--ray-address`, `--workers`), `--template-arg`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click


def engine_names(text: str, known: tuple[str, ...]) -> tuple[str, bool]:
    """`--engine`: who computes (the first of `known` by default), and whether Ray spreads it: `ray`, `vllm,ray`."""
    names = [part.strip() for part in text.split(",")]
    computing = [name for name in names if name != "ray"]
    if len(computing) > 1 or len(set(names)) < len(names) or not set(computing) <= set(known):
        raise click.UsageError(
            f"--engine {text}: expected {' or '.join(known)}, on workers with `ray` beside it, for example "
            f"{known[-1]},ray"
        )
    return (computing[0] if computing else known[0]), "ray" in names


def ray_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--ray-address`, `--workers`, `--worker-cpus` and `--worker-gpus`."""
    for option in (
        click.option("--worker-gpus", type=click.FloatRange(min=0), metavar="N", help="GPUs of each [default: 0]."),
        click.option("--worker-cpus", type=click.FloatRange(min=0.1), metavar="N", help="Cores of each [default: 1]."),
        click.option("--workers", type=click.IntRange(min=1), metavar="N", help="Workers on Ray [default: 1]."),
        click.option(
            "--ray-address",
            metavar="ADDRESS",
            help="A Ray cluster: `auto`, HOST:6379 or ray://HOST:10001 [default: this machine].",
        ),
    ):
        command = option(command)
    return command


def template_options(more: str = "") -> Callable[..., Any]:
    """`--template-arg`, as `template_args`."""
    return click.option(
        "--template-arg",
        "template_args",
        multiple=True,
        metavar="KEY=VALUE",
        help=f"For the chat template, for example enable_thinking=false; repeatable.{more}",
    )


def spread(on_ray: bool, address: str | None, workers: int | None, cpus: float | None, gpus: float | None) -> Any:
    """What extract and regenerate call `spread`; None without Ray."""
    if not on_ray:
        if any(value is not None for value in (address, workers, cpus, gpus)):
            raise click.UsageError("--ray-address and --workers go with --engine ray; add it, or leave them out")
        return None
    from eyas.on_ray import Cluster

    return Cluster(address, workers or 1, cpus or 1.0, gpus or 0.0).spread
