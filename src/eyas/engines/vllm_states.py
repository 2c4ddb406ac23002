"""vLLM computes a target's states: its method `extract_hidden_states`, in a process of its own.

    eyas extract conversations.jsonl --target T --engine vllm --out features

servers/extract_vllm.py runs under the Python that has vLLM, and is given the conversations of a shard at a time. Layer
ids are taps (models/llama.py:425-441), and the id n is the stream before the final norm. A request's states come as a
file, which is read and removed at once.   pytest -m engine tests/real/test_extract.py
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from eyas.engines.environment import SCRIPTS, Environment, ready
from eyas.engines.setup.steps import STAND_IN
from eyas.errors import BadInput, EyasError

SCRIPT = SCRIPTS / "extract_vllm.py"
SEQUENCES = 128  # at once, at most: vLLM wants no more of them than tokens of a pass


@dataclass(frozen=True)
class VllmEngine:
    """Settings of such a process; a features.states.Engine."""

    python: Path | None = None
    """Of an environment with vLLM 0.32; None: the one that `eyas engines setup vllm` made."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """More of vllm.LLM: tensor_parallel_size, gpu_memory_utilization, ..."""
    spare = 1  # vLLM asks for room for the one token that it has to say

    def environment(self) -> Environment:
        """Where it runs. Raises BadInput where there is no vLLM."""
        if self.python is None:
            found = ready("vllm")
            if found is None:
                raise BadInput(
                    "vLLM is not set up here: run `eyas engines setup vllm` (for CPUs), or name the Python of an "
                    "environment that has it with --engine-python"
                )
            return found
        if not self.python.is_file():
            raise BadInput(f"--engine-python {self.python} is no file; name the python of a virtual environment")
        variables = {"PYTHONPATH": str(STAND_IN / "vllm"), "VLLM_NO_USAGE_STATS": "1"}
        return Environment("vllm", "", self.python.parent, self.python, {}, variables)

    def told(self) -> Mapping[str, Any]:
        """For the manifest."""
        env = self.environment()
        return {"name": "vllm", "version": env.version or str(env.python), "arguments": dict(self.arguments)}

    @contextlib.contextmanager
    def open(
        self, folder: Path, layers: Sequence[int], longest: int, batch_tokens: int, dtype: str, scratch: Path,
        trust_remote_code: bool,
    ) -> Iterator[Any]:  # fmt: skip
        """vLLM with the target loaded; yields a features.states.States. Raises EyasError where it does not start.

        Its log is kept, and named, where something failed.
        """
        arguments = {"max_num_batched_tokens": batch_tokens, "max_num_seqs": min(SEQUENCES, batch_tokens)}
        env = self.environment()
        command = [
            env.python, SCRIPT, folder, "--layers", ",".join(map(str, layers)), "--folder", scratch.absolute(),
            "--max-model-len", longest + self.spare, "--dtype", dtype,
            "--arguments", json.dumps({**arguments, **self.arguments}),
            *(["--trust-remote-code"] if trust_remote_code else []),
        ]  # fmt: skip
        with tempfile.NamedTemporaryFile(prefix="eyas-vllm-", suffix=".log", delete=False) as log:
            process = subprocess.Popen(
                [str(word) for word in command], env=env.environ(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=log, text=True, start_new_session=True,
            )  # fmt: skip
        try:
            running = _Running(process, Path(log.name))
            running.receive()  # it is ready
            yield running.states
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its own end takes seconds, and there is nothing to keep
            process.wait()
        Path(log.name).unlink(missing_ok=True)


class _Running:
    """The process while it is there."""

    def __init__(self, process: subprocess.Popen[str], log: Path):
        self.process = process
        self.log = log

    def states(self, batch: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """ids int [L] of conversations -> (ids, streams [L, layers, H]) of each, on the CPU."""
        from safetensors.torch import load_file

        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps([ids.tolist() for ids in batch]) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self.ended() from None
        for _ in batch:
            said = self.receive()
            if "file" not in said:
                raise EyasError(f"{said.get('error', said)} (log: {self.log}); look there, or extract with --engine hf")
            file = Path(said["file"])
            try:
                tensors = load_file(file)
                yield tensors["token_ids"], tensors["hidden_states"]
            except (OSError, KeyError) as error:
                raise EyasError(
                    f"what vLLM wrote to {file} cannot be read ({error}; log: {self.log}); run the same command "
                    "again, or extract with --engine hf"
                ) from error
            finally:
                file.unlink(missing_ok=True)

    def receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise self.ended()
        said = json.loads(line)
        assert isinstance(said, dict)
        return said

    def ended(self) -> EyasError:
        """What the log says of its end: the first error in it, since what follows tells of that one."""
        self.process.wait()
        lines = self.log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if "Error: " in line] or lines[-1:]
        why = errors[0].partition("] ")[2] or errors[0] if errors else "it says nothing"
        return EyasError(f"vLLM ended (exit code {self.process.returncode}): {why.strip()[:500]} (log: {self.log})")
