"""Bit packing: the stated byte layout, and round trips over odd shapes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.kernels.lowbit.packing import pack_bits, packed_width, unpack_bits


def stream(codes: list[int], bits: int) -> list[int]:
    """The layout in one line of Python integers: code i at bit i*bits of a little-endian number."""
    number = sum(c << (i * bits) for i, c in enumerate(codes))
    return list(number.to_bytes(len(codes) * bits // 8, "little"))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_packing_is_the_little_endian_stream_and_round_trips(bits: int, data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 3))
    width = 8 * data.draw(st.integers(1, 9))
    codes = data.draw(
        st.lists(st.lists(st.integers(0, 2**bits - 1), min_size=width, max_size=width), min_size=rows, max_size=rows)
    )
    packed = pack_bits(torch.tensor(codes, dtype=torch.uint8), bits)
    assert packed.shape == (rows, packed_width(width, bits)) and packed.dtype == torch.uint8
    assert packed.tolist() == [stream(row, bits) for row in codes]
    assert unpack_bits(packed, bits).tolist() == codes


def test_three_bit_bytes_as_documented() -> None:
    c = [5, 1, 6, 3, 7, 5, 2, 4]
    expected = [
        c[0] | c[1] << 3 | (c[2] & 3) << 6,
        c[2] >> 2 | c[3] << 1 | c[4] << 4 | (c[5] & 1) << 7,
        c[5] >> 1 | c[6] << 2 | c[7] << 5,
    ]
    assert pack_bits(torch.tensor(c, dtype=torch.uint8), 3).tolist() == expected


def test_packing_of_views_and_extra_dims() -> None:
    codes = torch.randint(0, 8, (16, 3, 5), dtype=torch.uint8).permute(2, 1, 0)  # not contiguous
    assert torch.equal(unpack_bits(pack_bits(codes, 3), 3), codes)
