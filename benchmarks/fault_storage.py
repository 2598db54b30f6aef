"""Storage that fails, and what the checkpoint levels make of it: bench `faults`.

    python -m benchmarks.fault_storage                  all cases, a few minutes; the full disk needs root
    python -m benchmarks.fault_storage --only s3 --no-record

A run of one process with its agent, killed with SIGKILL at the end of every case and resumed; every bit is compared
with an uninterrupted run.

    flips   a byte is changed in every file in turn: arenas (geometry, records, indexes, slots), checkpoints, manifests.
            The run must resume from another copy or refuse the file by name; never load a wrong bit.
    disk    the disk is full (a small tmpfs): training goes on, the last good version stays, and saving goes on when
            there is room again.
    s3      an S3 server (moto's, on loopback) behind a proxy that stops answering, passes 20 kB/s or answers 500:
            no step of training waits for it, the agent names the failure, and uploads go on afterwards. Needs the
            packages moto[server], boto3 and s3fs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.faults import SETTINGS, STEPS, end, fingerprint, fork, make_run, record_case, take_step, warm_up
from shoestring.errors import UserError, as_command
from shoestring.host.arena import Arena
from shoestring.mesh import Mesh
from shoestring.state.checkpoint import step_folders
from shoestring.state.checkpointer import Checkpointer
from shoestring.state.levels.agent import agent_pid, read_status
from shoestring.state.levels.host_folder import arena_files, host_folder, remove_host_folder
from shoestring.state.levels.settings import CheckpointConfig
from shoestring.state.storage import SafeReader


class Story:
    """One run in a folder, told by lives: each trains for a while and is killed."""

    def __init__(self, place: Path, settings: CheckpointConfig = SETTINGS) -> None:
        self.place, self.settings, self.found = place, settings, Counter[str]()
        self.run_folder = place / "run"
        self.lost: list[tuple[int, int]] = []
        (place / "history").write_text("\n".join(self._in_child(self._history)))

    def _in_child(self, action: Callable[[], Any]) -> Any:
        """What the action returns, from a process of its own: this one stays without threads, so that it can fork."""
        target = self.place / "said"
        target.unlink(missing_ok=True)

        def work() -> None:
            target.with_suffix(".partial").write_text(json.dumps(action()))
            target.with_suffix(".partial").rename(target)

        os.waitpid(fork(work), 0)
        return json.loads(target.read_text())

    def _history(self) -> list[str]:
        run = make_run(Mesh(0, 1, torch.device("cpu")))
        torch.manual_seed(7)
        lines = []
        for _ in range(STEPS):
            take_step(run)
            lines.append(fingerprint(run))
        return lines

    def life(self, steps: int, levels: tuple[str, ...] = ("memory", "disk"), hold_s: float = 0.0) -> None:
        """Resume, compare, train so many steps with a save at each, then be killed. Notes the longest step."""
        pid = fork(lambda: self._train(steps, levels, hold_s))
        ready, deadline = self.place / "ready", time.monotonic() + 120
        while not ready.exists() and time.monotonic() < deadline and os.waitpid(pid, os.WNOHANG) == (0, 0):
            time.sleep(0.005)
        end([pid])
        if not ready.exists():
            raise RuntimeError("a life of the run ended before its steps were done")
        told = json.loads(ready.read_text())
        ready.unlink()
        self.found["kills"] += 1
        self.found["corrupt"] += not told["good"]
        self.found["longest_wait_ms"] = max(self.found["longest_wait_ms"], round(1e3 * told["wait_s"]))

    def _train(self, steps: int, levels: tuple[str, ...], hold_s: float) -> None:
        torch.set_num_threads(1)
        run = make_run(Mesh(0, 1, torch.device("cpu")))
        saver = Checkpointer(self.run_folder / "checkpoints", self.settings)
        measured = saver.measured
        assert measured is not None
        if not saver.resume(run, {}):
            torch.manual_seed(7)
        good = self._is_good(run)
        waits = [0.0]
        for _ in range(steps):
            take_step(run)
            saver.save_next(levels)
            began = time.perf_counter()
            saver.after_step(run, {})
            if measured.pace.saves > 1:  # the first ones start the agent and make the arena
                waits.append(time.perf_counter() - began)
            if saver.memory is not None:
                saver.memory.touch_now()
            time.sleep(hold_s)
        assert saver.memory is not None
        saver.memory.wait()
        told = {"good": good, "wait_s": max(waits), "step": run.step}
        (self.place / "ready.partial").write_text(json.dumps(told))
        (self.place / "ready.partial").rename(self.place / "ready")
        time.sleep(100)

    def _is_good(self, run: Any) -> bool:
        return run.step == 0 or fingerprint(run) == (self.place / "history").read_text().splitlines()[run.step - 1]

    def look(self, resume_from: Any = "newest") -> tuple[int, str | None]:
        """(step that a new process resumes from, or -1 and how it refused); counts wrong bits."""

        def resume() -> list[Any]:
            run = make_run(Mesh(0, 1, torch.device("cpu")))
            saver = Checkpointer(self.run_folder / "checkpoints", self.settings, resume_from=resume_from)
            measured = saver.measured
            assert measured is not None
            try:
                saver.resume(run, {})
            except UserError as error:
                return [-1, str(error), True]
            return [run.step, None, self._is_good(run)]

        step, refused, good = self._in_child(resume)
        self.found["corrupt"] += not good
        return step, refused

    def agent_says(self, words: str, seconds: float = 60.0) -> str | None:
        """The agent's first error with these words, waiting for it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            status = read_status(host_folder(self.run_folder))
            for line in [] if status is None else status.errors:
                if words in line:
                    return line
            time.sleep(0.05)
        return None

    def stop_agent(self) -> None:
        pid = agent_pid(host_folder(self.run_folder))
        if pid:
            os.kill(pid, 9)
        remove_host_folder(host_folder(self.run_folder))


