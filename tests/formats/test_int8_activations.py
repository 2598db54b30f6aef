"""The opt-in path that rounds activations to 8 bits, on whole models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from refusals import refused
from shoestring.formats import (
    FormatLinear,
    IntAsym,
    convert,
    int8_activations,
    keep_decoded,
    pack,
    parse_format,
    unpack,
)
from shoestring.formats.int8_activations import Int8Host, quantize_activations
from shoestring.model import Decoder, ModelSpec, load_model, save_model
from shoestring.model.transformer import untie_head

pytestmark = pytest.mark.skipif(int8_activations.refusal() is not None, reason=str(int8_activations.refusal()))
SPEC = ModelSpec(96, 64, 2, 4, 2, 16, 128, 64, bos_id=1, eos_id=2)


def packed_model(label: str = "int4:g32", seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    model = Decoder(SPEC)
    convert(model, [("*", parse_format(label))])
    pack(model)
    return model


@torch.no_grad()
def logits(model: Decoder) -> torch.Tensor:
    return model(torch.arange(32).view(2, 16))


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_close_but_not_equal() -> None:
    model = packed_model()
    before = logits(model)
    names = quantize_activations(model)
    assert len(names) == 14 and all(isinstance(model.get_submodule(n), Int8Host) for n in names)
    assert 0 < distance(logits(model), before) < 0.05
    keep_decoded(model)  # what the command line does for every model on a CPU: no effect on these layers
    assert all(m.decoded is None for m in model.modules() if isinstance(m, Int8Host))


OFFSETS = "int4:min:g32"


@pytest.mark.parametrize("label", ["int4:g32", OFFSETS])
def test_saved_moved_loaded_and_unpacked_as_any_packed_model(label: str, tmp_path: Path) -> None:
    model = packed_model(label)
    save_model(tmp_path / "a", model)
    before = logits(model)
    quantize_activations(model)
    rounded = logits(model)
    save_model(tmp_path / "b", model)
    assert (tmp_path / "a/packed.safetensors").read_bytes() == (tmp_path / "b/packed.safetensors").read_bytes()
    other = load_model(tmp_path / "a").model
    quantize_activations(other)
    assert torch.equal(logits(other), rounded)
    # New weights are noticed, and so is a dtype that the operator does not take.
    changed = packed_model(label, seed=1)
    other.load_state_dict(changed.state_dict())
    assert distance(logits(other), logits(changed)) < 0.05
    x = torch.randn(3, 64, dtype=torch.float64)
    layer = other.blocks[0].attn.q  # type: ignore[union-attr]
    assert isinstance(layer, FormatLinear) and layer(x).dtype == torch.float64
    unpack(model)
    assert torch.equal(logits(model), before)


def test_biases_and_leading_dims() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32))
    convert(model, [("*", IntAsym(4, 32, symmetric=True))])
    pack(model)
    x = torch.randn(2, 3, 64)
    exact = model(x).detach()
    quantize_activations(model)
    assert model(x).shape == (2, 3, 32) and 0 < distance(model(x).detach(), exact) < 0.05


def test_layers_that_do_not_fit_stay_and_none_at_all_is_an_error() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 32))
    convert(model, [("0", IntAsym(4, 8)), ("1", IntAsym(3, 32))])
    pack(model)
    assert quantize_activations(model) == ["1"]
    refused("multiple of 32", quantize_activations, nn.Sequential(nn.Linear(64, 32)))


def test_a_machine_that_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_activations, "has_arm_kernels", lambda: True)
    monkeypatch.setattr(int8_activations, "unusable", lambda: "no such operator")
    model = packed_model()
    with pytest.warns(UserWarning, match="left out and fp32 is used: no such operator"):
        assert quantize_activations(model) == []
    assert not int8_activations.would_gain(model, torch.float32)


@pytest.mark.parametrize("is_arm", [True, False])
def test_who_multiplies(is_arm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_arm and int8_activations.unusable() is not None:
        pytest.skip(str(int8_activations.unusable()))
    x, wanted = torch.randn(5, 64), packed_model()
    model = packed_model()
    monkeypatch.setattr(int8_activations, "has_arm_kernels", lambda: is_arm)
    names = quantize_activations(model)
    layer = model.get_submodule(names[0])
    assert isinstance(layer, Int8Host)
    with torch.no_grad():
        got, exact = layer(x[:, : layer.in_features]), wanted.get_submodule(names[0])(x[:, : layer.in_features])
    assert layer.tiled is (layer.int8 is None) is (not is_arm)
    assert (got - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("is_arm", [True, False])
def test_offsets_have_our_own_kernel(is_arm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_arm and int8_activations.unusable() is not None:
        pytest.skip(str(int8_activations.unusable()))
    monkeypatch.setattr(int8_activations, "has_arm_kernels", lambda: is_arm)
    torch.manual_seed(0)
    model = Decoder(SPEC)
    convert(model, [("*.mlp.*", parse_format("int4:min:g32")), ("*", parse_format("int4:g32"))])
    pack(model)
    before = logits(model)
    names = quantize_activations(model)
    assert any("attn" in name for name in names) and any("mlp" in name for name in names)
    assert all(model.get_submodule(name).tiled for name in names if "mlp" in name)
    assert 0 < distance(logits(model), before) < 0.05


def test_an_untied_8_bit_head(tmp_path: Path) -> None:
    model = packed_model()
    before = logits(model)
    untie_head(model, IntAsym(8, 0, symmetric=True))
    assert model.head is not None and not model.spec.tied
    assert 0 < distance(logits(model), before) < 0.01
    save_model(tmp_path / "m", model)
    assert torch.equal(logits(load_model(tmp_path / "m").model), logits(model))
    assert "head" in quantize_activations(model)
    assert distance(logits(model), before) < 0.05
    refused("packed as int8:sym:g0 already", untie_head, model, IntAsym(8, 0))


@pytest.mark.parametrize("is_arm", [True, False])
@pytest.mark.parametrize("label", ["int8:g0", "int8:sym:g0", "int4:g32"])
def test_a_packed_embedding_that_is_the_head(
    label: str, is_arm: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_arm and int8_activations.unusable() is not None:
        pytest.skip(str(int8_activations.unusable()))
    monkeypatch.setattr(int8_activations, "has_arm_kernels", lambda: is_arm)
    torch.manual_seed(0)
    model = Decoder(SPEC)
    convert(model, [("*", IntAsym(4, 32)), ("embed", parse_format(label))])
    pack(model)
    before, rows = logits(model), model.embed(torch.arange(96))
    save_model(tmp_path / "before", model)
    names = quantize_activations(model)
    assert "embed" in names and isinstance(model.embed, Int8Host)
    assert model.embed.tiled is (not is_arm)
    assert torch.equal(model.embed(torch.arange(96)), rows)  # what is looked up is not rounded
    with torch.no_grad():
        hidden = torch.randn(3, 64)
        exact, got = hidden @ model.embed.effective_weight(torch.float32).t(), model.embed.multiply(hidden)
    assert 0 < distance(got, exact) < 0.02
    assert distance(logits(model), before) < 0.05
    keep_decoded(model)
    assert model.embed.decoded is None  # no table in fp32
    save_model(tmp_path / "after", model)
    assert (tmp_path / "before/packed.safetensors").read_bytes() == (tmp_path / "after/packed.safetensors").read_bytes()
    rounded = logits(model)
    assert torch.equal(logits(model.double().float()), rounded)
    unpack(model)
    torch.testing.assert_close(logits(model), before)


@pytest.mark.parametrize("is_arm", [True, False])
def test_no_rows_give_no_rows_and_nothing_more_is_to_be_gained(is_arm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a long prompt asks for no logits."""
    if is_arm and int8_activations.unusable() is not None:
        pytest.skip(str(int8_activations.unusable()))
    monkeypatch.setattr(int8_activations, "has_arm_kernels", lambda: is_arm)
    torch.manual_seed(0)
    model = Decoder(SPEC)
    convert(model, [("*", IntAsym(4, 32)), ("embed", parse_format("int8:g0"))])
    pack(model)
    assert int8_activations.gains_on(model, torch.float32)
    quantize_activations(model)
    with torch.no_grad():
        assert model.embed.multiply(torch.zeros(0, 64)).shape == (0, 96)
        assert model(torch.arange(6)[None], rows=torch.tensor([], dtype=torch.long)).shape == (0, 96)
    assert not int8_activations.gains_on(model, torch.float32)


def test_an_embedding_alone_is_not_enough() -> None:
    torch.manual_seed(0)
    model = Decoder(SPEC)
    convert(model, [("*", parse_format("nf4:g32")), ("embed", parse_format("int8:g0"))])
    pack(model)
    refused("there are none", quantize_activations, model)
    assert not isinstance(model.embed, Int8Host)
