"""The agent: one process per host and run that outlives the trainer, and takes copies from memory to disk.

    python -m shoestring.state.levels.agent FOLDER          started by the first trainer of a host

It watches the arenas in FOLDER (host_folder.py). A version that is meant for disk is written when every rank of this
host has committed it. When a trainer dies, the newest versions in memory are written too, so that a host that goes down
later has lost nothing more. A version meant for remote storage is uploaded from disk, with deadlines of our own. The
agent ends when the run has finished, when it is told to stop, or when no trainer has come back for `agent_idle`
seconds; it then deletes the arenas, unless a version in them could not be written to disk. It runs in a session of its
own, because torchrun ends the process group of a worker it restarts. No torch here: it starts in a tenth of a second
and takes 20 MB.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from shoestring.errors import UserError
from shoestring.host.arena import MOST_SLOTS, PAGE, lock_file
from shoestring.json_files import read_object
from shoestring.state.checkpoint_files import HOST_MANIFEST, MANIFEST
from shoestring.state.levels.drain import DRAINING, HOSTS, DamagedCopyError, drain, newest_complete_share, target_of
from shoestring.state.levels.host_folder import (
    AGENT_CONFIG,
    AGENT_LOCK,
    AGENT_LOG,
    FINISHED,
    NOT_STOPPED,
    STOP,
    ArenaCopy,
    arena_files,
    kind_of,
    list_copies,
    remove_host_folder,
    trainers_alive,
)
from shoestring.state.levels.retention import Keep, prune_steps

POLL_S = 0.1
DRAIN_LOCK, STATUS = "drain.lock", "agent.status"
RETRY_S = 30.0  # after a drain that failed, or an upload
SAY_S = 5.0  # that the trainer waits for a drain without a word
STOPPED_S, HUNG_S = 20.0, 300.0  # that it waits for a process that is stopped, or that runs and does nothing


@dataclass(frozen=True)
class AgentConfig:
    """What the trainer tells the agent."""

    checkpoints: str
    host: str
    local_ranks: list[int]
    world_size: int
    agent_idle: float = 1800.0
    keep: dict[str, int] = field(default_factory=dict)
    remote: str | None = None
    remote_timeout_s: float = 60.0


@dataclass
class Status:
    """What the agent tells others, in agent.status."""

    pid: int
    drains: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class Agent:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.status = Status(os.getpid())
        self.pool = ThreadPoolExecutor(2)
        self.uploads = ThreadPoolExecutor(1)
        self.uploading: Any = None
        self.remote_done: set[tuple[str, int]] = set()
        self.asked_to_end = False
        self._records: bytes | None = None
        self._copies: list[ArenaCopy] = []
        self._failed: dict[tuple[int, str], float] = {}
        self._done: set[tuple[int, str]] = set()  # on disk, and maybe deleted again because newer ones are there
        self._damaged: set[tuple[int, str]] = set()
        self._kept = False
        self._last_life = time.monotonic()

    def run(self) -> None:
        """Until there is nothing left to do."""
        while True:
            config = self._config()
            if config is None:
                return
            alive = trainers_alive(self.folder)
            if any(alive):
                self._last_life = time.monotonic()
            stopping = (self.folder / STOP).exists() or self.asked_to_end
            finished = (self.folder / FINISHED).exists() and not any(alive)
            crashed = bool(alive) and not all(alive) and not finished
            written = self._drain_due(config, everything=crashed or (stopping and not finished), now=stopping)
            self._upload(config)
            if self.asked_to_end:
                return
            if stopping and not finished and not written:
                self._refuse_to_stop()
                stopping = False
            idle = not any(alive) and time.monotonic() - self._last_life > config.agent_idle
            if idle and not written and not (finished or stopping):
                self._keep(config)
            elif finished or stopping or idle:
                if self.uploading is not None:
                    self._wait_for_upload(config)
                if finished:  # its last state went to disk directly
                    self._upload(config, last=True)
                    if self.uploading is not None:
                        self._wait_for_upload(config)
                if not any(trainers_alive(self.folder)):  # one may have come back meanwhile
                    remove_host_folder(self.folder)
                return
            time.sleep(POLL_S)

    def sweep(self) -> None:
        """Clean up after an agent that was killed: not what agents of other hosts are writing."""
        config = self._config()
        if config is not None:
            checkpoints = Path(config.checkpoints)
            for place in (checkpoints, checkpoints / HOSTS / config.host):
                for leftover in place.glob(f"{DRAINING}*"):
                    shutil.rmtree(leftover, ignore_errors=True)

    def _refuse_to_stop(self) -> None:
        """What is in memory could not be written, and may be the only copy: whoever asked is told."""
        with contextlib.suppress(OSError):  # arenas that did not fit into memory lie on that disk, too
            (self.folder / STOP).write_text(self.why_not())
        (self.folder / STOP).replace(self.folder / NOT_STOPPED)

    def why_not(self) -> str:
        """What kept the last version from being written."""
        return self.status.errors[-1] if self.status.errors else "the disk is in use"

    def _keep(self, config: AgentConfig) -> None:
        """No trainer came back for `agent_idle` seconds, and what is in memory is nowhere else: told once."""
        if not self._kept:
            self._kept = True
            self._note_error(
                f"{self.why_not()}; {self.folder} is kept beyond {config.agent_idle:g} s: it is freed when it can be "
                "written"
            )

    def write_all(self) -> bool:
        """What a stop writes, without a process of its own: whether nothing in memory is left to write."""
        config = self._config()
        if config is None or (self.folder / FINISHED).exists():
            return True
        return self._drain_due(config, everything=True, now=True)

    def _config(self) -> AgentConfig | None:
        try:
            return AgentConfig(**read_object(self.folder / AGENT_CONFIG))
        except (UserError, TypeError):
            return None  # the folder is gone, or of another version of the program

    # -- to disk ---------------------------------------------------------------------------------------------

    def copies(self) -> list[ArenaCopy]:
        """The copies in memory; the indexes are parsed only when a record has changed."""
        records = b"".join(_records(path) for path in arena_files(self.folder))
        if records != self._records:
            self._copies = list_copies(self.folder)[0]
            self._records = records
        return self._copies

    def _drain_due(self, config: AgentConfig, everything: bool, now: bool = False) -> bool:
        """Whether everything that is due is on disk. `now`: also what failed a moment ago."""
        versions: dict[tuple[int, str], list[ArenaCopy]] = defaultdict(list)
        for entry in self.copies():
            if kind_of(entry.path) == "rank":
                versions[entry.copy.key].append(entry)
        ranks = set(config.local_ranks)
        ready = [k for k in sorted(versions, reverse=True) if {e.copy.rank for e in versions[k]} >= ranks]
        if not everything:
            ready = [k for k in ready if "disk" in versions[k][0].copy.levels]
        # Where the whole state is here, the newest says it all; else another host may lack it.
        one_will_do = not everything or len(ranks) == config.world_size
        written = True
        for key in ready:
            if key in self._damaged or (key in self._done and not now):
                pass
            elif not now and time.monotonic() - self._failed.get(key, -RETRY_S) < RETRY_S:
                written = False
            else:
                with lock_file(self.folder / DRAIN_LOCK, fcntl.LOCK_EX) as free:
                    if free:
                        with contextlib.suppress(OSError):  # no room: the trainer asks for the agent then
                            (self.folder / DRAIN_LOCK).write_text(str(os.getpid()))
                    # Not free: the trainer is writing a checkpoint itself.
                    written &= free and self._drain(config, key, versions[key])
            if one_will_do and key not in self._damaged:
                break
        return written

    def _drain(self, config: AgentConfig, key: tuple[int, str], entries: list[ArenaCopy]) -> bool:
        """Whether nothing is left to do: the version is on disk, or can never be written."""
        target = target_of(entries, Path(config.checkpoints), config.host)
        if is_there(target, key[1]):
            self._done.add(key)
            return True
        began = time.monotonic()
        try:
            num_bytes = drain(entries, target, self.pool)
        except (UserError, OSError) as error:
            self._note_error(f"step {key[0]} could not be written to {target}: {error}")
            if isinstance(error, DamagedCopyError):
                self._damaged.add(key)
                return True
            self._failed[key] = time.monotonic()
            return False
        self._done.add(key)
        self._note_drain("disk", key[0], time.monotonic() - began, num_bytes)
        self._prune(config, target.parent)
        return True

    def _prune(self, config: AgentConfig, folder: Path) -> None:
        checkpoints = Path(config.checkpoints)
        # Another host may be late, or its disk full: what is complete stays until something newer is.
        complete = None if folder == checkpoints else newest_complete_share(checkpoints)
        prune_steps(folder, Keep(**config.keep), checkpoints.parent / "metrics.jsonl", also=complete)

    # -- to remote storage -----------------------------------------------------------------------------------

    def _upload(self, config: AgentConfig, last: bool = False) -> None:
        """Start the next upload. `last`: of the newest checkpoint, whatever it was meant for; by one host."""
        if config.remote is None:
            return
        if self.uploading is not None:
            if not self.uploading.done():
                return
            self._finish_upload()
        wanted = {e.copy.step for e in self.copies() if "remote" in e.copy.levels}
        found = drained_folders(Path(config.checkpoints), config.host)
        folders = [p for p in found if _step(p) in wanted]
        if last and 0 in config.local_ranks:
            folders = found[-1:]
        todo = [p for p in folders if _folder_id(p) not in self.remote_done]
        if todo and (last or time.monotonic() - self._failed.get((-1, ""), -RETRY_S) >= RETRY_S):
            from shoestring.state.levels.remote import upload

            self._uploaded, self._uploaded_id = todo[-1], _folder_id(todo[-1])
            self._upload_began = time.monotonic()
            self.uploading = self.uploads.submit(
                upload, todo[-1], config.checkpoints, config.remote, config.remote_timeout_s
            )

    def _finish_upload(self) -> None:
        future, self.uploading = self.uploading, None
        try:
            num_bytes = future.result()
        except Exception as error:  # whatever a storage library raises: the run goes on without it
            self._failed[-1, ""] = time.monotonic()
            self._note_error(f"{self._uploaded.name} could not be uploaded: {error}")
            return
        self.remote_done.add(self._uploaded_id)
        self._note_drain("remote", _step(self._uploaded), time.monotonic() - self._upload_began, num_bytes)

    def _wait_for_upload(self, config: AgentConfig) -> None:
        """The last upload of a finished run, within its deadlines."""
        with contextlib.suppress(Exception):
            self.uploading.result(timeout=10 * config.remote_timeout_s)
        if self.uploading.done():
            self._finish_upload()

    # -- what others read ------------------------------------------------------------------------------------

    def _note_drain(self, level: str, step: int, seconds: float, num_bytes: int) -> None:
        row = {"level": level, "step": step, "seconds": round(seconds, 4), "bytes": num_bytes}
        self.status.drains = [*self.status.drains[-19:], row]
        self.write_status()

    def _note_error(self, text: str) -> None:
        print(time.strftime("%Y-%m-%d %H:%M:%S"), text, flush=True)
        self.status.errors = [*self.status.errors[-19:], text]
        self.write_status()

    def write_status(self) -> None:
        with contextlib.suppress(OSError):  # the folder may be gone
            partial = self.folder / f"{STATUS}.partial"
            partial.write_text(json.dumps(asdict(self.status)))
            partial.replace(self.folder / STATUS)


def _records(path: Path) -> bytes:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(PAGE)
        return file.read(MOST_SLOTS * PAGE)
    return b""


def _folder_id(path: Path) -> tuple[str, int]:
    """A run that went back writes a step again: its folder has the same name, and is another one."""
    with contextlib.suppress(OSError):
        return str(path), path.stat().st_ino
    return str(path), 0


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def is_there(target: Path, life: str) -> bool:
    """Whether this very version is on disk."""
    for name in (MANIFEST, HOST_MANIFEST):
        with contextlib.suppress(OSError, ValueError):
            if json.loads((target / name).read_bytes())["values"].get("private@life") == life:
                return True
    return False


def drained_folders(checkpoints: Path, host: str) -> list[Path]:
    """Complete checkpoints and the shares of this host, oldest first."""
    found = [*checkpoints.glob("step-*"), *(checkpoints / HOSTS / host).glob("step-*")]
    return sorted((p for p in found if p.name[5:].isdigit()), key=_step)


# -- starting, asking, stopping ------------------------------------------------------------------------------


def start_agent(folder: Path, config: AgentConfig) -> subprocess.Popen[bytes] | None:
    """Write the agent's settings, and start it unless it runs."""
    import shoestring

    partial = folder / f"{AGENT_CONFIG}.partial"
    partial.write_text(json.dumps(asdict(config)))
    partial.replace(folder / AGENT_CONFIG)
    if agent_pid(folder) is not None:
        return None
    package = str(Path(shoestring.__file__).resolve().parents[1])
    others = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and Path(p).is_absolute()]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([package, *others])}
    with (folder / AGENT_LOG).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "shoestring.state.levels.agent", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env=env,
            start_new_session=True,
        )


