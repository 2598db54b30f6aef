"""The lines of results/<bench>.jsonl: appending one, reading those that count, and laying out tables.

The newest line per (bench, case, metric, config, device) counts. The schema of a line is in
shoestring/evals/result_line.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoestring.evals.result_line import device_name, result_line, significant, spread
from shoestring.runlog import append_jsonl

__all__ = ["counting", "device_name", "markdown", "newest", "provenance", "record", "recorded", "significant", "spread"]

RESULTS = Path(os.environ.get("SHOESTRING_RESULTS", Path(__file__).resolve().parents[1] / "results"))

LOCAL_CHANGES = ("uncommitted", "later changes on top", "was committed")  # as notes say it


def record(*, folder: Path | None = None, **measured: Any) -> dict[str, Any]:
    """Append `result_line(**measured)` to results/<bench>.jsonl and return the line."""
    line = result_line(**measured)
    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    append_jsonl(folder / f"{line['bench']}.jsonl", line)
    return line


def newest(bench: str, folder: Path | None = None) -> list[dict[str, Any]]:
    """The counting lines of one bench, in the order their cases first appeared."""
    return counting(recorded(bench, folder))


def recorded(bench: str, folder: Path | None = None) -> list[dict[str, Any]]:
    """All lines of one bench, in the order they were recorded."""
    path = (folder or RESULTS) / f"{bench}.jsonl"
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def counting(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last line of equal case, metric, config and device. Lines that differ in their device only are adjacent, the
    newest last, which is the one that a table with one cell for them shows."""
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
    """One line under a table: the source of its numbers."""
    local = sum(any(word in n.get("note", "") for word in LOCAL_CHANGES) for n in lines)
    changed = f" {local} of {len(lines)} lines: with local changes on top of that commit." if local else ""
    devices = sorted({f"{n['device']}, torch {n['versions'].get('torch', '?')}" for n in lines})
    commits = sorted({n["commit"] for n in lines})
    return f"\n\n{'; '.join(devices)}; commit {', '.join(commits)}; {max(n['date'] for n in lines)}.{changed}"
