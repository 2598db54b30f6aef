"""Sparse products on the tensor cores through cuSPARSELt: operands, products, and which shapes are worth it.

cuSPARSELt multiplies a 2:4 matrix A [m, k] by a dense B [k, n] (row-major or transposed) into C [m, n]. A is one
buffer: the kept values row-major [m, k/2], then 4 bits of metadata for each group of four (`first | second << 2`),
in an order that was read off the library (0.8.0, sm_90) by compressing matrices whose groups spell their own
number: 64x64 blocks row by row, 64-bit words inside, each with eight groups of two rows (`nibble_order`). What
torch._sparse_semi_structured_tile writes is an older order that this version misreads.

    pack          a matrix that is 2:4 along its rows, of any strides (so also W^T from W), in one pass
    pack_mvue     a gradient -> the operand of MVUE(dZ^T), drawn and packed in one pass (mvue24_pack.py)
    product       C = A B, or its transpose, by a given algorithm of the library

The library has some thirty algorithms and its own choice is often a third slower than the best. `tune` measures
all of them against the dense product for one (m, k, n) and keeps the answer in a file per GPU; `choice` reads it:
an algorithm, or None where dense is faster. An algorithm whose result is off is never kept. `adopt` takes over what
another process measured: algorithms round differently, so a run that is to be equal bit for bit goes on with its own.

Every function here is an operator of its own (torch.library), so that compiled models call it as it is.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from shoestring.kernels.backend import of_the_machine
from shoestring.kernels.mvue24_pack import in_words, launch_mvue
from shoestring.places import cache_folder

ROWS, COLS = 64, 64  # blocks of the metadata
MAX_ALGORITHMS = 64
TURNS = 9  # of the best algorithms and the dense product, when a shape is measured


def usable(t: Tensor) -> bool:
    return usable_as(t, t.dtype)


def usable_as(t: Tensor, dtype: torch.dtype) -> bool:
    """Whether products of `t` cast to `dtype` can be sparse."""
    return t.is_cuda and dtype in (torch.bfloat16, torch.float16) and _has_library()


@of_the_machine
def _has_library() -> bool:
    return _looked_up()


@functools.cache
def _looked_up() -> bool:
    return torch.backends.cusparselt.is_available() and torch.cuda.get_device_capability() >= (8, 0)


def fits(m: int, k: int, n: int) -> bool:
    """Whether the library takes the product of a 2:4 [m, k] with a dense [k, n]."""
    return m % ROWS == 0 and k % COLS == 0 and n % 8 == 0


# -- operands ----------------------------------------------------------------------------------------


def nibble_order(m: int, k: int) -> Tensor:
    """[m, k / 4]: where in the metadata the nibble of (row, group) lies. What the kernels write; for tests."""
    row, group = torch.arange(m)[:, None], torch.arange(k // 4)[None, :]

    def bit(value: Tensor, number: int) -> Tensor:
        return (value >> number) & 1

    word = (row & 7) | (bit(row, 4) << 3) | (bit(row, 5) << 4) | (bit(group, 3) << 5)
    inside = bit(row, 3) | (bit(group, 2) << 1) | (bit(group, 0) << 2) | (bit(group, 1) << 3)
    block = (row >> 6) * (k // 64) + (group >> 4)
    return (block * 64 + word) * 16 + inside


@torch.library.custom_op("shoestring::pack24", mutates_args=())
def pack(a_MK: Tensor) -> Tensor:
    """The operand of a matrix that is 2:4 along its rows; its strides do not matter. [m, 9/16 k]."""
    from shoestring.kernels._triton.sparse24 import _pack_kernel

    m, k = a_MK.shape
    packed, values, meta = _operand(a_MK, m, k)
    rows, groups = 32, 32
    _pack_kernel[(-(-m // rows), -(-k // (4 * groups)))](
        a_MK,
        values,
        meta,
        m,
        k,
        a_MK.stride(0),
        a_MK.stride(1),
        WORDS=in_words(a_MK),
        ROWS=rows,
        GROUPS=groups,
        num_warps=4,
    )
    return packed


@pack.register_fake
def _(a_MK: Tensor) -> Tensor:
    return a_MK.new_empty(a_MK.shape[0], a_MK.shape[1] * 9 // 16)


def _operand(like: Tensor, m: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """An empty operand, its values as 32-bit pairs and its metadata as 64-bit words."""
    packed = like.new_empty(m, k * 9 // 16)
    flat = packed.view(-1)
    return packed, flat[: m * k // 2].view(torch.int32), flat[m * k // 2 :].view(torch.int64)


@torch.library.custom_op("shoestring::pack24_mvue", mutates_args=())
def pack_mvue(dz_NO: Tensor, row_numbers: Tensor, clocks: Tensor) -> Tensor:
    """The operand of MVUE(dZ^T) [out, tokens]; `dz_NO` may be token-major or feature-major."""
    num_tokens, rows = dz_NO.shape
    packed, values, meta = _operand(dz_NO, rows, num_tokens)
    launch_mvue(dz_NO, values, meta, row_numbers, clocks, num_tokens, pack=True)
    return packed


@pack_mvue.register_fake
def _(dz_NO: Tensor, row_numbers: Tensor, clocks: Tensor) -> Tensor:
    return dz_NO.new_empty(dz_NO.shape[1], dz_NO.shape[0] * 9 // 16)


# -- products ----------------------------------------------------------------------------------------


# Algorithms for B by columns and by rows, then the same for a transposed result.
Algorithms = tuple[int, int, int, int]


@torch.library.custom_op("shoestring::product24", mutates_args=())
def product(packed: Tensor, b_KN: Tensor, algorithms: list[int], transpose: bool = False) -> Tensor:
    """A B in the dtype of B, fp32 sums; [m, n] contiguous, or its transpose [n, m], which costs nothing."""
    by_columns = b_KN.stride(0) == 1
    if not by_columns and b_KN.stride(1) != 1:
        b_KN = b_KN.contiguous()
    algorithm = algorithms[(0 if by_columns else 1) + (2 if transpose else 0)]
    return torch._cslt_sparse_mm(packed, b_KN, alg_id=algorithm, transpose_result=transpose)


@product.register_fake
def _(packed: Tensor, b_KN: Tensor, algorithms: list[int], transpose: bool = False) -> Tensor:
    m, n = packed.shape[0], b_KN.shape[1]
    return b_KN.new_empty((n, m) if transpose else (m, n))


# -- which product to take ---------------------------------------------------------------------------

# A sparse product must be this much faster than the dense one: packing its operand takes a few percent of it.
WORTH = 1.05
# Shorter ones stay dense: torch plans a sparse product anew at every call, which takes the host 0.3 to 0.5 ms.
LEAST_MS = 0.4


@dataclass(frozen=True)
class Measured:
    m: int
    k: int
    n: int
    dtype: str
    algorithms: Algorithms
    sparse_ms: float  # the mean of the four
    dense_ms: float

    @property
    def key(self) -> tuple[int, int, int, str]:
        return self.m, self.k, self.n, self.dtype

    @property
    def gain(self) -> float:
        return self.dense_ms / self.sparse_ms

    @property
    def worth_it(self) -> bool:
        return self.gain > WORTH and self.sparse_ms >= LEAST_MS


def choice(m: int, k: int, n: int, dtype: torch.dtype) -> Algorithms | None:
    """The best algorithms for this shape, or None: dense is as fast, or nobody has tuned it (`tune`)."""
    for shape, algorithms in _worth_it(dtype):
        if shape == (m, k, n):
            return algorithms
    return None


@of_the_machine
def _worth_it(dtype: torch.dtype) -> tuple[tuple[tuple[int, int, int], Algorithms], ...]:
    """Shapes and their algorithms. Not a dictionary: sizes may be symbols to a compiler, which can be compared only."""
    good = [f for f in _table().values() if f.dtype == str(dtype) and f.worth_it]
    return tuple(((f.m, f.k, f.n), f.algorithms) for f in good)


def tune(m: int, k: int, n: int, dtype: torch.dtype) -> Measured | None:
    """Measure this shape on this GPU, once: later calls and later processes read the file."""
    from shoestring.kernels import cslt8

    eight_bits = dtype == cslt8.E4M3
    if not (cslt8.fits8(m, k, n) if eight_bits else fits(m, k, n)):
        return None
    key = (m, k, n, str(dtype))
    if key not in _table():
        _table()[key] = cslt8.measure8(m, k, n) if eight_bits else _measure(m, k, n, dtype)
        _save()
    return _table()[key]


def adopt(found: Iterable[Measured]) -> None:
    """Choose by these from now on, in place of what this process has read or measured for the same shapes."""
    _table().update({f.key: f for f in found})


def _measure(m: int, k: int, n: int, dtype: torch.dtype, device: str = "cuda") -> Measured:
    gen = torch.Generator(device).manual_seed(0)
    a = torch.randn(m, k, generator=gen, device=device, dtype=torch.float32).to(dtype)
    keep = torch.tensor([True, False, False, True], device=device).repeat(k // 4)
    a = torch.where(keep, a, torch.zeros((), device=device, dtype=dtype))
    b = torch.randn(n, k, generator=gen, device=device, dtype=torch.float32).to(dtype).t()
    packed, rows = pack(a), b.contiguous()
    want = (a[:256] @ b).float()

    def timed(view: Tensor, transpose: bool) -> Timed:
        def sparse(algorithm: int, transpose: bool) -> Tensor:
            return product(packed, view, [algorithm] * 4, transpose)

        return best_algorithm(sparse, want, lambda: a @ b, transpose)

    found = [timed(view, transpose) for transpose in (False, True) for view in (b, rows)]
    one, two, three, four = (t.algorithm for t in found)
    return measured(m, k, n, dtype, (one, two, three, four), found)


class Timed(NamedTuple):
    ms: float
    algorithm: int
    dense_ms: float


def measured(
    m: int, k: int, n: int, dtype: torch.dtype, algorithms: Algorithms, found: list[Timed]
) -> Measured:
    sparse_ms = statistics.mean(t.ms for t in found)
    dense_ms = statistics.median(t.dense_ms for t in found)
    return Measured(m, k, n, str(dtype), algorithms, round(sparse_ms, 5), round(dense_ms, 5))


def best_algorithm(
    sparse: Callable[[int, bool], Tensor], want: Tensor, dense: Callable[[], Tensor], transpose: bool
) -> Timed:
    """The fastest algorithm that computes `want` (the first rows of A B).

    A first look at each, then the best few in turns with the dense product on a GPU that is warm by then: which
    one wins, and by how much, changes with the clock that its power leaves.
    """
    scale = float(want.abs().max())
    first: list[tuple[float, int]] = []
    for algorithm in range(MAX_ALGORITHMS):
        try:
            got = sparse(algorithm, transpose)
        except RuntimeError:  # there are no more
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


def table_file() -> Path:
    """One for each GPU and version of torch."""
    name = f"{torch.cuda.get_device_name()}-torch{torch.__version__}".replace(" ", "_").replace("/", "_")
    return cache_folder() / f"cslt-{name}.json"


@functools.cache
def _table() -> dict[tuple[int, int, int, str], Measured]:
    return {f.key: f for f in read_table(table_file())}


def read_table(path: Path) -> list[Measured]:
    """What was measured; nothing where there is no such file, or, with a warning, where it cannot be read."""
    try:
        return parse_table(path.read_text())
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as why:
        warnings.warn(f"{path} is ignored, its products are measured again: {why}", stacklevel=2)
        return []


def table_text(found: Iterable[Measured]) -> str:
    return json.dumps([asdict(f) for f in found], indent=1)


def parse_table(text: str) -> list[Measured]:
    """Of a `table_text`; ValueError where it is damaged or of another version."""
    try:
        found = [Measured(**{**line, "algorithms": tuple(line["algorithms"])}) for line in json.loads(text)]
    except (ValueError, TypeError, KeyError) as why:
        raise ValueError("it is damaged or of another version") from why
    if not all(_sound(f) for f in found):
        raise ValueError("it is damaged or of another version")
    return found


def _sound(f: Measured) -> bool:
    whole, times = (f.m, f.k, f.n, *f.algorithms), (f.sparse_ms, f.dense_ms)
    return (
        len(f.algorithms) == 4
        and all(isinstance(number, int) for number in whole)
        and isinstance(f.dtype, str)
        and all(isinstance(ms, float | int) for ms in times)
        and f.sparse_ms > 0  # infinite where no algorithm was right
        and f.dense_ms >= 0
    )


def _save() -> None:
    path = table_file()
    with contextlib.suppress(OSError):  # nowhere to write: measured again by the next process
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as f:
            f.write(table_text(_table().values()))
        Path(f.name).replace(path)
