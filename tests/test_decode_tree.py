"""Trees of drafts: the same text as plain decoding, the rows that the contract wants, the target's own distribution.

    pytest -q tests/test_decode_tree.py

Everything is float32 with weights of ordinary size; two orders of the same sums differ by far less than 1e-4. Seeds are
fixed, so the statistical tests always give the same answer; a right rule fails one with a probability below 1e-4.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from eyas.conventions import Conventions
from eyas.decode.answers import decode
from eyas.decode.rules import Greedy, Sampling
from eyas.decode.step import Batch, ChainDrafter
from eyas.decode.tree import Tree, TreeDrafter, make_drafter, walk
from eyas.decode.tree_step import TreeBatch, refuse_unmaskable
from eyas.draft.checkpoint import save_draft
from eyas.draft.model import Draft
from eyas.draft.shape import DraftShape
from eyas.errors import BadInput
from eyas.target.facts import read_facts
from eyas.target.model import Target
from eyas.vocab import VocabMap
from fitting import TAPS, fitted_draft, greedy_texts, random_draft
from reference import Naive

PROMPTS = [[5, 17, 40, 8, 99, 3], [7], [250, 11, 11, 11, 11, 11, 11, 11, 65], [1, 33, 21]]
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return Target.load(tiny_target)


@pytest.fixture(scope="module")
def truths(target: Target) -> list[list[int]]:
    return greedy_texts(target, PROMPTS)


@pytest.fixture(scope="module")
def fitted(target: Target, truths: list[list[int]]) -> tuple[Draft, VocabMap]:
    return fitted_draft(target, PROMPTS, truths)


def paths(tree: Tree) -> list[tuple[int, ...]]:
    """The tokens from the root to each row."""
    out: list[tuple[int, ...]] = [()]
    for parent, token in zip(tree.parents.tolist(), tree.ids.tolist(), strict=True):
        out.append((*out[parent], token))
    return out


# ---------------------------------------------------------------- text


@pytest.mark.parametrize(("topk", "nodes", "k"), [(4, 16, 4), (3, 2, 3), (2, 6, 1), (8, 60, 3), (2, 3, 5), (400, 9, 2)])
def test_greedy_text_is_that_of_plain_decoding(target, truths, fitted, topk: int, nodes: int, k: int):
    done = decode(target, PROMPTS, TreeDrafter(*fitted, topk, nodes), k=k, max_new_tokens=24)
    assert [a.tokens for a in done.answers] == [truth[:24] for truth in truths]
    accepted = [n for a in done.answers for n in a.accepted]
    assert len(set(accepted)) > 1, "partial and long paths both occurred"
    assert done.rounds == len(accepted)


@pytest.mark.parametrize("k", [1, 4])
def test_a_tree_of_one_child_is_the_chain(target, fitted, k: int):
    chain = decode(target, PROMPTS, ChainDrafter(*fitted), k=k, max_new_tokens=30)
    assert decode(target, PROMPTS, TreeDrafter(*fitted, 1, 16), k=k, max_new_tokens=30).answers == chain.answers
    shorter = decode(target, PROMPTS, ChainDrafter(*fitted), k=1, max_new_tokens=30)
    assert decode(target, PROMPTS, TreeDrafter(*fitted, 1, 1), k=k, max_new_tokens=30).answers == shorter.answers


def test_a_tree_accepts_more_than_a_chain(target, fitted):
    chain = decode(target, PROMPTS, ChainDrafter(*fitted), k=3, max_new_tokens=30)
    tree = decode(target, PROMPTS, TreeDrafter(*fitted, 4, 40), k=3, max_new_tokens=30)
    assert tree.rounds < sum(len(a.accepted) for a in chain.answers)


def test_answers_end_where_the_target_ends_them(target, truths, fitted):
    eos = {truths[0][0], truths[1][7]}
    plain = decode(target, PROMPTS, max_new_tokens=24, eos_ids=eos)
    done = decode(target, PROMPTS, TreeDrafter(*fitted, 3, 9), k=3, max_new_tokens=24, eos_ids=eos)
    assert [(a.tokens, a.finish) for a in done.answers] == [(a.tokens, a.finish) for a in plain.answers]


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize(
    "conventions", [{}, {"norm_output": True, "fc_norm": True}, {"norm_before_residual": True, "norm_before_fc": True}]
)
def test_the_tree_is_that_of_a_slow_eagle_2(target: Target, conventions: dict):
    """Grown by path from the words of the paper, each node by itself in float64, with an EAGLE-3 of its own."""
    topk, nodes, k, prompt = 3, 7, 3, PROMPTS[0]
    draft, vocab = random_draft(target, seed=4, size=100, **conventions)
    batch = TreeBatch(target, [prompt], TreeDrafter(draft, vocab, topk, nodes))
    tree = batch.grower.propose(k, batch.slots)

    aux = target.states(torch.tensor([prompt]), taps=TAPS)[0][0]
    naive = Naive(draft.owned_state_dict(), draft.embed_tokens.weight, draft.conventions, 2, 1)
    ids, last = [*prompt, int(batch.last)], len(prompt) - 1

    def odds_after(path: tuple[int, ...]) -> torch.Tensor:
        h = naive.unroll(ids, aux, last, [ids[-1], *path])[-1]
        return naive.logits(h).softmax(0)

    layer, pool = {(): 1.0}, {}
    for _ in range(k):
        found = {}
        for path, value in layer.items():
            best = odds_after(path).topk(topk)
            found |= {(*path, int(vocab.ids[i])): value * float(p) for p, i in zip(*best, strict=True)}
        pool |= found
        layer = dict(sorted(found.items(), key=lambda item: -item[1])[:topk])
    expected = dict(sorted(pool.items(), key=lambda item: -item[1])[:nodes])

    assert dict(zip(paths(tree)[1:], tree.values.tolist(), strict=True)) == pytest.approx(expected, rel=1e-3)
    for path, odds in zip(paths(tree)[1:], tree.odds.tolist(), strict=True):
        assert odds == pytest.approx(pool[path] / pool.get(path[:-1], 1.0), rel=1e-3)
    assert tree.depths.tolist() == [len(path) for path in paths(tree)]
    assert max(tree.depths.tolist()) > 1


def check_rows(target: Target, prompt: list[int], drafter: TreeDrafter, k: int, rounds: int) -> list[int]:
    """Each node's logits against a whole forward over its path's text; both caches against those of a fresh prefill."""
    batch = TreeBatch(target, [prompt], drafter)
    text, accepted = [*prompt, int(batch.last)], []
    for _ in range(rounds):
        before = list(text)
        n, tokens = batch.step(k)
        for row, path in enumerate(paths(batch.tree)):
            whole = target.model(torch.tensor([[*before, *path]])).logits[0, -1]
            torch.testing.assert_close(batch.logits[row], whole, **TOLERANCE)
        text += tokens[0].tolist()
        accepted.append(int(n))
        assert len(text) == len(before) + accepted[-1] + 1
    fresh = Batch(target, [text[:-1]], ChainDrafter(drafter.draft, VocabMap.from_absolute(drafter.ids, 300)))
    assert fresh.last.tolist() == batch.last.tolist() == text[-1:]
    assert fresh.slots.lengths.tolist() == batch.slots.lengths.tolist() == [batch.cache.get_seq_length()]
    torch.testing.assert_close(batch.grower.h, fresh.drafter.h, **TOLERANCE)
    for mine, theirs in zip(batch.grower.cache._kv[0], fresh.drafter.cache._kv[0], strict=True):
        torch.testing.assert_close(mine[:, :, : len(text) - 1], theirs[:, :, : len(text) - 1], **TOLERANCE)
    for mine, theirs in zip(batch.cache.layers, fresh.cache.layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys, **TOLERANCE)
        torch.testing.assert_close(mine.values, theirs.values, **TOLERANCE)
    return accepted


def test_nodes_and_caches_are_those_of_a_plain_forward(target: Target, fitted):
    accepted = [n for prompt in PROMPTS for n in check_rows(target, prompt, TreeDrafter(*fitted, 4, 12), k=3, rounds=5)]
    assert {0, 1, 2} <= set(accepted)


@pytest.mark.parametrize("kind", ["mistral", "qwen2"])
def test_a_sliding_window_counts_positions(tiny_target: Path, kind: str):
    """All layers with a window (Mistral), and every second one (Qwen2); a draft with a window of its own."""
    import transformers

    sizes = {
        "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "num_attention_heads": 2,
        "num_key_value_heads": 1, "initializer_range": 0.2, "eos_token_id": None, "sliding_window": 5,
    }  # fmt: skip
    torch.random.manual_seed(1)
    if kind == "mistral":
        model = transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, head_dim=16))
    else:
        kinds = ["full_attention", "sliding_attention"] * 4
        config = transformers.Qwen2Config(**sizes, use_sliding_window=True, layer_types=kinds)
        model = transformers.Qwen2ForCausalLM(config)
    windowed = Target(model.eval().requires_grad_(False), None, read_facts(tiny_target), tiny_target)
    draft, vocab = random_draft(windowed, seed=2, sliding_window=4)
    for prompt in (PROMPTS[0], PROMPTS[2]):
        check_rows(windowed, prompt, TreeDrafter(draft, vocab, 4, 12), k=3, rounds=3)
        chain, tree = ChainDrafter(draft, vocab), TreeDrafter(draft, vocab, 1, 4)
        batches = [Batch(windowed, [prompt], chain), TreeBatch(windowed, [prompt], tree)]
        assert chain.propose(4, batches[0].slots).ids[0].tolist() == tree.propose(4, batches[1].slots).ids.tolist()


# ---------------------------------------------------------------- distribution

SMALL, PROMPT, TEMPERATURE = 8, [1, 4, 2], 0.8


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Draft, VocabMap]:
    """A target of eight ids, and a random draft that can say five of them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("small")
    config = LlamaConfig(
        vocab_size=SMALL, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, initializer_range=0.25, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    config.save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
        conventions = Conventions(taps=(0, 1, 2), num_target_layers=2)
        draft = Draft(DraftShape(16, 16, 32, 2, 1, 8, SMALL, 5, num_taps=3), conventions).requires_grad_(False)
    draft.set_embedding(model.get_input_embeddings().weight)
    ids = torch.tensor([0, 2, 3, 5, 7])
    return Target(model, None, read_facts(folder), folder), draft, VocabMap.from_absolute(ids, SMALL)


def odds_after(target: Target, prompt: list[int]) -> torch.Tensor:
    """The target's odds of every text of three tokens, in the order of their ids [V^3], by plain forwards."""
    odds, texts = torch.ones(1), torch.empty(1, 0, dtype=torch.long)
    for _ in range(3):
        whole = torch.cat([torch.tensor(prompt).expand(len(texts), -1), texts], 1)
        odds = (odds[:, None] * (target.model(whole).logits[:, -1] / TEMPERATURE).softmax(-1)).flatten()
        texts = torch.cat([texts.repeat_interleave(SMALL, 0), torch.arange(SMALL).repeat(len(texts))[:, None]], 1)
    return odds


def p_value(texts: torch.Tensor, odds: torch.Tensor) -> float:
    """Pearson's chi-square test of texts [N, 3] against the odds of all of them [V^3]; rare ones count as one."""
    counts = torch.bincount(texts @ torch.tensor([SMALL**2, SMALL, 1]), minlength=len(odds)).double()
    hoped = odds.double() * len(texts)
    rare = hoped < 5
    counts, hoped = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (counts, hoped))
    chi, free = ((counts - hoped) ** 2 / hoped).sum(), torch.tensor(len(hoped) - 1.0, dtype=torch.float64)
    assert free > 10
    return float(torch.special.gammaincc(free / 2, chi / 2))


