"""Files in the layouts of speculators and SpecForge become exactly the features that Eyas would have made itself."""

import gzip
import io
import json

import pyarrow as pa
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from eyas.cli import cli
from eyas.errors import BadInput, EyasError, Mismatch
from eyas.features.extract import extract
from eyas.features.foreign import import_foreign, without_tail
from eyas.features.layout import teacher_rows
from eyas.features.reader import FeatureSet
from eyas.target.model import Target

TAPS = [2, 4, 5]
EOS, NEWLINE = 2, 13


@pytest.fixture(scope="module")
def target(tiny_target):
    return Target.load(tiny_target)


@pytest.fixture(scope="module")
def own(target, tmp_path_factory):
    """The reference: rows of ids, and their features made by Eyas."""
    rows = [
        {"id": str(i), "prompt_token_ids": [5 + i, 6, 7][: 2 + i % 2], "response_token_ids": [8, 9 + i, EOS]}
        for i in range(12)
    ]
    out = tmp_path_factory.mktemp("own")
    extract(target, rows, out, TAPS)
    return FeatureSet.open(out)


def states(target, ids, taps):
    return target.states(ids.long()[None], None, taps)


def write_speculators(target, own, folder, dtype=torch.float32):
    """hidden_states [L, 4, H]: three taps and the stream after the last block, before the norm."""
    (folder / "hidden_states").mkdir(parents=True)
    rows = []
    for i in range(own.num_docs):
        doc = own.document(i)
        tapped, _ = states(target, doc["ids"], [*TAPS, 8])
        save_file(
            {"hidden_states": tapped[0].unflatten(-1, (4, 32)).to(dtype).contiguous(), "token_ids": doc["ids"].long()},
            folder / "hidden_states" / f"hs_{i}.safetensors",
        )
        rows.append({"input_ids": doc["ids"].tolist(), "loss_mask": doc["mask"].tolist(), "seq_len": len(doc["ids"])})
    half = len(rows) // 2
    for n, part in enumerate((rows[:half], rows[half:])):
        table = pa.Table.from_pylist(part)
        with (
            pa.OSFile(str(folder / f"data-0000{n}-of-00002.arrow"), "wb") as sink,
            pa.ipc.new_stream(sink, table.schema) as w,
        ):
            w.write_table(table)
    names = [{"filename": f"data-0000{n}-of-00002.arrow"} for n in range(2)]
    (folder / "state.json").write_text(json.dumps({"_data_files": names}))
    return folder


def write_specforge(target, own, folder, newline=True):
    """As SpecForge writes them: final state after the norm, and a newline supervised after the end of the turn."""
    for i in range(own.num_docs):
        doc = own.document(i)
        ids, mask = doc["ids"].long(), doc["mask"].long()
        if newline:
            ids, mask = torch.cat([ids, torch.tensor([NEWLINE])]), torch.cat([mask, torch.ones(1, dtype=torch.long)])
        tapped, final = states(target, ids, TAPS)
        record = {"input_ids": ids, "loss_mask": mask, "hidden_state": final, "aux_hidden_state": tapped}
        place = folder / f"rows_{i // 5 * 5}-{i // 5 * 5 + 5}" / f"data_{i}.ckpt"
        place.parent.mkdir(parents=True, exist_ok=True)
        if i % 2:
            buffer = io.BytesIO()
            torch.save(record, buffer)
            place.with_suffix(".ckpt.gz").write_bytes(gzip.compress(buffer.getvalue()))
        else:
            torch.save(record, place)
    return folder


def assert_same(made, own, tail=0):
    assert made.num_docs == own.num_docs
    for i in range(own.num_docs):
        a, b = made.document(i), own.document(i)
        n = len(b["ids"])
        assert len(a["ids"]) == n + tail
        for name in ("ids", "mask"):
            assert torch.equal(a[name][:n], b[name])
        assert not a["mask"][n:].any()
        read = teacher_rows(b["mask"])
        assert torch.equal(a["top1"][:n], b["top1"])
        torch.testing.assert_close(a["logsumexp"][:n][read], b["logsumexp"][read], rtol=1e-4, atol=1e-4)
        for name in ("taps", "final"):  # both rounded to bf16, from sums in another order
            torch.testing.assert_close(a[name][:n].float(), b[name].float(), rtol=2**-7, atol=1e-4)


def test_speculators_files_get_the_final_norm_and_their_masks(target, own, tiny_target, tmp_path):
    source = write_speculators(target, own, tmp_path / "data")
    counts = import_foreign("speculators", source, tiny_target, tmp_path / "out", TAPS)
    made = FeatureSet.open(tmp_path / "out", verify=True)
    assert_same(made, own)
    assert made.doc_ids[10] == "hidden_states/hs_10"  # in the order of their numbers, not of their letters
    assert counts["agreement"] == own.manifest["counts"]["agreement"]
    made.check(target=tiny_target, taps=TAPS)
    masks = tmp_path / "masks.jsonl"
    lines = [
        {"input_ids": own.document(i)["ids"].tolist(), "loss_mask": own.document(i)["mask"].tolist()} for i in range(12)
    ]
    masks.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for arrow in source.glob("*.arrow"):
        arrow.unlink()
    import_foreign("speculators", source, tiny_target, tmp_path / "again", TAPS, masks=masks)
    assert_same(FeatureSet.open(tmp_path / "again"), own)
    with pytest.raises(BadInput, match="no_mask"):
        import_foreign("speculators", source, tiny_target, tmp_path / "none", TAPS)


