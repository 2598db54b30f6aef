"""What saving a training state costs, and how fast it comes back: ours against torch.save and DCP, in one run.

    python -m benchmarks.checkpoint                 about 5 minutes on an H200 with 128 GiB of memory
    python -m benchmarks.checkpoint --sizes 1b      one size; --measure saves, sweep, restore, disk: parts of it
    python -m benchmarks.checkpoint --sizes tiny --device cpu

Real training steps of a Llama-shaped decoder (bf16 compute, fp32 masters, fused AdamW); the state is masters and both
moments, 12 bytes a parameter. For every method: `stall_ms`, how long the call that saves keeps the training thread (the
GPU is idle when it begins), and `lost_step_time`, how much longer the steps from the call until the save is done took
than as many steps without a save, as a share of one minute, since one save a minute is the promise. Ours commits to
memory that outlives the process, and once more with the agent writing to disk behind it. Peers write to the same tmpfs
(`--peers disk`: to local disk), so that methods are compared and not disks; DCP writes with eight threads, which is
several times as fast as its default of one. `restore_gbps`: a new process fills the
same state on the GPU from memory, every chunk verified, and its bits are compared. The sweep repeats ours with shorter
and shorter steps, down to a quarter of the time that PCIe needs for the state (shorter rows at the end).

Every size runs in a process of its own; a method that fails or does not fit is reported, not hidden. Where /dev/shm is
too small for two copies of the state, a tmpfs is mounted (as root), or else the model gets fewer layers.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from benchmarks.results import markdown, newest, provenance, record
from shoestring.errors import as_command
from shoestring.host.arena import room_for
from shoestring.host.checksums import ALGORITHM
from shoestring.mesh import Mesh
from shoestring.model import Decoder, ModelSpec
from shoestring.model.parallel import ParallelConfig, init_weights, materialize, parallelize
from shoestring.runlog import RunLog
from shoestring.state.checkpointer import Checkpointer
from shoestring.state.levels.agent import read_status
from shoestring.state.levels.host_folder import host_folder, memory_base, remove_host_folder
from shoestring.state.levels.settings import CheckpointConfig, LevelsConfig
from shoestring.state.optimizer import init_state
from shoestring.state.run_state import flatten, run_state
from shoestring.train.objectives import CrossEntropy
from shoestring.train.optim import adamw
from shoestring.train.step import Micro, Run

PCIE = 55e9  # bytes a second each way, measured on the H200 host (docs/design.md)
SAVE_EVERY_S = 60.0  # what lost_step_time refers to
DISK_S = 25.0  # a save to disk may take so long; it is left out where less is left
HUGE = "SHOESTRING_BENCH_HUGE"  # set where the copies are in a tmpfs with huge pages that was made for this run
FLUSH_S = 6.0
DCP_THREADS = 8  # that write: its default of one thread is several times slower
CONTEXT = 2048


def llama(d_model: int, num_layers: int, num_heads: int, num_kv_heads: int, d_ff: int, context: int) -> ModelSpec:
    return ModelSpec(
        vocab_size=32000, d_model=d_model, num_layers=num_layers, num_heads=num_heads, num_kv_heads=num_kv_heads,
        head_dim=d_model // num_heads, d_ff=d_ff, max_positions=context, tied=True,
    )  # fmt: skip


@dataclass(frozen=True)
class Size:
    spec: ModelSpec
    rows: int  # of a step
    micro: int
    peers: tuple[str, ...]


ALL = ("DCP sync", "DCP async, pinned", "torch.save", "DCP async, thread", "DCP async, process")  # the nearest first
PARTS = ("saves", "sweep", "restore", "disk")
SIZES = {
    "1b": Size(llama(2048, 16, 32, 8, 8192, CONTEXT), rows=16, micro=8, peers=ALL),
    "3b": Size(llama(3072, 28, 24, 8, 8192, CONTEXT), rows=16, micro=4, peers=("DCP sync", "DCP async, pinned")),
    "tiny": Size(llama(64, 2, 4, 2, 128, 32), rows=4, micro=2, peers=ALL),
}


class Job:
    """A run that trains for as many steps as it is told."""

    def __init__(self, size: Size, device: torch.device) -> None:
        self.size, self.device = size, device
        with torch.device("meta"):
            model = Decoder(size.spec)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        mesh = Mesh(0, 1, device)
        parallelize(model, mesh, ParallelConfig(compute_dtype=dtype))
        materialize(model, device)
        init_weights(model, 0)
        self.run = Run(model, adamw(model, lr=1e-4), mesh, RunLog(None, quiet=True))
        self.objective = CrossEntropy()
        draw = torch.Generator().manual_seed(0)
        context = size.spec.max_positions
        rows = torch.randint(0, size.spec.vocab_size, (size.rows, context + 1), generator=draw)
        index = torch.zeros((size.micro, context), dtype=torch.int64)
        self.micros = [
            Micro(r[:, :-1].contiguous(), r[:, 1:].contiguous(), index).to(device) for r in rows.split(size.micro)
        ]
        self.num_micros = len(self.micros)

    def step(self) -> None:
        micros = [self.micros[i % len(self.micros)] for i in range(self.num_micros)]
        total = float(sum(m.num_counted for m in micros))
        for micro in micros:
            (self.objective(self.run.model, micro) / total).backward()
        self.run.optimizer.step()
        self.run.optimizer.zero_grad()
        self.run.step += 1

    def finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def timed(self, steps: int) -> float:
        """Seconds a step, over so many."""
        self.finish()
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.finish()
        return (time.perf_counter() - began) / steps

    def fingerprint(self) -> int:
        """A sum over all bits of the fp32 state."""
        some = [t for t in self.tensors().values() if t.dtype == torch.float32]
        return sum(int(t.contiguous().view(torch.int32).sum(dtype=torch.int64)) for t in some) % 2**62

    def tensors(self) -> dict[str, Tensor]:
        found, _ = flatten(run_state(self.run, {}))
        return found


@dataclass
class Save:
    """A method: `call` starts a save, `before_update` is what must come before the next optimizer step, `done` says
    whether the background is finished, `wait` ends it."""

    call: Callable[[], None]
    done: Callable[[], bool] = lambda: True
    wait: Callable[[], None] = lambda: None
    before_update: Callable[[], None] = lambda: None


def measure(job: Job, save: Save, step_s: float, repeats: int, most_s: float) -> dict[str, list[float]]:
    """Stalls and lost seconds of `repeats` saves: of the first, and of the others where there are any."""
    found: dict[str, list[float]] = {"stall_s": [], "lost_s": [], "steps": [], "first_stall_s": [], "first_lost_s": []}
    for repeat in range(repeats):
        job.finish()
        began = time.perf_counter()
        save.call()
        stall = time.perf_counter() - began
        steps = 0
        hook = job.run.optimizer.register_step_pre_hook(lambda *_: save.before_update())
        while steps < 4 or (not save.done() and time.perf_counter() - began < most_s):
            job.step()
            steps += 1
            if steps % 2 == 0:  # Python must not run ahead of the GPU by many steps
                job.finish()
        job.finish()
        lost = time.perf_counter() - began - steps * step_s
        hook.remove()
        save.wait()
        if repeat == 0:
            found["first_stall_s"].append(stall)
            found["first_lost_s"].append(lost)
            if repeats > 1:
                continue
        found["stall_s"].append(stall)
        found["lost_s"].append(lost)
        found["steps"].append(steps)
    return found


# -- ours ----------------------------------------------------------------------------------------------------


SETTINGS = CheckpointConfig(checkpoint="auto", keep_last=1, levels=LevelsConfig(agent_idle=600.0))


def open_ours(job: Job, folder: Path) -> Checkpointer:
    saver = Checkpointer(folder / "checkpoints", SETTINGS)
    saver.resume(job.run, {})
    while saver.memory is None:  # until it has its memory; the first save is measured
        job.step()
        saver.after_step(job.run, {})
    saver.memory.touch_now()
    saver.memory.wait()
    return saver


def ours(job: Job, saver: Checkpointer, levels: tuple[str, ...], folder: Path) -> Save:
    def call() -> None:
        saver.save_next(levels)
        saver.after_step(job.run, {})
        assert saver.memory is not None and saver.memory.newest_step == job.run.step, "the save was skipped"

    def done() -> bool:
        if saver.memory is None or not saver.memory.committed():
            return False
        if "disk" not in levels:
            return True
        status = read_status(host_folder(folder))
        wanted = saver.memory.newest_step
        return status is not None and any(row["step"] == wanted for row in status.drains)

    def wait() -> None:
        deadline = time.monotonic() + DISK_S
        while not done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not on disk after {DISK_S:.0f} s")
            time.sleep(0.01)

    return Save(call, done, wait)  # the checkpointer itself hooks into the optimizer


# -- peers ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """DCP's asynchronous saves want a process group with a CPU backend."""
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port), RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def peer(name: str, job: Job, folder: Path) -> Save:
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    target = folder / "peer"
    state: dict[str, Any] = {}
    pending: list[Any] = []

    def fresh() -> dict[str, Any]:
        shutil.rmtree(target, ignore_errors=True)
        folder.mkdir(exist_ok=True)
        state.update(job.tensors())
        return state

    def writer() -> dcp.FileSystemWriter:
        return dcp.FileSystemWriter(target, thread_count=DCP_THREADS)

    if name == "torch.save":
        return Save(lambda: torch.save(fresh(), target.with_suffix(".pt")))
    if name == "DCP sync":
        return Save(lambda: dcp.save(fresh(), storage_writer=writer()))
    kind = AsyncCheckpointerType.THREAD if name.endswith("thread") else AsyncCheckpointerType.PROCESS
    pinned = name.endswith("pinned")

    def call() -> None:
        # A new stager for every save: DCP closes the one it was given when the save is done.
        stager = DefaultStager(StagingOptions(True, True, True, True)) if pinned else None
        options: dict[str, Any] = {"async_checkpointer_type": kind, "async_stager": stager}
        pending[:] = [dcp.async_save(fresh(), storage_writer=writer(), **options)]

    def upload() -> Any:
        return pending[0].upload_completion if pinned else pending[0]

    def before_update() -> None:
        if pinned:
            pending[0].staging_completion.result()

    return Save(call, lambda: upload().done(), lambda: upload().result(), before_update)