def p_of_walks(small, how: Callable, seed: int, draws: int = 4000) -> float:
    """The test of texts of three tokens: of each draw what `how(rule, logits, tree)` accepts of one and the same tree,
    and what it leaves out at the end by the true odds."""
    target, draft, vocab = small
    batch = TreeBatch(target, [PROMPT], TreeDrafter(draft, vocab, 3, 11))
    odds = odds_after(target, [*PROMPT, int(batch.last)])
    batch.step(2)
    rule, rest = Sampling(TEMPERATURE, seed), torch.Generator().manual_seed(seed)
    texts = []
    for _ in range(draws):
        said = how(rule, batch.logits, batch.tree)[1][:3]
        while len(said) < 3:
            following = odds.view(SMALL, SMALL, SMALL)[tuple(said)].reshape(SMALL, -1).sum(1)
            said = [*said, int(torch.multinomial(following, 1, generator=rest))]
        texts.append(said)
    return p_value(torch.tensor(texts), odds)


def take_the_likeliest_child(rule, logits: torch.Tensor, tree: Tree) -> tuple[list[int], list[int]]:
    """Wrong: accepts a draft unseen."""
    own = rule.draw(logits)[0].tolist()
    child = int(tree.odds[tree.parents == 0].argmax())
    return [0, child + 1], [int(tree.ids[child]), own[child + 1]]


