"""Adapters: products and gradients against dense autograd, the frozen base, DoRA's norms, compilation."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoestring.errors import UserError
from shoestring.formats import FormatLinear, convert, keep_decoded, kernel_layout, pack, parse_format, use_kernels
from shoestring.formats.adapter import (
    AdapterConfig,
    adapted_layers,
    adapter_weights,
    adapters_off,
    add_adapters,
    attach_adapters,
    remove_adapters,
)
from shoestring.formats.convert import format_linear
from shoestring.model import Decoder
from shoestring.model.parallel import compile_, recompute_
from tiny import LLAMA, tiny_llama

SPEC = dataclasses.replace(LLAMA, d_ff=64)
FORMATS = ("dense", "int4:g32", "nf4:g32", "nf3:g32", "sparse24", "sparse24+int4:g16")


def adapted(format: str, *, dora: bool = False, seed: int = 1, num_layers: int = 2) -> Decoder:
    """A tiny model in the format, with branches that are not zero."""
    model = tiny_llama(dataclasses.replace(SPEC, num_layers=num_layers))
    if format != "dense":
        convert(model, [("*", parse_format(format))])
        pack(model)
    add_adapters(model, AdapterConfig(4, 8.0, dora))
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in adapted_layers(model).values():
            layer.B.normal_(0, 0.1, generator=draw)
            if layer.magnitude is not None:
                layer.magnitude.mul_(1 + 0.1 * torch.rand(layer.magnitude.shape, generator=draw))
    return model


class PlainBranch(nn.Module):
    """The definition, with a dense weight under autograd."""

    def __init__(self, host: FormatLinear) -> None:
        super().__init__()
        held = next(iter(adapted_layers(host).values()))
        self.weight = host.effective_weight(torch.float32).detach()
        self.A, self.B = (nn.Parameter(t.detach().clone()) for t in (held.A, held.B))
        self.scale = float(held.scale)
        self.magnitude = None if held.magnitude is None else nn.Parameter(held.magnitude.detach().clone())

    def forward(self, host: FormatLinear, x: Tensor, bias: Tensor | None) -> Tensor:
        whole = self.weight + self.scale * self.B @ self.A
        if self.magnitude is not None:
            whole = whole * (self.magnitude / whole.detach().norm(dim=1))[:, None]
        return F.linear(x, whole, bias)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dora", [False, True])
def test_gradients_equal_those_of_a_dense_weight_and_the_base_keeps_its_bytes(format: str, dora: bool) -> None:
    model = adapted(format, dora=dora)
    layers = adapted_layers(model)
    base = {n: t.clone() for n, t in model.state_dict().items() if ".adapter." not in n}
    tokens = torch.randint(0, SPEC.vocab_size, (2, 9), generator=torch.Generator().manual_seed(3))
    logits = model(tokens)
    logits.square().mean().backward()
    assert {n for n, p in model.named_parameters() if p.grad is not None} == {
        n for n in model.state_dict() if ".adapter." in n
    }
    ours = {n: {p: t.grad for p, t in a.named_parameters()} for n, a in layers.items()}
    for name in layers:
        host = format_linear(model, name)
        host.adapter = PlainBranch(host)
    plain = model(tokens)
    plain.square().mean().backward()
    torch.testing.assert_close(logits, plain, rtol=1e-5, atol=2e-5)
    for name, grads in ours.items():
        for which, expected in format_linear(model, name).adapter.named_parameters():  # type: ignore[union-attr]
            error = (grads[which] - expected.grad).abs().max() / expected.grad.abs().max()  # type: ignore[operator, union-attr]
            assert error < 1e-5, (name, which, float(error))
    remove_adapters(model)
    assert all(torch.equal(t, base[n]) for n, t in model.state_dict().items() if n in base)


@pytest.mark.parametrize("format", ["int4:g32", "nf3:g32", "sparse24"])
def test_a_packed_layer_keeps_its_parts_and_the_input_gradient_is_bit_equal(format: str) -> None:
    layer = FormatLinear(64, 32)
    layer.set_format(parse_format(format))
    layer.pack()
    x = torch.randn(5, 64, requires_grad=True)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
        y = layer(x)
    weight = layer.effective_weight(torch.float32)
    assert sum(kept) == sum(t.nbytes for t in layer.operands().values()) < weight.nbytes
    dy = torch.randn_like(y)
    (grad,) = torch.autograd.grad(y, x, dy)
    (expected,) = torch.autograd.grad(F.linear(x, weight, layer.bias), x, dy)
    assert torch.equal(grad, expected)
    keep_decoded(layer)
    (grad,) = torch.autograd.grad(layer(x), x, dy)
    assert torch.equal(grad, expected)


def test_new_adapters_change_nothing_are_a_function_of_seed_and_name_and_turn_off() -> None:
    model, tokens = tiny_llama(SPEC), torch.arange(12)[None]
    plain = model(tokens)
    names = add_adapters(model, AdapterConfig(4, 8.0, targets=("*.q", "blocks.1.mlp.*")), seed=5)
    assert names == ["blocks.0.attn.q", *(f"blocks.1.{n}" for n in ("attn.q", "mlp.gate", "mlp.up", "mlp.down"))]
    assert torch.equal(model(tokens), plain)
    first = adapter_weights(model)
    other = tiny_llama(SPEC)
    add_adapters(other, AdapterConfig(4, 8.0, targets=("blocks.1.*",)), seed=5)
    assert torch.equal(adapter_weights(other)["blocks.1.attn.q"].a, first["blocks.1.attn.q"].a)
    attach_adapters(model, {n: w._replace(b=torch.ones_like(w.b)) for n, w in first.items()})
    changed = model(tokens)
    assert not torch.equal(changed, plain)
    with adapters_off(model):
        assert torch.equal(model(tokens), plain)
    assert torch.equal(model(tokens), changed)
    again = tiny_llama(SPEC)
    attach_adapters(again, adapter_weights(model))
    assert torch.equal(again(tokens), changed)


def test_dora_norms_are_exact_without_a_decoded_weight() -> None:
    model = adapted("int4:g32", dora=True)
    for name, held in adapted_layers(model).items():
        host = format_linear(model, name)
        whole = host.effective_weight(torch.float32).double() + held.scale.double() * held.B.double() @ held.A.double()
        norms = held.row_norms(host, held.A, held.B, torch.float32)
        torch.testing.assert_close(norms.double(), whole.norm(dim=1), rtol=2e-6, atol=0)


@pytest.mark.lab
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_compiled_block_is_one_graph_and_gives_the_same_gradients(
    dora: bool, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = adapted("nf4:g32", dora=dora, num_layers=4), torch.arange(12)[None]
    model(tokens).square().mean().backward()
    eager = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(kernel_layout, "chunks_usable", lambda t: True)
    assert use_kernels(model)  # held as on a GPU
    monkeypatch.undo()
    for block in model.blocks:
        compile_(block, backend=counter, fullgraph=True)
        if recompute:
            recompute_(block)
    model(tokens).square().mean().backward()
    assert counter.frame_count == 2  # the first block's input has no gradient
    for name, grad in eager.items():
        torch.testing.assert_close(dict(model.named_parameters())[name].grad, grad, rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("format", ["int4:g64", "nf4:g64", "nf3:g64", "sparse24"])
@pytest.mark.parametrize("rows", [7, 300])
def test_gradients_through_the_kernels_of_a_gpu(format: str, rows: int) -> None:
    torch.manual_seed(0)
    layer = FormatLinear(256, 512, bias=False, device="cuda", dtype=torch.bfloat16)
    layer.set_format(parse_format(format))
    layer.pack(torch.bfloat16)
    weight = layer.effective_weight(torch.bfloat16).float()
    layer.use_kernels()
    add_adapters(nn.Sequential(layer), AdapterConfig(16, 32.0, targets=("0",)))
    (held,) = adapted_layers(layer).values()
    nn.init.normal_(held.B, std=0.05)
    x = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    a, b, wide = held.A.detach(), held.B.detach().requires_grad_(), x.detach().float().requires_grad_()
    expected = F.linear(wide, weight) + 2.0 * (wide @ a.T) @ b.T
    expected.backward(dy.float())
    pairs = ((y, expected), (x.grad, wide.grad), (held.B.grad, b.grad))
    for ours, exact in pairs:
        assert ours is not None and exact is not None
        assert (ours.float() - exact).norm() < 1e-2 * exact.norm()


@pytest.mark.parametrize(
    ("text", "says"), [("lora:16", "give lora:r16"), ("lora:r0", "rank up to 1024"), ("qlora", "lora:r16, dora:r16")]
)
def test_refused_spellings(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        AdapterConfig.parse(text)


def test_refused_targets() -> None:
    assert AdapterConfig.parse("none") is None
    assert AdapterConfig.parse("dora:r8", alpha=4) == AdapterConfig(8, 4, True)
    for targets, says in ((("*.query",), "matches no linear layer"), (("embed",), "is an embedding")):
        with pytest.raises(UserError, match=says):
            add_adapters(tiny_llama(SPEC), AdapterConfig(4, targets=targets))
    with pytest.raises(UserError, match="target names no layer"):
        AdapterConfig.parse("lora:r4", targets=())
    with pytest.raises(UserError, match="head can only be merged"):
        add_adapters(tiny_llama(dataclasses.replace(SPEC, tied=False)), AdapterConfig(4, targets=("head",)))
    with pytest.raises(UserError, match="rank 64 is more than"):
        add_adapters(tiny_llama(SPEC), AdapterConfig(64))
