"""`shoestring pipeline VERB`: what a schedule of a pipeline takes, before any process is started."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoestring.errors import UserError

if TYPE_CHECKING:
    from shoestring.report_bars import BarRows
    from shoestring.train.pipeline_order import Timeline

pipeline_app = typer.Typer(help="Plan the stages of a pipeline.", no_args_is_help=True)

MOST = 1024  # stages or micro-batches
MOST_BARS = 4000  # in a chart
KINDS = {"F": (0, "forward"), "B": (1, "backward"), "I": (1, "backward, inputs"), "W": (2, "backward, weights")}


@pipeline_app.command()
def simulate(
    stages: Annotated[int, typer.Option(min=2, max=MOST, help="Processes along mesh.pp.")] = 4,
    micros: Annotated[int, typer.Option(min=1, max=MOST, help="Micro-batches of a step.")] = 16,
    forward: Annotated[float, typer.Option(help="Time of a stage's forward pass, in any unit.")] = 1.0,
    backward: Annotated[float, typer.Option(help="Time of its backward pass.")] = 2.0,
    hop: Annotated[float, typer.Option(help="Time of an activation on the link to the next stage.")] = 0.0,
    html: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write FOLDER/report.html, a chart.")] = None,
) -> None:
    """The time of a step, the share of it that stages wait, and the activations that the first one holds."""
    from shoestring.report import Table, write_report
    from shoestring.train.pipeline_order import CHUNKS, SCHEDULES, Costs, make_order
    from shoestring.train.pipeline_order import simulate as run

    for name, value in {"forward": forward, "backward": backward, "hop": hop}.items():
        if not 0 <= value < 1e9:
            raise UserError(f"--{name} {value} is not possible; give a time of 0 or more")
    if not forward + backward:
        raise UserError("--forward and --backward are both 0: no stage works; give a time")
    found: dict[str, Timeline] = {}
    for name in SCHEDULES:
        chunks = CHUNKS if name == "interleaved" else 1
        if name == "interleaved" and micros % stages:
            continue
        costs = Costs(forward / chunks, backward / chunks, hop)
        found[name] = run(make_order(name, stages * chunks, micros, chunks=chunks), costs)
    rows = [[n, t.makespan, f"{t.bubble:.1%}", t.live[0], t.live[-1]] for n, t in found.items()]
    left_out = "" if "interleaved" in found else f"interleaved needs micro-batches in multiples of {stages}. "
    note = f"{left_out}Live: micro-batches whose activations a process holds (interleaved: of half its layers)."
    table = Table("A step", ["schedule", "time", "waiting", "live, first", "live, last"], rows, note)
    table.print()
    if html is None:
        return
    try:
        html.mkdir(parents=True, exist_ok=True)
        charts = [_chart(name, timeline) for name, timeline in found.items()]
        title = f"{stages} stages, {micros} micro-batches, a hop of {hop:g}"
        print(f"wrote {write_report(html, title, [table, *charts])}")
    except OSError as error:
        raise UserError(f"cannot write {html}: {error.strerror}; give another place") from None


def _chart(name: str, timeline: Timeline) -> BarRows:
    from shoestring.report_bars import Bar, BarRows

    shown = MOST_BARS // len(timeline.ran)
    rows = []
    for rank, tasks in enumerate(timeline.ran):
        bars = [
            Bar(start, end, KINDS[task.kind][0], f"{KINDS[task.kind][1]}, micro-batch {task.micro}")
            for task, start, end in tasks[:shown]
        ]
        rows.append((f"process {rank}", bars))
    return BarRows(name, rows, timeline.makespan, lambda t: f"{t:g}")