def draw_from_the_draft(rule, logits: torch.Tensor, tree: Tree) -> tuple[list[int], list[int]]:
    """Wrong: q in p's place at the root, where a child is taken with the draft's odds."""
    own = rule.draw(logits)[0].tolist()
    children = (tree.parents == 0).nonzero()[:, 0]
    child = int(children[torch.multinomial(tree.odds[children], 1, generator=rule.random)])
    return [0, child + 1], [int(tree.ids[child]), own[child + 1]]


def try_again_at_a_miss(rule, logits: torch.Tensor, tree: Tree) -> tuple[list[int], list[int]]:
    """Wrong: where no child is hit, the target is asked once more, which favours what is drafted."""
    rows, tokens = walk(rule, logits, tree)
    return walk(rule, logits, tree) if len(rows) == 1 else (rows, tokens)


def test_walks_through_a_tree_are_distributed_as_the_targets_text(small):
    assert p_of_walks(small, walk, seed=1) > 1e-4
    assert p_of_walks(small, walk, seed=2) > 1e-4
    for wrong in (take_the_likeliest_child, draw_from_the_draft, try_again_at_a_miss):
        assert p_of_walks(small, wrong, seed=1) < 1e-4, wrong.__name__


@pytest.mark.parametrize(("drafting", "draws"), [("chain", 6000), ("tree", 300)])
def test_sampled_answers_are_distributed_as_the_targets_text(small, drafting: str, draws: int):
    """End to end, prefill and several rounds. Trees go one by one, so fewer of them."""
    target, draft, vocab = small
    odds = odds_after(target, PROMPT)
    drafter = ChainDrafter(draft, vocab) if drafting == "chain" else TreeDrafter(draft, vocab, 3, 11)
    done = decode(target, [PROMPT] * draws, drafter, k=2, rule=Sampling(TEMPERATURE, seed=5), max_new_tokens=3)
    assert p_value(torch.tensor([a.tokens for a in done.answers]), odds) > 1e-4
    first = torch.tensor([a.accepted[0] for a in done.answers])
    assert first.bincount(minlength=3).min() > draws / 40, "rejections and bonus tokens both happened often"

    class Unseen(Sampling):
        """Wrong: accepts every draft."""

        def accept(self, logits, proposal):
            accepted, tokens = super().accept(logits, proposal)
            tokens[:, :-1] = proposal.ids
            return torch.full_like(accepted, proposal.ids.shape[1]), tokens

    if drafting == "chain":
        done = decode(target, [PROMPT] * draws, drafter, k=2, rule=Unseen(TEMPERATURE, seed=5), max_new_tokens=3)
        assert p_value(torch.tensor([a.tokens for a in done.answers]), odds) < 1e-4