def agent_pid(folder: Path) -> int | None:
    """The process that holds the agent's lock; None where none does."""
    path = folder / AGENT_LOCK
    if not path.exists():
        return None
    with lock_file(path, fcntl.LOCK_SH) as free:
        if free:
            return None
    return _number_in(path) or 0


@contextlib.contextmanager
def no_drain(folder: Path, say: Callable[[str], None]) -> Iterator[bool]:
    """Inside, no copy in `folder` is written to disk; a drain that has begun is waited for while it works.

    An agent that does nothing for STOPPED_S or HUNG_S seconds is ended: its copies stay in memory, and the next one
    writes them. True: that was so, and there is no agent. Another process than the agent (`ckpt stop`) is left alone,
    and not waited for any longer.
    """
    lock, began, said, ended = folder / DRAIN_LOCK, time.monotonic(), False, False
    worked, done_before = began, ""
    while True:
        with lock_file(lock, fcntl.LOCK_EX) as free:
            if free:
                yield ended
                return
        now, agent = time.monotonic(), agent_pid(folder)
        holder = _number_in(lock) or agent or 0
        state, done = _state_of(holder)
        if done != done_before:
            worked, done_before = now, done
        name = f"process {holder}{' (the agent)' if holder == agent else ''}, which holds {lock},"
        if now - began >= SAY_S and not said:
            said = True
            say(f"waiting for {name} to end its checkpoint")
        if now - worked >= (STOPPED_S if ended or state in "Tt" else HUNG_S):
            what = "is stopped" if state in "Tt" else f"has done nothing for {now - worked:.0f} s"
            if holder == agent and not ended:
                say(f"{name} {what}: it is ended; its copies stay in memory, and this run goes on")
                with contextlib.suppress(OSError):
                    os.kill(holder, signal.SIGKILL)
                ended, worked = True, now
            else:
                say(f"{name} {what}: this run goes on without the lock")
                yield ended
                return
        time.sleep(0.02)


def _state_of(pid: int) -> tuple[str, str]:
    """The state of a process ("T" is stopped), and its processor time, which grows while it works."""
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], " ".join(fields[11:13])
    return "?", ""


def _number_in(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text() or "0")
    return None


def read_status(folder: Path) -> Status | None:
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Status(**json.loads((folder / STATUS).read_bytes()))
    return None


def main() -> None:
    folder = Path(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with lock_file(folder / AGENT_LOCK, fcntl.LOCK_EX) as free:
        if not free:
            return
        (folder / AGENT_LOCK).write_text(str(os.getpid()))
        agent = Agent(folder)

        def end(number: int, frame: FrameType | None) -> None:
            agent.asked_to_end = True  # a machine that is taken away: to disk, then out; memory goes with it

        signal.signal(signal.SIGTERM, end)
        agent.sweep()
        agent.write_status()
        agent.run()


if __name__ == "__main__":
    main()
