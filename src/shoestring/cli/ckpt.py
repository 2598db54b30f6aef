"""`shoestring ckpt VERB`: the copies of a run's state: where they are, whether they are sound, how often they are made.

Verbs are thin, as in app.py: they parse, import what they need, call one function and print.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoestring.errors import UserError

ckpt_app = typer.Typer(help="Checkpoints of a run, in all their levels.", no_args_is_help=True)


@ckpt_app.command()
def simulate(
    gpus: Annotated[list[int] | None, typer.Option(min=1, help="Number of GPUs; may be repeated.")] = None,
    failures: Annotated[int, typer.Option(min=10, help="Failures to draw for each number of GPUs.")] = 2000,
    seed: Annotated[int, typer.Option(help="Decides the failures.")] = 0,
    plot: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write FOLDER/report.html with the plot.")] = None,
) -> None:
    """Time lost to saving and to failures, by schedule and number of GPUs."""
    import math

    from shoestring.report import Curves, Series, Table, write_report
    from shoestring.state.levels.simulate import NUM_GPUS, compare

    sizes = tuple(sorted(set(gpus or NUM_GPUS)))
    found = compare(sizes, failures, seed)
    rows = [[num, *(f"{found[name][i]:.1%}" for name in found)] for i, num in enumerate(sizes)]
    note = f"Share of time that is not first-time work; {failures:,} failures at each size, the same for all schedules."
    table = Table("Time lost", ["GPUs", *found], rows, note)
    table.print()
    if plot is not None:
        try:
            plot.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make {plot}: {error.strerror}; give another folder") from None
        xs = [math.log2(num) for num in sizes]
        series = [Series(name, xs, [100 * y for y in ys]) for name, ys in found.items()]
        curves = Curves("Time lost", series, "log2 of the number of GPUs", "time lost (%)")
        print(f"wrote {write_report(plot, 'Checkpoint schedules', [curves, table])}")
