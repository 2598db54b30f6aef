"""report.html: one self-contained page per run, with curves, tables and plots.

A report is a list of sections (`Curves`, `Table`, `Scatter`, `Text`), each a frozen dataclass with an
`html()`; `write_report` puts them on a page with inline CSS and SVG. No script, no font, no network: the file
opens in any browser, offline, in light and dark, and can be mailed. Hovering a mark shows the row it was drawn from.
`run_sections(folder)` reads the usual sections of a run folder: loss curve, evaluations, config, versions.

For zooming and smoothing, TensorBoard reads the same scalars from tb/.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Protocol

from shoestring.errors import UserError
from shoestring.runlog import lineage, read_config, read_evals, read_jsonl, read_metrics, versions, write_atomically

WIDTH, HEIGHT = 720, 320
RIGHT, TOP, BOTTOM = 24, 16, 44
TICK_CHAR, LABEL_CHAR, LABEL_HEIGHT = 6.8, 7.4, 15.0  # pixels of a character at the sizes of _STYLE
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
    rows: Sequence[str] = ()  # what hovering a point shows; default: its value


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
            if len(s.xs) == 1:  # no line has one point
                at = f'cx="{axes.x(s.xs[0]):.1f}" cy="{axes.y(s.ys[0]):.1f}"'
                marks.append(f'<circle class="dot c{color % NUM_COLORS}" {at} r="5"/>')
            said = s.rows or [
                f"{s.name}: {_num(y)} at {self.x_label} {_num(x)}" for x, y in zip(s.xs, s.ys, strict=True)
            ]
            marks += [
                f'<circle class="hover" cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="5">'
                f"<title>{escape(row)}</title></circle>"
                for x, y, row in list(zip(s.xs, s.ys, said, strict=True))[:: -(-len(s.xs) // 200)]  # at most 200
            ]
        legend = _legend([s.name for s in kept]) if len(kept) > 1 else ""
        return _section(self.title, legend + axes.svg("".join(marks), self.x_label, self.y_label, self.title))


@dataclass(frozen=True)
class Scatter:
    """Named points; every point carries its label, where no other label or point is."""

    title: str
    points: Sequence[tuple[str, float, float]]
    x_label: str
    y_label: str
    rows: Sequence[str] = ()  # what hovering a point shows; default: its name and place

    def html(self) -> str:
        said = self.rows or [f"{n}: {self.x_label} {_num(x)}, {self.y_label} {_num(y)}" for n, x, y in self.points]
        pairs = zip(self.points, said, strict=True)
        kept = [(n, x, y, row) for (n, x, y), row in pairs if math.isfinite(x) and math.isfinite(y)]
        if not kept:
            return ""
        axes = _Axes([p[1] for p in kept], [p[2] for p in kept], pad=0.12)
        spots = [(axes.x(x), axes.y(y)) for _, x, y, _ in kept]
        labels = place_labels(spots, [name for name, *_ in kept], axes.left)
        marks = []
        for color, ((name, _, _, row), (px, py), (x, y)) in enumerate(zip(kept, spots, labels, strict=True)):
            x0, y0, x1, y1 = _box((x, y), LABEL_CHAR * len(name))
            end = min(max(px, x0), x1), min(max(py, y0), y1)  # where the label is nearest
            if math.dist(end, (px, py)) > 1.2 * LABEL_HEIGHT:  # it stands apart
                line = f'x1="{px:.1f}" y1="{py:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}"'
                marks.append(f'<line class="leader" {line}/>')
            marks.append(
                f'<circle class="dot c{color % NUM_COLORS}" cx="{px:.1f}" cy="{py:.1f}" r="6">'
                f"<title>{escape(row)}</title></circle>"
                f'<text class="label" x="{x:.1f}" y="{y:.1f}">{escape(name)}</text>'
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
    folded: bool = False  # on the page: shown when its title is clicked
    empty: str = "none"  # on the console, instead of headers without rows

    @property
    def cells(self) -> list[list[str]]:
        """The rows as text; the numbers of a column have equally many decimals."""
        shows = [column_format([row[i] for row in self.rows]) for i in range(len(self.headers))]
        return [[show(v) for show, v in zip(shows, row, strict=True)] for row in self.rows]

    def html(self) -> str:
        if not self.rows:
            return ""
        numeric = [self._numeric(i) for i in range(len(self.headers))]
        classes = [' class="num"' if n else "" for n in numeric]
        head = "".join(f"<th{c}>{escape(h)}</th>" for h, c in zip(self.headers, classes, strict=True))
        body = "".join(
            "<tr>" + "".join(f"<td{c}>{escape(v)}</td>" for v, c in zip(row, classes, strict=True)) + "</tr>"
            for row in self.cells
        )
        note = f"<p>{escape(self.note)}</p>" if self.note else ""
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        inner = note + f'<div class="wide">{table}</div>'
        if self.folded:
            return f"<details><summary>{escape(self.title)}</summary>{inner}</details>"
        return _section(self.title, inner)

    def markdown(self) -> str:
        return markdown(self.headers, self.cells)

    def _numeric(self, column: int) -> bool:
        return all(_is_number(row[column]) or row[column] is None for row in self.rows)

    def print(self) -> None:
        """The same table on the console."""
        from rich import box
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text as RichText

        table = RichTable(title=self.title, title_justify="left", box=box.SIMPLE_HEAD)
        for column, header in enumerate(self.headers):
            table.add_column(header, justify="right" if self._numeric(column) else "left", overflow="fold")
        for row in self.cells:
            table.add_row(*map(RichText, row))  # Text: a value in [brackets] is no markup
        # Without a terminal lines need not fit a screen.
        console = Console() if sys.stdout.isatty() else Console(width=220)
        if self.rows:
            console.print(table)
        else:
            print(f"{self.title}: {self.empty}\n")
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
    settings = flatten(config.get("config", {}))
    changed = config.get("changed")
    named = [k for k in changed if k in settings] if isinstance(changed, list) else []
    commands = [str(one.get("command", "")) for _, one in lineage(folder)] or [str(config.get("command", ""))]
    return [
        loss_curves(read_metrics(folder / "metrics.jsonl")),
        eval_table(read_evals(folder / "evals.jsonl")),
        starts_table(read_jsonl(folder / "checkpoints" / "events.jsonl")),
        Text("Commands that made this", "\n".join(commands), code=True),
        Table("Settings that differ from the defaults", ["setting", "value"], [[k, str(settings[k])] for k in named]),
        Table("All settings", ["setting", "value"], [[k, str(v)] for k, v in settings.items()], folded=True),
        Table("Versions", ["package", "version"], [[k, str(v)] for k, v in ran.items()], folded=True),
    ]


def comparison_sections(folders: Sequence[Path]) -> list[Section]:
    """Loss of several training runs against seconds and tokens. Seconds are those of training: without validation and
    checkpoints, compilation in the first line's."""
    series: dict[str, list[Series]] = {"seconds of training": [], "tokens": []}
    cells: list[list[Any]] = []
    for folder in folders:
        config = read_config(folder).get("config", {})
        per_step = config.get("batch", 0) * config.get("context", 0)
        rows = [row for row in read_metrics(folder / "metrics.jsonl") if row.get("tokens_per_s")]
        if not per_step or not rows:
            raise UserError(
                f"{folder} is no training run with lines of metrics; give folders of `shoestring run train/...`"
            )
        last, seconds, at = 0, 0.0, []
        for row in rows:
            seconds += (row["step"] - last) * per_step / row["tokens_per_s"]
            last = row["step"]
            at.append(seconds)
        losses = [row["loss"] for row in rows]
        series["seconds of training"].append(Series(folder.name, at, losses))
        series["tokens"].append(Series(folder.name, [row["step"] * per_step for row in rows], losses))
        held_out = [row["val_loss"] for row in read_metrics(folder / "metrics.jsonl") if row.get("val_loss")]
        cells.append([str(folder), last * per_step, seconds, losses[-1], held_out[-1] if held_out else None])
    header = ["run", "tokens", "seconds", "last loss", "last validation loss"]
    curves = [Curves(f"Loss against {x}", one, x, "loss (nats per token)") for x, one in series.items()]
    return [*curves, Table("Runs", header, cells)]


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
    series = [
        Series(n, [row["step"] for row in rows], [row[n] for row in rows], [in_row(row) for row in rows])
        for n, rows in picked.items()
    ]
    return Curves(title, series, "step", label)


