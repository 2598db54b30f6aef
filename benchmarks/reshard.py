"""Moving weights between meshes: plans against their bound, copies against the machine's rates, the stall of an update.

    python -m benchmarks.reshard              on a GPU, under 3 minutes on an H200 (90 GB of its memory)
    python -m benchmarks.reshard --small      a small model, to try the script

Plans beside the bound of the links and simpler ways: experiments/reshard_strategies.py.

GPU, shape of Llama-3-8B in bf16, random weights:
    repartition     four FSDP shards become two tensor-parallel ones inside one GPU, all copies of the plan as one
                    kernel; against a plain copy of the same bytes, and torch's copies in a CUDA graph or one by one
    host_staged     the same bytes from the GPU to page-locked host memory and back into the other shards, both
                    directions at once; against the slower of the two directions, measured alone
    int4_publish    what a trainer does for a packed server: encode int4 on the GPU and copy it to the host, against
                    copying bf16
    two_processes   two layers from one process to another that shares the GPU: CUDA IPC against gloo
    swap_stall      16 requests decode while new weights arrive: time for which the engine stands still, new weights
                    waiting on the GPU or in host memory
Every case is checked for equal bytes before it is timed.
"""

from __future__ import annotations

import argparse
import gc
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.decode import LLAMA_8B, build, copy_bandwidth, prompts, timed
from benchmarks.results import markdown, newest, provenance, record
from shoestring.errors import UserError, as_command
from shoestring.formats import parse_format
from shoestring.formats.convert import format_host, format_linears
from shoestring.kernels.comm.copy_table import CopyTable
from shoestring.model import Decoder, ModelSpec
from shoestring.model.mesh_layouts import layout_on
from shoestring.serve import Engine, Sampling
from shoestring.serve.engine.weight_update import WeightTarget
from shoestring.state.reshard.execute import GroupTransport, IpcTransport, Resharder, Shards, pairs_between
from shoestring.state.reshard.layouts import REPLICATE, MeshLayout, shard
from shoestring.state.reshard.plan import ReshardPlan, make_plan
from shoestring.state.reshard.tasks import MovedTensor
from shoestring.state.reshard.topology import GBIT, Topology
from shoestring.state.reshard.version import WeightsVersion

BENCH = "reshard"
STREAMS = 8  # of the copies of a repartition
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the GPU parts run on a CPU to be tried, with --small
SMALL = ModelSpec(
    vocab_size=512, d_model=256, num_layers=4, num_heads=8, num_kv_heads=2, head_dim=32, d_ff=512, max_positions=1024,
    tied=False,
)  # fmt: skip
PLANS: dict[str, tuple[str, dict[str, int], dict[str, int], Topology]] = {
    "16 FSDP to 8 x tp2, interface per host": ("8b", {"dp": 16}, {"replica": 8, "tp": 2}, Topology()),
    "16 FSDP to 8 x tp2, interface per GPU": (
        *("8b", {"dp": 16}, {"replica": 8, "tp": 2}),
        Topology(nic="rank", nic_rate=400 * GBIT),
    ),
    "8 x tp8 to 64 FSDP, interface per GPU": (
        *("8b", {"replica": 8, "tp": 8}, {"dp": 64}),
        Topology(nic="rank", nic_rate=400 * GBIT),
    ),
    "24 FSDP to 5 x tp4, interface per host": ("8b", {"dp": 24}, {"replica": 5, "tp": 4}, Topology(ranks_per_host=4)),
}


def shapes_of(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in Decoder(spec).named_parameters()}


def moved_tensors(
    spec: ModelSpec, src: dict[str, int], dst: dict[str, int], itemsize: int = 2
) -> dict[str, MovedTensor]:
    first = 1
    for size in src.values():
        first *= size
    return {
        name: MovedTensor(shape, itemsize, layout_on(name, shape, src), layout_on(name, shape, dst, first))
        for name, shape in shapes_of(spec).items()
    }


