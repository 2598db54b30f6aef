"""Embeddings with a Format: lookups, tied heads, packing, training, moving."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refusals import refused
from shoestring.formats import (
    Dense,
    FormatEmbedding,
    allocate_packed,
    convert,
    formats_of,
    keep_decoded,
    pack,
    packed_state,
    parse_format,
    unpack,
    use_kernels,
)
from shoestring.formats.convert import format_host

LABELS = ("int8:g0", "int4:g32", "int3:g32", "nf4:s1:g32", "fp4:g32", "sparse24")
TOKENS = torch.tensor([[3, 0, 39], [17, 3, 3]])


def table(label: str, **options: Any) -> tuple[nn.Module, FormatEmbedding]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"embed": nn.Embedding(40, 64, **options)})
    convert(model, [("embed", parse_format(label))])
    host = format_host(model, "embed")
    assert isinstance(host, FormatEmbedding)
    return model, host


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("label", LABELS)
def test_rows_are_those_of_the_whole_table_packed_or_not(label: str, dtype: torch.dtype) -> None:
    model, host = table(label)
    whole = host.format.fake(host.weight.detach().to(dtype), host.format_state())
    assert torch.equal(host.rows(TOKENS, dtype), F.embedding(TOKENS, whole))
    before = whole.clone()
    pack(model, dtype=dtype)
    assert host.packed and host.weight is None and host(TOKENS).dtype == dtype
    assert torch.equal(host(TOKENS), F.embedding(TOKENS, before))
    x = torch.randn(5, 64).to(dtype)
    torch.testing.assert_close(host.multiply(x), F.linear(x, before))  # a tied head
    keep_decoded(model, dtype=dtype)
    assert torch.equal(host(TOKENS), F.embedding(TOKENS, before)) and use_kernels(model) == []
    unpack(model, dtype=dtype)
    assert torch.equal(host.weight, before) and isinstance(host.format, Dense)


def test_a_packed_table_is_saved_loaded_and_moved() -> None:
    model, host = table("int4:g32")
    state, formats = packed_state(model), {n: f.to_json() for n, f in formats_of(model).items()}
    rows = host(TOKENS)
    other = nn.ModuleDict({"embed": nn.Embedding(40, 64)})
    allocate_packed(other, formats)
    other.load_state_dict(state)
    assert torch.equal(other["embed"](TOKENS), rows)
    scale = state["embed.weight_scale"].clone()
    other.to(torch.bfloat16)
    assert other["embed"](TOKENS).dtype == torch.bfloat16 and torch.equal(other["embed"].weight_scale, scale)
    torch.testing.assert_close(copy.deepcopy(other)["embed"](TOKENS).float(), rows, rtol=1e-2, atol=1e-2)


def test_gradients_reach_the_rows_that_were_looked_up() -> None:
    _, host = table("int4:g32:learned")
    host(TOKENS).square().sum().backward()
    used = torch.zeros(40, dtype=torch.bool).scatter_(0, TOKENS.flatten(), True)
    for name in ("weight", "weight_scale"):
        grad = getattr(host, name).grad
        assert isinstance(grad, Tensor) and (grad.flatten(1).abs().sum(1) > 0).equal(used), name


def test_embeddings_that_cannot_be_converted_are_named() -> None:
    refused("embed cannot be converted: it changes its rows", table, "int8:g0", max_norm=1.0)
    refused(
        "Input width 20 is not a multiple of 8",
        convert,
        nn.ModuleDict({"embed": nn.Embedding(4, 20)}),
        [("embed", parse_format("int8:g0"))],
    )
