"""Integer weights times 8-bit activations in our own C++: every kind of instructions that this processor has, against
plain torch and against the bound that w4a8 states."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from torch import Tensor

from shoestring.errors import UserError
from shoestring.formats import parse_format
from shoestring.kernels.lowbit import tiled_linear as kernel
from shoestring.kernels.lowbit.packing import unpack_bits
from shoestring.kernels.lowbit.tiled_linear import TiledWeight, tile_weight, tiled_linear
from shoestring.kernels.lowbit.w4a8 import error_bound, w4a8_ref
from shoestring.kernels.runtime import cpp

pytestmark = pytest.mark.skipif(cpp.find_compiler() is None, reason="needs a C++ compiler")
LABELS = ["int4:sym:g32", "int4:g64:bfloat16", "int4:g0", "int3:g32", "int2:g64", "int8:g0", "int8:sym:g64", "int8:g32"]
# What is taken from the processor: nothing, the newer instructions, all of them.
WITHOUT = {"all": "", "avx2": "#undef __AVX512VNNI__\n", "loop": "#undef __ARM_FEATURE_DOTPROD\n#undef __AVX2__\n"}


@pytest.fixture(params=WITHOUT)
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    known = kernel._function()
    library = cpp.load_library(WITHOUT[request.param] + kernel.TILES.read_text() + kernel.SOURCE.read_text())
    assert library is not None
    library.tiled_linear.argtypes, library.tiled_linear.restype = known.argtypes, known.restype
    monkeypatch.setattr(kernel, "_function", lambda: library.tiled_linear)


def made(label: str, w: Tensor) -> tuple[TiledWeight, Tensor, Tensor]:
    """Tiles, the decoded weight, the scales."""
    format = parse_format(label)
    parts = format.encode(w, {})
    codes = unpack_bits(parts["codes"], format.bits)  # type: ignore[attr-defined]
    tiles = tile_weight([codes], [parts["scale"]], [parts["zero"]], format.bits)  # type: ignore[attr-defined]
    return tiles, format.decode(parts, torch.float32), parts["scale"]


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("label", LABELS)
def test_within_the_bound_and_as_good_as_the_reference(label: str) -> None:
    for num_rows in (0, 1, 3, 4, 8, 13, 70):  # one by one, several at a time, more than a block of them
        gen = torch.Generator().manual_seed(num_rows)
        w = torch.randn(100, 192, generator=gen) * 0.05  # the last tile is not full
        w[0], w[1] = 0, w[1].abs() + 0.3  # a zero row; one sign, far from zero
        x = torch.randn(num_rows, 192, generator=gen)
        x[:1, 3] = 9.0  # an outlier widens the levels of its row only
        tiles, decoded, scale = made(label, w)
        got, exact = tiled_linear(x, tiles), x @ decoded.t()
        assert got.shape == exact.shape and got.dtype == torch.float32
        assert ((got - exact).abs() <= error_bound(x, decoded, scale) + 1e-4).all()
        wrong, reference = (got - exact).norm(), (w4a8_ref(x, decoded) - exact).norm()
        assert wrong <= 1.1 * reference + 1e-6 * exact.norm()
        # Rows do not depend on each other, nor on how many there are.
        for i in range(num_rows):
            assert torch.equal(tiled_linear(x[i : i + 1], tiles)[0], got[i])


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("label", ["int4:g64", "int8:g0"])
def test_the_largest_codes_and_inputs_do_not_overflow(label: str) -> None:
    """x86's sums of two products are in 16 bits."""
    tiles, _, _ = made(label, torch.randn(16, 128))
    bits = tiles.bits
    full = tile_weight(
        [torch.full((16, 128), 2**bits - 1).byte()], [torch.ones(16, 1)], [torch.zeros(16, 1).byte()], bits
    )
    for sign in (1.0, -1.0):
        x = torch.full((9, 128), sign)
        assert torch.allclose(tiled_linear(x, full), torch.full((9, 16), sign * 128 * (2**bits - 1)), rtol=1e-5)


@pytest.mark.usefixtures("instructions")
def test_rows_of_zeros_one_sign_and_what_is_no_number() -> None:
    tiles, decoded, scale = made("int4:sym:g32", torch.randn(32, 64))
    x = torch.stack([torch.zeros(64), torch.rand(64) + 5, -torch.rand(64) - 5])
    got = tiled_linear(x, tiles)
    assert torch.equal(got[0], torch.zeros(32))
    assert ((got - x @ decoded.t()).abs() <= error_bound(x, decoded, scale) + 1e-4).all()
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


def test_weights_beside_each_other_and_in_turns() -> None:
    gate, up = (torch.randn(24, 64, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    x = torch.randn(5, 64)
    one, other = (tiled_linear(x, made("int4:g32", w)[0]) for w in (gate, up))
    format = parse_format("int4:g32")
    parts = [format.encode(w, {}) for w in (gate, up)]
    codes, scale, zero = ([p[n] for p in parts] for n in ("codes", "scale", "zero"))
    codes = [unpack_bits(c, 4) for c in codes]
    beside = tiled_linear(x, tile_weight(codes, scale, zero, 4, [torch.ones(24), torch.zeros(24)]))
    torch.testing.assert_close(beside, torch.cat([one + 1, other], 1))
    turns = tiled_linear(x, tile_weight(codes, scale, zero, 4, interleaved=True))
    torch.testing.assert_close(turns.unflatten(1, (3, 2, 8))[:, :, 0].flatten(1), one)
    torch.testing.assert_close(turns.unflatten(1, (3, 2, 8))[:, :, 1].flatten(1), other)


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
    with pytest.raises(UserError, match="have no gradient"):
        (x.sum() + y.sum()).backward()


def test_groups_that_are_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernel.usable(64) and kernel.usable(kernel.MOST_INPUTS) and not kernel.usable(2 * kernel.MOST_INPUTS)
    monkeypatch.setattr(kernel, "_function", lambda: None)
    assert not kernel.usable(64)
