"""report.html: one self-contained page per run, with curves, tables and plots.

A report is a list of sections (`Curves`, `Table`, `Scatter`, `Text`), each a frozen dataclass with an
`html()`; `write_report` puts them on a page with inline CSS and SVG. No script, no font, no network: the file
opens in any browser, offline, in light and dark, and can be mailed. Hovering a mark shows its value.
`run_sections(folder)` reads the usual sections of a run folder: loss curve, evaluations, config, versions.

For zooming and smoothing, TensorBoard reads the same scalars from tb/.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Protocol

from shoestring.runlog import read_config, read_evals, read_jsonl, read_metrics, versions, write_atomically

WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 16, 44
# The hues of Okabe and Ito on a light and on a dark page, distinguishable with every common colour blindness.
HUES = (
    ("#0072b2", "#56b4e9"),
    ("#d55e00", "#e98a4b"),
    ("#007a5a", "#2fbf95"),
    ("#b0518f", "#d893bd"),
    ("#8a6d00", "#e0c341"),
    ("#3a8fc4", "#8fc7ea"),
)
NUM_COLORS = len(HUES)


class Section(Protocol):
    @property
    def title(self) -> str: ...
    def html(self) -> str: ...


def in_words(key: str) -> str:
    """A key of a JSON file for people."""
    return "2:4 layers" if key == "layers_24" else key.replace("_", " ")


@dataclass(frozen=True)
class Series:
    name: str
    xs: Sequence[float]
    ys: Sequence[float]


@dataclass(frozen=True)
class Curves:
    title: str
    series: Sequence[Series]
    x_label: str = "step"
    y_label: str = "loss"

    def html(self) -> str:
        kept = [s for s in (_finite(s) for s in self.series) if s.xs]
        if not kept:
            return ""
        axes = _Axes([x for s in kept for x in s.xs], [y for s in kept for y in s.ys])
        marks = []
        for color, s in enumerate(kept):
            points = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in zip(s.xs, s.ys, strict=True))
            marks.append(f'<polyline class="line c{color % NUM_COLORS}" points="{points}"/>')
            marks += [
                f'<circle class="hover" cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="5">'
                f"<title>{escape(s.name)}: {_num(y)} at {escape(self.x_label)} {_num(x)}</title></circle>"
                for x, y in list(zip(s.xs, s.ys, strict=True))[:: -(-len(s.xs) // 200)]  # at most 200
            ]
        legend = _legend([s.name for s in kept]) if len(kept) > 1 else ""
        return _section(self.title, legend + axes.svg("".join(marks), self.x_label, self.y_label, self.title))


@dataclass(frozen=True)
class Scatter:
    """Named points; every point carries its label."""

    title: str
    points: Sequence[tuple[str, float, float]]
    x_label: str
    y_label: str

    def html(self) -> str:
        kept = [(n, x, y) for n, x, y in self.points if math.isfinite(x) and math.isfinite(y)]
        if not kept:
            return ""
        axes = _Axes([p[1] for p in kept], [p[2] for p in kept], pad=0.12)
        marks = []
        for color, (name, x, y) in enumerate(kept):
            px, py = axes.x(x), axes.y(y)
            side = "end" if px > WIDTH * 0.75 else "start"
            dx = -10 if side == "end" else 10
            marks.append(
                f'<circle class="dot c{color % NUM_COLORS}" cx="{px:.1f}" cy="{py:.1f}" r="6">'
                f"<title>{escape(name)}: {escape(self.x_label)} {_num(x)}, "
                f"{escape(self.y_label)} {_num(y)}</title>"
                f'</circle><text class="label" x="{px + dx:.1f}" y="{py - 8:.1f}" text-anchor="{side}">'
                f"{escape(name)}</text>"
            )
        return _section(self.title, axes.svg("".join(marks), self.x_label, self.y_label, self.title))


@dataclass(frozen=True)
class HeatMap:
    """A row of cells per label, from 0 (light) to 1 (dark); `names` says what a cell is."""

    title: str
    labels: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float]]
    names: Sequence[Sequence[str]]
    note: str = ""

    def html(self) -> str:
        if not self.columns or not self.labels:
            return ""
        left, high = 170.0, 14.0
        wide = (WIDTH - left - RIGHT) / len(self.columns)
        marks = []
        for i, (label, row, names) in enumerate(zip(self.labels, self.values, self.names, strict=True)):
            y = i * high
            marks.append(f'<text x="{left - 6}" y="{y + 11:.0f}" text-anchor="end">{escape(label)}</text>')
            marks += [
                f'<rect class="cell" x="{left + j * wide:.2f}" y="{y:.0f}" width="{wide + 0.05:.2f}" '
                f'height="{high - 1:.0f}" fill-opacity="{0.06 + 0.94 * value:.2f}">'
                f"<title>{escape(label)}, step {escape(column)}: "
                f"{escape(name)}</title></rect>"
                for j, (value, column, name) in enumerate(zip(row, self.columns, names, strict=True))
            ]
        height = len(self.labels) * high + 20
        ends = ((left, "start", self.columns[0]), (WIDTH - RIGHT, "end", self.columns[-1]))
        marks += [f'<text x="{x:.0f}" y="{height - 4:.0f}" text-anchor="{a}">{escape(t)}</text>' for x, a, t in ends]
        svg = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
            f'aria-label="{escape(self.title, quote=True)}">{"".join(marks)}</svg>'
        )
        return _section(self.title, f"<p>{escape(self.note)}</p>{svg}")


@dataclass(frozen=True)
class Table:
    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""

    def html(self) -> str:
        if not self.rows:
            return ""
        head = "".join(f"<th>{escape(h)}</th>" for h in self.headers)
        body = "".join("<tr>" + "".join(_cell(v) for v in row) + "</tr>" for row in self.rows)
        note = f"<p>{escape(self.note)}</p>" if self.note else ""
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return _section(self.title, note + f'<div class="wide">{table}</div>')

    def print(self) -> None:
        """The same table on the console."""
        from rich import box
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text as RichText

        table = RichTable(title=self.title, title_justify="left", box=box.SIMPLE_HEAD)
        for column, header in enumerate(self.headers):
            numeric = all(_is_number(row[column]) or row[column] is None for row in self.rows)
            table.add_column(header, justify="right" if numeric else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*(RichText(_show(v)) for v in row))  # Text: a value in [brackets] is no markup
        # Without a terminal lines need not fit a screen.
        console = Console() if sys.stdout.isatty() else Console(width=220)
        console.print(table)
        if self.note:
            print(f"  {self.note}\n")


@dataclass(frozen=True)
class Text:
    """A paragraph, or verbatim text (`code`) such as a sample or a list of commands."""

    title: str
    body: str
    code: bool = False

    def html(self) -> str:
        text = escape(self.body)
        return _section(self.title, f"<pre>{text}</pre>" if self.code else f"<p>{text}</p>")


def write_report(folder: Path, title: str, sections: Sequence[Section], *, subtitle: str = "") -> Path:
    """Write folder/report.html; sections without content leave no trace."""
    body = "\n".join(s.html() for s in sections)
    page = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body><main>"
        f"<h1>{escape(title)}</h1><p class='sub'>{escape(subtitle)}</p>\n{body}\n</main></body></html>\n"
    )
    path = folder / "report.html"
    write_atomically(path, page)
    return path


def run_sections(folder: Path) -> list[Section]:
    """Loss curve, evaluations, config and versions of a run folder."""
    config = read_config(folder)
    ran = config.get("versions") or versions()
    settings = config.get("config", {})
    return [
        loss_curves(read_metrics(folder / "metrics.jsonl")),
        eval_table(read_evals(folder / "evals.jsonl")),
        starts_table(read_jsonl(folder / "checkpoints" / "events.jsonl")),
        Text("Command", str(config.get("command", "")), code=True),
        Table("Config", ["key", "value"], [[k, v] for k, v in flatten(settings).items()]),
        Table("Versions", ["package", "version"], [[k, v] for k, v in ran.items()]),
    ]


def starts_table(events: list[dict[str, Any]]) -> Table:
    """Every start of a run with checkpoint=auto: the step it went on from, and where its state came from."""
    cells = [[str(e.get("kind", "")), e.get("step"), str(e.get("source") or "")] for e in events]
    resumed = any(kind == "resumed" for kind, _, _ in cells)
    return Table("Starts", ["event", "step", "state from"], cells if resumed else [])


def loss_curves(metrics: list[dict[str, Any]]) -> Curves:
    """Every logged scalar whose name holds 'loss', against the step."""
    names = sorted({k for row in metrics for k in row if "loss" in k})
    return metric_curves(metrics, "Loss", "loss (nats per token)", *names)


def metric_curves(metrics: list[dict[str, Any]], title: str, label: str, *names: str) -> Curves:
    """The scalars of these names against the step."""
    picked = {n: [row for row in metrics if row.get(n) is not None] for n in names}
    series = [Series(n, [row["step"] for row in rows], [row[n] for row in rows]) for n, rows in picked.items()]
    return Curves(title, series, "step", label)


EVAL_COLUMNS = {
    "model": "model",
    "format": "format",
    "text": "text",
    "perplexity": "perplexity",
    "num_tokens": "tokens",
    "context": "context",
    "stride": "stride",
    "task": "task",
    "accuracy": "accuracy",
    "num": "items",
    "megabytes": "MB",
    "bits_per_weight": "bits per weight",
    "prefill_tokens_per_s": "prefill tokens/s",
    "decode_tokens_per_s": "decode tokens/s",
}


CONDITIONS = ("text", "num_tokens", "context", "stride")


def eval_table(rows: list[dict[str, Any]], title: str = "Evaluations") -> Table:
    """The columns that any row has, in a fixed order; conditions that all perplexities share become a note."""
    used = [k for k in EVAL_COLUMNS if any(row.get(k) is not None for row in rows)]
    measured = [row for row in rows if row.get("perplexity") is not None]
    shared = [k for k in CONDITIONS if k in used and len({row.get(k) for row in measured}) == 1]
    note = ", ".join(f"{EVAL_COLUMNS[k]} {_show(measured[0][k])}" for k in shared)
    columns = [k for k in used if k not in shared]
    cells = [[row.get(k) for k in columns] for row in rows]
    return Table(title, [EVAL_COLUMNS[k] for k in columns], cells, f"Perplexity: {note}" if note else "")


# -- drawing -----------------------------------------------------------------------------------------


class _Axes:
    """Maps data to pixels and draws frame, grid and tick labels."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float], pad: float = 0.04) -> None:
        self.x_low, self.x_high = _spread(min(xs), max(xs), pad if pad > 0.1 else 0.0)
        self.y_low, self.y_high = _spread(min(ys), max(ys), pad)

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - TOP - BOTTOM)

    def svg(self, marks: str, x_label: str, y_label: str, title: str) -> str:
        grid = []
        for tick in nice_ticks(self.y_low, self.y_high):
            y = f"{self.y(tick):.1f}"
            grid.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
            grid.append(f'<text x="{LEFT - 8}" y="{y}" dy="4" text-anchor="end">{_num(tick)}</text>')
        for tick in nice_ticks(self.x_low, self.x_high):
            x = f"{self.x(tick):.1f}"
            grid.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{_num(tick)}</text>')
        middle = (LEFT + WIDTH - RIGHT) / 2
        grid.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
        turned = f'transform="translate(14 {HEIGHT / 2}) rotate(-90)" text-anchor="middle"'
        grid.append(f"<text {turned}>{escape(y_label)}</text>")
        base = HEIGHT - BOTTOM
        grid.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'aria-label="{escape(title, quote=True)}">{"".join(grid)}{marks}</svg>'
        )


