"""Every parser of what others wrote, as a function of bytes, and small files to begin from.

    PARSERS["header"](scratch_folder, data)      # returns, or raises EyasError; anything else is a finding

fuzz_readers.py mutates, test_fuzz_corpus.py replays tests/corpus. The corpus is generated: `python tests/fuzzing.py`
writes what `seeds()` makes; files named `found-...` are inputs that once came out as something else than a sentence.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

CORPUS = Path(__file__).with_name("corpus")
LARGEST = 2000  # bytes of a file in the corpus
Parser = Callable[[Path, bytes], Any]
PARSERS: dict[str, Parser] = {}


def parser(function: Parser) -> Parser:
    PARSERS[function.__name__] = function
    return function


def placed(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def shown(text: str) -> None:
    """What reaches a terminal holds nothing that steers it."""
    from eyas.terminal import CONTROL, harmless

    assert not CONTROL.search(harmless(text))


# ---------------------------------------------------------------- weights


@parser
def header(folder: Path, data: bytes) -> None:
    from eyas.headers import read_array, read_header

    path = placed(folder, "x.safetensors", data)
    for entry in read_header(path).entries.values():
        read_array(path, entry).sum()


@parser
def shard(folder: Path, data: bytes) -> None:
    from eyas.features.reader import map_safetensors

    for tensor in map_safetensors(placed(folder, "shard.safetensors", data))[0].values():
        tensor.float().sum()


@parser
def target_header(folder: Path, data: bytes) -> None:
    from eyas.target.weights import read_header

    read_header(placed(folder, "t.safetensors", data))


@parser
def tensor_index(folder: Path, data: bytes) -> None:
    from eyas.draft.files import weight_files
    from eyas.target.weights import tensor_files

    inner = folder / "indexed"
    inner.mkdir(exist_ok=True)
    for name in ("a.safetensors", "b.safetensors"):
        (inner / name).touch()
    placed(inner, "model.safetensors.index.json", data)
    both = [lambda: weight_files(inner)[0], lambda: list(tensor_files(inner).values())]
    for read in both:
        with refused():
            assert all(file.parent.resolve().is_relative_to(inner.resolve()) for file in read())


@parser
def pickled(folder: Path, data: bytes) -> None:
    from eyas.draft.files import load_pickle

    load_pickle(placed(folder, "pytorch_model.bin", data))


@parser
def foreign_states(folder: Path, data: bytes) -> None:
    from eyas.features.foreign import read_specforge, read_speculators

    for name in ("data_0.ckpt", "data_0.ckpt.gz"):
        with refused():
            read_specforge(placed(folder, name, data))
    read_speculators(placed(folder, "hs_0.safetensors", data))


@parser
def vocabulary_map(folder: Path, data: bytes) -> None:
    from eyas.doctor.reference import _saved_map
    from eyas.vocab import VocabMap

    for name in ("map.npy", "map.pt"):
        with refused():
            _saved_map(placed(folder, name, data))
    VocabMap.load(placed(folder, "vocab.safetensors", data))


@parser
def probe(folder: Path, data: bytes) -> None:
    from eyas.draft.probe import read_probe

    placed(folder, "probed/eyas/probe.safetensors", data)
    read_probe(folder / "probed")


@parser
def gguf_header(folder: Path, data: bytes) -> None:
    from eyas.target.gguf_header import check_header

    check_header(placed(folder, "x.gguf", data))


# ---------------------------------------------------------------- drafts and targets


@functools.cache
def _draft(folder: Path, own: bool) -> Path:
    from drafts import make_draft, write_flat
    from eyas.draft.checkpoint import save_draft

    if own:
        return save_draft(*make_draft(), folder / "own")
    return write_flat(folder / "flat", *make_draft(), eagle_aux_hidden_state_layer_ids=[2, 4, 5])


def _described(draft: Path) -> None:
    from eyas.describe import inspect_draft
    from eyas.doctor.examine import examine

    shown(json.dumps(inspect_draft(draft)))
    for finding in examine(draft):
        shown(json.dumps(finding.to_dict()))


@parser
def draft_config(folder: Path, data: bytes) -> None:
    placed(_draft(folder, False), "config.json", data)
    _described(_draft(folder, False))


@parser
def eyas_json(folder: Path, data: bytes) -> None:
    placed(_draft(folder, True), "eyas.json", data)
    _described(_draft(folder, True))


@parser
def target_config(folder: Path, data: bytes) -> None:
    from eyas.target.facts import read_facts

    placed(folder, "target/config.json", data)
    read_facts(folder / "target").to_dict()


@parser
def target_tokenizer(folder: Path, data: bytes) -> None:
    from eyas.target.facts import read_facts
    from eyas.target.source import template_fingerprint, tokenizer_fingerprint

    placed(folder, "told/config.json", json.dumps(LLAMA).encode())
    for name in ("tokenizer_config.json", "generation_config.json", "tokenizer.json"):
        placed(folder, f"told/{name}", data)
    for read in (read_facts, template_fingerprint, tokenizer_fingerprint):
        with refused():
            read(folder / "told")


# ---------------------------------------------------------------- stages


@parser
def shards_json(folder: Path, data: bytes) -> None:
    from eyas.features.layout import read_index

    try:
        text = data.decode()
    except UnicodeDecodeError:
        return
    read_index(text, "shards.json")


@parser
def manifest(folder: Path, data: bytes) -> None:
    from eyas.artifacts import check_files, is_current, read_manifest

    placed(folder, "stage/manifest.json", data)
    is_current(folder / "stage", "vocab", {}, {}, None)
    read_manifest(folder / "stage")
    check_files(folder / "stage")


@parser
def stages_json(folder: Path, data: bytes) -> None:
    from eyas.stages import StageRunner

    placed(folder, "run/stages.json", data)
    StageRunner(folder / "run", lambda line: None, {})


@parser
def journal(folder: Path, data: bytes) -> None:
    from eyas.journal import Journal

    path = placed(folder, "journal.jsonl", data)
    try:
        settings = json.loads(data.splitlines()[0])
    except (ValueError, IndexError, RecursionError):
        settings = {}
    Journal(path, settings if isinstance(settings, dict) else {}).close()


@parser
def training_state(folder: Path, data: bytes) -> None:
    from eyas.train.checkpoints import latest

    placed(folder, "checkpoints/step-000001/state.json", data)
    latest(folder / "checkpoints", {"seed": 0})


@parser
def repair_record(folder: Path, data: bytes) -> None:
    from eyas.repair.history import history
    from eyas.repair.journal import records
    from eyas.repair.store import Store

    placed(folder, "mended/.eyas/journal/000001.json", data)
    for read in (lambda: records(Store(folder / "mended")), lambda: history(folder / "mended")):
        with refused():
            read()


@parser
def recipe(folder: Path, data: bytes) -> None:
    from eyas.cli.train import read_settings
    from eyas.config import load_config

    path = placed(folder, "recipe.yaml", data)
    for read in (lambda: load_config(path), lambda: read_settings(path, (), None)):
        with refused():
            read()


# ---------------------------------------------------------------- text


@parser
def prompts(folder: Path, data: bytes) -> None:
    from eyas.prompts import load_prompts

    for name in ("prompts.jsonl", "prompts.json", "prompts.jsonl.gz", "prompts.parquet"):
        with refused():
            for prompt in load_prompts(placed(folder, name, data), skip_bad=True).prompts:
                prompt.to_row()


@parser
def conversations(folder: Path, data: bytes) -> None:
    from eyas.features.conversations import encode_all

    for name in ("said.jsonl", "said.jsonl.gz"):
        with refused():
            encode_all(placed(folder, name, data), _tokenizer(folder), skip_bad=True, vocab_size=300, max_length=64)


@functools.cache
def _tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from conftest import CHATML, TEXT

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": specials, "initial_alphabet": alphabet, "show_progress": False}
    bpe.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=300, **options))
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.chat_template = CHATML
    return made


@parser
def server_log(folder: Path, data: bytes) -> None:
    from eyas.engines.served.logs import from_log
    from eyas.report.measured_text import show_log
    from eyas.terminal import console

    served = from_log(placed(folder, "server.log", data))
    json.dumps(served.to_dict())
    with contextlib.redirect_stdout(io.StringIO()) as out:
        show_log(console(), served)
    _no_controls(out.getvalue())


@parser
def server_counts(folder: Path, data: bytes) -> None:
    from eyas.engines.served.metadata import from_metadata
    from eyas.engines.served.metrics import counters_between, from_prometheus

    text = data.decode("utf-8", "replace") + "\n"
    for read in (from_metadata, from_prometheus, lambda text: counters_between(text, text)):
        with refused():
            read(text)


@parser
def server_answer(folder: Path, data: bytes) -> None:
    from eyas.target.server import _Refused, _reply
    from eyas.untrusted import parse_json

    try:
        _reply(parse_json(data))
    except (_Refused, ValueError):  # asked again, or set aside with the reason
        return


@parser
def measured(folder: Path, data: bytes) -> None:
    from eyas.canary.check import of_file as counts
    from eyas.canary.make import read
    from eyas.doctor.training import predicted_tau
    from eyas.measure.measured import of_file

    path = placed(folder, "measured.json", data)
    placed(folder, "canary/canary.json", data)
    placed(folder, "trained/val_metrics.json", data)
    for reader in (lambda: of_file(path), lambda: counts(path), lambda: read(folder / "canary"),
                   lambda: predicted_tau(folder / "trained", {})):  # fmt: skip
        with refused():
            reader()


@parser
def diagnosis(folder: Path, data: bytes) -> None:
    """A report of anything: no active content in the page, nothing that steers a terminal in the text."""
    from eyas.report.diagnosis_html import render
    from eyas.report.diagnosis_text import show
    from eyas.terminal import console
    from eyas.untrusted import parse_json

    try:
        value = parse_json(data)
    except ValueError:
        return
    if not isinstance(value, dict):
        return
    page = render(value)
    assert inert(page), "active content"
    _no_controls(page)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        show(console(), value, verbose=True)
    _no_controls(out.getvalue())


ACTIVE = ("script", "iframe", "object", "embed", "link", "base", "form", "img", "foreignobject", "animate", "set")


def inert(page: str) -> bool:
    """No element that runs or loads anything, no handler, no address but https."""
    from html.parser import HTMLParser

    found: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag in ACTIVE:
                found.append(tag)
            for name, value in attrs:
                address = name in ("href", "src", "xlink:href", "action") and not str(value).startswith("https://")
                if name.startswith("on") or (address and not str(value).startswith("#")):
                    found.append(f"{tag} {name}={value}")

    Reader().feed(page)
    return not found


def _no_controls(text: str) -> None:
    from eyas.terminal import CONTROL

    assert not (found := CONTROL.search(text)), f"a control character {found[0]!r}"


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """A refusal in words, or none."""
    from eyas.errors import EyasError

    with contextlib.suppress(EyasError):
        yield


# ---------------------------------------------------------------- where to begin

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "vocab_size": 300,
    "num_hidden_layers": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-5,
    "intermediate_size": 64, "max_position_embeddings": 256, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "eos_token_id": [2], "quantization_config": {"weight_block_size": [128, 128]},
}  # fmt: skip


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _torch(value: Any, legacy: bool = False) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, _use_new_zipfile_serialization=not legacy)
    return out.getvalue()


class Evil:
    """Code in a pickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('it ran')",)


