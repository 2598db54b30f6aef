"""Tables and quantizers against published constants and a slow, obvious computation."""

from __future__ import annotations

import pytest
import torch

from refusals import refused
from shoestring.errors import UserError
from shoestring.formats import FloatAsym, IntAsym, from_json, parse_format
from shoestring.formats.float_asym import TABLES
from shoestring.formats.rounding import cast_weight, round_to

# bitsandbytes, functional.py, get_4bit_type("nf4").
NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
]
NF3 = [-1.0, -0.5350227, -0.2469314, 0.0, 0.1833375, 0.3819939, 0.6229857, 1.0]  # BitDistiller


def test_tables_equal_the_published_ones() -> None:
    assert TABLES["nf4"] == pytest.approx(NF4, abs=5e-7)
    assert TABLES["nf3"] == pytest.approx(NF3, abs=5e-7)
    assert TABLES["nf2"] == pytest.approx([-1, 0, 0.4358, 1], abs=1e-4)
    assert TABLES["fp4"][8:] == (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    for name, table in TABLES.items():
        assert list(table) == sorted(set(table)) and 0.0 in table and len(table) <= 2 ** int(name[-1])


@pytest.mark.parametrize("label", ["nf3:s2:g32", "nf4:s1:g32", "fp4:s2:g32", "nf2:s2:g32"])
def test_float_codes_are_the_nearest_levels(label: str) -> None:
    format = parse_format(label)
    assert isinstance(format, FloatAsym)
    w = torch.randn(6, 64, generator=torch.Generator().manual_seed(3))
    state = {"table": format.state(w)["table"].tensor}
    parts = format.encode(w, state)
    decoded = format.decode(parts, torch.float32).double().unflatten(1, (2, 32))
    top = TABLES[format.table][-1]
    levels = torch.tensor(TABLES[format.table], dtype=torch.float64)
    for row in range(6):
        for group in range(2):
            g = w.double().unflatten(1, (2, 32))[row, group]
            up, down = g.max().clamp(min=0) / top, (-g.min()).clamp(min=0) / top
            if format.scales == 1:
                up = down = torch.maximum(up, down)
            up, down = (s.half().double() for s in (up, down))
            grid = levels * torch.where(levels > 0, up, down)
            nearest = grid[(g[:, None] - grid).abs().argmin(1)]
            assert torch.allclose(decoded[row, group], nearest, atol=1e-6)


def test_two_scales_follow_each_sign() -> None:
    w = torch.tensor([[2.0, 1.0, 0.0, -0.5, -0.25, 0.0, 0.5, 0.1]])
    format = FloatAsym(table="nf3", scales=2, group=8)
    parts = format.encode(w, {"table": format.state(w)["table"].tensor})
    assert parts["scale"].tolist() == [[[2.0, 0.5]]]
    decoded = format.decode(parts, torch.float32)
    assert decoded[0, 0] == 2.0 and decoded[0, 3] == -0.5 and decoded[0, 2] == 0.0


def test_decode_uses_the_stored_table() -> None:
    w = torch.randn(4, 64)
    format = FloatAsym(table="nf3")
    parts = format.encode(w, {"table": format.state(w)["table"].tensor})
    doubled = format.decode({**parts, "table": parts["table"] * 2}, torch.float32)
    assert torch.equal(doubled, 2 * format.decode(parts, torch.float32))


def test_int_codes_by_hand() -> None:
    w = torch.tensor([[-1.0, 0.0, 1.0, 2.0, 0.4, 0.6, -0.6, 1.4]])
    parts = IntAsym(bits=2, group=8).encode(w, {})
    assert parts["scale"].tolist() == [[1.0]] and parts["zero"].tolist() == [[1]]
    codes = [0, 1, 2, 3, 1, 2, 0, 2]
    assert parts["codes"].tolist() == [[sum(c << 2 * i for i, c in enumerate(codes[k : k + 4])) for k in (0, 4)]]


def test_int_group_of_one_sign_keeps_its_far_end() -> None:
    w = torch.linspace(0.5, 1.0, 64)[None]
    decoded = IntAsym(bits=4, group=64).decode(IntAsym(bits=4, group=64).encode(w, {}), torch.float32)
    assert (decoded - w).abs().max() < 0.51 / 15


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_round_to_is_the_cast(dtype: torch.dtype) -> None:
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(1 << 16, generator=gen) * torch.exp(4 * torch.randn(1 << 16, generator=gen))
    ties = torch.arange(-70000, 70000, 3).float() / 16
    tiny = torch.arange(-3000, 3000).float() * 2.0**-26
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 65504.0, 65519.9, 65520.0])
    x = torch.cat([x, ties, tiny, special])
    rounded = round_to(x, dtype)
    assert torch.equal(rounded.to(dtype).view(torch.int16)[:-4], x.to(dtype).view(torch.int16)[:-4])
    assert rounded[-4].isnan() and torch.equal(rounded[-3:].to(dtype), x[-3:].to(dtype))
    inside = x.abs() < 65504
    assert torch.equal(rounded[inside], x.to(dtype).float()[inside])  # exactly representable


