"""The numbers of docs/explanation/contract.md: by hand, by decoding, by training, and on the page, all equal.

pytest -q tests/test_docs_contract.py
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from contract_example import AUX, EMBEDDING, FC, HEAD, MAP, TEXT, K, Q, V, by_hand, tiny_draft
from eyas.conventions import default_taps
from eyas.decode.acceptance import Acceptance
from eyas.draft.unroll import Packing, Unroll

FOLDER = Path(__file__).resolve().parents[1] / "docs/explanation"
PAGE = (FOLDER / "contract.md").read_text(encoding="utf-8")


def vector(text: str) -> tuple[float, ...]:
    return tuple(float(n) for n in text.replace("−", "-").split(","))


def on_the_page() -> dict[str, tuple[float, ...]]:
    """Every `name = (numbers)` of the page's blocks."""
    found = re.findall(r"^    (\w_\d(?:\.\d)?) = \(([^)]*)\)", PAGE, re.MULTILINE)
    assert len(found) == len({name for name, _ in found})
    return {name: vector(numbers) for name, numbers in found}


def cells(label: str) -> list[str]:
    """The row of a table that begins with `label`, without it."""
    return [cell.strip() for cell in re.findall(rf"^\| {re.escape(label)} \|(.*)\|$", PAGE, re.MULTILINE)[0].split("|")]


def test_every_number_of_the_page_is_that_of_the_calculation_by_hand():
    told, hand = on_the_page(), by_hand()
    assert {name for name in told if name[0] != "a"} == set(hand) - {"z_0.0"}
    for name, numbers in told.items():
        wanted = AUX[int(name[2])] if name[0] == "a" else hand[name]
        assert numbers == pytest.approx(wanted, abs=5.1e-4), name


def test_decoding_computes_them():
    told, (draft, vocab_map) = on_the_page(), tiny_draft()
    cache, ids = draft.new_cache(), torch.tensor([TEXT[1:3]])
    g = draft.fuse(torch.tensor([AUX], dtype=torch.float32))
    h = draft.step(draft.embed(ids), g, torch.tensor([0, 1]), cache)
    drafted = vocab_map.to_target(draft.logits(h)[:, -1].argmax(-1))
    assert drafted.tolist() == [TEXT[3]]
    later = draft.step(draft.embed(drafted[:, None]), draft.feedback(h[:, -1:]), torch.tensor([2]), cache)
    assert vocab_map.to_target(draft.logits(later)[:, -1].argmax(-1)).tolist() == [3]
    made = {"g_0": g[0, 0], "g_1": g[0, 1], "h_0.0": h[0, 0], "h_1.0": h[0, 1], "h_1.1": later[0, 0],
            "z_1.0": draft.logits(h)[0, 1], "z_1.1": draft.logits(later)[0, 0]}  # fmt: skip
    for name, numbers in made.items():
        assert told[name] == pytest.approx(numbers.tolist(), abs=5.1e-4), name
    keys, values = cache.extend(0, torch.empty(1, 1, 0, 2), torch.empty(1, 1, 0, 2))
    for place, row in enumerate(("0.0", "1.0", "1.1")):
        assert told[f"k_{row}"] == pytest.approx(keys[0, 0, place].tolist(), abs=5.1e-4)
        assert told[f"v_{row}"] == pytest.approx(values[0, 0, place].tolist(), abs=5.1e-4)


def test_training_unrolls_to_the_same_states():
    told, (draft, _) = on_the_page(), tiny_draft()
    ids = torch.tensor(TEXT)
    aux = torch.tensor([*AUX, *[[9.0] * 6] * 3], dtype=torch.float32)  # later states must not matter
    rows = torch.tensor([0, 1])
    unrolled = Unroll(draft, Packing(torch.tensor([0, len(TEXT)])), rows)
    following = torch.cat([ids[1:], ids[:1]])
    first = unrolled.start(unrolled.embed(following), aux)
    second = unrolled.step(unrolled.embed(ids[rows + 2]), draft.feedback(first))
    assert told["h_0.0"] == pytest.approx(first[0].tolist(), abs=5.1e-4)
    assert told["h_1.0"] == pytest.approx(first[1].tolist(), abs=5.1e-4)
    assert told["h_1.1"] == pytest.approx(second[1].tolist(), abs=5.1e-4)


def test_the_weights_the_map_and_the_round_are_those_of_the_example():
    assert [vector(cell.strip("()")) for cell in cells("e")] == [tuple(map(float, row)) for row in EMBEDDING]
    _, vocab_map = tiny_draft()
    assert [int(n) for n in cells("d2t[j]")] == vocab_map.d2t.tolist()
    assert [int(n) for n in cells("target id j + d2t[j]")] == list(MAP) == vocab_map.ids.tolist()
    assert 1000 + 787 == 1787 and 787 - 1000 == -213 and "target id 1787" in PAGE and "−213" in PAGE
    assert "2, 4 and 5 of 8" in PAGE and default_taps(8) == (2, 4, 5)
    block = re.search(r"((?:^    .*\n)+)", PAGE[PAGE.index("    fc  =") :], re.MULTILINE)
    assert block is not None
    lines = [[int(n) for n in re.findall(r"-?\d", line.replace("−", "-"))] for line in block[1].splitlines()]
    assert lines[:2] == [[*FC[r], *Q[r], *K[r], *V[r], *HEAD[r]] for r in (0, 1)]
    assert lines[2:] == [list(row) for row in HEAD[2:]]
    assert "accept length 1 + 1/1 = 2" in PAGE and Acceptance.of((1,), 2).tau == 2


def test_the_drawing_of_attention_is_what_unrolling_sees():
    """A key that the drawing leaves grey changes nothing; one that it fills does."""
    drawn = re.findall(r'fill="#(7fb08a|eeeeee)" stroke', (FOLDER / "contract-attention.svg").read_text())
    grid = [[cell == "7fb08a" for cell in drawn[i : i + 6]] for i in range(0, len(drawn), 6)]
    assert len(grid) == 12  # 4 rows at 3 steps
    draft, _ = tiny_draft()
    torch.manual_seed(0)
    ids, aux, rows = torch.tensor([5, 2, 7, 3, 1, 6, 0]), torch.randn(7, 6), torch.arange(4)

    def outputs(state: torch.Tensor) -> list[torch.Tensor]:
        unrolled = Unroll(draft, Packing(torch.tensor([0, 7])), rows)
        out = [unrolled.start(unrolled.embed(ids.roll(-1)), state)]
        for k in (1, 2):
            out.append(unrolled.step(unrolled.embed(ids[rows + 1 + k]), draft.feedback(out[-1])))
        return out

    with torch.no_grad():
        plain = outputs(aux)
        for row in range(4):
            moved = aux.clone()
            moved[row] += torch.randn(6)  # the step-0 key and value of this row, and all that follows from it
            for step, (before, after) in enumerate(zip(plain, outputs(moved), strict=True)):
                seen = [not torch.equal(before[r], after[r]) for r in range(4)]
                assert seen == [grid[4 * step + r][row] for r in range(4)]
    assert [line[4:] for line in grid] == [[False] * 2] * 4 + [[True, False]] * 4 + [[True, True]] * 4
