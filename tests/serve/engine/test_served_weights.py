"""Packed weights in the kernels' order, through a saved folder, the decoder and the engine's fused forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from naive_decoding import naive

from shoestring.formats import convert, kernel_layout, pack, parse_format, use_kernels
from shoestring.kernels.lowbit.lowbit_linear import lowbit_row_linear
from shoestring.model import load_model, save_model
from shoestring.serve import Engine, Sampling
from shoestring.serve.engine import fused_decoder, merged_linear
from shoestring.serve.engine.block_pool import BlockPool, RowSpan
from shoestring.serve.engine.merged_linear import merge_linears
from shoestring.serve.engine.runner import Batch, Runner
from tiny import tiny_decoder

SIZES = {"d_model": 64, "d_ff": 96, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}


@pytest.mark.parametrize("format", ["int4:g32", "nf3:s2:g32", "int2:g32"])
def test_a_served_folder_writes_the_text_of_the_packed_one(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_decoder(**SIZES).float()
    model.compute_dtype = torch.float32
    convert(model, [("blocks.*", parse_format(format))])
    pack(model)
    save_model(tmp_path / "packed", model)
    sampling = Sampling(max_tokens=8)
    want = naive(model, [1, 2, 3], sampling)

    monkeypatch.setattr(kernel_layout, "chunks_usable", lambda t: True)
    served = load_model(tmp_path / "packed").model
    names = use_kernels(served)
    assert len(names) == 2 * 7 and all("weight_chunks" in dict(served.get_submodule(n).named_buffers()) for n in names)
    assert naive(served, [1, 2, 3], sampling) == want
    attn = served.blocks[0].attn
    linear = merge_linears([attn.q, attn.k, attn.v], torch.float32)
    assert linear.parts is not None and "chunks" in linear.parts and not linear.separate
    assert Engine(served, graphs=True).generate([[1, 2, 3]], sampling)[0].token_ids == want

    save_model(tmp_path / "again", served)
    again = load_model(tmp_path / "again").model.state_dict()
    for name, t in model.state_dict().items():
        assert torch.equal(again[name], t), name


def test_few_rows_of_packed_layers_are_four_products_and_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, SwiGLU and residual sums go into the products."""
    model = tiny_decoder(**SIZES, max_positions=64).float()
    model.compute_dtype = torch.float32
    convert(model, [("blocks.*", parse_format("int4:g32"))])
    pack(model)
    tokens = torch.randint(0, 29, (3, 12), generator=torch.Generator().manual_seed(0))
    want = model(tokens)
    monkeypatch.setattr(kernel_layout, "chunks_usable", lambda t: True)
    use_kernels(model)
    runner = Runner(model, BlockPool(9, 4), graphs=True)
    spans = [RowSpan([3 * i, 3 * i + 1, 3 * i + 2], 0, 11) for i in range(3)]
    runner.forward(Batch(spans, tokens[:, :11].flatten().tolist(), range(33)))

    asked: list[set[str]] = []

    def product(*args: Any, **around: Any) -> torch.Tensor:
        asked.append(set(around))
        return lowbit_row_linear(*args, **around)

    def never(*args: Any, **more: Any) -> torch.Tensor:
        raise AssertionError("this belongs into a product")

    monkeypatch.setattr(merged_linear, "lowbit_row_linear", product)
    monkeypatch.setattr(fused_decoder, "glu", never)
    last = [RowSpan(s.blocks, 11, 1) for s in spans]
    got = runner.forward(Batch(last, tokens[:, 11].tolist(), range(3)))
    torch.testing.assert_close(got, want[:, 11], rtol=1e-4, atol=1e-4)
    layer = [{"norm_K", "eps"}, {"residual_1N"}, {"norm_K", "eps", "swiglu"}, {"residual_1N"}]
    assert asked == layer * model.spec.num_layers
    linear = merge_linears([model.blocks[0].mlp.down], torch.float32)
    assert linear.has_row_kernel(16) and not linear.has_row_kernel(17)
