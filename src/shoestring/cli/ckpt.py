"""`shoestring ckpt VERB`: the copies of a run's state: where they are, whether they are sound, how often they are made.

Verbs are thin, as in app.py: they parse, import what they need, call one function and print.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoestring.errors import UserError

ckpt_app = typer.Typer(help="Checkpoints of a run, in all their levels.", no_args_is_help=True)


RunArgument = Annotated[Path, typer.Argument(help="A run folder.")]


def _checkpoints(run: Path) -> Path:
    from shoestring.json_files import check_path

    check_path(run)
    folder = run / "checkpoints"
    if not folder.is_dir():
        raise UserError(f"{run} has no checkpoints/: give the folder of a run that has saved")
    return folder


@ckpt_app.command("ls")
def list_versions(run: RunArgument) -> None:
    """Every version of a run's state: its step, where its copies are, and whether they are complete."""
    from shoestring.cli.ckpt_tables import agent_line, versions_table

    folder = _checkpoints(run)
    versions_table(folder).print()
    print(agent_line(run))


@ckpt_app.command()
def inspect(run: RunArgument, step: Annotated[int | None, typer.Option(help="Default: the newest.")] = None) -> None:
    """What one version holds, by source: ranks, tensors, bytes."""
    from shoestring.cli.ckpt_tables import version_table

    version_table(_checkpoints(run), step).print()


@ckpt_app.command()
def verify(run: RunArgument) -> None:
    """Read every copy on this host, in memory and on disk, and compare all checksums."""
    from shoestring.cli.ckpt_tables import verified_versions

    table, problems = verified_versions(_checkpoints(run))
    table.print()
    if problems:
        raise UserError(f"{problems[0]}; resume_from=previous goes on from the version before a damaged one")


@ckpt_app.command()
def prune(
    run: RunArgument,
    keep_last: Annotated[int, typer.Option(min=1, help="The newest so many stay.")] = 1,
    keep_every: Annotated[int, typer.Option(min=0, help="Steps that are multiples of this stay, too.")] = 0,
    keep_best: Annotated[int, typer.Option(min=0, help="So many with the lowest validation loss stay, too.")] = 0,
) -> None:
    """Delete checkpoints on disk; the newest complete one always stays."""
    from shoestring.state.levels.retention import Keep, prune_steps
    from shoestring.state.run_lock import check_not_held

    folder = _checkpoints(run)
    check_not_held(run)
    gone = prune_steps(folder, Keep(keep_last, keep_every, keep_best), run / "metrics.jsonl")
    print(f"deleted {', '.join(p.name for p in gone)}" if gone else "nothing to delete")


@ckpt_app.command()
def export(
    run: RunArgument,
    out: Annotated[Path, typer.Argument(help="The folder to write; it must not exist.")],
    step: Annotated[int | None, typer.Option(help="Default: the newest complete version on this host.")] = None,
) -> None:
    """Write one version, from memory or disk, as an ordinary checkpoint folder that any DCP loop reads."""
    from shoestring.cli.ckpt_tables import export_version
    from shoestring.runlog import check_free

    check_free(out)
    source, saved = export_version(_checkpoints(run), out, step)
    print(f"wrote step {saved} from {source} to {out}")


@ckpt_app.command()
def stop(run: RunArgument) -> None:
    """End the agent of a run on this host: what is in memory goes to disk, then memory is freed."""
    from shoestring.cli.ckpt_tables import stop_agent

    _checkpoints(run)
    print(stop_agent(run))


@ckpt_app.command()
def plan(run: RunArgument) -> None:
    """How often each level is saved, and the reason; failures and resumptions so far."""
    from shoestring.cli.ckpt_tables import events_table, plan_table

    folder = _checkpoints(run)
    plan_table(folder).print()
    events_table(folder).print()
