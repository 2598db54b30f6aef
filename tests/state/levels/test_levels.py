"""The levels at work in one process: saves, resumptions, damage, and SIGKILL at every write."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toy_run import SETTINGS, checkpointer, fingerprint, history, make_run, step, train

from shoestring.errors import UserError
from shoestring.host.arena import Arena, lock_file
from shoestring.runlog import RunLog, read_jsonl
from shoestring.state.checkpoint import latest_step, step_folder
from shoestring.state.checkpointer import Checkpointer
from shoestring.state.levels import remote, snapshot
from shoestring.state.levels.agent import DRAIN_LOCK, agent_pid
from shoestring.state.levels.drain import drain, target_of
from shoestring.state.levels.events import read_events
from shoestring.state.levels.host_folder import arena_files, host_folder, host_name, list_copies
from shoestring.state.levels.place import HostPlace
from shoestring.state.levels.policy import Mean
from shoestring.state.levels.snapshot import MemoryLevel

EXPECTED = history(12)


@pytest.fixture(autouse=True)
def in_own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "memory").mkdir()
    monkeypatch.setenv("SHOESTRING_MEMORY_DIR", str(tmp_path / "memory"))
    yield


@pytest.fixture
def no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostPlace, "start_agent", lambda self: None)


def begin(folder: Path, steps: int, **options: Any) -> Checkpointer:
    run, parts = make_run()
    saver = checkpointer(folder, **options)
    if not saver.resume(run, parts):
        torch.manual_seed(5)
    train(run, parts, saver, steps)
    return saver


def resumed(folder: Path, **options: Any) -> tuple[Any, list[bytes], list[str]]:
    said: list[str] = []
    log = RunLog(None, quiet=True)
    log.say = said.append  # type: ignore[method-assign]
    run, parts = make_run(log=log)
    saver = checkpointer(folder, **options)
    try:
        assert saver.resume(run, parts)
    finally:
        saver.let_go()
    return run, fingerprint(run, parts), said


@pytest.mark.usefixtures("no_agent")
def test_a_run_resumes_from_memory_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "CHUNK_BYTES", 1000)  # so that tensors cross chunks
    begin(tmp_path / "run", 7).let_go()
    alone = replace(SETTINGS, levels=replace(SETTINGS.levels, peer="replica"))
    run, bits, said = resumed(tmp_path / "run", settings=alone)
    assert run.step == 7 and bits == EXPECTED[7]
    assert "resumed from memory at step 7" in said[-1]
    assert said[0] == "levels.peer=replica has no effect: all processes are on one host"


@pytest.mark.usefixtures("no_agent")
def test_the_other_slot_serves_where_one_is_damaged_and_only_when_told(tmp_path: Path) -> None:
    begin(tmp_path / "run", 7).let_go()
    path = arena_files(host_folder(tmp_path / "run"))[0]
    arena = Arena.open(path)
    newest = arena.versions()[0]
    arena.slot_view(newest.slot)[40] ^= 1
    arena.close()
    with pytest.raises(UserError, match=r"step 7 cannot be used: .*damaged.*resume_from=previous"):
        resumed(tmp_path / "run")
    run, bits, _ = resumed(tmp_path / "run", resume_from="previous")
    assert run.step == 6 and bits == EXPECTED[6]
    run, bits, _ = resumed(tmp_path / "run")  # the damaged version is forgotten
    assert run.step == 6 and bits == EXPECTED[6]


@pytest.mark.usefixtures("no_agent")
def test_disk_answers_for_damaged_memory_of_the_same_version(tmp_path: Path) -> None:
    saver = begin(tmp_path / "run", 7)
    run, parts = make_run()
    assert checkpointer(tmp_path / "run2").resume(run, parts) is False
    saver.let_go()
    run, bits, _ = resumed(tmp_path / "run")
    # The same life saves step 7 to disk; then a byte of the copy in memory is changed.
    run, parts = make_run()
    again = checkpointer(tmp_path / "run")
    again.resume(run, parts)
    again.members.life = saver.members.life
    again.save(run, parts)
    again.let_go()
    arena = Arena.open(arena_files(host_folder(tmp_path / "run"))[0])
    arena.slot_view(arena.versions()[0].slot)[40] ^= 1
    arena.close()
    run, bits, said = resumed(tmp_path / "run")
    assert run.step == 7 and bits == EXPECTED[7]
    assert any("damaged" in line for line in said) and "resumed from disk at step 7" in said[-1]
    # A plain checkpointer reads the same folder.
    run, parts = make_run()
    assert Checkpointer(tmp_path / "run" / "checkpoints", every=0).resume(run, parts)
    assert fingerprint(run, parts) == EXPECTED[7]


@pytest.mark.usefixtures("no_agent")
def test_memory_that_is_gone_and_a_state_that_does_not_fit(tmp_path: Path) -> None:
    saver = begin(tmp_path / "run", 5)
    saver.let_go()
    run, parts = make_run(width=34)
    other = checkpointer(tmp_path / "run")
    with pytest.raises(UserError, match=r"does not fit this run: .*different"):
        other.resume(run, parts)
    other.let_go()
    for path in arena_files(host_folder(tmp_path / "run")):
        path.unlink()
    run, parts = make_run()
    assert checkpointer(tmp_path / "run").resume(run, parts) is False


@pytest.mark.usefixtures("no_agent")
def test_a_run_resumes_from_memory_while_the_agent_writes(tmp_path: Path) -> None:
    begin(tmp_path / "run", 5).let_go()
    with lock_file(host_folder(tmp_path / "run") / DRAIN_LOCK, fcntl.LOCK_EX) as free:
        assert free
        assert resumed(tmp_path / "run")[1] == EXPECTED[5]


@pytest.mark.parametrize("host", [host_name(), "lost"])
@pytest.mark.usefixtures("no_agent")
def test_no_copy_of_a_discarded_version_is_resumed(tmp_path: Path, host: str) -> None:
    """On disk as a share of a host, and on remote storage."""
    url = f"file://{tmp_path}/far"
    settings = replace(SETTINGS, levels=replace(SETTINGS.levels, remote=url))
    saver = begin(tmp_path / "run", 4, settings=settings)
    saver.let_go()
    for at in (5, 6):
        run, parts = make_run()
        saver = checkpointer(tmp_path / "run", settings)
        saver.resume(run, parts)
        train(run, parts, saver, at)
        path = saver.save(run, parts)
        saver.let_go()
    remote.upload(path, str(saver.folder), url, 60)
    assert [number for number, _ in remote.remote_steps(url, 60)] == [6]
    (saver.folder / "hosts" / host).mkdir(parents=True)
    path.rename(saver.folder / "hosts" / host / path.name)
    saver.discard(run, 6)
    run, bits, _ = resumed(tmp_path / "run", settings=settings)
    assert run.step == 5 and bits == EXPECTED[5]
    # And told to go back once more: the version that was left is not fetched again.
    remote.upload(step_folder(saver.folder, 5), str(saver.folder), url, 60)
    run, bits, _ = resumed(tmp_path / "run", settings=settings, resume_from="previous")
    assert run.step == 4 and bits == EXPECTED[4]
    assert resumed(tmp_path / "run", settings=settings)[1] == EXPECTED[4]


@pytest.mark.usefixtures("no_agent")
def test_a_damaged_newest_checkpoint_does_not_cost_the_sound_ones(tmp_path: Path) -> None:
    saver = begin(tmp_path / "run", 4)
    for at in (5, 6):
        run, parts = make_run()
        saver.let_go()
        saver = checkpointer(tmp_path / "run")
        saver.resume(run, parts)
        train(run, parts, saver, at)
        path = saver.save(run, parts)
    saver.let_go()
    shutil.rmtree(host_folder(tmp_path / "run"))
    part = next(path.glob("*.safetensors"))
    part.write_bytes(part.read_bytes()[:-1])
    run, parts = make_run()
    saver = checkpointer(tmp_path / "run", replace(SETTINGS, keep_last=1))
    assert saver.resume(run, parts) and run.step == 5
    saver.disk.saved_step = None
    saver.save(run, parts)  # and deletes all but the newest
    saver.let_go()
    assert resumed(tmp_path / "run")[1] == EXPECTED[5]


@pytest.mark.usefixtures("no_agent")
def test_a_run_whose_only_checkpoint_is_damaged_does_not_start_anew(tmp_path: Path) -> None:
    saver = begin(tmp_path / "run", 5, last=5)
    shutil.rmtree(host_folder(tmp_path / "run"))
    manifest = step_folder(saver.folder, 5) / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-20])
    run, parts = make_run()
    with pytest.raises(
        UserError, match=r"manifest\.json is not valid JSON.*no other version is there: start a new run"
    ):
        checkpointer(tmp_path / "run").resume(run, parts)


@pytest.mark.usefixtures("no_agent")
def test_shares_of_hosts_are_not_taken_for_no_checkpoint(tmp_path: Path) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    share = checkpoints / "hosts" / "first" / "step-00000005"
    share.mkdir(parents=True)
    (share / "host.json").write_text("{")
    assert checkpointer(tmp_path / "run").newest() == share  # else the lines of metrics would be deleted
    fixed = Checkpointer(checkpoints, every=0)
    assert fixed.newest() == share
    run, parts = make_run()
    with pytest.raises(
        UserError, match=r"hosts/first/step-00000005, the share of one host.*checkpoint=auto, or delete"
    ):
        fixed.resume(run, parts)
    with pytest.raises(UserError, match=r"step-00000005 cannot be used.*no other version is there"):
        checkpointer(tmp_path / "run").resume(run, parts)
    run.step = 7
    Checkpointer(checkpoints, every=0).save(run, parts)
    assert fixed.resume(run, parts)  # the share is older


@pytest.mark.usefixtures("no_agent")
def test_versions_that_all_lack_something_are_named_before_the_run_starts_anew(tmp_path: Path) -> None:
    folder, checkpoints = tmp_path / "run", tmp_path / "run" / "checkpoints"
    begin(folder, 7).let_go()
    arena = Arena.open(arena_files(host_folder(folder))[0])
    for v in arena.versions():  # as if the first tensor had been on a host that is gone
        arena.commit(v.slot, v.sequence, v.step, {**v.index, "boxes": v.index["boxes"][1:]})
    arena.close()
    copies = list_copies(host_folder(folder))[0]
    newest = [c for c in copies if c.copy.step == 7]
    with ThreadPoolExecutor(1) as pool:
        drain(newest, target_of(newest, checkpoints, "first"), pool)
    log, said = RunLog(folder, quiet=True), []
    log.say = said.append  # type: ignore[method-assign]
    log.log(5, loss=1.0)
    run, parts = make_run(log=log)
    saver = checkpointer(folder)
    assert not saver.resume(run, parts)
    here, lacks = f"memory of {host_name()}", "is not complete: the tensors of some rank are missing"
    assert re.search(rf"passed over: step 7 {lacks} .*\(found in disk of {host_name()} and {here}\)", said[0]), said
    assert re.search(rf"passed over: step 6 {lacks} .*\(found in {here}\)", said[1]), said
    kept = checkpoints / "hosts" / "first" / "step-00000007.set-aside"
    assert said[-2:] == [f"passed over: {kept} (set aside)", "no version is complete: starting anew at step 0"]
    assert kept.is_dir() and log.history == [] == read_jsonl(folder / "metrics.jsonl")
    assert {c.copy.step for c in list_copies(host_folder(folder))[0]} >= {6, 7}  # until the first save
    torch.manual_seed(5)
    train(run, parts, saver, 4)
    saver.let_go()
    assert {c.copy.step for c in list_copies(host_folder(folder))[0]} <= {2, 3, 4}
    run, bits, _ = resumed(folder)
    assert run.step == 4 and bits == EXPECTED[4]


@pytest.mark.usefixtures("no_agent")
def test_a_newer_version_in_memory_is_not_left_behind_by_fixed_checkpoints(tmp_path: Path) -> None:
    begin(tmp_path / "run", 7).let_go()
    fixed = Checkpointer(tmp_path / "run" / "checkpoints", every=0)
    assert fixed.newest() == arena_files(host_folder(tmp_path / "run"))[0]
    run, parts = make_run()
    with pytest.raises(UserError, match=r"step 7 in memory, .*checkpoint=auto, .*`shoestring ckpt stop .*run`, or del"):
        fixed.resume(run, parts)
    newest = [c for c in list_copies(host_folder(tmp_path / "run"))[0] if c.copy.step == 7]
    with ThreadPoolExecutor(1) as pool:
        drain(newest, target_of(newest, fixed.folder, host_name()), pool)
    assert fixed.resume(run, parts) and fingerprint(run, parts) == EXPECTED[7]


@pytest.mark.usefixtures("no_agent")
def test_fixed_checkpoints_that_go_back_leave_no_newer_version_in_memory(tmp_path: Path) -> None:
    folder, checkpoints = tmp_path / "run", tmp_path / "run" / "checkpoints"
    begin(folder, 7).let_go()
    run, parts = make_run()
    run.step = 5
    Checkpointer(checkpoints, every=0).save(run, parts)
    newest = [c for c in list_copies(host_folder(folder))[0] if c.copy.step == 7]
    with ThreadPoolExecutor(1) as pool:
        drain(newest, target_of(newest, checkpoints, host_name()), pool)
    fixed = Checkpointer(checkpoints, every=0, resume_from="previous")
    assert fixed.resume(run, parts) and run.step == 5
    # A NaN soon after: to the same version again. Nor does a later process find what was left.
    fixed.discard(run, 6)
    assert fixed.resume(run, parts) and run.step == 5
    assert resumed(folder)[0].step == 5


@pytest.mark.usefixtures("no_agent")
def test_a_run_in_memory_is_not_cut_to_fewer_steps_than_it_has_done(tmp_path: Path) -> None:
    begin(tmp_path / "run", 7).let_go()
    with pytest.raises(UserError, match=r"to end at step 6 and has done 7: give 7 steps or more"):
        resumed(tmp_path / "run", last=6)
    assert resumed(tmp_path / "run", last=7)[0].step == 7


@pytest.mark.usefixtures("no_agent")
def test_a_dtype_that_no_file_holds_is_one_line(tmp_path: Path) -> None:
    run, parts = make_run()
    saver = checkpointer(tmp_path / "run")
    saver.resume(run, parts)
    parts["counter"].seen = torch.zeros(3, dtype=torch.complex128)
    with pytest.raises(
        UserError, match=r"'parts\.counter\.seen' has dtype torch\.complex128, which safetensors cannot"
    ):
        train(run, parts, saver, 3)
    saver.let_go()


@pytest.mark.usefixtures("no_agent")
def test_values_that_outgrow_the_arena_get_a_larger_one(tmp_path: Path) -> None:
    run, parts = make_run()
    saver = checkpointer(tmp_path / "run")
    saver.resume(run, parts)
    train(run, parts, saver, 4)
    parts["counter"].note["long"] = "x" * 3_000_000
    train(run, parts, saver, 7)  # the first save that does not fit fails
    saver.let_go()
    again, parts = make_run()
    saver = checkpointer(tmp_path / "run")
    assert saver.resume(again, parts) and again.step == 7 and len(parts["counter"].note["long"]) == 3_000_000
    saver.let_go()


@pytest.mark.usefixtures("no_agent")
def test_the_time_of_a_save_to_disk_is_the_same_on_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans follow from it, and ranks with different ones would meet at different steps."""
    run, parts = make_run()
    saver = checkpointer(tmp_path / "run")
    saver.resume(run, parts)
    train(run, parts, saver, 4)
    monkeypatch.setattr(saver.members, "agree", lambda flags, numbers: [*map(float, flags), *(42.0 for _ in numbers)])
    saver.save(run, parts)
    saver.let_go()
    assert saver.measured.pace.costs["disk"][1].value == 42.0


