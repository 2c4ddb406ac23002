"""A hostile collection: drafts, targets, features, prompts and recipes that somebody made to do harm, under the real
verbs. Each is answered or refused in one line; nothing outside is read or written, nothing runs, nothing hangs.

pytest -q tests/test_hostile.py
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafts import make_draft, write_flat
from eyas import untrusted
from eyas.draft.checkpoint import save_draft
from fuzzing import inert
from hostile import RAW, eyas
from training import conversations, material

IDS = "eagle_aux_hidden_state_layer_ids"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
STEER = (
    "\x1b]0;owned\x07\x1b[2J\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\\u202egnp.exe\x9b31m\r<script>alert(1)</script>"
)
CASES: dict[str, tuple[Callable[[Path], Any], str]] = {}


def case(words: str) -> Callable[[Callable[[Path], Any]], Callable[[Path], Any]]:
    """Keep `make(folder)`, which makes a draft; words: of its refusal ("" where it is answered)."""

    def keep(make: Callable[[Path], Any]) -> Callable[[Path], Any]:
        CASES[make.__name__] = (make, words)
        return make

    return keep


def flat(folder: Path, **changes: Any) -> Path:
    return write_flat(folder, *make_draft(), **{IDS: [2, 4, 5], **changes})


def sharded(folder: Path, name: str) -> None:
    """The index places a tensor in a file of that name."""
    write_flat(folder, *make_draft(), container="sharded", **{IDS: [2, 4, 5]})
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["fc.weight"] = name
    (folder / INDEX).write_text(json.dumps(index))


def forged(folder: Path, table: str, data: bytes = b"", length: int | None = None) -> None:
    raw = table.encode()
    head = struct.pack("<Q", len(raw) if length is None else length)
    (flat(folder) / WEIGHTS).write_bytes(head + raw + data)


# ---------------------------------------------------------------- ways out of the folder


@case("leads out of the folder")
def an_index_that_climbs(folder: Path) -> None:
    sharded(folder, "../../../../../../etc/passwd")


@case("leads out of the folder")
def an_index_with_an_absolute_path(folder: Path) -> None:
    sharded(folder, "/etc/passwd")


@case("leads out of the folder")
def a_folder_that_is_a_link_out(folder: Path) -> None:
    sharded(folder, "out/passwd.safetensors")
    (folder / "out").symlink_to("/etc")


@case("is not a readable safetensors file")
def weights_that_are_a_link_to_something_else(folder: Path) -> None:
    (flat(folder) / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to("/etc/passwd")


@case("is not readable JSON")
def a_config_that_is_a_link_to_something_else(folder: Path) -> None:
    (flat(folder) / "config.json").unlink()
    (folder / "config.json").symlink_to("/etc/passwd")


@case("holds no weights")
def weights_that_are_a_link_to_themselves(folder: Path) -> None:
    (flat(folder) / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(WEIGHTS)


# ---------------------------------------------------------------- what is no file


@case("holds no weights")
def weights_that_are_a_pipe(folder: Path) -> None:
    (flat(folder) / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


@case("config.json")
def a_config_that_is_a_pipe(folder: Path) -> None:
    (flat(folder) / "config.json").unlink()
    os.mkfifo(folder / "config.json")


@case("holds no weights")
def weights_that_are_a_folder(folder: Path) -> None:
    (flat(folder) / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()


@case("holds no weights")
def weights_that_are_endless(folder: Path) -> None:
    (flat(folder) / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to("/dev/zero")


# ---------------------------------------------------------------- sizes


@case("its header is said to be")
def a_header_of_an_exbibyte(folder: Path) -> None:
    forged(folder, "{}", length=1 << 60)


@case("has the shape")
def a_shape_of_two_to_the_63(folder: Path) -> None:
    forged(folder, '{"fc.weight":{"dtype":"F32","shape":[4611686018427387904,2],"data_offsets":[0,0]}}')


@case("has the data_offsets")
def a_place_before_the_file(folder: Path) -> None:
    forged(folder, '{"fc.weight":{"dtype":"U8","shape":[9],"data_offsets":[-8,1]}}', b"x")


@case("overlaps")
def tensors_in_one_another(folder: Path) -> None:
    entry = '{"dtype":"U8","shape":[2],"data_offsets":[%d,%d]}'
    forged(folder, f'{{"a":{entry % (0, 2)},"b":{entry % (1, 3)}}}', b"abc")


@case("nested too deep")
def a_config_nested_100_000_deep(folder: Path) -> None:
    (flat(folder) / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)


@case("nested more than 100 deep")
def a_config_nested_as_deep_as_python_reads(folder: Path) -> None:
    (flat(folder) / "config.json").write_text('{"a":' * 400 + "1" + "}" * 400)


@case("its header is not JSON")
def a_header_nested_100_000_deep(folder: Path) -> None:
    forged(folder, '{"a":' * 100_000 + "1" + "}" * 100_000)


@case("is believed")
def layers_without_end(folder: Path) -> None:
    flat(folder, num_hidden_layers=1 << 40)


@case("its parts are compressed")
def a_zip_bomb(folder: Path) -> None:
    file = write_flat(folder, *make_draft(), container="bin", **{IDS: [2, 4, 5]}) / "pytorch_model.bin"
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new, zipfile.ZipFile(file) as old:
        for part in old.infolist():
            new.writestr(part.filename, bytes(1 << 27) if part.filename.endswith("data/0") else old.read(part.filename))
    file.write_bytes(out.getvalue())


# ---------------------------------------------------------------- code


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def ran(folder: Path) -> Path:
    """What exists once code of a draft ran."""
    return folder.parent / "the-code-ran"


@case("which is code, not data")
def a_pickle_with_code(folder: Path) -> None:
    (flat(folder) / WEIGHTS).unlink()
    torch.save({"fc.weight": Evil(ran(folder))}, folder / "pytorch_model.bin")


@case("cannot be read as plain tensors")
def a_bare_pickle_with_code(folder: Path) -> None:
    (flat(folder) / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(ran(folder))))


@case("")
def code_beside_the_config(folder: Path) -> None:
    """`auto_map` is transformers' way to run a draft's own Python."""
    flat(folder, auto_map={"AutoConfig": "evil.Config", "AutoModel": "evil.Model"})
    (folder / "evil.py").write_text(
        f"import os; os.mkdir({str(ran(folder))!r})\nclass Config: pass\nclass Model: pass\n"
    )


# ---------------------------------------------------------------- text that steers


@case("is no name of a tensor")
def a_name_of_a_tensor_that_steers(folder: Path) -> None:
    file = flat(folder) / WEIGHTS
    save_file({**load_file(file), STEER: torch.zeros(1)}, file)


@case("")
def a_config_that_steers(folder: Path) -> None:
    flat(folder, architectures=[STEER], hidden_act=STEER, _name_or_path=STEER, target_model_type=STEER,
         speculators_version=STEER, **{STEER: STEER})  # fmt: skip


@case("")
def metadata_that_steers(folder: Path) -> None:
    file = flat(folder) / WEIGHTS
    save_file(load_file(file), file, {"format": STEER, STEER: STEER})


@case("")
def an_eyas_json_that_steers(folder: Path) -> None:
    save_draft(*make_draft(), folder)
    told = json.loads((folder / "eyas.json").read_text())
    told |= {"eyas_version": STEER, "provenance": {STEER: STEER}, "predicted": {"accept_length": STEER}}
    told["target"] |= {"target": STEER, "facts": STEER}
    (folder / "eyas.json").write_text(json.dumps(told))


@case("")
def numbers_that_are_none_and_keys_given_twice(folder: Path) -> None:
    text = (flat(folder) / "config.json").read_text().rstrip().removesuffix("}")
    (folder / "config.json").write_text(text + ', "rms_norm_eps": NaN, "initializer_range": 1e999, "x": 1, "x": 2}')


VERBS = {
    "inspect": ["inspect", "{draft}", "--all"],
    "doctor": ["doctor", "{draft}", "--static", "--html", "{out}/page.html"],
    "export": ["export", "{draft}", "{out}/exported"],
    "repair": ["repair", "{draft}", "--auto", "--out", "{out}/mended"],
    "verify": ["verify", "{draft}"],
}


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The verbs once in this process, so that no child has to import what they import."""
    from click.testing import CliRunner

    from eyas.cli import cli

    folder = tmp_path_factory.mktemp("warm")
    flat(folder / "draft")
    for arguments in VERBS.values():
        CliRunner().invoke(cli, [a.format(draft=folder / "draft", out=folder) for a in arguments])


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_draft_is_harmless(tmp_path: Path, name: str) -> None:
    make, words = CASES[name]
    draft, out = tmp_path / "collection" / "draft", tmp_path / "out"
    out.mkdir()
    make(draft)
    before = {path for path in tmp_path.rglob("*") if not path.is_relative_to(out)}
    for verb, arguments in VERBS.items():
        said = eyas(*(a.format(draft=draft, out=out) for a in arguments)).harmless()
        if words and verb in ("inspect", "export"):
            said.refused(str(draft), words)
    assert not ran(draft).exists(), "code of the draft ran"
    assert {path for path in tmp_path.rglob("*") if not path.is_relative_to(out)} == before
    if (out / "page.html").exists():
        page = (out / "page.html").read_text()
        assert inert(page) and not RAW.search(page)
    for made in (out / "exported", out / "mended"):
        for path in made.rglob("*"):
            assert not path.is_symlink()