# -- one size ------------------------------------------------------------------------------------------------


def run_size(
    name: str,
    device: torch.device,
    scratch: Path,
    repeats: int,
    deadline: float,
    peers_on: str,
    parts: list[str],
    methods: list[str] | None,
) -> None:
    size = fitting(SIZES[name], scratch)
    size = replace(size, peers=tuple(methods or size.peers))
    job = Job(size, device)
    job.timed(2)
    step_s = min(job.timed(3), job.timed(3))
    state_bytes = sum(t.numel() * t.element_size() for t in job.tensors().values())
    config = {
        "model": name,
        "params_b": round(size.spec.num_params() / 1e9, 3),
        "state_gib": round(state_bytes / 2**30, 2),
        "tokens": size.rows * size.spec.max_positions,
        "step_ms": round(1e3 * step_s, 1),
        "step_over_pcie": round(step_s / (state_bytes / PCIE), 2),
        **({"pages": "huge"} if HUGE in os.environ else {}),
    }
    print(f"{name}: {config}", flush=True)
    found = Found(peers_on=peers_on)
    folder = scratch / "run"
    try:
        saver = open_ours(job, folder)
        in_memory = str(saver.place.folder).startswith(str(memory_base()))
        found.place = f"tmpfs{' with huge pages' if HUGE in os.environ else ''}" if in_memory else "a file on disk"
        if "saves" in parts:
            found.add("ours, memory", measure(job, ours(job, saver, ("memory",), folder), step_s, repeats + 1, 30.0))
        if "sweep" in parts:
            found.sweep = sweep_steps(job, saver, folder, state_bytes)
        if "restore" in parts:
            last = ours(job, saver, ("memory",), folder)
            last.wait()
            last.call()
            last.wait()
        expected = job.fingerprint()
        saver.let_go()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if "restore" in parts:
            wait_for_flush(folder, job.run.step)
        while "restore" in parts and len(found.restores) < 2:
            if found.restores and deadline - time.monotonic() < 3 * DISK_S:
                break
            found.restores.append(restore_in_new_process(name, size, device, folder))
            assert found.restores[-1]["fingerprint"] == expected, (expected, found.restores)
        if "disk" not in parts:
            remove_host_folder(host_folder(folder))  # peers need the room: three copies of a 3B state fill the memory
        if "saves" in parts:
            measure_peers(job, scratch, step_s, repeats, deadline, found)
        if "disk" in parts:
            measure_disk(job, folder, step_s, deadline, found)
    finally:  # what was measured before an interrupt counts
        record_rows(name, config, found)
        remove_host_folder(host_folder(folder))