@pytest.mark.usefixtures("no_agent")
def test_full_memory_goes_to_disk_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOESTRING_MEMORY_DIR", str(tmp_path / "absent"))
    said: list[str] = []
    log = RunLog(None, quiet=True)
    log.say = said.append  # type: ignore[method-assign]
    run, parts = make_run(log=log)
    saver = checkpointer(tmp_path / "run")
    saver.resume(run, parts)
    torch.manual_seed(5)
    train(run, parts, saver, 4)
    saver.let_go()
    assert any("go to" in line and "instead" in line for line in said)
    run, bits, _ = resumed(tmp_path / "run")
    assert run.step == 4 and bits == EXPECTED[4]


@pytest.mark.usefixtures("no_agent")
def test_tmpfs_that_fills_up_after_the_first_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    log = RunLog(None, quiet=True)
    log.say = said.append  # type: ignore[method-assign]
    allocate = os.posix_fallocate

    def full(fd: int, begin: int, size: int) -> None:
        if "memory" in str(Path(f"/proc/self/fd/{fd}").readlink()):
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(fd, begin, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    run, parts = make_run(log=log)
    saver = checkpointer(tmp_path / "run")
    saver.resume(run, parts)
    torch.manual_seed(5)
    while run.step < 6:
        step(run, parts)
        saver.save_next()  # the plan would only look at a save that took long
        saver.after_step(run, parts)
        if saver.memory is not None:
            wait(saver.memory._touched)
            saver.memory.wait()
    saver.let_go()
    assert [line for line in said if "go to" in line and "instead" in line and "No space left" in line] == said[:1]
    assert not arena_files(host_folder(tmp_path / "run"))
    assert resumed(tmp_path / "run")[1] == EXPECTED[6]


@pytest.mark.usefixtures("no_agent")
def test_what_peers_left_is_no_room_and_goes_with_the_first_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr("shoestring.state.levels.place.room_for", lambda base, needed: asked.append(needed))
    folder = host_folder(tmp_path / "run")
    for steps, leftovers in ((4, []), (8, []), (12, ["replica-00000-of-00001.arena", "parity-00000-of-00001.arena"])):
        run, parts = make_run()
        saver = checkpointer(tmp_path / "run")
        saver.resume(run, parts)
        for name in leftovers:
            (folder / name).write_bytes(bytes(1 << 20))
        train(run, parts, saver, steps)
        saver.let_go()
    # (room, spare slot) asked for by each start: the arena of the run itself needs no new room, leftovers still do.
    assert asked[0] > 0 > asked[2] == asked[4]
    assert [p.name for p in arena_files(folder)] == ["rank-00000-of-00001.arena"]


@pytest.mark.usefixtures("no_agent")
def test_a_clock_that_jumps_back_a_second_trainer_and_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(tmp_path / "run", 7).let_go()
    monkeypatch.setattr(time, "time_ns", lambda: 10**15)  # weeks after 1970
    monkeypatch.setattr(time, "time", lambda: 1e6)
    saver = begin(tmp_path / "run", 12)
    events = read_events(tmp_path / "run" / "checkpoints")
    assert events[0].life > events[1].life and saver.measured.pace.rates["memory"].observed_s >= 0
    with monkeypatch.context() as patch:  # of the ten seconds that the agent may hold the file
        patch.setattr(snapshot, "time", SimpleNamespace(monotonic=itertools.count(step=20).__next__, sleep=time.sleep))
        with pytest.raises(UserError, match="is held by another trainer of this run: stop it first"):
            resumed(tmp_path / "run")
    saver.let_go()
    # A link in the place of a host's share is not followed.
    (tmp_path / "elsewhere" / "step-00000050").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "hosts").mkdir(parents=True, exist_ok=True)
    (tmp_path / "run" / "checkpoints" / "hosts" / "h").symlink_to(tmp_path / "elsewhere")
    run, bits, _ = resumed(tmp_path / "run")
    assert run.step == 12 and bits == EXPECTED[12]


