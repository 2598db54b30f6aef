"""Checkpointer: a run saved to disk every so many steps, or to memory, peers, disk and remote storage at measured
intervals; and resumed from the newest version that is complete.

It is a StepCheckpointer (train/step.py). Where versions survive is a list of levels (levels/level.py); when they are
saved is `every`, or for checkpoint=auto levels/measured.py.

A checkpoint holds the step, the model (frozen and integer tensors too), the optimizer, the random generators of each
rank, and `state_dict()` of every part of the run (data, objective, hooks, ...).

Two ways lead back. checkpoint=fixed loads the newest folder, and stops where that is damaged or where something else is
newer. checkpoint=auto takes every box of the newest complete version from the nearest copy (levels/restore.py), passes
over what lacks something, and says so.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from shoestring.errors import UserError
from shoestring.state.agreement import agree, on_main
from shoestring.state.checkpoint import (
    damage_of_files,
    fill_state,
    load_checkpoint,
    newest_folder,
    shares_in,
    step_folder,
    step_folders,
    step_of,
)
from shoestring.state.checkpoint_files import sweep
from shoestring.state.levels.copies import InMemory
from shoestring.state.levels.drain import HOSTS
from shoestring.state.levels.events import Event, append_event, rates_from_events, read_events
from shoestring.state.levels.host_folder import ArenaCopy, list_copies, memory_places
from shoestring.state.levels.level import Found, Level, OnDisk, OnRemote, Save
from shoestring.state.levels.measured import MeasuredSaves
from shoestring.state.levels.members import Members
from shoestring.state.levels.place import HostPlace
from shoestring.state.levels.policy import duration
from shoestring.state.levels.restore import (
    ChosenVersion,
    Offer,
    choose,
    fill_tensors,
    folder_copy,
    gather_offers,
    incomplete,
    manifest_of,
)
from shoestring.state.levels.retention import Keep
from shoestring.state.levels.settings import CheckpointConfig
from shoestring.state.levels.snapshot import MemoryLevel
from shoestring.state.levels.version import missing_of
from shoestring.state.run_state import RunLike, put_back, seed_rng, started_anew, state_to_fill
from shoestring.state.storage import SafeReader

ResumeFrom = Literal["newest", "previous"]


@dataclass(frozen=True)
class Restored:
    """What filling the tensors of this rank took."""

    num_bytes: int
    seconds: float


class Checkpointer:
    """`folder` is the run's checkpoints/; every rank makes one.

    Without `settings` it saves into `folder`/step-00000100, ... every `every` steps (0: when asked) and keeps `keep`.
    With the settings of checkpoint=auto it has all levels. `last` is a step to save after in any case. With `seed`, a
    run that starts anew begins with its generators in a known state. `resume_from="previous"` goes on from the version
    before the newest, which is set aside: never without being told.
    """

    def __init__(
        self,
        folder: Path | str,
        settings: CheckpointConfig | None = None,
        *,
        every: int = 0,
        keep: int | Keep = 2,
        last: int | None = None,
        seed: int | None = None,
        resume_from: ResumeFrom = "newest",
    ) -> None:
        if every < 0 or (isinstance(keep, int) and keep < 1):
            raise UserError(f"a checkpointer needs every >= 0 and keep >= 1, got every={every} keep={keep}")
        self.folder = Path(folder).absolute()
        self.every, self.last, self.seed, self.resume_from = every, last, seed, resume_from
        if settings is not None:
            keep = Keep(settings.keep_last, settings.keep_every, settings.keep_best)
        self.members = Members()
        self.place = HostPlace(self.folder, settings or CheckpointConfig(), self.members)
        self.disk = OnDisk(self.folder, Keep(keep) if isinstance(keep, int) else keep, self.place)
        self._memory = InMemory(self.place)
        self.levels: list[Level] = [self._memory, self.disk]
        self.measured: MeasuredSaves | None = None
        if settings is not None:
            self.measured = MeasuredSaves(self.folder, self.place, self._memory)
            self.levels.insert(1, self.measured.peers)
            if settings.levels.remote is not None:
                self.levels.append(OnRemote(self.folder, settings.levels.remote, settings.levels.remote_timeout_s))
        self.restored: Restored | None = None
        self._hooked = False

    @property
    def memory(self) -> MemoryLevel | None:
        """The arena of this rank, once there is one."""
        return self._memory.arena

    # -- what the trainer asks -------------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Whether after_step will wait for a save to disk; saves to memory need no line of metrics before them."""
        return bool(self.every and step % self.every == 0) or step == self.last

    def newest(self) -> Path | None:
        """The newest checkpoint, whatever state it is in, or the file of a newer copy in memory."""
        found = self._newer_in_memory()
        return newest_folder(self.folder) if found is None else found.path

    def after_step(self, run: RunLike, parts: dict[str, Any]) -> None:
        """Called by the trainer after every optimizer step; run.step counts the finished steps."""
        if self.measured is None:
            if self.due(run.step):
                self.save(run, parts)
            return
        pace = self.measured.pace
        pace.step_ended()
        if pace.must_be_committed(run.step):
            self._memory.wait()  # rarely: the save began early enough
        if run.step == self.last:
            self.save(run, parts)
            self.finish(run)
        else:
            self.measured.after_step(run, parts)
        pace.step_begins()

    def save_next(self, levels: Sequence[str] = ("memory",)) -> None:
        """The next step is saved to these levels, whatever the plan says; on every rank."""
        assert self.measured is not None
        self.measured.save_next(levels)

    def save(self, run: RunLike, parts: dict[str, Any]) -> Path:
        """To disk, and wait for it, all ranks together, unless this step is there already. With preempt_s, what does
        not fit into the time is left in memory to the agent."""
        began = time.monotonic()
        path = step_folder(self.folder, run.step)
        if self.disk.saved_step == run.step:
            return path
        if self.measured is not None and run.step != self.last and self.measured.leave_to_agent(run, parts):
            return path
        self._memory.wait()
        self.wait_copied()
        self.disk.begin(Save(run, parts))
        if self.measured is not None:
            self.measured.note_disk(time.monotonic() - began)
        return path

    def wait_copied(self) -> None:
        """Before anything but the optimizer's step changes parameters."""
        self._memory.wait_copied()

    def discard(self, run: RunLike, step: int) -> None:
        """Versions of this step and later ones must not be resumed from: erased in memory, set aside elsewhere."""
        self.members.join(run.mesh)
        for level in self.levels:  # a round that goes on would bring the version back
            level.wait()
        self._barrier(run)
        for level in self.levels:
            level.forget(run, step - 1, left=True)
        self.disk.saved_step = None
        self._barrier(run)

    def finish(self, run: RunLike) -> None:
        """The run has ended and is on disk: the agent may delete the copies in memory and end."""
        self._memory.close()
        if run.mesh.is_main:
            append_event(self.folder, Event("finished", time.time(), run.step, self.members.life))
        run.mesh.barrier()
        self.place.finish()

    def let_go(self) -> None:
        """End without a word to the agent, as a killed process does: what is committed stays in memory."""
        self._memory.close()
        self.place.let_go()

    # -- resuming --------------------------------------------------------------------------------------------

    def resume(self, run: RunLike, parts: dict[str, Any]) -> bool:
        """Fill the run and its parts from the newest version; False where there is none."""
        self.members.join(run.mesh)
        on_main(run.mesh, sweep, self.folder)
        if self.measured is None:
            found = self._resume_folder(run, parts)
        else:
            found = self._resume_version(run, parts, self.measured)
        if not found and self.seed is not None:
            seed_rng(self.seed, run.mesh)
        return found

    def _leave_newer(self, run: RunLike) -> None:
        """What is newer than the version that the run goes on from."""
        left = self.resume_from == "previous"
        for level in self.levels:
            for path in level.forget(run, run.step, left=left):
                if run.log is not None:
                    run.log.say(f"the newer checkpoint {path.name.partition('.')[0]} is set aside as {path}")
        self.resume_from = "newest"  # for a later rollback

    def _barrier(self, run: RunLike) -> None:
        if run.mesh is not None:
            run.mesh.barrier()

    # -- the newest folder -----------------------------------------------------------------------------------

    def _resume_folder(self, run: RunLike, parts: dict[str, Any]) -> bool:
        paths = on_main(run.mesh, self._readable)  # rank 0 decides: all load the same one
        if not paths:
            return False
        if self.resume_from == "newest":
            self._load(paths[-1], run, parts, before=paths[-2] if len(paths) > 1 else None)
            return True
        if len(paths) < 2:
            raise UserError(f"resume_from=previous: {paths[0]} is the only checkpoint; leave resume_from out")
        self._load(paths[-2], run, parts)
        self._leave_newer(run)
        return True

    def _newer_in_memory(self) -> ArenaCopy | None:
        """The newest copy in memory, which a run with checkpoint=auto has left here, where it is newer than the disk's
        newest."""
        copies = [copy for place in memory_places(self.folder) for copy in list_copies(place)[0]]
        on_disk = newest_folder(self.folder)
        newer = (c for c in copies if on_disk is None or c.copy.step > step_of(on_disk))
        return max(newer, key=lambda c: c.copy.step, default=None)

    def _readable(self) -> list[Path]:
        """The checkpoints, oldest first; an error where a newer version is there that only checkpoint=auto reads."""
        if (copy := self._newer_in_memory()) is not None:
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
            saved = agree(run.mesh, lambda: SafeReader(path).manifest)
            state = state_to_fill(run, parts, (*saved.tensors, *saved.values))
            absent = load_checkpoint(path, state, run.mesh)
            put_back(run, parts, state)
        except UserError as error:
            damage = on_main(run.mesh, damage_of_files, path)
            if damage is None:  # sound, and of other settings
                raise
            if before is None:
                remedy = "no other one is there: start a new run, or get this one from a backup"
            else:
                remedy = f"resume_from=previous goes on from {before.name} and sets this one aside"
            raise UserError(f"the checkpoint {path.name} cannot be used: {damage}; {remedy}") from error
        self.disk.saved_step = run.step
        if run.log is not None:
            run.log.say(f"resumed from {path} at step {run.step}{started_anew(absent)}")

    # -- the newest complete version -------------------------------------------------------------------------

    def _resume_version(self, run: RunLike, parts: dict[str, Any], measured: MeasuredSaves) -> bool:
        self.members.life = run.mesh.broadcast_object(f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(4)}")
        peer = self.place.settings.levels.peer
        if peer != "off" and not self.place.with_peers and run.log is not None:
            run.log.say(f"levels.peer={peer} has no effect: all processes are on one host")
        if not self._hooked:
            run.optimizer.register_step_pre_hook(lambda *_: self.wait_copied())
            self._hooked = True
        self.place.hold(next((p for p in self.place.candidates if p.is_dir()), None))
        offers = gather_offers(run.mesh, self.members.host, self._look)
        best = choose(offers)
        fetched = any(level.fetch(run, None if best is None else best.step) for level in self.levels)
        if fetched:
            offers = gather_offers(run.mesh, self.members.host, self._look)
        events = on_main(run.mesh, read_events, self.folder)
        levels, mttf = measured.levels, self.place.settings.levels.mttf_hours
        measured.pace.rates = on_main(
            run.mesh, lambda: rates_from_events(events, levels, run.mesh.world_size, mttf, time.time())
        )
        choice = self._choose(offers)
        if choice is None:
            self._start_anew(run, offers)
            if run.mesh.is_main:
                append_event(self.folder, Event("started", time.time(), 0, self.members.life))
            return False
        source = self._fill(run, parts, choice, "remote" if fetched else None)
        self._leave_newer(run)
        measured.go_back(run.step)
        if run.mesh.is_main:
            append_event(self.folder, Event("resumed", time.time(), run.step, self.members.life, source))
        run.mesh.barrier()
        return True

    def _look(self) -> Found:
        """What this host can read, at all levels."""
        offers: list[Offer] = []
        for level in self.levels:
            some, problems = level.offers()
            offers += some
            for problem in problems:
                print(f"not usable: {problem}", flush=True)
        return offers, []

    def _choose(self, offers: Sequence[Offer]) -> ChosenVersion | None:
        choice = choose(offers)
        if choice is not None and self.resume_from == "previous":
            newest, choice = choice, choose(offers, before=choice.step)
            if choice is None:
                raise UserError(
                    f"resume_from=previous: the version of step {newest.step} is the only one; leave resume_from out"
                )
        if choice is not None and self.last is not None and choice.step > self.last:
            raise UserError(
                f"the run is to end at step {self.last} and has done {choice.step}: give {choice.step} steps or more, "
                "or start a new run"
            )
        return choice

    def _start_anew(self, run: RunLike, offers: Sequence[Offer]) -> None:
        """Where versions were found, each of which lacks something: they are named, and no later run takes them for
        its own. Nor does a run whose only checkpoint is damaged: a folder with its final name was complete once."""

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
        if not offers:
            return
        # Retention would count them and delete newer ones of fewer steps.
        aside = self.disk.forget(run, -1, left=False)
        if run.log is None:
            return
        for line in (*incomplete(offers), *(f"{path} (set aside)" for path in aside)):
            run.log.say(f"passed over: {line}")
        run.log.say("no version is complete: starting anew at step 0")
        run.log.truncate_after(0)

    def _fill(self, run: RunLike, parts: dict[str, Any], choice: ChosenVersion, told: str | None) -> str:
        """The source of most of the bytes, or `told`."""
        began = time.perf_counter()
        used: dict[str, int] = {}
        damaged: list[str] = []

        def fill(tensors: dict[str, Tensor]) -> None:
            filling = time.perf_counter()
            some, broken = fill_tensors(tensors, choice, run.mesh, self.members.host)
            used.update(some)
            damaged.extend(broken)
            self.restored = Restored(sum(used.values()), time.perf_counter() - filling)

        saved = manifest_of(choice)
        state = state_to_fill(run, parts, (*saved.tensors, *saved.values))
        absent = fill_state(state, saved, f"version of step {choice.step}", run.mesh, fill)
        put_back(run, parts, state)
        on_disk = missing_of(o.copy for o in choice.offers if o.source == "disk") is None
        self.disk.saved_step = run.step if on_disk else None
        source = told or " and ".join(sorted(used, key=lambda s: -used[s])) or "disk"
        if run.log is not None:
            for line in (*choice.passed_over, *damaged):
                run.log.say(f"passed over: {line}")
            size, seconds = sum(used.values()) / 2**20, time.perf_counter() - began
            run.log.say(
                f"resumed from {source} at step {run.step}: {size:.1f} MiB in {duration(seconds)}{started_anew(absent)}"
            )
        return source
