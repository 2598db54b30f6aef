"""Low-bit products: layout round trips, a FormatLinear's kernel parts, Triton in the interpreter; the CUDA path where
there is a GPU. The rule for kernels: RMS error against fp64 at most twice that of F.linear on the decoded weight."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from interpreted import run_interpreted
from layers import check_served, packed_layer, rms

from shoestring.formats import kernel_layout, parse_format
from shoestring.kernels.lowbit.chunk_layout import (
    ChunkLayout,
    aligned,
    bit_map,
    chunk_group,
    pack_chunks,
    unpack_chunks,
)
from shoestring.kernels.lowbit.lowbit_linear import lowbit_linear

LABELS = [
    "int4:g128", "int4:g64", "int3:g128", "int3:g192", "int2:g32", "int4:g0", "int4:g64:sym", "int3:g64:bfloat16",
    "nf4:s2:g64", "nf4:s1:g128", "nf3:s2:g128", "nf2:s2:g32", "fp4:s1:g64", "fp3:s2:g192",
]  # fmt: skip


# -- layout --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_every_bit_of_a_lane_has_one_place(bits: int, table: bool) -> None:
    places = [place for pair in bit_map(bits, table) for place in pair]
    assert sorted(places) == [(w, b) for w in range(2 * bits) for b in range(32)]


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(("rows", "width", "group"), [(16, 128, 128), (48, 320, 64), (24, 160, 32), (16, 256, 256)])
def test_chunks_give_back_what_was_packed(bits: int, table: bool, rows: int, width: int, group: int) -> None:
    layout = ChunkLayout(bits, chunk_group(group), table, 1, False)
    codes = torch.randint(0, 2**bits, (rows, width), dtype=torch.uint8)
    low, high = (torch.randint(-(2**15), 2**15, (rows, width // group), dtype=torch.int16) for _ in range(2))
    chunks = pack_chunks(codes, low, high, layout)
    assert chunks.shape == (-(-rows // 16), -(-width // 128), layout.chunk_bytes)
    got_codes, got_low, got_high = unpack_chunks(chunks, layout, (rows, width))
    every = group // layout.group
    assert torch.equal(got_codes, codes)
    assert torch.equal(got_low, low.repeat_interleave(every, 1))
    assert torch.equal(got_high, high.repeat_interleave(every, 1))


def test_rows_that_begin_anywhere_are_copied() -> None:
    flat = torch.randn(2 * 24 + 8).bfloat16()
    whole = flat[8:].view(2, 24)
    assert aligned(whole) is whole and aligned(whole[:, :16]).data_ptr() == whole.data_ptr()
    for odd in (flat[1:49].view(2, 24), whole.t(), flat[:45].view(3, 15), whole[:, 1:17]):
        got = aligned(odd)
        assert torch.equal(got, odd) and got.is_contiguous() and got.data_ptr() % 16 == 0


def test_groups_that_no_chunk_can_hold_are_refused() -> None:
    assert [chunk_group(g) for g in (32, 96, 64, 192, 128, 4096, 8, 24)] == [32, 32, 64, 64, 128, 128, 0, 0]


def fragments(chunk: bytes, bits: int, table: bool) -> dict[tuple[int, int], int]:
    """{(row, k): code} as the lanes of the CUDA kernel read them: its masks and shifts, step by step."""
    words_of = {4: 8, 3: 6, 2: 4}[bits]
    found = {}
    for lane in range(32):
        at = [chunk[16 * lane + 4 * i :][:4] for i in range(4)]
        more, size = words_of - 4, 4 * (words_of - 4)
        at += [chunk[512 + size * lane + 4 * i :][:4] for i in range(more)]
        w = [int.from_bytes(b, "little") for b in at]
        for j in range(8):
            pairs = table_pairs(w, j, bits) if table else field_pairs(w, j, bits)
            for i, (a, b) in enumerate(pairs):
                row, k = lane // 4 + 8 * (i & 1), 16 * j + 2 * (lane % 4) + (8 if i & 2 else 0)
                found[row, k], found[row, k + 1] = a, b
    return found


def field_pairs(w: list[int], j: int, bits: int) -> list[tuple[int, int]]:
    if bits == 4:
        masked = [(w[j] >> 4 * i & 0x000F000F, 1) for i in range(4)]
    elif bits == 2:
        v, s = w[j // 2], j % 2 * 8
        masked = [(v >> s + 4 * (i // 2) & (0x000C000C if i % 2 else 0x00030003), 4 if i % 2 else 1) for i in range(4)]
    else:
        masked = []
        for i in range(4):
            turn = j % 2 * 8 + j // 2 % 2 * 4 + i // 2
            top = (w[4 + j // 4] >> turn | w[4 + j // 4] << 32 - turn) & (0x00100010 if i % 2 else 0x00040004)
            low = w[j // 2] >> j % 2 * 8 + i // 2 * 4 & (0x000C000C if i % 2 else 0x00030003)
            masked.append((low | top, 4 if i % 2 else 1))
    return [((v & 0xFFFF) // size, (v >> 16) // size) for v, size in masked]


def turned(word: int, right: int) -> int:
    right %= 32
    return (word >> right | word << 32 - right) & 0xFFFFFFFF


def table_pairs(w: list[int], j: int, bits: int) -> list[tuple[int, int]]:
    if bits == 2:
        index = [turned(w[j // 2], 7 + 16 * (j % 2) + 4 * i) for i in range(4)]
        return [(v & 3, v >> 2 & 3) for v in index]
    if bits == 4 or j < 6:
        nibbles = turned(w[j], 7)
    else:
        one, two, four = (turned(v, 7) for v in w[3 * (j - 6) : 3 * (j - 6) + 3])
        nibbles = one >> 3 & 0x11111111 | two >> 2 & 0x22222222 | four >> 1 & 0x44444444
    low, high = nibbles & 0xFFFF, nibbles >> 16  # rows g and g + 8, k = 2t, 2t + 1, 2t + 8, 2t + 9
    bytes_ = (low & 0xFF, high & 0xFF, low >> 8, high >> 8)
    return [(v & (1 << bits) - 1, v >> 4 & (1 << bits) - 1) for v in bytes_]


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_lanes_find_their_fragments_of_the_matrix_instruction(bits: int, table: bool) -> None:
    codes = torch.randint(0, 2**bits, (16, 128), dtype=torch.uint8)
    grid = torch.zeros(16, 1, dtype=torch.int16)
    chunk = bytes(pack_chunks(codes, grid, grid, ChunkLayout(bits, 128, table, 1, False))[0, 0].tolist())
    found = fragments(chunk, bits, table)
    assert len(found) == 16 * 128
    assert all(codes[at].item() == code for at, code in found.items())


# -- kernel parts --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("label", LABELS)
def test_a_served_layer_multiplies_saves_and_loads_as_before(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_layout, "chunks_usable", lambda t: True)
    layer = packed_layer(label, 48, 384)
    size = sum(t.nbytes for t in layer.parts().values())
    _, weight = check_served(layer)
    assert [n for n, _ in layer.named_buffers()] == [f"weight_{n}" for n in layer.operands()]
    assert "chunks" in layer.operands() and "codes" in layer.parts()
    if parse_format(label).group in (64, 128):
        # Zero points take 16 bits; nothing is held twice.
        assert sum(t.nbytes for t in layer.operands().values()) <= 1.02 * size + 512
    layer.unpack()
    assert torch.equal(layer.weight, weight)


def test_served_layers_stack_as_their_rows_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_layout, "chunks_usable", lambda t: True)
    a, b = packed_layer("nf3:g64", 32, 256, bias=False), packed_layer("nf3:g64", 64, 256, bias=False)
    x = torch.randn(3, 256)
    want = torch.cat([a(x), b(x)], -1)
    a.use_kernels(), b.use_kernels()
    both = {"chunks": torch.cat([m.operands()["chunks"] for m in (a, b)]), "table": a.operands()["table"]}
    torch.testing.assert_close(a.format.linear(x, both, None), want, rtol=1e-5, atol=1e-5)


def test_tables_whose_zero_is_elsewhere_have_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_layout, "chunks_usable", lambda codes: True)
    layer = packed_layer("nf4:s2:g64", 32, 256)
    layout, parts = layer.format.layout(256), layer.parts()
    assert kernel_layout.to_chunks(parts, layout) is not None
    shifted = {**parts, "table": parts["table"] + 0.1}
    assert kernel_layout.to_chunks(shifted, layout) is None


def test_without_a_kernel_serving_changes_nothing() -> None:
    layer = packed_layer("int4:g64", 32, 128)
    assert not layer.use_kernels() and "codes" in layer.operands()
    ragged = packed_layer("int4:g64", 24, 128)
    assert ragged.format.kernel_parts(ragged.parts()).keys() == ragged.parts().keys()


def test_gradients_pass_through_a_served_weight() -> None:
    layer = packed_layer("int3:g64", 32, 128, bias=False)
    layout = layer.format.layout(128)
    x = torch.randn(4, 128, requires_grad=True)
    lowbit_linear(x, kernel_layout.lay_out(layer.parts(), layout), None, None, layout).sum().backward()
    torch.testing.assert_close(x.grad, layer.effective_weight(torch.float32).sum(0).expand(4, -1))


def test_compiled_and_with_other_leading_dims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_layout, "chunks_usable", lambda t: True)
    layer = packed_layer("int4:g64", 32, 128)
    layer.use_kernels()
    x = torch.randn(2, 3, 128)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x)) and compiled(x).shape == (2, 3, 32)


# -- Triton --------------------------------------------------------------------------------------------------
INTERPRETED = """
import torch, torch.nn.functional as F
from layers import packed_layer, rms
from shoestring.kernels.lowbit.lowbit_linear import lowbit_parts_linear, parts_usable
for label in ("int4:g128", "int3:g64", "int2:g32", "int4:g0", "int3:g40", "nf4:s2:g64", "nf3:s2:g64", "fp4:s1:g32"):
    few = label in ("int3:g64", "int4:g0", "nf4:s2:g64")
    for rows, out, width, dtype in ((1, 20, 320, torch.float32), (17, 40, 320, torch.float16))[: 1 + few]:
        if "128" in label:
            width = 256
        layer = packed_layer(label, out, width)
        x = torch.randn(rows, width * 2, dtype=dtype)[:, ::2]
        bias = layer.bias.to(dtype)
        assert parts_usable(x)
        weight = layer.effective_weight(torch.float32)
        want = F.linear(x.double(), weight.double(), bias.double())
        eager = F.linear(x, weight.to(dtype), bias)
        got = layer.format.linear(x, layer.parts(), bias)
        assert rms(got, want) <= 2 * rms(eager, want) + 1e-6, (label, rows, rms(got, want), rms(eager, want))
