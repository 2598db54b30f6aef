"""The laws of formats/base.py, over every Format. Law 5 and 6 on two ranks are in test_ranks.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from shoestring.formats import Format, FormatLinear, Parts, from_json, parse_format
from shoestring.formats.registry import format_class

LABELS = [
    *("dense", "int2:g64", "int3:g32", "int4:g64", "int8:g0", "int4:g32:bfloat16"),
    *("nf2:s2:g64", "nf3:s2:g64", "nf3:s1:g0", "nf4:s2:g64", "nf4:s1:g32", "fp3:s2:g64", "fp4:s1:g32:bfloat16"),
    *("fp8", "fp8:b128", "fp8:bfloat16", "fp8:train-e4m3"),
    *("int4:sym:g64", "int8:sym:g0:bfloat16", "int4:min:g32", "int2:min:g0:bfloat16", "int8:min:g32:fixed"),
    *("int3:g64:fixed", "int4:sym:g32:fixed", "nf3:s2:g64:fixed"),
    *("int2:g64:learned", "int3:g0:learned", "int4:sym:g32:bfloat16:learned"),
    *("nf3:s2:g64:learned", "fp4:s1:g32:learned", "nf2:s2:g0:learned"),
    *("sparse24", "sparse24:tile:held:mvue", "sparse24:soft:mvue"),
    *("sparse24+int4:g32", "sparse24:tile:held+nf3:s2:g32", "sparse24:soft+int3:g32:fixed"),
]
DTYPES = [torch.float32, torch.bfloat16]
every_format = pytest.mark.parametrize("format", [parse_format(x) for x in LABELS], ids=LABELS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])


def hard_weight(dtype: torch.dtype, rows: int = 24, width: int = 192, seed: int = 0) -> Tensor:
    """Normal rows, and rows that break careless quantizers."""
    gen = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, width, generator=gen) * 0.05
    w[0] = 0
    w[1] = w[1].abs() + 0.3  # one sign, far from zero
    w[2] = -w[2].abs() - 0.3
    w[3] *= 1e-6  # scales in fp16's subnormal range
    w[4] *= 1e-12  # scales that underflow
    w[5] *= 3e7  # scales that overflow
    w[6, ::2] = 0
    w[7] = torch.round(w[7] * 40) / 80  # many ties
    w[8, 0] = 10.0  # an outlier
    return w.to(dtype)


def state_of(format: Format, w: Tensor) -> Parts:
    return {name: aux.tensor for name, aux in format.state(w).items()}


def check_bound(format: Format, w: Tensor) -> None:
    state = state_of(format, w)
    decoded = format.decode(format.encode(w, state), w.dtype)
    error, bound = (decoded.double() - w.double()).abs(), format.error_bound(w, state).double()
    assert decoded.isfinite().all()
    assert (error <= bound).all(), (error - bound).max()


@every_format
@every_dtype
def test_law_1_error_stays_within_the_stated_bound(format: Format, dtype: torch.dtype) -> None:
    check_bound(format, hard_weight(dtype))


@pytest.mark.parametrize(
    "label",
    [
        "int2:g8", "int3:g8", "int4:g16", "int8:g0", "int4:min:g8", "int8:min:g16", "nf2:g8", "nf3:g8", "nf4:s1:g16",
        "fp4:g8",
    ],
)  # fmt: skip
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 3), runs=st.integers(1, 3), scale=st.sampled_from([1e-30, 1e-9, 6e-8, 1e-4, 1.0, 1e4, 1e9]),
    values=st.lists(st.integers(-20, 20), min_size=16, max_size=16), shift=st.sampled_from([0.0, 0.7, -25.0]),
    half=st.booleans(),
)  # fmt: skip
@example(rows=1, runs=1, scale=1.0, values=[0] * 16, shift=0.0, half=False)
@example(rows=1, runs=1, scale=1.0, values=[1] * 16, shift=0.0, half=True)
def test_law_1_and_3_on_awkward_values(
    label: str, rows: int, runs: int, scale: float, values: list[int], shift: float, half: bool
) -> None:
    format = parse_format(label)
    w = ((torch.tensor(values).float() + shift) * scale).repeat(rows, runs)
    w = w * torch.linspace(0.5, 1.5, rows)[:, None]
    w = w.to(torch.bfloat16) if half else w
    check_bound(format, w)
    state = state_of(format, w)
    assert torch.equal(format.fake(w, state), format.decode(format.encode(w, state), w.dtype))


@pytest.mark.parametrize("label", [x for x in LABELS if "sparse24" not in x])
def test_law_1_bound_says_something(label: str) -> None:
    """On ordinary weights the bound is a small part of the group's range; of pruned weights nothing is left."""
    format = parse_format(label)
    w = torch.randn(16, 128, generator=torch.Generator().manual_seed(1))
    bound = format.error_bound(w, state_of(format, w))
    assert bound.max() < 0.55 * w.abs().max()