def in_row(row: dict[str, Any]) -> str:
    """All numbers of a row, for hovering: 'step 20, loss 2.31, lr 0.001'."""
    return ", ".join(f"{in_words(k)} {_show(v)}" for k, v in row.items() if v is not None and k != "time")


def size_scatter(title: str, rows: Sequence[dict[str, Any]], names: Sequence[str] | None = None) -> Scatter:
    """Size against perplexity of evaluated models; hovering shows the whole row of the table."""
    kept = [(r, n) for r, n in zip(rows, names or [r["format"] for r in rows], strict=True) if r.get("perplexity")]
    points = [(name, r["megabytes"], r["perplexity"]) for r, name in kept]
    said = [
        ", ".join(f"{EVAL_COLUMNS[k]} {_show(r[k])}" for k in EVAL_COLUMNS if r.get(k) is not None) for r, _ in kept
    ]
    return Scatter(title, points, "MB", "perplexity (lower is better)", said)


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
    "similarity": "similarity of outputs",
    "least_similarity": "... at least",
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
    note = ", ".join(f"{EVAL_COLUMNS[k]} {_show(measured[0][k])}" for k in shared if measured[0][k] is not None)
    columns = [k for k in used if k not in shared]
    cells = [[row.get(k) for k in columns] for row in rows]
    return Table(title, [EVAL_COLUMNS[k] for k in columns], cells, f"Perplexity: {note}" if note else "")