# -- copies on one GPU ----------------------------------------------------------------------------------------


def filled_shards(plan: ReshardPlan, side: str, device: str, value: bool) -> dict[int, Shards]:
    """The shards of every rank of one side, in this process."""
    ranks: dict[int, dict[str, Any]] = {}
    for kind in plan.classes:
        layout = kind.info.src if side == "src" else kind.info.dst
        for box, holders in layout.tiles(kind.info.shape):
            for rank in holders:
                for name in kind.names:
                    t = torch.empty(box.shape, dtype=torch.bfloat16, device=device)
                    ranks.setdefault(rank, {}).setdefault(name, []).append((box, t.normal_() if value else t.zero_()))
    return {rank: Shards(held) for rank, held in ranks.items()}


def whole(shards: dict[int, Shards], name: str, shape: tuple[int, ...]) -> Tensor:
    out = torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE)
    for held in shards.values():
        for box, t in held.held.get(name, ()):
            out[box.slices()] = t.to(DEVICE)
    return out


def captured(work: Callable[[], object]) -> Callable[[], None]:
    if DEVICE == "cpu":
        return work  # type: ignore[return-value]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def in_turn(pairs: Sequence[tuple[Tensor, Tensor]], streams: Sequence[torch.cuda.Stream]) -> None:
    """torch's copies, on several streams where there are any."""
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for turn, (target, view) in enumerate(pairs):
        with torch.cuda.stream(streams[turn % len(streams)] if streams else None):
            target.copy_(view)
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)


def measure_repartition(spec: ModelSpec, repeats: int) -> None:
    plan = make_plan(moved_tensors(spec, {"dp": 4}, {"tp": 2}))
    src, dst = filled_shards(plan, "src", DEVICE, True), filled_shards(plan, "dst", DEVICE, False)
    pairs = pairs_between(plan, src, dst)
    table = CopyTable(pairs)
    table.run()
    for name, shape in list(shapes_of(spec).items())[:12]:
        assert torch.equal(whole(src, name, shape), whole(dst, name, shape)), name
    num_bytes = sum(t.nbytes for held in dst.values() for boxes in held.held.values() for _, t in boxes)
    rate = copy_bandwidth() if DEVICE == "cuda" else 1e10
    streams = [torch.cuda.Stream() for _ in range(STREAMS)] if DEVICE == "cuda" else []
    ways = {
        "fused": table.run,
        "graph": captured(lambda: in_turn(pairs, [])),
        "graph_of_streams": captured(lambda: in_turn(pairs, streams)),
        "one_by_one": lambda: in_turn(pairs, []),
    }
    seconds = {name: [timed(work) for _ in range(repeats)] for name, work in ways.items()}
    took = {name: statistics.median(s) for name, s in seconds.items()}
    bound = 2 * num_bytes / rate
    record(
        bench=BENCH, case="repartition", metric="seconds", unit="s", samples=seconds["fused"], baseline="plain copy",
        baseline_value=bound, ratio=bound / took["fused"],
        quality={"gb": round(num_bytes / 1e9, 3), "copies": len(pairs), "through_torch": table.num_plain}
        | {f"{name}_s": round(t, 5) for name, t in took.items() if name != "fused"},
        config={"model": name_of(spec), "src": "dp=4", "dst": "tp=2"},
    )  # fmt: skip
    told = ", ".join(f"{name} {t * 1e3:.2f} ms ({bound / t:.0%})" for name, t in took.items())
    print(f"repartition of {num_bytes / 1e9:.1f} GB in {len(pairs)} copies, a plain copy {bound * 1e3:.2f} ms: {told}")


def pcie_rates(num_bytes: int = 1 << 30) -> tuple[float, float]:
    """Bytes per second from the GPU to page-locked memory, and back."""
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=DEVICE == "cuda")
    gpu = torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE)
    down = statistics.median(timed(lambda: host.copy_(gpu, non_blocking=True)) for _ in range(5))
    up = statistics.median(timed(lambda: gpu.copy_(host, non_blocking=True)) for _ in range(5))
    return num_bytes / down, num_bytes / up


