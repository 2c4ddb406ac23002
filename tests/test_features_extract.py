"""Features are the target's own states, aligned with its tokens, however they were batched, killed or resumed."""

import json

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

import eyas.features.extract as extraction
from eyas.chat import shared_prefix
from eyas.cli import cli
from eyas.errors import BadInput, EyasError, Mismatch
from eyas.features import filling
from eyas.features.conversations import encode_all, read_lines
from eyas.features.extract import extract
from eyas.features.layout import NOT_READ, teacher_rows
from eyas.features.passes import batches
from eyas.features.reader import FeatureSet
from eyas.target import head
from eyas.target.model import Target

TAPS = [2, 4, 8]  # 8 = after the last block, before the final norm
TEXTS = ["the young hawk", "a draft guesses four tokens", "What is it?", "Paris.", "def add(a, b):\n    return", "é"]


@pytest.fixture(scope="module")
def target(tiny_target):
    return Target.load(tiny_target)


@pytest.fixture
def conversations(tmp_path):
    """Seven conversations of different lengths, two of them with two turns, one with recorded ids."""
    rows = []
    for i in range(6):
        turns = [("user", TEXTS[i]), ("assistant", TEXTS[(i + 1) % 6] * (i + 1))]
        turns += [("user", "and?"), ("assistant", TEXTS[(i + 2) % 6])] if i % 3 == 0 else []
        rows.append({"id": f"c{i}", "messages": [{"role": r, "content": c} for r, c in turns]})
    rows.append({"id": 6, "prompt_token_ids": [5, 6, 7], "response_token_ids": [8, 9, 2]})
    path = tmp_path / "conversations.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def test_states_and_teacher_are_the_targets_own(target, tiny_target, conversations, tmp_path):
    """Against transformers' plain forward, one conversation at a time."""
    counts = extract(target, conversations, tmp_path / "out", TAPS, batch_tokens=200)
    features = FeatureSet.open(tmp_path / "out", verify=True)
    features.check(target=tiny_target, taps=TAPS)
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()
    norm = model.model.norm
    documents = encode_all(conversations, target.tokenizer, vocab_size=300).documents
    assert counts["documents"] == features.num_docs == len(documents) == 7
    assert counts["supervised_tokens"] == features.supervised_tokens == sum(int(d.mask.sum()) for d in documents)
    assert features.doc_ids == ["c0", "c1", "c2", "c3", "c4", "c5", "6"]
    for i, expected in enumerate(documents):
        row = features.document(i)
        assert torch.equal(row["ids"], expected.ids)
        assert torch.equal(row["mask"], expected.mask)
        with torch.no_grad():
            out = model(row["ids"].long()[None], output_hidden_states=True)
        final, logits = out.hidden_states[-1][0], out.logits[0]
        for t, tap in enumerate(TAPS):
            state = row["taps"][:, t * 32 : (t + 1) * 32].float()
            if tap == 8:  # Hugging Face has no such entry: compare through the norm
                torch.testing.assert_close(norm(state), final, rtol=2e-2, atol=2e-2)
            else:
                torch.testing.assert_close(state, out.hidden_states[tap][0], rtol=2**-8, atol=1e-5)  # bf16 rounding
        torch.testing.assert_close(row["final"].float(), final, rtol=2**-8, atol=1e-5)
        read = teacher_rows(row["mask"])
        torch.testing.assert_close(row["logsumexp"][read], logits.logsumexp(-1)[read], rtol=1e-5, atol=1e-5)
        chosen = logits.gather(1, row["top1"].long().clamp(min=0)[:, None])[:, 0]
        torch.testing.assert_close(chosen[read], logits.max(-1).values[read], rtol=0, atol=1e-4)
        assert (row["top1"][~read] == NOT_READ).all()
        assert (row["logsumexp"][~read] == 0).all()


