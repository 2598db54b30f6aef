"""Kills a run at every write of the memory and disk levels in turn, and resumes it. Run by test_levels.py.

    level_kill_points.py FOLDER STRIDE

What counts as a point: erasing a record, every copied tensor (half-way), both halves of index and record, files and
renames of a drain. Children are killed (SIGKILL) at their points 1, 1 + STRIDE, ...; after each kill the run is resumed
in a new process, which must find the very bits of the step it resumes from, and lose no committed version.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from toy_run import checkpointer, fingerprint, history, make_run, step, train

import shoestring.state.levels.agent as agent_module
from shoestring.host.arena import Arena
from shoestring.state.checkpointer import Checkpointer
from shoestring.state.levels import snapshot
from shoestring.state.levels.agent import Agent, AgentConfig
from shoestring.state.levels.host_folder import host_folder
from shoestring.state.levels.place import HostPlace
from shoestring.state.levels.restore import offers_here

base, stride = Path(sys.argv[1]), int(sys.argv[2])
os.environ["SHOESTRING_MEMORY_DIR"] = str(base / "memory")
STEPS = 6
EVENTS = ("os.rename", "os.mkdir", "os.remove", "os.rmdir")


def without_process(self: HostPlace) -> None:
    """The agent's settings, without the process: drains happen here, where they can be killed."""
    assert self.folder is not None
    import json
    from dataclasses import asdict

    config = AgentConfig(str(self.checkpoints), self.members.host, [0], 1, keep={"last": 2})
    (self.folder / "agent.json").write_text(json.dumps(asdict(config)))


HostPlace.start_agent = without_process  # type: ignore[method-assign]


def drain_all(saver: Checkpointer) -> None:
    assert saver.place.folder is not None
    agent = Agent(saver.place.folder)
    config = agent._config()
    assert config is not None
    agent._drain_due(config, everything=True)
    assert not agent.status.errors, agent.status.errors


def kill_at(point: int) -> None:
    seen = [0]

    def count() -> None:
        seen[0] += 1
        if seen[0] == point:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event in EVENTS or (event == "open" and str(args[0]).startswith(str(base))):
            count()

    copy_bytes, erase, commit = snapshot._copy_bytes, Arena.erase, Arena.commit

    def copy_half(source: Any, slot: Any, held: Any, *, non_blocking: bool) -> None:
        slot[held.offset : held.offset + held.num_bytes // 2] = 7
        count()
        copy_bytes(source, slot, held, non_blocking=non_blocking)
        count()

    def erase_and_count(self: Arena, slot: int) -> None:
        count()
        erase(self, slot)
        count()

    class Halves:
        """The arena's memory, in which a write of several bytes can be killed in the middle."""

        def __init__(self, view: memoryview) -> None:
            self.view = view

        def __getitem__(self, key: slice) -> memoryview:
            return self.view[key]

        def __setitem__(self, key: slice, data: bytes) -> None:
            half = len(data) // 2
            self.view[key.start : key.start + half] = data[:half]
            count()
            self.view[key.start + half : key.start + len(data)] = data[half:]
            count()

        def release(self) -> None:
            self.view.release()

    def commit_in_halves(self: Arena, *args: Any) -> None:
        whole, self._view = self._view, Halves(self._view)  # type: ignore[assignment]
        commit(self, *args)
        self._view = whole

    snapshot._copy_bytes = copy_half  # type: ignore[assignment]
    Arena.erase, Arena.commit = erase_and_count, commit_in_halves  # type: ignore[method-assign]
    sys.addaudithook(audit)


def child(action: Any) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            action()
            os._exit(0)
        except BaseException as error:
            import traceback

            traceback.print_exc()
            os._exit(3 if error else 0)
    return os.waitpid(pid, 0)[1]


expected = history(STEPS + 2)
run_folder = base / "run"
progress = base / "progress"  # the newest step whose save was committed, as the killed process wrote it down


def begin(point: int) -> None:
    run, parts = make_run()
    saver = checkpointer(run_folder)
    if not saver.resume(run, parts):
        torch.manual_seed(5)
    kill_at(point)
    while run.step < STEPS:
        train(run, parts, saver, run.step + 1)
        if saver.memory is not None and saver.memory.has_pending:
            progress.write_text(str(run.step))
        if run.step == 4:
            drain_all(saver)
    drain_all(saver)


def look() -> None:
    """In a new process: resume, compare with the history, go on two steps."""
    done = int(progress.read_text() or "0") if progress.exists() else 0
    run, parts = make_run()
    saver = checkpointer(run_folder)
    _, problems = offers_here(host_folder(run_folder), [saver.folder], saver.members.host)
    assert not problems, problems  # whatever has its name is whole
    resumed = saver.resume(run, parts)
    assert resumed or done == 0, done
    assert run.step >= done, (run.step, done)
    if resumed:
        assert fingerprint(run, parts) == expected[run.step], run.step
        for _ in range(2):
            step(run, parts)
        assert fingerprint(run, parts) == expected[run.step], "after two more steps"


kills = 0
while True:
    for place in (run_folder, base / "memory"):
        shutil.rmtree(place, ignore_errors=True)
    progress.unlink(missing_ok=True)
    (base / "memory").mkdir()
    status = child(partial(begin, 1 + kills * stride))
    killed = os.WIFSIGNALED(status)
    assert killed or status == 0, status
    assert child(look) == 0, f"after a kill at point {1 + kills * stride}"
    if not killed:
        break
    kills += 1
    assert agent_module.POLL_S > 0
print(f"kills {kills}")
