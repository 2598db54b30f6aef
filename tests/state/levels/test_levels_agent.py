"""The agent and what the trainer does about it: stopped with a full disk, killed, ending while a trainer comes back."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from toy_run import checkpointer, fingerprint, history, make_run, train

from shoestring.cli.ckpt_tables import stop_agent
from shoestring.errors import UserError
from shoestring.host.arena import Arena
from shoestring.runlog import RunLog
from shoestring.state.checkpoint import latest_step
from shoestring.state.checkpointer import Checkpointer
from shoestring.state.levels import agent as agent_module
from shoestring.state.levels import drain as drain_module
from shoestring.state.levels.agent import Agent, AgentConfig, no_drain
from shoestring.state.levels.drain import drain, newest_complete_share, share_copy
from shoestring.state.levels.host_folder import (
    AGENT_CONFIG,
    NOT_STOPPED,
    STOP,
    arena_files,
    host_folder,
    host_name,
    make_host_folder,
    trainers_alive,
)
from shoestring.state.levels.place import HostPlace
from shoestring.state.levels.remote import remote_steps
from shoestring.state.levels.version import sum_of_names


@pytest.fixture(autouse=True)
def in_own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    (tmp_path / "memory").mkdir()
    monkeypatch.setenv("SHOESTRING_MEMORY_DIR", str(tmp_path / "memory"))
    started: list[int] = []
    monkeypatch.setattr(HostPlace, "start_agent", lambda self: started.append(self.members.rank))
    yield started


def trained(folder: Path, steps: int) -> Checkpointer:
    run, parts = make_run()
    saver = checkpointer(folder)
    saver.resume(run, parts)
    torch.manual_seed(5)
    train(run, parts, saver, steps)
    return saver


def in_time(agent: Agent) -> None:
    """Run it; one that does not end is an error, not a test that hangs."""
    work = threading.Thread(target=agent.run, daemon=True)
    work.start()
    work.join(60)
    agent.asked_to_end = True
    assert not work.is_alive()


def agent_of(run: Path, remote: str | None = None, idle: float = 1800.0) -> Agent:
    checkpoints = str(run / "checkpoints")
    config = AgentConfig(checkpoints, host_name(), [0], 1, agent_idle=idle, keep={"last": 2}, remote=remote)
    (host_folder(run) / AGENT_CONFIG).write_text(json.dumps(asdict(config)))
    return Agent(host_folder(run))


def test_memory_that_cannot_be_written_is_not_freed_by_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    saver = trained(run, 5)
    saver.let_go()
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").touch()  # nothing can be written below it
    agent = agent_of(run)
    monkeypatch.setattr("shoestring.cli.ckpt_tables.agent_pid", lambda folder: 1)
    work = threading.Thread(target=agent.run, daemon=True)
    work.start()
    try:
        for _ in range(2):  # the second one tries again at once
            with pytest.raises(UserError, match=r"step 5 could not be written.*nothing in memory was freed"):
                stop_agent(run)
        assert arena_files(host_folder(run))
        (run / "checkpoints").unlink()
        assert "wrote what was in memory" in stop_agent(run)
    finally:
        agent.asked_to_end = True
        work.join(60)
    assert not host_folder(run).exists() and latest_step(run / "checkpoints") == 5
    again, parts = make_run()
    assert Checkpointer(run / "checkpoints", every=0).resume(again, parts)
    assert fingerprint(again, parts) == history(5)[5]


HOLDER = """
import os, signal, sys, threading
from pathlib import Path
from shoestring.state.levels import agent
def stand_still(entries, target, pool):
    (target.parent.parent / "stands").touch()
    if sys.argv[2] == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    threading.Event().wait()