def test_prompts_can_be_supervised_too(target, conversations, tmp_path):
    """All but the template's opening: the states stay, and odds are there wherever something is learnt."""
    extract(target, conversations, tmp_path / "answers", TAPS)
    extract(target, conversations, tmp_path / "all", TAPS, supervise="all")
    prefix = shared_prefix(target.tokenizer)
    assert len(prefix) > 1
    one, other = FeatureSet.open(tmp_path / "answers"), FeatureSet.open(tmp_path / "all")
    for i in range(one.num_docs):
        a, b = one.document(i), other.document(i)
        opening = len(prefix) if i < 6 else 1  # recorded ids that no template opened: all but the first token
        assert b["mask"].tolist() == [0] * opening + [1] * (len(b["ids"]) - opening)
        read = a["top1"] != NOT_READ
        torch.testing.assert_close(a["taps"], b["taps"])
        assert torch.equal(a["top1"][read], b["top1"][read])
        assert bool((b["top1"][teacher_rows(b["mask"])] != NOT_READ).all())
    assert other.supervised_tokens > one.supervised_tokens


def test_alignment_on_a_toy_conversation_worked_by_hand(target, tmp_path):
    """Prompt x0 x1 x2, answer x3 x4 x5(eos): m = 0 0 0 1 1 1.

    Rows 2, 3, 4 hold the target's distribution for the answer's x3, x4, x5; the contract reads rows 3 and 4 (row i=2
    step 0, and rows 2 step 1 and 3 step 0), row 2 is the choice that prefill makes. Row 5, after the end, is not read.
    """
    rows = [{"id": "toy", "prompt_token_ids": [5, 6, 7], "response_token_ids": [8, 9, 2]}]
    extract(target, rows, tmp_path / "out", TAPS)
    row = FeatureSet.open(tmp_path / "out").document(0)
    assert row["mask"].tolist() == [0, 0, 0, 1, 1, 1]
    assert (row["top1"] != NOT_READ).tolist() == [False, False, True, True, True, False]
    for j in (2, 3, 4):  # the prefix alone decides, and nothing after it
        prefix = torch.tensor([[5, 6, 7, 8, 9, 2][: j + 1]])
        logits = target.model(prefix).logits[0, -1]
        assert int(row["top1"][j]) == int(logits.argmax())
        assert float(row["logsumexp"][j]) == pytest.approx(float(logits.logsumexp(-1)), rel=1e-5)


def test_a_batch_gives_the_states_of_one_at_a_time(target, conversations, tmp_path):
    """In float32 within 1e-5 (sums in another order), so in bf16 equal but for values that sit on a rounding edge."""
    documents = encode_all(conversations, target.tokenizer, vocab_size=300).documents
    lengths = [len(d) for d in documents]
    ids = torch.zeros(len(documents), max(lengths), dtype=torch.long)
    for i, d in enumerate(documents):
        ids[i, : len(d)] = d.ids
    taps, final = target.states(ids, lengths, TAPS)
    for i, d in enumerate(documents):
        alone_taps, alone_final = target.states(d.ids.long()[None], [len(d)], TAPS)
        torch.testing.assert_close(taps[i, : len(d)], alone_taps[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(final[i, : len(d)], alone_final[0], rtol=1e-5, atol=1e-5)
    extract(target, conversations, tmp_path / "batched", TAPS, batch_tokens=10_000)
    extract(target, conversations, tmp_path / "single", TAPS, batch_tokens=1)
    a, b = (FeatureSet.open(tmp_path / name).shard(0) for name in ("batched", "single"))
    for name in ("ids", "mask", "offsets", "top1"):
        assert torch.equal(a[name], b[name])
    for name in ("taps", "final"):
        torch.testing.assert_close(a[name].float(), b[name].float(), rtol=2**-7, atol=1e-5)
        assert (a[name] != b[name]).float().mean() < 0.01
    torch.testing.assert_close(a["logsumexp"], b["logsumexp"], rtol=1e-5, atol=1e-5)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 200), st.integers(0, 50))
def test_batches_hold_every_document_and_respect_both_budgets(lengths: list[int], tokens: int, max_padding: int):
    groups = list(batches(lengths, tokens, max_padding))
    assert sorted(i for g in groups for i in g) == list(range(len(lengths)))
    assert [lengths[i] for g in groups for i in g] == sorted(lengths, reverse=True)
    longest = [lengths[g[0]] for g in groups]
    padding = [n * len(g) - sum(lengths[i] for i in g) for n, g in zip(longest, groups, strict=True)]
    for n, g, waste in zip(longest, groups, padding, strict=True):
        assert len(g) == 1 or n * len(g) <= tokens  # a document longer than the budget runs alone
        assert waste <= max_padding
    for n, g, waste, following in zip(longest, groups, padding, groups[1:], strict=False):
        more = n - lengths[following[0]]
        assert n * (len(g) + 1) > tokens or waste + more > max_padding  # no pass ends without a reason


