"""Every earlier state comes back bit for bit, from records and from nothing else.

pytest -q tests/test_repair_history.py
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from changing import CHANGES, extent, in_memory, leftovers, loaded, piece, same_size, state, write_draft
from eyas.cli import cli
from eyas.draft.assemble import Piece
from eyas.draft.digests import compare
from eyas.draft.files import open_folder
from eyas.errors import BadInput, EyasError
from eyas.repair.change import Change
from eyas.repair.history import history, revert
from eyas.repair.in_place import repair_in_place
from eyas.repair.recipe import Blob, Keep, chained, cut, inverse, joined, length
from eyas.repair.write_new import write_new


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with in_memory() as folder:
        yield folder


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shards"])
@pytest.mark.parametrize("name", CHANGES)
def test_there_and_back_and_there_again(tmp_path: Path, name: str, sharded: bool):
    draft = write_draft(tmp_path / "draft", sharded)
    old = state(draft)
    repair_in_place(draft, CHANGES[name](draft), {"operation": name})
    new = state(draft)
    assert new != old
    done = revert(draft)
    assert (done["kind"], done["number"], done["to"], done["reverts"]) == ("revert", 2, 1, [1])
    assert state(draft) == old
    revert(draft)
    assert state(draft) == new
    revert(draft, 1)
    assert state(draft) == old and leftovers(draft) == []
    changed = history(draft)[0]["tensors"]
    assert changed.keys() == CHANGES[name](draft).tensors.keys()


@pytest.mark.parametrize("seed", range(6))
def test_any_series_of_changes_leads_back_to_each_state(tmp_path: Path, seed: int):
    rng = random.Random(seed)
    draft = write_draft(tmp_path / "draft", sharded=seed % 2 == 1, eyas=seed % 3 != 0)
    states = [state(draft)]
    for step in range(rng.randint(4, 7)):
        if step and rng.random() < 0.3:
            revert(draft, rng.randint(1, len(states) - 1))
        else:
            repair_in_place(draft, any_change(draft, rng), {"step": step})
        states.append(state(draft))
        assert states[-1] != states[-2]
        if open_folder(draft).eyas is not None:
            assert compare(open_folder(draft)).same
    for place in rng.sample(range(len(states)), min(len(states), 6)):
        if state(draft) == states[place]:
            with pytest.raises(BadInput, match=r"all is as it was|there is no change"):
                revert(draft, place + 1)
            continue
        revert(draft, place + 1)
        states.append(state(draft))
        assert states[-1] == states[place]
    assert leftovers(draft) == []
    assert [h["number"] for h in history(draft)] == list(range(1, len(states)))


def any_change(draft: Path, rng: random.Random) -> Change:
    """One to three tensors and perhaps the config, each changed in some way."""
    held = open_folder(draft).tensors
    tensors: dict[str, Piece | None] = {}
    for name in rng.sample(sorted(held), rng.randint(1, min(3, len(held) - 1))):
        ref, fresh = held[name], f"t{rng.randrange(10**6)}{'x' * rng.randrange(40)}"
        kind = rng.choice(["same", "size", "out", "rename", "part", "add"])
        if kind == "same":
            tensors[name] = piece(name, ref.dtype, ref.shape, rng.randrange(10**6))
        elif kind == "size":
            tensors[name] = piece(name, rng.choice(["F32", "I64"]), (rng.randrange(60), 3), rng.randrange(10**6))
        elif kind == "out":
            tensors[name] = None
        elif kind == "rename":
            tensors |= {name: None, fresh: Piece(fresh, ref.dtype, ref.shape, (extent(draft, name),))}
        elif kind == "part":
            parts = (extent(draft, name), extent(draft, name))
            tensors[name] = Piece(name, ref.dtype, (2, *ref.shape), parts)
        else:
            tensors[fresh] = piece(fresh, "BF16", (rng.randrange(90),), rng.randrange(10**6))
    config = {"hidden_size": 16, "seed": rng.randrange(10**6)} if rng.random() < 0.4 else None
    return Change(tensors, config)


def test_recipes():
    """Cut, chained and inverted, a recipe makes what the bytes themselves would."""
    rng = random.Random(0)

    def make(recipe, other: bytes) -> bytes:
        return b"".join(other[p.start : p.stop] if isinstance(p, Keep) else p.sha256.encode()[p.start : p.stop]
                        for p in recipe)  # fmt: skip

    def recipe_of(size: int):
        parts: list[Keep | Blob] = []
        for _ in range(rng.randrange(6)):
            start = rng.randint(0, size)
            kept = Keep(start, rng.randint(start, size))
            text = "".join(rng.choices("abcdefgh", k=9))
            parts.append(kept if rng.random() < 0.6 else Blob(text, 2, rng.randint(2, 9)))
        return joined(parts)

    for _ in range(500):
        c = bytes(rng.choices(range(65, 91), k=rng.randint(0, 40)))
        first = recipe_of(len(c))
        b = make(first, c)
        assert len(b) == length(first)
        second = recipe_of(len(b))
        a = make(second, b)
        assert make(chained(second, first), c) == a
        start = rng.randint(0, len(b))
        stop = rng.randint(start, len(b))
        assert make(cut(first, start, stop), c) == b[start:stop]
        cuts = [(rng.randint(0, 40), str(i)) for i in range(3)]
        back = inverse(first, len(c), cuts)
        assert [p[0] for p in back] == [0, *(p[1] for p in back[:-1])] if back else not c
        assert b"".join(c[s:e] if at is None else b[at : at + e - s] for s, e, at, _ in back) == c


def test_what_something_else_wrote_is_not_lost(tmp_path: Path):
    draft = write_draft(tmp_path / "draft", eyas=False)
    old = state(draft)
    repair_in_place(draft, same_size(draft), {})
    place = extent(draft, "d2t")
    with open(draft / "model.safetensors", "r+b") as file:
        file.seek(place.start + 16)
        file.write(b"theirs!!")
    (draft / "config.json").write_text('{"hidden_size": 99}')
    theirs = state(draft)
    with pytest.raises(BadInput, match=r"d2t in model\.safetensors is not what change 1 wrote.*--force"):
        revert(draft)
    assert state(draft) == theirs
    done = revert(draft, force=True)
    assert done["forced"] == ["d2t in model.safetensors is not what change 1 wrote"]
    assert {n: d for n, d in state(draft).items() if n != "config.json"} == {
        n: d for n, d in old.items() if n != "config.json"
    }
    revert(draft)
    assert state(draft) == theirs, "what was forced over is kept"


def test_what_a_change_did_not_touch_may_have_changed(tmp_path: Path):
    """Only the bytes concerned are looked at, and only they are written."""
    draft = write_draft(tmp_path / "draft", eyas=False)
    old = loaded(draft)
    repair_in_place(draft, CHANGES["other_size"](draft), {})
    place = extent(draft, "fc.weight")
    with open(draft / "model.safetensors", "r+b") as file:
        file.seek(place.start)
        file.write(np.float32(7).tobytes())
    revert(draft)
    now = loaded(draft)
    assert now["fc.weight"][1].flat[0] == 7
    assert all(now[n][1].tobytes() == old[n][1].tobytes() for n in old if n != "fc.weight")


def test_a_file_of_another_size_is_refused_even_by_force(tmp_path: Path):
    draft = write_draft(tmp_path / "draft")
    repair_in_place(draft, CHANGES["left_out"](draft), {})
    repair_in_place(draft, CHANGES["of_config"](draft), {})
    (draft / "config.json").write_text("{}")
    with pytest.raises(BadInput, match=r"config\.json has 2 bytes, the journal says"):
        revert(draft)
    revert(draft, force=True)  # all of it is in the journal
    assert open_folder(draft).config == {"hidden_size": 16, "draft_vocab_size": 40}
    other = write_draft(tmp_path / "other")
    shutil.copy(other / "model.safetensors", draft / "model.safetensors")
    with pytest.raises(BadInput, match=r"model\.safetensors has .* bytes, the journal says"):
        revert(draft, 1)
    with pytest.raises(BadInput, match=r"model\.safetensors has another size.*put the file back as change 3 left it"):
        revert(draft, 1, force=True)
    (draft / "model.safetensors").unlink()
    with pytest.raises(BadInput, match=r"model\.safetensors is gone"):
        revert(draft, 1)


def test_what_is_right_already_is_not_written_again(tmp_path: Path):
    draft = write_draft(tmp_path / "draft", eyas=False)
    big = Change({"lm_head.weight": piece("lm_head.weight", "BF16", (40, 16), 3)})
    repair_in_place(draft, big, {})
    revert(draft)
    repair_in_place(draft, same_size(draft), {})
    done = revert(draft, 1)
    assert [f["undo_bytes"] for f in done["files"]] == [320], "d2t alone, not the head that went and came back"


def test_there_is_nothing_to_revert(tmp_path: Path):
    draft = write_draft(tmp_path / "draft")
    with pytest.raises(BadInput, match="has no history"):
        revert(draft)
    assert history(draft) == [] and not (draft / ".eyas").exists()
    repair_in_place(draft, same_size(draft), {})
    for number in (0, 2, -1):
        with pytest.raises(BadInput, match=f"there is no change {number}; its history has 1 to 1"):
            revert(draft, number)
    write_new(draft, tmp_path / "out", CHANGES["left_out"](draft), {})
    with pytest.raises(BadInput, match="change 1 made this directory from another one"):
        revert(tmp_path / "out")
    repair_in_place(tmp_path / "out", same_size(draft), {})
    before = state(tmp_path / "out")
    repair_in_place(tmp_path / "out", CHANGES["of_config"](draft), {})
    revert(tmp_path / "out", 3)
    assert state(tmp_path / "out") == before
    with pytest.raises(BadInput, match="there is no directory"):
        history(draft / "config.json")


def test_a_damaged_journal_is_named(tmp_path: Path):
    draft = write_draft(tmp_path / "draft")
    for name in ("same_size", "of_config"):
        repair_in_place(draft, CHANGES[name](draft), {})
    new, journal = state(draft), draft / ".eyas" / "journal"
    blob = next(p[3] for p in json.loads((journal / "000001.json").read_text())["files"][0]["undo"] if p[0] == "blob")
    raw = (draft / ".eyas" / "undo" / blob).read_bytes()
    for damage, words in ((bytes([raw[0] ^ 1]) + raw[1:], "is damaged"), (raw[:-1], "cut short"), (None, "is missing")):
        (draft / ".eyas" / "undo" / blob).unlink()
        if damage is not None:
            (draft / ".eyas" / "undo" / blob).write_bytes(damage)
        with pytest.raises(EyasError, match=rf"undo/{blob} .*{words}.*it holds d2t"):
            revert(draft, 1)
    assert state(draft) == new
    (journal / "000001.json").rename(tmp_path / "aside")
    with pytest.raises(BadInput, match="change 1 is missing from the journal"):
        history(draft)
    (journal / "000001.json").write_text("{")
    with pytest.raises(BadInput, match=r"000001\.json is not readable JSON"):
        history(draft)


def test_the_commands(tmp_path: Path):
    draft = write_draft(tmp_path / "draft")
    old = state(draft)
    run = CliRunner()
    assert "nothing was changed here" in run.invoke(cli, ["history", str(draft)]).output
    repair_in_place(draft, same_size(draft), {"finding": "EY-D2T-TWICE", "operation": "add-arange", "told": ["why"]})
    shown = run.invoke(cli, ["history", str(draft)])
    assert shown.exit_code == 0
    for text in (
        "   1  ",
        "repair  EY-D2T-TWICE: add-arange",
        "why",
        "d2t: I64 [40] ",
        "model.safetensors: patch, 320",
    ):
        assert text in shown.output
    told = json.loads(run.invoke(cli, ["history", str(draft), "--json"]).output)
    assert told["changes"][0]["tensors"]["d2t"]["after"]["dtype"] == "I64"
    done = run.invoke(cli, ["revert", str(draft)])
    assert done.exit_code == 0 and "back to the state before change 1" in done.output and state(draft) == old
    done = run.invoke(cli, ["revert", str(draft), "2", "--json"])
    assert done.exit_code == 0 and json.loads(done.output)["reverts"] == [2] and state(draft) != old
    missing = run.invoke(cli, ["revert", str(draft), "9"])
    assert isinstance(missing.exception, BadInput) and missing.exception.exit_code == 2
