"""The kernels of the decoding step: references against plain attention and norms in fp64, kernels under Triton's
interpreter against the references in fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from interpreted import run_interpreted
from layers import rms
from torch import Tensor

from shoestring.kernels.attention.paged_attention import paged_attention, paged_attention_ref, prefill_rows, splits_for
from shoestring.kernels.attention.rope_store import rope_store_, rope_store_ref_
from shoestring.kernels.gemv.add_norm import add_norm_, add_norm_ref_
from shoestring.kernels.gemv.embed_argmax import argmax_token_, embed_rows, embed_rows_ref
from shoestring.kernels.gemv.row_linear import row_linear, row_linear_ref

# (request's first position, rows) per tile; a tile of no rows is padding.
DECODE = [(0, 1), (5, 1), (70, 1), (0, 0), (133, 1)]  # a load is of 64 keys: one of them, two, three
VERIFY = [(7, 3), (90, 5), (40, 1), (0, 0)]
PREFILL = [(0, 8), (8, 8), (16, 3), (130, 8), (0, 1)]


def paged_case(
    spans: list[tuple[int, int]], heads: int, groups: int, dim: int, page: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values, tables and tiles; blocks scattered, unread positions poisoned with NaN."""
    g = torch.Generator().manual_seed(heads * dim + len(spans))
    width = max(-(-(p + n) // page) for p, n in spans) + 1
    num_blocks = len(spans) * width + 3
    order = torch.randperm(num_blocks, generator=g)[: len(spans) * width]
    tables = order.view(len(spans), width).to(torch.int32)
    keys = torch.full((num_blocks, page, groups, dim), torch.nan, dtype=dtype)
    values = keys.clone()
    rows = sum(n for _, n in spans)
    q = torch.randn(rows, heads, dim, generator=g).to(dtype)
    tiles, first = [], 0
    for i, (position, num) in enumerate(spans):
        for p in range(position + num):
            keys[tables[i, p // page], p % page] = torch.randn(groups, dim, generator=g).to(dtype)
            values[tables[i, p // page], p % page] = torch.randn(groups, dim, generator=g).to(dtype)
        tiles.append((i, first, position, num))
        first += num
    return q, keys, values, tables, torch.tensor(tiles, dtype=torch.int32)


@pytest.mark.parametrize("window", [None, 6])
def test_reference_is_plain_attention(window: int | None) -> None:
    q, keys, values, tables, tiles = paged_case([(0, 9), (11, 4)], 4, 2, 8, 4, torch.float64)
    got = paged_attention_ref(q, keys, values, tables, tiles, window=window)
    for i, (position, num, first) in enumerate([(0, 9, 0), (11, 4, 9)]):
        stop = position + num
        k, v = (
            t[tables[i].long()].flatten(0, 1)[:stop].repeat_interleave(2, dim=1).transpose(0, 1) for t in (keys, values)
        )
        age = torch.arange(position, stop)[:, None] - torch.arange(stop)
        mask = (age >= 0) & (age < (window or 1000))
        want = F.scaled_dot_product_attention(q[first : first + num].transpose(0, 1), k, v, attn_mask=mask)
        torch.testing.assert_close(got[first : first + num], want.transpose(0, 1))


@pytest.mark.parametrize(("pairs", "scale"), [(3, 1.0), (2, 1.2)])
def test_reference_of_rope_store_is_the_models_rotation(pairs: int, scale: float) -> None:
    from shoestring.model.attention import rope_tables, rotate

    g = torch.Generator().manual_seed(0)
    qkv = torch.randn(3, (4 + 2 * 2) * 6, generator=g, dtype=torch.float64)
    freq, positions = torch.rand(pairs, generator=g), torch.tensor([0, 5, 1000])
    keys, values = torch.zeros(2, 8, 2, 6, dtype=torch.float64)
    q = rope_store_(qkv, keys, values, torch.tensor([7, -1, 2]), positions, freq, table_scale=scale)
    x = qkv.view(1, 3, 8, 6)
    cos, sin = rope_tables(freq, positions[None], torch.float64, scale)
    want = rotate(x, cos, sin)[0]
    torch.testing.assert_close(q, want[:, :4])
    torch.testing.assert_close(keys[[7, 2]], want[[0, 2], 4:6])
    torch.testing.assert_close(values[[7, 2]], x[0, [0, 2], 6:8])
    assert keys[[0, 1, 3, 4, 5, 6]].abs().sum() == 0  # the padding row left nothing


def test_few_requests_are_cut_into_ranges() -> None:
    assert [splits_for(n, 8) for n in (1, 2, 4, 8, 16, 32, 256)] == [32, 16, 8, 4, 2, 1, 1]
    assert prefill_rows(32, 8) == 32 and prefill_rows(9, 3) == 32 and prefill_rows(8, 8) == 128


def check_attention(device: str = "cpu", dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16)) -> None:
    for dtype in dtypes:
        cases = [
            (DECODE, 4, 2, 16, 16, 1, 8, None, {}),
            (DECODE, 9, 3, 8, 4, 1, 4, 40, {"softcap": 0.7}),
            (VERIFY, 4, 1, 16, 16, 5, 2, None, {"scale": 0.4, "softcap": 1.5}),
            (VERIFY, 2, 2, 12, 16, 5, 8, 80, {"scale": 0.1}),
            (PREFILL, 6, 2, 16, 16, 8, 1, None, {}),
            (PREFILL, 6, 2, 16, 1, 8, 1, 9, {}),
        ]
        if device != "cpu":  # long contexts; few keys a load
            far = [(0, 1), (300, 1), (0, 0), (519, 1)]
            cases += [(far, 4, 2, 16, 16, 1, 32, None, {}), (far, 2, 2, 12, 16, 1, 8, 300, {})]
            cases += [(DECODE, 4, 2, 256, 16, 1, 4, 40, {"softcap": 3.0}), (PREFILL, 4, 2, 256, 16, 8, 1, None, {})]
        if device == "cpu":
            cases = cases[dtype == torch.float16 :: 2]  # the interpreter is slow
        for spans, heads, groups, dim, page, rows, splits, window, bent in cases:
            q, keys, values, tables, tiles = (t.to(device) for t in paged_case(spans, heads, groups, dim, page, dtype))
            wide = q.double(), keys.double(), values.double()
            want = paged_attention_ref(*wide, tables, tiles, window=window, **bent)
            plain = paged_attention_ref(q, keys, values, tables, tiles, window=window, **bent)
            row = torch.randn(q.shape[0], heads + 3, dim).to(q)  # a view into a wider row
            row[:, :heads] = q
            got = paged_attention(
                row[:, :heads], keys, values, tables, tiles, rows_per_tile=rows, num_splits=splits, window=window,
                **bent,
            )  # fmt: skip
            error, plain_error = rms(got, want), rms(plain, want)
            assert error <= 2 * plain_error + 1e-6, (spans, dtype, error, plain_error)
    # A launch says the same again, and a request the same in another batch cut alike.
    q, keys, values, tables, tiles = (t.to(device) for t in paged_case(DECODE, 4, 2, 16, 16, torch.float32))
    whole = paged_attention(q, keys, values, tables, tiles, rows_per_tile=1, num_splits=4)
    again = paged_attention(q, keys, values, tables, tiles, rows_per_tile=1, num_splits=4)
    alone = paged_attention(q, keys, values, tables, tiles[2:3], rows_per_tile=1, num_splits=4)
    assert torch.equal(whole, again) and torch.equal(alone[2], whole[2])


def check_rope_store(device: str = "cpu") -> None:
    g = torch.Generator().manual_seed(1)
    for dtype, rows, heads, groups, dim, norm, turned, scale in [
        (torch.float32, 3, 4, 2, 16, False, 8, 1.0),
        (torch.float16, 5, 9, 3, 12, True, 6, 1.0),
        (torch.float32, 17 if device == "cpu" else 257, 1, 1, 8, True, 0, 1.0),
        (torch.float32, 3, 4, 2, 16, True, 3, 1.3),
    ]:
        qkv = torch.randn(rows, (heads + 2 * groups) * dim, generator=g).to(device, dtype)
        slots = torch.randperm(rows + 4, generator=g)[:rows].to(device)
        slots[1] = -1
        positions = torch.randint(0, 4000, (rows,), generator=g).to(device)
        freq = torch.rand(turned, generator=g).to(device) if turned else None
        weights = [torch.rand(dim, generator=g).to(device) for _ in range(2)] if norm else [None, None]
        store = [torch.zeros(rows + 4, groups, dim, dtype=dtype, device=device) for _ in range(4)]
        exact = [torch.zeros(rows + 4, groups, dim, dtype=torch.float64, device=device) for _ in range(2)]
        want = rope_store_ref_(qkv.double(), *exact, slots, positions, freq, *weights, 1e-6, scale)
        plain = rope_store_ref_(qkv, *store[:2], slots, positions, freq, *weights, 1e-6, scale)
        got = rope_store_(qkv.clone(), *store[2:], slots, positions, freq, *weights, 1e-6, scale)
        for a, b, c in [(got, plain, want), (store[2], store[0], exact[0]), (store[3], store[1], exact[1])]:
            # Angles of thousands of radians: one rounding of the angle is 1e-4 of the result.
            assert rms(a, c) <= 2 * rms(b, c) + 2e-6, (dtype, rms(a, c), rms(b, c))


def check_small(device: str = "cpu") -> None:
    g = torch.Generator().manual_seed(2)
    for dtype, rows, width in [(torch.float32, 3, 40), (torch.float16, 1, 576), (torch.float16, 5, 7)]:
        x, delta = (torch.randn(rows, width, generator=g).to(device, dtype) for _ in range(2))
        weight = torch.rand(width, generator=g).to(device)
        for add in (delta, None):
            mine, plain, exact = x.clone(), x.clone(), x.clone()
            got, ref = add_norm_(mine, add, weight, 1e-5), add_norm_ref_(plain, add, weight, 1e-5)
            want = add_norm_ref_((exact if add is None else exact + add).double(), None, weight, 1e-5)
            assert torch.equal(mine, plain)
            assert rms(got, want) <= 2 * rms(ref, want) + 1e-7
    for dtype, num_in, num_out in [(torch.float32, 40, 6), (torch.float16, 1100, 9 if device == "cpu" else 33)]:
        x = torch.randn(1, num_in, generator=g).to(device, dtype)
        weight = torch.randn(2 * num_out, num_in, generator=g).to(device, dtype)
        bias, norm = (torch.randn(n, generator=g).to(device) for n in (2 * num_out, num_in))
        residual = torch.randn(1, 2 * num_out, generator=g).to(device, dtype)
        for options in (
            {},
            {"norm_K": norm, "eps": 1e-5},
            {"norm_K": norm, "eps": 1e-5, "swiglu": True, "bias": bias},
            {"residual_1N": residual, "bias": bias, "out_dtype": torch.float32},
            {"residual_1N": residual, "after_2N": torch.randn(2, 2 * num_out, generator=g).to(device)},
        ):
            got, ref = row_linear(x, weight, **options), row_linear_ref(x, weight, **options)
            exact = {**options, **({"residual_1N": residual.double()} if "residual_1N" in options else {})}
            want = row_linear_ref(x.double(), weight.double(), **{**exact, "out_dtype": torch.float64})
            assert got.dtype == ref.dtype and got.shape == ref.shape
            assert rms(got, want) <= 2 * rms(ref, want) + 1e-5, options
        codes = torch.randint(0, 256, weight.shape, generator=g).to(device, torch.uint8)
        scale = torch.rand(2 * num_out, generator=g).to(device, torch.float16) / 99
        zero = torch.randint(100, 150, (2 * num_out,), generator=g).to(device, torch.uint8)
        coded = {"norm_K": norm, "eps": 1e-5, "scale_N": scale, "zero_N": zero, "residual_1N": residual}
        want = row_linear_ref(x.double(), codes, **{**coded, "residual_1N": residual.double()})
        got, ref = row_linear(x, codes, **coded), row_linear_ref(x, codes, **coded)
        assert rms(got, want) <= 2 * rms(ref, want) + 1e-4


def check_ends(device: str = "cpu") -> None:
    g = torch.Generator().manual_seed(3)
    embed = torch.randn(50, 40, generator=g).to(device)
    tokens, last = torch.tensor([4, -1, 49, -1], device=device), torch.tensor([7, 0, 9, 31, 2], device=device)
    chosen = torch.tensor([-1, -1, -1], device=device)  # what a step chose whose logits were not finite
    assert torch.equal(embed_rows(chosen, chosen, embed, torch.float32), embed[[0, 0, 0]])
    got = embed_rows(tokens, last, embed, torch.float16)
    assert torch.equal(got, embed_rows_ref(tokens, last[:4], embed, torch.float16)) and got.dtype == torch.float16
    codes = torch.randint(0, 256, (50, 40), generator=g, dtype=torch.uint8).to(device)
    zero = torch.randint(0, 256, (50,), generator=g, dtype=torch.uint8).to(device)
    grid = (torch.rand(50, generator=g).to(device, torch.float16), zero)
    for dtype in (torch.float32, torch.float16):
        got = embed_rows(tokens, last, codes, dtype, grid)
        assert torch.equal(got, embed_rows_ref(tokens, last[:4], codes, dtype, grid)) and got.dtype == dtype
    for dtype, vocab in [(torch.float32, 5001), (torch.float16, 2048), (torch.float16, 37)]:
        logits = torch.randn(3, vocab, generator=g).to(device, dtype)
        logits[0, [vocab // 3, vocab - 1]] = 9.0  # of equal ones the first
        logits[1, vocab - 2] = 11.0
        logits[2] = -torch.inf
        logits[2, vocab // 2] = -60000.0
        out, arrived = torch.full((3,), -5, device=device), torch.zeros(4, dtype=torch.int32, device=device)
        argmax_token_(logits, out, arrived)
        assert out.tolist() == [vocab // 3, vocab - 2, vocab // 2] and not arrived.any()


@pytest.mark.parametrize("check", ["check_attention", "check_rope_store", "check_small", "check_ends"])
def test_kernels_under_the_interpreter(check: str) -> None:
    run_interpreted(f"import test_paged_attention as t; t.{check}()")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_attention_on_the_gpu(dtype: torch.dtype) -> None:
    check_attention("cuda", (dtype,))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("check", [check_rope_store, check_small, check_ends])
def test_kernels_on_the_gpu(check: Callable[[str], None]) -> None:
    check("cuda")
