"""Each fault is found under its id, and nothing is said of a healthy draft.   pytest -q tests/test_doctor_static.py"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from drafts import make_draft, write_flat, write_speculators
from eyas.cli.doctor import command
from eyas.doctor.examine import examine
from eyas.doctor.finding import Severity
from eyas.draft.checkpoint import save_draft
from eyas.errors import BadInput
from eyas.target.facts import read_facts
from eyas.vocab import VocabMap

ROOT = Path(__file__).parent.parent
D, V = 120, 300
IDS = "eagle_aux_hidden_state_layer_ids"
Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]


def healthy(folder: Path, facts: Any = None, **conventions: Any) -> Path:
    draft, vocab_map = make_draft(**conventions)
    return save_draft(draft, vocab_map, folder, facts=facts)


def broken(folder: Path, change: Callable[[Tensors, Config], None], facts: Any = None) -> Path:
    """The canonical directory as somebody without Eyas has it (no eyas.json), with a fault put in."""
    out = healthy(folder, facts)
    (out / "eyas.json").unlink()
    tensors, config = load_file(out / "model.safetensors"), json.loads((out / "config.json").read_text())
    change(tensors, config)
    save_file({k: v.contiguous() for k, v in tensors.items()}, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(config))
    return out


def worst(findings: list) -> list[str]:
    return [f.id for f in findings if f.severity in (Severity.ERROR, Severity.WARNING)]


# ---------------------------------------------------------------- healthy


@pytest.mark.parametrize("conventions", [{}, {"norm_before_fc": True}, {"fc_norm": True}, {"qk_norm": True}])
def test_nothing_is_wrong_with_what_eyas_writes(tmp_path: Path, tiny_target: Path, conventions: dict):
    facts = read_facts(tiny_target)
    findings = examine(healthy(tmp_path / "d", facts, rope_theta=facts.rope_theta, **conventions), facts)
    assert worst(findings) == []


@pytest.mark.parametrize("scheme", ["midlayer", "layers0", "prefixed", "fused"])
def test_of_foreign_drafts_only_what_they_leave_out_is_said(tmp_path: Path, tiny_target: Path, scheme: str):
    facts = read_facts(tiny_target)
    draft, vocab_map = make_draft(rope_theta=facts.rope_theta)
    findings = examine(write_flat(tmp_path / "d", draft, vocab_map, scheme), facts)
    assert worst(findings) == ["EY-TAPS-UNNAMED"]
    assert worst(examine(write_speculators(tmp_path / "s", draft, vocab_map), facts)) == []


def test_offsets_that_begin_with_zeros_are_acquitted(tmp_path: Path):
    """The founding story: right offsets, the needless fix, and its exact inverse."""
    right = VocabMap.from_absolute(torch.cat([torch.arange(20), torch.arange(20, D) + 7]), V)

    def story(folder: Path, d2t: torch.Tensor) -> list:
        def change(tensors: Tensors, _: Config) -> None:
            tensors["d2t"], tensors["t2d"] = d2t, right.t2d

        return examine(broken(folder, change))

    before = story(tmp_path / "before", right.d2t)
    assert worst(before) == []
    prefix = next(f for f in before if f.id == "EY-D2T-ZERO-PREFIX")
    assert prefix.severity is Severity.OK
    assert "the first 20 offsets are zero because the first 20 draft ids are the target's own" in prefix.evidence
    fixed = story(tmp_path / "fixed", right.d2t - torch.arange(D))
    assert worst(fixed) == ["EY-D2T-TWICE"]
    assert "Add arange(D) once" in fixed[0].remedy
    assert worst(story(tmp_path / "undone", right.d2t - torch.arange(D) + torch.arange(D))) == []


# ---------------------------------------------------------------- faults


def absolute(tensors: Tensors) -> torch.Tensor:
    return tensors["d2t"] + torch.arange(D)


Change = Callable[[Tensors, Config], None]


def tensor(name: str, make: Callable[[Tensors], torch.Tensor | None], *without: str) -> Change:
    def change(tensors: Tensors, _: Config) -> None:
        value = make(tensors)
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
        for other in without:
            del tensors[other]

    return change


def config(**values: Any) -> Change:
    def change(_: Tensors, config: Config) -> None:
        for name, value in values.items():
            if value is ...:
                config.pop(name, None)
            else:
                config[name] = value

    return change


def swapped(tensors: Tensors) -> torch.Tensor:
    ids = absolute(tensors)
    ids[[3, 4]] = ids[[4, 3]]
    return ids - torch.arange(D)


def other_map(tensors: Tensors) -> torch.Tensor:
    marked = set(absolute(tensors).tolist())
    free = [i for i in range(V) if i not in marked]
    return VocabMap.from_absolute(torch.tensor(sorted([*sorted(marked)[5:], *free[:5]])), V).d2t


def ones(tensors: Tensors, config: Config) -> None:
    for name in tensors:
        if name.endswith("norm.weight"):
            tensors[name] = torch.ones_like(tensors[name])


FAULTS: list[tuple[str, Callable[[Tensors, Config], None]]] = [
    ("EY-D2T-ABSOLUTE", tensor("d2t", absolute)),
    ("EY-D2T-ABSOLUTE", tensor("d2t", absolute, "t2d")),
    ("EY-D2T-TWICE", tensor("d2t", lambda t: t["d2t"] - torch.arange(D))),
    ("EY-D2T-TWICE", tensor("d2t", lambda t: t["d2t"] - torch.arange(D), "t2d")),
    ("EY-D2T-ARANGE", tensor("d2t", lambda t: torch.arange(D))),
    ("EY-D2T-ARANGE", tensor("d2t", lambda t: torch.arange(D), "t2d")),
    ("EY-D2T-ZEROS", tensor("d2t", lambda t: torch.zeros(D, dtype=torch.int64))),
    ("EY-D2T-ZEROS", tensor("d2t", lambda t: torch.zeros(D, dtype=torch.int64), "t2d")),
    ("EY-D2T-MISSING", tensor("d2t", lambda t: None)),
    ("EY-D2T-MISSING", tensor("d2t", lambda t: None, "t2d")),
    ("EY-D2T-SIZE", tensor("d2t", lambda t: t["d2t"][:-3])),
    ("EY-D2T-DTYPE", tensor("d2t", lambda t: t["d2t"].float())),
    ("EY-D2T-DTYPE", tensor("d2t", lambda t: t["d2t"].bfloat16(), "t2d")),
    ("EY-D2T-DTYPE", tensor("d2t", lambda t: t["d2t"].half())),
    ("EY-D2T-RANGE", tensor("d2t", lambda t: t["d2t"] + 250)),
    ("EY-D2T-RANGE", tensor("d2t", lambda t: t["d2t"] - 250, "t2d")),
    ("EY-D2T-DUPLICATE", tensor("d2t", lambda t: t["d2t"].index_fill(0, torch.tensor([4]), int(t["d2t"][3]) - 1))),
    ("EY-D2T-UNSORTED", tensor("d2t", swapped)),
    ("EY-D2T-T2D", tensor("d2t", other_map)),
    ("EY-D2T-T2D", tensor("t2d", lambda t: t["t2d"].roll(1))),
    ("EY-T2D-SIZE", tensor("t2d", lambda t: t["t2d"][:-1])),
    ("EY-HEAD-MISSING", tensor("lm_head.weight", lambda t: None)),
    ("EY-TENSOR-MISSING", tensor("fc.weight", lambda t: None)),
    ("EY-TENSOR-MISSING", tensor("midlayer.mlp.up_proj.weight", lambda t: None)),
    ("EY-TENSOR-UNKNOWN", tensor("midlayer.mlp.extra.weight", lambda t: torch.ones(3))),
    ("EY-TENSOR-SHAPE", tensor("norm.weight", lambda t: t["norm.weight"][:-1])),
    ("EY-EMBED-SHAPE", tensor("embed_tokens.weight", lambda t: torch.ones(V, 7))),
    ("EY-EMBED-SHAPE", tensor("embed_tokens.weight", lambda t: torch.rand(V - 1, 32))),
    ("EY-NORM-UNTRAINED", ones),
    ("EY-NORM-UNFLAGGED", tensor("input_norm.weight", lambda t: torch.rand(96))),
    ("EY-NORM-MISSING", config(norm_before_fc=True)),
    ("EY-NORM-OUTPUT-MEANING", config(norm_output=True)),
    ("EY-TAPS-UNNAMED", config(**{IDS: ..., "eagle_config": {}})),
    ("EY-TAPS-KIND", config(**{IDS: "2,4,5"})),
    ("EY-TAPS-DOUBLED", config(**{IDS: [2, 4, 4]})),
    ("EY-TAPS-RANGE", config(**{IDS: [2, 4, 9]})),
    ("EY-TAPS-COUNT", config(**{IDS: [2, 4, 5, 8]})),
    ("EY-TAPS-WIDTH", tensor("fc.weight", lambda t: t["fc.weight"][:, :-1])),
    ("EY-TAPS-TOP-ONLY", config(eagle_config=...)),
    ("EY-TAPS-NESTED-ONLY", config(**{IDS: ...})),
    ("EY-TAPS-SAME-TWICE", config(eagle_config={IDS: [2, 4, 5]})),
    ("EY-VOCAB-TARGET", config(vocab_size=301)),
    ("EY-VOCAB-SIZE", config(draft_vocab_size=-1)),
    ("EY-VOCAB-UNNAMED", config(draft_vocab_size=...)),
    ("EY-WIDTH-TARGET", config(target_hidden_size=48)),
    ("EY-TIED-PRUNED", config(tie_word_embeddings=True)),
    ("EY-ROPE-UNNAMED", config(rope_theta=..., rope_parameters=...)),
    ("EY-POSITION-SHORT", config(max_position_embeddings=128)),
    ("EY-FC-TRANSPOSED", tensor("fc.weight", lambda t: t["fc.weight"].T)),
    ("EY-ACTIVATION", config(hidden_act="gelu")),
    ("EY-CONFIG-NULL", config(use_cache=None)),
    ("EY-ARCHITECTURE", config(architectures=["LlamaForCausalLM"])),
]


@pytest.mark.parametrize(("id", "change"), FAULTS, ids=[f"{i}-{id}" for i, (id, _) in enumerate(FAULTS)])
def test_a_fault_is_named(tmp_path: Path, tiny_target: Path, id: str, change: Callable[[Tensors, Config], None]):
    facts = read_facts(tiny_target)
    findings = examine(broken(tmp_path / "d", change, facts), facts)
    found = next((f for f in findings if f.id == id), None)
    assert found is not None, worst(findings)
    assert found.severity in (Severity.ERROR, Severity.WARNING) or id == "EY-ROPE-UNNAMED"
    assert found.evidence and found.consequence and found.remedy
    assert len(worst(findings)) <= 3, "one fault is not a dozen"
    maps = [f.id for f in findings if f.id.startswith(("EY-D2T", "EY-T2D")) and f.severity is Severity.ERROR]
    assert len(maps) <= 1, "of the map, one thing is wrong"


def test_a_second_weight_file_and_a_foreign_kind(tmp_path: Path):
    out = healthy(tmp_path / "d")
    save_file({"w": torch.ones(1)}, out / "consolidated.safetensors")
    assert worst(examine(out)) == ["EY-FILES-BESIDE"]
    (out / "model.safetensors").unlink()
    (out / "eyas.json").unlink()
    found = examine(out)
    assert "EY-READ" in worst(found)
    with pytest.raises(BadInput, match="holds no weights"):
        (out / "consolidated.safetensors").unlink()
        examine(out)


def test_the_engine_that_is_named_decides_what_is_an_error(tmp_path: Path):
    out = healthy(tmp_path / "d", norm_before_residual=True)
    assert worst(examine(out)) == []
    assert worst(examine(out, engines=("vllm",))) == []
    assert worst(examine(out, engines=("sglang",))) == ["EY-ENGINE"]


# ---------------------------------------------------------------- the command


def test_the_command_and_its_exit_codes(tmp_path: Path):
    good, bad = healthy(tmp_path / "good"), broken(tmp_path / "bad", tensor("d2t", absolute))
    run = CliRunner()
    assert run.invoke(command, [str(good), "--fail-on", "warning"]).exit_code == 0
    assert "No fault in the files" in run.invoke(command, [str(good)]).output
    shown = run.invoke(command, [str(bad)])
    assert shown.exit_code == 1
    assert "EY-D2T-ABSOLUTE" in shown.output
    assert run.invoke(command, [str(bad), "--fail-on", "never"]).exit_code == 0
    told = json.loads(run.invoke(command, [str(bad), "--json", "--static"]).stdout)
    assert told["verdict"] == "faulty"
    assert told["findings"][0]["id"] == "EY-D2T-ABSOLUTE"
    assert {"severity", "evidence", "remedy", "status"} <= set(told["findings"][0])
    github = run.invoke(command, [str(bad), "--format", "github"]).output
    assert re.search(r"^::error file=.*,title=EY-D2T-ABSOLUTE::d2t holds absolute target ids", github, re.MULTILINE)
    call = [sys.executable, "-m", "eyas", "doctor", str(tmp_path / "no")]
    done = subprocess.run(call, capture_output=True, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)


@pytest.mark.parametrize(
    "call",
    [
        "from eyas.doctor.diagnosis import diagnose; diagnose(sys.argv[1], static=True)",
        "from eyas.repair.apply import repair; repair(sys.argv[1], finding='EY-D2T-TWICE', in_place=True)",
    ],
    ids=["doctor", "repair"],
)
def test_what_looks_at_files_alone_needs_no_torch(tmp_path: Path, call: str):
    def change(tensors: Tensors, _: Config) -> None:
        tensors["d2t"] -= torch.arange(D)

    out = broken(tmp_path / "d", change)
    code = f"import sys; {call}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, str(out)]).returncode == 0


# ---------------------------------------------------------------- the founding story, in its own sizes


def test_the_map_of_the_founding_story(tmp_path: Path):
    """32,000 of 163,840 ids; the first offsets are zero, d2t[1000] = 787: right, broken by a fix, right again."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from kimi import DRAFT, VOCAB, kimi_shaped

    kimi_shaped(tmp_path)  # its weights are a hole in the file
    places = torch.arange(DRAFT)
    offsets = torch.where(places <= 1000, (places - 20).clamp(min=0) * 787 // 980, 787 + (places - 1000) * 4)
    ids = places + offsets
    assert offsets[:22].tolist() == [0] * 22 and int(offsets[1000]) == 787 and int(ids[-1]) < VOCAB
    marks = torch.zeros(VOCAB, dtype=torch.uint8)
    marks[ids] = 1

    def write(d2t: torch.Tensor) -> dict[str, Any]:
        with open(tmp_path / "model.safetensors", "r+b") as file:
            begin = 8 + int.from_bytes(file.read(8), "little")
            file.seek(begin)
            file.write(d2t.numpy().astype("<i8").tobytes() + marks.numpy().tobytes())
        return {f.id: f for f in examine(tmp_path) if f.id.startswith("EY-D2T-")}

    found = write(offsets)
    assert list(found) == ["EY-D2T-ZERO-PREFIX"] and found["EY-D2T-ZERO-PREFIX"].severity is Severity.OK
    assert "first 22 offsets are zero" in found["EY-D2T-ZERO-PREFIX"].evidence
    found = write(offsets - places)
    assert list(found) == ["EY-D2T-TWICE"] and found["EY-D2T-TWICE"].severity is Severity.ERROR
    assert "exactly the one that t2d marks" in found["EY-D2T-TWICE"].evidence
    assert list(write(offsets - places + places)) == ["EY-D2T-ZERO-PREFIX"]


def test_scaled_rope_and_positions_that_stand_still_are_told(tmp_path: Path, tiny_target: Path):
    facts = read_facts(tiny_target)
    scaled = broken(tmp_path / "scaled", config(rope_scaling={"rope_type": "linear", "factor": 8.0}), facts)
    found = next(f for f in examine(scaled, facts) if f.id == "EY-ROPE-OTHER")
    assert found.convention == "rope_type" and "linear" in found.evidence
    still = healthy(tmp_path / "still")
    declared = json.loads((still / "eyas.json").read_text())
    declared["conventions"]["rope_step"] = 0
    (still / "eyas.json").write_text(json.dumps(declared))
    found = next(f for f in examine(still, facts) if f.id == "EY-ROPE-STEP")
    assert found.severity is Severity.WARNING and found.convention == "rope_step"
