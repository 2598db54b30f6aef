"""Rounds: how replicas exchange bytes, apart from what the bytes mean.

An exchange is a generator. It yields a `ToOwners` or a `ToAll` and gets back what the other replicas gave to the same
round. It knows no process group, so the same exchange runs over real links (`Link`) and, for tests and for studies of
loss curves, for all replicas inside one process (`emulate`), bit for bit equal.

`together` runs many exchanges in step and joins their payloads: 40 tensors cost as many messages as one.

Nothing is summed by the network. The rank that owns a part adds what it received in the order of the ranks, so a sum
does not depend on the algorithm of a collective, and all replicas end with the same bits. The traffic is that of a ring
all-reduce.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class ToOwners:
    """uint8 [ranks, bytes]: row r goes to rank r. The answer has the same shape; its row r came from rank r."""

    payload: Tensor


@dataclass(frozen=True)
class ToAll:
    """uint8 [bytes], to every rank. The answer is [ranks, bytes]."""

    payload: Tensor


Round = ToOwners | ToAll
Exchange = Generator[Round, Tensor, T]


def together(exchanges: Sequence[Exchange[T]]) -> Exchange[list[T]]:
    """All exchanges in step, with one message per kind and round; returns their results in order."""
    results: list[Any] = [None] * len(exchanges)
    waiting: dict[int, Round] = {}

    def advance(i: int, answer: Tensor | None) -> None:
        try:
            # The first send of a generator must be None.
            waiting[i] = exchanges[i].send(answer)  # type: ignore[arg-type]
        except StopIteration as stop:
            waiting.pop(i, None)
            results[i] = stop.value

    for i in range(len(exchanges)):
        advance(i, None)
    while waiting:
        for kind in (ToOwners, ToAll):
            asked = {i: r.payload for i, r in waiting.items() if isinstance(r, kind)}
            if not asked:
                continue
            joined = torch.cat(list(asked.values()), dim=-1)
            answers = (yield kind(joined)).split([p.shape[-1] for p in asked.values()], dim=-1)
            for i, answer in zip(asked, answers, strict=True):
                advance(i, answer)
    return results


def emulate(exchanges: Sequence[Exchange[T]]) -> list[T]:
    """Run the exchanges of all replicas in this process; returns the result of each replica."""
    results: list[Any] = [None] * len(exchanges)
    rounds: list[Round | None] = []

    def advance(rank: int, answer: Tensor | None) -> Round | None:
        try:
            return exchanges[rank].send(answer)  # type: ignore[arg-type]
        except StopIteration as stop:
            results[rank] = stop.value
            return None

    rounds = [advance(rank, None) for rank in range(len(exchanges))]
    while any(r is not None for r in rounds):
        kinds = {type(r) for r in rounds}
        assert len(kinds) == 1, f"replicas are not in the same round: {kinds}"
        payloads = torch.stack([r.payload for r in rounds if r is not None])
        if kinds == {ToOwners}:
            answers = list(payloads.transpose(0, 1).contiguous())
        else:
            answers = [payloads] * len(exchanges)
        rounds = [advance(rank, answer) for rank, answer in enumerate(answers)]
    return results


def run_with(answer_to: Callable[[Round], Tensor], exchange: Exchange[T]) -> T:
    """Run one exchange to its end; `answer_to` answers each of its rounds."""
    answer: Any = None
    while True:
        try:
            asked = exchange.send(answer)
        except StopIteration as stop:
            return stop.value
        answer = answer_to(asked)


def echo(exchange: Exchange[T], size: int) -> T:
    """Run one exchange whose answers are its own bytes: what it computes, without a network, to be timed."""
    return run_with(lambda r: r.payload if isinstance(r, ToOwners) else r.payload.expand(size, -1), exchange)


class Link:
    """Runs exchanges over a process group; None is one process. Counts the bytes that this rank sends."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.sent_bytes = 0
        self.seconds = 0.0

    def run(self, exchange: Exchange[T]) -> T:
        return run_with(self._answer, exchange)

    def _answer(self, asked: Round) -> Tensor:
        payload = asked.payload.contiguous()
        if self.group is None:
            return payload if isinstance(asked, ToOwners) else payload[None]
        began = time.perf_counter()
        if isinstance(asked, ToAll) and payload.device.type != "cpu":
            answer = payload.new_empty(self.size, payload.numel())
            dist.all_gather(list(answer), payload, group=self.group)
        else:
            # On CPUs ToAll too: gloo's all_gather passes messages around a ring, so that each waits for the one before.
            if isinstance(asked, ToAll):
                payload = payload.expand(self.size, -1).contiguous()
            answer = torch.empty_like(payload)
            dist.all_to_all_single(answer, payload, group=self.group)
        self.sent_bytes += answer.numel() // self.size * (self.size - 1)
        self.seconds += time.perf_counter() - began
        return answer


# -- bytes -------------------------------------------------------------------------------------------


def as_bytes(t: Tensor) -> Tensor:
    """The bytes of a tensor, along its last dim."""
    return t.contiguous().view(torch.uint8)


def from_bytes(data: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of as_bytes; copies where a part of a message does not lie on a multiple of its dtype."""
    size = dtype.itemsize
    if not data.numel():  # neither its address nor its strides say anything
        return data.new_empty((*data.shape[:-1], data.shape[-1] // size), dtype=dtype)
    aligned = data.stride(-1) == 1 and not any(n % size for n in (data.data_ptr(), *data.stride()[:-1]))
    return data.view(dtype) if aligned else data.clone(memory_format=torch.contiguous_format).view(dtype)
