"""A goodput controller that keeps count of what it does, for bench/drafter_speed.py.

Steps by kind with their milliseconds and tokens, and each that took five times as long as expected with where its
time went: the drafter's device or host, texts that it read, memory that was asked of the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shoestring.serve.goodput import Goodput

SLOW, FEW = 5, 4  # times the expected seconds of a step that is told of, and how many of a turn


class Watched(Goodput):
    """A controller that keeps count of what it does."""

    def __init__(self, profile: Callable[[int], float]) -> None:
        super().__init__(profile)
        self.done: dict[str, list[float]] = {}  # kind of step -> how many, their milliseconds, their tokens
        self.slow: list[str] = []
        self.proposed: list[float] = [0.0, 0, 0]  # of the last proposal: host seconds, passes and rows read

    def stepped(self, rows: int, seconds: float, num_new: int, *, ahead: bool = False) -> None:
        num, drafts = self._step
        kind = (
            f"{'probe' if self.probing else 'draft' if self._usual else 'read'} {drafts}"
            if drafts
            else "plain"
        )
        spent = seconds + self.draft_seconds
        found = self.done.setdefault(kind, [0, 0.0, 0])
        for i, value in enumerate((1, 1e3 * spent, num_new)):
            found[i] += value
        expected = self.seconds(num or rows, drafts)
        if spent > SLOW * expected and len(self.slow) < FEW:
            host, passes, read = self.proposed if drafts else (0.0, 0, 0)
            self.slow.append(
                f"{kind} of {num or rows} requests {1e3 * spent:.1f} ms instead of {1e3 * expected:.1f}: drafts "
                f"{1e3 * self.draft_seconds:.1f}, host in propose {1e3 * host:.1f}, {read:.0f} rows read in "
                f"{passes:.0f} passes, {device_allocs()} allocations on the device so far"
            )
        super().stepped(rows, seconds, num_new, ahead=ahead)

    def told(self, num_requests: int) -> str:
        """What happened since the last time."""
        steps = ", ".join(
            f"{k}: {n:.0f} in {ms:.0f} ms gave {new:.0f}" for k, (n, ms, new) in self.done.items()
        )
        account, slow = self.account(num_requests), "".join(f"\n        slow: {line}" for line in self.slow)
        self.done, self.slow = {}, []
        return (
            f"{steps}; won {1e3 * account.won:.1f} ms, may lose {1e3 * account.balance:.1f}, reading "
            f"{1e3 * self.read_seconds(num_requests):.1f} ms, purse {1e3 * (self.purse or 0):.1f} of "
            f"{1e3 * self._due:.1f} ms{slow}"
        )


def watch(drafter: Any) -> list[float]:
    """Host seconds, passes and rows read of its last proposal, from now on."""
    propose, read, last = drafter.propose, getattr(drafter, "_read", None), [0.0, 0, 0]

    def timed(requests: Sequence[Any], n: int) -> Any:
        last[:] = [0.0, 0, 0]
        began = time.perf_counter()
        found = propose(requests, n)
        last[0] = time.perf_counter() - began
        return found

    def counted(part: Sequence[tuple[Any, int]]) -> Any:
        last[1:] = [last[1] + 1, last[2] + sum(num for _, num in part)]
        assert read is not None
        return read(part)

    drafter.propose = timed
    if read is not None:
        drafter._read = counted
    return last


def device_allocs() -> int:
    return int(torch.cuda.memory_stats().get("num_device_alloc", 0)) if torch.cuda.is_available() else 0
