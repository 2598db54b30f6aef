"""Compressed gradients: step times of four replicas over shaped links, with the bytes that their interfaces count.

    python -m benchmarks.communication_links                 as root on Linux; about 10 minutes on two idle cores
    python -m benchmarks.communication_links --mbit 100 --methods plain int8
    python -m benchmarks.communication_links --unshaped      without root: four processes on this machine's own network
    python -m benchmarks.communication_links --train 500 --mbit 100 --methods plain int4       about 6 minutes

Each replica is a process in a network namespace of its own. A bridge joins them, and `tc tbf` limits what each may
send. The model and the batch are those of communication_curves. `step_ms` is the median of up to 8 steps in each of
two turns through all methods: packets that a full queue drops make the steps of one method differ by a third from turn
to turn at 10 Mbit/s. Bytes are what the interface of rank 0 sent per step, headers of TCP included. `auto` lines name
what was chosen, what the probe cost, and how the best of plain, bf16, int8 and int4 compares with it over 500 steps.
The peer is DDP with torch's PowerSGD hook.

The trainer sends after the backward pass, so a step over a slow link takes what it takes without one, and the bytes
over the speed. `--unshaped` measures the first part as processor time, which other users of the machine hardly change,
and records `step_ms` for each speed as this sum (config `link`: computed); `auto` is told each speed there instead of
measuring it. `--methods` may name a selector: topk:0.01+hyper.

Where communication_curves has recorded losses, `time_to_loss` follows: steps to the loss that `plain` has at the end
(1% more counts as reached), times the step time. Its ratio is against plain at the same speed. `--train` trains over
the shaped links instead, and records the time that the steps took until that loss (config `link`: whole run) beside
steps times step time. Name `plain` first: its last loss is what is waited for.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.communication import BENCH, REPLICAS
from benchmarks.communication_curves import CLIP, CONTEXT, DEMO_LR, EVERY, LR, PEER, VAL_ROWS, loss_of, new_model, texts
from benchmarks.results import RESULTS, newest, record, recorded
from shoestring.errors import UserError, as_command
from shoestring.evals.result_line import result_line
from shoestring.mesh import Mesh, MeshConfig, open_mesh
from shoestring.runlog import append_jsonl
from shoestring.train.data import TokenData
from shoestring.train.gradients import clip_gradients
from shoestring.train.objectives import CrossEntropy
from shoestring.train.optim import adamw, set_lr, warmup_cosine
from shoestring.train.reducers import auto
from shoestring.train.reducers.build import ReducerConfig, build_optimizer, build_reducer
from shoestring.train.reducers.compressed import CompressedReducer
from shoestring.train.reducers.network import LinkSpeed, largest
from shoestring.train.reducers.rounds import Link
from shoestring.train.step import Micro

METHODS = (
    *("plain", "bf16", "int8", "int4", "terngrad", "qsgd", "topk:0.01", "topk:0.04", "arc-topk:0.04"),
    *("powersgd:4", "powersgd:8", "demo", "topk:0.01+hyper", "topk:0.04+hyper"),
)
AUTO = "auto"
SPEEDS = (10, 100, 1000)
STEPS, WARMUP, LONGEST_S, TURNS = 8, 2, 25.0, 2
RUN_STEPS = 500  # over which a probe counts
BRIDGE, NAME = "shoebr", "shoe"
REACHED = 1.01  # of plain's final loss


# -- namespaces -----------------------------------------------------------------------------------------------


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"`ip {' '.join(words)}` failed ({done.stderr.strip()}); this bench needs root on Linux")


@contextmanager
def namespaces(mbit: int) -> Iterator[None]:
    """shoe0 ... with one interface each at 10.77.0.1 ..., which sends at most so many Mbit/s."""
    remove()
    try:
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("link", "set", BRIDGE, "up")
        for r in range(REPLICAS):
            space, inside, outside = f"{NAME}{r}", f"{NAME}v{r}", f"{NAME}b{r}"
            ip("netns", "add", space)
            ip("link", "add", inside, "type", "veth", "peer", "name", outside)
            ip("link", "set", inside, "netns", space)
            ip("link", "set", outside, "master", BRIDGE)
            ip("link", "set", outside, "up")
            ip("-n", space, "addr", "add", f"10.77.0.{r + 1}/24", "dev", inside)
            ip("-n", space, "link", "set", inside, "up")
            ip("-n", space, "link", "set", "lo", "up")
            burst = f"{max(32, mbit * 2)}kb"
            shape = ["tc", "qdisc", "add", "dev", inside, "root", "tbf"]
            subprocess.run(
                ["ip", "netns", "exec", space, *shape, "rate", f"{mbit}mbit", "burst", burst, "latency", "100ms"],
                check=True,
            )
        yield
    finally:
        remove()


def remove() -> None:
    for r in range(REPLICAS):
        subprocess.run(["ip", "netns", "del", f"{NAME}{r}"], capture_output=True)
        subprocess.run(["ip", "link", "del", f"{NAME}b{r}"], capture_output=True)
    subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True)


def on_replicas(mbit: int | None, methods: list[str], *mode: str) -> tuple[list[dict[str, Any]], list[int]]:
    """Start a worker in each namespace (None: in this one); what rank 0 measured, and how the workers ended."""
    with namespaces(mbit) if mbit else nullcontext():
        workers = []
        for r in range(REPLICAS):
            env = {
                **os.environ,
                **{"MASTER_ADDR": "10.77.0.1" if mbit else "127.0.0.1", "MASTER_PORT": "29511"},
                **{"WORLD_SIZE": str(REPLICAS), "RANK": str(r), "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"},
                "GLOO_SOCKET_IFNAME": f"{NAME}v{r}" if mbit else "lo",
            }
            command = [sys.executable, "-m", "benchmarks.communication_links", "--worker", *mode, "--methods", *methods]
            out = subprocess.PIPE if r == 0 else None
            inside = ["ip", "netns", "exec", f"{NAME}{r}"] if mbit else []
            workers.append(subprocess.Popen([*inside, *command], env=env, stdout=out, text=True))
        said = workers[0].communicate()[0]
        codes = [w.wait() for w in workers]
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")], codes


# -- a worker -------------------------------------------------------------------------------------------------


def sent_by_interface() -> int:
    return int(Path(f"/sys/class/net/{os.environ['GLOO_SOCKET_IFNAME']}/statistics/tx_bytes").read_text())


def one_micro(rank: int, step: int) -> Micro:
    stream = torch.randint(0, 512, (1, CONTEXT + 1), generator=torch.Generator().manual_seed(step * REPLICAS + rank))
    return Micro(stream[:, :-1].contiguous(), stream[:, 1:].contiguous(), torch.arange(CONTEXT)[None])


def prepared(mesh: Mesh, method: str) -> tuple[Callable[[int], None], dict[str, Any]]:
    """A function that takes a training step, and what to say about it."""
    model: nn.Module = new_model(mesh, seed=0)
    about: dict[str, Any] = {}
    if method == PEER:
        # One bucket: with several, the hook's callbacks run in another order on each rank, and gloo ends the process.
        model = DistributedDataParallel(model, bucket_cap_mb=1000)
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        optimizer: torch.optim.Optimizer = adamw(model, lr=LR)
        reduce: Callable[[nn.Module], None] = lambda model: None  # noqa: E731
    else:
        name, _, speed = method.partition("@")
        if speed:
            told = LinkSpeed(1e-4, float(speed) * 1e6 / 8)
            auto.measure_link = lambda link, device: told
        name, _, selector = name.partition("+")
        settings = ReducerConfig(name, selector=selector or "uniform")  # type: ignore[arg-type]
        mesh.barrier()
        began = time.perf_counter()
        reducer = build_reducer(settings, model, mesh, clip=CLIP, seed=0)
        about["probe_ms"] = 1e3 * (time.perf_counter() - began)
        if isinstance(reducer, CompressedReducer):
            about["chosen"] = reducer.compressor.name
            about["announced"] = reducer.compression.sent_bytes({n: p.shape for n, p in reducer.params.items()})
        else:
            about["announced"] = sum(2 * 4 * p.numel() * (REPLICAS - 1) // REPLICAS for p in model.parameters())
        optimizer = build_optimizer(settings, model, lr=LR, weight_decay=0.1)
        reduce = reducer

    def step(number: int) -> None:
        (CrossEntropy()(model, one_micro(mesh.rank, number)) / (CONTEXT * REPLICAS)).backward()
        reduce(model)
        optimizer.step()
        optimizer.zero_grad()

    return step, about


def train_whole(methods: list[str], steps: int) -> None:
    """Real runs, with the losses and the seconds that steps took so far; evaluation does not count."""
    torch.set_num_threads(1)
    mesh = open_mesh(MeshConfig(replica=REPLICAS, timeout_s=300), "cpu")
    corpus = texts()
    held_out = TokenData(corpus.val, context=CONTEXT, batch=VAL_ROWS).step(0)
    data = TokenData(corpus.train, context=CONTEXT, batch=REPLICAS, micro=1, seed=0)
    for method in methods:
        model: nn.Module = new_model(mesh, seed=0)
        name, _, selector = method.partition("+")
        settings = ReducerConfig(name, selector=selector or "uniform")  # type: ignore[arg-type]
        lr = DEMO_LR if name == "demo" else LR
        reducer = build_reducer(settings, model, mesh, clip=CLIP, seed=0)
        optimizer = build_optimizer(settings, model, lr=lr, weight_decay=0.1)
        schedule, seconds, curve = warmup_cosine(lr, warmup=50, steps=steps), 0.0, []
        for step in range(steps):
            micro = data.step(step)[mesh.rank]
            mesh.barrier()
            began = time.perf_counter()
            loss = CrossEntropy()(model, micro) / (CONTEXT * REPLICAS)
            loss.backward()
            reducer.observe(loss.detach())
            if not reducer.clips:  # as communication_curves clips all methods
                clip_gradients(model.parameters(), CLIP / math.sqrt(REPLICAS))
            reducer(model)
            set_lr(optimizer, schedule(step))
            optimizer.step()
            optimizer.zero_grad()
            seconds += time.perf_counter() - began
            if (step + 1) % EVERY == 0 and mesh.is_main:
                curve.append([step + 1, round(loss_of(model, held_out), 5), round(seconds, 3)])
        if mesh.is_main:
            print(json.dumps({"method": method, "curve": curve}), flush=True)
    mesh.close()


def work(methods: list[str]) -> None:
    torch.set_num_threads(1)
    mesh = open_mesh(MeshConfig(replica=REPLICAS, timeout_s=300), "cpu")
    for method in methods:
        step, about = prepared(mesh, method)
        times, work, sent, began = [], [], [], time.perf_counter()
        for number in range(WARMUP + STEPS):
            mesh.barrier()
            before, at, worked = sent_by_interface(), time.perf_counter(), time.process_time()
            step(number)
            times.append(time.perf_counter() - at)
            work.append(largest(Link(dist.group.WORLD), time.process_time() - worked, mesh.device))
            mesh.barrier()
            sent.append(sent_by_interface() - before)
            # All ranks must stop together.
            if mesh.any(number >= WARMUP and time.perf_counter() - began > LONGEST_S):
                break
        if mesh.is_main:
            line = {
                "method": method,
                "times": times[WARMUP:],
                "work": work[WARMUP:],
                "sent": statistics.median(sent[WARMUP:]),
                **about,
            }
            print(json.dumps(line), flush=True)
    mesh.close()


# -- the bench ------------------------------------------------------------------------------------------------


def case_of(method: str) -> str:
    """As communication_curves names it; of auto@100, auto."""
    return method.replace("+", ", ").partition("@")[0]


def config_of(method: str, mbit: int) -> dict[str, Any]:
    name, _, selector = method.partition("@")[0].partition("+")
    own = {"method": name, "selector": selector or "uniform", "mbit": mbit}
    return {**own, "replicas": REPLICAS, "model": "d128 L4"}


def measure(speeds: list[int], methods: list[str]) -> None:
    for mbit in speeds:
        turns, codes = on_replicas(mbit, methods * TURNS)
        found = list(merged(turns))
        plain = next((statistics.median(f["times"]) for f in found if f["method"] == "plain"), None)
        plain_sent = next((f["sent"] for f in found if f["method"] == "plain"), None)
        for f in found:
            took = statistics.median(f["times"])
            quality = {"sent_mb": round(f["sent"] / 1e6, 4)}
            if plain_sent:
                quality["compression"] = round(plain_sent / f["sent"], 2)
            if f["method"] == AUTO:
                quality |= {"chosen": f["chosen"], "probe_ms": round(f["probe_ms"], 1)}
                quality |= {"of_best": round(best_of_four(found) / (took + f["probe_ms"] / 1e3 / RUN_STEPS), 3)}
            record(
                bench=BENCH, case=case_of(f["method"]), metric="step_ms", unit="ms",
                samples=[1e3 * t for t in f["times"]],
                baseline="plain", baseline_value=1e3 * plain if plain else None, ratio=plain / took if plain else None,
                quality=quality, config=config_of(f["method"], mbit),
            )  # fmt: skip
            gain = f", {plain / took:.2f}x of plain" if plain else ""
            print(f"{mbit:5} Mbit/s {f['method']:20} {1e3 * took:8.1f} ms{gain}, {quality}", flush=True)
        if any(codes):
            raise UserError(f"workers ended with {codes} at {mbit} Mbit/s; their own lines say why")
    record_times_to_loss()


def merged(turns: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One line per method, with the times of all turns."""
    by_method: dict[str, list[dict[str, Any]]] = {}
    for line in turns:
        by_method.setdefault(line["method"], []).append(line)
    for same in by_method.values():
        chosen = "/".join(sorted({line.get("chosen", "") for line in same}))
        times = [t for line in same for t in line["times"]]
        yield {**same[0], "times": times, "sent": statistics.median(line["sent"] for line in same), "chosen": chosen}