agent.drain = stand_still
agent.main()
"""


@pytest.mark.parametrize("kind", ["stopped", "hangs"])
def test_an_agent_that_stands_still_does_not_hold_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_own_memory: list[int], kind: str
) -> None:
    """While it holds drain.lock: it is named, then ended, and the last step is saved."""
    for name, seconds in (("SAY_S", 0.3), ("STOPPED_S", 1.0), ("HUNG_S", 1.5)):
        monkeypatch.setattr(agent_module, name, seconds)
    run, said = tmp_path / "run", list[str]()
    log = RunLog(None, quiet=True)
    log.say = said.append  # type: ignore[method-assign]
    at, parts = make_run(log=log)
    saver = checkpointer(run)
    saver.resume(at, parts)
    train(at, parts, saver, 5)
    agent_of(run)  # writes its settings
    copies = Agent(host_folder(run)).copies()
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(host_folder(run)), kind])
    try:
        ends = time.monotonic() + 60
        while not (run / "stands").exists():
            assert time.monotonic() < ends and holder.poll() is None
            time.sleep(0.01)
        started = len(in_own_memory)
        path = saver.save(at, parts)
        assert holder.wait(20) == -signal.SIGKILL
    finally:
        holder.kill()
        holder.wait()
    who = f"process {holder.pid} (the agent), which holds {host_folder(run) / 'drain.lock'},"
    assert said[-2] == f"waiting for {who} to end its checkpoint" and said[-1].startswith(who)
    assert "it is ended; its copies stay in memory" in said[-1] and len(in_own_memory) == started + 1
    assert Agent(host_folder(run)).copies() == copies and path.name == "step-00000005"
    saver.let_go()
    again, others = make_run()
    assert Checkpointer(run / "checkpoints", every=0).resume(again, others) and again.step == 5


def test_a_process_that_is_not_the_agent_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `ckpt stop` that was suspended in its terminal: not waited for any longer than a moment."""
    monkeypatch.setattr(agent_module, "STOPPED_S", 0.5)
    code = "import fcntl, os, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); "
    code += "f.write(str(os.getpid())); f.flush(); print(flush=True); os.kill(os.getpid(), 19)"
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "drain.lock")], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdout.readline()
        said: list[str] = []
        with no_drain(tmp_path, said.append) as ended:
            assert not ended
        assert said[-1].endswith("is stopped: this run goes on without the lock") and str(holder.pid) in said[-1]
        assert holder.poll() is None
    finally:
        holder.kill()
        holder.wait()


def test_a_damaged_newest_version_does_not_keep_memory_from_being_freed(tmp_path: Path) -> None:
    """It can never be written: the newest that is sound goes to disk instead."""
    run = tmp_path / "run"
    trained(run, 5).let_go()
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    agent = agent_of(run)
    newest = next(c for c in agent.copies() if c.copy.step == 5)
    arena = Arena.open(newest.path)
    view = arena.slot_view(newest.slot)
    view[7] ^= 1
    view.release()
    arena.close()
    (host_folder(run) / STOP).touch()
    in_time(agent)
    assert not host_folder(run).exists() and latest_step(run / "checkpoints") == 4
    assert "damaged" in agent.status.errors[-1] and len(agent.status.errors) == 1
    again, parts = make_run()
    assert Checkpointer(run / "checkpoints", every=0).resume(again, parts)
    assert fingerprint(again, parts) == history(4)[4]


