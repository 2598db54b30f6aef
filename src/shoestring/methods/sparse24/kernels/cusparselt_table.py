"""Which products run sparse: cuSPARSELt's algorithms and the dense product, measured for each shape and GPU.

The library has some thirty algorithms, and its own choice is often a third slower than the best. `tune` measures all
of them against the dense product for one (m, k, n) and dtype, and keeps the result in this machine's plan table
(hardware/plan_table.py). `chosen_algorithms` reads it: the algorithms, or None where dense is faster. Algorithms with
wrong results are left out.

Algorithms round differently. `adopt` takes the measurements of another process, so that all ranks of a run, and a run
that is resumed elsewhere, compute the same bits.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from shoestring.hardware.plan_table import PlanTable, plans_text, read_plans
from shoestring.kernels.runtime.triton_backend import of_the_machine
from shoestring.methods.sparse24.kernels import cusparselt, cusparselt_fp8
from shoestring.methods.sparse24.kernels.cusparselt import Algorithms
from shoestring.methods.sparse24.kernels.cusparselt_fp8 import E4M3

NEVER_MS = 1e9  # a number that JSON has, unlike infinity
MAX_ALGORITHMS = 64
TURNS = 9  # of the best algorithms and the dense product, when a shape is measured
# A sparse product must be this much faster than the dense one, because packing its operand takes a few percent.
WORTH = 1.05
# Shorter ones stay dense: torch plans a sparse product at every call, which takes 0.3 to 0.5 ms of host time.
LEAST_MS = 0.4


@dataclass(frozen=True)
class Measured:
    """A product of a 2:4 [m, k] with a dense [k, n]: the best algorithms, and the times of these and the dense
    product."""

    m: int
    k: int
    n: int
    dtype: str
    algorithms: Algorithms
    sparse_ms: float  # the mean of the four; NEVER_MS where no algorithm was right
    dense_ms: float

    def __post_init__(self) -> None:
        if not (self.sparse_ms > 0 and self.dense_ms >= 0):
            raise ValueError(f"{self.sparse_ms} ms and {self.dense_ms} ms are no times")

    @property
    def key(self) -> str:
        return _key(self.m, self.k, self.n, self.dtype)

    @property
    def gain(self) -> float:
        return self.dense_ms / self.sparse_ms

    @property
    def worth_it(self) -> bool:
        return self.gain > WORTH and self.sparse_ms >= LEAST_MS


def _key(m: int, k: int, n: int, dtype: str) -> str:
    return f"{m}x{k}x{n} {dtype.removeprefix('torch.')}"


# -- the table -----------------------------------------------------------------------------------------------
TABLE = PlanTable("cusparselt", Measured, version=f"torch{torch.__version__}")


def chosen_algorithms(m: int, k: int, n: int, dtype: torch.dtype) -> Algorithms | None:
    """The best algorithms for this shape, or None: dense is as fast, or the shape was never measured (`tune`)."""
    for shape, algorithms in _worth_it(dtype):
        if shape == (m, k, n):
            return algorithms
    return None


Worthwhile = tuple[tuple[tuple[int, int, int], Algorithms], ...]


@of_the_machine
def _worth_it(dtype: torch.dtype) -> Worthwhile:
    """Shapes and their algorithms. Not a dict: a compiler's symbolic sizes can be compared, but not hashed."""
    return _find_worth_it(dtype)


@TABLE.cached
def _find_worth_it(dtype: torch.dtype) -> Worthwhile:
    good = [f for f in TABLE.plans(_gpu()).values() if f.dtype == str(dtype) and f.worth_it]
    return tuple(((f.m, f.k, f.n), f.algorithms) for f in good)


def tune(m: int, k: int, n: int, dtype: torch.dtype) -> Measured | None:
    """Measure this shape on this GPU, once: later calls and later processes read the table."""
    supports = cusparselt_fp8.supports_fp8 if dtype == E4M3 else cusparselt.supports
    if not supports(m, k, n):
        return None
    found = TABLE.find(_key(m, k, n, str(dtype)), _gpu())
    if found is None:
        found = measure(m, k, n, dtype)
        TABLE.remember({found.key: found}, _gpu())
    return found


def adopt(found: Iterable[Measured]) -> None:
    """Use these from now on, instead of what this process has read or measured for the same shapes."""
    TABLE.adopt({f.key: f for f in found}, _gpu())


def table_file() -> Path:
    """The file of this GPU and version of torch."""
    return TABLE.own_file(_gpu())


def read_table(path: Path) -> list[Measured]:
    """The measurements in a file: none where there is no file; unreadable ones are left out with a warning."""
    return list(read_plans(path, Measured).values())


