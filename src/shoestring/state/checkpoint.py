"""Checkpoint folders: save, load on any mesh, keep the last few, find the newest.

DCP works out which rank writes which box, reshard/reads.py which rank reads what, so a checkpoint from one mesh loads
on any other; run_state.py gives names to what is saved, storage.py is where it goes.

Left out: when a run saves and what it resumes from (checkpointer.py).
"""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from shoestring.errors import UserError
from shoestring.mesh import Mesh
from shoestring.state.agreement import agree, everyone, is_alone
from shoestring.state.boxes import local_box
from shoestring.state.checkpoint_files import MANIFEST, NEW, hidden
from shoestring.state.levels.drain import HOSTS
from shoestring.state.levels.retention import Keep, prune_steps
from shoestring.state.levels.snapshot import local_tensor
from shoestring.state.manifest import Manifest, decode_value
from shoestring.state.reshard.reads import plan_reads
from shoestring.state.run_state import check_fits, coordinate, flatten, regrouped, unflatten
from shoestring.state.storage import ADVICE, GoneError, SafeReader, SafeWriter, split_parts

_STEP = re.compile(r"step-[0-9]{8,}")


# -- save and load -------------------------------------------------------------------------------------------


def save_checkpoint(
    path: Path | str,
    state: dict[str, Any],
    mesh: Mesh | None = None,
    *,
    step: int | None = None,
    overwrite: bool = False,
) -> None:
    """Write one checkpoint folder, all ranks together; every rank raises when one fails."""
    path = Path(path)
    tensors, values = agree(mesh, lambda: flatten(state, coordinate(mesh)))
    # Values were encoded above, where a bad one can be named; the writer meets plain JSON only.
    flat = {**tensors, **{n: decode_value(v) for n, v in values.items()}}
    try:
        with _quiet():
            dcp.save(
                flat,
                storage_writer=SafeWriter(path, step=step, overwrite=overwrite),
                planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                no_dist=is_alone(mesh),
            )
    except CheckpointException as e:
        if mesh is None or mesh.is_main:
            shutil.rmtree(hidden(path.absolute(), NEW), ignore_errors=True)
        raise _cause(e) from e


def load_checkpoint(path: Path | str, state: dict[str, Any], mesh: Mesh | None = None) -> list[str]:
    """Fill the tensors of `state` in place and replace its JSON values; any mesh reads any other's.

    Everything shared must be there with the same shape and dtype, and nothing else. Private entries that the
    checkpoint does not have for this rank stay as they are; their names are returned.
    """
    reader = agree(mesh, lambda: SafeReader(Path(path)))
    return fill_state(
        state, reader.manifest, f"checkpoint {path}", mesh, lambda tensors: _fill_tensors(reader, tensors, mesh)
    )


def load_tensors(path: Path, tensors: dict[str, Tensor], mesh: Mesh | None = None) -> None:
    """Fill these tensors in place, by their names in the checkpoint, which may hold others too."""
    reader = agree(mesh, lambda: SafeReader(path))
    saved = reader.manifest.tensors
    if wrong := [n for n, t in tensors.items() if n not in saved or tuple(saved[n].shape) != tuple(t.shape)]:
        raise UserError(f"{path} has no {wrong[0]!r} of this shape; it belongs to another run")
    _fill_tensors(reader, tensors, mesh)


def fill_state(
    state: dict[str, Any], saved: Manifest, what: str, mesh: Mesh | None, fill: Callable[[dict[str, Tensor]], None]
) -> list[str]:
    """`state` becomes what `saved` describes; `fill` brings the tensors that it names, all ranks together. Returns the
    private names that were not saved."""
    where = coordinate(mesh)
    elsewhere = []
    if mesh is not None and mesh.pp > 1:
        tensors, values = agree(mesh, lambda: flatten(state, where))
        elsewhere = everyone(mesh, [*tensors, *values])

    def prepare() -> tuple[Manifest, dict[str, Tensor]]:
        tensors, values = flatten(state, where)
        fitting = regrouped(saved, state, where)
        check_fits(what, fitting, tensors, values, elsewhere)
        return fitting, tensors

    fitting, tensors = agree(mesh, prepare)
    found = {n: t for n, t in tensors.items() if n in fitting.tensors}
    fill(found)
    absent = unflatten(state, fitting.values, where)
    return sorted([*(n for n in tensors if n not in found), *absent])


