"""One measurement as one flat JSON line, the same keys everywhere, so that tables, plots and checks read one schema.

`ratio` is how many times better than the baseline, whether more or less is better. benchmarks/results.py appends such
lines to results/; `shoestring bench serve --save FILE` appends one to a file.
"""

from __future__ import annotations

import datetime
import os
import platform
import statistics
from collections.abc import Sequence
from typing import Any

from shoestring.runlog import commit_here


def result_line(
    *,
    bench: str,
    case: str,
    metric: str,
    unit: str,
    samples: Sequence[float],
    baseline: str = "",
    baseline_value: float | None = None,
    ratio: float | None = None,
    quality: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    note: str = "",
) -> dict[str, Any]:
    """The median and spread of `samples`, with what they depend on."""
    p20, p80 = spread(samples)
    return {
        "bench": bench,
        "case": case,
        "metric": metric,
        "unit": unit,
        "value": significant(statistics.median(samples)),
        "p20": significant(p20),
        "p80": significant(p80),
        "baseline": baseline,
        "baseline_value": None if baseline_value is None else significant(baseline_value),
        "ratio": None if ratio is None else significant(ratio),
        "quality": quality or {},
        "config": config or {},
        "device": device_name(),
        "versions": versions(),
        "commit": commit_here(),
        "date": datetime.date.today().isoformat(),
        "note": note,
    }


def spread(samples: Sequence[float]) -> tuple[float, float]:
    """The 20th and 80th percentile, each a value that occurred."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    return ordered[round(0.2 * last)], ordered[round(0.8 * last)]


def significant(value: float, digits: int = 5) -> float:
    return float(f"{value:.{digits}g}")


def device_name() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"


def versions() -> dict[str, str]:
    from importlib import metadata

    found = {"python": platform.python_version()}
    for package in ("torch", "triton", "transformers"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