def test_the_head_runs_in_blocks_and_any_other_in_chunks(target, monkeypatch):
    """All ways say the same: blocks of ids and of rows, chunks of rows of a head that is no plain matrix."""
    final = torch.randn(11, 32, generator=torch.Generator().manual_seed(0))
    logits = target.head(final).float()
    best, total = target.choices(final)
    assert (best.dtype, total.dtype) == (torch.int32, torch.float32)
    monkeypatch.setattr(head, "HEAD_BLOCK", 77)
    monkeypatch.setattr(head, "LOGIT_BYTES", 4 * 77 * 3)  # three rows at a time
    blocks = target.choices(final)
    monkeypatch.setattr(head, "LOGIT_BYTES", 4 * 300 * 3)
    monkeypatch.setattr(target, "_head", torch.nn.Sequential(target._head))
    for said in ((best, total), blocks, target.choices(final)):
        assert torch.equal(said[0].long(), logits.argmax(-1))
        torch.testing.assert_close(said[1], logits.logsumexp(-1))
    assert target.choices(final[:0])[0].shape == (0,)


def test_a_killed_extraction_goes_on_and_ends_in_the_same_files(target, conversations, tmp_path, monkeypatch):
    small = {"taps": TAPS, "shard_bytes": 60 * (3 * 32 + 32) * 2}
    extract(target, conversations, tmp_path / "whole", **small)
    real, calls = filling.fill_shard, []

    def counting(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(filling, "fill_shard", counting)
    with pytest.raises(KeyboardInterrupt):
        extract(target, conversations, tmp_path / "killed", **small)
    with pytest.raises(BadInput, match="not finished"):
        FeatureSet.open(tmp_path / "killed")
    extract(target, conversations, tmp_path / "killed", **small)
    shards = sorted(p.name for p in (tmp_path / "whole").glob("*.safetensors"))
    assert len(shards) >= 4
    assert len(calls) == 1 + len(shards)  # two shards before, the interrupted one twice, each of the others once
    for name in [*shards, "shards.json"]:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes()
    calls[:] = [1, 1, 1]
    extract(target, conversations, tmp_path / "killed", **small)
    assert len(calls) == 3  # finished and unchanged: nothing runs
    path = tmp_path / "killed" / shards[1]
    path.write_bytes(path.read_bytes()[:-7])
    extract(target, conversations, tmp_path / "killed", **small)
    assert len(calls) == 4  # the truncated shard alone
    assert path.read_bytes() == (tmp_path / "whole" / shards[1]).read_bytes()


def test_features_of_other_taps_or_another_target_are_not_overwritten(
    target, make_tiny_target, conversations, tmp_path
):
    extract(target, conversations, tmp_path / "out", TAPS)
    with pytest.raises(Mismatch, match=r"\(2, 4, 8\).*\(2, 4, 5\).*--replace"):
        extract(target, conversations, tmp_path / "out", [2, 4, 5])
    other = make_tiny_target(tmp_path / "other", seed=1)
    with pytest.raises(Mismatch, match="target"):
        extract(other, conversations, tmp_path / "out", TAPS)
    with pytest.raises(Mismatch, match="target"):
        FeatureSet.open(tmp_path / "out").check(target=other)
    extract(target, conversations, tmp_path / "out", [2, 4, 5], replace=True)
    assert FeatureSet.open(tmp_path / "out", verify=True).meta.taps == (2, 4, 5)


def test_what_cannot_be_used_is_named_and_counted(target, conversations, tmp_path):
    lines = conversations.read_text().splitlines()
    long = {"id": "long", "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y" * 400}]}
    mute = {"id": "mute", "messages": [{"role": "user", "content": "x"}]}
    conversations.write_text("\n".join([*lines[:2], json.dumps(long), "", json.dumps(mute)]) + "\n")
    counts = extract(target, conversations, tmp_path / "out", TAPS)
    assert counts["documents"] == 2
    assert counts["set_aside"] == {"no_assistant_turn": 1, "too_long": 1}
    aside = [json.loads(line) for line in (tmp_path / "out" / "set-aside.jsonl").read_text().splitlines()]
    assert [(a["id"], a["line"], a["reason"]) for a in aside] == [
        ("long", 3, "too_long"),
        ("mute", 5, "no_assistant_turn"),
    ]
    assert FeatureSet.open(tmp_path / "out").manifest["counts"] == counts


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"id": "x", "messages": [', "not JSON"),
        ("[1, 2]", "a JSON list"),
        ('{"text": "x"}', r"expected a JSON object with `messages`"),
        ('{"prompt_token_ids": [1], "response_token_ids": [300]}', "ids from 0 to 299"),
        ('{"prompt_token_ids": [1], "response_token_ids": []}', "no token is the assistant's"),
        ('{"conversations": [{"from": "alien", "value": "x"}]}', "alien"),
    ],
)
def test_a_bad_line_stops_with_its_number_or_is_set_aside(target, conversations, tmp_path, line, says):
    lines = conversations.read_text().splitlines()
    conversations.write_text("\n".join([lines[0], line, lines[1]]))
    with pytest.raises(BadInput, match=rf"conversations\.jsonl, line 2.*{says}.*--skip-bad"):
        extract(target, conversations, tmp_path / "out", TAPS)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").glob("*.safetensors"))
    counts = extract(target, conversations, tmp_path / "out", TAPS, skip_bad=True)
    assert counts["documents"] == 2
    assert sum(counts["set_aside"].values()) == 1


