"""Where a host keeps its copies of a run in memory, and the small files beside them.

    /dev/shm/shoestring-UID/RUN-HOST/          RUN: a fingerprint of the run folder's path
        rank-00000-of-00004.arena              the state of that rank, twice (host/arena.py)
        replica-00002-of-00004.arena           the same of a rank of another host
        rank-00000.alive                       locked while that rank's trainer lives
        agent.lock, agent.json, agent.log      the process that outlives the trainer (agent.py)
        finished                               the run has ended, and its last state is on disk

SHOESTRING_MEMORY_DIR is another place than /dev/shm, SHOESTRING_HOST another name than the machine's. No torch here.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shoestring.errors import UserError
from shoestring.host.arena import Arena, SlotVersion, is_locked, own_folder
from shoestring.host.checksums import damaged_chunks
from shoestring.state.levels.version import HeldCopy, parse_index

DEFAULT_BASE = "/dev/shm"
AGENT_LOCK, AGENT_CONFIG, AGENT_LOG, FINISHED, STOP = "agent.lock", "agent.json", "agent.log", "finished", "stop"
ON_DISK = ".arenas"  # beside the checkpoints: the base of copies for which memory has no room
NOT_STOPPED = "not-stopped"  # the answer to `stop`: why the agent goes on
ArenaKind = Literal["rank", "replica"]
_ARENA = re.compile(r"(rank|replica)-([0-9]{5,})-of-([0-9]{5,})\.arena")


def host_name() -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", os.environ.get("SHOESTRING_HOST") or socket.gethostname())[:64]


def memory_base() -> Path:
    return Path(os.environ.get("SHOESTRING_MEMORY_DIR") or DEFAULT_BASE)


def host_folder(run: Path, base: Path | None = None) -> Path:
    """The folder of this run on this host; it need not exist."""
    mark = hashlib.sha256(os.fsencode(run.resolve())).hexdigest()[:16]
    return (base or memory_base()) / f"shoestring-{os.getuid()}" / f"{mark}-{host_name()}"


def memory_places(checkpoints: Path) -> list[Path]:
    """Where copies in memory of the run with these checkpoints may be on this host: there, or on disk where that was
    full."""
    return [host_folder(checkpoints.parent), host_folder(checkpoints.parent, checkpoints / ON_DISK)]


def make_host_folder(folder: Path) -> Path:
    own_folder(folder.parent)
    return own_folder(folder)


def arena_path(folder: Path, rank: int, world_size: int, kind: ArenaKind = "rank") -> Path:
    return folder / f"{kind}-{rank:05d}-of-{world_size:05d}.arena"


def alive_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.alive"


def arena_files(folder: Path) -> list[Path]:
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(p for p in found if _ARENA.fullmatch(p.name))


def kind_of(path: Path) -> str:
    """rank or replica."""
    return path.name.partition("-")[0]


def is_in_use(path: Path, world_size: int, kinds: Sequence[str]) -> bool:
    """Whether a run of so many ranks, which writes arenas of these kinds, goes on with this one."""
    return kind_of(path) in kinds and path.name.endswith(f"-of-{world_size:05d}.arena")


def trainers_alive(folder: Path) -> list[bool]:
    """Of every rank that has ever run here: whether its process lives."""
    return [is_locked(p) for p in sorted(folder.glob("rank-*.alive"))]


def remove_host_folder(folder: Path) -> None:
    """Arenas first: what is left half-way through is small."""
    for path in arena_files(folder):
        path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class ArenaCopy:
    """One version in one slot of one arena file."""

    path: Path
    slot: int
    sequence: int
    copy: HeldCopy


def list_copies(folder: Path) -> tuple[list[ArenaCopy], list[str]]:
    """(copies in memory, what is wrong with files that cannot be used)."""
    found: list[ArenaCopy] = []
    problems: list[str] = []
    for path in arena_files(folder):
        try:
            arena = Arena.open(path)
        except UserError as error:
            problems.append(str(error))
            continue
        for version in arena.versions():
            try:
                found.append(_copy_in(arena, version))
            except UserError as error:
                problems.append(str(error))
        arena.close()
    return found, problems


def _copy_in(arena: Arena, version: SlotVersion) -> ArenaCopy:
    held = parse_index(version.index, arena.slot_bytes, f"{arena.path}, slot {version.slot}")
    if held.step != version.step:
        raise UserError(f"{arena.path}, slot {version.slot}: record and index name different steps")
    return ArenaCopy(arena.path, version.slot, version.sequence, held)


@contextmanager
def reading(entry: ArenaCopy) -> Iterator[Arena | None]:
    """The arena with the slot kept from being overwritten; None where the slot has another version by now."""
    arena = Arena.open(entry.path)
    try:
        with arena.reading(entry.slot) as held:
            version = arena.version(entry.slot) if held else None
            same = version is not None and (version.sequence, version.step) == (entry.sequence, entry.copy.step)
            yield arena if same else None
    finally:
        arena.close()


def damage_of(arena: Arena, entry: ArenaCopy, pool: ThreadPoolExecutor) -> str | None:
    """What is wrong with the bytes of a slot; None where they are those that were summed."""
    view = arena.slot_view(entry.slot)[: entry.copy.num_bytes]
    bad = damaged_chunks(view, entry.copy.chunks, pool, entry.copy.chunk_bytes, entry.copy.algorithm)
    view.release()
    return (
        f"{entry.path}: {len(bad)} damaged chunks, the first at byte {bad[0][0]} of slot {entry.slot}" if bad else None
    )