@pytest.mark.usefixtures("no_agent")
def test_too_little_time_for_a_save_is_said_once_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    log = RunLog(None, quiet=True)
    log.say = said.append  # type: ignore[method-assign]
    run, parts = make_run(log=log)
    saver = checkpointer(tmp_path / "run", replace(SETTINGS, preempt_s=0.5))
    saver.resume(run, parts)
    torch.manual_seed(5)
    train(run, parts, saver, 3)
    saver.measured.pace.costs["disk"][1] = Mean(0.4, 1)  # as if the agent had told it
    train(run, parts, saver, 6)
    assert [line for line in said if "preempt_s=0.5 is short: a save to disk takes about 400 ms" in line] == said[-1:]
    # SIGTERM: the state is in memory, the agent has it to write, and nothing is on disk yet.
    saver.save(run, parts)
    assert "step 6 is in memory, and the agent writes it" in said[-1] and latest_step(saver.folder) is None
    # A copy that could not be committed is not left to the agent: the state goes to disk.
    commit = Arena.commit
    train(run, parts, saver, 7)
    saver.measured.pace.costs["disk"][1] = Mean(0.4, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Arena, "commit", lambda *args: commit(*args[:-1], {"long": "x" * (1 << 24)}))
        saver.save(run, parts)
    assert latest_step(saver.folder) == 7
    saver.let_go()
    assert resumed(tmp_path / "run")[1] == EXPECTED[7]


