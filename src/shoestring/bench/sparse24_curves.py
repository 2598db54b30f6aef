"""The flip-rate curves of the quality table's rows as a table: one row a method, one column a step.

What the papers show as curves: how much of the mask one step changes, over training. The lines are those of
bench/sparse24_quality.py; this file only lays them out.
"""

from __future__ import annotations

from typing import Any

from shoestring.bench.results import markdown
from shoestring.bench.sparse24_quality import CASES, lines_of

COLUMNS = 8


def table() -> str:
    """Of GPT-2's shape, in changes per thousand weights; seed 0."""
    return table_of("gpt2-124m")


def table_of(model: str) -> str:
    lines = [n for n in lines_of(model) if n["config"]["seed"] == 0]
    if not lines:
        return "No row has been finished yet."
    steps = columns(max((n["quality"]["flip_curve"] for n in lines), key=len))
    found = {n["case"]: n for n in lines}
    rows = [[case, *(cell(found[case], step) for step in steps)] for case in CASES if case in found]
    return markdown(["flips per thousand weights, at step", *map(str, steps)], rows)


def columns(curve: list[list[float]], count: int = COLUMNS) -> list[int]:
    """About that many steps of a curve, evenly, the first and the last among them."""
    steps = [int(step) for step, _ in curve]
    if len(steps) <= count:
        return steps
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]


def cell(line: dict[str, Any], step: int) -> str:
    """The measurement nearest to a step."""
    _, rate = min(line["quality"]["flip_curve"], key=lambda point: abs(point[0] - step))
    return f"{1000 * rate:.2f}"
