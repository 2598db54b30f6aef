"""reducer=auto: choose the compressor whose exchange takes the least time on this link and this machine.

    seconds of a step = computing gradients + encoding and decoding + rounds * latency + bytes / bandwidth

Computing gradients is the same for all of them and does not decide. Encoding is timed on tensors of the real shapes,
latency and bandwidth on the real link (network.py); the slowest process counts, so all processes choose the same.
Without `allow=lossy`, only sums that follow the plain loss closely are candidates: plain, bf16, int8, int4.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shoestring.train.reducers.compressor import Compressor
from shoestring.train.reducers.feedback import Compression
from shoestring.train.reducers.low_rank import PowerSGD
from shoestring.train.reducers.network import LinkSpeed, largest, measure_link
from shoestring.train.reducers.quantizers import BF16, INT4, INT8, PLAIN
from shoestring.train.reducers.rounds import Link, echo
from shoestring.train.reducers.sparsifiers import ArcTopK, TopKSparsifier

CLOSE = (PLAIN, BF16, INT8, INT4)
TRIES = 3  # of the encoding, of which the fastest counts
LOSSY = (TopKSparsifier(0.01), PowerSGD(4))


@dataclass(frozen=True)
class Estimate:
    compressor: Compressor
    work_s: float
    sent_bytes: int
    seconds: float


def choose_compressor(
    link: Link,
    shapes: Mapping[str, torch.Size],
    per_tensor: Callable[[Compressor], Mapping[str, Compressor]],
    device: torch.device,
    *,
    lossy: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Compressor:
    """All processes call it together. `per_tensor`: which compressor each tensor gets where one is wanted."""
    speed = measure_link(link, device)
    estimates = []
    for wanted in (*CLOSE, *(LOSSY if lossy else ())):
        chosen = per_tensor(wanted)
        work = largest(link, work_seconds(chosen, shapes, link.size, device), device)
        estimates.append(estimate(wanted, chosen, shapes, link.size, speed, work))
    best = fastest(estimates)
    say(explain(speed, estimates, best))
    return best.compressor


def estimate(
    wanted: Compressor,
    chosen: Mapping[str, Compressor],
    shapes: Mapping[str, torch.Size],
    size: int,
    speed: LinkSpeed,
    work_s: float,
) -> Estimate:
    sent = sum(chosen[name].sent_bytes(shape, size) for name, shape in shapes.items())
    return Estimate(wanted, work_s, sent, work_s + speed.seconds(sent, num_rounds(wanted)))


def fastest(estimates: list[Estimate]) -> Estimate:
    return min(estimates, key=lambda e: e.seconds)


def num_rounds(compressor: Compressor) -> int:
    """Messages of an exchange, one after the other, and the header."""
    return 1 + {PowerSGD: 4, ArcTopK: 4}.get(type(compressor), 2)


def work_seconds(
    chosen: Mapping[str, Compressor], shapes: Mapping[str, torch.Size], size: int, device: torch.device
) -> float:
    """Time to encode, add up and decode tensors of these shapes once, without waiting for the network."""
    by_shape: dict[torch.Size, Tensor] = {s: torch.randn(s, device=device) for s in set(shapes.values())}
    values = {name: by_shape[shape] for name, shape in shapes.items()}
    compression = Compression(chosen, rank=0, size=size)
    took = []
    for step in range(1 + TRIES):  # the first one compiles kernels
        began = time.perf_counter()
        echo(compression.exchange(values, step), size)
        if device.type == "cuda":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    return min(took[1:])


def explain(speed: LinkSpeed, estimates: list[Estimate], best: Estimate) -> str:
    times = ", ".join(f"{e.compressor.name} {e.seconds * 1e3:.0f} ms" for e in estimates)
    link = f"{speed.bytes_per_s * 8 / 1e6:,.0f} Mbit/s and {speed.latency_s * 1e3:.2g} ms"
    return (
        f"reducer=auto takes {best.compressor.name}: the link has {link}, so summing gradients takes {times} a step "
        f"({best.work_s * 1e3:.0f} ms of it encoding)"
    )
