"""The terminal captures of README.md, made anew: real commands in a real terminal of 100 columns, drawn as SVG.

    make demo && make pictures              docs/pictures/{doctor,chat}.svg from runs/demo/export

The broken draft is the demo's own, after somebody took its offsets for ids and subtracted arange (docs/story.md). The
SVG asks no network for its font and holds its text as text.
"""

from __future__ import annotations

import io
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text
from safetensors import safe_open
from safetensors.torch import save_file

HERE = Path(__file__).resolve().parent
COLUMNS = 100
PLAIN_FONT = re.compile(r"\s*@font-face \{.*?\}\n", re.DOTALL)
BLACK, RED, GREEN, OCHRE, BLUE, VIOLET, TEAL, GREY = (
    (36, 41, 46), (203, 36, 49), (34, 134, 58), (150, 100, 0),
    (3, 102, 214), (111, 66, 193), (5, 122, 133), (88, 96, 105),
)  # fmt: skip
PAPER = TerminalTheme(
    (255, 255, 255),
    BLACK,
    [BLACK, RED, GREEN, OCHRE, BLUE, VIOLET, TEAL, GREY],
    [GREY, RED, GREEN, OCHRE, BLUE, VIOLET, TEAL, BLACK],
)


def broken(draft: Path, folder: Path) -> Path:
    """A copy of `draft` whose d2t had arange subtracted, and no eyas.json that would tell."""
    shutil.copytree(draft, folder, ignore=shutil.ignore_patterns("eyas.json", "eyas", "manifest.json"))
    weights = folder / "model.safetensors"
    with safe_open(weights, "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    tensors["d2t"] -= torch.arange(len(tensors["d2t"]))
    save_file(tensors, weights, metadata)
    return folder


def typed(words: list[str], cwd: Path) -> str:
    """What a command writes to a terminal, its colours included; progress bars that were wiped away are not in it."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "LINES": "200", "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [sys.executable, "-m", *words], stdout=theirs, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
        cwd=cwd, env=environment,
    )  # fmt: skip
    os.close(theirs)
    said = b""
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # Linux says so when the other end is closed
            break
        if not part:
            break
        said += part
    process.wait()
    lines = said.decode().replace("\r\n", "\n").split("\n")
    return "\n".join(line.rsplit("\r", 1)[-1] for line in lines)


def draw(command: str, said: str, file: Path, limit: int) -> None:
    """`command` and the first `limit` lines of what it said; that more follows is written below them."""
    lines = said.rstrip().split("\n")
    if len(lines) > limit:
        lines = [*lines[:limit], f"... {len(lines) - limit} more lines"]
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), color_system="truecolor", force_terminal=True)
    console.print(Text("$ ", style="dim") + Text(command, style="bold"))
    console.print(Text.from_ansi("\n".join(lines)))
    svg = PLAIN_FONT.sub("\n", console.export_svg(title=command.split()[1], theme=PAPER, unique_id=file.stem))
    file.write_text(re.sub(r"[ \t]+$", "", svg.replace("Fira Code,", ""), flags=re.MULTILINE))
    print(f"{file}: {len(lines)} lines, {file.stat().st_size:,} bytes")


def main(draft: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        broken(draft, here / "broken-draft")
        shutil.copytree(draft, here / "draft")
        doctor = "eyas doctor broken-draft --target smollm2"
        draw(doctor, typed(doctor.split(), here), HERE / "doctor.svg", 44)
        question = "A farmer has 12 eggs and sells 5. How many are left?"
        said = typed(["eyas", "chat", "draft", "--say", question, "--max-new-tokens", "80", "--explain"], here)
        draw(f'eyas chat draft --say "{question}" --explain', said, HERE / "chat.svg", 40)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo/export"))