@dataclass
class Found:
    """What was measured so far, and what could not be."""

    peers_on: str
    place: str = ""
    rows: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    sweep: list[tuple[float, float, float]] = field(default_factory=list)
    restores: list[dict[str, Any]] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    def add(self, case: str, row: dict[str, list[float]]) -> None:
        self.rows[case] = row
        show(case, row)


def measure_peers(job: Job, scratch: Path, step_s: float, repeats: int, deadline: float, found: Found) -> None:
    where = memory_base() if found.peers_on == "memory" else scratch
    peers = Path(tempfile.mkdtemp(prefix="shoestring-peers-", dir=where))
    try:
        with process_group():
            for case in job.size.peers:
                if time.monotonic() > deadline:
                    found.failures[case] = "left out: the time was used up"
                    continue
                gc.collect()
                try:
                    times = 2 if repeats > 1 else 1
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        found.add(case, measure(job, peer(case, job, peers), step_s, times, 40.0))
                except Exception as error:
                    found.failures[case] = f"{type(error).__name__}: {error}"[:200]
                    print(f"{case} failed: {found.failures[case]}", flush=True)
                for path in peers.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
    finally:
        shutil.rmtree(peers, ignore_errors=True)


def measure_disk(job: Job, folder: Path, step_s: float, deadline: float, found: Found) -> None:
    case = "ours, memory and disk"
    if deadline - time.monotonic() < DISK_S:
        found.failures[case] = "left out: too little time"
        return
    saver = open_ours(job, folder)
    try:
        found.add(case, measure(job, ours(job, saver, ("memory", "disk"), folder), step_s, 1, DISK_S))
    except TimeoutError as error:
        found.failures[case] = str(error)
    saver.let_go()


