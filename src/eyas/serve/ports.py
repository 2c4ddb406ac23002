"""Ports: a free one, one that is free, and whether a process is the one that listens there.

pytest tests/test_serve_process.py
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable
from pathlib import Path

from ..errors import BadInput

LISTENING = "0A"  # state of a socket in /proc/net/tcp (net/tcp_states.h)


def reachable(host: str) -> str:
    """The name by which this machine reaches what listens on `host`."""
    if host in ("0.0.0.0", ""):
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host


def free_port(host: str, port: int | None) -> int:
    """`port` if nothing listens there, or a free one for None. Raises BadInput naming the port, or the host."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port or 0))
            return int(probe.getsockname()[1])
    except OSError as error:
        if port is None:
            raise BadInput(f"--host {host}: nothing can listen there ({error.strerror}); try 127.0.0.1") from error
        raise BadInput(
            f"--port {port} on {host} cannot be used ({error.strerror}); end what listens there, or leave --port out "
            f"to take a free one"
        ) from error


def listens(pids: Iterable[int], port: int) -> bool | None:
    """Does one of these processes listen on the port? None where the system does not say."""
    try:
        sockets = {line.split()[9] for line in _listening() if int(line.split()[1].rpartition(":")[2], 16) == port}
    except (OSError, ValueError, IndexError):
        return None
    return any(_holds(pid, sockets) for pid in pids) if sockets else None


def _listening() -> list[str]:
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    with contextlib.suppress(OSError):  # a kernel without IPv6
        lines += Path("/proc/net/tcp6").read_text().splitlines()[1:]
    return [line for line in lines if line.split()[3] == LISTENING]


def _holds(pid: int, sockets: set[str]) -> bool:
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(entry.path).removeprefix("socket:[").rstrip("]") in sockets:
                    return True
    return False
