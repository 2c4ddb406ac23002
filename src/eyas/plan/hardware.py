"""What computes: data sheets of common accelerators, and this machine's CPU as it is measured.

Rates are dense bfloat16 products without sparsity, memory is what the device has, as NVIDIA's data sheets give both
(A100 80GB, H100 SXM, H200 SXM, B200). What is reached of such a rate is `utilisation`, an assumption until it is
calibrated.   Exercise it:  pytest tests/test_plan.py
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

UTILISATION = 0.35
"""Share of a data sheet's rate that long products in training reach on an accelerator; a measured rate counts whole."""


@dataclass(frozen=True)
class Hardware:
    """Devices of one kind. flops: operations a second of one; memory: bytes of one."""

    name: str
    flops: float
    memory: float
    source: str
    devices: int = 1
    price_per_hour: float | None = None
    """Of one device."""
    utilisation: float = UTILISATION

    @property
    def on_cpu(self) -> bool:
        """Is it this machine's processor?"""
        return self.name == "cpu"


SHEETS = {
    "a100": (312e12, 80e9, "NVIDIA A100 80GB data sheet: 312 TFLOP/s bfloat16, 80 GB"),
    "h100": (989e12, 80e9, "NVIDIA H100 SXM data sheet: 989 TFLOP/s dense bfloat16, 80 GB"),
    "h200": (989e12, 141e9, "NVIDIA H200 SXM data sheet: 989 TFLOP/s dense bfloat16, 141 GB"),
    "b200": (2250e12, 180e9, "NVIDIA B200 data sheet: 2.25 PFLOP/s dense bfloat16, 180 GB"),
}


def hardware(
    name: str, flops: float | None = None, memory: float | None = None, devices: int = 1,
    price_per_hour: float | None = None, utilisation: float | None = None,
) -> Hardware:  # fmt: skip
    """Devices by name, with what is given in the sheet's place. The CPU's rate is measured, in half a second."""
    if name in SHEETS:
        rate, size, source = SHEETS[name]
    else:
        rate, size, source = flops or cpu_rate(), float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")), ""
        source = "" if flops else "a product of [1024, 1024] matrices in float32, timed here"
        utilisation = utilisation or (UTILISATION if flops else 1.0)
    told = "; ".join(text for text in (source, "--flops" if flops else "", "--memory" if memory else "") if text)
    return Hardware(name, flops or rate, memory or size, told, devices, price_per_hour, utilisation or UTILISATION)


def cpu_rate(seconds: float = 0.5) -> float:
    """Operations a second of float32 products on the threads that torch uses here: the best of many short ones, since
    other jobs can only slow one down."""
    import torch

    a = torch.randn(1024, 1024)
    a @ a
    began, best = time.perf_counter(), float("inf")
    while time.perf_counter() - began < seconds:
        start = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - start)
    return 2 * 1024**3 / best
