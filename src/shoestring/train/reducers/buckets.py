"""Buckets of gradients that are sent while the backward pass goes on (overlap=true).

Parameters are cut into buckets in the reverse of their order, which is about the order in which a backward pass
finishes them. A bucket is sent by a thread of its own as soon as its gradients are complete and the buckets before it
are sent, so that all replicas send in the same order.

Gradients are complete after the last micro-batch: the trainer says how many there are (`expect`). What is not complete
when the passes are over (a parameter without a gradient, a captured graph, which fires no hooks) is sent by `finish`.

The norm of the whole gradient is not known while it is sent. RunningClip bounds each tensor by its own history instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch
from torch import Tensor, nn

BUCKET_BYTES = 4 << 20
CLIP_RATIO, NORM_MEMORY = 3.0, 0.9


class RunningClip:
    """Clips each tensor to `ratio` times its running norm (0: never)."""

    def __init__(self, names: Sequence[str], ratio: float = CLIP_RATIO) -> None:
        self.ratio, self.place = ratio, {name: i for i, name in enumerate(names)}
        self.norms = torch.full((len(names),), -1.0, dtype=torch.float64)  # -1: not seen yet

    def __call__(self, name: str, gradient: Tensor) -> Tensor:
        if not self.ratio:
            return gradient
        norm, at = float(gradient.norm()), self.place[name]
        usual = float(self.norms[at])
        usual = norm if usual < 0 else usual
        most = self.ratio * usual
        scale = most / norm if norm > most > 0 else 1.0
        self.norms[at] = NORM_MEMORY * usual + (1 - NORM_MEMORY) * norm * scale
        return gradient * scale


class Buckets:
    """`send` gets the number of a bucket and its names, in a thread of its own, one bucket after the other."""

    def __init__(self, params: Mapping[str, nn.Parameter], send: Callable[[int, list[str]], None]) -> None:
        self.params, self.send = params, send
        self.buckets = _cut(params)
        self.bucket_of = {name: i for i, names in enumerate(self.buckets) for name in names}
        self.worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gradients")
        self.expect(1)
        for name, param in params.items():
            param.register_post_accumulate_grad_hook(self._hook(name))

    def expect(self, num_micros: int) -> None:
        """Before the passes of a step."""
        self.left = dict.fromkeys(self.params, num_micros)
        self.missing = [len(names) for names in self.buckets]
        self.sent: list[Future[None]] = []

    def finish(self) -> None:
        """Send what is left, and wait; raises what sending raised."""
        while len(self.sent) < len(self.buckets):
            self._submit()
        wait(self.sent)  # all: after an error the caller may use the process group, which one of them would still use
        for sent in self.sent:
            sent.result()

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        def passed(param: Tensor) -> None:
            self.left[name] -= 1
            if self.left[name] == 0:
                self.missing[self.bucket_of[name]] -= 1
                while len(self.sent) < len(self.buckets) and self.missing[len(self.sent)] == 0:
                    self._submit()

        return passed

    def _submit(self) -> None:
        number = len(self.sent)
        names = [n for n in self.buckets[number] if self.params[n].grad is not None]
        self.sent.append(self.worker.submit(self.send, number, names))


def _cut(params: Mapping[str, nn.Parameter]) -> list[list[str]]:
    buckets: list[list[str]] = [[]]
    size = 0
    for name, param in reversed(list(params.items())):
        if buckets[-1] and size + param.numel() * 4 > BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(name)
        size += param.numel() * 4
    return buckets
