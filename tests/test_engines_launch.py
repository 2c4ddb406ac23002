"""Flags of a launch that change how a draft is read.   pytest -q tests/test_engines_launch.py"""

from pathlib import Path

import pytest
from click.testing import CliRunner

from drafts import make_draft, write_flat
from eyas.cli.inspect import command
from eyas.describe import inspect_draft
from eyas.engines.launch import options
from eyas.errors import BadInput


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("", {}),
        ("python -m sglang.launch_server --model-path a/b --tp 4", {"model-path": "a/b", "tp": 4}),
        ("--speculative_algorithm=EAGLE --disable-cuda-graph", {"speculative-algorithm": "EAGLE",
                                                               "disable-cuda-graph": True}),
        ("--enforce-eager --speculative-config '{\"method\": \"eagle3\"}'", {"enforce-eager": True,
                                                                           "speculative-config": {"method": "eagle3"}}),
    ],
)  # fmt: skip
def test_options_of_a_command_line(line: str, wanted: dict):
    assert options(line) == wanted


def test_what_a_launch_changes(tmp_path: Path, tiny_target: Path):
    folder = write_flat(tmp_path / "d", *make_draft(1), max_position_embeddings=64)

    def runs(launch: str) -> dict[str, dict]:
        return inspect_draft(folder, tiny_target, launch=launch)["engines"]

    assert runs("")["sglang"]["runs"] == "not"  # the target's context is longer than the draft's positions
    assert runs("--context-length 64")["sglang"]["runs"] == "as trained"
    wrong = runs("--speculative-algorithm EAGLE --context-length 64")["sglang"]
    assert wrong["runs"] == "otherwise" and "instead of EAGLE3" in wrong["differences"][0]["what"]
    assert any("--max-model-len 64" in need for need in runs("")["vllm"]["needs"])
    assert not any("--max-model-len" in need for need in runs("--max-model-len 64")["vllm"]["needs"])
    assert runs('--speculative-config \'{"model": "d"}\'')["vllm"]["runs"] == "not"
    said = CliRunner().invoke(command, [str(folder), "--target", str(tiny_target), "--launch", "--context-length 64"])
    assert said.exit_code == 0 and "sglang 0.5.23: runs it as trained" in said.output
    with pytest.raises(BadInput, match="not a command line"):
        inspect_draft(folder, tiny_target, launch="--a 'b")
