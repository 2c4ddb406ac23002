"""Private environments in which the real engines run on a CPU: `eyas engines setup vllm`.

    recipe.py     what a recipe is, and how it is carried out: stamps, resuming, the final check
    steps.py, build.py     what recipes are made of, and the place where it happens
    vllm.py, sglang.py, llamacpp.py, openvino.py     one recipe an engine, a list of steps
    explain.py    what a failed command's log says, in a sentence
    pins/         the version of every package that such an environment gets
    stand_in/     files that are put into an environment, for what an engine lacks on a CPU

pytest tests/test_engines_setup.py
"""

from __future__ import annotations

import importlib

from ...errors import BadInput
from .recipe import Recipe

ENGINES = ("vllm", "sglang", "llamacpp", "openvino")


def recipe(engine: str) -> Recipe:
    """The recipe of an engine. Raises BadInput, naming those that there are, for any other name."""
    if engine not in ENGINES:
        raise BadInput(f"no engine '{engine}' can be set up here; there are {', '.join(ENGINES)}; choose one of these.")
    found = importlib.import_module(f"{__name__}.{engine}").RECIPE
    assert isinstance(found, Recipe)
    return found