# -- a byte in every file ----------------------------------------------------------------------------------------


def flips(place: Path) -> Counter[str]:
    story = Story(place)
    story.life(6, hold_s=0.15)
    time.sleep(1.0)  # the agent writes the newest version
    pid = agent_pid(host_folder(story.run_folder))
    if pid:
        os.kill(pid, 9)
        story.found["kills"] += 1
    memory, checkpoints = host_folder(story.run_folder), story.run_folder / "checkpoints"
    for hidden in (None, checkpoints, memory):  # all copies, those in memory alone, those on disk alone
        aside = place / "aside"
        if hidden is not None:
            shutil.move(hidden, aside)
        _flip_in_turn(story, sorted([*arena_files(memory), *checkpoints.glob("step-*/*")]))
        if hidden is not None:
            shutil.rmtree(hidden, ignore_errors=True)
            shutil.move(aside, hidden)
    story.stop_agent()
    return story.found


def _flip_in_turn(story: Story, files: list[Path]) -> None:
    newest, refused = story.look()
    assert refused is None and newest >= 5, (newest, refused)
    for path in files:
        size = path.stat().st_size
        # An arena: geometry, every record and index, the begin and the middle of every slot. Others: all parts of them.
        places = [5, 4100, 8200, 12300, 16400, size // 3 + 9, size - size // 4, size - (1 << 21)]
        if path.suffix == ".arena":
            arena = Arena.open(path)
            places += [arena.slot_begin(v.slot) + at for v in arena.versions() for at in (0, 40_000)]
            arena.close()
        else:
            places = [0, 9, size // 3, size // 2, size - 2]
        for at in sorted({p for p in places if 0 <= p < size}):
            before = path.read_bytes()[at : at + 1]
            _write_byte(path, at, bytes([before[0] ^ 4]))
            step, refused = story.look()
            named = refused is not None and (path.name in refused or path.parent.name in refused)
            story.found["flipped"] += 1
            story.found["refused"] += refused is not None
            story.found["refused without the name"] += refused is not None and not named
            story.found["an older version"] += refused is None and step < newest
            if refused is not None and not named:
                print(f"  {path.name} byte {at}: {refused}", flush=True)
            _write_byte(path, at, before)


def _write_byte(path: Path, at: int, byte: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(byte)


# -- a full disk -------------------------------------------------------------------------------------------------


def full_disk(place: Path) -> Counter[str]:
    checkpoints = place / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(checkpoints)], capture_output=True)
    if mounted.returncode:
        raise UserError(f"a small tmpfs cannot be mounted ({mounted.stderr.decode().strip()}): this case needs root")
    story = Story(place)
    try:
        story.life(4, hold_s=0.2)
        time.sleep(0.8)
        last = step_folders(checkpoints)[-1]
        junk = checkpoints / "junk"
        with contextlib.suppress(OSError), junk.open("wb") as file:
            while True:
                file.write(bytes(1 << 16))
        story.life(6, hold_s=0.1)
        assert story.agent_says("No space left") is not None, "the agent does not name the full disk"
        SafeReader(last).verify()
        story.found["full disk named"] += 1
        step, refused = story.look()  # memory is newer
        assert refused is None and step > int(last.name[5:]), (step, refused)
        story.stop_agent()
        step, refused = story.look()  # the last good version
        assert refused is None and step >= int(last.name[5:]), (step, refused)
        junk.unlink()
        story.life(4, hold_s=0.2)
        deadline = time.monotonic() + 20
        while step_folders(checkpoints)[-1] == last and time.monotonic() < deadline:
            time.sleep(0.05)
        assert step_folders(checkpoints)[-1] != last, "no version reached the disk after there was room again"
        story.found["went on"] += 1
    finally:
        story.stop_agent()
        subprocess.run(["umount", "-l", str(checkpoints)], capture_output=True)
    return story.found


# -- S3 ----------------------------------------------------------------------------------------------------------


class BadProxy:
    """Passes TCP to a server; or stops answering, passes 20 kB/s, or answers 500."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target, self.mode = target, "pass"
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client, socket.create_connection(self.target) as server:
            threading.Thread(target=self._pump, args=(server, client, False), daemon=True).start()
            self._pump(client, server, True)

    def _pump(self, source: socket.socket, sink: socket.socket, is_request: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(8192):
                if self.mode == "stop":
                    time.sleep(300)
                if self.mode == "error" and is_request:
                    source.sendall(
                        b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                    )
                    source.close()
                    return
                if self.mode == "slow":
                    time.sleep(len(data) / 20e3)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def s3_server() -> Iterator[BadProxy]:
    """A bucket named `runs`, behind the proxy, which the environment of this process points to."""
    absent = [name for name in ("moto", "boto3", "s3fs", "flask") if importlib.util.find_spec(name) is None]
    if absent:
        raise UserError(f"the S3 case needs {', '.join(absent)}: pip install 'moto[server]' boto3 s3fs")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        proxy = BadProxy(("127.0.0.1", port))
        os.environ.update(
            AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b", AWS_DEFAULT_REGION="us-east-1",
            AWS_ENDPOINT_URL=f"http://127.0.0.1:{proxy.port}", FSSPEC_S3_ENDPOINT_URL=f"http://127.0.0.1:{proxy.port}",
        )  # fmt: skip
        import boto3

        boto3.client("s3").create_bucket(Bucket="runs")
        yield proxy
    finally:
        server.kill()
        server.wait()


URL, TIMEOUT_S = "s3://runs/one", 3.0


def bad_s3(place: Path) -> Counter[str]:
    levels = replace(SETTINGS.levels, remote=URL, remote_timeout_s=TIMEOUT_S)
    with s3_server() as proxy:
        story = Story(place, replace(SETTINGS, levels=levels))
        everything = ("memory", "disk", "remote")
        try:
            story.life(4, everything, hold_s=0.3)
            first = _wait_for_remote(0)
            for mode, words in (("stop", "did not end within"), ("error", "could not be uploaded"), ("slow", "within")):
                proxy.mode = mode
                story.life(5, everything, hold_s=0.2)
                assert story.agent_says(words) is not None, f"{mode}: the agent does not name it"
                story.found[f"S3 {mode} named"] += 1
                step, refused = story.look()
                assert refused is None and step > first, (mode, step, refused)
                pid = agent_pid(host_folder(story.run_folder))
                if pid:
                    os.kill(pid, 9)  # the next life starts one without the errors of this case
                    story.found["kills"] += 1
            proxy.mode = "pass"
            story.life(4, everything, hold_s=0.3)
            _wait_for_remote(first)
            # A new machine: neither memory nor disk.
            story.stop_agent()
            shutil.rmtree(story.run_folder)
            step, refused = story.look()
            assert refused is None and step > first, (step, refused)
            story.found["resumed from S3"] += 1
        finally:
            proxy.mode = "pass"
            story.stop_agent()
    return story.found


def _wait_for_remote(more_than: int) -> int:
    """The newest complete step there, once it is above this one. In a process of its own: s3fs starts threads."""
    program = f"from shoestring.state.levels.remote import remote_steps; print(remote_steps({URL!r}, 10)[-1][0])"
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        if done.returncode == 0 and int(done.stdout) > more_than:
            return int(done.stdout)
        time.sleep(0.3)
    raise RuntimeError(f"nothing newer than step {more_than} was uploaded: {done.stderr[-500:]}")


CASES: dict[str, tuple[str, Callable[[Path], Counter[str]]]] = {
    "flips": ("a byte in every file", flips),
    "disk": ("a full disk", full_disk),
    "s3": ("S3 stopped, slow, 500", bad_s3),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--only", choices=list(CASES), nargs="+", default=list(CASES))
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    warm_up()
    corrupt = 0
    for name in options.only:
        case, action = CASES[name]
        place = Path(tempfile.mkdtemp(prefix="shoestring-faults-"))
        began = time.monotonic()
        try:
            found = action(place)
        except UserError as error:
            print(f"{case}: left out: {error}", flush=True)
            continue
        finally:
            shutil.rmtree(place, ignore_errors=True)
        print(f"{case}: {dict(found)}; {time.monotonic() - began:.0f} s", flush=True)
        corrupt += found["corrupt"]
        if not options.no_record:
            record_case(case, {"seed": 0}, found, [])
    if corrupt:
        sys.exit("a resumption had wrong bits")


if __name__ == "__main__":
    as_command(main)
