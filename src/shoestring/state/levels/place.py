"""The place of a run's copies on this host: a folder in tmpfs, or on disk where that is full; the agent beside it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoestring.host.arena import room_for
from shoestring.state.levels.agent import AgentConfig, agent_pid, no_drain, read_status, start_agent
from shoestring.state.levels.host_folder import (
    FINISHED,
    ON_DISK,
    STOP,
    alive_path,
    arena_files,
    host_folder,
    is_in_use,
    make_host_folder,
    memory_base,
    memory_places,
)
from shoestring.state.levels.members import Members
from shoestring.state.levels.settings import CheckpointConfig
from shoestring.state.levels.snapshot import hold_alive, is_held
from shoestring.state.run_state import RunLike


class HostPlace:
    """Where the copies in memory of this host are. While `folder` is held, the agent knows that this trainer lives."""

    def __init__(self, checkpoints: Path, settings: CheckpointConfig, members: Members) -> None:
        self.checkpoints, self.settings, self.members = checkpoints, settings, members
        self.folder: Path | None = None
        self.full: str | None = None  # why tmpfs is not used
        self.agent: Any = None
        self._alive: list[int] = []
        self._drains_seen: set[tuple[str, int]] = set()

    @property
    def candidates(self) -> list[Path]:
        """Where an earlier life may have left copies."""
        return memory_places(self.checkpoints)

    @property
    def disk_base(self) -> Path:
        return self.checkpoints / ON_DISK

    @property
    def is_on_disk(self) -> bool:
        return self.folder == host_folder(self.checkpoints.parent, self.disk_base)

    @property
    def with_peers(self) -> bool:
        return self.settings.levels.peer != "off" and self.members.on_several_hosts

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of arenas that this run writes."""
        return ("rank", "replica") if self.with_peers else ("rank",)

    def hold(self, folder: Path | None) -> None:
        if folder is None:
            return
        path = alive_path(folder, self.members.rank)
        if self._alive and self.folder == folder and is_held(path, self._alive[0]):
            return
        self.let_go()
        self._alive = [hold_alive(path)]
        self.folder = folder

    def let_go(self) -> None:
        for fd in self._alive:
            os.close(fd)
        self._alive.clear()

    def finish(self) -> None:
        """The run has ended and is on disk: the agent may delete what is here."""
        if self.folder is not None and self.members.is_first_of_host:
            with contextlib.suppress(FileNotFoundError):  # the agent knows, and has ended
                (self.folder / FINISHED).touch()
        self.let_go()

    def take(self, run: RunLike, num_bytes: int) -> Path:
        """A folder with room for so much, held; on disk, with one line about it, where tmpfs is too small."""
        folder = host_folder(self.checkpoints.parent)
        kept = (p for p in arena_files(folder) if is_in_use(p, self.members.world_size, self.kinds))
        existing = sum(512 * p.stat().st_blocks for p in kept)

        def look() -> str | None:
            if self.full is not None:
                return self.full
            base = memory_base()
            return room_for(base, num_bytes - existing) if base.is_dir() else f"there is no {base}"

        problem = self.members.gather(look())[self.members.hosts.index(self.members.host)]
        if problem is not None:
            if run.log is not None:
                run.log.say(f"copies in memory go to {self.disk_base} instead: {problem}")
            folder = host_folder(self.checkpoints.parent, self.disk_base)
        made = make_host_folder(folder)
        (made / FINISHED).unlink(missing_ok=True)
        (made / STOP).unlink(missing_ok=True)
        self.hold(made)
        return made

    def has_room(self, num_bytes: int) -> bool:
        assert self.folder is not None
        return room_for(self.folder, num_bytes) is None

    def drop_unused(self) -> None:
        """Arenas of an earlier number of ranks, and of peers where there are none."""
        if self.folder is None or not self.members.is_first_of_host:
            return
        for path in self.folder.glob("*.arena"):
            if not is_in_use(path, self.members.world_size, self.kinds):
                path.unlink(missing_ok=True)

    # -- the agent -------------------------------------------------------------------------------------------

    def open_agent(self) -> None:
        """By the first rank of the host, before the first save."""
        if not self.members.is_first_of_host:
            return
        assert self.folder is not None
        here = {alive_path(self.folder, rank) for rank in self.members.ranks_here}
        for path in {*self.folder.glob("rank-*.alive")} - here:  # of ranks that are elsewhere now, or not at all
            path.unlink(missing_ok=True)
        self.start_agent()

    def start_agent(self) -> None:
        assert self.folder is not None
        if self.agent is not None:
            self.agent.poll()  # one that has ended must not stay as a zombie
        levels = self.settings.levels
        config = AgentConfig(
            checkpoints=str(self.checkpoints),
            host=self.members.host,
            local_ranks=self.members.ranks_here,
            world_size=self.members.world_size,
            agent_idle=levels.agent_idle,
            keep={"last": self.settings.keep_last, "every": self.settings.keep_every, "best": self.settings.keep_best},
            remote=levels.remote,
            remote_timeout_s=levels.remote_timeout_s,
        )
        self.agent = start_agent(self.folder, config) or self.agent

    def new_drains(self) -> tuple[float, float]:
        """Seconds that the agent took since the last look, for (disk, remote). One that was killed is replaced."""
        if self.folder is None:
            return 0.0, 0.0
        status = read_status(self.folder)
        found = {"disk": 0.0, "remote": 0.0}
        for row in [] if status is None else status.drains:
            mark = (str(row.get("level")), int(row.get("step", -1)))
            if mark not in self._drains_seen and mark[0] in found:
                self._drains_seen.add(mark)
                found[mark[0]] = float(row.get("seconds", 0.0))
        just_started = self.agent is not None and self.agent.poll() is None
        if self.members.is_first_of_host and not just_started and agent_pid(self.folder) is None:
            self.start_agent()  # it was killed, maybe one of an earlier life: a new one goes on where it was
        return found["disk"], found["remote"]

    @contextlib.contextmanager
    def no_drain(self, run: RunLike) -> Iterator[None]:
        """The agent of this host writes nothing to disk inside."""
        if self.folder is None or not self.folder.is_dir() or not self.members.is_first_of_host:
            yield
            return
        with no_drain(self.folder, print if run.log is None or not run.mesh.is_main else run.log.say) as ended:
            yield
        if ended:
            self.start_agent()
