"""Small SVG pictures for README.md and docs/: points and lines over two axes, and horizontal bars.

Without a plotting library a picture is text, the same bytes on every machine, so that a test can compare it with
results/. Colours follow the reader's light or dark mode through a media query in the picture's own style. Every picture
states what was measured: title, conditions below it, notes at the bottom.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from shoestring.report import NUM_COLORS, color_variables

WIDTH = 760
LEFT, RIGHT = 82, 24
CHARACTER = 6.6  # width of a character of the small text in pixels, on the safe side
GREY, INK = NUM_COLORS, NUM_COLORS + 1  # colours besides the hues
SHAPES = ("circle", "square", "diamond", "triangle", "cross", "drop", "diamond", "square")


@dataclass(frozen=True)
class Axis:
    label: str
    low: float
    high: float
    ticks: Sequence[float]
    log: bool = False
    names: Sequence[str] = ()  # in place of the ticks' numbers

    def place(self, value: float, begin: float, end: float) -> float:
        """The pixel between `begin` and `end` of a value."""
        low, high, at = ((math.log(v) if self.log else v) for v in (self.low, self.high, value))
        return begin + (at - low) / (high - low) * (end - begin)

    def named(self) -> list[tuple[float, str]]:
        return list(zip(self.ticks, self.names or [f"{t:,g}" for t in self.ticks], strict=True))


@dataclass(frozen=True)
class Marks:
    """Points of one colour and shape, joined or not."""

    name: str
    points: Sequence[tuple[float, float]]
    color: int
    joined: bool = True
    dashed: bool = False
    dots: bool = True
    labels: Sequence[str] = ()  # above each point
    last_beside: bool = False  # the last label is at the right of its point, where other lines end close by
    shown: bool = True  # in the legend


@dataclass(frozen=True)
class Level:
    """A dashed horizontal line with its name over its right end, or under it, or at the left end."""

    name: str
    value: float
    below: bool = False
    at_left: bool = False


@dataclass(frozen=True)
class Panel:
    """Two axes and their marks."""

    x: Axis
    y: Axis
    marks: Sequence[Marks]
    levels: Sequence[Level] = ()


@dataclass(frozen=True)
class Bar:
    label: str
    value: float
    text: str
    color: int = 0
    limit: float | None = None  # a tick on the bar's line: what would be possible


@dataclass(frozen=True)
class Lane:
    """A row of `span_plot`: spans of (begin, end, colour)."""

    label: str
    spans: Sequence[tuple[float, float, int]] = ()


def xy_plot(title: str, conditions: str, panels: Sequence[Panel], notes: str = "", height: int = 300) -> str:
    """Panels side by side under one legend."""
    named = {m.name: m for panel in panels for m in panel.marks if m.shown}
    top, head = _head(title, conditions, [(m.name, _sample(m)) for m in named.values()])
    bottom = top + height
    share = (WIDTH - RIGHT) / len(panels)
    body = [
        _panel(p, i * share + LEFT, (i + 1) * share - (18 if i + 1 < len(panels) else 0), top + 8, bottom)
        for i, p in enumerate(panels)
    ]
    return _picture(title, head + "".join(body), bottom + 50, notes)


def bar_plot(
    title: str,
    conditions: str,
    bars: Sequence[Bar],
    legend: Sequence[tuple[str, int]] = (),
    notes: str = "",
    left: int = 250,
    limit_name: str = "",
) -> str:
    """Horizontal bars from zero, each with its number behind it; an empty label continues the group above."""
    keys = [(name, f'<rect class="f{color}" x="6" y="-10" width="18" height="11" rx="2"/>') for name, color in legend]
    if limit_name:
        keys.append((limit_name, '<line class="limit" x1="15" x2="15" y1="-11" y2="2"/>'))
    top, head = _head(title, conditions, keys)
    largest = max(max(b.value, b.limit or 0.0) for b in bars)
    room = WIDTH - RIGHT - left - CHARACTER * max(len(b.text) for b in bars) - 14
    y, body = top + 8, []
    for i, bar in enumerate(bars):
        y += 10 if i and bar.label else 0
        width = max(1.5, bar.value / largest * room)
        body.append(f'<text class="label" x="{left - 10}" y="{y + 15}" text-anchor="end">{escape(bar.label)}</text>')
        body.append(f'<rect class="f{bar.color}" x="{left}" y="{y + 2}" width="{width:.1f}" height="18" rx="2"/>')
        end = width
        if bar.limit is not None:
            at = bar.limit / largest * room
            body.append(f'<line class="limit" x1="{left + at:.1f}" x2="{left + at:.1f}" y1="{y}" y2="{y + 22}"/>')
            body.append(
                f'<line class="reach" x1="{left + width:.1f}" x2="{left + at:.1f}" y1="{y + 11}" y2="{y + 11}"/>'
            )
            end = max(end, at)
        body.append(f'<text class="label" x="{left + end + 8:.1f}" y="{y + 15}">{escape(bar.text)}</text>')
        y += 24
    return _picture(title, head + "".join(body), y + 12, notes)


def span_plot(
    title: str, conditions: str, lanes: Sequence[Lane], axis: Axis, legend: Sequence[tuple[str, int]], notes: str = ""
) -> str:
    """Spans of time, a lane below the other, over one axis; a lane without spans is a heading."""
    keys = [(name, f'<rect class="f{color}" x="6" y="-10" width="18" height="11" rx="2"/>') for name, color in legend]
    top, head = _head(title, conditions, keys)
    left, right, y, body = 190, WIDTH - RIGHT, top + 6, []
    for lane in lanes:
        y += 0 if lane.spans else 8
        side, x = ("end", left - 10) if lane.spans else ("start", 24)
        body.append(f'<text class="label" x="{x}" y="{y + 14:.0f}" text-anchor="{side}">{escape(lane.label)}</text>')
        for begin, end, color in lane.spans:
            a, b = (axis.place(min(v, axis.high), left, right) for v in (begin, end))
            told = f"{begin:,.1f} to {end:,.1f}"
            rect = f'<rect class="f{color}" x="{a:.1f}" y="{y + 3:.0f}" width="{max(b - a, 0.7):.1f}" height="14"/>'
            body.append(f"<g><title>{told}</title>{rect}</g>")
        y += 20
    for tick, name in axis.named():
        at = axis.place(tick, left, right)
        body.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{top + 8:.0f}" y2="{y + 4:.0f}"/>')
        body.append(f'<text x="{at:.1f}" y="{y + 18:.0f}" text-anchor="middle">{escape(name)}</text>')
    body.append(f'<text x="{(left + right) / 2:.1f}" y="{y + 36:.0f}" text-anchor="middle">{escape(axis.label)}</text>')
    return _picture(title, head + "".join(body), y + 40, notes)


# -- parts ----------------------------------------------------------------------------------------------------


def _head(title: str, conditions: str, keys: Sequence[tuple[str, str]]) -> tuple[float, str]:
    """Title, conditions and legend; how far down they reach."""
    text = [f'<text class="title" x="24" y="34">{escape(title)}</text>']
    y = 56.0
    for line in wrap(conditions, WIDTH - 48):
        text.append(f'<text x="24" y="{y:.0f}">{escape(line)}</text>')
        y += 17
    x, y = 24.0, y + 8
    for name, sample in keys:
        width = 34 + CHARACTER * len(name) + 14
        if x + width > WIDTH - 16 and x > 24:
            x, y = 24.0, y + 20
        text.append(f'<g transform="translate({x:.1f} {y:.1f})">{sample}<text x="30" y="0">{escape(name)}</text></g>')
        x += width
    return y + (12 if keys else -4), "".join(text)


def _sample(marks: Marks) -> str:
    line = f'<line class="l{marks.color}{" dash" if marks.dashed else ""}" x1="0" x2="24" y1="-4" y2="-4"/>'
    return (line if marks.joined else "") + (_dot(marks.color, 12, -4) if marks.dots else "")


def _panel(panel: Panel, left: float, right: float, top: float, bottom: float) -> str:
    x, y = panel.x, panel.y
    out = []
    for tick, name in y.named():
        at = y.place(tick, bottom, top)
        out.append(f'<line class="grid" x1="{left:.1f}" x2="{right:.1f}" y1="{at:.1f}" y2="{at:.1f}"/>')
        out.append(f'<text x="{left - 8:.1f}" y="{at + 4:.1f}" text-anchor="end">{escape(name)}</text>')
    for tick, name in x.named():
        at = x.place(tick, left, right)
        out.append(f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{bottom:.1f}" y2="{bottom + 4:.1f}"/>')
        out.append(f'<text x="{at:.1f}" y="{bottom + 18:.1f}" text-anchor="middle">{escape(name)}</text>')
    out.append(f'<line class="axis" x1="{left:.1f}" x2="{right:.1f}" y1="{bottom:.1f}" y2="{bottom:.1f}"/>')
    middle = (left + right) / 2
    out.append(f'<text x="{middle:.1f}" y="{bottom + 38:.1f}" text-anchor="middle">{escape(x.label)}</text>')
    away = 22 + CHARACTER * max(len(name) for _, name in y.named())  # clear of the longest number
    turned = f'transform="translate({left - away:.1f} {(top + bottom) / 2:.1f}) rotate(-90)" text-anchor="middle"'
    out.append(f"<text {turned}>{escape(y.label)}</text>")
    for level in panel.levels:
        at = y.place(level.value, bottom, top)
        out.append(f'<line class="level" x1="{left:.1f}" x2="{right:.1f}" y1="{at:.1f}" y2="{at:.1f}"/>')
        down, side = (15 if level.below else -6), ("start" if level.at_left else "end")
        end = left + 4 if level.at_left else right
        out.append(f'<text x="{end:.1f}" y="{at + down:.1f}" text-anchor="{side}">{escape(level.name)}</text>')
    for m in panel.marks:
        places = [(x.place(a, left, right), y.place(b, bottom, top)) for a, b in m.points]
        if m.joined:
            points = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
            out.append(f'<polyline class="l{m.color}{" dash" if m.dashed else ""}" points="{points}"/>')
        for i, (a, b) in enumerate(places):
            if m.dots:
                told = f"{m.name}: {m.points[i][1]:,.4g} at {m.points[i][0]:,g}"
                out.append(f"<g><title>{escape(told)}</title>{_dot(m.color, a, b)}</g>")
            if m.labels and m.labels[i]:
                beside = m.last_beside and i == len(places) - 1
                at_x, at_y, side = (a + 9, b + 4, "start") if beside else (a, b - 10, "middle")
                out.append(
                    f'<text class="label" x="{at_x:.1f}" y="{at_y:.1f}" text-anchor="{side}">'
                    f"{escape(m.labels[i])}</text>"
                )
    return "".join(out)


def _dot(color: int, x: float, y: float) -> str:
    shape, of = SHAPES[color], f'class="f{color} dot"'
    if shape == "square":
        return f'<rect {of} x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"/>'
    if shape == "circle":
        return f'<circle {of} cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>'
    corners = {
        "diamond": ((0, -5.5), (5.5, 0), (0, 5.5), (-5.5, 0)),
        "triangle": ((0, -5.5), (5, 4), (-5, 4)),
        "drop": ((0, 5.5), (5, -4), (-5, -4)),
        "cross": (
            (-5, -2),
            (-2, -2),
            (-2, -5),
            (2, -5),
            (2, -2),
            (5, -2),
            (5, 2),
            (2, 2),
            (2, 5),
            (-2, 5),
            (-2, 2),
            (-5, 2),
        ),
    }[shape]
    return f'<polygon {of} points="{" ".join(f"{x + a:.1f},{y + b:.1f}" for a, b in corners)}"/>'


def wrap(text: str, width: float, character: float = CHARACTER) -> list[str]:
    """Lines of about that many pixels."""
    lines: list[str] = []
    for word in text.split():
        if lines and character * (len(lines[-1]) + 1 + len(word)) <= width:
            lines[-1] += " " + word
        else:
            lines.append(word)
    return lines


def _picture(title: str, body: str, bottom: float, notes: str) -> str:
    y = bottom + 6
    foot = []
    for line in wrap(notes, WIDTH - 48, 6.0):
        y += 16
        foot.append(f'<text class="note" x="24" y="{y:.0f}">{escape(line)}</text>')
    return svg(title, body + "".join(foot), WIDTH, y + 18)


def svg(title: str, body: str, width: float, height: float, style: str = "") -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img" aria-label="{escape(title, quote=True)}">\n<style>{STYLE}{style}</style>\n'
        f'<rect class="page" width="{width:.0f}" height="{height:.0f}" rx="8"/>\n'
        + body.replace("><", ">\n<")
        + "\n</svg>\n"
    )


STYLE = (
    color_variables()
    + (
        "text{fill:var(--soft);font:12px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}"
        "text.title{fill:var(--fg);font-size:17px;font-weight:600}text.label{fill:var(--fg)}text.note{font-size:11px}"
        ".page{fill:var(--bg);stroke:var(--rule)}.grid{stroke:var(--rule)}.axis{stroke:var(--soft)}"
        ".level{stroke:var(--soft);stroke-dasharray:5 4}.limit{stroke:var(--fg);stroke-width:2}"
        ".reach{stroke:var(--soft);stroke-dasharray:2 3}.dash{stroke-dasharray:6 4}"
        "polyline{fill:none;stroke-width:2}.dot{stroke:var(--bg);stroke-width:1}"
    )
    + "".join(f".l{i}{{stroke:var(--c{i});stroke-width:2}}.f{i}{{fill:var(--c{i})}}" for i in range(NUM_COLORS))
    + "".join(
        f".l{i}{{stroke:var(--{name});stroke-width:2}}.f{i}{{fill:var(--{name})}}"
        for i, name in ((GREY, "soft"), (INK, "fg"))
    )
)