def best_of_four(found: list[dict[str, Any]]) -> float:
    """Seconds of a step of the fastest that auto chooses from; nan where one was not measured."""
    took = {f["method"]: statistics.median(f["times"]) for f in found}
    return min(took.get(c.name, math.nan) for c in auto.CLOSE)


def measure_whole_runs(speeds: list[int], methods: list[str], steps: int) -> None:
    step_ms = {(n["case"], n["config"]["mbit"]): n["value"] for n in newest(BENCH) if n["metric"] == "step_ms"}
    for mbit in speeds:
        found, codes = on_replicas(mbit, methods, "--train", str(steps))
        if any(codes):
            raise UserError(f"workers ended with {codes} at {mbit} Mbit/s; their own lines say why")
        wanted = REACHED * found[0]["curve"][-1][1]
        whole: float | None = None
        for f in found:
            reached = next((point for point in f["curve"] if point[1] <= wanted), None)
            last = f["curve"][-1]
            if reached is None:
                print(
                    f"{mbit:5} Mbit/s {f['method']:16} ends at {last[1]:.3f} after {last[2]:.0f} s: above {wanted:.3f}"
                )
                continue
            whole = reached[2] if whole is None else whole
            usual = step_ms.get((case_of(f["method"]), mbit))
            product = None if usual is None else round(reached[0] * usual / 1e3, 1)
            record(
                bench=BENCH, case=case_of(f["method"]), metric="time_to_loss", unit="s", samples=[reached[2]],
                baseline=found[0]["method"], baseline_value=whole, ratio=whole / reached[2],
                quality={"steps": reached[0], "loss": round(wanted, 4), "product_s": product,
                         "final_loss": last[1], "whole_s": last[2]},
                config={**config_of(f["method"], mbit), "link": "whole run", "seed": 0, "steps": steps},
            )  # fmt: skip
            print(
                f"{mbit:5} Mbit/s {f['method']:16} {reached[2]:7.1f} s for {reached[0]} steps to {wanted:.3f} "
                f"({product} s by step times), {whole / reached[2]:.2f}x; ends at {last[1]:.3f}",
                flush=True,
            )


