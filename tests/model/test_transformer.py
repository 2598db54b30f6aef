"""The decoder itself: cache equals full forward, rows, gradients, counts; compiles without a break."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from refusals import refused
from shoestring.model.attention import attend_with, causal_attention, mask_at
from shoestring.model.parallel import uncompiled_expert_loops_
from shoestring.model.spec import Experts, Llama3Rope, ModelSpec
from shoestring.model.transformer import Decoder, Head

LLAMA = ModelSpec(61, 32, 3, 4, 2, 8, 48, 32, tied=False)
SPECS = {
    "llama": LLAMA,
    "llama3": replace(LLAMA, rope_scaling=Llama3Rope(8.0, 1.0, 4.0, 16), rope_theta=500.0, tied=True),
    "biases": replace(LLAMA, qkv_bias=True, out_bias=True, mlp_bias=True),
    "mistral": replace(LLAMA, model_type="mistral", sliding_window=5),
    "qwen2": replace(LLAMA, model_type="qwen2", qkv_bias=True, sliding_window=4, full_layers=(0, 1)),
    "qwen3": replace(LLAMA, model_type="qwen3", qk_norm=True, head_dim=12),
    "gpt2": ModelSpec(
        61, 32, 2, 4, 4, 8, 48, 32, model_type="gpt2", norm="layer", act="gelu_tanh", positions="learned",
        qkv_bias=True, out_bias=True, mlp_bias=True,
    ),
}  # fmt: skip


def build(spec: ModelSpec) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(spec)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.2 + (p.ndim == 1))
    return model.eval()


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(0, 61, (2, 20), generator=torch.Generator().manual_seed(1))


class Cache:
    """The smallest owner of keys and values: appends, and attends over everything it has."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec, self.positions = spec, torch.empty(0)
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in self.kv:
            k, v = (torch.cat([old, new], dim=1) for old, new in zip(self.kv[layer], (k, v), strict=True))
        self.kv[layer] = k, v
        return attend_with(q, k, v, mask_at(self.positions, k.shape[1], window=self.spec.window(layer)))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("chunks", [(1,) * 20, (7, 1, 1, 8, 3)])
@torch.no_grad()
def test_cached_steps_equal_the_full_forward(name: str, chunks: tuple[int, ...], tokens: Tensor) -> None:
    model = build(SPECS[name])
    want = model(tokens)
    cache, got, start = Cache(model.spec), [], 0
    for size in chunks:
        cache.positions = torch.arange(start, start + size).expand(2, -1)
        got.append(model(tokens[:, start : start + size], cache.positions, attend=cache.attend))
        start += size
    torch.testing.assert_close(torch.cat(got, dim=1), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", SPECS)
@torch.no_grad()
def test_counts_rows_and_readout(name: str, tokens: Tensor) -> None:
    model = build(SPECS[name])
    spec = model.spec
    assert spec.num_params() == sum(p.numel() for p in model.parameters())
    embeddings = [n for n, _ in model.named_parameters() if n in ("embed.weight", "positions.weight", "head.weight")]
    inner = sum(p.numel() for n, p in model.named_parameters() if n not in embeddings)
    assert spec.num_params(with_embeddings=False) == inner

    full = model(tokens)
    rows = torch.tensor([39, 0, 7, 7])
    torch.testing.assert_close(model(tokens, rows=rows), full.flatten(0, 1)[rows], atol=1e-6, rtol=1e-6)

    def read(hidden: Tensor, head: Head) -> Tensor:
        return hidden @ head.weight_VD.t()

    torch.testing.assert_close(model(tokens, readout=read), full, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", SPECS)
def test_every_parameter_gets_a_gradient_and_the_future_gives_none(name: str, tokens: Tensor) -> None:
    model = build(SPECS[name])
    model(tokens).square().mean().backward()
    for key, p in model.named_parameters():
        # A key bias adds the same to every score of a row where nothing rotates it: softmax does not see it.
        if name == "gpt2" and key.endswith("attn.k.bias"):
            continue
        assert p.grad is not None and p.grad.abs().max() > 0, key
    with torch.no_grad():
        changed = tokens.clone()
        changed[:, 12:] = (changed[:, 12:] + 1) % 61
        before, after = model(tokens), model(changed)
        assert torch.equal(before[:, :12], after[:, :12])
        assert (before[:, 12:] - after[:, 12:]).abs().max() > 1e-3


def test_a_window_forgets() -> None:
    spec = replace(SPECS["mistral"], num_layers=1)
    model = build(spec)
    a = torch.arange(12)[None]
    b = a.clone()
    b[0, 0] = 40
    with torch.no_grad():
        same = (model(a) - model(b)).abs().amax(-1)[0] < 1e-6
    assert same.tolist() == [False] * 5 + [True] * 7  # a window of 5 holds the row itself and 4 before it


def test_attention_against_the_formula() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 9, 4, 6), torch.randn(2, 9, 2, 6), torch.randn(2, 9, 2, 6)
    for window in (None, 3, 9, 20):
        age = torch.arange(9)[:, None] - torch.arange(9)
        seen = (age >= 0) & (age < (window or 99))
        k4, v4 = k.repeat_interleave(2, dim=2), v.repeat_interleave(2, dim=2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k4) / 6**0.5
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        want = torch.einsum("bhqk,bkhd->bqhd", weights, v4)
        torch.testing.assert_close(causal_attention(q, k, v, window=window), want, atol=1e-5, rtol=1e-5)
        at = attend_with(q, k, v, mask_at(torch.arange(9).expand(2, -1), 9, window=window))
        torch.testing.assert_close(at, want, atol=1e-5, rtol=1e-5)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["llama3", "mistral", "qwen3", "gpt2"])
