"""What a checkpointer asks of a place where versions survive: disk, remote storage; copies.py has memory and peers.

A version that is meant for disk or remote storage while the run goes on is brought there by the agent (agent.py), which
reads from memory for which levels it is meant. So `begin` of the disk is the save that the run waits for, and remote
storage has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shoestring.errors import UserError
from shoestring.state.agreement import agree, everyone, on_main
from shoestring.state.checkpoint import prune, save_checkpoint, set_aside_from, shares_in, step_folder
from shoestring.state.checkpoint_files import sweep
from shoestring.state.levels import remote
from shoestring.state.levels.drain import HOSTS
from shoestring.state.levels.place import HostPlace
from shoestring.state.levels.restore import Offer, disk_offers
from shoestring.state.levels.retention import Keep
from shoestring.state.levels.version import LIFE
from shoestring.state.run_state import RunLike, run_state

Found = tuple[list[Offer], list[str]]  # what can be read, what is wrong with the rest


@dataclass(frozen=True)
class Save:
    """The state of a run after a step, and the levels that it is meant for."""

    run: RunLike
    parts: dict[str, Any]
    levels: tuple[str, ...] = ("disk",)


class Level(Protocol):
    """A place where versions survive. All ranks call `begin`, `wait` and `forget` together."""

    def begin(self, save: Save) -> None:
        """Start to bring this version there."""
        return

    def busy(self) -> bool:
        """Whether this rank is still at it."""
        return False

    def wait(self) -> None:
        """Until it is not."""
        return

    def offers(self) -> Found:
        """What this host can read from there."""
        return [], []

    def fetch(self, run: RunLike, best: int | None) -> bool:
        """Whether a version newer than that of step `best` was brought to a nearer level."""
        return False

    def forget(self, run: RunLike, step: int, *, left: bool) -> list[Path]:
        """Versions after this step are not resumed from any more; what was set aside. `left`: the run has left one of
        them, which may also be far away, or be being written by the agent."""
        return []


class OnDisk(Level):
    """Folders of checkpoints, and shares of hosts, which may be on a disk of each host."""

    def __init__(self, folder: Path, keep: Keep, place: HostPlace) -> None:
        self.folder, self.keep, self.place = folder, keep, place
        self.saved_step: int | None = None  # the newest step that is on disk for certain

    def begin(self, save: Save) -> None:
        """Write it now; then delete what is too old."""
        run, life = save.run, self.place.members.life
        with self.place.no_drain(run):
            on_main(run.mesh, sweep, self.folder)
            state = agree(run.mesh, lambda: run_state(run, save.parts))
            if life:
                state[LIFE] = life
            # A folder of this name can only stem from a future that this run did not resume from.
            save_checkpoint(step_folder(self.folder, run.step), state, run.mesh, step=run.step, overwrite=True)
            self.saved_step = run.step
            on_main(run.mesh, prune, self.folder, self.keep)

    def offers(self) -> Found:
        return disk_offers(self.folder, self.place.members.host)

    def forget(self, run: RunLike, step: int, *, left: bool) -> list[Path]:
        """Also those that are incomplete or damaged: retention would count them and delete older ones that are sound.
        What the agent is writing now is waited for only where it may be the version that was left."""
        if not left:
            return self._set_aside(run, step)
        with self.place.no_drain(run):
            return self._set_aside(run, step)

    def _set_aside(self, run: RunLike, step: int) -> list[Path]:
        members = self.place.members

        def own() -> list[Path]:
            folders = [self.folder / HOSTS / members.host] if members.is_first_of_host else []
            if members.rank == 0:
                lost = (share for share in shares_in(self.folder) if share.name not in members.hosts)
                folders += [self.folder, *lost]
            return [kept for folder in folders for kept in set_aside_from(folder, step + 1)]

        kept = agree(run.mesh, own)
        return kept if run.mesh is None else everyone(run.mesh, kept)


class OnRemote(Level):
    """Remote storage. Never waited for beyond its deadlines."""

    def __init__(self, folder: Path, url: str, timeout_s: float) -> None:
        self.folder, self.url, self.timeout_s = folder, url, timeout_s

    def fetch(self, run: RunLike, best: int | None) -> bool:
        def download() -> bool:
            try:
                steps = remote.remote_steps(self.url, self.timeout_s)
                if not steps or (best is not None and steps[-1][0] <= best):
                    return False
                for folder in steps[-1][1]:
                    remote.fetch(self.url, folder, self.folder, self.timeout_s)
                return True
            except Exception as error:  # whatever a storage library raises
                if best is None:
                    raise UserError(
                        f"levels.remote={self.url} cannot be read ({error}), and no other copy is here: make it "
                        "reachable, or start a new run"
                    ) from error
                if run.log is not None:
                    run.log.say(f"remote storage cannot be read ({error}); it is left out")
                return False

        return bool(on_main(run.mesh, download))

    def forget(self, run: RunLike, step: int, *, left: bool) -> list[Path]:
        if left:
            try:
                on_main(run.mesh, remote.set_aside_from, self.url, step + 1, self.timeout_s)
            except Exception as error:  # whatever a storage library raises
                if run.log is not None:
                    run.log.say(
                        f"remote storage cannot be changed ({error}): delete its versions from step {step + 1} on"
                    )
        return []
