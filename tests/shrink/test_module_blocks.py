"""Encoders of transformers, calibrated, quantized and packed from Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from refusals import refused
from shoestring.formats import FormatLinear, formats_of, pack, parse_format, self_check
from shoestring.model.module_blocks import ModuleBlocks
from shoestring.shrink.calibrate import walk
from shoestring.shrink.quantize import METHODS, quantize

transformers = pytest.importorskip("transformers")
SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128,
}  # fmt: skip
INT3 = parse_format("int3:g32")


def encoder(kind: str) -> tuple[nn.Module, nn.ModuleList, Tensor]:
    """With loud channels, as trained models have them: methods differ there."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    if kind == "bert":
        config = transformers.BertConfig(vocab_size=90, max_position_embeddings=32, **SIZES)
        model = transformers.BertModel(config).eval()
        inputs, blocks = torch.randint(0, 90, (16, 24), generator=generator), model.encoder.layer
    else:
        config = transformers.ViTConfig(image_size=32, patch_size=8, **SIZES)
        model = transformers.ViTModel(config).eval()
        inputs, blocks = torch.randn(16, 3, 32, 32, generator=generator), model.layers
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.1 + (p.ndim == 1))
            if p.ndim == 1 and p.shape[0] == 64:
                p[::16] *= 6
    return model, blocks, inputs


@torch.no_grad()
def output(model: nn.Module, inputs: Tensor) -> Tensor:
    return model(inputs).last_hidden_state


@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_methods_end_to_end(kind: str) -> None:
    errors = {}
    for method in ("rtn", "gptq", "awq"):
        model, layers, inputs = encoder(kind)
        want = output(model, inputs)
        blocks = ModuleBlocks(model, layers)
        assert torch.equal(output(model, inputs), want)
        report = quantize(blocks, [("blocks.*", INT3)], walk(blocks, inputs[:12]), METHODS[method])
        assert len(report.layers) == 12 and all(e.output_error is not None for e in report.layers)
        self_check(model, inputs[:2])
        assert len(pack(blocks)) == 12 and set(formats_of(model)) == {
            n for n, m in model.named_modules() if isinstance(m, FormatLinear)
        }
        self_check(model, inputs[:2])
        errors[method] = float((output(model, inputs[12:]) - want[12:]).norm() / want[12:].norm())
    assert errors["gptq"] < errors["rtn"] and errors["awq"] < errors["rtn"] < 0.5, errors


@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_scales_move_where_the_output_stays(kind: str) -> None:
    model, layers, inputs = encoder(kind)
    blocks = ModuleBlocks(model, layers)
    blocks.embed_inputs(inputs)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    found = {s.readers for s in blocks.input_sources(blocks.blocks[1])}
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    if kind == "bert":  # the residual stream reads its norms, too
        assert found == {("inner.attention.output.dense",)}
    else:
        assert found == {
            tuple(f"inner.attention.{x}_proj" for x in "qkv"),
            ("inner.mlp.fc1",),
            ("inner.attention.o_proj",),
        }


def test_what_is_no_chain_of_equal_inputs_is_said() -> None:
    model, layers, inputs = encoder("bert")
    refused("no chain", ModuleBlocks(model, list(layers)[::-1]).embed_inputs, inputs)

    class Padded(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, ids: Tensor) -> Any:
            return self.inner(ids, attention_mask=(ids > 20).long())

    refused("masks that differ", ModuleBlocks(Padded(model), layers).embed_inputs, inputs)
