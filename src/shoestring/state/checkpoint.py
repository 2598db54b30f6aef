"""Checkpoints of a training run: save, load on any mesh, keep the last few, resume from the newest.

State is a nested dict of tensors (DTensors included) and JSON values. It is flattened into names: every
tensor gets the dotted path to it; every branch without tensors is one JSON value. DCP works out which rank writes
which box, reshard/reads.py which rank reads what, so a checkpoint from one mesh loads on any other; storage.py is where
it goes.

Entries below a key `private` belong to one rank (random generators, residuals, cursors). Their name carries
the rank's place in the mesh; otherwise DCP would take them for copies of the same thing and keep one.

Left out: writing in the background and keeping copies in memory or on peers (levels/checkpointer.py).
"""

from __future__ import annotations

import contextlib
import re
import shutil
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from shoestring.errors import UserError
from shoestring.mesh import Mesh
from shoestring.state.boxes import local_box
from shoestring.state.checkpoint_files import MANIFEST, NEW, hidden, sweep
from shoestring.state.levels.drain import HOSTS
from shoestring.state.levels.host_folder import ArenaCopy, list_copies, memory_places
from shoestring.state.levels.retention import Keep, prune_steps
from shoestring.state.levels.snapshot import forget_newer, local_tensor
from shoestring.state.manifest import Manifest, decode_value, encode_value
from shoestring.state.optimizer import forget_absent, init_state, load_optimizer_state, optimizer_state
from shoestring.state.reshard.reads import plan_reads
from shoestring.state.storage import ADVICE, GoneError, SafeReader, SafeWriter, split_parts

PRIVATE = "private"
ResumeFrom = Literal["newest", "previous"]
_STEP = re.compile(r"step-[0-9]{8,}")
_PRIVATE_NAME = re.compile(r"(^|\.)private@")


# -- nested state to names and back --------------------------------------------------------------------------


def coordinate(mesh: Mesh | None) -> str:
    """The rank's place in the mesh, as it appears in names of private entries."""
    return "dp0-tp0" if mesh is None else f"dp{mesh.dp_rank}-tp{mesh.tp_rank}"


def flatten(state: dict[str, Any], where: str = "dp0-tp0") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors by name, encoded JSON values by name). The first level is always split."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}

    def add(store: dict[str, Any], name: str, value: Any) -> None:
        if name in tensors or name in values:
            raise UserError(f"two entries of the state are called {name!r}; rename one of them")
        store[name] = value

    def visit(name: str, node: Any) -> None:
        if isinstance(node, Tensor):
            add(tensors, name, node)
        elif not _is_split(node):
            add(values, name, encode_value(name, node))
        else:
            for key, child in _children(node):
                visit(f"{name}.{_label(key, where)}", child)

    for key, child in state.items():
        visit(_label(key, where), child)
    return tensors, values


def unflatten(state: dict[str, Any], values: dict[str, Any], where: str = "dp0-tp0") -> list[str]:
    """Put decoded values into the state by name, in place; returns the names that `values` does not have."""
    absent: list[str] = []

    def visit(name: str, node: Any) -> Any:
        if isinstance(node, Tensor):
            return node
        if not _is_split(node):
            if name in values:
                return decode_value(values[name])
            absent.append(name)
            return node
        new = {key: visit(f"{name}.{_label(key, where)}", child) for key, child in _children(node)}
        if isinstance(node, dict):
            node.update(new)
            return node
        if isinstance(node, list):
            node[:] = new.values()
            return node
        return tuple(new.values())

    for key in state:
        state[key] = visit(_label(key, where), state[key])
    return absent