def _gguf() -> bytes:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    values = [
        text("general.architecture") + struct.pack("<I", 8) + text("llama"),
        text("llama.block_count") + struct.pack("<II", 4, 1),
        text("llama.embedding_length") + struct.pack("<II", 4, 4),
        text("tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b"),
        text("scores") + struct.pack("<IIQ2f", 9, 6, 2, 0.5, 1.5),
        text("nested") + struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ2B", 0, 2, 1, 2),
    ]
    tensor = text("token_embd.weight") + struct.pack("<I2QIQ", 2, 4, 4, 0, 0)
    return b"GGUF" + struct.pack("<IQQ", 3, 1, len(values)) + b"".join(values) + tensor + bytes(64)


def _bomb() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", pickle.dumps({}))
        file.writestr("archive/data/0", bytes(1 << 20))
    return out.getvalue()


def _npy(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array, allow_pickle=False)
    return out.getvalue()


def _raw(table: str, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(table.encode())) + table.encode() + data


def seeds() -> dict[str, dict[str, bytes]]:
    """parser -> {name: content}, each below LARGEST bytes."""
    from eyas.conventions import Conventions, Known
    from eyas.features.layout import FeatureMeta, ShardEntry, dump_index

    small = {"fc.weight": torch.ones(2, 3), "d2t": torch.arange(4), "norm.weight": torch.ones(2).bfloat16()}
    map_ = {"d2t": torch.tensor([0, 1, 1, 2]), "t2d": torch.tensor([1, 0, 1, 1, 0, 1], dtype=torch.bool)}
    weights = {
        "small": save(small),
        "metadata": save({"x": torch.ones(1)}, {"eyas": "{}", "format": "pt"}),
        "long": struct.pack("<Q", 1 << 60) + b"{}",
        "huge": _raw('{"x":{"dtype":"F32","shape":[4611686018427387904,2],"data_offsets":[0,0]}}'),
        "negative": _raw('{"x":{"dtype":"U8","shape":[1],"data_offsets":[-8,1]}}', b"x"),
        "overlap": _raw('{"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"y":{"dtype":"U8","shape":[2],'
                        '"data_offsets":[1,3]}}', b"abc"),
        "list": _raw("[1]"),
        "entries": _raw('{"x":1,"__metadata__":[]}'),
    }  # fmt: skip
    index = {"metadata": {"total_size": 1}, "weight_map": {"fc.weight": "a.safetensors", "d2t": "b.safetensors"}}
    meta = FeatureMeta(
        4, 300,
        Conventions(taps=(1, 2, 3), num_target_layers=4, final_state="post_norm", logit_scale=1.0,
                    how=dict.fromkeys(("taps", "num_target_layers", "final_state", "logit_scale"), Known.DECLARED)),
        "t", "k", "c",
    )  # fmt: skip
    flat = {
        **LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 120,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48,
        "target_hidden_size": 32, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]},
        "tie_word_embeddings": False,
    }  # fmt: skip
    del flat["quantization_config"]
    conversation = {"id": "a", "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]}
    recorded = {"prompt_token_ids": [1, 5], "response_token_ids": [6, 2], "supervised": [[2, 4]]}
    sharegpt = {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}], "tools": "[]"}
    ask = {"id": 7, "prompt": "Say \x1b[2J\u202e", "source": "s", "system": "Be brief"}
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "tools": [{"name": "f"}]}
    text_lines = b"\n".join(map(_json, (conversation, recorded, sharegpt)))
    ask_lines = b"\n".join(map(_json, (ask, parts, {"turns": ["a", "b"]}, sharegpt)))
    answer = {
        "choices": [{"message": {"content": "Hi", "tool_calls": []}, "finish_reason": "stop", "token_ids": [1, 2],
                     "meta_info": {"spec_verify_ct": 3}}],
        "prompt_token_ids": [1], "usage": {"completion_tokens": 2},
    }  # fmt: skip
    counts = {
        "schema": "eyas-canary/1", "rounds": 10, "accepted": 20, "at_least": [9, 7], "tokens": [[1, 2]], "k": 4,
        "engines": [{"engine": "vllm", "version": "0.32", "k": 4, "acceptance": {"tau": 1.5, "rounds": 10,
                     "accepted": 5, "unconditional": [0.3, 0.2], "own": {"x": 1}}, "command": ["vllm"],
                     "locate": {"rows": [{"row": "a", "tau": 1.2}], "falls": "a", "says": "b"}}],
        "full_acc_0_epoch": 0.5, "full_acc_1_epoch": 0.4, "full_acc_2_epoch": 0.2,
    }  # fmt: skip
    logs = "\n".join((
        "[2026-01-01 10:00:00] Decode batch, #running-req: 1, accept len: 2.10, accept rate: 0.52, gen throughput",
        "SpecDecoding metrics: Mean acceptance length: 2.50, Accepted throughput: 1.00 tokens/s, Drafted throughput: "
        "2.00 tokens/s, Accepted: 30 tokens, Drafted: 80 tokens, Per-position acceptance rate: 0.6, 0.4, Avg Draft "
        "acceptance rate: 37.5%",
        "draft acceptance rate = 0.50000 (   20 accepted /    40 generated)",
        "vLLM API server version 0.32.0 num_speculative_tokens=4 \x1b[31mWARNING\x1b[0m",
    ))  # fmt: skip
    metrics = "\n".join((
        "# TYPE vllm:spec_decode_num_drafts_total counter",
        'vllm:spec_decode_num_drafts_total{model_name="m"} 10.0',
        'vllm:spec_decode_num_draft_tokens_total{model_name="m"} 40.0',
        'vllm:spec_decode_num_accepted_tokens_total{model_name="m"} 12.0',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="0"} 7.0',
        'vllm:generation_tokens_total{model_name="m"} 22.0',
        "sglang:spec_accept_length 1.9",
    ))  # fmt: skip
    finding = {
        "id": "EY-<script>alert(1)</script>", "severity": "error", "status": "confirmed", "evidence": "\x1b[2J",
        "remedy": "<img src=x onerror=alert(1)>", "sources": ["sgl-project/sglang#1", "javascript:x"],
    }  # fmt: skip
    told = {
        "draft": "d", "eyas": "0", "verdict": "faulty", "where": ["map"], "summary": "\u202e", "findings": [finding],
        "tau": {"declared": 1.2, "best": [1, 2], "training": None}, "next": "eyas repair <x>", "not_evaluated": [{}],
        "ledger": [{"convention": "taps", "hypothesis": "<b>", "verdict": "confirmed", "gain": 0.1,
                    "interval": [0.0, 0.2], "delta_tau": 0.1, "note": "\x9b"}],
        "engines": {"vllm": {"version": "1", "starts": True, "differences": ["a"], "needs": [1]}},
    }  # fmt: skip
    kept = {
        "schema": "eyas-repair/1", "number": 1, "kind": "repair", "when": "2026-01-01", "eyas_version": "0.1",
        "entry": {"operations": []},
        "files": [{"name": "config.json", "undo": [["keep", 0, 4], ["blob", 0, 2, "ab", ""]], "redo": None}],
    }  # fmt: skip
    states = {"input_ids": torch.tensor([[1, 2]]), "loss_mask": torch.tensor([[0, 1]]),
              "hidden_state": torch.ones(1, 2, 2), "aux_hidden_state": torch.ones(1, 2, 6)}  # fmt: skip
    stage = {
        "schema": "eyas-manifest/1", "stage": "vocab", "stage_schema": None, "inputs": {"a": "b"}, "config": {},
        "config_digest": "c", "counts": {"ids": 4}, "files": {"vocab.safetensors": "00", "../../etc/passwd": "11"},
    }  # fmt: skip
    yaml = (
        "target: {source: smollm2}\nprompts: {source: builtin, limit: 10}\ntrain: &t {steps: 10, lr: 1e-3}\n"
        "export: {engines: [vllm]}\nlr: 0.004\n"
    )
    laughs = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}]\n" for a, b in zip("abcdef", "bcdefg"))  # noqa: B905
    deep = b"[" * 900 + b"]" * 900
    return {
        "header": weights, "shard": weights, "target_header": weights,
        "tensor_index": {"small": _json(index), "out": _json({"weight_map": {"x": "../../etc/passwd", "y": "/etc/x"}}),
                         "deep": deep},
        "pickled": {"zip": _torch({"w": torch.ones(2)}), "old": _torch({"w": torch.ones(2)}, True),
                    "evil": _torch({"w": Evil()}), "plain": pickle.dumps(Evil()), "bomb": _bomb()},
        "foreign_states": {"specforge": gzip.compress(_torch(states, True)), "bomb": gzip.compress(bytes(1 << 20)),
                           "speculators": save({"hidden_states": torch.ones(2, 4, 2), "token_ids": torch.ones(2)})},
        "vocabulary_map": {"own": save(map_, {"schema": "eyas-vocab/1", "always": "0,1"}), "npy": _npy(np.arange(3)),
                           "pt": _torch({"d2t": torch.arange(3)}, True)},
        "probe": {"empty": save({"ids": torch.ones(1)}, {"schema": "eyas-probe/1"})},
        "gguf_header": {"small": _gguf(), "counts": b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60),
                        "array": b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 0, 1 << 50)},
        "draft_config": {"flat": _json(flat), "deep": deep, "nan": b'{"rope_theta": NaN, "rope_theta": 1e999}'},
        "eyas_json": {"small": _json({"schema": "eyas-draft/1", "shape": {}, "conventions": {}, "target": {}})},
        "target_config": {"llama": _json(LLAMA), "nested": _json({"model_type": "x", "text_config": LLAMA}),
                          "layers": _json({**LLAMA, "model_type": "qwen3", "num_hidden_layers": 1 << 31})},
        "target_tokenizer": {"config": _json({"eos_token": {"content": "<e>"}, "eos_token_id": [1, 2],
                             "added_tokens_decoder": {"3": {"content": "<e>"}}, "chat_template": "{{ messages }}",
                             "added_tokens": [{"id": 3, "content": "<e>"}]}),
                             "many": _json({"chat_template": [{"name": "default", "template": "x"}]})},
        "shards_json": {"small": dump_index(meta, [ShardEntry("shard-00000.safetensors", 9, "s", "p", (3, 4), 2)])
                        .encode(), "out": b'{"schema": "eyas-features/1", "meta": {}, "shards": [{"name": "../x"}]}'},
        "manifest": {"small": _json(stage), "deep": deep},
        "stages_json": {"small": _json({"schema": "eyas-stages/1", "stages": {"vocab": {"key": "k", "inputs": {},
                                        "config": None, "finished": True}}})},
        "journal": {"small": b'{"schema": "x", "seed": 0}\n{"number": 0, "text": "a", "finish": "stop"}\n{"torn'},
        "training_state": {"small": _json({"schema": "eyas-checkpoint/1", "files": {"weights.safetensors": "0"},
                                           "identity": {"seed": 0}, "step": 1})},
        "repair_record": {"small": _json(kept)},
        "recipe": {"small": yaml.encode(), "laughs": laughs.encode(), "tag": b"a: !!python/object/apply:os.system [x]",
                   "self": b"a: &a [*a]", "date": b"a: 2001-99-99", "deep": b"[" * 1900},
        "prompts": {"lines": ask_lines, "array": _json([ask, parts]), "gz": gzip.compress(ask_lines),
                    "deep": b'{"prompt": "x", "tools": ' + deep + b"}"},
        "conversations": {"lines": text_lines, "gz": gzip.compress(text_lines)},
        "server_log": {"lines": logs.encode()},
        "server_counts": {"metrics": metrics.encode(), "answer": _json(answer),
                          "llamacpp": _json({"timings": {"draft_n": 8, "draft_n_accepted": 3, "predicted_n": 9}}),
                          "info": _json({"internal_states": [{"avg_spec_accept_length": 1.7}]})},
        "server_answer": {"answer": _json(answer)},
        "measured": {"all": _json(counts)},
        "diagnosis": {"all": _json(told)},
    }  # fmt: skip


def write_seeds() -> None:
    for name, files in seeds().items():
        for what, data in files.items():
            assert len(data) <= LARGEST, (name, what, len(data))
            placed(CORPUS, f"{name}/{what}", data)


if __name__ == "__main__":
    write_seeds()