def test_cast_weight_keeps_the_gradient_of_a_cast() -> None:
    w = torch.randn(8, requires_grad=True)
    cast_weight(w, torch.bfloat16).backward(torch.ones(8, dtype=torch.bfloat16))
    assert w.grad is not None and w.grad.dtype == torch.float32 and torch.equal(w.grad, torch.ones(8))


# -- what a user may get wrong -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int5", "Did you mean 'int"), ("nf3:g60", "multiple of 8"), ("nf3:s3", "3 scales"),
        ("int4:s2", "no option 's2'"), ("int4:q", "no option 'q'"), ("dense:g64", "no option"),
        ("", "There is no format"), ("int4:g64:g32", "says its group twice"),
        ("nf3:g64:learned:fixed", "says its grid twice"), ("sparse24:tile:soft", "says its select twice"),
    ],
)  # fmt: skip
def test_bad_spellings(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        parse_format(text)
    assert "\n" not in str(error.value)


def test_bad_json() -> None:
    refused("Did you mean 'int_asym'", from_json, {"name": "int_asm", "bits": 4})
    refused("no field 'grup'", from_json, {"name": "int_asym", "grup": 64})
    refused("float16 or bfloat16", from_json, {"name": "int_asym", "scale_dtype": "float8"})
    pruned = {"name": "sparse24"}
    for data, message in (
        ({"name": ["int_asym"]}, "no format named"),
        ({"name": "float_asym", "table": 3}, "table must be a text, not 3"),
        ({"name": "int_asym", "group": "64"}, "group must be a whole number, not '64'"),
        ({"name": "int_asym", "bits": 4.0}, "bits must be a whole number, not 4.0"),
        ({"name": "int_asym", "symmetric": None}, "symmetric must be true or false, not None"),
        ({"name": "stacked", "first": pruned}, "second is missing"),
        ({"name": "stacked", "first": pruned, "second": "int4"}, "second must be an object, not 'int4'"),
        ({"name": "slorb", "first": 24}, "first must be an object, not 24"),
    ):
        refused(message, from_json, data)


def test_check_names_groups_that_fit() -> None:
    with pytest.raises(UserError, match=r"width 576: use group 64, 72, 96, 144, 192") as error:
        IntAsym(bits=4, group=128).check((10, 576))
    assert "0 for one per row" in str(error.value)
    refused("leave this layer dense", FloatAsym(group=0).check, (10, 100))
    IntAsym(group=0).check((10, 576))


def test_spellings() -> None:
    assert parse_format("int4") == IntAsym(bits=4, group=64)
    assert parse_format("nf3:g128") == FloatAsym(table="nf3", scales=2, group=128)
    assert parse_format("NF3:s1:g32") == FloatAsym(table="nf3", scales=1, group=32)
    assert IntAsym(bits=3, group=128).bits_per_weight((1024, 1024)) == 3.1875
