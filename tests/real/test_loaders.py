"""What each engine's own loader does with a draft is what our profile of that engine predicts, exactly.

Every variant of variants.py goes through the real loaders of SGLang and vLLM, and through the converters of llama.cpp
and OpenVINO, in the environments that `eyas engines setup` builds.   make test-engines
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from variants import VARIANTS, build_target, write_all

from eyas.draft.files import open_folder
from eyas.engines.environment import ready
from eyas.engines.profiles import profile
from eyas.engines.reading import EngineReading, Seen
from eyas.target.facts import read_facts

pytestmark = pytest.mark.engine
ENGINES = ("sglang", "vllm", "llamacpp", "openvino")
MAPS = ("hot_token_id", "draft_id_to_target_id", "d2t", "model.d2t")
# What a parameter holds before anything is loaded, in our words and in the reports'.
CREATED = {"uninitialised memory": "uninitialised", "random numbers, as created": "other", "ones, as created": "ones",
           "zeros, as created": "zeros"}  # fmt: skip
STAGES = {"configuration": "config", "weights": "weights", "conversion": "convert"}


@pytest.fixture(scope="session")
def places(tmp_path_factory) -> tuple[Path, dict[str, Path]]:
    """(target, variant -> directory)"""
    root = tmp_path_factory.mktemp("variants")
    return build_target(root / "target"), write_all(root / "drafts")


@pytest.fixture(scope="session")
def reports(places) -> Callable[[str], dict[str, dict[str, Any]]]:
    """Engine -> variant -> what its loader reported; each engine is started once, when first asked."""
    target, drafts = places

    @functools.cache
    def ask(engine: str) -> dict[str, dict[str, Any]]:
        environment = ready(engine)
        assert environment is not None, f"run `eyas engines setup {engine}` (make test-engines does)"
        return dict(zip(drafts, environment.load_report(list(drafts.values()), target), strict=True))

    return ask


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_loader_does_what_the_profile_says(engine: str, variant: str, places, reports):
    target, drafts = places
    predicted = profile(engine).read(Seen(open_folder(drafts[variant]), read_facts(target)))
    ours = said(predicted)
    assert ours == seen(reports(engine)[variant], ours), VARIANTS[variant].__doc__


def said(reading: EngineReading) -> dict[str, Any]:
    """A prediction in the words of a report."""
    failure = reading.failure
    if failure is not None and failure.stage != "first request":
        return {"raises": (STAGES[failure.stage], failure.error)}
    return {
        "raises": None,
        "parameters": {n: (p.filled, sorted(p.keys)) for n, p in reading.parameters.items() if n not in MAPS},
        "ignored": sorted(set(reading.dropped) - {"t2d"}),
        "instead": {
            n: CREATED[p.instead] for n, p in reading.parameters.items() if p.instead in CREATED and n not in MAPS
        },
        "captured": None if reading.values["taps"] is None else list(reading.values["taps"]),
    }


def seen(report: dict[str, Any], predicted: dict[str, Any]) -> dict[str, Any]:
    """A report in the same words."""
    if report["raises"] is not None:
        return {"raises": (report["raises"]["stage"], report["raises"]["type"])}
    parameters = {n: p for n, p in report["parameters"].items() if n not in MAPS}
    return {
        "raises": None,
        "parameters": {n: (p["filled"], sorted(p["keys"])) for n, p in parameters.items()},
        "ignored": sorted(set(report["ignored"]) - {"t2d"}),
        # What a target lends afterwards is another matter; the profile says so instead.
        "instead": {n: parameters[n].get("created") for n in predicted.get("instead", ()) if n in parameters},
        "captured": sorted(report.get("captured") or ()) or predicted.get("captured"),
    }