def _fill_tensors(reader: SafeReader, tensors: dict[str, Tensor], mesh: Mesh | None) -> None:
    """Every rank reads its own boxes. The parts that any rank reads are verified first, each by one rank."""
    inside = {name: local_box(t) for name, t in tensors.items()}
    stored = {name: [(0, b.box) for b in reader.manifest.tensors[name].boxes] for name in tensors}
    reads, _ = plan_reads(inside.items(), stored)  # boxes of a manifest cover their tensors
    parts = {reader.stored(r.name, r.held).part for r in reads}
    rank, num_ranks = (0, 1) if mesh is None else (mesh.rank, mesh.world_size)
    if not is_alone(mesh):
        everyone: list[Any] = [None] * num_ranks
        dist.all_gather_object(everyone, sorted(parts))
        parts = {part for some in everyone for part in some}
    shares = split_parts({name: reader.manifest.parts[name].bytes for name in parts}, num_ranks)
    agree(mesh, lambda: reader.verify(shares[rank]))
    agree(
        mesh,
        lambda: reader.fill(
            (r.name, r.held, r.box, local_tensor(tensors[r.name])[r.box.slices(r.wanted)]) for r in reads
        ),
    )


def _cause(e: CheckpointException) -> BaseException:
    """What DCP's exception is about: the user's error, an interrupt, or a defect with all its tracebacks."""
    causes = [exc for exc, _ in e.failures.values()]
    users = sorted((c for c in causes if isinstance(c, UserError)), key=lambda c: isinstance(c, GoneError))
    if users:
        return UserError(str(users[0]))
    interrupts = [c for c in causes if isinstance(c, (KeyboardInterrupt, SystemExit))]
    return interrupts[0] if interrupts else RuntimeError(str(e))


class _quiet(warnings.catch_warnings):
    """DCP warns about running without a process group, which is normal here."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")


# -- folders of checkpoints ----------------------------------------------------------------------------------


def step_folder(folder: Path | str, step: int) -> Path:
    return Path(folder) / f"step-{step:08d}"


def step_folders(folder: Path | str) -> list[Path]:
    """The checkpoints, oldest first; also those that something has damaged since they were written."""
    folder = Path(folder)
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted((p for p in found if _STEP.fullmatch(p.name) and p.is_dir()), key=step_of)


def shares_in(checkpoints: Path | str) -> list[Path]:
    """The folders of hosts that hold a share of the state each (checkpoint=auto over several hosts)."""
    place = Path(checkpoints) / HOSTS
    found = place.iterdir() if place.is_dir() else ()
    return sorted(p for p in found if p.is_dir() and not p.is_symlink())


def newest_folder(folder: Path | str) -> Path | None:
    """The newest checkpoint or share of one, whatever state it is in."""
    shares = [path for host in shares_in(folder) for path in step_folders(host)]
    return max([*step_folders(folder), *shares], key=step_of, default=None)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _complete(folder: Path | str) -> list[tuple[int, Path]]:
    """(step, path) of the complete checkpoints, oldest first."""
    return [(step_of(p), p) for p in step_folders(folder) if (p / MANIFEST).is_file()]


def latest(folder: Path | str) -> Path | None:
    """The newest complete checkpoint, or None."""
    return next((path for _, path in reversed(_complete(folder))), None)


def latest_step(folder: Path | str) -> int | None:
    """That of the newest complete checkpoint, or None."""
    return next((step for step, _ in reversed(_complete(folder))), None)


def check_steps(steps: int, folder: Path) -> None:
    """Refuse to resume the run in `folder` to fewer steps than it has done."""
    done = latest_step(folder / "checkpoints")
    if done is not None and steps < done:
        raise UserError(
            f"steps={steps} is less than the {done} that {folder} has done: give {done} or more, or start a new run"
        )


def prune(folder: Path | str, keep: int | Keep) -> list[Path]:
    """Delete the complete checkpoints that are not to be kept (the newest always stays); returns the deleted."""
    keep = Keep(keep) if isinstance(keep, int) else keep
    return prune_steps(Path(folder), keep, Path(folder).parent / "metrics.jsonl")


def set_aside(path: Path) -> Path:
    """Under a name that is no checkpoint's, so that no later run takes it for the newest; nothing is deleted."""
    names = (path.with_name(f"{path.name}.set-aside{suffix}") for suffix in ("", *(f"-{i}" for i in range(2, 1000))))
    target = next(p for p in names if not p.exists())
    return path.rename(target)


def set_aside_from(folder: Path | str, step: int) -> list[Path]:
    """The checkpoints of this step and later ones, under their new names."""
    return [set_aside(path) for path in step_folders(folder) if step_of(path) >= step]


def damage_of_files(path: Path) -> str | None:
    """What is wrong with the files of a checkpoint; None where they are what was saved."""
    try:
        SafeReader(path).verify()
    except UserError as error:
        return str(error).removesuffix(f"; {ADVICE}")
    return None