def test_specforge_files_lose_the_newline_that_they_supervise(target, own, tiny_target, tmp_path):
    source = write_specforge(target, own, tmp_path / "cache")
    counts = import_foreign("specforge", source, tiny_target, tmp_path / "out", TAPS)
    assert_same(FeatureSet.open(tmp_path / "out", verify=True), own, tail=1)
    assert counts["supervised_tokens"] == own.supervised_tokens


def test_the_tail_after_the_end_of_turn_is_cut_and_nothing_else():
    ids = torch.tensor([5, 8, EOS, 13, 5, 8, 9, 5, EOS, 8, EOS, 13])
    mask = torch.tensor([0, 1, 1, 1, 0, 1, 1, 0, 1, 1, 1, 1])
    assert without_tail(ids, mask, [EOS]).tolist() == [0, 1, 1, 0, 0, 1, 1, 0, 1, 1, 1, 0]


def test_an_import_goes_on_and_sees_changed_files(target, own, tiny_target, tmp_path, monkeypatch):
    import eyas.features.foreign as foreign

    source = write_specforge(target, own, tmp_path / "cache")
    size = {"shard_bytes": 3 * 7 * 273}
    import_foreign("specforge", source, tiny_target, tmp_path / "out", TAPS, **size)
    before = (tmp_path / "out" / "shards.json").read_bytes()
    stored = []
    real = foreign._store
    monkeypatch.setattr(foreign, "_store", lambda *a: (stored.append(a[3].id), real(*a)))
    import_foreign("specforge", source, tiny_target, tmp_path / "out", TAPS, **size)
    assert stored == []
    (tmp_path / "out" / "manifest.json").unlink()  # killed before the end
    (tmp_path / "out" / "shard-00001.safetensors").unlink()
    import_foreign("specforge", source, tiny_target, tmp_path / "out", TAPS, **size)
    assert 0 < len(stored) < 12
    assert (tmp_path / "out" / "shards.json").read_bytes() == before
    record = torch.load(source / "rows_0-5" / "data_0.ckpt", weights_only=True)
    torch.save({**record, "hidden_state": record["hidden_state"] * 2}, source / "rows_0-5" / "data_0.ckpt")
    stored.clear()
    import_foreign("specforge", source, tiny_target, tmp_path / "out", TAPS, **size)
    assert "rows_0-5/data_0" in stored
    assert len(stored) < 12


def test_what_does_not_fit_is_refused_naming_both_sides(target, own, tiny_target, make_tiny_target, tmp_path):
    source = write_specforge(target, own, tmp_path / "cache")
    with pytest.raises(Mismatch, match=r"3 taps.*2 taps \[2, 4\]"):
        import_foreign("specforge", source, tiny_target, tmp_path / "out", [2, 4])
    with pytest.raises(BadInput, match=r"no .*hs_"):
        import_foreign("speculators", source, tiny_target, tmp_path / "out", TAPS)
    first = source / "rows_0-5" / "data_0.ckpt"
    whole = first.read_bytes()
    first.write_bytes(whole[:500])
    with pytest.raises(BadInput, match=r"data_0\.ckpt.*--skip-bad"):
        import_foreign("specforge", source, tiny_target, tmp_path / "out", TAPS)
    counts = import_foreign("specforge", source, tiny_target, tmp_path / "out", TAPS, skip_bad=True)
    assert counts["documents"] == 11
    assert counts["set_aside"] == {"malformed": 1}
    record = torch.load(io.BytesIO(whole), weights_only=True)
    torch.save({**record, "hidden_state": record["hidden_state"] * float("nan")}, first)
    with pytest.raises(EyasError, match=r"data_0\.ckpt.*not finite"):
        import_foreign("specforge", source, tiny_target, tmp_path / "nan", TAPS)
    torch.save({**record, "hidden_state": record["hidden_state"][..., :16]}, first)
    with pytest.raises(Mismatch, match=r"16 wide.*32"):
        import_foreign("specforge", source, tiny_target, tmp_path / "narrow", TAPS)


def test_a_pickle_with_code_is_never_run(tiny_target, tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    (tmp_path / "cache").mkdir()
    torch.save({"input_ids": Evil()}, tmp_path / "cache" / "data_0.ckpt")
    with pytest.raises(BadInput, match="not a readable checkpoint of tensors"):
        import_foreign("specforge", tmp_path / "cache", tiny_target, tmp_path / "out", TAPS)
    assert not (tmp_path / "ran").exists()


def test_ids_that_are_not_those_of_the_dataset_are_refused(target, own, tiny_target, tmp_path):
    source = write_speculators(target, own, tmp_path / "data")
    a, b = (source / "hidden_states" / f"hs_{i}.safetensors" for i in (0, 2))
    swapped = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(swapped)
    with pytest.raises(BadInput, match=r"hs_0\.safetensors.*row 0"):
        import_foreign("speculators", source, tiny_target, tmp_path / "out", TAPS)


def test_the_command_imports(target, own, tiny_target, tmp_path):
    source = write_specforge(target, own, tmp_path / "cache")
    arguments = [
        "--from-specforge",
        str(source),
        "--target",
        str(tiny_target),
        "--taps",
        "2,4,5",
        "--out",
        str(tmp_path / "o"),
    ]
    result = CliRunner().invoke(cli, ["extract", *arguments, "--json"], catch_exceptions=False)
    assert json.loads(result.stdout)["documents"] == 12
    assert "first choice" in CliRunner().invoke(cli, ["extract", *arguments]).output