def regrouped(saved: Manifest, state: dict[str, Any], where: str = "dp0-tp0") -> Manifest:
    """The manifest with its values under the names that this state has for them.

    A branch without tensors is one value, and whether it has tensors may have changed since it was saved: reducer=auto
    may choose a method with residuals at one start, and one without at the next."""
    values = dict(saved.values)

    def split(name: str) -> None:
        """One value there, several here."""
        if isinstance(whole := decode_value(values[name]), dict):
            del values[name]
            values.update({f"{name}.{key}": encode_value(name, value) for key, value in whole.items()})

    def join(name: str, node: Any) -> None:
        """Several values there, one here. Where one is missing all stay, and the checkpoint does not fit."""
        taken: list[str] = []

        def gather(name: str, node: Any) -> Any:
            if name in values:
                taken.append(name)
                return decode_value(values[name])
            if isinstance(node, dict) and node:
                return {key: gather(f"{name}.{key}", child) for key, child in node.items()}
            if _PRIVATE_NAME.search(name):
                return node
            raise KeyError(name)

        with contextlib.suppress(KeyError):
            joined = gather(name, node)
            for part in taken:
                del values[part]
            if taken:  # else it is a private value that was not saved
                values[name] = encode_value(name, joined)

    def visit(name: str, node: Any) -> None:
        if isinstance(node, Tensor):
            return
        if not _is_split(node):
            if name not in values:
                join(name, node)
            return
        if name in values:
            split(name)
        for key, child in _children(node):
            visit(f"{name}.{_label(key, where)}", child)

    for key, child in state.items():
        visit(_label(key, where), child)
    return replace(saved, values=values)


def _label(key: Any, where: str) -> str:
    return f"{PRIVATE}@{where}" if key == PRIVATE else str(key)


def _children(node: Any) -> list[tuple[Any, Any]]:
    return list(node.items()) if isinstance(node, dict) else list(enumerate(node))


def _is_split(node: Any) -> bool:
    """Whether a branch has a tensor or a private entry below it, so that it cannot be one value."""
    if isinstance(node, Tensor):
        return True
    if isinstance(node, dict):
        return PRIVATE in node or any(_is_split(v) for v in node.values())
    return isinstance(node, (list, tuple)) and any(_is_split(v) for v in node)


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
                no_dist=_alone(mesh),
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
    path, where = Path(path), coordinate(mesh)

    def prepare() -> tuple[SafeReader, Manifest, dict[str, Tensor]]:
        reader = SafeReader(path)
        tensors, values = flatten(state, where)
        saved = regrouped(reader.manifest, state, where)
        check_fits(path, saved, tensors, values)
        return reader, saved, tensors

    reader, saved, tensors = agree(mesh, prepare)
    found = {n: t for n, t in tensors.items() if n in reader.manifest.tensors}
    _fill_tensors(reader, found, mesh)
    absent = unflatten(state, saved.values, where)
    return sorted([*(n for n in tensors if n not in found), *absent])


def _fill_tensors(reader: SafeReader, tensors: dict[str, Tensor], mesh: Mesh | None) -> None:
    """Every rank reads its own boxes. The parts that any rank reads are verified first, each by one rank."""
    inside = {name: local_box(t) for name, t in tensors.items()}
    stored = {name: [(0, b.box) for b in reader.manifest.tensors[name].boxes] for name in tensors}
    reads, _ = plan_reads(inside.items(), stored)  # boxes of a manifest cover their tensors
    parts = {reader.stored(r.name, r.held).part for r in reads}
    rank, num_ranks = (0, 1) if mesh is None else (mesh.rank, mesh.world_size)
    if not _alone(mesh):
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


