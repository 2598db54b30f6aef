"""A section of a report page: rows of bars over time. Who is busy when: links of a plan, stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from shoestring.report import NUM_COLORS, RIGHT, WIDTH, nice_ticks

ROW, GAP = 18, 6  # pixels
LEFT = 174  # for the names of the rows


class Bar(NamedTuple):
    start: float
    stop: float
    color: int
    tip: str  # shown under the pointer


@dataclass(frozen=True)
class BarRows:
    """`mark`: a time with a dashed line, which `note` explains."""

    title: str
    rows: Sequence[tuple[str, Sequence[Bar]]]
    end: float
    unit: Callable[[float], str]
    mark: float | None = None
    note: str = ""

    def html(self) -> str:
        svg = self.svg()
        return f"<section><h2>{escape(self.title)}</h2>{svg}</section>" if svg else ""

    def svg(self) -> str:
        if not self.rows or not self.end:
            return ""
        scale = (WIDTH - LEFT - RIGHT) / self.end
        height = len(self.rows) * (ROW + GAP) + 48
        marks = []
        for tick in nice_ticks(0.0, self.end):
            at = f"{LEFT + tick * scale:.1f}"
            marks.append(f'<line class="grid" x1="{at}" x2="{at}" y1="8" y2="{height - 40}"/>')
            marks.append(
                f'<text x="{at}" y="{height - 24}" text-anchor="middle">{self.unit(tick) if tick else 0}</text>'
            )
        for place, (name, bars) in enumerate(self.rows):
            y = 8 + place * (ROW + GAP)
            marks.append(f'<text x="{LEFT - 8}" y="{y + ROW - 5}" text-anchor="end">{escape(name)}</text>')
            for bar in bars:
                x, width = LEFT + bar.start * scale, max(1.0, (bar.stop - bar.start) * scale - 1)
                marks.append(
                    f'<rect class="dot c{bar.color % NUM_COLORS}" x="{x:.1f}" y="{y}" width="{width:.1f}" '
                    f'height="{ROW}" rx="2"><title>{escape(bar.tip)}</title></rect>'
                )
        if self.mark is not None:
            at = f"{LEFT + self.mark * scale:.1f}"
            marks.append(f'<line class="axis" x1="{at}" x2="{at}" y1="4" y2="{height - 40}" stroke-dasharray="4 3"/>')
        marks.append(f'<text x="{LEFT}" y="{height - 6}">{escape(self.note)}</text>')
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            f'aria-label="{escape(self.title, quote=True)}">{"".join(marks)}</svg>'
        )
