"""The loss of a host: two hosts in network namespaces, links of 1 Gbit/s between them, and an S3 store.

    python -m benchmarks.fault_hosts                    about 3 minutes, as root on Linux

Each host is a network namespace with its own memory folder, checkpoint folder and agent; a run over both (FSDP2, gloo)
copies its state to the other host's memory. Three things are measured:

    slowdown        how much longer steps take in spans of 8 s with one copy to the peer than without, limiter on
    host lost       one host is wiped (all its processes killed, link down, memory and disk folders deleted), both are
                    started again: the run must resume from peer memory with the right bits
    both lost       the same with all memory and disks deleted: the run resumes from the S3 store (moto's server,
                    behind the same links); left out where moto or s3fs are not installed
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from benchmarks.faults import fingerprint, record_case
from benchmarks.processes import child_environment
from benchmarks.results import record
from shoestring.errors import UserError, as_command
from shoestring.mesh import MeshConfig, open_mesh
from shoestring.runlog import RunLog
from shoestring.state.checkpointer import Checkpointer
from shoestring.state.levels.settings import CheckpointConfig, LevelsConfig

HOSTS, WIDTH, BATCH = 2, 1024, 256
TAG, BRIDGE, GATEWAY = "shoelvl", "shoelvlbr", "10.79.0.254"
SPANS, SPAN_S = 4, 8.0
S3_PORT = 29877


def sh(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"`{' '.join(words)}` failed ({done.stderr.strip()}): this needs root on Linux, ip and tc")


@contextlib.contextmanager
def hosts(mbit: int) -> Iterator[None]:
    """shoelvl0 and shoelvl1 at 10.79.0.1 and .2, both directions limited; this machine is at .254."""
    remove()
    try:
        sh("ip", "link", "add", BRIDGE, "type", "bridge")
        sh("ip", "addr", "add", f"{GATEWAY}/24", "dev", BRIDGE)
        sh("ip", "link", "set", BRIDGE, "up")
        limit = ["root", "tbf", "rate", f"{mbit}mbit", "burst", "1mb", "latency", "100ms"]
        for r in range(HOSTS):
            sh("ip", "netns", "add", f"{TAG}{r}")
            sh("ip", "link", "add", link(r), "type", "veth", "peer", "name", "eth0", "netns", f"{TAG}{r}")
            sh("ip", "link", "set", link(r), "master", BRIDGE)
            sh("ip", "link", "set", link(r), "up")
            sh("tc", "qdisc", "add", "dev", link(r), *limit)
            for command in (
                ["ip", "addr", "add", f"10.79.0.{r + 1}/24", "dev", "eth0"],
                ["ip", "link", "set", "eth0", "up"],
                ["ip", "link", "set", "lo", "up"],
                ["tc", "qdisc", "add", "dev", "eth0", *limit],
            ):
                sh("ip", "netns", "exec", f"{TAG}{r}", *command)
        yield
    finally:
        remove()


def link(r: int) -> str:
    return f"{TAG}v{r}"


def remove() -> None:
    for r in range(HOSTS):
        kill_all(r)
        subprocess.run(["ip", "netns", "del", f"{TAG}{r}"], capture_output=True)
        subprocess.run(["ip", "link", "del", link(r)], capture_output=True)
    subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True)


def kill_all(r: int) -> int:
    """SIGKILL to every process of a host, its agent too."""
    out = subprocess.run(["ip", "netns", "pids", f"{TAG}{r}"], capture_output=True, text=True).stdout
    for pid in out.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    return len(out.split())


def wipe(place: Path, r: int) -> int:
    """The host is gone with all it had."""
    killed = kill_all(r)
    sh("ip", "link", "set", link(r), "down")
    shutil.rmtree(place / f"host{r}", ignore_errors=True)
    return killed


# -- a rank on one of the hosts ------------------------------------------------------------------------------------


def worker(place: Path, remote: bool, span_s: float) -> None:
    torch.set_num_threads(1)
    mesh = open_mesh(MeshConfig(dp=HOSTS, timeout_s=120), "cpu")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)))
    fully_shard(model, mesh=mesh.axis("dp"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    url = "s3://runs/two" if remote else None
    levels = LevelsConfig(peer="replica", mttf_hours=1e-3, budget=0.3, agent_idle=60, remote=url, remote_timeout_s=20)
    said: list[str] = []
    log = RunLog(None, quiet=True)
    log.say = said.append  # type: ignore[method-assign, assignment]
    run: Any = argparse.Namespace(step=0, model=model, optimizer=optimizer, mesh=mesh, log=log)
    saver = Checkpointer(place / "run" / "checkpoints", CheckpointConfig(checkpoint="auto", levels=levels))
    measured = saver.measured
    assert measured is not None
    began = time.perf_counter()
    resumed = saver.resume(run, {})
    seconds = time.perf_counter() - began
    if not resumed:
        torch.manual_seed(7 + mesh.rank)
    tell = {"resumed": run.step, "seconds": seconds, "bits": fingerprint(run), "said": said[-1] if said else ""}
    print(json.dumps(tell), flush=True)

    def step() -> float:
        at = time.perf_counter()
        draw = torch.Generator().manual_seed(1000 * run.step + mesh.rank)
        run.model(torch.randn(BATCH, WIDTH, generator=draw)).square().mean().backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.step += 1
        return time.perf_counter() - at

    def save(levels: tuple[str, ...]) -> None:
        saver.save_next(levels)
        before = measured.pace.saves
        while measured.pace.saves == before:
            step()
            saver.after_step(run, {})
            if saver.memory is not None:
                saver.memory.touch_now()

    for _ in range(3):
        save(("memory", "peer"))
        time.sleep(0.5)
    found: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * SPANS if span_s else 0):
        with_peer = bool(number % 2)
        # The same number of steps on every rank: agreed from the first span on.
        save(("memory", "peer") if with_peer else ("memory",))
        times: list[float] = []
        while not mesh.any(sum(times) > span_s):
            times.append(step())
            measured.pace.next_step = run.step + 1000  # no save within the span
        found[with_peer].append(statistics.mean(times))
    save(("memory", "peer", "disk", *(["remote"] if remote else [])))
    assert saver.memory is not None
    saver.memory.wait()
    while measured.peers.rounds is not None and measured.peers.rounds.busy():
        time.sleep(0.02)
    share = measured.memory.division.share
    size = 0 if share is None else sum(b.num_bytes for b in share.boxes)
    peers = measured.peers.rounds
    about = {"peer_s": peers.seconds, "peer_ok": peers.succeeded, "peer_error": peers.error} if peers else {}
    mesh.barrier()
    end = {"step": run.step, "bits": fingerprint(run), "off": found[False], "on": found[True], "share_bytes": size}
    print(json.dumps({**end, **about}), flush=True)
    time.sleep(600)


class Pair:
    """Both ranks, each in its namespace."""

    def __init__(self, place: Path, remote: bool, port: int, span_s: float) -> None:
        self.ranks = []
        for r in range(HOSTS):
            subprocess.run(["ip", "link", "set", link(r), "up"], check=True)
            home = place / f"host{r}"
            (home / "memory").mkdir(parents=True, exist_ok=True)
            env = child_environment(
                RANK=str(r), WORLD_SIZE=str(HOSTS), LOCAL_RANK="0", MASTER_ADDR="10.79.0.1", MASTER_PORT=str(port),
                GLOO_SOCKET_IFNAME="eth0", OMP_NUM_THREADS="1", SHOESTRING_HOST=f"h{r}",
                SHOESTRING_MEMORY_DIR=str(home / "memory"),
            )  # fmt: skip
            command = [sys.executable, "-m", "benchmarks.fault_hosts", "--worker", str(home), "--span-s", str(span_s)]
            command += ["--remote"] if remote else []
            inside = ["ip", "netns", "exec", f"{TAG}{r}", *command]
            self.ranks.append(subprocess.Popen(inside, env=env, stdout=subprocess.PIPE, text=True))

    def told(self) -> list[dict[str, Any]]:
        """The next line of each rank."""
        found = []
        for rank in self.ranks:
            assert rank.stdout is not None
            line = next((text for text in rank.stdout if text.startswith("{")), None)
            if line is None:
                raise RuntimeError("a rank ended early; its own lines say why")
            found.append(json.loads(line))
        return found

    def end(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()


@contextlib.contextmanager
def s3_server() -> Iterator[bool]:
    """A bucket that the hosts reach at this machine's address; False where the packages are absent."""
    if any(importlib.util.find_spec(name) is None for name in ("moto", "boto3", "s3fs", "flask")):
        yield False
        return
    command = [sys.executable, "-m", "moto.server", "-H", GATEWAY, "-p", str(S3_PORT)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://{GATEWAY}:{S3_PORT}"
    os.environ.update(AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b", AWS_DEFAULT_REGION="us-east-1")
    os.environ.update(AWS_ENDPOINT_URL=url, FSSPEC_S3_ENDPOINT_URL=url)
    try:
        import boto3

        deadline = time.monotonic() + 90
        while True:
            try:
                boto3.client("s3").create_bucket(Bucket="runs")
                break
            except Exception:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.3)
        yield True
    finally:
        server.kill()
        server.wait()


def uploaded() -> int:
    program = "from shoestring.state.levels.remote import remote_steps; print(remote_steps('s3://runs/two', 10)[-1][0])"
    done = subprocess.run([sys.executable, "-c", program], env=child_environment(), capture_output=True, text=True)
    return int(done.stdout) if done.returncode == 0 else -1


def measure(place: Path, mbit: int, span_s: float) -> tuple[Counter[str], dict[str, Any]]:
    found: Counter[str] = Counter()
    facts: dict[str, Any] = {"mbit": mbit}
    with hosts(mbit), s3_server() as remote:
        pair = Pair(place, remote, 29610, span_s)
        pair.told()
        before = pair.told()
        facts["share_mb"] = round(before[0]["share_bytes"] / 1e6, 1)
        facts["peer_copy_s"] = round(max(b["peer_s"] for b in before), 3)
        on, off = (
            statistics.median(min(pairs) for pairs in zip(*(b[k] for b in before), strict=True)) for k in ("on", "off")
        )
        facts |= {"step_ms_without": round(1e3 * off, 1), "step_ms_with": round(1e3 * on, 1), "slowdown": on / off - 1}
        print(f"steps: {facts}", flush=True)
        if remote:
            deadline = time.monotonic() + 60
            while uploaded() < before[0]["step"] and time.monotonic() < deadline:
                time.sleep(0.5)
            facts["uploaded"] = uploaded()
        found["kills"] += wipe(place, 1)
        kill_all(0)
        found["kills"] += 1
        pair.end()
        pair = Pair(place, False, 29611, 0.0)
        after = pair.told()
        print(f"one host lost: {[(a['resumed'], round(a['seconds'], 3), a['said']) for a in after]}", flush=True)
        same = [a["bits"] == b["bits"] for a, b in zip(after, before, strict=True)]
        found["corrupt"] += not all(same)
        found["resumed from a peer"] += "peer memory" in after[1]["said"]
        found["lost"] = before[0]["step"] - after[0]["resumed"]
        facts["peer_recovery_s"] = round(max(a["seconds"] for a in after), 3)
        pair.told()
        if remote:
            for r in range(HOSTS):
                found["kills"] += wipe(place, r)
            pair.end()
            pair = Pair(place, True, 29612, 0.0)
            after = pair.told()
            print(f"both lost: {[(a['resumed'], round(a['seconds'], 3), a['said']) for a in after]}", flush=True)
            found["corrupt"] += not all(a["bits"] == b["bits"] for a, b in zip(after, before, strict=True))
            found["resumed from S3"] += after[0]["resumed"] > 0
            facts["s3_recovery_s"] = round(max(a["seconds"] for a in after), 3)
        pair.end()
    return found, facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--mbit", type=int, default=1000)
    parser.add_argument("--span-s", type=float, default=SPAN_S)
    parser.add_argument("--no-record", action="store_true")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--remote", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        worker(options.worker, options.remote, options.span_s)
        return
    place = Path(tempfile.mkdtemp(prefix="shoestring-hosts-", dir="/dev/shm"))
    try:
        found, facts = measure(place, options.mbit, options.span_s)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    print(f"{dict(found)}; {facts}", flush=True)
    if found["corrupt"] or not found["resumed from a peer"]:
        sys.exit("a resumption had wrong bits, or did not come from the peer")
    if options.no_record:
        return
    record_case("a host lost", {"mbit": options.mbit}, found, [])
    for metric, unit in (("slowdown", "share"), ("peer_recovery_s", "s"), ("s3_recovery_s", "s")):
        if metric in facts:
            record(
                bench="faults", case="a host lost", metric=metric, unit=unit, samples=[facts[metric]], quality=facts,
                config={"mbit": options.mbit},
            )  # fmt: skip


if __name__ == "__main__":
    as_command(main)
