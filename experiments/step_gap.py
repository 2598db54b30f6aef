"""What lies between two decoding steps of the engine, on one GPU.

    python -m experiments.step_gap --cases smollm2 1b-int4 8b-batch64

For each case of benchmarks/decode.py: microseconds per step in the engine, and those that the host works in a step
(without its wait for tokens); its graph replayed back to back; kernels of a step in the engine by the profiler, with
the time before each in which the device did nothing.

Three ways: copies to and from the device around each graph instead of kernels/runtime/host_ring.py, one step a launch,
and several, where steps are short.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.decode import CASES, NEW, PROMPT, attempt, built, check, prompts, timed
from shoestring.kernels.runtime.host_ring import HostRing, Receipt
from shoestring.model import Decoder
from shoestring.serve import Engine, Sampling
from shoestring.serve.engine import graphs
from shoestring.serve.engine.graphs import CapturedStep, DecodeGraph


class CopiedNumbers(HostRing):
    """The same numbers by copies before and after the graph."""

    def __init__(self, num_in: int, num_out: int, device: torch.device) -> None:
        super().__init__(num_in, num_out, device)
        self.given = torch.zeros(num_in, dtype=torch.int64)
        self._chosen = torch.zeros(0, dtype=torch.int64)

    def slot(self) -> np.ndarray:
        self.given = torch.empty(len(self.given), dtype=torch.int64, pin_memory=self._clock.is_cuda)
        return self.given.numpy()

    def restart(self, numbers: np.ndarray) -> None:
        pass

    def take_(self, numbers_I: Tensor, tables_E: Tensor, num_rows: int, num_steps: int = 1) -> None:
        at_R, block_R = numbers_I[3 * num_rows : 5 * num_rows].view(2, num_rows)
        tables_E.index_copy_(0, at_R, block_R.view(torch.int32)[::2])

    def give_(self, chosen_O: Tensor) -> None:
        self._chosen = chosen_O

    def launched(self) -> Receipt:
        out = torch.empty(self._chosen.shape, dtype=torch.int64, pin_memory=self._clock.is_cuda)
        out.copy_(self._chosen, non_blocking=True)
        event = None
        if self._clock.is_cuda:
            event = torch.cuda.Event()
            event.record()
        return Receipt(out, event)


WAYS = {"copies": (), "one step a launch": (), "several steps a launch": graphs.STEPS_PER_LAUNCH}


@contextmanager
def way_of_steps(way: str) -> Iterator[None]:
    """New engines launch steps this way."""
    before = graphs.HostRing, CapturedStep.launch, graphs.STEPS_PER_LAUNCH
    graphs.STEPS_PER_LAUNCH = WAYS[way]  # type: ignore[assignment]
    if way == "copies":
        graphs.HostRing, CapturedStep.launch = CopiedNumbers, send_first  # type: ignore[misc, method-assign, assignment]
    try:
        yield
    finally:
        graphs.HostRing, CapturedStep.launch, graphs.STEPS_PER_LAUNCH = before  # type: ignore[misc, method-assign]


def send_first(step: Any) -> Receipt:
    step._numbers.copy_(step._ring.given, non_blocking=True)
    step.replay()
    return step._ring.launched()


class Waits:
    """Seconds that the host waits for tokens."""

    def __init__(self) -> None:
        self.seconds, values = 0.0, Receipt.values

        def timed_values(receipt: Receipt) -> list[int]:
            began = time.perf_counter()
            found = values(receipt)
            self.seconds += time.perf_counter() - began
            return found

        Receipt.values = timed_values  # type: ignore[method-assign, assignment]


def step_times(model: Decoder, num: int, repeats: int, waits: Waits) -> tuple[Engine, float, float]:
    """The engine, microseconds of a step in it, and those that the host works."""
    engine = Engine(model, max_requests=num, max_context=PROMPT + NEW, chunk=num * PROMPT, prefix_cache=False)
    whole, host = [], []
    for seed in range(repeats + 1):
        begin(engine, num, seed)
        waits.seconds = 0.0
        began = time.perf_counter()
        finish(engine)
        took = time.perf_counter() - began
        whole.append(took / (NEW - 1) * 1e6)
        host.append((took - waits.seconds) / (NEW - 1) * 1e6)
    return engine, statistics.median(whole[1:]), statistics.median(host[1:])


def begin(engine: Engine, num: int, seed: int) -> None:
    for prompt in prompts(engine.model.spec, num, PROMPT, seed):
        engine.add(prompt, Sampling(max_tokens=NEW, ignore_eos=True))
    engine.step()


def finish(engine: Engine) -> None:
    while engine.busy:
        engine.step()


def replay_time(engine: Engine, repeats: int) -> tuple[float, int]:
    """Microseconds of a step of the graph with the most, replayed back to back with its last numbers."""
    assert engine.runner._graphs is not None
    made = [g for g in engine.runner._graphs._graphs.values() if isinstance(g, DecodeGraph)]
    step = max(made, key=lambda g: (g.num_steps, g.num_requests))
    numbers = step._numbers.cpu().numpy()
    step._ring._in_SI.numpy()[:] = numbers
    step.replay()
    seconds = timed(lambda: [step.replay() for _ in range(repeats)])
    step._ring.restart(numbers)
    return seconds / repeats / step.num_steps * 1e6, step.num_steps


def profile_steps(engine: Engine, num: int) -> None:
    """Print the kernels of a step with their mean times, and the time before each with nothing on the device."""
    begin(engine, num, 0)
    for _ in range(20):
        engine.step()
    steps = 40
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    finish(engine)
    found = sorted(
        (e.time_range.start, e.time_range.end, e.name.split("(")[0][:60])
        for e in profile.events()
        if e.device_type == torch.autograd.DeviceType.CUDA
    )
    ran: dict[str, list[float]] = defaultdict(list)
    idle: dict[str, float] = defaultdict(float)
    until = found[0][0]
    for start, end, name in found:
        ran[name].append(end - start)
        idle[name] += max(0.0, start - until)
        until = max(until, end)
    total = (until - found[0][0]) / steps
    print(f"    profiled: {total:.1f} us a step, idle {sum(idle.values()) / steps:.1f}")
    ordered = sorted(ran, key=lambda n: -sum(ran[n]) - idle[n])
    for name in ordered[:13]:
        num_each = len(ran[name]) / steps
        print(f"    {sum(ran[name]) / steps:9.2f} us, idle before {idle[name] / steps:7.2f}, {num_each:5.1f} x  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["smollm2", "1b-int4", "8b-batch64"], choices=CASES)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    check()
    print("graph and plain tokens agree", flush=True)
    waits = Waits()
    for name in args.cases:
        shape, blocks, head, num = CASES[name]
        with attempt(name):
            model = built(shape, blocks, head)
            for way in WAYS if num <= graphs.GROUPED_REQUESTS else list(WAYS)[:2]:
                with way_of_steps(way):
                    engine, whole, host = step_times(model, num, args.repeats, waits)
                    print(f"{name}, {way}: {whole:.1f} us a step in the engine, host {host:.1f}", flush=True)
                    took, steps = replay_time(engine, 100)
                    print(f"    {took:.1f} us a step of its graph of {steps}, back to back", flush=True)
                    profile_steps(engine, num)


if __name__ == "__main__":
    main()
