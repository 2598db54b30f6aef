"""Pipelines: gradients against one process, and steps over shaped links beside torch's public 1F1B and the simulator.

    python -m benchmarks.pipeline gradients        about a minute on two cores
    python -m benchmarks.pipeline links            as root on Linux; about five minutes

`gradients`: the largest relative difference of any parameter's gradient, over a tiny Decoder on four gloo processes.
`links`: four stages in network namespaces at 200 Mbit/s. Two cores cannot compute four stages at once, so that a pass
is a wait of declared length; what is measured is the order and the transfers. The activation is sized so that it
crosses a link in half of a forward pass, or in a whole one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.communication_links import NAME, namespaces
from benchmarks.results import markdown, newest, provenance, record
from shoestring.formats.linear import full
from shoestring.mesh import Mesh, MeshConfig, open_mesh
from shoestring.model import ModelSpec
from shoestring.model.parallel import ParallelConfig
from shoestring.train.objectives import CrossEntropy
from shoestring.train.pipeline import StagePipeline, stages_of
from shoestring.train.pipeline_order import Costs, make_order, simulate
from shoestring.train.pretraining import build_model
from shoestring.train.step import Micro, PlainForwardBackward
from shoestring.train.torch_pipelining import Runtime

BENCH, STAGES, MICROS, MBIT = "pipeline", 4, 16, 200
FORWARD, BACKWARD = 0.1, 0.2  # seconds
HOPS = (0.5, 1.0)  # in forward passes
STEPS = 3
OURS, TORCH = ("eager1f1b", "1f1b"), "torch 1f1b"
MESHES = {"pp=4": MeshConfig(pp=4), "pp=2,dp=2": MeshConfig(pp=2, dp=2), "pp=2,tp=2": MeshConfig(pp=2, tp=2)}
SPEC = ModelSpec(
    vocab_size=64, d_model=32, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=64, max_positions=32
)  # fmt: skip


# -- stages that wait ------------------------------------------------------------------------------------------


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counter: list[int]) -> Tensor:
        ctx.counter = counter
        counter[0] += 1
        counter[1] = max(counter)
        time.sleep(FORWARD)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.counter[0] -= 1
        time.sleep(BACKWARD)
        return grads[0], torch.zeros(()), None


class WaitingStage(nn.Module):
    def __init__(self, last: bool) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.ones(())), last
        self.live = [0, 0]  # micro-batches whose activations are held now, and at most

    def forward(self, x: Tensor, **rest: Any) -> Tensor:
        out = _Wait.apply(x, self.weight, self.live)
        return out.sum() if self.last else out


def step_of(case: str, module: WaitingStage, x: Tensor, group: dist.ProcessGroup, rank: int) -> Callable[[], None]:
    device = torch.device("cpu")
    if case == TORCH:
        travels = x.clone().requires_grad_()
        output = torch.zeros((), requires_grad=True) if module.last else travels
        stage = PipelineStage(module, rank, STAGES, device, x if rank == 0 else travels, output, group=group)
        public = Schedule1F1B(stage, MICROS, loss_fn=lambda out, target: out, scale_grads=False)

        def step() -> None:
            stage.has_backward = True
            stage.clear_runtime_states()
            inputs: list[tuple[Tensor, ...]] = [(x,) if rank == 0 else () for _ in range(MICROS)]
            public._step_microbatches(inputs, [{}] * MICROS, [x] * MICROS, None, return_outputs=False)

        return step
    order = make_order(case, STAGES, MICROS)
    runtime = Runtime({rank: module}, order, MICROS, group, device, first_input=x, carried=x, loss=lambda out, _: out)
    return lambda: runtime.step([x] * MICROS, [{}] * MICROS)


def wait_in_stages() -> None:
    mesh = open_mesh(MeshConfig(pp=STAGES), "cpu", stages=True)
    group = mesh.group("pp")
    assert group is not None
    for hop in HOPS:
        x = torch.ones(int(MBIT * 1e6 / 8 * hop * FORWARD / 4))
        for case in (*OURS, TORCH):
            module = WaitingStage(mesh.stage == STAGES - 1)
            step, times = step_of(case, module, x, group, mesh.stage), []
            for _ in range(STEPS + 1):
                mesh.barrier()
                began = time.perf_counter()
                step()
                mesh.barrier()
                times.append(time.perf_counter() - began)
            live: list[Any] = [None] * STAGES
            dist.all_gather_object(live, module.live[1])
            if mesh.is_main:
                print(json.dumps({"case": case, "hop": hop, "times": times[1:], "live": live}), flush=True)
    mesh.close()


# -- gradients ---------------------------------------------------------------------------------------------------


def micros_of(share: int, num: int) -> list[Micro]:
    g = torch.Generator().manual_seed(share)
    rows = [torch.randint(0, SPEC.vocab_size, (2, 17), generator=g) for _ in range(num)]
    return [Micro(r[:, :-1].contiguous(), r[:, 1:].contiguous(), torch.zeros_like(r[:, 1:])) for r in rows]


def compare_gradients() -> None:
    from dataclasses import replace

    alone = Mesh(0, 1, torch.device("cpu"))
    for named, cfg in MESHES.items():
        mesh = open_mesh(cfg, "cpu", stages=True)
        cut_by_fsdp = cfg.dp > 1
        for case in ("gpipe", "1f1b", "eager1f1b", *(() if cut_by_fsdp else ("interleaved", "zero-bubble"))):
            for tied in (False, True):
                spec = replace(SPEC, tied=tied)
                shares = [micros_of(i, 4) for i in range(mesh.dp_size)]
                total = float(sum(m.num_counted for micros in shares for m in micros))
                whole = build_model(spec, alone, ParallelConfig())
                PlainForwardBackward()(whole, CrossEntropy(), [m for micros in shares for m in micros], total)
                wanted = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
                stages = stages_of(spec, cfg, case)
                assert stages is not None
                model = build_model(spec, mesh, ParallelConfig(), stages=stages)
                StagePipeline(model, mesh, stages, case)(model, CrossEntropy(), shares[mesh.dp_rank], total)
                off = [
                    float((full(p.grad) - wanted[n]).abs().max() / wanted[n].abs().max())
                    for n, p in model.named_parameters()
                    if p.grad is not None
                ]
                worst = torch.tensor(max(off))
                dist.all_reduce(worst, op=dist.ReduceOp.MAX)
                if mesh.is_main:
                    found = {"case": case, "stages": named, "tied": tied, "difference": float(worst)}
                    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


# -- the bench ---------------------------------------------------------------------------------------------------


def on_stages(mode: str, mbit: int | None) -> list[dict[str, Any]]:
    with namespaces(mbit) if mbit else nullcontext():
        workers = []
        for r in range(STAGES):
            env = {
                **os.environ,
                **{"MASTER_ADDR": "10.77.0.1" if mbit else "127.0.0.1", "MASTER_PORT": "29513"},
                **{"WORLD_SIZE": str(STAGES), "RANK": str(r), "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"},
                "GLOO_SOCKET_IFNAME": f"{NAME}v{r}" if mbit else "lo",
            }
            inside = ["ip", "netns", "exec", f"{NAME}{r}"] if mbit else []
            command = [*inside, sys.executable, "-m", "benchmarks.pipeline", mode, "--worker"]
            workers.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE if r == 0 else None, text=True))
        said = workers[0].communicate()[0]
        assert all(w.wait() == 0 for w in workers), "a stage failed"
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def measure_links() -> None:
    found = on_stages("links", MBIT)
    public = {f["hop"]: statistics.median(f["times"]) for f in found if f["case"] == TORCH}
    for f in found:
        about: dict[str, Any] = {"bench": BENCH, "case": f["case"]}
        about["config"] = {"stages": STAGES, "micros": MICROS, "hop": f["hop"]}
        against: dict[str, Any] = {}
        if f["case"] != TORCH:
            slow = public[f["hop"]]
            against = {"baseline": TORCH, "baseline_value": slow, "ratio": slow / statistics.median(f["times"])}
        record(**about, metric="step_s", unit="s", samples=f["times"], **against)
        record(**about, metric="live_micros", unit="micro-batches", samples=[f["live"][0]])
        order = make_order("1f1b" if f["case"] == TORCH else f["case"], STAGES, MICROS)
        made = simulate(order, Costs(FORWARD, BACKWARD, f["hop"] * FORWARD), blocking=f["case"] == TORCH)
        record(**about, metric="simulated_s", unit="s", samples=[made.makespan])


def measure_gradients() -> None:
    for f in on_stages("gradients", None):
        about = {"bench": BENCH, "case": f["case"], "config": {"stages": f["stages"], "tied": f["tied"]}}
        record(**about, metric="gradient_difference", unit="relative", samples=[f["difference"]])


def table() -> str:
    lines = [n for n in newest(BENCH) if n["metric"] in ("step_s", "simulated_s", "live_micros")]
    by = {(n["case"], n["config"]["hop"], n["metric"]): n for n in lines}
    rows = []
    for hop in HOPS:
        for case in (*OURS, TORCH):
            step = by.get((case, hop, "step_s"))
            if step is None:
                continue
            ratio = "" if step["ratio"] is None else f"{step['ratio']:.2f}x"
            simulated, live = (by[case, hop, m]["value"] for m in ("simulated_s", "live_micros"))
            rows.append([f"{hop:g}", case, f"{step['value']:.2f} s", f"{simulated:.2f} s", ratio, f"{live:.0f}"])
    header = [
        "hop, in forward passes",
        "order",
        "step",
        "simulated",
        "against torch's 1F1B",
        "live micro-batches, first stage",
    ]
    return markdown(header, rows) + provenance(lines)


def gradient_table() -> str:
    lines = [n for n in newest(BENCH) if n["metric"] == "gradient_difference"]
    rows = []
    for stages in dict.fromkeys(n["config"]["stages"] for n in lines):
        here = [n for n in lines if n["config"]["stages"] == stages]
        names = ", ".join(dict.fromkeys(n["case"] for n in here))
        rows.append([stages, names, f"{max(n['value'] for n in here):.1e}"])
    return markdown(["mesh", "schedules, tied and untied", "largest difference"], rows) + provenance(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["gradients", "links"])
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        (wait_in_stages if args.what == "links" else compare_gradients)()
    else:
        (measure_links if args.what == "links" else measure_gradients)()


if __name__ == "__main__":
    main()