def test_the_agent_writes_due_versions_and_ends_with_the_run(tmp_path: Path) -> None:
    saver = begin(tmp_path / "run", 8, settings=SETTINGS, last=8)
    folder = host_folder(tmp_path / "run")
    assert latest_step(tmp_path / "run" / "checkpoints") == 8
    assert saver.place.agent is not None
    saver.place.agent.wait()
    assert not folder.exists() and agent_pid(folder) is None
    run, bits, said = resumed(tmp_path / "run")
    assert run.step == 8 and bits == EXPECTED[8] and "resumed from disk" in said[-1]
    assert saver.memory is None


@pytest.mark.parametrize("stride", [79, pytest.param(1, marks=pytest.mark.lab)])
def test_killed_at_every_write(run_ranks: Callable[..., str], tmp_path: Path, stride: int) -> None:
    out = run_ranks(1, Path(__file__).with_name("level_kill_points.py"), str(tmp_path), str(stride))
    kills = re.search(r"kills (\d+)", out)
    assert kills is not None and int(kills[1]) * stride > 150, out


@pytest.mark.usefixtures("no_agent")
def test_no_step_is_more_than_one_interval_ahead_of_what_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commits of several steps' time now and then, and a disk that is so slow that a slot is read all the time."""
    commit, count = MemoryLevel._commit, itertools.count()

    def slow(self: MemoryLevel, *args: Any) -> float:
        time.sleep(max(0.03, 4 * saver.measured.pace.step_s.value) if next(count) % 3 == 0 else 0.0)
        return commit(self, *args)

    monkeypatch.setattr(MemoryLevel, "_commit", slow)
    run, parts = make_run()
    saver = checkpointer(tmp_path / "run")
    saver.resume(run, parts)
    lost: list[tuple[int, int]] = []
    intervals = [0]  # at every save
    skipped = -1
    reader = contextlib.ExitStack()
    while run.step < 150 or (len(lost) <= 50 and run.step < 5000):  # on a busy machine the first saves take longer
        step(run, parts)
        arena = None if saver.memory is None else saver.memory.arena
        if arena is not None and len(intervals) > 3:
            newest = max(v.step for v in arena.versions())
            lost.append((run.step - newest, max(intervals[-2:])))
        saver.after_step(run, parts)
        if saver.measured.pace.plan is not None and len(saver.measured.stalls) >= len(intervals):
            intervals.append(saver.measured.pace.plan.steps)
            if len(intervals) == 4 and arena is not None:
                assert reader.enter_context(arena.reading(arena.versions()[0].slot))
                skipped = saver.measured.pace.skipped
    reader.close()
    saver.let_go()
    assert len(lost) > 50 and max(n for n, _ in lost) > 1 and saver.measured.pace.skipped == skipped
    assert all(n <= interval for n, interval in lost), lost


@pytest.mark.usefixtures("no_agent")
def test_the_first_saves_are_within_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows what a save costs before the first one; the second waits as long as the first allows."""
    clock, copy, begun = [0.0], MemoryLevel._copy, []
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def slow(self: MemoryLevel, *args: Any) -> None:
        begun.append(clock[0])
        clock[0] += 0.1
        copy(self, *args)

    monkeypatch.setattr(MemoryLevel, "_copy", slow)
    run, parts = make_run()
    saver = checkpointer(tmp_path / "run", replace(SETTINGS, levels=replace(SETTINGS.levels, budget=0.2)))
    saver.resume(run, parts)
    over: list[float] = []
    while len(begun) < 3:
        step(run, parts)
        clock[0] += 0.002
        saver.after_step(run, parts)
        if saver.memory is not None:  # what goes on in the background takes no time of this clock
            saver.memory.touch_now()
            saver.memory.wait()
        over += [clock[0]] * (len(begun) - len(over))
    saver.let_go()
    gaps = [after - before for before, after in zip(over, begun[1:], strict=False)]
    assert gaps == [pytest.approx(0.5, abs=0.11)] * 2, gaps  # 0.01 s where the budget is not looked at