# -- drawing -----------------------------------------------------------------------------------------


class _Axes:
    """Maps data to pixels and draws frame, grid and tick labels."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float], pad: float = 0.04) -> None:
        self.x_low, self.x_high = _spread(min(xs), max(xs), pad if pad > 0.1 else 0.0)
        self.y_low, self.y_high = _spread(min(ys), max(ys), pad)
        self.ticks = nice_ticks(self.y_low, self.y_high)
        self.tick_labels = list(map(column_format(self.ticks), self.ticks))
        # Room for the title, which is turned, and for the longest tick label right of it.
        self.left = 34 + TICK_CHAR * max(map(len, self.tick_labels), default=0)

    def x(self, value: float) -> float:
        return self.left + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - self.left - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - TOP - BOTTOM)

    def svg(self, marks: str, x_label: str, y_label: str, title: str) -> str:
        grid, left = [], f"{self.left:.0f}"
        for tick, label in zip(self.ticks, self.tick_labels, strict=True):
            y = f"{self.y(tick):.1f}"
            grid.append(f'<line class="grid" x1="{left}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
            grid.append(f'<text x="{self.left - 8:.0f}" y="{y}" dy="4" text-anchor="end">{label}</text>')
        x_ticks = nice_ticks(self.x_low, self.x_high)
        for tick, label in zip(x_ticks, map(column_format(x_ticks), x_ticks), strict=True):
            x = f"{self.x(tick):.1f}"
            grid.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{label}</text>')
        middle = (self.left + WIDTH - RIGHT) / 2
        grid.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
        turned = f'transform="translate(14 {HEIGHT / 2}) rotate(-90)" text-anchor="middle"'
        grid.append(f"<text {turned}>{escape(y_label)}</text>")
        base = HEIGHT - BOTTOM
        grid.append(f'<line class="axis" x1="{left}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'aria-label="{escape(title, quote=True)}">{"".join(grid)}{marks}</svg>'
        )


def place_labels(spots: Sequence[tuple[float, float]], names: Sequence[str], left: float) -> list[tuple[float, float]]:
    """Where each label begins (left end, base line): the nearest free place around its point.

    Labels are placed one by one; a place is free where the label crosses no point, no other label and no edge.
    Where nothing is free, the label stands right of its point all the same."""
    taken = [(x - 7, y - 7, x + 7, y + 7) for x, y in spots]
    places = []
    for (px, py), name in zip(spots, names, strict=True):
        width = LABEL_CHAR * len(name)
        rings = [(LABEL_HEIGHT * ring, side) for ring in range(7) for side in (1, -1)]
        tries = [
            (x, py + 4 + side * away)
            for away, side in rings
            for x in (px + 11, px - 11 - width, *(() if away < LABEL_HEIGHT else (px - width / 2,)))
        ]
        found = next((t for t in tries if _free(_box(t, width), taken, left)), tries[0])
        taken.append(_box(found, width))
        places.append(found)
    return places


def _box(at: tuple[float, float], width: float) -> tuple[float, float, float, float]:
    return at[0], at[1] - LABEL_HEIGHT + 3, at[0] + width, at[1] + 3


def _free(
    box: tuple[float, float, float, float], taken: Sequence[tuple[float, float, float, float]], left: float
) -> bool:
    x0, y0, x1, y1 = box
    inside = x0 >= left and x1 <= WIDTH and y0 >= 0 and y1 <= HEIGHT - BOTTOM
    return inside and not any(x0 < b[2] and b[0] < x1 and y0 < b[3] and b[1] < y1 for b in taken)


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
    rows = series.rows or [""] * len(series.xs)
    kept = [t for t in zip(series.xs, series.ys, rows, strict=True) if t[1] is not None and math.isfinite(t[1])]
    return Series(series.name, [t[0] for t in kept], [t[1] for t in kept], [t[2] for t in kept] if series.rows else ())


def _legend(names: Sequence[str]) -> str:
    keys = "".join(f'<span><i class="key k{i % NUM_COLORS}"></i>{escape(name)}</span>' for i, name in enumerate(names))
    return f'<p class="legend">{keys}</p>'


def _section(title: str, inner: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{inner}</section>"


def markdown(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in line) + " |" for line in lines)


def column_format(values: Sequence[Any]) -> Callable[[Any], str]:
    """How all values of a column are written: numbers with separators of thousands and equally many decimals, so that
    nothing is lost or the largest has about four digits. Words, and numbers too far apart for that, go one by one."""
    numbers = [abs(v) for v in values if _is_number(v) and math.isfinite(v) and v != 0]
    if not all(_is_number(v) or v is None for v in values) or not numbers or max(numbers) >= 1e9:
        return _show
    exact = next((d for d in range(4) if all(abs(round(n, d) - n) < 1e-9 for n in numbers)), None)
    least = max(0, 3 - math.floor(math.log10(max(numbers)))) if exact is None else exact
    keeps = (
        d for d in range(least, min(7, least + 3)) if abs(round(min(numbers), d) - min(numbers)) < 1e-3 * min(numbers)
    )
    decimals = next(keeps, None)
    if decimals is None:  # the smallest would lose its digits
        return _show
    return lambda value: f"{value:,.{decimals}f}" if _is_number(value) and math.isfinite(value) else _show(value)


def _show(value: Any) -> str:
    if value is None:
        return ""
    return _num(value) if _is_number(value) else str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _num(value: float) -> str:
    """A number by itself: about four digits."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e9:
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


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
td.num,th.num{font-variant-numeric:tabular-nums;text-align:right}tbody tr:hover{background:var(--panel)}
details{margin:1.6rem 0}summary{cursor:pointer;font-weight:600;font-size:1.1rem;margin-bottom:.6rem}
.leader{stroke:var(--soft);stroke-width:1;opacity:.5}
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
