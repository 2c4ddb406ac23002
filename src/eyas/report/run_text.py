"""The loss mask of a few conversations as runs of text: what is learnt from, what only gives the context.

pytest tests/test_report_run.py
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from eyas.decode.pieces import Pieces
from eyas.errors import EyasError

SHOWN = 3
LONGEST = 420
"""Tokens of a conversation that are shown."""


class PlainTokenizer:
    """tokenizer.json alone, decoded as `Pieces` asks: all that a page needs, where transformers imports for seconds."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        self.inner = Tokenizer.from_file(str(path))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        return str(self.inner.decode(list(ids), skip_special_tokens=skip_special_tokens))


def open_tokenizer(target: str | None, given: bool) -> tuple[Any, str] | None:
    """(tokenizer, fingerprint) of a target; None where it is not at hand and was not asked for by name (`given`).

    What a run only mentions is looked up on this machine; nothing is downloaded for it. Raises what `resolve_target`
    raises for a target that was given.
    """
    from eyas.features.conversations import load_tokenizer
    from eyas.target.source import DEFAULT, resolve_target, tokenizer_fingerprint

    if target is None:
        return None
    try:
        if given or target == DEFAULT or Path(target).expanduser().exists():
            folder = resolve_target(target)
        else:
            folder = _in_the_hub_cache(target)
        fast = folder / "tokenizer.json"
        return (PlainTokenizer(fast) if fast.is_file() else load_tokenizer(folder)), tokenizer_fingerprint(folder)
    except (EyasError, OSError, ValueError):
        if given:
            raise
        return None


def _in_the_hub_cache(target: str) -> Path:
    from huggingface_hub import snapshot_download

    name, _, revision = target.partition("@")
    return Path(snapshot_download(name, revision=revision or None, local_files_only=True))


def read_conversations(features_dir: Path, vocab_dir: Path, tokenizer: tuple[Any, str]) -> list[dict[str, Any]]:
    """A few documents of features: id, tokens, supervised, shown, and parts {text, supervised, known}.

    known: the draft vocabulary has it (True where no map is there yet). Raises EyasError where a shard cannot be read,
    Mismatch where the tokenizer is another than the features were made with.
    """
    from eyas.features.reader import FeatureSet
    from eyas.vocab import FILE, VocabMap

    features = FeatureSet.open(features_dir)
    features.check(tokenizer=tokenizer[1])
    known = VocabMap.load(vocab_dir).t2d if (vocab_dir / FILE).is_file() else None
    out = []
    for i in _chosen(features.doc_lengths.tolist()):
        document = features.document(i)
        ids, mask = document["ids"].long()[:LONGEST], document["mask"].bool()[:LONGEST]
        inside = [True] * len(ids) if known is None else known[ids].tolist()
        pieces, texts = Pieces(tokenizer[0]), []
        for token in ids.tolist():
            texts.append(pieces.push(token))
        if texts:
            texts[-1] += pieces.flush()
        rows = list(zip(texts, mask.tolist(), inside, strict=True))
        out.append({
            "id": features.doc_id(i),
            "tokens": len(document["ids"]),
            "supervised": int(document["mask"].bool().sum()),
            "shown": len(ids),
            "parts": [
                {"text": "".join(row[0] for row in group), "supervised": on, "known": has}
                for (on, has), group in groupby(rows, key=lambda row: (row[1], row[2] or not row[1]))
            ],
        })  # fmt: skip
    return out


def _chosen(lengths: Sequence[int]) -> list[int]:
    """Documents of about the median length, in their order: neither the shortest nor the longest say what is usual."""
    middle = sorted(range(len(lengths)), key=lambda i: (abs(lengths[i] - sorted(lengths)[len(lengths) // 2]), i))
    return sorted(middle[:SHOWN])