@every_format
@every_dtype
def test_law_2_linear_is_linear_on_the_decoded_weight(format: Format, dtype: torch.dtype) -> None:
    w, x, b = hard_weight(dtype)[8:], torch.randn(5, 192).to(dtype), torch.randn(16).to(dtype)
    parts = format.encode(w, state_of(format, w))
    assert torch.equal(format.linear(x, parts, b), F.linear(x, format.decode(parts, dtype), b))


@every_format
@every_dtype
def test_law_3_fake_is_decode_of_encode(format: Format, dtype: torch.dtype) -> None:
    w = hard_weight(dtype)
    state = state_of(format, w)
    fake = format.fake(w, state)
    assert fake.dtype == dtype
    assert torch.equal(fake, format.decode(format.encode(w, state), dtype))
    # One rounding: the narrow result is the fp32 result rounded.
    assert torch.equal(fake, format.decode(format.encode(w, state), torch.float32).to(dtype))


@every_format
def test_law_3_gradient_is_the_identity(format: Format) -> None:
    """Within the grid; a weight beyond a learned one gets none (test_learned_grid.py says which)."""
    w, upstream = hard_weight(torch.float32).requires_grad_(), torch.randn(24, 192)
    format.fake(w, state_of(format, w.detach())).backward(upstream)
    assert w.grad is not None
    same = w.grad == upstream
    if "learned" in format.label:
        assert (same | (w.grad == 0)).all() and same.float().mean() > 0.95
    else:
        assert same.all()


def compiled_equals_eager(cases: list[tuple[str, torch.dtype]], device: str) -> None:
    """encode and fake from an fp32 master weight, as FormatLinear calls them; all cases in one compiled graph."""
    layers = torch.nn.ModuleList()
    for label, _ in cases:
        layer = FormatLinear(192, 32, bias=False, format=parse_format(label), device=device)
        with torch.no_grad():
            # A weight beyond the range of fp16 would be infinite before a Format sees it.
            layer.weight.copy_(hard_weight(torch.float32, 32).clamp(-6e4, 6e4))
        layers.append(layer)

    def both(layers: torch.nn.ModuleList) -> list[tuple[Parts, Tensor]]:
        from shoestring.formats.rounding import cast_weight

        results = []
        for layer, (_, dtype) in zip(layers, cases, strict=True):
            w = cast_weight(layer.weight, dtype)
            results.append((layer.format.encode(w.detach(), layer.format_state()), layer.effective_weight(dtype)))
        return results

    torch._dynamo.reset()
    eager, compiled = both(layers), torch.compile(both, fullgraph=True)(layers)
    for case, by_one, by_other in zip(cases, eager, compiled, strict=True):
        for a, b in zip(pytree.tree_leaves(by_one), pytree.tree_leaves(by_other), strict=True):
            assert torch.equal(a, b), f"{case}: {(a != b).sum()} of {a.numel()} differ"


COMPILED = [("int3:g32", torch.float32), ("nf3:s2:g32:learned", torch.float32)]
COMPILED += [
    (x, torch.bfloat16) for x in ("fp8:b128", "fp8:train", "int4:g64", "sparse24:soft:mvue", "sparse24:tile+int4:g32")
]
MORE = [("fp4:s1:g32:bfloat16", torch.float32)]
MORE += [(x, torch.bfloat16) for x in ("int4:min:g32", "nf3:s2:g64", "int3:g64:learned", "sparse24:held+slorb16")]


@pytest.mark.parametrize("cases", [COMPILED, pytest.param(MORE, marks=pytest.mark.lab)], ids=["families", "more"])
def test_law_3_compiled_equals_eager(cases: list[tuple[str, torch.dtype]]) -> None:
    """The other Formats share these families' code."""
    compiled_equals_eager(cases, "cpu")


