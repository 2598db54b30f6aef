"""plans.jsonl of a run folder: which layer was sent how; and what the run's report shows of its reducer.

The first line names layers and options; every other line is a step and one option per layer. At most every EVERY-th
step is written, so that a long run stays small.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shoestring.report import HeatMap, Section, metric_curves
from shoestring.runlog import append_jsonl, read_jsonl, read_metrics

FILE = "plans.jsonl"
EVERY = 10


class PlanLog:
    """Does nothing without a folder."""

    def __init__(self, folder: Path | None) -> None:
        self.path = None if folder is None else folder / FILE

    def begin(self, layers: Sequence[str], options: Sequence[str]) -> None:
        if self.path is not None and not self.path.exists():
            append_jsonl(self.path, {"layers": list(layers), "options": list(options)})

    def add(self, step: int, plan: list[int]) -> None:
        if self.path is not None and step % EVERY == 0:
            append_jsonl(self.path, {"step": step, "plan": plan})


def report_sections(folder: Path) -> list[Section]:
    """Bytes, shares and residuals over the steps, and the heat map; nothing where gradients were summed plainly."""
    metrics = read_metrics(folder / "metrics.jsonl")
    return [
        metric_curves(metrics, "Gradients sent", "MB per step and replica", "sent_mb"),
        metric_curves(metrics, "Compression", "times fewer bytes than plain", "compression"),
        metric_curves(metrics, "Share of the time spent on summing gradients", "share", "reduce_share"),
        metric_curves(metrics, "Error feedback", "norm of the residual", "residual_norm"),
        *heat_map(folder),
    ]


def heat_map(folder: Path) -> list[HeatMap]:
    """For the report of a run; none where no selector ran."""
    rows = read_jsonl(folder / FILE)
    if len(rows) < 2:
        return []
    layers, options = rows[0]["layers"], rows[0]["options"]
    plans = {row["step"]: row["plan"] for row in rows[1:]}  # a resumed run has written some steps again
    steps = sorted(plans)
    kept = steps[:: -(-len(steps) // 120)]
    values = [[plans[s][i] / max(len(options) - 1, 1) for s in kept] for i in range(len(layers))]
    names = [[options[plans[s][i]] for s in kept] for i in range(len(layers))]
    note = f"From light to dark: {', '.join(options)}."
    return [HeatMap("Layers sent", layers, [str(s) for s in kept], values, names, note)]
