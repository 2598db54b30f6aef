"""A draft-length controller that counts its actions, for benchmarks/drafter_speed.py.

Steps by kind with their milliseconds and tokens, and each step that took three times as long as expected with the
reasons: the drafter's device or host time, prefill, device allocations, Python's garbage collections.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shoestring.serve.speculative.draft_length import DraftLengthController

SLOW, FEW = 3, 4  # times the expected seconds of a step that is told of, and how many of a turn


@dataclass
class Proposed:
    """Numbers of a drafter's last proposal."""

    seconds: float = 0.0  # of the host
    read_seconds: float = 0.0  # of these, in passes that read texts
    passes: int = 0
    rows: int = 0
    allocs: int = 0  # of memory on the device, in those passes

    def begin(self) -> None:
        self.seconds = self.read_seconds = 0.0
        self.passes = self.rows = self.allocs = 0


class Pauses:
    """Python's garbage collections since the last call: how many, and their seconds."""

    def __init__(self) -> None:
        self.num, self.seconds, self._began = 0, 0.0, 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.num, self.seconds = self.num + 1, self.seconds + time.perf_counter() - self._began

    def take(self) -> tuple[int, float]:
        found, self.num, self.seconds = (self.num, self.seconds), 0, 0.0
        return found


class Watched(DraftLengthController):
    """A controller that counts its actions."""

    def __init__(
        self, profile: Callable[[int], float], pauses: Pauses | None = None, known_acceptance: Sequence[float] = ()
    ) -> None:
        super().__init__(profile, known_acceptance=known_acceptance)
        self.pauses = pauses or Pauses()
        self.done: dict[str, list[float]] = {}  # kind of step -> how many, their milliseconds, their tokens
        self.slow: list[str] = []
        self.proposed = Proposed()
        self._allocs = device_allocs()  # when last looked at: in every turn, and behind a slow step

    def record_step(self, rows: int, seconds: float, num_new: int, *, ahead: bool = False) -> None:
        step = self.step
        num, drafts = step.batch, step.length
        kind = "plain"
        if drafts:
            kind = f"{'probe' if step.probing else 'read' if step.caught_up else 'draft'} {drafts}"
        spent = seconds + step.draft_seconds
        found = self.done.setdefault(kind, [0, 0.0, 0])
        for i, value in enumerate((1, 1e3 * spent, num_new)):
            found[i] += value
        expected = self.seconds(num or rows, drafts)
        pauses, paused = self.pauses.take()
        if spent > SLOW * expected and len(self.slow) < FEW:
            last = self.proposed if drafts else Proposed()
            self.slow.append(
                f"{kind} of {num or rows} requests {1e3 * spent:.1f} ms instead of {1e3 * expected:.1f}: drafts "
                f"{1e3 * step.draft_seconds:.1f}, host in propose {1e3 * last.seconds:.1f}, of these "
                f"{1e3 * last.read_seconds:.1f} in {last.passes} passes that read {last.rows} rows with {last.allocs} "
                f"allocations on the device ({self._grown()} since last looked at); {pauses} collections of "
                f"{1e3 * paused:.1f} ms"
            )
        super().record_step(rows, seconds, num_new, ahead=ahead)

    def _grown(self) -> int:
        before, self._allocs = self._allocs, device_allocs()
        return self._allocs - before

    def counts(self) -> Counter[str]:
        """Steps since the last report: plain, drafted and probes."""
        found: Counter[str] = Counter()
        for kind, (num, *_) in self.done.items():
            name = kind.split()[0]
            found["drafted" if name in ("draft", "read") else name] += int(num)
        return found

    def told(self, num_requests: int) -> str:
        """A report of what happened since the last one."""
        steps = ", ".join(f"{k}: {n:.0f} in {ms:.0f} ms gave {new:.0f}" for k, (n, ms, new) in self.done.items())
        size, slow = self.size(num_requests), "".join(f"\n        slow: {line}" for line in self.slow)
        self.done, self.slow = {}, []
        return (
            f"{steps}; won {1e3 * size.savings:.1f} ms, may lose {1e3 * size.risked:.1f}, reading "
            f"{1e3 * self.costs.catch_up(num_requests):.1f} ms, budget {1e3 * (self.budget.seconds or 0):.1f} of "
            f"{1e3 * self.budget.needed:.1f} ms, {self._grown()} allocations on the device{slow}"
        )


def watch(drafter: Any) -> Proposed:
    """Record the numbers of each proposal from now on."""
    propose, read, last = drafter.propose, getattr(drafter, "_read", None), Proposed()

    def timed(requests: Sequence[Any], n: int) -> Any:
        last.begin()
        began = time.perf_counter()
        found = propose(requests, n)
        last.seconds = time.perf_counter() - began
        return found

    def counted(part: Sequence[tuple[Any, int]]) -> Any:
        assert read is not None
        before, began = device_allocs(), time.perf_counter()
        found = read(part)
        last.read_seconds += time.perf_counter() - began
        last.passes, last.rows = last.passes + 1, last.rows + sum(num for _, num in part)
        last.allocs += device_allocs() - before
        return found

    drafter.propose = timed
    if read is not None:
        drafter._read = counted
    return last


def device_allocs() -> int:
    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.memory_stats_as_nested_dict().get("num_device_alloc", 0))
