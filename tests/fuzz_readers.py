"""Mutates the kept corpus through every parser, and keeps what comes out as anything but a sentence.

    make fuzz SECONDS=600              python tests/fuzz_readers.py --seconds 60 --only header,gguf_header

With `atheris` installed (`pip install atheris`) mutation is guided by coverage of src/eyas; without it files are
mutated at random. Each parser runs in a process of its own, bounded in memory and in time for each input. A finding is
written to tests/corpus/PARSER/found-DIGEST, its traceback to stderr, and the exit code is 1.

test_fuzz_corpus.py replays the corpus.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

os.environ.update({"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})

from fuzzing import CORPUS, LARGEST, PARSERS

MEMORY = 12 << 30  # bytes of addresses; torch alone maps several
PATIENCE = 20  # seconds for one input
BITS = (b"\x1b]0;x\x07", b"\x1b[2J", "\u202e".encode(), b"<script>", b"../", b"/etc/passwd", b"\0", b"NaN", b"1e999",
        b"-1", b"9223372036854775807", b"4611686018427387904", b"[]", b"{}", b"null", b"\xff" * 8, b'"', b"\\ud800",
        b"\xf3\xa0\x80\x81", b"[[[[", b"!!python/name:os.system", b"&a", b"*a")  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 1 << 31, 1 << 62, 10**400, 0.5, float("nan"), float("inf"), "", "x", "../../x", "\x1b[2J",
    "\ud800", [], [[]], {}, [1], ["x"], {"x": 1}, "<script>", 2**15, [None],
)  # fmt: skip


# ---------------------------------------------------------------- mutation


def mutated(data: bytes, rng: random.Random) -> bytes:
    """One to four changes: of the JSON where it is some (plain, by lines, or behind a safetensors length), or bytes."""
    for _ in range(rng.randrange(1, 5)):
        data = (_json_changed(data, rng) if rng.random() < 0.6 else None) or _bytes_changed(data, rng)
    return data[:8000]


def _json_changed(data: bytes, rng: random.Random) -> bytes | None:
    length = int.from_bytes(data[:8], "little")
    if 2 <= length <= len(data) - 8:
        changed = _changed(data[8 : 8 + length], rng)
        return None if changed is None else len(changed).to_bytes(8, "little") + changed + data[8 + length :]
    lines = data.split(b"\n")
    place = rng.randrange(len(lines))
    changed = _changed(lines[place], rng)
    return None if changed is None else b"\n".join([*lines[:place], changed, *lines[place + 1 :]])


def _changed(text: bytes, rng: random.Random) -> bytes | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    places: list[tuple[Any, Any]] = []
    stack = [value]
    while stack:
        held = stack.pop()
        keys = list(held) if isinstance(held, dict) else range(len(held)) if isinstance(held, list) else ()
        for key in keys:
            places.append((held, key))
            stack.append(held[key])
    if not places:
        return json.dumps(rng.choice(VALUES)).encode()
    held, key = rng.choice(places)
    kind = rng.randrange(5)
    if kind == 0:
        del held[key]
    elif kind == 1 and isinstance(held, dict):
        held[rng.choice(("x", "../x", "\x1b[2J", key + key))] = held.pop(key)
    elif kind == 2:
        other, place = rng.choice(places)
        try:
            held[key] = json.loads(json.dumps(other[place]))
        except (KeyError, IndexError, RecursionError):
            held[key] = None
    else:
        held[key] = rng.choice(VALUES)
    try:
        return json.dumps(value).encode()
    except (ValueError, RecursionError):
        return None


def _bytes_changed(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(data) + 1)
    kind = rng.randrange(6)
    if kind == 0:
        return data[:place]
    if kind == 1:
        return data[:place] + bytes([rng.randrange(256)]) + data[place + 1 :]
    if kind == 2:
        return data[:place] + rng.choice(BITS) + data[place:]
    if kind == 3:
        return data[:place] + data[place + rng.randrange(1, 40) :]
    if kind == 4:
        start = rng.randrange(len(data) + 1)
        return data[:place] + data[start : start + rng.randrange(1, 80)] + data[place:]
    return data[:place] + rng.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\0\0\0\x80")) + data[place + 4 :]


# ---------------------------------------------------------------- one parser, in a process of its own


class Hangs(Exception):
    """An input that takes longer than PATIENCE."""


def _alarm(*_: Any) -> None:
    raise Hangs(f"more than {PATIENCE} s")


def tried(name: str, folder: Path, data: bytes) -> bool:
    """Run a parser on an input. False where that is a finding, which is then kept."""
    from eyas.errors import EyasError

    signal.alarm(PATIENCE)
    try:
        PARSERS[name](folder, data)
    except EyasError as error:
        signal.alarm(0)
        if len(str(error)) < 4000:
            return True
        print(f"{name}: a message of {len(str(error))} characters", file=sys.stderr)
    except BaseException:
        signal.alarm(0)
        traceback.print_exc()
    else:
        signal.alarm(0)
        return True
    digest = hashlib.sha256(data).hexdigest()[:12]
    found = CORPUS / name / f"found-{digest}"
    found.write_bytes(data)
    print(f"FOUND {found} ({len(data)} bytes)", file=sys.stderr, flush=True)
    return False


def fuzz(name: str, seconds: float, seed: int, most: int = 5) -> dict[str, Any]:
    """Mutate for so long, at random; ends early at `most` findings. Returns counts."""
    files = [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]
    rng, end = random.Random(f"{seed} {name}"), time.monotonic() + seconds
    ran = found = 0
    with tempfile.TemporaryDirectory(dir=_memory()) as scratch:
        while time.monotonic() < end and found < most:
            ran += 1
            found += not tried(name, Path(scratch), mutated(rng.choice(files), rng))
    return {"parser": name, "executions": ran, "found": found, "guided": False}


def fuzz_guided(name: str, seconds: float, seed: int) -> None:
    """The same by libFuzzer, guided by the coverage of src/eyas; does not return."""
    import atheris

    with (
        atheris.instrument_imports(include=["eyas"], enable_loader_override=False),
        tempfile.TemporaryDirectory(dir=_memory()) as warm,
    ):
        for path in sorted((CORPUS / name).iterdir()):  # imports what the parser imports, instrumented
            with contextlib.suppress(Exception):  # a module that cannot be instrumented is tried again below, plain
                PARSERS[name](Path(warm), path.read_bytes())
    scratch, grown = Path(tempfile.mkdtemp(dir=_memory())), tempfile.mkdtemp(dir=_memory())
    counts = {"parser": name, "executions": 0, "found": 0, "guided": True}
    end = time.monotonic() + seconds
    rng = random.Random(f"{seed} {name}")

    def one(data: bytes) -> None:
        counts["executions"] += 1
        counts["found"] += not tried(name, scratch, data)
        if time.monotonic() > end or counts["found"] >= 5:
            print(json.dumps(counts), flush=True)
            shutil.rmtree(scratch, ignore_errors=True)
            shutil.rmtree(grown, ignore_errors=True)
            os._exit(0)

    def change(data: bytes, longest: int, _seed: int) -> bytes:
        return (mutated(data, rng) if rng.random() < 0.5 else atheris.Mutate(data, len(data)))[:longest]

    for path in sorted((CORPUS / name).iterdir()):  # and what is still not imported, which takes time
        with contextlib.suppress(Exception):
            PARSERS[name](scratch, path.read_bytes())
    options = [f"-seed={seed + 1}", "-max_len=8000", "-rss_limit_mb=0", "-verbosity=0", "-timeout=0", "-len_control=0"]
    atheris.Setup([sys.argv[0], *options, grown, str(CORPUS / name)], one, custom_mutator=change)
    atheris.Fuzz()


def _memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


# ---------------------------------------------------------------- all of them


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=600, help="for all parsers together")
    options.add_argument("--seed", type=int, default=int(time.time()))
    options.add_argument("--only", default=",".join(PARSERS), help="parsers, by name")
    options.add_argument("--child", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.child:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGALRM, _alarm)
        try:
            import atheris  # noqa: F401
        except ImportError:
            print(json.dumps(fuzz(given.child, given.seconds, given.seed)))
            return 0
        fuzz_guided(given.child, given.seconds, given.seed)
    names = given.only.split(",")
    totals, died = {"executions": 0, "found": 0}, []
    for name in names:
        each = str(given.seconds / len(names))
        child = subprocess.run(
            [sys.executable, __file__, "--child", name, "--seconds", each, "--seed", str(given.seed)],
            stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent,
        )  # fmt: skip
        lines = [line for line in child.stdout.splitlines() if line.startswith("{")]
        print(lines[-1] if lines else f"{name}: died with {child.returncode}", flush=True)
        if lines:
            for key in totals:
                totals[key] += json.loads(lines[-1])[key]
        else:
            died.append(name)
    print(json.dumps({**totals, "seconds": given.seconds, "seed": given.seed, "died": died}))
    large = [str(path) for path in CORPUS.rglob("found-*") if path.stat().st_size > LARGEST]
    if large:
        print(f"too large to keep, make them smaller by hand: {', '.join(large)}", file=sys.stderr)
    return 1 if totals["found"] or died else 0


if __name__ == "__main__":
    raise SystemExit(main())
