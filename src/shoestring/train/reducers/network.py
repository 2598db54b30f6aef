"""What the links between processes can do: latency, jitter and bandwidth of every pair, and of a whole exchange.

Pairs are measured one after the other, so that they do not disturb each other. An exchange is measured with all
processes at once, as a step uses it: that is the number that `reducer=auto` decides by.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shoestring.mesh import Mesh
from shoestring.train.reducers.rounds import Exchange, Link, ToAll, as_bytes, from_bytes

PINGS = 20
LONG_ENOUGH_S = 0.1  # a transfer of this time tells the bandwidth
FIRST_BYTES, MOST_BYTES = 1 << 16, 1 << 26


@dataclass(frozen=True)
class Pairs:
    """[from, to], in milliseconds and Mbit/s; the diagonal is 0."""

    latency_ms: list[list[float]]
    jitter_ms: list[list[float]]
    mbit: list[list[float]]


def measure_pairs(mesh: Mesh) -> Pairs:
    """All processes call it together."""
    size, found = mesh.world_size, torch.zeros(3, mesh.world_size, mesh.world_size, dtype=torch.float64)
    for a in range(size):
        for b in range(size):
            if a == b:
                continue
            if mesh.rank == a:
                found[:, a, b] = torch.tensor(_ask(b, mesh.device), dtype=torch.float64)
            elif mesh.rank == b:
                _answer(a, mesh.device)
            mesh.barrier()
    total = found.to(mesh.device, torch.float32)
    dist.all_reduce(total)
    latency, jitter, mbit = total.tolist()
    return Pairs(latency, jitter, mbit)


def _ask(peer: int, device: torch.device) -> tuple[float, float, float]:
    """(latency in ms, jitter in ms, Mbit/s) to a peer that runs _answer."""
    trips = [_trip(peer, 8, device) for _ in range(PINGS + 2)][2:]
    half = [t * 500 for t in trips]  # ms one way
    latency, num = statistics.median(half), FIRST_BYTES
    while True:
        took = _trip(peer, num, device)
        if took >= LONG_ENOUGH_S or num >= MOST_BYTES:
            break
        num *= 4
    _trip(peer, 0, device)
    spread = sorted(half)
    jitter = spread[int(0.9 * len(spread))] - spread[int(0.1 * len(spread))]
    return latency, jitter, num * 8 / max(took - latency / 1e3, 1e-9) / 1e6


def _trip(peer: int, num: int, device: torch.device) -> float:
    """Seconds to send so many bytes and hear that they came; 0 bytes: this was the last one."""
    began = time.perf_counter()
    dist.send(torch.tensor([num], device=device), peer)
    if num:
        dist.send(torch.zeros(num, dtype=torch.uint8, device=device), peer)
    heard = torch.zeros(1, device=device)
    dist.recv(heard, peer)
    float(heard)  # waits for a GPU
    return time.perf_counter() - began


def _answer(peer: int, device: torch.device) -> None:
    while True:
        size = torch.zeros(1, dtype=torch.int64, device=device)
        dist.recv(size, peer)
        num = int(size)
        if num:
            dist.recv(torch.empty(num, dtype=torch.uint8, device=device), peer)
        dist.send(torch.ones(1, device=device), peer)
        if not num:
            return


@dataclass(frozen=True)
class LinkSpeed:
    """Of one message that all processes of a link send at once."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, sent_bytes: float, num_rounds: int) -> float:
        return num_rounds * self.latency_s + sent_bytes / self.bytes_per_s


def measure_link(link: Link, device: torch.device) -> LinkSpeed:
    """All processes call it together and get the same answer, that of the slowest."""
    latency = min(_slowest(link, 8, device) for _ in range(5))
    num = FIRST_BYTES
    while True:
        took = _slowest(link, num, device)
        if took >= LONG_ENOUGH_S or num >= MOST_BYTES:
            break
        num *= 4
    sent = (link.size - 1) * num
    return LinkSpeed(latency, sent / max(took - latency, 1e-9))


def _slowest(link: Link, num: int, device: torch.device) -> float:
    began = time.perf_counter()
    answer = link.run(_send(torch.zeros(num, dtype=torch.uint8, device=device)))
    float(answer[0, 0])
    return largest(link, time.perf_counter() - began, device)


def _send(payload: Tensor) -> Exchange[Tensor]:
    return (yield ToAll(payload))


def largest(link: Link, value: float, device: torch.device) -> float:
    """The largest of the processes' numbers."""
    return max(
        from_bytes(link.run(_send(as_bytes(torch.tensor([value], device=device)))), torch.float32).view(-1).tolist()
    )