# ---------------------------------------------------------------- features


@pytest.fixture(scope="module")
def m(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return material(tiny_target, tmp_path_factory)


def edited(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def shard_with(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    path.unlink()
    save_file(tensors, path, metadata)


def listed(features: Path) -> None:
    """Let the index say what the shard is now, as an attacker would."""
    import hashlib

    path = features / "shard-00000.safetensors"
    now = {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    edited(features / "shards.json", lambda v: v["shards"][0].update(now))


def _ids_outside(features: Path) -> None:
    shard_with(features / "shard-00000.safetensors", lambda t: t["ids"].fill_(1 << 30))


def _choices_outside(features: Path) -> None:
    shard_with(features / "shard-00000.safetensors", lambda t: t["top1"].fill_(1 << 30))


def _offsets(features: Path) -> None:
    shard_with(features / "shard-00000.safetensors", lambda t: t["offsets"].mul_(-1))


def _narrow(features: Path) -> None:
    shard_with(features / "shard-00000.safetensors", lambda t: t.update(taps=t["taps"][:, :8].contiguous()))


def _pipe(features: Path) -> None:
    (features / "shards.json").unlink()
    os.mkfifo(features / "shards.json")


FEATURES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a shard elsewhere": (
        lambda f: edited(f / "shards.json", lambda v: v["shards"][0].update(name="../../../etc/passwd")), "no name of"),
    "a manifest that leads out": (
        lambda f: edited(f / "manifest.json", lambda v: v["files"].update({"../../x": "0"})), "leads out"),
    "sizes that are text": (
        lambda f: edited(f / "shards.json", lambda v: v["meta"].update(hidden_size=STEER)), "must be sizes"),
    "a list for an index": (lambda f: (f / "shards.json").write_text("[" * 90 + "]" * 90), "not an index"),
    "ids outside the vocabulary": (_ids_outside, "ids run from"),
    "choices outside the vocabulary": (_choices_outside, "top1 run from"),
    "offsets below zero": (_offsets, "its offsets are not"),
    "taps of another width": (_narrow, "taps is"),
    "a pipe for an index": (_pipe, "no features"),
}  # fmt: skip


@pytest.mark.parametrize("name", FEATURES)
def test_hostile_features_are_refused(m: Any, tmp_path: Path, name: str) -> None:
    change, words = FEATURES[name]
    features, vocab = tmp_path / "features", tmp_path / "vocab"
    shutil.copytree(m.features.dir, features)
    m.vocab_map.save(vocab / "vocab.safetensors")
    change(features)
    if name.endswith(("vocabulary", "zero", "width")):  # else the checksum would tell
        listed(features)
    arguments = ["train", str(features), "--vocab", str(vocab), "--target", str(m.target), "--out", str(tmp_path / "o")]
    eyas(*arguments, "--set", "steps=1", "--set", "intermediate_size=16").refused(str(features), words)
    eyas("vocab", str(features), "--size", "50", "--target", str(m.target), "--out", str(tmp_path / "v")) \
        .harmless()  # fmt: skip
    assert not (tmp_path / "o").exists() or not list((tmp_path / "o").iterdir())


# ---------------------------------------------------------------- prompts, conversations, recipes, targets


def test_prompts_that_steer_are_answered_and_shown_harmless(tiny_target: Path, tmp_path: Path) -> None:
    rows = [{"prompt": STEER, "id": STEER, "source": STEER}, {"prompt": "Hi"}, {"prompt": "[" * 2000}]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"prompt": "\\ud800"}\n')
    out = tmp_path / "answers"
    base = ["regenerate", str(prompts), "--target", str(tiny_target), "--out", str(out), "--max-new-tokens", "4"]
    eyas(*base).refused("prompts.jsonl, line 4")
    eyas(*base, "--skip-bad").harmless()
    talks = tmp_path / "talks.jsonl"
    said = {"messages": [{"role": "user", "content": STEER}, {"role": "assistant", "content": STEER}], "id": STEER}
    talks.write_text(json.dumps(said) + "\n" + json.dumps({**said, "messages": STEER}) + "\n")
    shown = eyas("extract", str(talks), "--target", str(tiny_target), "--show", "5", "--skip-bad")
    assert "\\x1b]0;owned" in shown.harmless().out and shown.code == 0


def _recipe(text: str) -> Callable[[Path], list[str]]:
    def make(folder: Path) -> list[str]:
        (folder / "recipe.yaml").write_text(text)
        return ["run", str(folder / "recipe.yaml"), "--out", str(folder / "run")]

    return make


def _laughs() -> str:
    names = [chr(97 + i) for i in range(12)]
    lines = [f"{names[0]}: &{names[0]} [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in itertools.pairwise(names)]
    return "\n".join(lines)


def _talks(name: str, data: bytes) -> Callable[[Path], list[str]]:
    def make(folder: Path) -> list[str]:
        path = folder / name
        path.write_bytes(data)
        return ["extract", str(path), "--target", "{target}", "--out", str(folder / "features")]

    return make


def _target(change: Callable[[Path], object]) -> Callable[[Path], list[str]]:
    def make(folder: Path) -> list[str]:
        target = folder / "target"
        shutil.copytree(f"{_target.place}", target)  # type: ignore[attr-defined]
        change(target)
        (folder / "t.jsonl").write_text("".join(json.dumps(c) + "\n" for c in conversations(2, 1)))
        return ["extract", str(folder / "t.jsonl"), "--target", str(target), "--out", str(folder / "features")]

    return make


def _gguf(data: bytes) -> Callable[[Path], list[str]]:
    def make(folder: Path) -> list[str]:
        (folder / "x.gguf").write_bytes(data)
        return ["ask", "--target", str(folder / "x.gguf"), "--count", "1", "--out", str(folder / "asked")]

    return make


def _index_out(target: Path) -> None:
    (target / WEIGHTS).unlink()
    (target / INDEX).write_text(json.dumps({"weight_map": {"model.embed_tokens.weight": "../../../etc/passwd"}}))


OTHERS: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "a recipe that laughs": (_recipe(_laughs()), "its aliases make more than"),
    "a recipe that holds itself": (_recipe("train: &a [*a]"), "a value holds itself"),
    "a recipe with code": (_recipe("train: !!python/object/apply:os.mkdir [/tmp/the-code-ran]"), "recipe.yaml, line 1"),
    "a recipe nested deep": (_recipe("[" * 100_000), "nested more than 100 deep"),
    "a recipe with a date that is none": (_recipe("seed: 2001-99-99"), "recipe.yaml"),
    "a recipe that steers": (_recipe(json.dumps({STEER: {STEER: 1}})), "recipe.yaml"),
    "conversations that are no gzip": (_talks("t.jsonl.gz", b"\x1f\x8b\x08" + b"x" * 99), "t.jsonl.gz"),
    "a line that unpacks without end": (_talks("t.jsonl.gz", gzip.compress(bytes(2 << 20))), "a line is longer"),
    "a target whose index leads out": (_target(_index_out), "leads out of the folder"),
    "a target with layers without end": (
        _target(lambda t: edited(t / "config.json", lambda v: v.update(num_hidden_layers=1 << 31, model_type="qwen3"))),
        "is believed"),
    "a target with text for sizes": (
        _target(lambda t: edited(t / "config.json", lambda v: v.update(hidden_size=[STEER]))), "config.json"),
    "a GGUF of 2**60 fields": (_gguf(b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60)), "is said to be"),
    "a GGUF with an array without end": (
        _gguf(b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 0, 1 << 60) + bytes(8)), "is said to be"),
    "a GGUF of 2**31 layers": (
        _gguf(b"GGUF" + struct.pack("<IQQQ17sII", 3, 0, 1, 17, b"llama.block_count", 4, 1 << 31) + bytes(64)),
        "block_count"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_hostile_input_is_refused(tiny_target: Path, tmp_path: Path, monkeypatch: Any, name: str) -> None:
    make, words = OTHERS[name]
    monkeypatch.setattr(untrusted.lines, "__defaults__", (1 << 20,))  # else a bomb must be as large as its bound
    _target.place = tiny_target  # type: ignore[attr-defined]
    arguments = [a.replace("{target}", str(tiny_target)) for a in make(tmp_path)]
    eyas(*arguments).refused(str(tmp_path), words)
    assert not Path("/tmp/the-code-ran").exists()


def test_pipes_and_folders_are_not_waited_for(tiny_target: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    out = ["--target", str(tiny_target), "--out", str(tmp_path / "out")]
    for given in (pipe, tmp_path):
        verbs = (["extract", str(given), *out], ["regenerate", str(given), *out], ["run", str(given), *out[2:]],
                 ["vocab", str(given), "--size", "9", *out], ["measure", "--log", str(given)])  # fmt: skip
        for arguments in verbs:
            said = eyas(*arguments).harmless()
            assert said.code in (1, 2, 3) and str(given) in said.err, (arguments, said)
