"""The verbs of the command line, and how errors leave the program.

    eyas --help
    eyas train --help

A verb's module is imported only when that verb is called (or its own help asked for), so that `eyas --help` and a
shell that completes names need neither torch nor transformers. Each `eyas.cli.<verb>` defines `command`: it parses,
calls and renders. What all verbs have in common (--quiet, --verbose) is added in shared.py; leave.py says what a user
is told of a failure.

Exit codes: 0 done, 1 an error that Eyas explains, 2 bad usage or bad input, 3 two artifacts that do not belong
together, 130 interrupted, 143 ended by SIGTERM. See errors.py.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import click

from eyas import console
from eyas._version import __version__
from eyas.cli.shared import shared, with_shared
from eyas.terminal import echo, wants_color

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# verb -> (module, what it does). The order is the order of the work.
VERBS: dict[str, tuple[str, str]] = {
    "plan": ("eyas.cli.plan", "Plan a draft: what it will weigh, take and cost, before anything is run."),
    "ask": ("eyas.cli.ask", "Let the target write requests itself: more prompts to learn from."),
    "regenerate": ("eyas.cli.regenerate", "Let the target answer prompts: prompts to conversations."),
    "extract": ("eyas.cli.extract", "Record the target's states on conversations: conversations to features."),
    "vocab": ("eyas.cli.vocab", "Choose the draft vocabulary from token counts: features to a vocabulary map."),
    "train": ("eyas.cli.train", "Train a draft on features."),
    "export": ("eyas.cli.export", "Write a trained draft as a directory that inference engines load."),
    "inspect": ("eyas.cli.inspect", "Describe a draft: sizes, conventions, vocabulary map, tensors, engines."),
    "doctor": (
        "eyas.cli.doctor",
        "Find out why a draft is not accepted: try every convention on its weights.",
    ),
    "repair": (
        "eyas.cli.repair",
        "Mend what the doctor found, in a new directory or in place.",
    ),
    "history": ("eyas.cli.history", "Show what repairs did to a draft."),
    "revert": ("eyas.cli.revert", "Bring back an earlier state of a repaired draft."),
    "verify": ("eyas.cli.verify", "Prove that a copy, an upload or a conversion of a draft is intact."),
    "prove": ("eyas.cli.prove", "Decode with draft and target: is it lossless, and how long is the accept length?"),
    "measure": ("eyas.cli.measure", "Ask a real server what it accepts, and find where it falls short."),
    "serve": ("eyas.cli.serve", "Start a real engine with target and draft, or print the command."),
    "chat": ("eyas.cli.chat", "Talk to a target with its draft, and see which words were drafted."),
    "canary": ("eyas.cli.canary", "Prove a deployment with a tiny draft that fails wherever it is misread."),
    "engines": ("eyas.cli.engines", "Set up real engines on this CPU, to check drafts with."),
    "run": ("eyas.cli.run", "Run all stages of a recipe (demo, quick, long or a YAML file), skipping what is done."),
    "report": ("eyas.cli.report", "Write a run, or two side by side, as one HTML page."),
    "completion": ("eyas.cli.completion", "Print the script that completes verbs and options in your shell."),
}

EPILOG = """\b
Where to start:
  eyas doctor DRAFT --target TARGET    a draft that you have
  eyas run quick                       none yet: one for a small target, in minutes
  eyas VERB --help                     examples of each

\b
Exit codes, where a verb's own help says no more:
  0    done
  1    an error that Eyas explains, or a check that was not met
  2    bad usage, or input that cannot be read
  3    two artifacts that do not belong together (another target, tokenizer, template, taps or map)
  130  interrupted; the same command goes on where it stopped
"""


class LazyGroup(click.Group):
    """A group that knows the names and one-line helps of its verbs without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command = importlib.import_module(VERBS[cmd_name][0]).command
        assert isinstance(command, click.Command), f"{VERBS[cmd_name][0]}.command is not a click command"
        return with_shared(command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs, in the order of the work"):
            formatter.write_dl([(name, help_line) for name, (_, help_line) in VERBS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        from click.shell_completion import CompletionItem

        if incomplete.startswith("-"):
            return click.Command.shell_complete(self, ctx, incomplete)
        return [CompletionItem(name, help=text) for name, (_, text) in VERBS.items() if name.startswith(incomplete)]

    def invoke(self, ctx: click.Context) -> Any:
        ctx.color = wants_color(sys.stdout)
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # before click sees it, which would leave with exit code 1
            _hush()
            raise click.exceptions.Exit(0) from None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        import difflib

        if args and args[0] not in VERBS and not args[0].startswith("-") and not ctx.resilient_parsing:
            near = difflib.get_close_matches(args[0], VERBS, n=1)
            hint = f"Did you mean '{near[0]}'?" if near else f"The verbs are: {', '.join(VERBS)}."
            ctx.fail(f"no verb '{args[0]}'. {hint}")
        return super().resolve_command(ctx, args)


def _hush() -> None:
    """The reader of our output (head, less) closed it: point stdout elsewhere, so that the flush at exit is quiet."""
    import os

    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@click.command(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog=EPILOG,
)
@click.version_option(__version__, prog_name="eyas", message="%(prog)s %(version)s")
@shared
def cli() -> None:
    """Train, prove and debug EAGLE-3 draft models for speculative decoding."""


def main(argv: list[str] | None = None) -> NoReturn:
    """Run the command line and exit: the entry point of the console script and of `python -m eyas`."""
    from eyas.cli.failures import explained, interrupted, verb_of
    from eyas.errors import EyasError
    from eyas.machine import wait_politely
    from eyas.signals import Terminated, with_signals

    verb = verb_of(sys.argv[1:] if argv is None else argv, VERBS)
    with_signals()
    wait_politely()
    with console.speaking():
        try:
            cli.main(args=argv, prog_name="eyas", standalone_mode=False)
            sys.stdout.flush()
            code = 0
        except click.exceptions.Exit as error:
            code = error.exit_code
        except click.ClickException as error:
            error.show()
            code = error.exit_code
        except (click.Abort, KeyboardInterrupt) as error:
            ended = error if isinstance(error, Terminated) else error.__cause__  # click raises its own in its place
            by, code = (ended.name, ended.exit_code) if isinstance(ended, Terminated) else ("", 130)
            echo(f"eyas: {interrupted(verb, by)}", err=True)
        except BrokenPipeError:
            _hush()
            code = 0
        except Exception as error:
            from eyas.cli.leave import apologise, explain

            told = error if isinstance(error, EyasError) else explained(error, verb)
            if told is not None:
                explain(told)
                code = told.exit_code
            else:
                apologise(error)
                code = 1
    sys.exit(code)
