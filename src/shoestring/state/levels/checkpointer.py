"""LevelCheckpointer: a run saved to memory, peers, disk and remote storage, each at its own interval.

It is a StepCheckpointer (train/step.py). Every so many steps all ranks meet for a few numbers (is the last save
committed everywhere, is a slot free, how long did things take), and either start a save together or skip it together.
From these numbers every rank computes the same next interval (policy.py). The save itself goes on in the background
(snapshot.py); disk and remote storage are the agent's work (agent.py).

A slot is overwritten only when another slot's version is committed on every rank and nobody reads this one, so at
every instant one complete version is in memory. A save begins early enough to be committed before the interval is over,
and a step that would be one too many waits for it: a crash loses at most one interval of steps. Resuming takes the
newest complete version from the nearest source (restore.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoestring.errors import UserError
from shoestring.host.arena import IndexTooLargeError, room_for
from shoestring.mesh import Mesh
from shoestring.state.boxes import Box, local_box
from shoestring.state.checkpoint import (
    ResumeFrom,
    RunLike,
    agree,
    check_fits,
    coordinate,
    flatten,
    newest_folder,
    on_main,
    put_back,
    regrouped,
    run_state,
    save_checkpoint,
    seed_rng,
    set_aside_from,
    shares_in,
    started_anew,
    state_to_fill,
    step_folder,
    step_folders,
    unflatten,
)
from shoestring.state.checkpoint_files import sweep
from shoestring.state.files import dtype_name
from shoestring.state.levels import remote
from shoestring.state.levels.agent import AgentConfig, agent_pid, no_drain, read_status, start_agent
from shoestring.state.levels.drain import HOSTS
from shoestring.state.levels.events import Event, append_event, rates_from_events, read_events
from shoestring.state.levels.host_folder import (
    FINISHED,
    ON_DISK,
    STOP,
    alive_path,
    arena_files,
    arena_path,
    host_folder,
    host_name,
    is_in_use,
    list_copies,
    make_host_folder,
    memory_base,
    memory_places,
)
from shoestring.state.levels.peers import NUM_SLOTS, Key, PeerRounds, Replicas
from shoestring.state.levels.policy import LEVELS, Cost, IntervalPlan, Mean, Rate, duration, make_plan
from shoestring.state.levels.restore import (
    ChosenVersion,
    Offer,
    choose,
    everyone,
    fill_tensors,
    folder_copy,
    gather_offers,
    incomplete,
    manifest_of,
    offers_here,
)
from shoestring.state.levels.retention import Keep, prune_steps
from shoestring.state.levels.settings import CheckpointConfig
from shoestring.state.levels.snapshot import MemoryLevel, forget_newer, hold_alive, is_held, lay_out, local_tensor
from shoestring.state.levels.version import LIFE, HeldBox, HeldCopy, dump_index, missing_of, sum_of_names

MEASURE_S = 0.5  # seconds after the first saves, when the ranks look what they cost
NUM_MEASURED = 2
RETRY_STEPS = 4  # a skipped save is tried again after this part of an interval
LOOK_S = 1.0  # seconds between looks whether a copy to peers is over, where the next one is due already


@dataclass(frozen=True)
class Share:
    """Which boxes this rank writes, of which state."""

    boxes: tuple[HeldBox, ...]
    names_sum: str
    signature: int


@dataclass(frozen=True)
class Restored:
    """What filling the tensors of this rank took."""

    num_bytes: int
    seconds: float


class LevelCheckpointer:
    """`checkpoint=auto`. `folder` is the run's checkpoints/; every rank makes one."""

    def __init__(
        self,
        folder: Path | str,
        settings: CheckpointConfig,
        *,
        last: int | None = None,
        seed: int | None = None,
        resume_from: ResumeFrom = "newest",
    ) -> None:
        self.folder = Path(folder).absolute()
        self.settings, self.last, self.seed, self.resume_from = settings, last, seed, resume_from
        self.life = ""
        self.host = host_name()
        self.memory: MemoryLevel | None = None
        self.share: Share | None = None
        self.plan: IntervalPlan | None = None
        self.saves = 0  # finished or under way
        self._last_of: dict[str, int] = {}  # the step of the last save of each level
        self._began: float | None = None  # when the first step of this life ended
        self.skipped = 0
        self.saved_step: int | None = None  # the newest step that is on disk for certain
        self.next_step: int | None = None
        self._spare_slot = False
        self._promised = 0  # the step before which the next version is to be in memory on every rank
        self._commit_by: int | None = None  # the step that waits for the save under way
        self.stalls: list[float] = []
        self.restored: Restored | None = None
        self._asked: tuple[str, ...] | None = None
        self._arenas: Path | None = None
        self._alive: list[int] = []
        self._hosts: list[str] = [self.host]
        self._rank = 0
        self._group: Any = None
        self._boxes: dict[str, tuple[Any, Box]] = {}
        self._costs = {level: [Mean(), Mean()] for level in LEVELS}
        self._step_s = Mean()
        self._last_step_at: float | None = None
        self._rates: dict[str, Rate] = {}
        self._drains_seen: set[tuple[str, int]] = set()
        self._peers: PeerRounds | None = None
        self._replicating: tuple[int, Key] | None = None  # slot and key of the version that is on its way to the peers
        self._replicated: Key | None = None  # the newest version that all peers have
        self._look_at: int | None = None  # the step that looks whether a copy to peers that is due can start
        self._agent: Any = None
        self._hooked = self._warned = False
        self._full: str | None = None  # why tmpfs is not used

    # -- what the trainer asks -------------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Whether after_step will wait for a save to disk; saves to memory need no line of metrics before them."""
        return step == self.last

    def newest(self) -> Path | None:
        """The newest checkpoint on disk, or else the file of a copy in memory."""
        on_disk = newest_folder(self.folder)
        if on_disk is not None:
            return on_disk
        return next((c.path for place in memory_places(self.folder) for c in list_copies(place)[0]), None)

    def discard(self, run: RunLike, step: int) -> None:
        """Versions of this step and later ones must not be resumed from: erased in memory, set aside on disk."""
        if self.memory is not None:
            self.memory.wait()
            self.memory.settle(everywhere=False)
        if self._peers is not None:  # a round that goes on would bring the version back
            self._peers.wait()
        run.mesh.barrier()
        for place in memory_places(self.folder):
            self._forget_newer(place, run, step - 1)
        with self._no_drain(run):
            self._set_aside(run, step)
        self._set_aside_remote(run, step)
        self.saved_step = None
        run.mesh.barrier()

    def after_step(self, run: RunLike, parts: dict[str, Any]) -> None:
        now = time.perf_counter()
        self._began = now if self._began is None else self._began
        if self._last_step_at is not None:
            self._step_s = self._step_s.after(now - self._last_step_at)
        if self._commit_by is not None and run.step >= self._commit_by and self.memory is not None:
            self.memory.wait()  # rarely: the save began early enough
            self._commit_by = None
        if run.step == self.last:
            self.save(run, parts)
            self.finish(run)
        elif self.next_step is None or run.step >= self.next_step:
            self._meet(run, parts)
        elif self._look_at is not None and run.step >= self._look_at:
            self._start_late_copy(run)
        self._last_step_at = time.perf_counter()

    def save_next(self, levels: Sequence[str] = ("memory",)) -> None:
        """The next step is saved to these levels, whatever the plan says; on every rank."""
        self.next_step, self._asked = 0, tuple(levels)

    def save(self, run: RunLike, parts: dict[str, Any]) -> Path:
        """To disk, and wait for it. With preempt_s, what does not fit into the time is left in memory to the agent."""
        began = time.monotonic()
        path = step_folder(self.folder, run.step)
        if self.saved_step == run.step:
            return path
        if run.step != self.last and self._leave_to_agent(run, parts):
            return path
        if self.memory is not None:
            self.memory.wait()
            self.memory.wait_copied()
        with self._no_drain(run):
            on_main(run.mesh, sweep, self.folder)
            state = agree(run.mesh, lambda: run_state(run, parts))
            state[LIFE] = self.life
            save_checkpoint(path, state, run.mesh, step=run.step, overwrite=True)
            self.saved_step = run.step
            keep = self._keep()
            on_main(run.mesh, lambda: prune_steps(self.folder, keep, self.folder.parent / "metrics.jsonl"))
        (seconds,) = self._agree_numbers([], [time.monotonic() - began])  # plans follow from it, on every rank the same
        self._costs["disk"][1] = self._costs["disk"][1].after(seconds)
        return path

    def finish(self, run: RunLike) -> None:
        """The run has ended and is on disk: the agent may delete the copies in memory and end."""
        if self.memory is not None:
            self.memory.close()
            self.memory = None
        if run.mesh.is_main:
            append_event(self.folder, Event("finished", time.time(), run.step, self.life))
        run.mesh.barrier()
        if self._arenas is not None and self._is_first_of_host(run.mesh):
            with contextlib.suppress(FileNotFoundError):  # the agent knows, and has ended
                (self._arenas / FINISHED).touch()
        self._let_go()

    def let_go(self) -> None:
        """End without a word to the agent, as a killed process does: what is committed stays in memory."""
        if self.memory is not None:
            self.memory.close()
            self.memory = None
        self._let_go()

    @property
    def place(self) -> Path | None:
        """Where the copies in memory of this run are."""
        return self._arenas

    def _let_go(self) -> None:
        for fd in self._alive:
            os.close(fd)
        self._alive.clear()

    # -- resuming --------------------------------------------------------------------------------------------

    def resume(self, run: RunLike, parts: dict[str, Any]) -> bool:
        """Fill the run from the newest complete version, each box from the nearest copy; False where there is none."""
        self.life = run.mesh.broadcast_object(f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(4)}")
        self._find_hosts(run.mesh)
        if self.settings.levels.peer != "off" and len(set(self._hosts)) == 1 and run.log is not None:
            run.log.say(f"levels.peer={self.settings.levels.peer} has no effect: all processes are on one host")
        on_main(run.mesh, sweep, self.folder)
        if not self._hooked:
            run.optimizer.register_step_pre_hook(lambda *_: self.wait_copied())
            self._hooked = True
        arenas = memory_places(self.folder)
        self._hold(next((p for p in arenas if p.is_dir()), None), run.mesh)

        def look() -> tuple[list[Offer], list[str]]:
            found: tuple[list[Offer], list[str]] = ([], [])
            for i, place in enumerate(arenas):
                offers, problems = offers_here(place, [self.folder] if i == 0 else [], self.host)
                found[0].extend(offers)
                found[1].extend(problems)
            for problem in found[1]:
                print(f"not usable: {problem}", flush=True)
            return found

        offers = gather_offers(run.mesh, self.host, look)
        fetched = self._fetch_remote(run, offers)
        if fetched:
            offers = gather_offers(run.mesh, self.host, look)
        events = on_main(run.mesh, read_events, self.folder)
        levels, mttf = self._levels(run.mesh), self.settings.levels.mttf_hours
        self._rates = on_main(
            run.mesh, lambda: rates_from_events(events, levels, run.mesh.world_size, mttf, time.time())
        )
        choice = self._choose(run, offers)
        if choice is not None and self.last is not None and choice.step > self.last:
            raise UserError(
                f"the run is to end at step {self.last} and has done {choice.step}: give {choice.step} steps or more, "
                "or start a new run"
            )
        if choice is None:
            self._refuse_damaged(run)
            self._start_anew(run, offers)
            if self.seed is not None:
                seed_rng(self.seed, run.mesh)
            if run.mesh.is_main:
                append_event(self.folder, Event("started", time.time(), 0, self.life))
            return False
        source = self._fill(run, parts, choice, "remote" if fetched else None)
        for place in arenas:
            self._forget_newer(place, run, run.step)
        # Also those that are incomplete or damaged: retention would count them and delete older ones that are sound.
        # What the agent is writing now is waited for only where it may be the version that was left.
        with self._no_drain(run) if self.resume_from == "previous" else contextlib.nullcontext():
            aside = self._set_aside(run, run.step + 1)
        for kept in aside if run.log is not None else ():
            run.log.say(f"a newer checkpoint is set aside as {kept}")
        if self.resume_from == "previous":
            self._set_aside_remote(run, run.step + 1)
            self.resume_from = "newest"  # for a later rollback
        self._rejoin(run.step)
        if run.mesh.is_main:
            append_event(self.folder, Event("resumed", time.time(), run.step, self.life, source))
        run.mesh.barrier()
        return True

    def _choose(self, run: RunLike, offers: Sequence[Offer]) -> ChosenVersion | None:
        choice = choose(offers)
        if choice is None or self.resume_from == "newest":
            return choice
        earlier = choose(offers, before=choice.step)
        if earlier is None:
            raise UserError(
                f"resume_from=previous: the version of step {choice.step} is the only one; leave resume_from out"
            )
        return earlier

    def _refuse_damaged(self, run: RunLike) -> None:
        """A folder with its final name was complete once: where nothing else is left, the run does not start anew."""

        def look() -> None:
            shares = [path for host in shares_in(self.folder) for path in step_folders(host)]
            for path in [*shares, *reversed(step_folders(self.folder))]:
                try:
                    folder_copy(path)
                except UserError as error:
                    raise UserError(
                        f"the checkpoint {path.name} cannot be used: {error}; no other version is there: start a new "
                        "run, or get this one from a backup"
                    ) from error

        on_main(run.mesh, look)

    def _start_anew(self, run: RunLike, offers: Sequence[Offer]) -> None:
        """Where versions were found, each of which lacks something: they are named, and no later run takes them for
        its own."""
        if not offers:
            return
        aside = self._set_aside(run, 0)  # retention would count them and delete newer ones of fewer steps
        if run.log is None:
            return
        for line in (*incomplete(offers), *(f"{path} (set aside)" for path in aside)):
            run.log.say(f"passed over: {line}")
        run.log.say("no version is complete: starting anew at step 0")
        run.log.truncate_after(0)

    def _fill(self, run: RunLike, parts: dict[str, Any], choice: ChosenVersion, told: str | None) -> str:
        began = time.perf_counter()
        saved = manifest_of(choice)
        state = state_to_fill(run, parts, (*saved.tensors, *saved.values))
        where = coordinate(run.mesh)
        tensors, values = agree(run.mesh, lambda: flatten(state, where))
        saved = regrouped(saved, state, where)
        what = f"version of step {choice.step}"
        agree(run.mesh, lambda: check_fits(what, saved, tensors, values))
        found = {n: t for n, t in tensors.items() if n in saved.tensors}
        filling = time.perf_counter()
        used, damaged = fill_tensors(found, choice, run.mesh, self.host)
        self.restored = Restored(sum(used.values()), time.perf_counter() - filling)
        absent = [*(n for n in tensors if n not in found), *unflatten(state, saved.values, where)]
        put_back(run, parts, state)
        on_disk = missing_of(o.copy for o in choice.offers if o.source == "disk") is None
        self.saved_step = run.step if on_disk else None
        seconds = time.perf_counter() - began
        total = sum(used.values())
        source = told or " and ".join(sorted(used, key=lambda s: -used[s])) or "disk"
        if run.log is not None:
            for line in (*choice.passed_over, *damaged):
                run.log.say(f"passed over: {line}")
            run.log.say(
                f"resumed from {source} at step {run.step}: {total / 2**20:.1f} MiB in {duration(seconds)}"
                f"{started_anew(absent)}"
            )
        return source

    def _fetch_remote(self, run: RunLike, offers: Sequence[Offer]) -> bool:
        """A checkpoint from remote storage, where it has a newer one than is here. Never waits beyond its deadlines."""
        url, timeout = self.settings.levels.remote, self.settings.levels.remote_timeout_s
        if url is None:
            return False
        best = choose(offers)

        def fetch() -> bool:
            try:
                steps = remote.remote_steps(url, timeout)
                if not steps or (best is not None and steps[-1][0] <= best.step):
                    return False
                for folder in steps[-1][1]:
                    remote.fetch(url, folder, self.folder, timeout)
                return True
            except Exception as error:  # whatever a storage library raises
                if best is None:
                    raise UserError(
                        f"levels.remote={url} cannot be read ({error}), and no other copy is here: make it "
                        "reachable, or start a new run"
                    ) from error
                if run.log is not None:
                    run.log.say(f"remote storage cannot be read ({error}); it is left out")
                return False

        return bool(on_main(run.mesh, fetch))

    def _set_aside(self, run: RunLike, step: int) -> list[Path]:
        """Checkpoints on disk of this step and later ones, and shares of them, which may be on a disk of each host."""

        def own() -> list[Path]:
            folders = [self.folder / HOSTS / self.host] if self._is_first_of_host(run.mesh) else []
            if run.mesh.is_main:
                lost = (share for share in shares_in(self.folder) if share.name not in self._hosts)
                folders += [self.folder, *lost]
            return [kept for folder in folders for kept in set_aside_from(folder, step)]

        return everyone(run.mesh, agree(run.mesh, own))

    def _set_aside_remote(self, run: RunLike, step: int) -> None:
        url, timeout = self.settings.levels.remote, self.settings.levels.remote_timeout_s
        if url is None:
            return
        try:
            on_main(run.mesh, remote.set_aside_from, url, step, timeout)
        except Exception as error:  # whatever a storage library raises
            if run.log is not None:
                run.log.say(f"remote storage cannot be changed ({error}): delete its versions from step {step} on")

    def _rejoin(self, step: int) -> None:
        """Where the run goes back without a new process: the version that it resumed from is the safe one."""
        self.next_step = self._commit_by = self._replicated = self._replicating = self._look_at = None
        self._promised = 0
        self._last_of = {level: min(saved, step) for level, saved in self._last_of.items()}
        if self.memory is not None and self.memory.arena is not None:
            found = [v for v in self.memory.arena.versions() if v.step <= step]
            self.memory.safe_slot = found[0].slot if found else None

    def _forget_newer(self, place: Path, run: RunLike, step: int) -> None:
        if self._is_first_of_host(run.mesh):
            forget_newer(place, step)

    # -- the meeting of the ranks ----------------------------------------------------------------------------

    def _meet(self, run: RunLike, parts: dict[str, Any]) -> None:
        """All ranks, at the same step: start a save together, or skip it together."""
        began = time.perf_counter()
        if self._step_s.count == 0:
            self.next_step = run.step + 1
            return
        if self.plan is None and self.saves == 0 and self.memory is None:
            self._prepare(run, parts)
        assert self.memory is not None
        memory = self.memory
        if self.saves != 1:  # nobody knows yet how long the first one takes: it is looked at again
            memory.wait()  # the last save is later than its margin: skipping this one would make the interval longer
        error = memory.failure()
        peers = self._peers
        flags = [memory.writable(), memory.committed(), peers is None or not peers.busy()]
        flags += [peers is not None and peers.succeeded, memory.no_room() is None]
        flags += [peers is None or not peers.error]
        disk, far = self._new_drains(run.mesh)
        peer_s = 0.0 if peers is None else peers.seconds
        assert self._began is not None
        numbers = [memory.stall_s, memory.commit_s(), self._step_s.value, disk, far, peer_s, began - self._began]
        agreed = self._agree_numbers(flags, numbers)
        ready, committed, peers_idle, replicated_all, has_room, peers_work, *agreed = agreed
        stall, commit_s, step_s, disk_s, remote_s, peer_s, elapsed_s = agreed
        if not has_room:
            self._leave_tmpfs(run, parts)
            return
        if peers_idle:
            self._note_round(run, bool(replicated_all), peer_s)
        if self._step_s.value > 0:
            self._step_s = Mean(step_s, self._step_s.count)
        if not ready:
            self.skipped += 1
            wait = max(1, (self.plan.steps if self.plan else RETRY_STEPS) // RETRY_STEPS)
            self.next_step = run.step + (1 if self._asked is not None else wait)
            return
        had_pending = memory.has_pending
        memory.settle(everywhere=bool(committed))
        if error is not None and run.log is not None:
            run.log.say(f"a save to memory failed: {error}")
        if had_pending:
            if self.saves == 2:  # the first one was slower: new pages, and the agent started beside it
                self._costs["memory"] = [Mean(), Mean()]
            self._note_cost("memory", stall, commit_s)
            if committed:
                self._drop_old_arenas(run)
        self._note_cost("disk", 0.0, disk_s)
        self._note_cost("remote", 0.0, remote_s)
        self._warn_of_preemption(run)
        self._replan(run, elapsed_s)
        assert self.plan is not None
        due = self._last_of.get("memory", 0) + self.plan.period
        if had_pending and self._asked is None and self.saves <= NUM_MEASURED and run.step < due:
            self.next_step = due  # only a look: the first saves are within the budget, too
            return
        self.saves += 1
        levels = self._levels_now(run.step, bool(peers_idle))
        self._save_to_memory(run, parts, levels, grown=isinstance(error, IndexTooLargeError))
        if self.memory is not memory:  # tmpfs was full: all ranks begin again, on disk
            return
        self._look_at = None
        if peers is not None and "peer" in levels and peers_work:
            if peers_idle:
                self._copy_to_peers(run.step)
            else:
                self._look_at = run.step + self._look_steps()
        steps = self.plan.period
        if self.saves <= NUM_MEASURED:
            steps = min(steps, max(self.plan.margin, round(MEASURE_S / self.plan.step_s)))
        self.next_step = run.step + steps
        # No more steps than the interval at the last save are lost: this one is committed by then.
        self._commit_by = max(self._promised, run.step + self.plan.margin) if self.saves > 1 else None
        self._promised = run.step + self.plan.steps
        self.stalls.append(time.perf_counter() - began)

    # -- copies to peers -------------------------------------------------------------------------------------

    def _note_round(self, run: RunLike, succeeded: bool, seconds: float) -> None:
        """The last round is over on every rank."""
        if self._replicating is None:
            return
        assert self._peers is not None and self.memory is not None
        if succeeded:
            self.memory.kept_slot, self._replicated = self._replicating
            self._note_cost("peer", 0.0, seconds)
        elif run.log is not None:
            run.log.say(f"copies to peers failed: {self._peers.error or 'another rank could not store one'}")
        self._replicating = None

    def _copy_to_peers(self, step: int) -> None:
        """The last save, which is of this step, goes to the peers as soon as it is committed."""
        assert self._peers is not None and self.memory is not None
        slot, committed_copy = self.memory.watch_commit()
        self._replicating = slot, (step, self.life)
        self._peers.begin(committed_copy, self._replicated)

    def _start_late_copy(self, run: RunLike) -> None:
        """All ranks, at the same step: a copy was due while the one before was on its way. It starts now, with the
        newest version in memory, if that one has arrived."""
        memory, peers = self.memory, self._peers
        assert memory is not None and peers is not None
        flags = [not peers.busy(), peers.succeeded, not peers.error, memory.newest_step is not None]
        idle, succeeded, works, is_saved, seconds = self._agree_numbers(flags, [peers.seconds])
        self._look_at = None if idle else run.step + self._look_steps()
        if not idle:
            return
        self._note_round(run, bool(succeeded), seconds)
        step = memory.newest_step
        if works and is_saved and step is not None:
            self._copy_to_peers(step)
            self._last_of["peer"] = step

    def _look_steps(self) -> int:
        assert self.plan is not None
        return max(1, min(self.plan.period // RETRY_STEPS, round(LOOK_S / self.plan.step_s)))

    # -- where copies are --------------------------------------------------------------------------------------

    def _prepare(self, run: RunLike, parts: dict[str, Any]) -> None:
        """Before the first save: who writes what, an arena that fits, and the agent."""
        state = agree(run.mesh, lambda: run_state(run, parts))
        tensors, values = flatten(state, coordinate(run.mesh))
        self._divide(run.mesh, tensors)
        assert self.share is not None
        num_bytes, index_bytes = self._sizes(values)
        needs: list[Any] = [(self.host, num_bytes)]
        if run.mesh.world_size > 1:
            needs = [None] * run.mesh.world_size
            dist.all_gather_object(needs, (self.host, num_bytes))
        with_peers = "peer" in self._levels(run.mesh)
        least_slots = 3 if with_peers else 2
        on_this_host = sum(size for host, size in needs if host == self.host)
        for_peers = NUM_SLOTS * max(size for _, size in needs) * self._hosts.count(self.host) if with_peers else 0
        # Where no version was complete, those that were found stay in memory until this first save: the user may want
        # to begin again with the host that lacked.
        for place in memory_places(self.folder):
            self._forget_newer(place, run, run.step)
        run.mesh.barrier()
        self._arenas = self._place(run, least_slots * on_this_host + for_peers)
        # One more, where most of the memory stays free: saves go on while the agent reads a slot for a slow disk.
        spare = room_for(self._arenas, 2 * ((least_slots + 1) * on_this_host + for_peers)) is None
        num_slots = least_slots + (1 if spare else 0)
        (self._arenas / FINISHED).unlink(missing_ok=True)
        (self._arenas / STOP).unlink(missing_ok=True)
        self._hold(self._arenas, run.mesh)
        threads = max(1, min(8, (os.cpu_count() or 1) // max(1, self._hosts.count(self.host))))
        self.memory = MemoryLevel(
            arena_path(self._arenas, run.mesh.rank, run.mesh.world_size),
            run.mesh.device,
            threads=threads,
            num_slots=num_slots,
            least_slots=least_slots,
        )
        if self.memory.open_existing():
            assert self.memory.arena is not None
            found = self.memory.arena.versions()
            if found and found[0].step <= run.step:
                self.memory.safe_slot = found[0].slot
                # Peers may have it: it stays until they have a newer one.
                self.memory.kept_slot = found[0].slot if with_peers else None
        self.memory.fit(num_bytes, index_bytes)
        self._spare_slot = bool(self._agree_numbers([self.memory.num_slots > least_slots], [])[0])
        if with_peers:
            replicas = Replicas(self._arenas, run.mesh.rank, self._hosts)
            self._peers = PeerRounds(replicas, self.settings.levels.peer_gbps)
        run.mesh.barrier()
        if self._is_first_of_host(run.mesh):
            here = {alive_path(self._arenas, r) for r, host in enumerate(self._hosts) if host == self.host}
            for path in {*self._arenas.glob("rank-*.alive")} - here:  # of ranks that are elsewhere now, or not at all
                path.unlink(missing_ok=True)
            self._start_agent(run.mesh)

    def _leave_tmpfs(self, run: RunLike, parts: dict[str, Any]) -> None:
        """It was full before all pages were there, on some rank: all of them begin again, on disk."""
        assert self.memory is not None and self._arenas is not None
        on_disk = self._arenas == host_folder(self.folder.parent, self._disk_base)
        if self._any(on_disk and self.memory.no_room() is not None):
            raise UserError(f"there is no room for copies of the state: {self.memory.no_room() or 'on another rank'}")
        self._replicating = self._look_at = None
        self._full = self.memory.no_room() or "tmpfs is full on another rank"
        path = self.memory.path
        self.memory.close()
        self.memory = None
        path.unlink(missing_ok=True)
        self._prepare(run, parts)
        self.next_step = run.step + 1

    def _place(self, run: RunLike, num_bytes: int) -> Path:
        """A folder in tmpfs; on disk, with one line about it, where tmpfs is too small."""
        folder = host_folder(self.folder.parent)
        kept = (p for p in arena_files(folder) if is_in_use(p, run.mesh.world_size, self._kinds(run.mesh)))
        existing = sum(512 * p.stat().st_blocks for p in kept)

        def look() -> str | None:
            if self._full is not None:
                return self._full
            base = memory_base()
            return room_for(base, num_bytes - existing) if base.is_dir() else f"there is no {base}"

        problem: list[Any] = [look()]
        if run.mesh.world_size > 1:
            problems: list[Any] = [None] * run.mesh.world_size
            dist.all_gather_object(problems, problem[0])
            problem = [problems[self._hosts.index(self.host)]]
        if problem[0] is None:
            return make_host_folder(folder)
        if run.log is not None:
            run.log.say(f"copies in memory go to {self._disk_base} instead: {problem[0]}")
        return make_host_folder(host_folder(self.folder.parent, self._disk_base))

    @property
    def _disk_base(self) -> Path:
        return self.folder / ON_DISK

    def _start_agent(self, mesh: Mesh) -> None:
        assert self._arenas is not None
        if self._agent is not None:
            self._agent.poll()  # one that has ended must not stay as a zombie
        levels = self.settings.levels
        config = AgentConfig(
            checkpoints=str(self.folder),
            host=self.host,
            local_ranks=[r for r, host in enumerate(self._hosts) if host == self.host],
            world_size=mesh.world_size,
            agent_idle=levels.agent_idle,
            keep={"last": self.settings.keep_last, "every": self.settings.keep_every, "best": self.settings.keep_best},
            remote=levels.remote,
            remote_timeout_s=levels.remote_timeout_s,
        )
        self._agent = start_agent(self._arenas, config) or self._agent

    def _divide(self, mesh: Mesh, tensors: Mapping[str, Tensor]) -> None:
        """Every box that several ranks of a host hold is written by one of them."""

        def describe() -> dict[str, tuple[str, tuple[int, ...], Box]]:
            return {n: (dtype_name(n, t.dtype), tuple(t.shape), self._box_of(n, t)) for n, t in tensors.items()}

        mine: dict[str, tuple[str, tuple[int, ...], Box]] = agree(mesh, describe)
        layouts = everyone(mesh, [mine])
        names = {n: (dtype, shape) for some in layouts for n, (dtype, shape, _) in some.items()}
        chosen = share_out(layouts, self._hosts)[mesh.rank]
        boxes = [HeldBox(n, *mine[n][:2], mine[n][2]) for n in mine if n in chosen]
        self.share = Share(lay_out(boxes), sum_of_names(names), self._signature(tensors))

    def _signature(self, tensors: Mapping[str, Tensor]) -> int:
        return hash(tuple((n, t.dtype, tuple(t.shape)) for n, t in tensors.items()))

    def _box_of(self, name: str, t: Tensor) -> Box:
        """The local box; computing that of a DTensor takes a tenth of a millisecond, so it is remembered."""
        key = (t.shape, getattr(t, "placements", None))
        if name not in self._boxes or self._boxes[name][0] != key:
            self._boxes[name] = (key, local_box(t))
        return self._boxes[name][1]

    def _sizes(self, values: Mapping[str, Any]) -> tuple[int, int]:
        assert self.share is not None
        copy = self._copy_of(0, values, ())
        num_bytes = max(copy.num_bytes, 1)
        return num_bytes, len(json.dumps(dump_index(copy))) + 20 * (num_bytes // (1 << 26) + 1) + 4096

    def _copy_of(self, step: int, values: Mapping[str, Any], levels: tuple[str, ...]) -> HeldCopy:
        assert self.share is not None
        return HeldCopy(
            step=step,
            life=self.life,
            rank=self._rank,
            world_size=len(self._hosts),
            host=self.host,
            names_sum=self.share.names_sum,
            boxes=self.share.boxes,
            values=values,
            levels=levels,
        )

    def _save_to_memory(
        self, run: RunLike, parts: dict[str, Any], levels: tuple[str, ...], *, grown: bool = False
    ) -> None:
        """`grown`: the arena had no room for the values of the last save here."""
        assert self.memory is not None and self.share is not None
        state = run_state(run, parts)
        tensors, values = flatten(state, coordinate(run.mesh))
        changed = grown or self._signature(tensors) != self.share.signature
        if self._any(changed):
            # The state has other tensors than before (a layer changed its format): divide anew, with a larger arena
            # where it is needed. All ranks do it, because dividing is a meeting.
            self._divide(run.mesh, tensors)
            self.memory.fit(*self._sizes(values))
            self.memory.wait_touched()
            if self._any(self.memory.no_room() is not None):
                self._leave_tmpfs(run, parts)
                self.memory.touch_now()
        parameters = {f"model.{name}" for name, _ in run.model.named_parameters()}
        copy = self._copy_of(run.step, {**values, LIFE: self.life}, levels)
        held = {b.name for b in copy.boxes}
        self.memory.save(
            copy,
            {n: local_tensor(t) for n, t in tensors.items() if n in held},
            early=lambda name: not name.startswith("optimizer.state.") and name not in parameters,
        )

    def wait_copied(self) -> None:
        if self.memory is not None:
            self.memory.wait_copied()

    # -- intervals -------------------------------------------------------------------------------------------

    def _levels(self, mesh: Mesh) -> tuple[str, ...]:
        with_peers = self.settings.levels.peer != "off" and len(set(self._hosts)) > 1
        some = ["memory", *(["peer"] if with_peers else []), "disk"]
        return tuple([*some, "remote"] if self.settings.levels.remote else some)

    def _note_cost(self, level: str, stall: float, drain: float) -> None:
        means = self._costs[level]
        if stall > 0:
            means[0] = means[0].after(stall)
        if drain > 0:
            means[1] = means[1].after(drain)

    def _replan(self, run: RunLike, elapsed_s: float) -> None:
        """The same on every rank: it follows from numbers that were agreed on."""
        memory = self._costs["memory"]
        stall = max(memory[0].value, 1e-3)
        costs = {"memory": Cost(stall, max(memory[1].value, stall))}
        # A save to disk costs training what memory bandwidth and processors the agent takes: a part of its time.
        for level, share in (("peer", 0.02), ("disk", 0.02), ("remote", 0.02)):
            if level in self._rates:
                drain = self._costs[level][1].value or 10 * costs["memory"].drain_s
                costs[level] = Cost(max(share * drain, stall), drain)
        rates = {level: self._rates[level].per_s for level in costs}
        before = self.plan
        # Without a spare slot every second save needs the one that is going to disk.
        reading = 0.0 if self._spare_slot else 0.5 * costs["disk"].drain_s
        step_s, budget = max(self._step_s.value, 1e-6), self.settings.levels.budget
        self.plan = make_plan(costs, rates, step_s, budget, reading, elapsed_s)
        if run.mesh.is_main and (before is None or before.steps != self.plan.steps):
            self._write_plan()

    def _write_plan(self) -> None:
        from dataclasses import asdict

        assert self.plan is not None
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            partial = self.folder / ".plan.json.partial"
            counts = {"saves": self.saves, "skipped": self.skipped, "peer": self.settings.levels.peer}
            partial.write_text(json.dumps({**asdict(self.plan), **counts}))
            partial.replace(self.folder / ".plan.json")

    def _levels_now(self, step: int, peers_idle: bool) -> tuple[str, ...]:
        assert self.plan is not None
        levels, self._asked = self._asked, None
        if levels is None:
            levels = self.plan.levels_due({level: step - self._last_of.setdefault(level, step) for level in LEVELS})
            if self.saves == 1 and "disk" not in levels:
                levels = (*levels, "disk")  # nothing of this life is on disk yet
        # A copy to peers that cannot start yet stays due.
        self._last_of |= {level: step for level in levels if level != "peer" or peers_idle}
        return levels

    def _new_drains(self, mesh: Mesh) -> tuple[float, float]:
        """Seconds that the agent took since the last look, for (disk, remote)."""
        if self._arenas is None:
            return 0.0, 0.0
        status = read_status(self._arenas)
        found = {"disk": 0.0, "remote": 0.0}
        for row in [] if status is None else status.drains:
            mark = (str(row.get("level")), int(row.get("step", -1)))
            if mark not in self._drains_seen and mark[0] in found:
                self._drains_seen.add(mark)
                found[mark[0]] = float(row.get("seconds", 0.0))
        just_started = self._agent is not None and self._agent.poll() is None
        if self._is_first_of_host(mesh) and not just_started and agent_pid(self._arenas) is None:
            self._start_agent(mesh)  # it was killed, maybe one of an earlier life: a new one goes on where it was
        return found["disk"], found["remote"]

    # -- small things ----------------------------------------------------------------------------------------

    def _find_hosts(self, mesh: Mesh) -> None:
        self._rank = mesh.rank
        if mesh.world_size == 1:
            return
        self._hosts = [""] * mesh.world_size
        dist.all_gather_object(self._hosts, self.host)
        if self._group is None:
            self._group = dist.new_group(backend="gloo")

    def _is_first_of_host(self, mesh: Mesh) -> bool:
        return self._hosts.index(self.host) == mesh.rank

    def _hold(self, folder: Path | None, mesh: Mesh) -> None:
        if folder is None:
            return
        path = alive_path(folder, mesh.rank)
        if self._alive and self._arenas == folder and is_held(path, self._alive[0]):
            return
        self._let_go()
        self._alive = [hold_alive(path)]
        self._arenas = folder

    def _agree_numbers(self, flags: Sequence[bool], numbers: Sequence[float]) -> list[float]:
        """Flags that hold on every rank, then the largest of each number."""
        if self._group is None:
            return [*(float(f) for f in flags), *numbers]
        row = torch.tensor([*(-float(f) for f in flags), *numbers], dtype=torch.float64)
        dist.all_reduce(row, op=dist.ReduceOp.MAX, group=self._group)
        values = row.tolist()
        return [*(-v for v in values[: len(flags)]), *values[len(flags) :]]

    def _any(self, flag: bool) -> bool:
        return not self._agree_numbers([not flag], [])[0]

    def _keep(self) -> Keep:
        return Keep(self.settings.keep_last, self.settings.keep_every, self.settings.keep_best)

    @contextlib.contextmanager
    def _no_drain(self, run: RunLike) -> Any:
        """The agent of this host writes nothing to disk inside."""
        if self._arenas is None or not self._arenas.is_dir() or not self._is_first_of_host(run.mesh):
            yield
            return
        with no_drain(self._arenas, print if run.log is None or not run.mesh.is_main else run.log.say) as ended:
            yield
        if ended:
            self._start_agent(run.mesh)

    def _leave_to_agent(self, run: RunLike, parts: dict[str, Any]) -> bool:
        """Where a save to disk does not fit into preempt_s: to memory, from where the agent takes it to disk."""
        limit = self.settings.preempt_s
        needed = self._costs["disk"][1].value
        if limit is None or self.memory is None or not self._any(needed > 0.5 * limit):
            return False
        self.memory.wait()
        ready = self._agree_numbers([self.memory.writable(), self.memory.committed()], [])
        if not ready[0]:
            return False
        self.memory.settle(everywhere=bool(ready[1]))
        self._save_to_memory(run, parts, ("memory", "disk"))
        self.memory.wait()
        if self._any(not self.memory.committed()):
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
        limit, needed = self.settings.preempt_s, self._costs["disk"][1].value
        if self._warned or limit is None or not needed:
            return
        self._warned = True
        if needed > 0.5 * limit and run.log is not None:
            run.log.say(
                f"preempt_s={limit:g} is short: a save to disk takes about {duration(needed)}; after SIGTERM the last "
                "step goes to memory only, and the agent writes it to disk if the machine lives that long"
            )

    def _drop_old_arenas(self, run: RunLike) -> None:
        """Arenas of an earlier number of ranks, and of peers where there are none: a new version is in memory
        everywhere now."""
        if self._arenas is None or not self._is_first_of_host(run.mesh):
            return
        for path in self._arenas.glob("*.arena"):
            if not is_in_use(path, run.mesh.world_size, self._kinds(run.mesh)):
                path.unlink(missing_ok=True)

    def _kinds(self, mesh: Mesh) -> tuple[str, ...]:
        """The kinds of arenas that this run writes."""
        return ("rank", "replica") if "peer" in self._levels(mesh) else ("rank",)


def share_out(
    layouts: Sequence[Mapping[str, tuple[str, tuple[int, ...], Box]]], hosts: Sequence[str]
) -> list[set[str]]:
    """For each rank the names it writes: a box that several ranks of a host hold goes to the least loaded of them."""
    chosen: list[set[str]] = [set() for _ in layouts]
    load = [0] * len(layouts)
    holders: dict[tuple[str, str, Box], list[int]] = {}
    for rank, layout in enumerate(layouts):
        for name, (_, shape, box) in layout.items():
            if box.size or 0 in shape:  # a tensor without elements belongs to the state, an empty share of one does not
                holders.setdefault((hosts[rank], name, box), []).append(rank)
    for (_, name, box), ranks in sorted(holders.items(), key=lambda item: (-item[0][2].size, item[0][:2])):
        taker = min(ranks, key=lambda r: (load[r], r))
        chosen[taker].add(name)
        load[taker] += box.size
    return chosen