def test_the_walk_by_hand():
    tree = Tree(torch.tensor([4, 6, 5, 7]), torch.tensor([0, 0, 1, 2]), torch.ones(4), torch.ones(4))
    assert tree.depths.tolist() == [0, 1, 1, 2, 2]
    assert tree.visible.int().tolist() == [
        [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1],
    ]  # fmt: skip

    def says(*tokens: int) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor(tokens), 9).float()

    assert walk(Greedy(), says(6, 1, 7, 1, 3), tree) == ([0, 2, 4], [6, 7, 3])
    assert walk(Greedy(), says(4, 7, 7, 1, 1), tree) == ([0, 1], [4, 7]), "7 is drafted, but not below 4"
    assert walk(Greedy(), says(5, 1, 1, 1, 1), tree) == ([0], [5])


def test_refusals(target: Target, fitted):
    with pytest.raises(BadInput, match="topk = 0"):
        TreeDrafter(*fitted, 0, 4)
    with pytest.raises(BadInput, match="one prompt at a time, not for 4"):
        TreeBatch(target, PROMPTS, TreeDrafter(*fitted, 2, 4))
    with pytest.raises(ValueError, match="before its child"):
        Tree(torch.tensor([4, 5]), torch.tensor([0, 2]), torch.ones(2), torch.ones(2))
    with pytest.raises(ValueError, match="same token"):
        Tree(torch.tensor([4, 4]), torch.tensor([0, 0]), torch.ones(2), torch.ones(2))
    for config, match in (
        (SimpleNamespace(_attn_implementation="flash_attention_2"), "flash_attention_2"),
        (SimpleNamespace(_attn_implementation="sdpa", layer_types=["chunked_attention"]), "chunked"),
    ):
        odd = SimpleNamespace(decoder=SimpleNamespace(config=config), dir="somewhere")
        with pytest.raises(BadInput, match=match):
            refuse_unmaskable(odd)  # type: ignore[arg-type]
    assert type(make_drafter(*fitted, 4)) is ChainDrafter
    trees = [make_drafter(*fitted, 3, topk=5), make_drafter(*fitted, 3, nodes=7)]
    assert [(t.topk, t.nodes) for t in trees] == [(5, 15), (4, 7)]  # type: ignore[attr-defined]


