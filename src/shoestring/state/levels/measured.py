"""Saves at measured intervals: every so many steps all ranks meet for a few numbers (is the last save committed
everywhere, is a slot free, how long did things take), and either start a save together or skip it together.

From these numbers every rank computes the same next interval (pace.py). The save itself goes on in the background
(snapshot.py, peers.py); disk and remote storage are the agent's work (agent.py). A save begins early enough to be
committed before the interval is over, and a step that would be one too many waits for it: a crash loses at most one
interval of steps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoestring.state.levels.copies import InMemory, OnPeers
from shoestring.state.levels.level import Save
from shoestring.state.levels.pace import Pace
from shoestring.state.levels.place import HostPlace
from shoestring.state.levels.policy import Mean, duration
from shoestring.state.run_state import RunLike


class MeasuredSaves:
    """To memory and peers, and what is said to the agent."""

    def __init__(self, folder: Path, place: HostPlace, memory: InMemory) -> None:
        self.folder, self.place, self.memory = folder, place, memory
        self.settings, self.members = place.settings, place.members
        self.peers = OnPeers(memory, self.settings.levels.peer_gbps)
        self.pace = Pace(self.settings.levels.budget)
        self.stalls: list[float] = []
        self._warned = False

    @property
    def levels(self) -> tuple[str, ...]:
        """In use, nearest first."""
        some = ["memory", *(["peer"] if self.place.with_peers else []), "disk"]
        return tuple([*some, "remote"] if self.settings.levels.remote else some)

    def save_next(self, levels: Sequence[str]) -> None:
        self.pace.ask(levels)

    def after_step(self, run: RunLike, parts: dict[str, Any]) -> None:
        if self.pace.meets_at(run.step):
            self._meet(run, parts)
        elif self.peers.look_at is not None and run.step >= self.peers.look_at:
            self._start_late_copy(run, parts)

    def go_back(self, step: int) -> None:
        """The run goes on from this step, without a new process."""
        self.pace.go_back(step)
        self.peers.go_back()
        self.memory.go_back(step)

    # -- the meeting of the ranks ----------------------------------------------------------------------------

    def _meet(self, run: RunLike, parts: dict[str, Any]) -> None:
        """All ranks, at the same step: start a save together, or skip it together."""
        began, pace, peers = time.perf_counter(), self.pace, self.peers
        if pace.step_s.count == 0:
            pace.next_step = run.step + 1
            return
        if pace.plan is None and pace.saves == 0 and self.memory.arena is None:
            self.memory.prepare(Save(run, parts))
            peers.open()
        memory = self.memory.arena
        assert memory is not None
        if pace.saves != 1:  # nobody knows yet how long the first one takes: it is looked at again
            memory.wait()  # the last save is later than its margin: skipping this one would make the interval longer
        error = memory.failure()
        flags = [memory.writable(), memory.committed(), memory.no_room() is None, *peers.flags]
        numbers = [memory.stall_s, memory.commit_s(), pace.step_s.value, *self.place.new_drains(), peers.seconds]
        agreed = self.members.agree(flags, [*numbers, pace.elapsed(began)])
        ready, committed, has_room, peers_idle, replicated, peers_work = map(bool, agreed[: len(flags)])
        stall, commit_s, step_s, disk_s, remote_s, peer_s, elapsed_s = agreed[len(flags) :]
        if not has_room:
            self.memory.leave_tmpfs(Save(run, parts))
            self._moved(run.step)
            return
        if peers_idle and peers.note_round(run, replicated):
            pace.note("peer", 0.0, peer_s)
        if pace.step_s.value > 0:
            pace.step_s = Mean(step_s, pace.step_s.count)
        if not ready:
            pace.skip(run.step)
            return
        had_pending = memory.has_pending
        self.memory.settle(everywhere=committed)
        if error is not None and run.log is not None:
            run.log.say(f"a save to memory failed: {error}")
        if had_pending:
            pace.note_memory(stall, commit_s)
            if committed:  # a new version is in memory everywhere
                self.place.drop_unused()
        pace.note("disk", 0.0, disk_s)
        pace.note("remote", 0.0, remote_s)
        self._warn_of_preemption(run)
        if pace.replan(elapsed_s, self.memory.has_spare_slot) and run.mesh.is_main:
            pace.write_plan(self.folder, self.settings.levels.peer)
        if had_pending and pace.only_looks(run.step):
            return
        levels = pace.levels_at(run.step, peers_idle)
        save = Save(run, parts, levels)
        if not self._begin(save):
            return
        peers.look_at = None
        if peers.rounds is not None and "peer" in levels and peers_work:
            if peers_idle:
                peers.begin(save)
            else:
                peers.look_at = run.step + pace.look_steps()
        pace.saved(run.step)
        self.stalls.append(time.perf_counter() - began)

    def _begin(self, save: Save) -> bool:
        """To memory; False where tmpfs was full and all ranks begin again, on disk."""
        before = self.memory.arena
        self.memory.begin(save)
        if self.memory.arena is before:
            return True
        self._moved(save.run.step)
        return False

    def _moved(self, step: int) -> None:
        self.peers.open()
        self.pace.next_step = step + 1

    def _start_late_copy(self, run: RunLike, parts: dict[str, Any]) -> None:
        """All ranks, at the same step: a copy was due while the one before was on its way. It starts now, with the
        newest version in memory, if that one has arrived."""
        memory, peers = self.memory.arena, self.peers
        assert memory is not None
        *flags, seconds = self.members.agree([*peers.flags, memory.newest_step is not None], [peers.seconds])
        idle, succeeded, works, is_saved = map(bool, flags)
        peers.look_at = None if idle else run.step + self.pace.look_steps()
        if not idle:
            return
        if peers.note_round(run, succeeded):
            self.pace.note("peer", 0.0, seconds)
        step = memory.newest_step
        if works and is_saved and step is not None:
            peers.begin(Save(run, parts))
            self.pace.last_of["peer"] = step

    # -- saves to disk ---------------------------------------------------------------------------------------

    def note_disk(self, seconds: float) -> None:
        """Of a save that the run has waited for: plans follow from it, on every rank the same."""
        (agreed,) = self.members.agree([], [seconds])
        self.pace.note("disk", 0.0, agreed)

    def leave_to_agent(self, run: RunLike, parts: dict[str, Any]) -> bool:
        """Where a save to disk does not fit into preempt_s: to memory, from where the agent takes it to disk."""
        limit, needed = self.settings.preempt_s, self.pace.costs["disk"][1].value
        memory = self.memory.arena
        if limit is None or memory is None or not self.members.any(needed > 0.5 * limit):
            return False
        memory.wait()
        ready, committed = self.members.agree([memory.writable(), memory.committed()], [])
        if not ready:
            return False
        self.memory.settle(everywhere=bool(committed))
        self._begin(Save(run, parts, ("memory", "disk")))
        assert self.memory.arena is not None
        self.memory.wait()
        if self.members.any(not self.memory.arena.committed()):
            self.memory.settle(everywhere=False)
            return False
        if run.log is not None:
            run.log.say(
                f"a save to disk takes about {duration(needed)} and preempt_s is {limit:g}: step {run.step} is in "
                "memory, and the agent writes it"
            )
        return True

    def _warn_of_preemption(self, run: RunLike) -> None:
        """Once, after the first save to disk was timed: a SIGTERM leaves too little time for one."""
        limit, needed = self.settings.preempt_s, self.pace.costs["disk"][1].value
        if self._warned or limit is None or not needed:
            return
        self._warned = True
        if needed > 0.5 * limit and run.log is not None:
            run.log.say(
                f"preempt_s={limit:g} is short: a save to disk takes about {duration(needed)}; after SIGTERM the last "
                "step goes to memory only, and the agent writes it to disk if the machine lives that long"
            )
