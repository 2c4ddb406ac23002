"""The file that `eyas measure --out` writes, read back, and files that only look like one.

pytest -q tests/test_measure_file.py
"""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas.doctor.located import findings
from eyas.doctor.signatures import signatures
from eyas.errors import BadInput, EyasError
from eyas.measure.measured import FORMAT, of_file, write

PART: dict[str, Any] = {
    "engine": "vllm", "url": "http://h:1", "k": 4, "version": "0.32.0", "command": ["vllm", "serve", "a b"],
    "acceptance": {"tau": 1.5323, "rounds": 248, "accepted": 132, "unconditional": [0.3508, 0.1048, 0.0484, 0.0282],
                   "rule": "whole", "source": "the server, for this request", "own": {"num_spec_steps": 248.0}},
    "locate": {"rows": [{"row": "training", "tau": None}, {"row": "declared", "tau": 1.5323},
                        {"row": "as_read", "tau": 1.5323}, {"row": "served", "tau": 1.5323}],
               "falls": "", "says": "No row falls", "engine": "vllm"},
    "capture": {"right": True, "slices": [], "says": "right"},
    "answers": [], "errors": [],
}  # fmt: skip


def result(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"eyas": "1", "format": FORMAT, "engines": list(parts), "failed": {}, "complete": True}


def changed(place: str, value: Any) -> dict[str, Any]:
    """PART with one value replaced: `acceptance.tau`."""
    part = copy.deepcopy(PART)
    inner, *rest = place.split(".")
    if rest:
        part[inner][rest[0]] = value
    else:
        part[inner] = value
    return part


def test_there_and_back(tmp_path: Path):
    write(tmp_path / "m.json", result(PART))
    file = of_file(tmp_path / "m.json")
    served = file.served
    assert served is not None and file.engine == "vllm" and file.command == ("vllm", "serve", "a b")
    assert (served.tau, served.rounds, served.accepted, served.steps) == (1.5323, 248, 132, 4)
    assert served.unconditional == (0.3508, 0.1048, 0.0484, 0.0282) and served.version == "0.32.0"
    assert served.said == {"num_spec_steps": 248.0} and "m.json" in served.notes[0]
    assert file.located is not None and file.located.rows == {"declared": 1.5323, "as_read": 1.5323, "served": 1.5323}
    assert (file.located.falls, file.located.says, file.located.capture["right"]) == ("", "No row falls", True)
    assert file.located.settled and not file.located.off


def test_several_engines_have_to_be_told_apart(tmp_path: Path):
    write(tmp_path / "m.json", result(PART, changed("engine", "sglang")))
    with pytest.raises(BadInput, match=r"m\.json holds measurements of vllm, sglang: choose one with --engine"):
        of_file(tmp_path / "m.json")
    assert of_file(tmp_path / "m.json", "sglang@0.5.23").engine == "sglang"
    with pytest.raises(BadInput, match="choose one"):
        of_file(tmp_path / "m.json", "llamacpp")


@pytest.mark.parametrize("values", [[], {}, 3, "x", None, {"engines": []}, {"engines": {}}, {"engines": [3]},
                                    {"engines": [PART, None]}, {"tau": 1.3}], ids=repr)  # fmt: skip
def test_files_of_something_else(tmp_path: Path, values: Any):
    (tmp_path / "m.json").write_text(json.dumps(values))
    with pytest.raises(BadInput, match=r"m\.json holds no measurement"):
        of_file(tmp_path / "m.json")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"engines": [{"engine": "vll'])
def test_files_that_are_no_json(tmp_path: Path, content: bytes):
    (tmp_path / "m.json").write_bytes(content)
    with pytest.raises(BadInput, match=r"m\.json cannot be read as what `eyas measure --out` writes"):
        of_file(tmp_path / "m.json")
    with pytest.raises(BadInput, match="cannot be read"):
        of_file(tmp_path)


def test_an_acceptance_that_cannot_be_names_the_file(tmp_path: Path):
    write(tmp_path / "m.json", result(changed("acceptance.tau", 0.4)))
    with pytest.raises(BadInput, match=r"m\.json: an accept length of 0\.4 cannot be"):
        of_file(tmp_path / "m.json")


@pytest.mark.parametrize("value", [None, {}, [], "1.5", {"tau": None}, {"tau": "1.5"}, {"tau": True}, {"tau": 1e300}])
def test_without_acceptance_nothing_was_served(tmp_path: Path, value: Any):
    write(tmp_path / "m.json", result(changed("acceptance", value)))
    assert of_file(tmp_path / "m.json").served is None


@pytest.mark.parametrize(
    ("place", "value"),
    [("acceptance.own", [1, 2]), ("acceptance.own", "x"), ("acceptance.unconditional", [2.0]),
     ("acceptance.unconditional", ["x"]), ("acceptance.unconditional", {"1": 2}), ("acceptance.rounds", -1),
     ("acceptance.rounds", True), ("acceptance.rounds", 10**30), ("acceptance.accepted", 1.5), ("k", "4"),
     ("command", "vllm serve"), ("command", None), ("version", None), ("locate", []), ("locate.rows", 3),
     ("locate.rows", [3, {"row": [], "tau": "x"}, {"tau": 2}, {"row": "served", "tau": -5}]), ("locate.falls", None),
     ("capture", 3), ("engine", ["a"])],
    ids=str,
)  # fmt: skip
def test_parts_that_are_mangled_are_left_out(tmp_path: Path, place: str, value: Any):
    write(tmp_path / "m.json", result(changed(place, value)))
    file = of_file(tmp_path / "m.json")
    assert file.served is not None and file.served.tau == 1.5323
    assert all(0 <= x <= 1 for x in file.served.unconditional)
    assert file.served.rounds is None or 0 <= file.served.rounds < 1 << 40
    assert file.located is None or all(math.isfinite(t) and t >= 1 for t in file.located.rows.values())
    signatures(file.served)
    if file.located is not None:
        findings(file.located)


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(10**18), 10**18), st.floats(), st.text(max_size=6)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=4)),
    max_leaves=8,
)


@given(st.sampled_from(["acceptance", "locate", "capture", "k", "version", "engine", "command", "acceptance.tau",
                        "acceptance.rounds", "acceptance.accepted", "acceptance.own", "acceptance.unconditional",
                        "locate.rows", "locate.falls", "locate.says"]), values)  # fmt: skip
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_stands_there_is_refused_or_sane(tmp_path: Path, place: str, value: Any):
    path = tmp_path / "m.json"
    path.write_text(json.dumps(result(changed(place, value))))  # NaN and all
    try:
        file = of_file(path)
    except BadInput as error:
        assert "m.json" in str(error)
        return
    assert isinstance(file.engine, str) and all(isinstance(word, str) for word in file.command)
    if file.served is not None:
        assert file.served.tau is not None and math.isfinite(file.served.tau) and file.served.tau >= 0.99
        assert all(0 <= x <= 1 for x in file.served.unconditional)
        signatures(file.served)
    if file.located is not None:
        assert all(math.isfinite(t) and t >= 1 for t in file.located.rows.values())
        findings(file.located)


def test_places_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "m.json").write_text("before")
    with pytest.raises(EyasError, match=r"m\.json"):
        write(tmp_path / "m.json" / "n.json", result(PART))
    with pytest.raises(TypeError):
        write(tmp_path / "m.json", result({"engine": object()}))
    assert (tmp_path / "m.json").read_text() == "before" and len(list(tmp_path.iterdir())) == 1