def show(case: str, row: dict[str, list[float]]) -> None:
    stall, lost = statistics.median(row["stall_s"]), statistics.median(row["lost_s"])
    first, first_lost = 1e3 * row["first_stall_s"][0], row["first_lost_s"][0]
    print(
        f"  {case}: stall {1e3 * stall:.1f} ms (first {first:.1f}); {lost:.2f} s lost over {row['steps'][0]:.0f} steps "
        f"(first {first_lost:.2f})",
        flush=True,
    )


def sweep_steps(job: Job, saver: Checkpointer, folder: Path, state_bytes: int) -> list[tuple[float, float, float]]:
    """(step over PCIe time, stall in ms, ms lost a save) with ever fewer tokens a step."""
    found = []
    whole = job.num_micros
    micros, rows, context = job.micros, job.size.micro, job.size.spec.max_positions
    for few, tokens in ((rows, context), (rows // 2, context), (rows // 4, context), (1, context), (1, context // 4)):
        at = slice(max(1, few)), slice(tokens)
        job.micros = [Micro(m.tokens_BT[at], m.targets_BT[at], m.index_BT[at]) for m in micros]
        job.num_micros = 1
        job.timed(1)
        step_s = job.timed(4)
        row = measure(job, ours(job, saver, ("memory",), folder), step_s, 3, 10.0)
        stall, lost = (1e3 * statistics.median(row[key]) for key in ("stall_s", "lost_s"))
        found.append((step_s / (state_bytes / PCIE), stall, lost))
        print("  step/PCIe {:.2f}: stall {:.1f} ms, {:.0f} ms lost a save".format(*found[-1]), flush=True)
    job.micros, job.num_micros = micros, whole
    return found


def wait_for_flush(folder: Path, step: int) -> None:
    """When a trainer is gone, the agent writes the newest version to disk: most of it before the next trainer is up."""
    deadline = time.monotonic() + FLUSH_S
    while time.monotonic() < deadline:
        status = read_status(host_folder(folder))
        if status is not None and any(row["step"] == step for row in status.drains):
            return
        time.sleep(0.1)


def restore_in_new_process(name: str, size: Size, device: torch.device, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.checkpoint", "--restore", str(folder), "--sizes", name]
    command += ["--layers", str(size.spec.num_layers)]
    out = subprocess.run([*command, "--device", str(device)], capture_output=True, text=True)
    if out.returncode:
        raise RuntimeError(f"the restoring process failed:\n{out.stdout[-2000:]}{out.stderr[-4000:]}")
    found = json.loads(out.stdout.strip().splitlines()[-1])
    print(f"  restore: {found}", flush=True)
    return found


def restore_here(name: str, layers: int, device: torch.device, folder: Path) -> None:
    size = SIZES[name]
    job = Job(replace(size, spec=replace(size.spec, num_layers=layers)), device)
    init_state(job.run.optimizer)
    job.finish()
    saver = Checkpointer(folder / "checkpoints", SETTINGS)
    began = time.perf_counter()
    assert saver.resume(job.run, {})
    job.finish()
    total = time.perf_counter() - began
    assert saver.restored is not None
    gbps = saver.restored.num_bytes / saver.restored.seconds / 1e9
    times = {"fill_s": round(saver.restored.seconds, 4), "resume_s": round(total, 4)}
    saver.let_go()
    again = Checkpointer(folder / "checkpoints", SETTINGS)  # with what the first one pinned
    again.resume(job.run, {})
    assert again.restored is not None
    again_gbps = again.restored.num_bytes / again.restored.seconds / 1e9
    facts = {"gbps": round(gbps, 3), **times, "again_gbps": round(again_gbps, 3), "checksum": ALGORITHM}
    print(json.dumps({**facts, "fingerprint": job.fingerprint()}))


def record_rows(name: str, config: dict[str, Any], found: Found) -> None:
    base = found.rows.get("DCP sync")
    for case, row in found.rows.items():
        threads = f", {DCP_THREADS} threads" if case.startswith("DCP") else ""
        where = "tmpfs" if found.peers_on == "memory" else "local disk"
        note = f"copies in {found.place}" if case.startswith("ours") else f"to {where}{threads}"
        quality: dict[str, Any] = {"steps": int(row["steps"][0])}
        quality["first_stall_ms"] = round(1e3 * row["first_stall_s"][0], 1)
        quality["first_lost"] = round(100 / SAVE_EVERY_S * row["first_lost_s"][0], 3)
        quality["saves"] = 1 + len(row["stall_s"]) if row["stall_s"] != row["first_stall_s"] else 1
        for metric, unit, key, scale in (
            ("stall_ms", "ms", "stall_s", 1e3),
            ("lost_step_time", "% of a minute", "lost_s", 100 / SAVE_EVERY_S),
        ):
            samples = [scale * v for v in row[key]]
            other = None if base is None else scale * statistics.median(base[key])
            middle = statistics.median(samples)
            ratio = other / middle if other is not None and middle > 0 else None
            record(
                bench="checkpoint", case=f"{name}, {case}", metric=metric, unit=unit, samples=samples,
                baseline="DCP sync", baseline_value=other, ratio=ratio, quality=quality, config=config, note=note,
            )  # fmt: skip
    if restores := found.restores:
        record(
            bench="checkpoint", case=f"{name}, ours, memory", metric="restore_gbps", unit="GB/s",
            samples=[r["gbps"] for r in restores], baseline="PCIe", baseline_value=PCIE / 1e9,
            ratio=max(r["gbps"] for r in restores) * 1e9 / PCIE, config=config,
            quality={key: restores[0][key] for key in ("fill_s", "resume_s", "again_gbps", "checksum")},
            note="in a new process, verified",
        )  # fmt: skip
    for ratio, stall, lost in found.sweep:
        record(
            bench="checkpoint", case=f"{name}, sweep", metric="stall_ms", unit="ms", samples=[stall],
            config={**config, "step_over_pcie": round(ratio, 2)}, quality={"lost_ms": round(lost, 1)},
        )  # fmt: skip
    for case, why in found.failures.items():
        print(f"no line for {name}, {case}: {why}", flush=True)


# -- the table -----------------------------------------------------------------------------------------------


def last_run(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of each model's newest run. Step times differ between runs, so one line does not replace another."""

    def subject(n: dict[str, Any]) -> tuple[str, bool, bool]:
        return n["config"]["model"], n["metric"] == "restore_gbps", n["case"].endswith(", sweep")

    of = {subject(n): (n["commit"], n["config"]["step_ms"]) for n in lines}
    return [n for n in lines if of[subject(n)] == (n["commit"], n["config"]["step_ms"])]


def table() -> str:
    lines = last_run(newest("checkpoint"))
    shown = [n for n in lines if n["metric"] in ("stall_ms", "lost_step_time") and "sweep" not in n["case"]]
    if not shown:
        return "Not measured yet."
    cases = list(dict.fromkeys(n["case"] for n in shown))
    cells = {(n["case"], n["metric"]): n for n in shown}
    rows = []
    for case in cases:
        stall, lost = cells[case, "stall_ms"], cells[case, "lost_step_time"]
        base = cells.get((f"{case.split(',')[0]}, DCP sync", "stall_ms"))
        first = first_stall(stall)
        later = stall_text(stall["value"]) if saved_again(stall) else ""
        ratio = "" if base is None else f"{first_stall(base) / first:,.3g}x"
        rows.append([case, stall_text(first), ratio, later, f"{max(lost['value'], 0.0):.2g} %"])
    head = ["case", "first stall", "less than DCP sync", "later stalls", "step time lost at one save a minute"]
    restores = [n for n in lines if n["metric"] == "restore_gbps"]
    pages = {n["case"]: "huge pages" if n["config"].get("pages") == "huge" else "small pages" for n in restores}
    text = "; ".join(
        f"{n['case'].split(',')[0]} {n['value']:.3g} GB/s ({pages[n['case']]}, {n['commit']})" for n in restores
    )
    steps = "; ".join(
        f"{m}: {c['state_gib']:g} GiB, {c['tokens']:,} tokens and {c['step_ms']:,.0f} ms a step"
        for m, c in {n["config"]["model"]: n["config"] for n in shown}.items()
    )
    return (
        markdown(head, rows)
        + f"\n\nRestored from memory in a new process, verified: {text}. {steps}."
        + provenance(shown)
    )


def saved_again(line: dict[str, Any]) -> bool:
    """Whether the line's value is that of later saves; otherwise it is the first and only one."""
    quality = line["quality"] or {}
    return bool(quality.get("saves", 1) > 1 or ("saves" not in quality and "first_stall_ms" in quality))


def first_stall(line: dict[str, Any]) -> float:
    return float(line["quality"]["first_stall_ms"] if saved_again(line) else line["value"])


def stall_text(ms: float) -> str:
    return f"{ms / 1000:.3g} s" if ms >= 1000 else f"{ms:.3g} ms"


def fitting(size: Size, scratch: Path) -> Size:
    """The size with as many layers as two copies of its state leave room for in tmpfs."""

    def needed(spec: ModelSpec) -> int:
        return 2 * 12 * spec.num_params() + (1 << 30)

    if room_for(memory_base(), needed(size.spec)) is not None and memory_base().is_dir():
        place = scratch / "memory"
        place.mkdir()
        options = f"size={needed(size.spec) + (1 << 30)}"
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True)
        if mounted.returncode == 0 and room_for(place, needed(size.spec)) is None:
            os.environ["SHOESTRING_MEMORY_DIR"] = str(place)
            return size
    spec = size.spec
    while spec.num_layers > 2 and room_for(memory_base(), needed(spec)) is not None:
        spec = replace(spec, num_layers=spec.num_layers - 1)
    if spec.num_layers != size.spec.num_layers:
        print(f"{room_for(memory_base(), needed(size.spec))}: {spec.num_layers} layers instead", flush=True)
    return replace(size, spec=spec)


def mount_huge(place: Path) -> None:
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "huge=within_size,size=90%", "tmpfs", str(place)], check=True)
    os.environ.update({"SHOESTRING_MEMORY_DIR": str(place), HUGE: "1"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["1b", "3b"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=3, help="saves of ours that are counted")
    parser.add_argument("--most-seconds", type=float, default=450.0, help="peers that would begin later are left out")
    parser.add_argument("--peers", choices=("memory", "disk"), default="memory", help="where peers write")
    parser.add_argument("--huge", action="store_true", help="copies in a tmpfs with huge pages, mounted for it (root)")
    parser.add_argument("--measure", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--peer", nargs="+", choices=ALL, help="methods to compare with (default: those of the size)")
    parser.add_argument("--restore", type=Path, help="(started by this script)")
    parser.add_argument("--layers", type=int, help="(started by this script)")
    parser.add_argument("--here", action="store_true", help="(started by this script: one size, in this process)")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    if options.restore is not None:
        restore_here(options.sizes[0], options.layers, device, options.restore)
        return
    if options.here:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended early"))  # what was measured is recorded
        scratch = Path(tempfile.mkdtemp(prefix="shoestring-checkpoint-"))
        try:
            deadline = time.monotonic() + options.most_seconds
            if options.huge:
                mount_huge(scratch / "memory")
            run_size(
                options.sizes[0],
                device,
                scratch,
                options.repeats,
                deadline,
                options.peers,
                options.measure,
                options.peer,
            )
        finally:
            remove_host_folder(host_folder(scratch / "run"))
            subprocess.run(["umount", "-l", str(scratch / "memory")], capture_output=True)  # the agent may be in it
            shutil.rmtree(scratch, ignore_errors=True)
        return
    began = time.monotonic()
    for name in options.sizes:
        left = options.most_seconds - (time.monotonic() - began)
        command = [sys.executable, "-m", "benchmarks.checkpoint", "--here", "--sizes", name]
        command += ["--device", str(device), "--repeats", str(options.repeats), "--most-seconds", str(max(left, 1.0))]
        command += ["--peers", options.peers, "--measure", *options.measure, *(["--huge"] if options.huge else [])]
        command += ["--peer", *options.peer] if options.peer else []
        if subprocess.run(command).returncode:
            print(f"{name} failed", flush=True)
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    as_command(main)
