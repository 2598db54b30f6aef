"""Integer weights times 8-bit activations in our own C++: every kind of instructions that this processor has, against
plain torch and against the bound that the module states."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from torch import Tensor

from refusals import refused
from shoestring.formats import Parts, parse_format
from shoestring.kernels.lowbit import tiled_linear as kernel
from shoestring.kernels.lowbit.packing import unpack_bits
from shoestring.kernels.lowbit.tiled_linear import (
    TiledWeight,
    decode_tiles,
    error_bound,
    held_bits,
    rounded,
    tile_codes_ref,
    tile_weight,
    tiled_linear,
    untile,
)
from shoestring.kernels.runtime import cpp

pytestmark = pytest.mark.skipif(cpp.find_compiler() is None, reason="needs a C++ compiler")
LABELS = ["int4:sym:g32", "int4:g64:bfloat16", "int4:g0", "int4:g96", "int3:g32", "int2:g64"]
LABELS += ["int8:g0", "int8:sym:g64", "int8:g32", "int4:min:g32", "int3:min:g64:bfloat16", "int8:min:g0"]
# What is taken from the processor: nothing, the newer instructions, all of them.
WITHOUT = {
    "all": "",
    "one tile": "#undef __AVX512BW__\n",
    "avx2": "#undef __AVX512VNNI__\n#undef __AVXVNNI__\n",
    "loop": "#undef __ARM_FEATURE_DOTPROD\n#undef __AVX2__\n",
}


@pytest.fixture(params=WITHOUT)
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    known = kernel._library()
    library = cpp.load_library(WITHOUT[request.param] + kernel.TILES.read_text() + kernel.SOURCE.read_text())
    assert library is not None
    for name in ("tiled_linear", "tile_codes", "decode_tiles"):
        function, as_known = getattr(library, name), getattr(known, name)
        function.argtypes, function.restype = as_known.argtypes, as_known.restype
    monkeypatch.setattr(kernel, "_library", lambda: library)


def shift_of(parts: Parts) -> Tensor:
    return parts["zero"] if "zero" in parts else parts["offset"]


def made(label: str, w: Tensor) -> tuple[TiledWeight, Tensor, int]:
    """Tiles, the decoded weight, its group."""
    format = parse_format(label)
    parts = format.encode(w, {})
    tiles = tile_weight(parts["codes"], parts["scale"], shift_of(parts), format.bits)  # type: ignore[attr-defined]
    return tiles, format.decode(parts, torch.float32), w.shape[1] // parts["scale"].shape[1]


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("label", LABELS)
def test_within_the_bound_and_as_good_as_the_reference(label: str) -> None:
    for num_rows in (0, 1, 3, 4, 8, 13, 70):  # one by one, several at a time, in panels that are full and not
        gen = torch.Generator().manual_seed(num_rows)
        w = torch.randn(100, 192, generator=gen) * 0.05  # the last tile is not full
        w[0], w[1] = 0, w[1].abs() + 0.3  # a zero row; one sign, far from zero
        x = torch.randn(num_rows, 192, generator=gen)
        x[:1, 3] = 9.0  # an outlier widens the levels of its block only
        tiles, decoded, group = made(label, w)
        got, exact = tiled_linear(x, tiles), x @ decoded.t()
        assert got.shape == exact.shape and got.dtype == torch.float32
        assert ((got - exact).abs() <= error_bound(x, decoded, group) + 1e-5).all()
        assert torch.allclose(got, rounded(x, group) @ decoded.t(), atol=1e-4)
        # Rows do not depend on each other, nor on how many there are.
        for i in sorted({0, num_rows // 2, num_rows - 1} & set(range(num_rows))):
            assert torch.equal(tiled_linear(x[i : i + 1], tiles)[0], got[i])


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("label", ["int4:g64", "int8:g0"])
def test_the_largest_codes_and_inputs_do_not_overflow(label: str) -> None:
    """x86's sums of two products are in 16 bits."""
    tiles, _, _ = made(label, torch.randn(16, 128))
    bits = tiles.bits
    codes = torch.full((16, 128 * bits // 8), 255).byte()
    full = tile_weight(codes, torch.ones(16, 1), torch.zeros(16, 1).byte(), bits)
    for sign in (1.0, -1.0):
        x = torch.full((9, 128), sign)
        assert torch.allclose(tiled_linear(x, full), torch.full((9, 16), sign * 128 * (2**bits - 1)), rtol=1e-5)


@pytest.mark.usefixtures("instructions")
def test_rows_of_zeros_one_sign_and_what_is_no_number() -> None:
    tiles, decoded, group = made("int4:sym:g32", torch.randn(32, 64))
    x = torch.stack([torch.zeros(64), torch.rand(64) + 5, -torch.rand(64) - 5])
    got = tiled_linear(x, tiles)
    assert torch.equal(got[0], torch.zeros(32))
    assert ((got - x @ decoded.t()).abs() <= error_bound(x, decoded, group) + 1e-4).all()
    x[1, 7], x[2, 9] = torch.nan, torch.inf
    got = tiled_linear(x, tiles)
    assert got[1:].isnan().all() and not got[0].isnan().any()


@pytest.mark.parametrize("pooled", [True, False])
def test_any_number_of_threads_and_strides_of_inputs(pooled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not pooled:
        monkeypatch.setattr(kernel, "thread_pool", lambda: None)
    tiles, _, _ = made("int4:g64", torch.randn(200, 128))
    x = torch.randn(128, 21).t()
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 1):
            torch.set_num_threads(threads)
            found.append(tiled_linear(x, tiles))
    finally:
        torch.set_num_threads(before)
    assert not x.is_contiguous() and all(torch.equal(y, found[0]) for y in found)
    assert torch.equal(found[0], tiled_linear(x.contiguous(), tiles))


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("label", LABELS)
def test_tiles_are_those_of_plain_torch_and_rows_are_found_in_them(label: str) -> None:
    """LABELS have all numbers of bits, of groups, and rows that leave the last tile with gaps."""
    format, w = parse_format(label), torch.randn(100, 192)
    parts = format.encode(w, {})
    bits = format.bits  # type: ignore[attr-defined]
    tiles, codes_NK = made(label, w)[0], unpack_bits(parts["codes"], bits)
    padded = torch.cat([codes_NK, codes_NK.new_zeros(4, 192)])
    assert torch.equal(tiles.codes, tile_codes_ref(padded, held_bits(bits)))
    decoded = format.decode(parts, torch.float32)
    assert torch.equal(decode_tiles(tiles), decoded)
    for index in (torch.tensor([7]), torch.tensor([99, 3, 3, 0]), torch.tensor([], dtype=torch.long)):
        assert torch.equal(decode_tiles(tiles, index), decoded[index])
    for wrong in (-1, 104):
        with pytest.raises(IndexError):
            decode_tiles(tiles, torch.tensor([0, wrong]))
    codes, scale, shift = untile(tiles)
    assert torch.equal(codes, codes_NK) and torch.equal(shift, shift_of(parts).to(shift.dtype))
    assert torch.equal(scale, parts["scale"].float())


def test_the_operator_in_compiled_programs() -> None:
    tiles, _, _ = made("int4:g64", torch.randn(24, 64))
    tensors = tiles.codes, tiles.scale, tiles.shift
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.shoestring.tiled_linear, (torch.randn(5, 64), *tensors, 4, 24), test_utils=checks)
    compiled = torch.compile(lambda x: tiled_linear(x + 1, tiles) * 2, fullgraph=True, backend="eager", dynamic=True)
    for num_rows in (3, 7):
        x = torch.randn(num_rows, 64)
        assert torch.equal(compiled(x), tiled_linear(x + 1, tiles) * 2)


def test_callers_on_several_threads_take_turns_and_a_fork_has_threads_of_its_own() -> None:
    tiles, _, _ = made("int4:g64", torch.randn(64, 128))
    x = torch.randn(33, 128)
    wanted, found = tiled_linear(x, tiles), []
    callers = [threading.Thread(target=lambda: found.append(tiled_linear(x, tiles))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(found) == 4 and all(torch.equal(y, wanted) for y in found)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(tiled_linear(x, tiles), wanted) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_gradient_is_refused_and_not_zero() -> None:
    tiles, _, _ = made("int4:g64", torch.randn(16, 64))
    x = torch.randn(3, 64, requires_grad=True)
    y = tiled_linear(x, tiles)
    assert torch.equal(y, tiled_linear(x.detach(), tiles))  # what is only read needs no torch.no_grad
    refused("have no gradient", (x.sum() + y.sum()).backward)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernel.usable()
    monkeypatch.setattr(kernel, "_library", lambda: None)
    assert not kernel.usable()
