"""Sparse products on the tensor cores through cuSPARSELt: operands, products, and which shapes are worth it.

cuSPARSELt multiplies a 2:4 matrix A [m, k] by a dense B [k, n] (row-major or transposed) into C [m, n]. A is one
buffer: the kept values row-major [m, k/2], then 4 bits of metadata for each group of four (`first | second << 2`),
in an order that was read off the library (0.8.0, sm_90) by compressing matrices whose groups spell their own
number: 64x64 blocks row by row, 64-bit words inside, each with eight groups of two rows (`nibble_order`). What
torch._sparse_semi_structured_tile writes is an older order that this version misreads.

    pack          a matrix that is 2:4 along its rows, of any strides (so also W^T from W), in one pass
    pack_mvue     a gradient -> the operand of MVUE(dZ^T), drawn and packed in one pass (mvue24_pack.py)
    product       C = A B by a given algorithm of the library

The library has some thirty algorithms and its own choice is often a third slower than the best. `tune` measures
all of them against the dense product for one (m, k, n) and keeps the answer in a file per GPU; `choice` reads it:
an algorithm, or None where dense is faster. An algorithm whose result is off is never kept.

Every function here is an operator of its own (torch.library), so that compiled models call it as it is.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from shoestring.kernels.mvue24_pack import in_words, launch_mvue

ROWS, COLS = 64, 64  # blocks of the metadata
MAX_ALGORITHMS = 64


def usable(t: Tensor) -> bool:
    return t.is_cuda and t.dtype in (torch.bfloat16, torch.float16) and _has_library()


@functools.cache
def _has_library() -> bool:
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


@torch.library.custom_op("shoestring::product24", mutates_args=())
def product(packed: Tensor, b_KN: Tensor, algorithms: list[int]) -> Tensor:
    """A B in the dtype of B, fp32 sums; [m, n] contiguous. `algorithms`: for B by columns, for B by rows."""
    by_columns = b_KN.stride(0) == 1
    if not by_columns and b_KN.stride(1) != 1:
        b_KN = b_KN.contiguous()
    return torch._cslt_sparse_mm(packed, b_KN, alg_id=algorithms[0 if by_columns else 1])


@product.register_fake
def _(packed: Tensor, b_KN: Tensor, algorithms: list[int]) -> Tensor:
    return b_KN.new_empty(packed.shape[0], b_KN.shape[1])


# -- which product to take ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    m: int
    k: int
    n: int
    dtype: str
    algorithms: tuple[int, int]  # for B by columns (a transposed view), for B by rows
    sparse_ms: float  # the mean of both
    dense_ms: float

    @property
    def gain(self) -> float:
        return self.dense_ms / self.sparse_ms


def choice(m: int, k: int, n: int, dtype: torch.dtype) -> tuple[int, int] | None:
    """The best algorithms for this shape, or None: dense is as fast, or nobody has tuned it (`tune`)."""
    found = _table().get((m, k, n, str(dtype)))
    return None if found is None or found.gain <= 1 else found.algorithms


def tune(m: int, k: int, n: int, dtype: torch.dtype) -> Measured | None:
    """Measure this shape on this GPU, once: later calls and later processes read the file."""
    if not fits(m, k, n):
        return None
    key = (m, k, n, str(dtype))
    if key not in _table():
        _table()[key] = _measure(m, k, n, dtype)
        _save()
    return _table()[key]


def _measure(m: int, k: int, n: int, dtype: torch.dtype) -> Measured:
    gen = torch.Generator("cuda").manual_seed(0)
    a = torch.randn(m, k, generator=gen, device="cuda", dtype=torch.float32).to(dtype)
    keep = torch.tensor([True, False, False, True], device="cuda").repeat(k // 4)
    a = torch.where(keep, a, torch.zeros((), device="cuda", dtype=dtype))
    b = torch.randn(n, k, generator=gen, device="cuda", dtype=torch.float32).to(dtype).t()
    packed = pack(a)
    dense_ms = _median_ms(lambda: a @ b)
    by_columns, by_rows = _best(packed, a, b), _best(packed, a, b.contiguous())
    algorithms = (by_columns[1], by_rows[1])
    sparse_ms = (by_columns[0] + by_rows[0]) / 2
    return Measured(m, k, n, str(dtype), algorithms, round(sparse_ms, 5), round(dense_ms, 5))


def _best(packed: Tensor, a: Tensor, b: Tensor) -> tuple[float, int]:
    """(milliseconds, algorithm) of the fastest one that computes A B."""
    want = (a[:256] @ b).float()
    scale = float(want.abs().max())
    best = (float("inf"), 0)
    for algorithm in range(MAX_ALGORITHMS):
        both = [algorithm, algorithm]
        try:
            got = product(packed, b, both)
        except RuntimeError:  # there are no more
            break
        # Some algorithms of some versions compute something else (pytorch issue 155333).
        if float((got[:256].float() - want).abs().max()) <= 0.02 * scale:
            best = min(best, (_median_ms(lambda both=both: product(packed, b, both), 5), algorithm))  # type: ignore[misc]
    return best


def _median_ms(call: object, repeats: int = 9) -> float:
    assert callable(call)
    call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(marks))
    return times[repeats // 2]


def table_file() -> Path:
    """$SHOESTRING_CACHE or ~/.cache/shoestring; one file for each GPU and version of torch."""
    base = os.environ.get("SHOESTRING_CACHE") or Path.home() / ".cache" / "shoestring"
    name = f"{torch.cuda.get_device_name()}-torch{torch.__version__}".replace(" ", "_").replace("/", "_")
    return Path(base) / f"cslt-{name}.json"


@functools.cache
def _table() -> dict[tuple[int, int, int, str], Measured]:
    try:
        lines = json.loads(table_file().read_text())
        found = [Measured(**{**line, "algorithms": tuple(line["algorithms"])}) for line in lines]
    except (OSError, ValueError, TypeError, KeyError):  # none yet, or of an older version: measured anew
        return {}
    return {(f.m, f.k, f.n, f.dtype): f for f in found}


def _save() -> None:
    path = table_file()
    with contextlib.suppress(OSError):  # nowhere to write: measured again by the next process
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as f:
            json.dump([asdict(found) for found in _table().values()], f, indent=1)
        Path(f.name).replace(path)
