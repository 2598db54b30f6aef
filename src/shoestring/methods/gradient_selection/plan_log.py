"""plans.jsonl of a run folder: which layer was sent how; and what the run's report shows of it.

The first line names layers and options; every other line is a step and one option per layer. At most every EVERY-th
step is written, so that a long run stays small. The file only informs: lines that a crash has damaged are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoestring.report import HeatMap
from shoestring.runlog import append_jsonl, read_jsonl

FILE = "plans.jsonl"
EVERY = 10


class PlanLog:
    """Does nothing without a folder."""

    def __init__(self, folder: Path | None) -> None:
        self.path = None if folder is None else folder / FILE

    def begin(self, layers: Sequence[str], options: Sequence[str]) -> None:
        if self.path is not None and _named(read_jsonl(self.path, strict=False)) is None:
            append_jsonl(self.path, {"layers": list(layers), "options": list(options)})

    def add(self, step: int, plan: list[int]) -> None:
        if self.path is not None and step % EVERY == 0:
            append_jsonl(self.path, {"step": step, "plan": plan})


def heat_map(folder: Path) -> list[HeatMap]:
    """For the report of a run; none where no selector ran."""
    rows = read_jsonl(folder / FILE, strict=False)
    named = _named(rows)
    if named is None:
        return []
    layers, options = named
    plans = {  # by step: a resumed run has written some again
        row["step"]: row["plan"]
        for row in rows
        if isinstance(row.get("step"), int) and _is_plan(row.get("plan"), len(layers), len(options))
    }
    if not plans:
        return []
    steps = sorted(plans)
    kept = steps[:: -(-len(steps) // 120)]
    values = [[plans[s][i] / max(len(options) - 1, 1) for s in kept] for i in range(len(layers))]
    names = [[options[plans[s][i]] for s in kept] for i in range(len(layers))]
    note = f"From light to dark: {', '.join(options)}."
    return [HeatMap("Layers sent", layers, [str(s) for s in kept], values, names, note)]


def _named(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[str]] | None:
    """Layers and options; None where no line names them."""
    for row in rows:
        layers, options = row.get("layers"), row.get("options")
        if isinstance(layers, list) and isinstance(options, list):
            return [str(name) for name in layers], [str(name) for name in options]
    return None


def _is_plan(plan: Any, num_layers: int, num_options: int) -> bool:
    numbers = isinstance(plan, list) and len(plan) == num_layers and set(map(type, plan)) <= {int}
    return numbers and all(0 <= option < num_options for option in plan)
