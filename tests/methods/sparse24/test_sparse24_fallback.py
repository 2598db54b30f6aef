"""A 2:4 layer whose products all stay dense runs what a dense layer runs, and the pruning of its weight; no more."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, fx

from shoestring.formats import Dense, Format, convert, init_state
from shoestring.methods.sparse24.format import Sparse24
from shoestring.model.layer_plan import MlpPlan
from shoestring.model.transformer import Mlp

# What fuses into the cast of the weight, which dense does too; or is no work at all.
POINTWISE = {
    "abs", "add", "bitwise_and", "clamp", "__rshift__", "isnan", "maximum", "minimum", "mul", "sign", "sub", "where",
    "zeros", "_to_copy",
}  # fmt: skip
VIEWS = {"detach", "unbind", "getitem", "unsqueeze", "view"}


def operators(format: Format) -> list[Counter[str]]:
    """How often each operator runs in a compiled feed-forward layer of bf16 activations: forward, backward."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    torch._dynamo.reset()
    mlp = Mlp(MlpPlan(d_ff=128, act="swiglu"), d_model=64)
    convert(mlp, [("*", format)])
    init_state(mlp)
    found: list[Counter[str]] = []

    def keep(graph: fx.GraphModule, args: list[Tensor]) -> object:
        calls = [n for n in graph.graph.nodes if n.op == "call_function"]
        found.append(Counter(getattr(n.target, "__name__", "").split(".")[0] for n in calls))
        return make_boxed_func(graph.forward)

    # fullgraph: a break would be an error.
    compiled = torch.compile(mlp, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    x = torch.randn(1, 8, 64, dtype=torch.bfloat16, requires_grad=True)
    compiled(x).sum().backward()
    assert len(found) == 2
    return found


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
def test_products_that_stay_dense_cost_nothing_but_the_pruning_of_the_weight() -> None:
    forward, backward = operators(Dense())
    assert forward["mm"] == 3 and backward["mm"] == 6
    for format in (Sparse24("tile", hold_mask=True), Sparse24("soft")):
        pruned_forward, pruned_backward = operators(format)
        assert pruned_backward == backward
        assert pruned_forward["mm"] == 3 and not forward - pruned_forward
        assert set(pruned_forward - forward) <= POINTWISE | VIEWS


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the draws are a kernel there; needs a GPU")
@pytest.mark.parametrize("act", ["swiglu", "gelu_tanh"])
@pytest.mark.parametrize("format", [Sparse24("tile", True, "mvue"), Sparse24("soft", weight_grad="mvue")])
def test_a_layer_with_drawn_gradients_is_one_graph_on_a_gpu(act: str, format: Format) -> None:
    torch._dynamo.reset()
    mlp = Mlp(MlpPlan(d_ff=128, act=act, bias=act != "swiglu"), d_model=64)  # type: ignore[arg-type]
    convert(mlp, [("*", format)])
    mlp = mlp.cuda()
    init_state(mlp)
    x = torch.randn(1, 64, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    torch.compile(mlp, fullgraph=True, backend="aot_eager")(x).sum().backward()
    assert x.grad is not None
