"""Copies of the state in memory: of this host, and of another one.

A slot is overwritten only when another slot's version is committed on every rank and nobody reads this one, so at every
instant one complete version is in memory.
"""

from __future__ import annotations

import os
from pathlib import Path

from shoestring.errors import UserError
from shoestring.host.arena import IndexTooLargeError
from shoestring.state.agreement import agree
from shoestring.state.levels.division import Division
from shoestring.state.levels.host_folder import arena_path
from shoestring.state.levels.level import Found, Level, Save
from shoestring.state.levels.peers import NUM_SLOTS, Key, PeerRounds, Replicas
from shoestring.state.levels.place import HostPlace
from shoestring.state.levels.restore import Offer, offers_here
from shoestring.state.levels.snapshot import MemoryLevel, forget_newer, local_tensor
from shoestring.state.levels.version import LIFE
from shoestring.state.run_state import RunLike, coordinate, flatten, run_state


class InMemory(Level):
    """The memory of this host. `arena` is there from the first save on."""

    def __init__(self, place: HostPlace) -> None:
        self.place, self.members = place, place.members
        self.division = Division(place.members)
        self.arena: MemoryLevel | None = None
        self.has_spare_slot = False
        self._outgrown = False  # the arena had no room for the values of the last save here

    def prepare(self, save: Save) -> None:
        """Before the first save: who writes what, an arena that fits, and the agent."""
        run, place, members = save.run, self.place, self.members
        state = agree(run.mesh, lambda: run_state(run, save.parts))
        tensors, values = flatten(state, coordinate(run.mesh))
        self.division.divide(run.mesh, tensors)
        num_bytes, index_bytes = self.division.sizes(values)
        needs: list[tuple[str, int]] = members.gather((members.host, num_bytes))
        least_slots = 3 if place.with_peers else 2
        on_this_host = sum(size for host, size in needs if host == members.host)
        for_peers = NUM_SLOTS * max(size for _, size in needs) * members.num_here if place.with_peers else 0
        # Where no version was complete, those that were found stay in memory until this first save: the user may want
        # to begin again with the host that lacked.
        self._erase(run, run.step)
        run.mesh.barrier()
        folder = place.take(run, least_slots * on_this_host + for_peers)
        # One more, where most of the memory stays free: saves go on while the agent reads a slot for a slow disk.
        spare = place.has_room(2 * ((least_slots + 1) * on_this_host + for_peers))
        self.arena = MemoryLevel(
            arena_path(folder, members.rank, members.world_size),
            run.mesh.device,
            threads=max(1, min(8, (os.cpu_count() or 1) // max(1, members.num_here))),
            num_slots=least_slots + (1 if spare else 0),
            least_slots=least_slots,
        )
        if self.arena.open_existing():
            assert self.arena.arena is not None
            found = self.arena.arena.versions()
            if found and found[0].step <= run.step:
                self.arena.safe_slot = found[0].slot
                # Peers may have it: it stays until they have a newer one.
                self.arena.kept_slot = found[0].slot if place.with_peers else None
        self.arena.fit(num_bytes, index_bytes)
        self.has_spare_slot = bool(members.agree([self.arena.num_slots > least_slots], [])[0])
        run.mesh.barrier()
        place.open_agent()

    def leave_tmpfs(self, save: Save) -> None:
        """It was full before all pages were there, on some rank: all of them begin again, on disk."""
        assert self.arena is not None
        why = self.arena.no_room()
        if self.members.any(self.place.is_on_disk and why is not None):
            raise UserError(f"there is no room for copies of the state: {why or 'on another rank'}")
        self.place.full = why or "tmpfs is full on another rank"
        path = self.arena.path
        self.close()
        path.unlink(missing_ok=True)
        self.prepare(save)

    def begin(self, save: Save) -> None:
        assert self.arena is not None
        run = save.run
        tensors, values = flatten(run_state(run, save.parts), coordinate(run.mesh))
        if self.members.any(self._outgrown or not self.division.fits(tensors)):
            # The state has other tensors than before (a layer changed its format): divide anew, with a larger arena
            # where it is needed. All ranks do it, because dividing is a meeting.
            self.division.divide(run.mesh, tensors)
            self.arena.fit(*self.division.sizes(values))
            self.arena.wait_touched()
            if self.members.any(self.arena.no_room() is not None):
                self.leave_tmpfs(save)
                self.arena.touch_now()
        parameters = {f"model.{name}" for name, _ in run.model.named_parameters()}
        copy = self.division.copy_of(run.step, {**values, LIFE: self.members.life}, save.levels)
        held = {b.name for b in copy.boxes}
        self.arena.save(
            copy,
            {n: local_tensor(t) for n, t in tensors.items() if n in held},
            early=lambda name: not name.startswith("optimizer.state.") and name not in parameters,
        )

    def settle(self, *, everywhere: bool) -> None:
        """Take note of the finished save; `everywhere`: every rank has committed it."""
        assert self.arena is not None
        self._outgrown = isinstance(self.arena.failure(), IndexTooLargeError)
        self.arena.settle(everywhere=everywhere)

    def busy(self) -> bool:
        return self.arena is not None and self.arena.busy()

    def wait(self) -> None:
        if self.arena is not None:
            self.arena.wait()

    def wait_copied(self) -> None:
        if self.arena is not None:
            self.arena.wait_copied()

    def offers(self) -> Found:
        offers: list[Offer] = []
        problems: list[str] = []
        for folder in self.place.candidates:
            some, unusable = offers_here(folder, [], self.members.host)
            offers += some
            problems += unusable
        return offers, problems

    def forget(self, run: RunLike, step: int, *, left: bool) -> list[Path]:
        """They would be in the way of a later rollback, and be taken for the newest version."""
        if self.arena is not None:
            self.settle(everywhere=False)
        self._erase(run, step)
        return []

    def _erase(self, run: RunLike, step: int) -> None:
        def erase() -> None:
            for folder in self.place.candidates if self.members.is_first_of_host else ():
                forget_newer(folder, step)

        agree(run.mesh, erase)

    def go_back(self, step: int) -> None:
        """The version that the run goes on from, without a new process, is the safe one."""
        if self.arena is not None and self.arena.arena is not None:
            found = [v for v in self.arena.arena.versions() if v.step <= step]
            self.arena.safe_slot = found[0].slot if found else None

    def close(self) -> None:
        """What is committed stays."""
        if self.arena is not None:
            self.arena.close()
            self.arena = None


class OnPeers(Level):
    """The memory of another host. Without peers `rounds` stays None. What peers have sent here is in arenas of this
    host, and offered by InMemory."""

    def __init__(self, memory: InMemory, gbps: float | None) -> None:
        self.memory, self.gbps = memory, gbps
        self.rounds: PeerRounds | None = None
        self.look_at: int | None = None  # the step that looks whether a copy that is due can start
        self.replicating: tuple[int, Key] | None = None  # slot and key of the version that is on its way
        self._replicated: Key | None = None  # the newest version that all peers have

    def open(self) -> None:
        """When memory has its place."""
        self.replicating = self.look_at = None
        place = self.memory.place
        if place.with_peers:
            assert place.folder is not None
            replicas = Replicas(place.folder, place.members.rank, place.members.hosts)
            self.rounds = PeerRounds(replicas, self.gbps)

    @property
    def flags(self) -> list[bool]:
        """Nothing is on its way, the last round succeeded, rounds work."""
        rounds = self.rounds
        if rounds is None:
            return [True, False, True]
        return [not rounds.busy(), rounds.succeeded, not rounds.error]

    @property
    def seconds(self) -> float:
        """That the last round took."""
        return 0.0 if self.rounds is None else self.rounds.seconds

    def begin(self, save: Save) -> None:
        """The newest version in memory goes out as soon as it is committed."""
        assert self.rounds is not None and self.memory.arena is not None
        step = self.memory.arena.newest_step
        assert step is not None
        slot, committed_copy = self.memory.arena.watch_commit()
        self.replicating = slot, (step, self.memory.members.life)
        self.rounds.begin(committed_copy, self._replicated)

    def busy(self) -> bool:
        return self.rounds is not None and self.rounds.busy()

    def wait(self) -> None:
        if self.rounds is not None:
            self.rounds.wait()

    def note_round(self, run: RunLike, succeeded: bool) -> bool:
        """The last round is over on every rank; True where it is news that every peer has the version."""
        if self.replicating is None:
            return False
        assert self.rounds is not None and self.memory.arena is not None
        if succeeded:
            self.memory.arena.kept_slot, self._replicated = self.replicating
        elif run.log is not None:
            run.log.say(f"copies to peers failed: {self.rounds.error or 'another rank could not store one'}")
        self.replicating = None
        return succeeded

    def go_back(self) -> None:
        self.replicating = self._replicated = self.look_at = None
