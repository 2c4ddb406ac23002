"""What every verb understands beside its own options: --quiet and --verbose, before or after its name.

    eyas -q prove draft          eyas prove draft -q          pytest tests/test_console.py

They are added to a command when it is looked up, so that no verb repeats them. A verb with a --verbose of its own keeps
it, and understands the one before its name.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from eyas import console

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# Values that may be a path, though click cannot know it: a path, or an id, or a name.
MAYBE_PATHS = {"target", "prompts", "files", "draft", "config", "source"}
_DONE = "eyas.cli.shared"


def _speak(ctx: click.Context, param: click.Parameter, value: bool) -> bool:
    if not value or ctx.resilient_parsing:
        return value
    level: console.Level = "quiet" if "--quiet" in param.opts else "verbose"
    said = ctx.find_root().meta.setdefault(_DONE, level)
    if said != level:
        raise click.UsageError("--quiet and --verbose exclude each other; give one", ctx)
    if not ctx.find_root().meta.get(_DONE + ".on"):
        ctx.find_root().meta[_DONE + ".on"] = True
        if not console.bounded():  # nobody but main outlives the root context, to tell of errors
            ctx.find_root().with_resource(console.speaking())
        console.speak(level)
        if level == "verbose":
            _time(ctx.find_root())
    return value


def _time(ctx: click.Context) -> None:
    """At the end, with --verbose: what it took."""
    began, used = time.monotonic(), time.process_time()

    @ctx.call_on_close
    def told() -> None:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        console.say(
            f"eyas: {time.monotonic() - began:.1f} s, {time.process_time() - used:.1f} s of processors, at most "
            f"{peak:.2f} GiB of memory"
        )


def _options() -> list[click.Option]:
    return [
        click.Option(
            ["-q", "--quiet"], is_flag=True, expose_value=False, callback=_speak, is_eager=True,
            help="Only results and errors: no bars, no notes.",
        ),
        click.Option(
            ["-v", "--verbose"], is_flag=True, expose_value=False, callback=_speak, is_eager=True,
            help="Also the libraries' logs, times, and tracebacks of errors.",
        ),
    ]  # fmt: skip


def shared(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options on the group itself, for `eyas -q VERB`."""
    params: list[click.Parameter] = getattr(function, "__click_params__", [])
    function.__click_params__ = [*params, *reversed(_options())]  # type: ignore[attr-defined]
    return function


def with_shared(command: click.Command) -> click.Command:
    """`command`, and those below it, with the shared options; the same object, changed once."""
    if getattr(command, _DONE, False):
        return command
    setattr(command, _DONE, True)
    taken = {name: param for param in command.params for name in param.opts}
    for option in _options():
        own = taken.get(option.opts[-1])
        if own is None:
            option.opts = [name for name in option.opts if name not in taken]
            command.params.append(option)
        elif own.callback is None:  # the verb's own says more of its result, too
            own.callback = _own_verbose
            own.is_eager = True
    for param in command.params:
        if param.name in MAYBE_PATHS and isinstance(param.type, click.types.StringParamType):
            param._custom_shell_complete = _paths
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            with_shared(inner)
    return command


def _own_verbose(ctx: click.Context, param: click.Parameter, value: bool) -> bool:
    return _speak(ctx, param, value) or console.verbose()


def _paths(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]
