"""The command line that every serve_*.py has; they run under an engine's own Python, with this folder on their path."""

import argparse
import json
from pathlib import Path


def parse() -> tuple[argparse.Namespace, list[list[int]]]:
    """(target, draft, k, tokens; the prompts' token ids). DRAFT is `none` for decoding without one."""
    options = argparse.ArgumentParser()
    options.add_argument("target")
    options.add_argument("draft")
    options.add_argument("prompts")
    options.add_argument("--k", type=int, default=4)
    options.add_argument("--tokens", type=int, default=64)
    given = options.parse_args()
    return given, json.loads(Path(given.prompts).read_text())