def test_nothing_usable_says_why(target, tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text("")
    with pytest.raises(BadInput, match="it is empty"):
        extract(target, path, tmp_path / "out", TAPS)
    path.write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    with pytest.raises(BadInput, match=r"1 no_assistant_turn.*line 1"):
        extract(target, path, tmp_path / "out", TAPS)
    with pytest.raises(BadInput, match="cannot be read"):
        list(read_lines(tmp_path / "none.jsonl"))


def test_sharegpt_spelling_and_gzip(target, tmp_path):
    import gzip

    rows = [{"conversations": [{"from": "human", "value": "What is it?"}, {"from": "gpt", "value": "Paris."}]}]
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.write(json.dumps(rows[0]) + "\n")
    documents = encode_all(tmp_path / "c.jsonl.gz", target.tokenizer, vocab_size=300).documents
    assert target.tokenizer.decode(documents[0].ids[documents[0].mask == 1]) == "Paris.<|im_end|>"
    assert documents[0].id == "line-1"


def test_a_disk_without_room_is_said_before_anything_runs(target, conversations, tmp_path, monkeypatch):
    monkeypatch.setattr(extraction.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(EyasError, match=r"MB.*free some space"):
        extract(target, conversations, tmp_path / "out", TAPS)
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_the_command_shows_the_mask_and_writes_features(tiny_target, conversations, tmp_path, monkeypatch):
    runner = CliRunner()
    monkeypatch.setenv("NO_COLOR", "1")
    base = ["extract", str(conversations), "--target", str(tiny_target)]
    shown = runner.invoke(cli, [*base, "--show", "2"], catch_exceptions=False)
    assert shown.exit_code == 0
    assert "⟦a draft guesses four tokens<|im_end|>⟧↵" in shown.output
    assert shown.output.count("\nc") == 2
    assert "\x1b" not in shown.output
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[30;42ma draft" in runner.invoke(cli, [*base, "--show"], color=True).output
    shown = json.loads(runner.invoke(cli, [*base, "--show", "--json"]).output)
    assert [c["id"] for c in shown["conversations"]] == ["c0", "c1", "c2"]
    written = runner.invoke(cli, [*base, "--out", str(tmp_path / "out"), "--taps", "2,4,5", "--json"])
    assert json.loads(written.stdout)["documents"] == 7
    assert "7 conversations" in runner.invoke(cli, [*base, "--out", str(tmp_path / "out"), "--taps", "2,4,5"]).output
    for wrong in (["--taps", "two"], ["--show", "x"], [], ["--out", "x", "--from-specforge", "y"]):
        assert runner.invoke(cli, [*base, *wrong]).exit_code == 2


def test_the_tokenizer_of_a_folder_is_the_same(tiny_target, target, conversations):
    """`encode_all` needs no model: what --show prints is what extract uses."""
    alone = encode_all(conversations, AutoTokenizer.from_pretrained(tiny_target), vocab_size=300).documents
    loaded = encode_all(conversations, target.tokenizer, vocab_size=300).documents
    assert all(torch.equal(a.ids, b.ids) and torch.equal(a.mask, b.mask) for a, b in zip(alone, loaded, strict=True))