def table_text(found: Iterable[Measured]) -> str:
    return plans_text({f.key: f for f in found})


def _gpu() -> str:
    return torch.cuda.get_device_name()


# -- measuring -----------------------------------------------------------------------------------------------
class Timed(NamedTuple):
    ms: float
    algorithm: int
    dense_ms: float


def measure(m: int, k: int, n: int, dtype: torch.dtype, device: str = "cuda") -> Measured:
    if dtype == E4M3:
        return _measure_fp8(m, k, n)
    a, b_NK = (t.to(dtype) for t in _random_operands(m, k, n, device))
    b = b_NK.t()
    packed, rows = cusparselt.pack(a), b.contiguous()
    want = (a[:256] @ b).float()

    def timed(view: Tensor, transpose: bool) -> Timed:
        def sparse(algorithm: int, transpose: bool) -> Tensor:
            return cusparselt.product(packed, view, [algorithm] * 4, transpose)

        return best_algorithm(sparse, want, lambda: a @ b, transpose)

    found = [timed(view, transpose) for transpose in (False, True) for view in (b, rows)]
    one, two, three, four = (t.algorithm for t in found)
    return measured(m, k, n, dtype, (one, two, three, four), found)


def _measure_fp8(m: int, k: int, n: int) -> Measured:
    a, b_NK = (t.to(E4M3) for t in _random_operands(m, k, n, "cuda"))
    b = b_NK.t()
    packed, one = cusparselt_fp8.pack_fp8(a), torch.ones((), device="cuda")
    want = a[:256].float() @ b.float()

    def dense() -> Tensor:
        return torch._scaled_mm(b.t(), a.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    def sparse(algorithm: int, transpose: bool) -> Tensor:
        return cusparselt_fp8.product_fp8(packed, b, [algorithm] * 4, transpose, torch.bfloat16)

    plain, turned = (best_algorithm(sparse, want, dense, transpose) for transpose in (False, True))
    algorithms = (plain.algorithm, plain.algorithm, turned.algorithm, turned.algorithm)
    return measured(m, k, n, E4M3, algorithms, [plain, turned])


def _random_operands(m: int, k: int, n: int, device: str) -> tuple[Tensor, Tensor]:
    """fp32: a 2:4 matrix [m, k] and a dense one [n, k]."""
    gen = torch.Generator(device).manual_seed(0)
    keep = torch.tensor([True, False, False, True], device=device).repeat(k // 4)
    a = torch.where(keep, torch.randn(m, k, generator=gen, device=device), 0.0)
    return a, torch.randn(n, k, generator=gen, device=device)


def measured(m: int, k: int, n: int, dtype: torch.dtype, algorithms: Algorithms, found: list[Timed]) -> Measured:
    sparse_ms = min(NEVER_MS, statistics.mean(t.ms for t in found))
    dense_ms = statistics.median(t.dense_ms for t in found)
    return Measured(m, k, n, str(dtype), algorithms, round(sparse_ms, 5), round(dense_ms, 5))


def best_algorithm(
    sparse: Callable[[int, bool], Tensor], want: Tensor, dense: Callable[[], Tensor], transpose: bool
) -> Timed:
    """The fastest algorithm that computes `want` (the first rows of A B).

    Each is timed briefly, then the best few in turns with the dense product on a warm GPU: the ranking depends on the
    clock rate, and that on the power limit.
    """
    scale = float(want.abs().max())
    first: list[tuple[float, int]] = []
    for algorithm in range(MAX_ALGORITHMS):
        try:
            got = sparse(algorithm, transpose)
        except RuntimeError:  # no more algorithms
            break
        # Some algorithms of some versions compute something else (pytorch issue 155333).
        got = got[:, : want.shape[0]].t() if transpose else got[: want.shape[0]]
        if float((got.float() - want).abs().max()) <= 0.02 * scale:
            again = functools.partial(sparse, algorithm, transpose)
            first.append((_in_turns([again], 2)[0], algorithm))
    best = [algorithm for _, algorithm in sorted(first)[:3]]
    if not best:
        return Timed(float("inf"), 0, 0.0)
    calls = [functools.partial(sparse, algorithm, transpose) for algorithm in best]
    dense_ms, *times = _in_turns((dense, *calls), TURNS)
    ms, algorithm = min(zip(times, best, strict=True))
    return Timed(ms, algorithm, dense_ms)


def _in_turns(calls: Sequence[Callable[[], Tensor]], turns: int) -> list[float]:
    """The median milliseconds of each call."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(turns * len(calls) + 1)]
    marks[0].record()
    for i, mark in enumerate(marks[1:]):
        calls[i % len(calls)]()
        mark.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
    return [statistics.median(times[i :: len(calls)]) for i in range(len(calls))]