def measure_unshaped(speeds: list[int], methods: list[str]) -> None:
    autos = [f"{AUTO}@{mbit}" for mbit in speeds if AUTO in methods]
    found, codes = on_replicas(None, [*(m for m in methods if m != AUTO), *autos])
    if any(codes):
        raise UserError(f"workers ended with {codes}; their own lines say why")
    # The counter of this machine's own network counts what all ranks send.
    sent = {f["method"]: f.get("announced", f["sent"] / REPLICAS) for f in found}
    own = {f["method"]: statistics.median(f["work"]) for f in found}
    for mbit in speeds:
        plain = own["plain"] + sent["plain"] * 8 / mbit / 1e6
        for f in found:
            if f["method"].partition("@")[2] not in ("", str(mbit)):
                continue
            link_s = sent[f["method"]] * 8 / mbit / 1e6
            times = [1e3 * (t + link_s) for t in f["work"]]
            took = statistics.median(times) / 1e3
            record(
                bench=BENCH, case=case_of(f["method"]), metric="step_ms", unit="ms", samples=times,
                baseline="plain", baseline_value=1e3 * plain, ratio=plain / took,
                quality={"sent_mb": round(sent[f["method"]] / 1e6, 4), "own_ms": round(1e3 * own[f["method"]], 2),
                         "chosen": f.get("chosen", ""), "probe_ms": round(f.get("probe_ms", 0.0), 1)},
                config={**config_of(f["method"], mbit), "link": "computed"},
            )  # fmt: skip
            print(
                f"{mbit:5} Mbit/s {f['method']:22} {1e3 * took:8.1f} ms ({1e3 * own[f['method']]:.1f} without the "
                f"link), {plain / took:.2f}x of plain",
                flush=True,
            )
    record_times_to_loss()