def nice_ticks(low: float, high: float, target: int = 5) -> list[float]:
    """About `target` round numbers (1, 2 or 5 times a power of ten apart) within [low, high]."""
    raw = (high - low) / target
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _spread(low: float, high: float, pad: float) -> tuple[float, float]:
    """A range with a margin, at least a tenth of the values wide: noise must not look like a result."""
    span = max(high - low, 0.1 * max(abs(low), abs(high))) or 1.0
    margin = pad * span + (span - (high - low)) / 2
    return low - margin, high + margin


def _finite(series: Series) -> Series:
    pairs = [(x, y) for x, y in zip(series.xs, series.ys, strict=True) if y is not None and math.isfinite(y)]
    return Series(series.name, [x for x, _ in pairs], [y for _, y in pairs])


def _legend(names: Sequence[str]) -> str:
    keys = "".join(f'<span><i class="key k{i % NUM_COLORS}"></i>{escape(name)}</span>' for i, name in enumerate(names))
    return f'<p class="legend">{keys}</p>'


def _section(title: str, inner: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{inner}</section>"


def _cell(value: Any) -> str:
    kind = ' class="num"' if _is_number(value) else ""
    return f"<td{kind}>{escape(_show(value))}</td>"


def _show(value: Any) -> str:
    if value is None:
        return ""
    return _num(value) if _is_number(value) else str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _num(value: float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e9:
        return f"{int(value):,}"
    return f"{value:.4g}"


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            shown = str(value).lower() if isinstance(value, bool) or value is None else value
            flat[prefix + key] = ", ".join(map(str, shown)) if isinstance(shown, list) else shown
    return flat


def color_variables() -> str:
    """The CSS variables of the page's colours, light and dark."""
    light, dark = (";".join(f"--c{i}:{pair[mode]}" for i, pair in enumerate(HUES)) for mode in (0, 1))
    return (
        f":root{{color-scheme:light dark;--bg:#fff;--fg:#1d2129;--soft:#5b6472;--rule:#dfe3e8;--panel:#f6f7f9;{light}}}"
        "@media(prefers-color-scheme:dark){:root{--bg:#14171c;--fg:#e6e8eb;--soft:#9aa4b2;--rule:#333a45;"
        f"--panel:#1c2129;{dark}}}}}"
    )


_STYLE = (
    color_variables()
    + """
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--fg);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:960px;margin:0 auto;padding:32px 20px 64px}h1{font-size:1.7rem;margin:0}
h2{font-size:1.1rem;margin:2.2rem 0 .6rem}.sub{color:var(--soft);margin:.2rem 0 0}
svg{width:100%;height:auto;display:block}svg text{fill:var(--soft);font-size:12px}
svg text.label{fill:var(--fg);font-size:13px}
.grid{stroke:var(--rule);stroke-width:1}.axis{stroke:var(--soft);stroke-width:1}.line{fill:none;stroke-width:2}
.dot{stroke:var(--bg);stroke-width:2}.cell{fill:var(--c0)}.hover{fill:transparent}.hover:hover{fill:var(--soft)}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem;width:100%}
th{text-align:left;color:var(--soft);font-weight:600}
th,td{padding:.35rem .8rem .35rem 0;border-bottom:1px solid var(--rule);vertical-align:top}
td.num{font-variant-numeric:tabular-nums}
pre{background:var(--panel);padding:12px 14px;border-radius:6px;overflow-x:auto;
white-space:pre-wrap;font-size:.85rem}
.legend{display:flex;flex-wrap:wrap;gap:1rem;margin:0;color:var(--soft);font-size:.9rem}
.key{display:inline-block;width:14px;height:3px;margin-right:6px;vertical-align:middle}
"""
    + "".join(
        f".line.c{i}{{stroke:var(--c{i})}}.dot.c{i}{{fill:var(--c{i})}}.key.k{i}{{background:var(--c{i})}}"
        for i in range(NUM_COLORS)
    )
)
