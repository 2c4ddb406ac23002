"""Static checks, one module a family: `check(case)` yields findings and changes nothing."""

from __future__ import annotations

from . import config, engines, launch, maps, tensors, weights

FAMILIES = (maps, tensors, weights, config, engines, launch)
