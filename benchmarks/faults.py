"""Kill anything at any moment: campaigns against the checkpoint levels.

    python -m benchmarks.faults                         1,000 kills, about 20 minutes on 2 CPU cores
    python -m benchmarks.faults --kills 50 --no-record

`runs`: a run on one, two or four gloo ranks (FSDP2) with its agent is killed with SIGKILL at random instants: a rank,
all ranks, the agent, or both. After some kills a byte of an arena or of a checkpoint is flipped, or the copies in
memory are deleted. The run is then resumed, and every bit of its state is compared with an uninterrupted run.
`writer`: a process that does nothing but save to memory and write to disk is killed every few milliseconds; what it had
committed must be there, bit for bit, and nothing that is half written may count.
`points`: a run is killed inside every write, rename and change of a record in turn (tests/state/levels).

`corrupt` counts resumptions with a wrong bit (there must be none), `lost_steps` how many finished steps were repeated,
`refused` the versions with a flipped byte that were refused by name. Processes are forked from one that has imported
torch. The loss of hosts and failures of storage are in fault_hosts.py and fault_storage.py.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import mmap
import os
import random
import re
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from benchmarks.processes import REPO, child_environment
from benchmarks.results import newest, provenance, record
from shoestring.errors import UserError, as_command
from shoestring.mesh import Mesh, MeshConfig, open_mesh
from shoestring.runlog import RunLog
from shoestring.state.boxes import Box
from shoestring.state.checkpointer import Checkpointer
from shoestring.state.levels.agent import agent_pid
from shoestring.state.levels.drain import drain
from shoestring.state.levels.host_folder import arena_files, arena_path, host_folder, list_copies, remove_host_folder
from shoestring.state.levels.restore import choose, fill_tensors, offers_here
from shoestring.state.levels.retention import Keep, prune_steps
from shoestring.state.levels.settings import CheckpointConfig, LevelsConfig
from shoestring.state.levels.snapshot import MemoryLevel, lay_out
from shoestring.state.levels.version import HeldBox, HeldCopy, sum_of_names

STEPS = 400
WIDTH = 256
LEVELS = LevelsConfig(mttf_hours=1e-4, budget=0.2, agent_idle=20.0)
SETTINGS = CheckpointConfig(checkpoint="auto", keep_last=3, levels=LEVELS)


# -- the run ---------------------------------------------------------------------------------------------------


def make_run(mesh: Mesh) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    if mesh.dp > 1:
        fully_shard(model, mesh=mesh.axis("dp"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return SimpleNamespace(
        trained_only=False, step=0, model=model, optimizer=optimizer, mesh=mesh, log=RunLog(None, quiet=True)
    )


def take_step(run: Any) -> None:
    draw = torch.Generator().manual_seed(1000 * run.step + run.mesh.rank)
    x = torch.randn(4, WIDTH, generator=draw) + torch.rand(())  # the global generator belongs to the state, too
    run.model(x).square().mean().backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.step += 1


def fingerprint(run: Any) -> str:
    """Every bit that this rank holds."""
    tensors = [*run.model.parameters(), *(v for s in run.optimizer.state.values() for v in s.values())]
    digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for t in tensors:
        local = t.to_local() if hasattr(t, "to_local") else t
        digest.update(local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def warm_up() -> None:
    """Before forking: the first optimizer and its first step import hundreds of modules."""
    run = make_run(Mesh(0, 1, torch.device("cpu")))
    take_step(run)
    fingerprint(run)


def rank_main(rank: int, world: int, place: Path, meeting: Path, record_history: bool, previous: bool) -> None:
    """One rank of one life of the run: resume, compare, train until the end or the kill."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    mesh = open_mesh(MeshConfig(dp=world), "cpu")
    run = make_run(mesh)
    if record_history:
        torch.manual_seed(7 + rank)
        lines = []
        for _ in range(STEPS):
            take_step(run)
            lines.append(fingerprint(run))
        (place / f"history-{world}-{rank}").write_text("\n".join(lines))
        return
    run_folder = place / "run"
    saver = Checkpointer(run_folder / "checkpoints", SETTINGS, resume_from="previous" if previous else "newest")
    measured = saver.measured
    assert measured is not None
    report = place / f"resumed-{rank}"
    try:
        resumed = saver.resume(run, {})
    except UserError as error:
        report.write_text(json.dumps({"refused": str(error)}))
        return
    if not resumed:
        torch.manual_seed(7 + rank)
    history = (place / f"history-{world}-{rank}").read_text().splitlines()
    good = run.step == 0 or fingerprint(run) == history[run.step - 1]
    report.write_text(json.dumps({"step": run.step, "good": good}))
    progress = os.open(place / f"progress-{rank}", os.O_RDWR | os.O_CREAT)
    intervals = [int(os.pread(progress, 8, 8) or 0)]  # of the life before: what is in memory was saved under it
    plan = None
    while run.step < STEPS:
        take_step(run)
        os.pwrite(progress, f"{run.step:8d}{max(intervals):8d}".encode(), 0)
        saver.after_step(run, {})
        if measured.pace.plan is not None and measured.pace.plan is not plan:
            plan = measured.pace.plan  # made at every save, and when the costs of the first are known
            intervals = [*intervals[-1:], plan.steps]
    saver.let_go()


