"""Append-only journal of finished work, so that a killed run goes on where it was.

The first line says with which settings the work was done; every further line is one finished piece. Lines are flushed
to the disk in batches; a line torn by a kill is dropped at the next start.   pytest tests/test_regenerate.py
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyas.errors import BadInput
from eyas.untrusted import content, parse_json
from eyas.writes import disk_errors


class Journal:
    """Open (or create) `path`; `.records` holds what earlier runs finished.

    fields: what each record has, and of which kind; the file is cut before the first line that is none.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], fields: Mapping[str, type] | None = None,
                 every: int = 16, seconds: float = 5.0):  # fmt: skip
        self.path = path
        self._fields = dict(fields or {})
        self.records: list[dict[str, Any]] = []
        self._every, self._seconds = every, seconds
        self._pending: list[str] = []
        self._flushed = time.monotonic()
        header = json.loads(json.dumps(settings))
        try:
            json.dumps(header, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            near = error.object[max(0, error.start - 40) : error.end + 40]
            raise BadInput(
                f"{path} cannot keep the settings of this run: {near!r} is no UTF-8; give names and values in UTF-8"
            ) from error
        lines = self._read()
        if lines and lines[0] != header:
            differs = sorted(k for k in {*header, *lines[0]} if header.get(k) != lines[0].get(k))
            raise BadInput(
                f"{path} holds answers of a run with other settings ({', '.join(differs)}). Repeat that command to "
                f"finish it, choose another --out, or remove the file."
            )
        self.records = lines[1:]
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "ab")  # noqa: SIM115  (closed by `close`)
            if not lines:
                self._file.truncate(0)
                self._write([json.dumps(header, ensure_ascii=False)])

    def append(self, record: Mapping[str, Any]) -> None:
        """Note one finished piece; it is on the disk after at most `every` pieces or `seconds`."""
        self._pending.append(json.dumps(record, ensure_ascii=False))
        if len(self._pending) >= self._every or time.monotonic() - self._flushed > self._seconds:
            self.flush()

    def flush(self) -> None:
        if self._pending:
            self._write(self._pending)
            self._pending = []
        self._flushed = time.monotonic()

    def close(self) -> None:
        self.flush()
        self._file.close()

    def _write(self, lines: list[str]) -> None:
        raw = "".join(line + "\n" for line in lines).encode()
        with disk_errors(self.path, len(raw)):
            self._file.write(raw)
            self._file.flush()
            os.fsync(self._file.fileno())

    def _read(self) -> list[dict[str, Any]]:
        """All whole lines; the file is cut behind them, so that appending never continues a torn one."""
        if not self.path.is_file():
            return []
        data = content(self.path, 1 << 40)
        lines: list[dict[str, Any]] = []
        good = 0
        for line in data.splitlines(keepends=True):
            try:
                if not line.endswith(b"\n"):
                    break
                record = parse_json(line)
                if not isinstance(record, dict) or (lines and not self._is_whole(record)):
                    break
                lines.append(record)
            except ValueError:
                break
            good += len(line)
        if good < len(data):
            os.truncate(self.path, good)
        return lines

    def _is_whole(self, record: Mapping[str, Any]) -> bool:
        return all(isinstance(record.get(name), kind) for name, kind in self._fields.items())
