"""What bench/lowbit_gemm.py was to reach on the three large shapes, beside what it reached; medians, no spread.

Integers are set against bf16 `F.linear`, tables with two scales also against integers of the same width.
"""

from __future__ import annotations

from shoestring.bench.lowbit_gemm import ROWS, SHAPES
from shoestring.bench.results import markdown, newest

PREFILL = {2048: 0.95}
FASTER = {  # times faster than bf16, at least
    "int4:g128": {1: 3.3, 2: 3.3, 4: 3.3, 16: 2.6, 64: 1.8, **PREFILL},
    "int3:g128": {1: 3.6, 2: 3.6, 4: 3.6, **PREFILL},
    "int2:g128": {1: 4.5, 2: 4.5, 4: 4.5, **PREFILL},
    **dict.fromkeys(("int4:g64", "nf4:s2:g128", "nf3:s2:g128"), PREFILL),
}
LONGER = {  # time over that of the integers, at most
    ("nf4:s2:g128", "int4:g128"): 1.15,
    ("nf3:s2:g128", "int3:g128"): 1.15,
}
LARGE = SHAPES[:3]


def cell(reached: list[float], wanted: float, met: list[bool]) -> str:
    if not reached:
        return ""
    return f"{min(reached):.2f} to {max(reached):.2f} ({wanted:g}: {sum(met)} of {len(met)})"


def table() -> str:
    """A line a target, a column a number of rows: least to most over the shapes (what was wanted: on how many)."""
    ratios: dict[tuple[str, int], dict[tuple[int, int], float]] = {}
    times: dict[tuple[str, int], dict[tuple[int, int], float]] = {}
    for n in newest("lowbit_gemm"):
        shape = n["config"]["n"], n["config"]["k"]
        if n["metric"] == "time" and shape in LARGE:
            place = n["case"].removeprefix("shoestring "), n["config"]["rows"]
            ratios.setdefault(place, {})[shape] = n["ratio"]
            times.setdefault(place, {})[shape] = n["value"]
    lines = []
    for label, wanted in FASTER.items():
        cells = []
        for rows in ROWS:
            found = [*ratios.get((label, rows), {}).values()] if rows in wanted else []
            asked = wanted.get(rows, 0.0)
            cells.append(cell(found, asked, [r >= asked for r in found]))
        lines.append([f"{label}, times faster than bf16", *cells])
    for (label, other), most in LONGER.items():
        cells = []
        for rows in ROWS:
            ours, theirs = times.get((label, rows), {}), times.get((other, rows), {})
            found = [ours[shape] / theirs[shape] for shape in ours if shape in theirs]
            cells.append(cell(found, most, [r <= most for r in found]))
        lines.append([f"{label}, time over {other}", *cells])
    return markdown(["target", *map(str, ROWS)], lines)
