"""`eyas completion`: verbs, options and values at the Tab key.   eyas completion bash"""

from __future__ import annotations

import click

HELP = """Print the script that makes SHELL complete verbs, options, choices and paths of `eyas` at the Tab key.

The script asks `eyas` itself, which answers without loading torch.

\b
Examples:
  eyas completion bash > ~/.local/share/bash-completion/completions/eyas     # new shells find it there
  eyas completion zsh > ~/.zfunc/_eyas         # with `fpath+=~/.zfunc` before `compinit` in ~/.zshrc
  eyas completion fish > ~/.config/fish/completions/eyas.fish
  eval "$(eyas completion bash)"               # in this shell only
"""


@click.command("completion", help=HELP)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    from click.shell_completion import get_completion_class

    from eyas.cli import cli

    found = get_completion_class(shell)
    assert found is not None
    maker = found(cli, {}, "eyas", "_EYAS_COMPLETE")
    click.echo(maker.source_template % maker.source_vars())
