"""The converters of llama.cpp and OpenVINO, which load a format of their own: run them, or say how.

    convert("llamacpp", Path("draft"), Path("path/to/target"), Path("draft.gguf"), taps=(2, 15, 27))

They run in the private environment of `eyas engines setup`, and OpenVINO's output is mended (openvino.py).

    pytest tests/test_export_openvino.py          real converters: make test-engines
"""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

from ..engines.environment import ready
from ..errors import BadInput, EyasError
from .openvino import layer_list, mend

CONVERTED = ("llamacpp", "openvino")
PROGRAM = {"llamacpp": "convert", "openvino": "optimum-cli"}


def command(engine: str, program: str, draft: Path, target: str, out: Path) -> list[str]:
    """The converter's command line. `program`: convert_hf_to_gguf.py or optimum-cli."""
    if engine == "llamacpp":
        return [program, str(draft), "--target-model-dir", target, "--outtype", "auto", "--outfile", str(out)]
    return [
        program, "export", "openvino", "-m", str(draft), "--task", "text-generation-with-past", "--trust-remote-code",
        "--weight-format", "fp32", str(out),
    ]  # fmt: skip


def how(engine: str, draft: Path, target: str, taps: tuple[int, ...]) -> list[str]:
    """What a user would type, and what the converted model then still needs."""
    if engine == "llamacpp":
        return [shlex.join(["python", *command(engine, "convert_hf_to_gguf.py", draft, target, Path("draft.gguf"))])]
    return [
        shlex.join(command(engine, "optimum-cli", draft, target, Path("ov-draft"))),
        f'then in ov-draft/openvino_model.xml beside eagle3_mode: <hidden_layers_list value="{layer_list(taps)}" />',
    ]


def convert(engine: str, draft: Path, target: Path, out: Path, taps: tuple[int, ...], timeout: float = 3600) -> Path:
    """Run the engine's own converter; returns `out`. Raises BadInput without its environment or over an existing file,
    EyasError with the end of what it said where it fails."""
    if out.exists():
        raise BadInput(f"{out} exists; name another place for the converted draft")
    environment = ready(engine)
    if environment is None:
        raise BadInput(f"{engine}'s converter is not installed; run `eyas engines setup {engine}`, or convert by hand")
    program = str(environment.programs[PROGRAM[engine]])
    line = command(engine, program, draft.absolute(), str(target.absolute()), out.absolute())
    if engine == "llamacpp":
        line = [str(environment.python), *line]
    try:
        done = subprocess.run(line, env=environment.environ(), capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        raise EyasError(
            f"{engine}'s converter was not done after {timeout:.0f} s; run the same command again when the machine "
            "is less busy"
        ) from error
    if done.returncode or not out.exists():
        raise EyasError(
            f"{engine}'s converter failed: {(done.stderr or done.stdout)[-1500:].strip()}; check that the draft was "
            "exported with --to openvino"
        )
    if engine == "openvino":
        mend(out, taps)
    return out