# Every Format in the dtype that GPUs train in; the other dtypes once per family.
FAMILIES = ["int4:g64", "int3:g0:learned", "nf3:s2:g64", "sparse24:soft:mvue"]
ON_GPU = [(x, torch.bfloat16) for x in LABELS] + [(x, d) for x in FAMILIES for d in (torch.float32, torch.float16)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("label", "dtype"), ON_GPU)
def test_law_3_compiled_equals_eager_on_gpu(label: str, dtype: torch.dtype) -> None:
    compiled_equals_eager([(label, dtype)], "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@every_format
def test_gpu_and_cpu_encode_alike(format: Format) -> None:
    w = torch.cat([hard_weight(torch.float32, seed=s) for s in range(50)])
    on_cpu, on_gpu = (format.encode(w, state_of(format, w)), format.encode(w.cuda(), state_of(format, w.cuda())))
    for name, part in on_cpu.items():
        assert torch.equal(part, on_gpu[name].cpu()), name


@every_format
@every_dtype
def test_law_4_round_trips_lose_nothing(format: Format, dtype: torch.dtype, tmp_path: Path) -> None:
    w = hard_weight(dtype)
    parts = format.encode(w, state_of(format, w))
    save_file({f"weight_{n}": t for n, t in parts.items()}, tmp_path / "w.safetensors")
    loaded = {n.removeprefix("weight_"): t for n, t in load_file(tmp_path / "w.safetensors").items()}
    assert loaded.keys() == parts.keys()
    for name, part in parts.items():
        assert loaded[name].dtype == part.dtype and torch.equal(loaded[name], part)
    for name, empty in format.empty_parts((24, 192), dtype).items():
        assert empty.shape == parts[name].shape and empty.dtype == parts[name].dtype
    assert from_json(format.to_json()) == format and parse_format(format.label) == format
    assert format_class(format.name) is type(format)


@every_format
def test_law_4_bits_per_weight_counts_every_stored_byte(format: Format) -> None:
    w = torch.randn(40, 192).to(torch.bfloat16)
    stored = sum(t.numel() * t.element_size() for t in format.encode(w, state_of(format, w)).values())
    assert format.bits_per_weight((40, 192)) == pytest.approx(8 * stored / w.numel())


@every_format
@every_dtype
def test_law_5_a_shard_encodes_to_the_shard_of_the_code(format: Format, dtype: torch.dtype) -> None:
    large = format.block((24, 192))[0] > 12
    shape = (300, 384) if large else (24, 192)  # blocks at the edge may be smaller
    w = hard_weight(dtype, *shape)
    state = state_of(format, w)
    parts = format.encode(w, state)
    rows, cols = format.block(shape)
    halves = (slice(0, rows), slice(rows, None)) if large else (slice(0, 12), slice(12, 24))
    for r in (*halves, slice(rows, 2 * rows), slice(None)):
        for c in (slice(0, cols), slice(shape[1] - cols, shape[1]), slice(None)):
            if not w[r, c].numel():  # the block is the whole weight
                continue
            shard = format.encode(w[r, c], format.cut(state, shape, r, c))
            expected = format.cut(parts, shape, r, c)
            for name in parts:
                assert torch.equal(shard[name], expected[name]), (name, r, c)


@every_format
@every_dtype
def test_law_6_pack_holds_what_the_forward_multiplied_with(format: Format, dtype: torch.dtype) -> None:
    layer = FormatLinear(192, 32, format=format)
    with torch.no_grad():
        layer.weight.copy_(hard_weight(torch.float32, 32))
    x = torch.randn(3, 192).to(dtype)
    used, y = layer.effective_weight(dtype), layer(x)
    if format.name != "dense":
        layer.pack(dtype)
    assert torch.equal(layer.effective_weight(dtype), used)
    if format.name == "fp8_train":  # its products round activations, too, by a sixteenth at most
        terms = F.linear(x.float().abs(), used.float().abs(), layer.bias.float().abs())
        assert ((y - layer(x)).float().abs() <= terms * (1 / 16 + 2.0**-7)).all() and not torch.equal(layer(x), y)
    else:
        assert torch.equal(layer(x), y)