def test_compiles_as_one_graph_without_recompiling_per_layer(name: str, tokens: Tensor) -> None:
    model = build(SPECS[name])
    with torch.no_grad():
        want = model(tokens)
    torch._dynamo.reset()
    report = torch._dynamo.explain(model)(tokens)
    assert report.graph_break_count == 0, report.break_reasons
    graph = report.graphs[0]
    # Rotary tables are made once a forward, not once a layer.
    names = [str(n.target) for n in graph.graph.nodes]
    assert sum("cos" in n for n in names) == (0 if name == "gpt2" else 1)
    # Anything that asks the device for a number would stall it on every step.
    assert not {"item", "tolist", "nonzero", "cpu"} & {n.rsplit(".")[-1] for n in names}

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    for block in model.blocks:
        block.compile(backend=counter, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), want, atol=1e-6, rtol=1e-6)
    assert counter.frame_count == 1  # all blocks share one graph
    torch._dynamo.reset()


@torch.no_grad()
def test_a_copy_of_a_model_with_experts_that_are_not_compiled_has_its_own(tokens: Tensor) -> None:
    model = build(replace(LLAMA, experts=Experts(num=4, top_k=2, d_ff=16)))
    want = model(tokens)
    uncompiled_expert_loops_(model)
    torch.testing.assert_close(model(tokens), want, atol=0, rtol=0)
    other = copy.deepcopy(model)
    for p in model.blocks.parameters():
        p.zero_()
    torch.testing.assert_close(other(tokens), want, atol=0, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SPECS)
def test_no_step_waits_for_the_gpu(name: str, tokens: Tensor) -> None:
    """Forward and backward only queue work; a copy to the host in between would stall every training step."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    model = build(SPECS[name]).cuda()
    with torch.no_grad():
        want = model(tokens.cuda())
    model.compute_dtype = torch.bfloat16
    tokens = tokens.cuda()
    rows = torch.tensor([1, 5], device="cuda")
    model(tokens).float().square().mean().backward()  # first-use set-up may wait; the steps after it may not
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = model(tokens)
        got.float().square().mean().backward()
        model(tokens, rows=rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (got.float() - want).norm() / want.norm() < 0.03


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # CPUs without bf16 say so at length
@torch.no_grad()
def test_bfloat16_compute_keeps_fp32_masters(tokens: Tensor) -> None:
    model = build(LLAMA)
    want = model(tokens)
    model.compute_dtype = torch.bfloat16
    got = model(tokens)
    assert got.dtype == torch.bfloat16 and model.embed.weight.dtype == torch.float32
    assert (got.float() - want).norm() / want.norm() < 0.03


def test_bad_shapes_are_refused() -> None:
    refused("num_kv_heads=3", replace, LLAMA, num_kv_heads=3)
    refused("head_dim=7", replace, LLAMA, head_dim=7)
    replace(SPECS["gpt2"], head_dim=7)  # learned positions rotate nothing