# -- the campaign ----------------------------------------------------------------------------------------------


CHILD_LOG = Path(tempfile.gettempdir()) / f"shoestring-faults-{os.getpid()}.log"


def fork(action: Callable[[], None]) -> int:
    """A child that writes what it says to CHILD_LOG."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            log = os.open(CHILD_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            action()
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    return pid


def end(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def flip_a_byte(place: Path, draw: random.Random) -> str:
    """In some file that holds a copy; its name."""
    run = place / "run"
    files = [*arena_files(host_folder(run)), *(run / "checkpoints").glob("step-*/*")]
    files = [p for p in files if p.is_file() and p.stat().st_size]
    if not files:
        return ""
    path = draw.choice(files)
    size = path.stat().st_size
    # In an arena mostly where something is: records and indexes, or the begin of a slot.
    at = draw.randrange(min(size, 20_000)) if path.suffix == ".arena" and draw.random() < 0.5 else draw.randrange(size)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ (1 << draw.randrange(8))]))
    return path.name


class Campaign:
    def __init__(self, place: Path, world: int, seed: int) -> None:
        self.place, self.world, self.draw = place, world, random.Random(f"{seed}/{world}")
        self.found: Counter[str] = Counter()
        self.lost: list[int] = []
        self.intervals: list[int] = []  # in force at each kill
        self.meetings = 0

    def start(self, *, record_history: bool = False, previous: bool = False) -> list[int]:
        self.meetings += 1
        meeting = self.place / f"meeting-{self.world}-{self.meetings}"
        for rank in range(self.world):
            (self.place / f"resumed-{rank}").unlink(missing_ok=True)
        return [
            fork(lambda r=rank: rank_main(r, self.world, self.place, meeting, record_history, previous))  # type: ignore[misc]
            for rank in range(self.world)
        ]

    def reports(self, pids: list[int], seconds: float = 60.0) -> list[dict[str, Any]]:
        """What every rank said about its resumption."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, ValueError):
                return [json.loads((self.place / f"resumed-{r}").read_text()) for r in range(self.world)]
            time.sleep(0.005)
        end(pids)
        said = CHILD_LOG.read_text()[-3000:] if CHILD_LOG.exists() else ""
        raise RuntimeError(f"a life of the run did not begin within {seconds:.0f} s: {said}")

    def wipe(self) -> None:
        remove_host_folder(host_folder(self.place / "run"))
        shutil.rmtree(self.place / "run", ignore_errors=True)
        for file in self.place.glob("progress-*"):
            file.unlink()

    def run(self, kills: int) -> None:
        for pid in self.start(record_history=True):
            os.waitpid(pid, 0)
        self.wipe()
        done, interval, victim, damaged, previous = 0, 0, "", False, False
        while self.found["kills"] < kills:
            pids = self.start(previous=previous)
            reports = self.reports(pids)
            if any("refused" in r for r in reports):
                end(pids)
                self.found["refused"] += 1
                if previous or "only one" in str(reports):
                    self.wipe()
                    done, previous = 0, False
                else:
                    previous = True
                continue
            if not all(r["good"] for r in reports) or len({r["step"] for r in reports}) != 1:
                self.found["corrupt"] += 1
                print(f"CORRUPT: {reports}", flush=True)
            if not damaged and interval:
                self.lost.append(max(0, done - reports[0]["step"]))
                self.intervals.append(interval)
                if self.lost[-1] > interval:
                    self.found["lost more than one interval"] += 1
                    print(f"{self.world} ranks: {self.lost[-1]} steps lost, interval {interval}; {victim}", flush=True)
            self.found["resumptions"] += 1
            damaged = previous = False
            done, interval, victim, finished = self.kill_somebody(pids)
            if finished:
                self.wipe()
                done = 0
                continue
            kind = self.draw.random()
            if kind < 0.08 and flip_a_byte(self.place, self.draw):
                self.found["flipped"] += 1
                damaged = True
            elif kind < 0.11:
                remove_host_folder(host_folder(self.place / "run"))
                self.found["memory deleted"] += 1
                damaged = True
            if self.found["kills"] % 50 == 0:
                print(f"{self.world} ranks: {dict(self.found)}, most lost {max(self.lost, default=0)}", flush=True)

    def kill_somebody(self, pids: list[int]) -> tuple[int, int, str, bool]:
        """Let the run train for a while, then kill.

        Returns (steps done by then, interval in force, who was killed, whether the run ended by itself before).
        """
        time.sleep(self.draw.uniform(0.0, 0.6) ** 2 * 2)
        victim = self.draw.choice(["rank", "all", "agent", "all and agent"])
        agent = agent_pid(host_folder(self.place / "run"))
        if "agent" in victim and agent:
            with contextlib.suppress(ProcessLookupError):
                os.kill(agent, signal.SIGKILL)
                self.found["kills"] += 1
                self.found["agents killed"] += 1
        if victim == "agent":
            time.sleep(self.draw.uniform(0.0, 0.3))
        finished = all(os.waitpid(pid, os.WNOHANG)[0] for pid in pids)
        if not finished:
            first = self.draw.choice(pids) if victim == "rank" else pids[0]
            with contextlib.suppress(ProcessLookupError):
                os.kill(first, signal.SIGKILL)
            if victim == "rank":
                time.sleep(self.draw.uniform(0.0, 0.05))  # the others go on until they notice
            end(pids)
            self.found["kills"] += 1 if victim == "rank" else len(pids)
        files = [self.place / f"progress-{r}" for r in range(self.world)]
        texts = [file.read_text() for file in files if file.exists() and file.stat().st_size]
        done = min((int(text[:8]) for text in texts), default=0)
        return done, max((int(text[8:]) for text in texts), default=0), victim, finished


