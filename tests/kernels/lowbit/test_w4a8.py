"""Integer weights times 8-bit activations: torch's operator against plain torch and against its stated bound."""

from __future__ import annotations

import pytest
import torch

from shoestring.formats import parse_format
from shoestring.kernels.lowbit import w4a8 as kernel
from shoestring.kernels.lowbit.packing import unpack_bits
from shoestring.kernels.lowbit.w4a8 import Operands, error_bound, pack_operands, unusable, usable_group, w4a8, w4a8_ref

pytestmark = pytest.mark.skipif(unusable() is not None, reason=str(unusable()))
LABELS = ["int4:sym:g32", "int4:g64:bfloat16", "int4:g0", "int3:g32", "int2:g64", "int8:g0", "int8:sym:g64"]


def made(label: str, w: torch.Tensor) -> tuple[Operands, torch.Tensor]:
    """Operands and the decoded weight."""
    format = parse_format(label)
    parts = format.encode(w, {})
    codes = unpack_bits(parts["codes"], format.bits)  # type: ignore[attr-defined]
    operands = pack_operands(codes, parts["scale"], parts["zero"], format.bits)  # type: ignore[attr-defined]
    return operands, format.decode(parts, torch.float32)


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("num_rows", [1, 2, 7, 33])
def test_within_the_bound_and_as_good_as_the_reference(label: str, num_rows: int) -> None:
    gen = torch.Generator().manual_seed(num_rows)
    w = torch.randn(96, 192, generator=gen) * 0.05
    w[0], w[1] = 0, w[1].abs() + 0.3  # a zero row; one sign, far from zero
    x = torch.randn(num_rows, 192, generator=gen)
    x[0, 3] = 9.0  # an outlier widens the levels of its row only
    operands, decoded = made(label, w)
    exact = x @ decoded.t()
    got = w4a8(x, operands)
    assert got.shape == exact.shape and got.dtype == torch.float32
    assert ((got - exact).abs() <= error_bound(x, decoded, operands) + 1e-4).all()
    wrong, reference = (got - exact).norm(), (w4a8_ref(x, decoded) - exact).norm()
    assert reference > 0  # it does round
    # Zero points are multiplied apart, so that their part of the rounding does not cancel: at most twice.
    assert wrong <= 2 * reference + 2.0**-8 * exact.norm()


@pytest.mark.parametrize("zero", [0, 16, 31, 128, 255])
def test_few_levels_in_bytes(zero: int) -> None:
    """Codes of 5 bits around any zero point, as GGUF's Q5_0 has them around 16."""
    gen = torch.Generator().manual_seed(zero)
    first = min(max(zero - 16, 0), 224)
    codes = torch.randint(first, first + 32, (96, 192), generator=gen).to(torch.uint8)
    scale, zeros = torch.rand(96, 6, generator=gen) + 0.5, torch.full((96, 6), zero, dtype=torch.uint8)
    decoded = ((codes.float().unflatten(1, (6, 32)) - zero) * scale[..., None]).flatten(1)
    x = torch.randn(7, 192, generator=gen)
    operands = pack_operands(codes, scale, zeros, 8)
    got, exact = w4a8(x, operands), x @ decoded.t()
    assert ((got - exact).abs() <= error_bound(x, decoded, operands) + 1e-3).all()
    assert (got - exact).norm() <= 2 * (w4a8_ref(x, decoded) - exact).norm() + 2.0**-8 * exact.norm()


def test_rows_of_zeros_and_one_sign() -> None:
    operands, decoded = made("int4:sym:g32", torch.randn(32, 64))
    x = torch.stack([torch.zeros(64), torch.rand(64) + 5, -torch.rand(64) - 5])
    got = w4a8(x, operands)
    assert torch.equal(got[0], torch.zeros(32))
    assert ((got - x @ decoded.t()).abs() <= error_bound(x, decoded, operands) + 1e-4).all()


@pytest.mark.parametrize("label", LABELS)
def test_the_portable_loop_of_other_processors(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Group scales in fp32 do not reach the Arm kernel: torch then runs what it has on every processor."""
    monkeypatch.setattr(kernel, "has_arm_kernels", lambda: False)
    operands, decoded = made(label, torch.randn(32, 128, generator=torch.Generator().manual_seed(0)))
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1))
    got = w4a8(x, operands)
    assert ((got - x @ decoded.t()).abs() <= error_bound(x, decoded, operands) + 1e-4).all()
    assert (got - x @ decoded.t()).norm() < 0.02 * (x @ decoded.t()).norm()


def test_groups_that_fit() -> None:
    assert usable_group(0, 576) and usable_group(64, 576) and usable_group(96, 576)
    assert not usable_group(8, 576) and not usable_group(0, 72)