def check_fits(path: Path | str, saved: Manifest, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    mine, theirs = {*tensors, *values}, {*saved.tensors, *saved.values}
    missing = sorted(n for n in mine - theirs if not _PRIVATE_NAME.search(n))
    unexpected = sorted(n for n in theirs - mine if not _PRIVATE_NAME.search(n))
    wrong = [
        f"{n} (a tensor on one side only)" for n in sorted(mine & theirs) if (n in tensors) != (n in saved.tensors)
    ]
    for name in sorted(tensors.keys() & saved.tensors.keys()):
        there, here = saved.tensors[name], tensors[name]
        if there.shape != tuple(here.shape) or there.dtype != here.dtype:
            wrong.append(f"{name} (saved {there.dtype} {list(there.shape)}, here {here.dtype} {list(here.shape)})")
    problems = [
        f"{len(names)} {what}: {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
        for what, names in (
            ("missing in the checkpoint", missing),
            ("not expected here", unexpected),
            ("different", wrong),
        )
        if names
    ]
    if problems:
        raise UserError(
            f"the checkpoint {path} does not fit this run: {'; '.join(problems)}; "
            "resume with the configuration that wrote it, or start a new run"
        )


def agree(mesh: Mesh | None, action: Callable[[], Any]) -> Any:
    """Run the action on every rank; when it fails on one, raise on all, so that none waits for it."""
    if _alone(mesh):
        return action()
    error: Exception | None = None
    result = None
    try:
        result = action()
    except Exception as e:
        error = e
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            kind, _, text = message.partition(": ")
            raise UserError(text) if kind == "UserError" else RuntimeError(f"rank {rank}: {message}")
    return result


def on_main(mesh: Mesh | None, action: Callable[..., Any], *args: Any) -> Any:
    """Run on rank 0 only and hand its result to all; an error is raised on all."""
    if mesh is None:
        return action(*args)
    return mesh.broadcast_object(agree(mesh, lambda: action(*args) if mesh.is_main else None))


def _alone(mesh: Mesh | None) -> bool:
    return mesh is None or mesh.world_size == 1


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
    return sorted((p for p in found if _STEP.fullmatch(p.name) and p.is_dir()), key=_step_of)


def shares_in(checkpoints: Path | str) -> list[Path]:
    """The folders of hosts that hold a share of the state each (checkpoint=auto over several hosts)."""
    place = Path(checkpoints) / HOSTS
    found = place.iterdir() if place.is_dir() else ()
    return sorted(p for p in found if p.is_dir() and not p.is_symlink())


def newest_folder(folder: Path | str) -> Path | None:
    """The newest checkpoint or share of one, whatever state it is in."""
    shares = [path for host in shares_in(folder) for path in step_folders(host)]
    return max([*step_folders(folder), *shares], key=_step_of, default=None)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _complete(folder: Path | str) -> list[tuple[int, Path]]:
    """(step, path) of the complete checkpoints, oldest first."""
    return [(_step_of(p), p) for p in step_folders(folder) if (p / MANIFEST).is_file()]


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
    return [set_aside(path) for path in step_folders(folder) if _step_of(path) >= step]


def _damage(path: Path) -> str | None:
    """What is wrong with the files of a checkpoint; None where they are what was saved."""
    try:
        SafeReader(path).verify()
    except UserError as error:
        return str(error).removesuffix(f"; {ADVICE}")
    return None


# -- a training run ------------------------------------------------------------------------------------------


class Relaid(ABC):
    """A part of a run whose state depends on the number of processes, so that what is loaded is not what is saved."""

    @abstractmethod
    def state_to_load(self, saved: Collection[str]) -> dict[str, Any]:
        """The state to fill and to give to load_state_dict; `saved`: the names that the checkpoint has for this
        part."""


class RunLike(Protocol):
    step: int
    model: Any
    optimizer: Any
    mesh: Any
    log: Any


def rng_state() -> dict[str, Tensor]:
    """The generators of torch in this process."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # a run on the CPU must not open a context on the GPU
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def seed_rng(seed: int, mesh: Mesh | None) -> None:
    """All generators of `rng_state`, another start for each share of the batch."""
    torch.manual_seed((seed * 1_000_003 + (0 if mesh is None else mesh.dp_rank)) % 2**63)


def run_state(run: RunLike, parts: dict[str, Any]) -> dict[str, Any]:
    """Everything that a checkpoint of the run holds; its tensors are the run's own, not copies."""
    return {
        "step": run.step,
        "model": get_model_state_dict(run.model),
        "optimizer": optimizer_state(run.model, run.optimizer),
        "rng": {PRIVATE: rng_state()},
        "parts": {name: part.state_dict() for name, part in parts.items()},
    }


def state_to_fill(run: RunLike, parts: dict[str, Any], saved: Collection[str]) -> dict[str, Any]:
    """The run's state with a place for every optimizer tensor among the `saved` names, and no other."""
    prefix = "optimizer.state."
    names = {n.removeprefix(prefix) for n in saved if n.startswith(prefix)}
    if names:
        init_state(run.optimizer)
    forget_absent(run.model, run.optimizer, names)
    return agree(run.mesh, lambda: {**run_state(run, parts), "parts": _parts_to_load(parts, saved)})


def put_back(run: RunLike, parts: dict[str, Any], state: dict[str, Any]) -> None:
    """The filled state into the run and its parts."""
    set_model_state_dict(run.model, state["model"])
    load_optimizer_state(run.model, run.optimizer, state["optimizer"])
    for name, part in parts.items():
        part.load_state_dict(state["parts"][name])
    set_rng_state(state["rng"][PRIVATE])
    run.step = state["step"]


def started_anew(absent: list[str]) -> str:
    """For the line about a resumed run: what the checkpoint did not have for this rank."""
    return f"; {len(absent)} entries private to other ranks start anew" if absent else ""


def _parts_to_load(parts: dict[str, Any], saved: Collection[str]) -> dict[str, Any]:
    state = {}
    for name, part in parts.items():
        prefix = f"parts.{name}."
        if isinstance(part, Relaid):
            state[name] = part.state_to_load([n.removeprefix(prefix) for n in saved if n.startswith(prefix)])
        else:
            state[name] = part.state_dict()
    return state


class Checkpointer:
    """Saves a run into `folder`/step-00000100, ... every `every` steps (0: when asked) and keeps `keep`.

    A checkpoint holds the step, the model (frozen and integer tensors too), the optimizer, the random
    generators of each rank, and `state_dict()` of every part of the run (data, objective, hooks, ...). With `seed`, a
    run that starts anew begins with these generators in a known state. `resume_from="previous"` goes on from the
    checkpoint before the newest, which is set aside: never without being told.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        every: int,
        keep: int | Keep = 2,
        last: int | None = None,
        seed: int | None = None,
        resume_from: ResumeFrom = "newest",
    ) -> None:
        if every < 0 or (isinstance(keep, int) and keep < 1):
            raise UserError(f"a checkpointer needs every >= 0 and keep >= 1, got every={every} keep={keep}")
        self.seed, self.resume_from = seed, resume_from
        self.folder = Path(folder).absolute()
        self.every = every
        self.keep = Keep(keep) if isinstance(keep, int) else keep
        self.last = last  # a step to save after in any case: a finished run can then be made longer
        self.saved_step: int | None = None  # the newest step this process saved or resumed from

    def due(self, step: int) -> bool:
        """Whether after_step will save when `step` steps are finished."""
        return bool(self.every and step % self.every == 0) or step == self.last

    def newest(self) -> Path | None:
        """The newest checkpoint, whatever state it is in, or the file of a newer copy in memory."""
        found = self._in_memory()
        return newest_folder(self.folder) if found is None else found.path

    def after_step(self, run: RunLike, parts: dict[str, Any]) -> None:
        """Called by the trainer after every optimizer step; run.step counts the finished steps."""
        if self.due(run.step):
            self.save(run, parts)

    def save(self, run: RunLike, parts: dict[str, Any]) -> Path:
        """Save now, all ranks together, unless this step is saved already; then delete what is too old."""
        path = step_folder(self.folder, run.step)
        if self.saved_step == run.step:
            return path
        on_main(run.mesh, sweep, self.folder)
        state = agree(run.mesh, lambda: run_state(run, parts))
        # A folder of this name can only stem from a future that this run did not resume from.
        save_checkpoint(path, state, run.mesh, step=run.step, overwrite=True)
        self.saved_step = run.step
        on_main(run.mesh, prune, self.folder, self.keep)
        return path

    def discard(self, run: RunLike, step: int) -> None:
        """Set aside the checkpoints of this step and later ones; erase such copies in memory."""
        on_main(run.mesh, set_aside_from, self.folder, step)
        self._forget_newer(run, step - 1)
        self.saved_step = None

    def resume(self, run: RunLike, parts: dict[str, Any]) -> bool:
        """Load the newest checkpoint into the run and its parts; False when there is none."""
        on_main(run.mesh, sweep, self.folder)
        paths = on_main(run.mesh, self._readable)  # rank 0 decides: all load the same one
        if not paths:
            if self.seed is not None:
                seed_rng(self.seed, run.mesh)
            return False
        if self.resume_from == "newest":
            self._load(paths[-1], run, parts, before=paths[-2] if len(paths) > 1 else None)
            return True
        if len(paths) < 2:
            raise UserError(f"resume_from=previous: {paths[0]} is the only checkpoint; leave resume_from out")
        self._load(paths[-2], run, parts)
        self.resume_from = "newest"  # for a later rollback
        kept = on_main(run.mesh, set_aside, paths[-1])
        self._forget_newer(run, run.step)
        if run.log is not None:
            run.log.say(f"the newer checkpoint {paths[-1].name} is set aside as {kept}")
        return True

    def _forget_newer(self, run: RunLike, step: int) -> None:
        """Copies in memory that an earlier life with checkpoint=auto has left, and that this one does not go on from:
        they would be in the way of a later rollback, and be taken for the newest version."""
        for place in memory_places(self.folder):
            agree(run.mesh, partial(forget_newer, place, step))

    def _in_memory(self) -> ArenaCopy | None:
        """The newest copy in memory, which a run with checkpoint=auto has left here, where it is newer than the disk's
        newest."""
        copies = [copy for place in memory_places(self.folder) for copy in list_copies(place)[0]]
        on_disk = newest_folder(self.folder)
        newer = (c for c in copies if on_disk is None or c.copy.step > _step_of(on_disk))
        return max(newer, key=lambda c: c.copy.step, default=None)

    def _readable(self) -> list[Path]:
        """The checkpoints, oldest first; an error where a newer version is there that only checkpoint=auto reads."""
        if (copy := self._in_memory()) is not None:
            raise UserError(
                f"the newest version of {self.folder.parent} is that of step {copy.copy.step} in memory, which "
                f"checkpoint=fixed cannot read: resume with checkpoint=auto, write it to disk with `shoestring ckpt "
                f"stop {self.folder.parent}`, or delete {copy.path.parent} to go on without it"
            )
        paths, newest = step_folders(self.folder), newest_folder(self.folder)
        if newest is not None and newest not in paths:
            raise UserError(
                f"the newest version in {self.folder} is {newest.relative_to(self.folder)}, the share of one host, "
                f"which checkpoint=fixed cannot read: resume with checkpoint=auto, or delete {self.folder / HOSTS} to "
                "go on without what is there"
            )
        return paths

    def _load(self, path: Path, run: RunLike, parts: dict[str, Any], before: Path | None = None) -> None:
        try:
            self._fill(path, run, parts)
        except UserError as error:
            damage = on_main(run.mesh, _damage, path)
            if damage is None:  # sound, and of other settings
                raise
            if before is None:
                remedy = "no other one is there: start a new run, or get this one from a backup"
            else:
                remedy = f"resume_from=previous goes on from {before.name} and sets this one aside"
            raise UserError(f"the checkpoint {path.name} cannot be used: {damage}; {remedy}") from error

    def _fill(self, path: Path, run: RunLike, parts: dict[str, Any]) -> None:
        saved = agree(run.mesh, lambda: SafeReader(path).manifest)
        state = state_to_fill(run, parts, (*saved.tensors, *saved.values))
        absent = load_checkpoint(path, state, run.mesh)
        put_back(run, parts, state)
        self.saved_step = run.step
        if run.log is not None:
            run.log.say(f"resumed from {path} at step {run.step}{started_anew(absent)}")