def host_staged(plan: ReshardPlan, src: dict[int, Shards], dst: dict[int, Shards], bucket: int) -> Callable[[], None]:
    """Every box through a ring of page-locked buckets: out on one stream, in on another."""
    pieces: list[tuple[Tensor, Tensor]] = []
    for t in plan.transfers:
        for name, box in plan.tensors_of(t.pieces):
            for common, held in src[t.sender].pieces(name, box):
                for receiver in t.receivers:
                    pieces += [
                        (held[part.slices(common)], target) for part, target in dst[receiver].pieces(name, common)
                    ]
    out, back = (torch.cuda.Stream(), torch.cuda.Stream()) if DEVICE == "cuda" else (None, None)
    ring = [torch.empty(bucket, dtype=torch.uint8, pin_memory=DEVICE == "cuda") for _ in range(4)]
    gpu_out = [torch.empty(bucket, dtype=torch.uint8, device=DEVICE) for _ in ring]
    gpu_in = [torch.empty(bucket, dtype=torch.uint8, device=DEVICE) for _ in ring]
    groups: list[list[tuple[Tensor, Tensor, int]]] = [[]]
    at = 0
    for source, target in pieces:
        rows = max(1, bucket // max(1, source[:1].nbytes))
        for first in range(0, len(source), rows):
            a, b = source[first : first + rows], target[first : first + rows]
            if at + a.nbytes > bucket:
                groups.append([])
                at = 0
            groups[-1].append((a, b, at))
            at += -(-a.nbytes // 16) * 16

    def view(buffer: Tensor, t: Tensor, start: int) -> Tensor:
        return buffer[start : start + t.nbytes].view(t.dtype).view(t.shape)

    def plainly() -> None:
        for a, b in pieces:
            b.copy_(a)

    def run() -> None:
        assert out is not None and back is not None
        arrived = [torch.cuda.Event() for _ in ring]
        used = [torch.cuda.Event() for _ in ring]
        for event in used:
            event.record(back)
        for number, group in enumerate(groups):
            slot = number % len(ring)
            end = group[-1][2] + group[-1][0].nbytes
            with torch.cuda.stream(out):
                out.wait_event(used[slot])
                for a, _, start in group:
                    view(gpu_out[slot], a, start).copy_(a)
                ring[slot][:end].copy_(gpu_out[slot][:end], non_blocking=True)
                arrived[slot].record(out)
            with torch.cuda.stream(back):
                back.wait_event(arrived[slot])
                gpu_in[slot][:end].copy_(ring[slot][:end], non_blocking=True)
                for _, b, start in group:
                    b.copy_(view(gpu_in[slot], b, start))
                used[slot].record(back)
        torch.cuda.synchronize()

    return run if DEVICE == "cuda" else plainly


def measure_host_staged(spec: ModelSpec, repeats: int, bucket: int) -> None:
    plan = make_plan(moved_tensors(spec, {"dp": 4}, {"tp": 2}))
    src, dst = filled_shards(plan, "src", DEVICE, True), filled_shards(plan, "dst", DEVICE, False)
    run = host_staged(plan, src, dst, bucket)
    run()
    for name, shape in list(shapes_of(spec).items())[:12]:
        assert torch.equal(whole(src, name, shape), whole(dst, name, shape)), name
    down, up = pcie_rates(min(1 << 30, 16 * bucket))
    num_bytes = sum(t.nbytes for held in dst.values() for boxes in held.held.values() for _, t in boxes)
    seconds = [timed(run) for _ in range(repeats)]
    bound = num_bytes / min(down, up)
    record(
        bench=BENCH, case="host_staged", metric="seconds", unit="s", samples=seconds, baseline="PCIe, slower direction",
        baseline_value=bound, ratio=bound / statistics.median(seconds),
        quality={"down_gb_s": round(down / 1e9, 2), "up_gb_s": round(up / 1e9, 2), "gb": round(num_bytes / 1e9, 3)},
        config={"model": name_of(spec), "src": "dp=4", "dst": "tp=2", "bucket_mib": bucket >> 20},
    )  # fmt: skip
    print(
        f"host staged: {statistics.median(seconds):.3f} s for {num_bytes / 1e9:.1f} GB, PCIe {down / 1e9:.1f} down "
        f"{up / 1e9:.1f} up GB/s allow {bound:.3f} s ({bound / statistics.median(seconds):.0%})",
        flush=True,
    )


# -- encoded before it is sent --------------------------------------------------------------------------------


def measure_int4(spec: ModelSpec, repeats: int) -> None:
    model = build(spec, device=DEVICE)
    format = parse_format("int4:g128" if spec is LLAMA_8B else "int4:g64")
    weights = [layer.weight.detach() for name, layer in format_linears(model) if name.startswith("blocks")]
    sample = format.encode(weights[0], {})
    assert torch.equal(format.encode(weights[0][:64], {})["codes"], sample["codes"][:64])  # a shard encodes as its part
    most = max(w.nbytes for w in weights)
    host = torch.empty(2 * most, dtype=torch.uint8, pin_memory=DEVICE == "cuda")

    def send(t: Tensor) -> int:
        flat = t.contiguous().view(torch.uint8).flatten()
        host[: len(flat)].copy_(flat, non_blocking=True)
        return len(flat)

    sizes: dict[str, int] = {}

    def dense() -> None:
        sizes["bf16"] = sum(send(w) for w in weights)

    def packed() -> None:
        sizes["int4"] = sum(send(p) for w in weights for p in format.encode(w, {}).values())

    packed()  # warm
    times = {"bf16": [timed(dense) for _ in range(repeats)], "int4": [timed(packed) for _ in range(repeats)]}
    encode = [timed(lambda: [format.encode(w, {}) for w in weights]) for _ in range(repeats)]
    took = {name: statistics.median(t) for name, t in times.items()}
    record(
        bench=BENCH, case="int4_publish", metric="seconds", unit="s", samples=times["int4"],
        baseline="bf16 to the host", baseline_value=took["bf16"], ratio=took["bf16"] / took["int4"],
        quality={"encode_s": round(statistics.median(encode), 4), "int4_gb": round(sizes["int4"] / 1e9, 3),
                 "bf16_gb": round(sizes["bf16"] / 1e9, 3)},
        config={"model": name_of(spec), "format": format.label},
    )  # fmt: skip
    print(
        f"int4 to the host: {took['int4']:.3f} s ({sizes['int4'] / 1e9:.2f} GB, encoding "
        f"{statistics.median(encode):.3f} s), bf16 {took['bf16']:.3f} s ({sizes['bf16'] / 1e9:.2f} GB)",
        flush=True,
    )


# -- a server that changes its weights --------------------------------------------------------------------------


def host_values(target: WeightTarget, model: Decoder) -> dict[str, dict[str, Tensor]]:
    """New weights as a follower would have pulled them: host memory, other values."""
    values = target.empty()
    parameters = dict(model.named_parameters())
    for name, parts in values.items():
        for part, t in parts.items():
            if part == "":
                t.copy_(parameters[name])
                t[..., :1] += 1e-3
            else:
                t.copy_(format_host(model, name.removesuffix(".weight")).parts()[part])
    return values


def measure_swap(spec: ModelSpec, blocks: str, num_requests: int, num_tokens: int) -> None:
    head = "bf16" if blocks == "bf16" else "int8:g0"
    model = build(spec, blocks, head, DEVICE)
    if DEVICE == "cpu":  # whose bf16 products take seconds
        model.compute_dtype = torch.float32
    engine = Engine(model, max_requests=num_requests, max_context=min(1024, spec.max_positions))
    engine.warm_up()
    target = WeightTarget(model)
    values = host_values(target, model)
    num_bytes = sum(t.nbytes for parts in values.values() for t in parts.values())
    addresses = [t.data_ptr() for t in (*model.parameters(), *model.buffers())]
    for number, place in enumerate(("gpu", "host")):
        requests = [engine.add(p, Sampling(max_tokens=num_tokens)) for p in prompts(spec, num_requests, 128, number)]
        for _ in range(num_tokens // 4):
            engine.step()
        before = statistics.median(timed(engine.step) for _ in range(10))
        num_graphs = engine.num_graphs
        began = time.perf_counter()
        prepared = target.prepare(values, staged=place == "gpu")  # by the follower's thread
        prepare_s = time.perf_counter() - began
        version = WeightsVersion("bench", number + 1)
        stall = timed(lambda: engine.update_weights(target, prepared, version))  # noqa: B023
        until_next = timed(engine.step)
        new_graphs = engine.num_graphs - num_graphs  # of prefills of a size not met before; none is captured again
        while engine.busy:
            engine.step()
        assert all(len(r.new_tokens) == num_tokens for r in requests)
        print(
            f"swap of {num_bytes / 1e9:.1f} GB ({blocks}) from the {place}: engine stopped {stall * 1e3:.1f} ms, "
            f"prepared in {prepare_s:.2f} s, the next step recomputes in {until_next * 1e3:.0f} ms, "
            f"a step takes {before * 1e3:.1f} ms",
            flush=True,
        )
        record(
            bench=BENCH, case=f"swap_stall {blocks} from {place}", metric="stall_ms", unit="ms", samples=[stall * 1e3],
            quality={"next_step_ms": round(until_next * 1e3, 2), "usual_step_ms": round(before * 1e3, 3),
                     "prepare_s": round(prepare_s, 4), "gb": round(num_bytes / 1e9, 3), "new_graphs": new_graphs},
            config={"model": name_of(spec), "batch": num_requests, "blocks": blocks},
        )  # fmt: skip
    assert [t.data_ptr() for t in (*model.parameters(), *model.buffers())] == addresses


# -- between two processes ------------------------------------------------------------------------------------


def measure_processes(spec: ModelSpec, num_layers: int, repeats: int) -> None:
    """Two processes that share this GPU: the first one's shards become the second one's."""
    import torch.multiprocessing as mp

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_process, (port, spec, num_layers, repeats), nprocs=2)


def _process(rank: int, port: int, spec: ModelSpec, num_layers: int, repeats: int) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    first, second = MeshLayout((1,), (REPLICATE,), (0,)), MeshLayout((1,), (shard(0),), (1,))
    shapes = {
        n: s for n, s in shapes_of(spec).items() if n.startswith(tuple(f"blocks.{i}." for i in range(num_layers)))
    }
    given = {n: torch.full(s, 0.5, dtype=torch.bfloat16, device=DEVICE) for n, s in shapes.items()} if rank == 0 else {}
    src = {n: (s, first) for n, s in shapes.items()}
    num_bytes = sum(2 * torch.Size(s).numel() for s in shapes.values())
    ways: dict[str, Any] = {"gloo": GroupTransport}
    if DEVICE == "cuda":
        ways = {"cuda_ipc": IpcTransport, **ways}
    took = {}
    for name, make in ways.items():
        mover = Resharder(transport=make())
        samples = []
        for _ in range(1 + (1 if name == "gloo" else repeats)):  # the first one plans and connects
            dist.barrier()
            samples.append(timed(lambda: mover.reshard(given, src=src, dst=second)))  # noqa: B023
        took[name] = samples[1:]
        if rank == 1:
            print(f"  {name}: {', '.join(f'{s:.3f}' for s in samples)} s", flush=True)
    dist.barrier()
    if rank == 1:
        name = next(iter(ways))
        median = {n: statistics.median(s) for n, s in took.items()}
        record(
            bench=BENCH, case="two_processes", metric="seconds", unit="s", samples=took[name],
            baseline="gloo through host memory", baseline_value=median["gloo"], ratio=median["gloo"] / median[name],
            quality={"gb": round(num_bytes / 1e9, 3), "gb_s": round(num_bytes / 1e9 / median[name], 2)},
            config={"model": name_of(spec), "transport": name, "layers": num_layers},
        )  # fmt: skip
        told = ", ".join(f"{n} {m * 1e3:.1f} ms ({num_bytes / 1e9 / m:.1f} GB/s)" for n, m in median.items())
        print(f"from process to process, {num_bytes / 1e9:.2f} GB: {told}", flush=True)
    dist.destroy_process_group()


def name_of(spec: ModelSpec) -> str:
    return "Llama 8B shape" if spec is LLAMA_8B else "small"


# -- tables -----------------------------------------------------------------------------------------------------


def plans_table() -> str:
    """Simulated plans against their bound."""
    lines = [n for n in newest(BENCH) if n["config"].get("model") != "small"]
    plan_s = {n["case"]: n["value"] for n in lines if n["metric"] == "plan_s"}
    rows, used = [], []
    for n in lines:
        if n["metric"] == "makespan_s":
            q = n["quality"]
            cells = [n["case"], f"{n['baseline_value']:.3f} s", f"{n['value']:.3f} s", f"{q['natural_s']:.3f} s"]
            rows.append([*cells, f"{q['naive_s']:.3f} s", f"{plan_s.get(n['case'], 0) * 1e3:.0f} ms"])
            used.append(n)
    header = ["Llama 8B shape, bf16", "bound", "planned", "natural order", "a message to each", "time to plan"]
    return markdown(header, rows) + (provenance(used) if used else "")


def gpu_table() -> str:
    """What moving and swapping an 8B model costs on a GPU."""
    lines = [n for n in newest(BENCH) if n["metric"] in ("seconds", "stall_ms") and n["config"].get("model") != "small"]
    rows = []
    for n in lines:
        if n["metric"] == "seconds":
            rows.append(
                [
                    n["case"].replace("_", " "),
                    f"{n['value'] * 1e3:.1f} ms",
                    n["baseline"],
                    f"{n['baseline_value'] * 1e3:.1f} ms",
                    f"{n['ratio']:.2f}x",
                ]
            )
        else:
            q = n["quality"]
            rows.append(
                [
                    n["case"].replace("_", " "),
                    f"{n['value']:.1f} ms",
                    "a usual step",
                    f"{q['usual_step_ms']:.1f} ms",
                    "",
                ]
            )
    header = ["Llama 8B shape", "time", "against", "its time", "ratio"]
    return markdown(header, rows) + (provenance(lines) if lines else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a small model, to try the script")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="GPU parts with one of these words in their name")
    parser.add_argument("--most-seconds", type=float, default=600, help="begin no part after so long")
    args = parser.parse_args()
    began = time.monotonic()
    spec = SMALL if args.small else LLAMA_8B
    if DEVICE == "cpu" and not args.small:
        raise UserError("there is no GPU here: give --small to try the script")
    bucket = 1 << 20 if args.small else 64 << 20
    packed = "int4:g64" if args.small else "int4:g128"
    parts: dict[str, Callable[[], None]] = {
        "repartition": lambda: measure_repartition(spec, 11),
        "two processes": lambda: measure_processes(spec, 2, 3),
        "bf16 swap": lambda: measure_swap(spec, "bf16", 16, 64),
        "int4 swap": lambda: measure_swap(spec, packed, 16, 64),
        "host staged": lambda: measure_host_staged(spec, 5, bucket),
        "int4 published": lambda: measure_int4(spec, 3),
    }
    for name, part in parts.items():
        if args.only and not any(word in name for word in args.only):
            continue
        if time.monotonic() - began > args.most_seconds:
            print(f"{name}: not measured, {args.most_seconds:.0f} s are over", flush=True)
            continue
        part()
        gc.collect()
        torch.cuda.empty_cache()
        print(f"-- {name}: done after {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    as_command(main)
