"""Runs on every rank of test_reshard_wires.py, each inside the network namespace of its host.

ranks_wires.py time MEGABYTES        the naive and the planned transfer, in seconds; rank 0 prints them
ranks_wires.py pulled MEGABYTES      a planned transfer during which the test pulls a link
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from experiments.reshard_strategies import naive_plan
from shoestring.state.reshard.execute import GroupTransport, Shards, execute
from shoestring.state.reshard.layouts import REPLICATE, MeshLayout
from shoestring.state.reshard.plan import ReshardPlan, make_plan
from shoestring.state.reshard.tasks import MovedTensor
from shoestring.state.reshard.topology import GBIT, Topology

HOSTS = {0: "h0", 1: "h1", 2: "h1", 3: "h2", 4: "h2", 5: "h3", 6: "h3"}


def plan_for(num: int, planner: Callable[..., ReshardPlan] = make_plan) -> ReshardPlan:
    """From the one rank of the first host to both ranks of the three others."""
    src, dst = MeshLayout((1,), (REPLICATE,), (0,)), MeshLayout((6,), (REPLICATE,), (1, 2, 3, 4, 5, 6))
    tensors = {f"t{i}": MovedTensor((num // 4 // 1000, 250), 4, src, dst) for i in range(4)}
    return planner(tensors, Topology(hosts=HOSTS, nic_rate=0.2 * GBIT))


def move(plan: ReshardPlan) -> float:
    rank = dist.get_rank()
    held, dtypes = {}, {}
    for kind in plan.classes:
        for i, name in enumerate(kind.names):
            generator = torch.Generator().manual_seed(i)
            whole = torch.randn(kind.info.shape, generator=generator)
            held[name] = [(kind.info.src.tiles(kind.info.shape)[0][0], whole)]
            dtypes[name] = torch.float32
    empty = Shards({n: [(box, torch.zeros_like(t)) for box, t in boxes] for n, boxes in held.items()})
    dist.barrier()
    began = time.monotonic()
    damaged = execute(plan, rank, Shards(held if rank == 0 else {}), empty, dtypes, GroupTransport())
    dist.barrier()
    took = time.monotonic() - began
    assert not damaged
    if rank:
        assert all(torch.equal(empty.held[n][0][1], held[n][0][1]) for n in held), "the bytes differ"
    return took


if __name__ == "__main__":
    torch.set_num_threads(1)
    mode, num = sys.argv[1], int(float(sys.argv[2]) * 1e6)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20 if mode == "pulled" else 120))
    if mode == "time":
        planned, naive = plan_for(num), plan_for(num, naive_plan)
        move(plan_for(num // 20))  # connections
        times = {"planned": min(move(planned) for _ in range(2)), "naive": move(naive)}
        if dist.get_rank() == 0:
            print(f"RESULT {times['planned']} {times['naive']} {planned.slow_bytes} {naive.slow_bytes}", flush=True)
        dist.barrier()
        os._exit(0)
    try:
        if dist.get_rank() == 0:
            print("MOVING", flush=True)
        move(plan_for(num))
        print("ARRIVED", flush=True)
    except Exception as error:
        print(f"FAILED {type(error).__name__}", flush=True)
    os._exit(0)
