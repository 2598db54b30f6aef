"""A plan for people: tables, and a timeline of every link as SVG for a report page."""

from __future__ import annotations

from shoestring.report import Section, Table
from shoestring.report_bars import Bar, BarRows
from shoestring.state.reshard.plan import ReshardPlan, Transfer

MOST_ROWS = 64  # links in a picture
MOST_TRANSFERS = 40  # in a printed table


def sections_of(plan: ReshardPlan) -> list[Section]:
    return [summary(plan), links_table(plan), timeline(plan), transfers_table(plan)]


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


def timeline(plan: ReshardPlan) -> BarRows:
    """One row per direction of an interface; a bar is a transfer, coloured by the host it comes from."""
    rows: dict[str, dict[int, Bar]] = {}
    topology = plan.topology
    hosts: dict[str, int] = {}
    for number, t in enumerate(plan.transfers):
        color = hosts.setdefault(topology.host(t.sender), len(hosts))
        tip = f"transfer {number}, {t.kind}: ranks {path_of(t)}, {in_bytes(t.num_bytes)}"
        bar = Bar(t.start, t.stop, color, tip)
        for a, b in t.hops:
            if topology.host(a) != topology.host(b):
                rows.setdefault(f"{topology.interface(a)} out", {})[number] = bar
                rows.setdefault(f"{topology.interface(b)} in", {})[number] = bar
    named = [(name, list(rows[name].values())) for name in sorted(rows)[:MOST_ROWS]]
    return BarRows("Timeline", named, plan.makespan, in_seconds, plan.bound or None, "dashed: the bound of the links")
