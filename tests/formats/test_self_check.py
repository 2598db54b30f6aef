"""The self-check finds models that do not compute with the Formats of their layers."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refusals import refused
from shoestring.formats import FormatLinear, IntAsym, convert, pack, self_check
from shoestring.methods.sparse24.format import Sparse24
from tiny import QWEN2, random_model

INT2 = IntAsym(bits=2, group=32)
X = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))


def encoder_layer() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0).eval()


@pytest.fixture
def fast_paths_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if `convert` did not know nn.TransformerEncoderLayer."""
    monkeypatch.setattr(sys.modules["shoestring.formats.convert"], "turn_off_fast_paths", lambda model: None)


def test_an_encoder_that_reads_its_weights_itself_is_caught_converted(fast_paths_stay: None) -> None:
    model = encoder_layer()
    with torch.no_grad():
        dense = model(X)
        convert(model, [("*", INT2)])
        assert torch.equal(model(X), dense)  # torch's fast path: exactly the unquantized model
    refused(r"linear1 \(2 in all\) is converted to int2:g32, but other code reads", self_check, model, X)
    assert torch.equal(model.linear1.weight, encoder_layer().linear1.weight)  # type: ignore[union-attr, arg-type]


def test_and_packed(fast_paths_stay: None) -> None:
    model = encoder_layer()
    convert(model, [("*", INT2)])
    pack(model)
    refused(r"fails now that linear1 is packed .*past its forward", self_check, model, X)


def test_with_fast_paths_off_both_checks_pass_and_change_nothing() -> None:
    model = encoder_layer().train()
    model.dropout1.eval()  # type: ignore[union-attr, operator]
    convert(model, [("*", INT2)])
    modes, state = [m.training for m in model.modules()], {n: t.clone() for n, t in model.state_dict().items()}
    self_check(model, X)
    assert modes == [m.training for m in model.modules()]
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
    pack(model)
    self_check(model, X)
    assert all(m.decoded is None for m in model.modules() if isinstance(m, FormatLinear))


class Careless(nn.Module):
    """Multiplies with its layer's weight, and has a layer that it does not use."""

    def __init__(self, use: bool) -> None:
        super().__init__()
        self.called, self.read, self.unused = (nn.Linear(32, 32) for _ in range(3))
        self.use = use

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.called(x)
        return {"out": F.linear(x, self.read.weight) if self.use else x, "ids": x.argmax(-1)}


def test_only_layers_that_matter_are_named() -> None:
    for use in (True, False):
        torch.manual_seed(0)
        model = Careless(use)
        convert(model, [("*", INT2)])
        if use:
            refused(r"^read \(1 in all\)", self_check, model, X)
        else:
            self_check(model, x=X)
            pack(model)
            self_check(model, x=X)


def test_a_kernel_that_computes_something_else_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    convert(model, [("*", INT2)])
    pack(model)
    self_check(model, X)
    plain = IntAsym.linear
    monkeypatch.setattr(IntAsym, "linear", lambda *args: plain(*args) * 1.1)
    refused("computes something else than its decoded weights", self_check, model, X)


def test_values_that_are_no_numbers() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32))
    convert(model, [("*", INT2)])
    nn.init.constant_(model[1].weight, float("nan"))  # type: ignore[arg-type]
    refused("NaN or infinite", self_check, model, X)


def test_formats_that_change_nothing_and_decoders_pass() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    with torch.no_grad():
        model[0].weight.mul_(torch.tensor([1.0, 1.0, 0.0, 0.0]).repeat(8))
    convert(model, [("*", Sparse24())])  # the weight is 2:4 already
    self_check(model, X)
    decoder = random_model(QWEN2)
    convert(decoder, [("*", INT2), ("embed", INT2)])
    for _ in range(2):
        self_check(decoder, torch.arange(8)[None])
        pack(decoder)
