"""Remote storage: uploads whose manifest comes last, deadlines of our own, and a run that comes back from it."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_run import SETTINGS, checkpointer, fingerprint, history, make_run, train

from shoestring.errors import UserError
from shoestring.report import run_sections
from shoestring.runlog import RunLog
from shoestring.state.checkpoint_files import MANIFEST, sweep
from shoestring.state.levels import remote
from shoestring.state.levels.agent import Agent, read_status
from shoestring.state.levels.events import Event, append_event, level_of, rates_from_events, read_events
from shoestring.state.levels.place import HostPlace
from shoestring.state.levels.retention import Keep
from shoestring.state.levels.settings import CheckpointConfig, LevelsConfig
from shoestring.state.levels.version import sum_of_names


def test_an_operation_that_hangs_is_given_up_in_time() -> None:
    never = threading.Event()
    with pytest.raises(remote.DeadlineError, match="listing did not end within 0 s"):
        remote.within(0.05, "listing", never.wait)
    never.set()
    assert remote.within(600, "a sum", lambda: 1 + 1) == 2
    with pytest.raises(KeyError):
        remote.within(600, "a look", lambda: {}["x"])


def test_a_run_comes_back_from_remote_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOESTRING_MEMORY_DIR", str(tmp_path))
    monkeypatch.setattr(HostPlace, "start_agent", lambda self: None)
    url = f"file://{tmp_path}/far"
    run, parts = make_run()
    saver = checkpointer(tmp_path / "run")
    saver.resume(run, parts)
    torch.manual_seed(5)
    train(run, parts, saver, 4)
    path = saver.save(run, parts)
    saver.let_go()
    assert remote.remote_steps(url, 10) == []
    sent: list[str] = []
    connect = remote.connect

    def watched(*args: Any) -> Any:
        fs, base = connect(*args)
        put = fs.put_file
        monkeypatch.setattr(fs, "put_file", lambda a, b: (sent.append(Path(a).name), put(a, b)))
        return fs, base

    monkeypatch.setattr(remote, "connect", watched)
    assert remote.upload(path, str(saver.folder), url, 10) > 1000
    assert sent[-1] == MANIFEST and len(sent) == 2
    assert [step for step, _ in remote.remote_steps(url, 10)] == [4]
    # Another machine: neither memory nor disk.
    settings = CheckpointConfig(checkpoint="auto", levels=LevelsConfig(remote=url))
    run, parts = make_run()
    other = checkpointer(tmp_path / "elsewhere", settings)
    assert other.resume(run, parts) and fingerprint(run, parts) == history(4)[4]
    other.let_go()
    events = read_events(other.folder)
    assert [e.source for e in events] == ["remote"]
    (tmp_path / "elsewhere" / "metrics.jsonl").touch()
    assert any("remote" in section.html() for section in run_sections(tmp_path / "elsewhere"))
    # A manifest that was changed on the way is refused.
    manifest = tmp_path / "far" / "step-00000004" / MANIFEST
    manifest.write_bytes(manifest.read_bytes().replace(b'"step": 4', b'"step": 5'))
    run, parts = make_run()
    with pytest.raises(UserError, match="damaged"):
        checkpointer(tmp_path / "third", settings).resume(run, parts)
    assert not list((tmp_path / "third" / "checkpoints").iterdir())  # nothing half fetched stays
    (tmp_path / "third" / "checkpoints" / ".shoestring-fetch-step-00000002").mkdir()  # of a process that was killed
    sweep(tmp_path / "third" / "checkpoints")
    assert not list((tmp_path / "third" / "checkpoints").iterdir())
    assert SETTINGS.keep_last == 3
    # Shares of two hosts are a checkpoint when both are there.
    values = {"private@life": "0a", "private@names_sum": sum_of_names({"a": ("F32", (4,))})}
    for number in range(2):
        folder = tmp_path / "far" / "hosts" / f"h{number}" / "step-00000009"
        folder.mkdir(parents=True)
        box = {"start": [2 * number], "stop": [2 * number + 2]}
        tensors = {"a": {"dtype": "F32", "shape": [4], "boxes": [box]}}
        (folder / "host.json").write_text(
            json.dumps({"step": 9, "world_size": 2, "tensors": tensors, "values": values})
        )
        both = (9, ("hosts/h0/step-00000009", "hosts/h1/step-00000009"))
        assert remote.remote_steps(url, 10)[-1] == (both if number else (4, ("step-00000004",)))
    # Of two lives of the run they are none.
    share = tmp_path / "far" / "hosts" / "h1" / "step-00000009" / "host.json"
    share.write_text(share.read_text().replace('"0a"', '"0b"'))
    assert remote.remote_steps(url, 10)[-1] == (4, ("step-00000004",))


def test_changed_credentials_and_an_agent_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOESTRING_MEMORY_DIR", str(tmp_path))
    monkeypatch.setattr(HostPlace, "start_agent", lambda self: None)
    said: list[str] = []
    log = RunLog(None, quiet=True)
    log.say = said.append  # type: ignore[method-assign]

    def refuse(url: str, timeout_s: float) -> Any:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(remote, "connect", refuse)
    settings = CheckpointConfig(checkpoint="auto", levels=LevelsConfig(remote="s3://bucket/run"))
    run, parts = make_run(log=log)
    with pytest.raises(UserError, match=r"s3://bucket/run cannot be read \(Access Denied\), and no other copy"):
        checkpointer(tmp_path / "run", settings).resume(run, parts)
    run, parts = make_run(log=log)
    saver = checkpointer(tmp_path / "run")
    saver.resume(run, parts)
    train(run, parts, saver, 4)
    saver.let_go()
    other = checkpointer(tmp_path / "run", settings)
    assert other.resume(run, parts) and run.step == 4
    other.let_go()
    assert any("remote storage cannot be read (Access Denied); it is left out" in line for line in said)
    # The settings of an agent that knows more than this one: it ends, and touches nothing.
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "agent.json").write_text(json.dumps({"checkpoints": "x", "host": "h", "of_later": 1}))
    (tmp_path / "agent" / "agent.status").write_text(json.dumps({"pid": 1, "of_later": 1}))
    Agent(tmp_path / "agent").run()
    assert read_status(tmp_path / "agent") is None and (tmp_path / "agent" / "agent.json").exists()


def test_failures_are_counted_by_the_level_that_answered(tmp_path: Path) -> None:
    for event in (
        Event("started", 0.0, 0, "a"),
        Event("resumed", 3600.0, 10, "b", "memory"),
        Event("resumed", 7200.0, 20, "c", "memory and disk"),
        Event("finished", 9000.0, 30, "c"),
        Event("resumed", 9999.0, 30, "d", "disk"),  # made longer: no failure
    ):
        append_event(tmp_path, event)
        (tmp_path / "events.jsonl").open("a").write('{"kind": "sta')  # then the disk was full
    (tmp_path / "events.jsonl").open("a").write('rted"}\n' + json.dumps({"kind": 3}) + "\n")
    events = read_events(tmp_path)
    rates = rates_from_events(events, ("memory", "disk"), 8, None, now=10000.0)
    assert len(events) == 5 and (rates["memory"].events, rates["disk"].events) == (1, 1)
    assert rates["memory"].observed_s == pytest.approx(9000.0 + 1.0)
    append_event(tmp_path / "events.jsonl", Event("started", 0.0, 0, "a"))  # not a folder: the run goes on without it
    whole = (tmp_path / "events.jsonl").read_bytes()
    (tmp_path / "events.jsonl").write_bytes(whole + json.dumps(asdict(events[4])).encode())  # no new line behind it
    append_event(tmp_path, Event("finished", 10001.0, 31, "d"))
    assert [event.kind for event in read_events(tmp_path)[5:]] == ["resumed", "finished"]
    assert level_of("peer memory and memory") == "peer" and level_of(None) == "disk"
    assert Keep(2, 10, 1).kept([5, 10, 15, 20, 25], {5: 3.0, 14: 1.0, 24: 2.0}) == {10, 15, 20, 25}