def test_what_is_pruned_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a crash a host writes its share of every version in memory, which may be more than are to be kept."""
    run = tmp_path / "run"
    trained(run, 5).let_go()
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    agent = agent_of(run)
    num_versions = len({c.copy.key for c in agent.copies()})
    written: list[Path] = []
    monkeypatch.setattr(
        agent_module, "drain", lambda entries, target, pool: written.append(target) or drain(entries, target, pool)
    )
    config = replace(agent._config(), world_size=2, keep={"last": 1})
    for _ in range(3):
        agent._drain_due(config, everything=True)
    assert num_versions > 1 and len(written) == num_versions
    assert latest_step(run / "checkpoints") == 5 and len(list((run / "checkpoints").glob("step-*"))) == 1


def test_memory_is_kept_beyond_agent_idle_while_it_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    trained(run, 5).let_go()
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    (run / "checkpoints").touch()
    agent = agent_of(run, idle=0.0)
    looks = 0

    def look(config: AgentConfig) -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            assert arena_files(host_folder(run))
            (run / "checkpoints").unlink()
            agent._failed.clear()  # as if the time until the next try were over

    monkeypatch.setattr(agent, "_upload", look)  # the last thing of every turn
    in_time(agent)
    assert looks == 4 and not host_folder(run).exists() and latest_step(run / "checkpoints") == 5
    assert [e for e in agent.status.errors if "is kept" in e] == agent.status.errors[-1:]


def test_a_stop_without_an_agent_writes_what_is_in_memory(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained(run, 5).let_go()
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    (run / "checkpoints").touch()
    agent_of(run)  # its settings only: it was killed
    with pytest.raises(UserError, match=r"step 5 could not be written.*nothing in memory was freed"):
        stop_agent(run)
    (run / "checkpoints").unlink()
    assert "wrote what was in memory" in stop_agent(run)
    assert not host_folder(run).exists() and latest_step(run / "checkpoints") == 5


def test_a_full_disk_that_has_the_arenas_too_does_not_end_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_host_folder(host_folder(tmp_path / "run"))
    agent = agent_of(tmp_path / "run")
    (agent.folder / STOP).touch()

    def full(self: Path, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    agent._refuse_to_stop()
    assert (agent.folder / NOT_STOPPED).exists() and not (agent.folder / STOP).exists()


def test_an_agent_sweeps_what_it_left_and_not_what_other_hosts_write(tmp_path: Path) -> None:
    make_host_folder(host_folder(tmp_path / "run"))
    agent = agent_of(tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    own, other = (checkpoints / "hosts" / host / ".shoestring-drain-step-00000005" for host in (host_name(), "other"))
    for folder in (own, other, checkpoints / ".shoestring-drain-step-00000005"):
        folder.mkdir(parents=True)
    agent.sweep()
    assert [p.parent.name for p in checkpoints.rglob(".shoestring-drain-*")] == ["other"]


def test_an_agent_of_an_earlier_life_that_is_killed_is_replaced(
    tmp_path: Path, in_own_memory: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoestring.state.levels.place.agent_pid", lambda folder: pid)
    pid: int | None = 1234
    run, parts = make_run()
    saver = checkpointer(tmp_path / "run")
    saver.resume(run, parts)
    train(run, parts, saver, 4)
    assert in_own_memory == [0]  # asked for once; one is there
    pid = None
    train(run, parts, saver, 5)
    saver.let_go()
    assert in_own_memory == [0, 0]


def test_a_trainer_whose_folder_an_ending_agent_has_deleted_is_alive(tmp_path: Path) -> None:
    folder = make_host_folder(host_folder(tmp_path / "run"))
    run, parts = make_run()
    saver = checkpointer(tmp_path / "run")
    saver.resume(run, parts)
    assert trainers_alive(folder) == [True]
    shutil.rmtree(folder)
    train(run, parts, saver, 4)
    assert trainers_alive(folder) == [True]
    saver.let_go()
    assert trainers_alive(folder) == [False]


def test_the_last_state_of_a_run_is_uploaded(tmp_path: Path) -> None:
    """It goes to disk directly, and no version in memory says that it is meant for remote storage."""
    url = f"file://{tmp_path}/far"
    run, parts = make_run()
    saver = checkpointer(tmp_path / "run", last=5)
    saver.resume(run, parts)
    train(run, parts, saver, 5)
    agent_of(tmp_path / "run", url).run()
    assert not host_folder(tmp_path / "run").exists()
    assert [step for step, _ in remote_steps(url, 60)] == [5]


def test_a_step_that_was_written_again_is_uploaded_again(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000005"
    folder.mkdir()
    before = agent_module._folder_id(folder)
    assert agent_module._folder_id(folder) == before
    folder.rename(tmp_path / "step-00000005.set-aside")
    folder.mkdir()
    assert agent_module._folder_id(folder) != before


def test_a_host_keeps_its_share_of_what_is_complete_while_another_is_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_host_folder(host_folder(tmp_path / "run"))
    agent, hosts = agent_of(tmp_path / "run"), tmp_path / "run" / "checkpoints" / "hosts"
    config = agent._config()
    assert config is not None

    def write(host: str, rank: int, step: int) -> None:
        box = {"start": [2 * rank], "stop": [2 * rank + 2]}
        values = {"private@life": "0a", "private@names_sum": sum_of_names({"a": ("F32", (4,))})}
        tensors = {"a": {"dtype": "F32", "shape": [4], "boxes": [box]}}
        (hosts / host / f"step-{step:08d}").mkdir(parents=True)
        manifest = {"step": step, "world_size": 2, "tensors": tensors, "values": values}
        (hosts / host / f"step-{step:08d}" / "host.json").write_text(json.dumps(manifest))

    for step in (10, 20, 30, 40, 50):
        write(host_name(), 0, step)
        if step <= 20:
            write("late", 1, step)
        agent._prune(config, hosts / host_name())
    assert sorted(p.name[-2:] for p in (hosts / host_name()).iterdir()) == ["20", "40", "50"]
    write("late", 1, 50)
    agent._prune(config, hosts / host_name())
    assert sorted(p.name[-2:] for p in (hosts / host_name()).iterdir()) == ["40", "50"]
    monkeypatch.setattr(drain_module, "share_copy", lambda m: read.append(m["step"]) or share_copy(m))
    read: list[int] = []
    assert newest_complete_share(hosts.parent) == 50
    assert read == [50, 50]  # with many hosts the manifests of older steps are many, too
