"""One measurement, one JSON line, one schema: results/<bench>.jsonl.

The newest line per (bench, case, metric, config, device) counts. `ratio` is how many times better than the baseline,
whichever way the metric runs.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(os.environ.get("SHOESTRING_RESULTS", Path(__file__).resolve().parents[3] / "results"))


def record(
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
    folder: Path | None = None,
) -> dict[str, Any]:
    """Append the median and spread of `samples` to results/<bench>.jsonl and return the line."""
    p20, p80 = spread(samples)
    line = {
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
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "note": note,
    }
    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{bench}.jsonl").open("a") as f:
        f.write(json.dumps(line) + "\n")
    return line


def newest(bench: str, folder: Path | None = None) -> list[dict[str, Any]]:
    """The counting lines of one bench, in the order their cases first appeared."""
    return counting(recorded(bench, folder))


def recorded(bench: str, folder: Path | None = None) -> list[dict[str, Any]]:
    """All lines of one bench, in the order they were recorded."""
    path = (folder or RESULTS) / f"{bench}.jsonl"
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def counting(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of equal case, metric, config and device the last one. Lines that only their device tells apart stand together,
    the newest last: a table that has one cell for them shows that one."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for line in lines:
        key = json.dumps([line["case"], line["metric"], line["config"]], sort_keys=True)
        machines = found.setdefault(key, {})
        machines.pop(line["device"], None)
        machines[line["device"]] = line
    return [line for machines in found.values() for line in machines.values()]


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def provenance(lines: list[dict[str, Any]]) -> str:
    """Where the numbers come from, in one line under the table."""
    devices = sorted({f"{n['device']}, torch {n['versions'].get('torch', '?')}" for n in lines})
    commits = sorted({n["commit"] for n in lines})
    return f"\n\n{'; '.join(devices)}; commit {', '.join(commits)}; {max(n['date'] for n in lines)}."


def spread(samples: Sequence[float]) -> tuple[float, float]:
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


def commit() -> str:
    given = os.environ.get("SHOESTRING_COMMIT")
    if given:
        return given
    asked = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return asked.stdout.strip() or "unknown"