def test_prove_says_what_was_drafted(tiny_target: Path, target: Target, fitted, tmp_path: Path):
    from eyas.cli.prove import command

    save_draft(*fitted, tmp_path / "draft", facts=read_facts(tiny_target))
    (tmp_path / "chats.jsonl").write_text(json.dumps({"prompt": "the glove"}) + "\n")
    how = [str(tmp_path / "draft"), "--target", str(tiny_target), "--prompts", str(tmp_path / "chats.jsonl")]
    how += ["--max-new-tokens", "8", "--k", "2", "--ignore-eos"]
    chain = json.loads(CliRunner().invoke(command, [*how, "--json"]).stdout)
    tree = json.loads(CliRunner().invoke(command, [*how, "--json", "--topk", "3", "--nodes", "5"]).stdout)
    assert chain["settings"]["drafting"] == "chain"
    assert "nodes" not in chain["settings"]
    assert [tree["settings"][name] for name in ("drafting", "topk", "nodes", "k")] == ["tree", 3, 5, 2]
    assert tree["lossless"] is True
    assert len(tree["all_rounds"]["histogram"]) == 3, "accepted depth, 0 to k"
    shown = CliRunner().invoke(command, [*how, "--nodes", "5"]).stdout
    assert "tree of 5 nodes, depth 2, top 4" in shown