# -- a writer that is killed every few milliseconds --------------------------------------------------------------


def writer_copy(step: int) -> HeldCopy:
    boxes = (HeldBox("a", "F32", (90, 100), Box((0, 0), (90, 100))), HeldBox("b", "U8", (999,), Box((0,), (999,))))
    names = sum_of_names({b.name: (b.dtype, b.shape) for b in boxes})
    return HeldCopy(step, "0a", 0, 1, "here", names, lay_out(boxes), {"step": step})


def writer_tensors(step: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    return {
        "a": torch.randn(90, 100, generator=draw),
        "b": torch.randint(0, 256, (999,), generator=draw, dtype=torch.uint8),
    }


def writer_main(place: Path, done: mmap.mmap) -> None:
    """Save to memory for ever, and every third version to disk; `done` holds the newest (committed, on disk)."""
    torch.set_num_threads(1)
    memory = MemoryLevel(arena_path(place, 0, 1), torch.device("cpu"), threads=1, num_slots=2)
    if memory.open_existing() and memory.arena is not None:
        found = memory.arena.versions()
        memory.safe_slot = found[0].slot if found else None
    memory.fit(writer_copy(0).num_bytes, 4096)
    memory.touch_now()
    pool = ThreadPoolExecutor(1)
    step = struct.unpack("qq", done[:16])[0]
    while True:
        step += 1
        memory.save(writer_copy(step), writer_tensors(step), early=lambda name: name == "b")
        memory.wait()
        memory.settle(everywhere=memory.committed())
        done[:8] = struct.pack("q", step)
        if step % 3 == 0:
            entries = [e for e in list_copies(place)[0] if e.copy.step == step]
            drain(entries, place / "checkpoints" / f"step-{step:08d}", pool)
            prune_steps(place / "checkpoints", Keep(2), place / "none")
            done[8:16] = struct.pack("q", step)


def kill_writers(place: Path, kills: int, seed: int) -> Counter[str]:
    found: Counter[str] = Counter()
    draw = random.Random(seed)
    (place / "checkpoints").mkdir(parents=True)
    done = mmap.mmap(-1, 16)
    while found["kills"] < kills:
        before = done[:8]
        pid = fork(lambda: writer_main(place, done))
        began = time.monotonic()
        while done[:8] == before and time.monotonic() - began < 20:
            time.sleep(0.0005)
        time.sleep(draw.uniform(0.0, 0.02))
        end([pid])
        found["kills"] += 1
        committed, on_disk = struct.unpack("qq", done[:16])
        problem = writer_problem(place, committed, on_disk)
        if problem is not None:
            found["corrupt"] += 1
            print(f"CORRUPT after {found['kills']} kills: {problem}", flush=True)
        found["committed"] = committed
    return found


def writer_problem(place: Path, committed: int, on_disk: int) -> str | None:
    """What is wrong with what a killed writer left; None where nothing is."""
    offers, problems = offers_here(place, [place / "checkpoints"], "here")
    if problems:
        return problems[0]
    for source, least in (("memory", committed), ("disk", on_disk)):
        choice = choose([o for o in offers if o.source == source])
        if least and (choice is None or choice.step < least):
            return f"{source} has {None if choice is None else choice.step}, and {least} was there"
        if choice is not None:
            got = {name: torch.zeros_like(t) for name, t in writer_tensors(0).items()}
            _, damaged = fill_tensors(got, choice, Mesh(0, 1, torch.device("cpu")), "here")
            wrong = [n for n, t in writer_tensors(choice.step).items() if not torch.equal(got[n], t)]
            if damaged or wrong:
                return f"{source}, step {choice.step}: {damaged or wrong}"
    return None


def kill_at_points(place: Path, stride: int) -> Counter[str]:
    """Inside every write: a script of the tests, which asserts bits and steps after every kill."""
    script = REPO / "tests" / "state" / "levels" / "level_kill_points.py"
    place.mkdir()
    command = [sys.executable, str(script), str(place), str(stride)]
    out = subprocess.run(command, env=child_environment(), capture_output=True, text=True)
    kills = re.search(r"kills (\d+)", out.stdout)
    if out.returncode or kills is None:
        print(out.stdout[-2000:], out.stderr[-2000:], flush=True)
        return Counter({"kills": 0, "corrupt": 1})
    return Counter({"kills": int(kills[1])})


# -- results -----------------------------------------------------------------------------------------------------


def table() -> str:
    lines = newest("faults")
    if not lines:
        return "Not measured yet."
    cells = {(n["case"], n["metric"]): n for n in lines}
    kills = {case: n for (case, metric), n in cells.items() if metric == "kills"}
    wrong = sum(n["value"] for (_, metric), n in cells.items() if metric == "corrupt")
    flipped, refused = (sum(n["quality"].get(key, 0) for n in kills.values()) for key in ("flipped", "refused"))
    lost = {case: n["quality"]["worst"] for (case, metric), n in cells.items() if metric == "lost_steps"}
    repeated = "; ".join(f"{case}: {steps} of {interval}" for case, (steps, interval) in lost.items())
    return (
        f"{sum(n['value'] for n in kills.values()):,.0f} kills in {len(kills)} campaigns: wrong bits were loaded "
        f"{wrong:.0f} times. {flipped} bytes were flipped; {refused} times the version was refused. "
        f"Most steps repeated, of an interval: {repeated}." + hosts_text(cells) + provenance(lines)
    )


def hosts_text(cells: dict[tuple[str, str], dict[str, Any]]) -> str:
    """What fault_hosts.py measured, in a sentence."""
    slow = cells.get(("a host lost", "slowdown"))
    if slow is None:
        return ""
    q = slow["quality"]
    text = (
        f"\n\nTwo hosts in network namespaces, {q['mbit']:,} Mbit/s, {q['share_mb']:g} MB a host: steps took "
        f"{100 * slow['value']:.1f}% longer in spans of 8 s with one copy to the peer ({q['step_ms_without']:g} ms "
        f"without); a lost host came back from its peer in {q['peer_recovery_s']:.2g} s"
    )
    return text + (f", both hosts from S3 in {q['s3_recovery_s']:.2g} s." if "s3_recovery_s" in q else ".")


def record_case(case: str, config: dict[str, Any], found: Counter[str], lost: list[tuple[int, int]]) -> None:
    """`lost`: (steps, interval in force) at every resumption whose copies nobody had damaged."""
    about: dict[str, Any] = {"bench": "faults", "case": case, "config": config}
    counts = {k: int(v) for k, v in found.items()}
    record(**about, metric="kills", unit="kills", samples=[float(counts["kills"])], quality=counts)
    record(**about, metric="corrupt", unit="resumptions", samples=[float(counts.get("corrupt", 0))])
    if lost:
        worst = max(lost, key=lambda pair: pair[0] / pair[1])
        quality = {"most": max(n for n, _ in lost), "interval": statistics.median(i for _, i in lost), "worst": worst}
        record(**about, metric="lost_steps", unit="steps", samples=[float(n) for n, _ in lost], quality=quality)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--only", choices=("runs", "writer", "points"))
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    warm_up()
    wrong = 0
    campaigns: list[tuple[str, Callable[[Path], tuple[Counter[str], list[tuple[int, int]]]]]] = []
    if options.only in (None, "points"):
        campaigns.append(("inside every write", lambda place: (kill_at_points(place / "points", 1), [])))
    if options.only in (None, "writer"):
        some = options.kills // (1 if options.only else 2)
        campaigns.append(("a writer, every few ms", lambda place: (kill_writers(place / "w", some, options.seed), [])))
    if options.only in (None, "runs"):
        each = options.kills // (1 if options.only else 2) // max(1, len(options.ranks))
        for world in options.ranks:
            name = f"{world} rank{'s' if world > 1 else ''} and the agent"
            campaigns.append((name, partial(kill_runs, world, each, options.seed)))
    for case, action in campaigns:
        place = Path(tempfile.mkdtemp(prefix="shoestring-faults-"))
        began = time.monotonic()
        try:
            found, lost = action(place)
        finally:
            shutil.rmtree(place, ignore_errors=True)
        worst = max(lost, key=lambda pair: pair[0] / pair[1], default=(0, 0))
        took = time.monotonic() - began
        print(f"{case}: {dict(found)}, at worst {worst[0]} steps of {worst[1]} lost; {took:.0f} s", flush=True)
        wrong += found["corrupt"] + found["lost more than one interval"]
        if not options.no_record:
            record_case(case, {"seed": options.seed}, found, lost)
    if wrong:
        sys.exit("a resumption had wrong bits, or lost more than one interval")


def kill_runs(world: int, kills: int, seed: int, place: Path) -> tuple[Counter[str], list[tuple[int, int]]]:
    campaign = Campaign(place, world, seed)
    try:
        campaign.run(kills)
    finally:
        campaign.wipe()
    return campaign.found, list(zip(campaign.lost, campaign.intervals, strict=True))


if __name__ == "__main__":
    as_command(main)
