"""The attention step in one kernel: its reference against the two steps it joins; the CUDA source on the CPU (clusters
of fibers) and on a GPU, against the reference in fp64."""

from __future__ import annotations

import ctypes
import math
import shutil
from pathlib import Path

import emulated
import pytest
import torch
from layers import rms
from test_paged_attention import paged_case
from torch import Tensor

from shoestring.kernels.attention.decode_attention import (
    KEYS,
    decode_attention_,
    decode_attention_macros,
    decode_attention_ref_,
    decode_attention_usable,
    mma_usable,
    ranks_for,
    shape_usable,
    shared_bytes,
)
from shoestring.kernels.attention.paged_attention import paged_attention_ref
from shoestring.kernels.attention.rope_store import cos_sin_at, rope_store_ref_

# Positions of the rows: the first one, a stage full of keys and one more, several stages; None is padding.
PLACES = [0, None, 260, KEYS, KEYS + 1]


def row_case(heads: int, groups: int, dim: int, page: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """qkv, keys, values, tables, tiles and turns; what no earlier step wrote is NaN, the rows' own places too."""
    spans = [(0, 0) if p is None else (p, 1) for p in PLACES]
    q, keys, values, tables, tiles = paged_case(spans, heads, groups, dim, page, dtype)
    for table, _, position, num in tiles.tolist():
        if num:
            keys[tables[table, position // page], position % page] = torch.nan
            values[tables[table, position // page], position % page] = torch.nan
    g = torch.Generator().manual_seed(dim)
    qkv = torch.randn(q.shape[0], (heads + 2 * groups) * dim, generator=g).to(dtype)
    turns = cos_sin_at(torch.arange(261), torch.rand(dim // 2, generator=g))
    return qkv, keys, values, tables, tiles, turns


@pytest.mark.parametrize("window", [None, 40])
def test_reference_is_storing_and_then_attending(window: int | None) -> None:
    qkv, keys, values, tables, tiles, turns = row_case(4, 2, 8, 16, torch.float64)
    mine = keys.clone(), values.clone()
    got = decode_attention_ref_(qkv, *mine, tables, tiles, turns, window=window)
    live = tiles[tiles[:, 3] > 0].long()
    slots = tables[live[:, 0], live[:, 2] // 16] * 16 + live[:, 2] % 16
    flat = keys.flatten(0, 1), values.flatten(0, 1)
    q = rope_store_ref_(qkv, *flat, slots.long(), live[:, 2], turns)
    assert torch.equal(torch.nan_to_num(mine[0]), torch.nan_to_num(keys))
    assert torch.equal(torch.nan_to_num(mine[1]), torch.nan_to_num(values))
    torch.testing.assert_close(got, paged_attention_ref(q, keys, values, tables, tiles, window=window))


def test_many_requests_share_the_chip() -> None:
    assert [ranks_for(n, 8) for n in (1, 2, 4, 8, 16, 32, 256)] == [8, 8, 8, 4, 2, 1, 1]
    assert not decode_attention_usable(torch.zeros(1, 96), 4, 2, 16)  # no GPU kernel for a CPU tensor


def test_heads_whose_sums_do_not_fit_where_the_stages_were_are_not_taken() -> None:
    """Small dims leave many partial sums: 12 heads of 32 wrote them over what other warps still read."""
    assert [h for h in range(1, 20) if shape_usable(32, h)] == list(range(1, 10))
    assert all(shape_usable(dim, 16) for dim in (64, 96, 128, 160, 256))
    assert not any(shape_usable(*shape) for shape in ((48, 4), (288, 1), (128, 17)))


# heads, key heads, dim, page, blocks of a cluster, window, dtype of the norms' weights, rotated
CASES = [
    (4, 1, 64, 16, 2, None, None, True),
    (3, 1, 64, 4, 1, 40, torch.float32, True),
    (8, 2, 32, 16, 4, None, torch.bfloat16, True),
    (4, 1, 128, 16, 8, None, None, True),
    (2, 1, 96, 16, 2, 100, None, False),
    (9, 1, 32, 16, 2, None, None, True),  # as many as fit
    (4, 1, 128, 16, 2, 100, None, True),
    (3, 1, 64, 16, 1, None, torch.float32, True),
]


def check(device: str, dtype: torch.dtype, case: tuple, mma: bool, folder: Path | None = None) -> None:
    """The kernel's rows, and what it wrote to the cache; on a CPU by way of a library compiled into `folder`."""
    heads, groups, dim, page, ranks, window, norm, turn = case
    parts = (t.to(device) for t in row_case(heads, groups, dim, page, dtype))
    qkv, keys, values, tables, tiles, turns = parts
    weights = [torch.rand(dim).to(device, norm) for _ in range(2)] if norm else [None, None]
    rest = (tables, tiles, turns if turn else None, *weights, 1e-6)
    exact, plain, mine = ([t.double() if i == 0 else t.clone() for t in (keys, values)] for i in range(3))
    want = decode_attention_ref_(qkv.double(), *exact, *rest, window=window)
    ref = decode_attention_ref_(qkv, *plain, *rest, window=window)
    if folder is None:
        got = decode_attention_(qkv, *mine, *rest, window=window, ranks=ranks, mma=mma)
        for _ in range(20):  # the cluster's parts are joined in one order
            again = decode_attention_(qkv, keys.clone(), values.clone(), *rest, window=window, ranks=ranks, mma=mma)
            assert torch.equal(again, got)
    else:
        got = torch.full((qkv.shape[0], heads, dim), torch.nan, dtype=dtype)
        given = decode_attention_macros(dim, heads // groups, page, dtype, norm, turn, ranks, mma)
        library = emulated.library(folder, "attention_on_cpu.h", "attention/decode_attention", macros=given)
        pointers = (qkv, *mine, *rest[:5], got)
        library.run(
            *(ctypes.c_void_p(0 if t is None else t.data_ptr()) for t in pointers), ctypes.c_long(keys.nbytes),
            ctypes.c_float(1e-6), ctypes.c_float(dim**-0.5 * math.log2(math.e)), tables.stride(0), groups,
            window or 0, len(tiles), shared_bytes(dim, heads // groups, ranks, mma),
        )  # fmt: skip
    assert rms(got, want) <= 1.5 * rms(ref, want), (case, rms(got, want), rms(ref, want))
    for a, b, c in zip(mine, plain, exact, strict=True):
        assert torch.equal(a.isnan(), c.isnan())  # nothing else was written
        a, b, c = (torch.nan_to_num(t) for t in (a, b, c))
        assert rms(a, c) <= 1.5 * rms(b, c) + 1e-9


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(("case", "mma"), [(CASES[1], False), (CASES[2], False), (CASES[-2], True), (CASES[-1], True)])
def test_kernel_source_runs_right_on_the_cpu(case: tuple, mma: bool, tmp_path: Path) -> None:
    check("cpu", torch.bfloat16, case, mma, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_on_the_gpu(dtype: torch.dtype) -> None:
    more = [(32, 8, 128, 16, 8, None, None, True), (9, 3, 64, 16, 8, None, None, True)]
    for case in CASES + more:
        norm = dtype if case[6] == torch.bfloat16 else case[6]
        for mma in (False, True)[: 1 + mma_usable(case[2], case[0] // case[1], case[3])]:
            check("cuda", dtype, (*case[:6], norm, case[7]), mma)
