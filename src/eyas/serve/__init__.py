"""Serve: start a real engine with target and draft, here or, printed, anywhere; and stop it without a trace.

launch.py     what is to be served
check.py      does the draft go together with engine and target?
prepare.py    what llama.cpp and OpenVINO need converted, made once and kept
command.py    the command line here, on the CPU; printed.py: that for a machine with GPUs
process.py, guard.py, explain.py     a process that leaves nothing behind, and why it did not start
server.py     `running`, which puts them together
client.py, dialects.py, events.py    ask any running server, and understand what it streams

eyas serve DRAFT --target T --engine vllm
"""

from .launch import Launch
from .server import Server, running

__all__ = ["Launch", "Server", "running"]