"""


@pytest.mark.slow
def test_triton_kernel_under_the_interpreter() -> None:
    run_interpreted(INTERPRETED)


# -- CUDA ----------------------------------------------------------------------------------------------------
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("label", LABELS)
def test_cuda_kernels_match_fp64(label: str, dtype: torch.dtype) -> None:
    layer = packed_layer(label, 272, 768, device="cuda").to(dtype)
    assert layer.use_kernels()
    weight = layer.effective_weight(torch.float32)
    assert torch.equal(layer.effective_weight(dtype), weight.to(dtype))
    for rows in (1, 2, 7, 8, 9, 16, 31, 33, 64, 65, 200):
        x = torch.randn(rows, 768, device="cuda").to(dtype)
        want = F.linear(x.double(), weight.double(), layer.bias.double())
        eager = F.linear(x, weight.to(dtype), layer.bias)
        got = layer(x)
        assert rms(got, want) <= 2 * rms(eager, want), rows
        assert torch.equal(got, layer(x)), "the order of summation is fixed"


@pytest.mark.gpu
@needs_gpu
def test_served_layers_run_in_a_graph_and_keep_no_dense_weight() -> None:
    dense_bytes = 4096 * 4096 * 2
    layer = packed_layer("int4:g128", 4096, 4096, bias=False, device="cuda")
    layer.use_kernels()
    torch.cuda.synchronize()
    held = sum(t.numel() * t.element_size() for t in layer.buffers())
    assert dense_bytes / held >= 3.5
    x = torch.randn(4, 4096, device="cuda", dtype=torch.bfloat16)
    want = layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert not torch.equal(y, want) and torch.equal(y, layer(x))
