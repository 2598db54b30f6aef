"""Codes and thresholds of gradients: edge values, and the kernels bit for bit equal to their references."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import emulated
import pytest
import torch
from interpreted import run_interpreted

from shoestring.kernels.comm import block_codes, sparse_codes
from shoestring.kernels.comm import top_magnitudes as search
from shoestring.kernels.comm.block_codes import HUGE, LEVELS, decode_blocks_ref, encode_blocks, encode_blocks_ref
from shoestring.kernels.comm.cpu_codes import add_moments
from shoestring.kernels.comm.top_magnitudes import top_magnitudes, top_magnitudes_ref
from shoestring.kernels.runtime.cpp import find_compiler

EDGES = torch.tensor([0.0, -0.0, 1e-45, -1e-38, 1e-31, 1.0, -1.0, 3.4028235e38, -3.4028235e38, 0.5, 1.5, 2.5])


SEARCHES = ((1, 1), (100, 3), (5000, 50), (9000, 9000), (4096, 41), (20_000, 50), (40_001, 900))


def rows_to_search(num: int) -> torch.Tensor:
    x = torch.randn(3, num, generator=torch.Generator().manual_seed(num))
    x[1] = x[1].round()  # many equal values
    x[2] *= 1 + 100 * (torch.arange(num) % 1000 > 990)  # large ones that a sample misses
    return x


def hard_rows(num: int) -> torch.Tensor:
    x = torch.randn(3, num, generator=torch.Generator().manual_seed(num)) * torch.logspace(-3, 3, num)
    x[0, : min(num, 128)] = 0
    x[1, : len(EDGES)] = EDGES
    x[2, :128] *= 1e-35
    return x


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_codes_stay_within_half_a_step(bits: int) -> None:
    x = hard_rows(128 * 5)
    wire = encode_blocks(x, bits, 128)
    assert wire.shape == (3, 128 * 5 * bits // 8 + 5 * 4) and wire.dtype == torch.uint8
    back = decode_blocks_ref(wire, x.shape[1], bits, 128)
    step = x.abs().view(3, -1, 128).amax(-1, keepdim=True).clamp(max=HUGE) / LEVELS[bits]
    error = (x.clamp(-HUGE, HUGE) - back).view(3, -1, 128).abs()
    assert back.isfinite().all()
    assert (error <= step * 0.5001 + 1e-30).all()
    assert (back[0, :128] == 0).all()
    # Codes of values that are codes already do not move.
    assert torch.equal(decode_blocks_ref(encode_blocks_ref(back, bits, 128), x.shape[1], bits, 128), back)


def test_random_rounding_is_unbiased() -> None:
    x = torch.randn(1, 128, generator=torch.Generator().manual_seed(0))
    noise = torch.rand(4000, 128, generator=torch.Generator().manual_seed(1))
    for bits, norm in ((8, "max"), (4, "l2"), (2, "max")):
        many = decode_blocks_ref(encode_blocks(x.expand(4000, -1), bits, 128, norm=norm, noise=noise), 128, bits, 128)
        away = (many.double().mean(0) - x[0]) / (many.std(0) / 4000**0.5 + 1e-3)
        assert away.abs().max() < 4.5, (bits, norm)


def test_the_largest_values_of_rows_with_equal_ones() -> None:
    x = torch.tensor([[1.0, -3, 3, 2, 3], [0, 0, 0, 0, 0]])
    assert top_magnitudes(x, 2).tolist() == [[1, 2], [0, 1]]
    y = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    want = y.abs().topk(30).indices.sort().values
    assert torch.equal(top_magnitudes(y, 30), want)


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("threads", [1, 3])
def test_loops_in_cpp_equal_the_references(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (block_codes, sparse_codes, search):
        monkeypatch.setattr(module, "num_threads", lambda num: threads)
    for bits, num in ((8, 128), (8, 128 * 33), (4, 128), (4, 128 * 33)):
        x = hard_rows(num)
        wire, error = block_codes.encode_with_error(x, bits, 128)
        back = decode_blocks_ref(wire, num, bits, 128)
        assert torch.equal(wire, encode_blocks_ref(x, bits, 128)) and torch.equal(error, x - back)
        assert torch.equal(encode_blocks(x, bits, 128), wire)
        joined = torch.cat([wire.new_zeros(3, 3), wire], dim=1)[:, 3:]  # a part of a longer message
        assert torch.equal(block_codes.decode_blocks(joined, num, bits, 128), back)
        back[1] = x[1]
        assert torch.equal(block_codes.sum_blocks(joined, x[1], 1, bits, 128), block_codes.in_order(back))
    for num, k in SEARCHES:
        x = rows_to_search(num)
        assert torch.equal(top_magnitudes(x, k), top_magnitudes_ref(x, k)), (num, k)
    check_sparse_codes("cpu")
    gradients = [torch.randn(n) for n in (1, 17, 4096)]
    residuals = [torch.randn_like(g) for g in gradients]
    sums = [g + e for g, e in zip(gradients, residuals, strict=True)]
    found = add_moments(residuals, gradients)
    want = [[g @ g, s @ s, g @ s] for g, s in zip(gradients, sums, strict=True)]
    torch.testing.assert_close(found, torch.tensor(want))
    assert all(torch.equal(a, b) for a, b in zip(residuals, sums, strict=True))


def check_sparse_codes(device: str) -> None:
    for num, ratio in ((1, 0.01), (1000, 0.01), (1 << 16, 0.01), (3 * (1 << 16) + 77, 0.01), ((1 << 16) + 20_001, 0.2)):
        senders = rows_to_search(num).to(device)
        senders[0, : len(EDGES)] = EDGES[:num].to(device)
        wires = []
        for x in senders:
            error, want_error = torch.empty_like(x), torch.empty_like(x)
            wire = sparse_codes.encode_sparse(x, ratio, error)
            assert torch.equal(wire, sparse_codes.encode_sparse_ref(x, ratio, want_error)), num
            assert torch.equal(error, want_error) and wire.numel() == 4 * sparse_codes.total_kept(ratio, num)
            if device == "cpu":  # in place
                error = x.clone()
                assert torch.equal(sparse_codes.encode_sparse(error, ratio, error), wire)
                assert torch.equal(error, want_error)
            wires.append(torch.cat([wire[:1], wire]))
        joined = torch.stack(wires)[:, 1:]  # does not lie on a multiple of two
        want = sparse_codes.sum_sparse_ref(joined, num, ratio)
        assert torch.equal(sparse_codes.sum_sparse(joined, num, ratio), want), num


def check_kernels() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for bits in (8, 4):
        for num in (128, 128 * 33, 128 * 70):
            x = hard_rows(num).to(device)
            wire = encode_blocks(x, bits, 128)
            assert torch.equal(wire, encode_blocks_ref(x, bits, 128)), (bits, num)
            joined = torch.cat([wire.new_zeros(3, 3), wire], dim=1)[:, 3:]  # a part of a longer message
            assert torch.equal(
                block_codes.decode_blocks(joined, num, bits, 128), decode_blocks_ref(wire, num, bits, 128)
            )
    for num, k in SEARCHES:
        x = rows_to_search(num).to(device)
        assert torch.equal(top_magnitudes(x, k), top_magnitudes_ref(x, k)), (num, k)


def test_kernels_equal_their_references_interpreted() -> None:
    run_interpreted("from test_comm_kernels import check_kernels; check_kernels()")


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_sparse_codes_in_cuda_emulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_codes, "THREADS", 128)
    monkeypatch.setattr(sparse_codes, "SAMPLE", 2048)
    macros = {"HALF": 0, "THREADS": 128, "BLOCKS": 1, "ROOM": 2048, "SAMPLE": 2048}
    library = emulated.library(tmp_path, "sparse_on_cpu.h", "comm/sparse_codes", macros=macros)
    for num, k in ((1 << 16, 400), (20_001, 201), (1000, 10), (1, 1)):
        x = rows_to_search(num)
        x[0, : len(EDGES)] = EDGES[:num]
        message, error = torch.zeros(2, 3, k, dtype=torch.int16), torch.zeros_like(x)
        rank, shared = sparse_codes.sample_rank(k, num), sparse_codes.shared_bytes(2048)
        to = [ctypes.c_void_p(t.data_ptr()) for t in (x, message[0], message[1], error)]
        library.encode(*to, 3, num, k, rank, shared)
        places = top_magnitudes_ref(x, k)
        sent = x.gather(1, places).clamp(-sparse_codes.LARGEST_BF16, sparse_codes.LARGEST_BF16).bfloat16()
        assert torch.equal(message[1].long() + sparse_codes.OFFSET, places), num
        assert torch.equal(message[0].view(torch.bfloat16), sent)
        assert torch.equal(error, x.scatter(1, places, x.gather(1, places) - sent.float()))
        both, total = torch.stack([message, message]), torch.full((3, num), 9.0)
        at = [ctypes.c_long(n) for n in (both[0].nbytes, 0, message[0].nbytes)]
        library.sum(ctypes.c_void_p(both.data_ptr()), at[0], 2, *at[1:], ctypes.c_void_p(total.data_ptr()), 3, num, k)
        assert torch.equal(total, torch.zeros_like(x).scatter(1, places, 2 * sent.float()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_equal_their_references_on_a_gpu() -> None:
    check_kernels()
    check_sparse_codes("cuda")