def record_times_to_loss() -> None:
    """From the lines of both benches; what follows from them has the device and the commit of the step time.

    It replaces what followed before: a run that no longer reaches the loss leaves no line."""
    kept = [n for n in recorded(BENCH) if n["metric"] != "time_to_loss" or n["config"].get("link") == "whole run"]
    (RESULTS / f"{BENCH}.jsonl").write_text("".join(json.dumps(n) + "\n" for n in kept))
    lines = newest(BENCH)
    curves = {(n["case"], n["config"]["seed"]): n["quality"]["curve"] for n in lines if n["metric"] == "final_loss"}
    timed = {(n["case"], n["config"]["mbit"]): n for n in lines if n["metric"] == "step_ms"}
    for (case, seed), curve in curves.items():
        plain = curves.get(("plain", seed))
        if plain is None:
            continue
        wanted = REACHED * plain[-1][1]
        mine, theirs = steps_to(curve, wanted), steps_to(plain, wanted)
        for (name, mbit), step in timed.items():
            if name != case or ("plain", mbit) not in timed or mine is None or theirs is None:
                continue
            took, whole = mine * step["value"] / 1e3, theirs * timed["plain", mbit]["value"] / 1e3
            config = {**step["config"], "replicas": REPLICAS, "seed": seed}
            line = result_line(
                bench=BENCH, case=case, metric="time_to_loss", unit="s", samples=[took], baseline="plain",
                baseline_value=whole, ratio=whole / took, config=config,
                quality={"steps": mine, "loss": round(wanted, 4)},
            )  # fmt: skip
            append_jsonl(RESULTS / f"{BENCH}.jsonl", {**line, **{k: step[k] for k in ("device", "versions", "commit")}})


def steps_to(curve: list[list[float]], wanted: float) -> int | None:
    return next((int(step) for step, loss in curve if loss <= wanted), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, nargs="+", default=SPEEDS, help="speeds of the links")
    parser.add_argument("--methods", nargs="+", default=[*METHODS, AUTO, PEER], help="what follows reducer=, and peers")
    parser.add_argument("--unshaped", action="store_true", help="no namespaces; the time of the links is computed")
    parser.add_argument("--times", action="store_true", help="measure nothing; time_to_loss from what is recorded")
    parser.add_argument("--train", type=int, metavar="STEPS", help="whole runs of so many steps, up to plain's loss")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        if args.train:
            train_whole(args.methods, args.train)
        else:
            work(args.methods)
        if dist.is_initialized():
            dist.destroy_process_group()
        return
    if args.times:
        record_times_to_loss()
        return
    if args.train:
        texts()  # tokenised once, here
        measure_whole_runs(args.mbit, args.methods, args.train)
        return
    (measure_unshaped if args.unshaped else measure)(args.mbit, args.methods)


if __name__ == "__main__":
    as_command(main)
