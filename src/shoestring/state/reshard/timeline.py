"""A plan for people: tables, and a timeline of every link as SVG for a report page."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from shoestring.report import NUM_COLORS, RIGHT, WIDTH, Section, Table, nice_ticks
from shoestring.state.reshard.plan import ReshardPlan, Transfer

ROW, GAP, LEFT = 18, 6, 64  # pixels
MOST_ROWS = 64  # links in a picture
MOST_TRANSFERS = 40  # in a printed table
NAMES = 110  # pixels for the names of the links


def sections_of(plan: ReshardPlan) -> list[Section]:
    return [summary(plan), links_table(plan), Timeline(plan), transfers_table(plan)]


def summary(plan: ReshardPlan) -> Table:
    ratio = f"{plan.makespan / plan.bound:.2f}x" if plan.bound else "-"
    rows = [["planned", len(plan.transfers), in_bytes(plan.slow_bytes), in_seconds(plan.makespan), ratio]]
    num = sum(len(k.names) for k in plan.classes)
    proven = "; no order or choice of senders is faster" if plan.optimal else ""
    note = f"{num:,} tensors in {len(plan.classes)} classes; the links allow {in_seconds(plan.bound)} at best{proven}."
    return Table("Plan", ["", "transfers", "between hosts", "time", "of the bound"], rows, note)


def links_table(plan: ReshardPlan) -> Table:
    links = sorted(plan.link_bytes().items(), key=lambda item: -item[1])
    rows = [[a, b, in_bytes(size)] for (a, b), size in links[:MOST_TRANSFERS]]
    left = f"The {MOST_TRANSFERS} busiest of {len(links)} pairs." if len(links) > MOST_TRANSFERS else ""
    return Table("Bytes between hosts", ["from", "to", "bytes"], rows, left)


def transfers_table(plan: ReshardPlan) -> Table:
    rows = []
    for number, t in enumerate(plan.transfers[:MOST_TRANSFERS]):
        rows.append([number, in_seconds(t.start), in_seconds(t.stop), t.kind, path_of(t), in_bytes(t.num_bytes)])
    left = len(plan.transfers) - MOST_TRANSFERS
    note = f"{left:,} more transfers follow." if left > 0 else ""
    return Table("Who sends what when", ["", "start", "stop", "kind", "path of ranks", "bytes"], rows, note)


def path_of(t: Transfer) -> str:
    """The ranks in the order of arrival: 0 > 8 > 12, 8 > 9 is a chain from 0 over 8 to 12, and from 8 to 9."""
    text, at = str(t.sender), t.sender
    for a, b in t.hops:
        text += f" > {b}" if a == at else f", {a} > {b}"
        at = b
    return text if len(text) <= 60 else text[:56] + " ..."


def in_bytes(num: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num < 1000:
            return f"{num:.3g} {unit}" if unit != "B" else f"{int(num)} B"
        num /= 1000
    return f"{num:.3g} TB"


def in_seconds(seconds: float) -> str:
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


@dataclass(frozen=True)
class Timeline:
    """One row per direction of an interface; a bar is a transfer, coloured by the host it comes from."""

    plan: ReshardPlan
    title: str = "Timeline"

    def html(self) -> str:
        svg = self.svg()
        return f"<section><h2>{escape(self.title)}</h2>{svg}</section>" if svg else ""

    def svg(self) -> str:
        bars: dict[str, list[tuple[Transfer, int]]] = {}
        topology = self.plan.topology
        hosts: dict[str, int] = {}
        for number, t in enumerate(self.plan.transfers):
            hosts.setdefault(topology.host(t.sender), len(hosts))
            for a, b in t.hops:
                if topology.host(a) != topology.host(b):
                    bars.setdefault(f"{topology.interface(a)} out", []).append((t, number))
                    bars.setdefault(f"{topology.interface(b)} in", []).append((t, number))
        rows = sorted(bars)[:MOST_ROWS]
        end = self.plan.makespan
        if not rows or not end:
            return ""
        left = LEFT + NAMES
        scale = (WIDTH - left - RIGHT) / end
        height = len(rows) * (ROW + GAP) + 48
        marks = []
        for tick in nice_ticks(0.0, end):
            at = f"{left + tick * scale:.1f}"
            marks.append(f'<line class="grid" x1="{at}" x2="{at}" y1="8" y2="{height - 40}"/>')
            marks.append(
                f'<text x="{at}" y="{height - 24}" text-anchor="middle">{in_seconds(tick) if tick else 0}</text>'
            )
        for place, name in enumerate(rows):
            y = 8 + place * (ROW + GAP)
            marks.append(f'<text x="{left - 8}" y="{y + ROW - 5}" text-anchor="end">{escape(name)}</text>')
            seen: set[int] = set()
            for t, number in bars[name]:
                if number in seen:
                    continue
                seen.add(number)
                x, width = left + t.start * scale, max(1.0, (t.stop - t.start) * scale - 1)
                color = hosts[topology.host(t.sender)] % NUM_COLORS
                tip = f"transfer {number}, {t.kind}: ranks {path_of(t)}, {in_bytes(t.num_bytes)}"
                marks.append(
                    f'<rect class="dot c{color}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW}" rx="2">'
                    f"<title>{escape(tip)}</title></rect>"
                )
        if self.plan.bound:
            at = f"{left + self.plan.bound * scale:.1f}"
            marks.append(f'<line class="axis" x1="{at}" x2="{at}" y1="4" y2="{height - 40}" stroke-dasharray="4 3"/>')
        marks.append(f'<text x="{left}" y="{height - 6}">dashed: the bound of the links</text>')
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            f'aria-label="{escape(self.title, quote=True)}">{"".join(marks)}</svg>'
        )
