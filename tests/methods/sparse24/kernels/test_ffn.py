"""What lies between the products of a gated 2:4 layer: the kernels under Triton's interpreter, and all on a GPU."""

from __future__ import annotations

import pytest
import torch
from interpreted import run_interpreted
from test_cusparselt import CLOCKS, needs_gpu, unpacked
from test_cusparselt_fp8 import INTERPRETED as FP8
from test_glu import ACTS, LARGE, exact, once_rounded
from torch import Tensor

from shoestring.formats import FormatLinear
from shoestring.kernels.activation.gates import activated
from shoestring.methods.sparse24.format import Sparse24
from shoestring.methods.sparse24.gated_ffn import FfnProductPlan, run
from shoestring.methods.sparse24.kernels import ffn
from shoestring.methods.sparse24.kernels.mvue import mvue_transposed
from shoestring.methods.sparse24.products import ALL_DENSE, ProductPlan


def gate_case(
    width: int, tokens: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Z, dH, and row numbers and clocks of gate and up; groups of zeros, and gates far from zero."""
    g = torch.Generator().manual_seed(width + tokens)
    z = torch.randn(2 * width, tokens, generator=g)
    dh = torch.randn(width, tokens, generator=g).clamp(-2, 2)
    dh[1, :30] = 0
    z[2, : len(LARGE)] = torch.tensor(LARGE)
    rows = [torch.arange(width, device=device, dtype=torch.int32) + 4 * i for i in (2, 0)]
    return z.to(device, dtype), dh.to(device, dtype), rows, [CLOCKS.to(device), CLOCKS.to(device) + 5]


def check_gate(act: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """Forward and, where there is a kernel for such numbers, the gradient that is not drawn."""
    for width, tokens in ((64, 192), (7, 36), (37, 132), (3, 5)) if device == "cuda" else ((20, 132), (3, 5)):
        for each in (dtype, torch.float32):
            z, dh, _, _ = gate_case(width, tokens, each, device)
            h, *dz = exact(*z.chunk(2), dh, act)
            once_rounded(ffn.glu(z, act), h)
            if each == torch.float32 or tokens % 4:
                with pytest.raises(AssertionError, match="groups of four"):
                    ffn.glu_grad(z, dh, [], [], act)
                continue
            got, packed = ffn.glu_grad(z, dh, [], [], act)
            once_rounded(got, torch.cat(dz))
            assert packed.numel() == 0
    with pytest.raises(AssertionError):
        ffn.glu(z.t(), act)


def check_drawn(act: str, dtype: torch.dtype, width: int, tokens: int, device: str = "cpu") -> None:
    z, dh, rows, clocks = gate_case(width, tokens, dtype, device)
    dz, packed = ffn.glu_grad(z, dh, rows, clocks, act)
    once_rounded(dz, torch.cat(exact(*z.chunk(2), dh, act)[1:]))
    parts = zip(dz.chunk(2), rows, clocks, strict=True)
    want = torch.cat([mvue_transposed(part.t(), r, c) for part, r, c in parts])
    assert torch.equal(unpacked(packed.cpu(), 2 * width, tokens), want.cpu())


INTERPRETED = """
import torch
from test_cusparselt import unpacked
from shoestring.methods.sparse24.format import Sparse24
from test_ffn import check_drawn, check_gate, gate_case
from test_glu import ACTS
from shoestring.methods.sparse24.kernels import cusparselt, ffn
from shoestring.kernels.activation.glu import glu_ref
from shoestring.methods.sparse24.kernels.transposable_mask import transposable_mask_ref

gen = torch.Generator().manual_seed(0)
half = torch.float16
tops = [torch.randn(64, 64, generator=gen) for _ in range(2)]
tops[0][:4, :4] = 0
tops[0][5, :4] = torch.tensor([-0.0, 1.0, -0.0, 2.0])

tile = Sparse24("tile", hold_mask=True)
masks = [transposable_mask_ref(w) for w in tops]
want = torch.cat([tile.prune(w.half(), {"mask": m}) for w, m in zip(tops, masks)])
packed, packed_t, dense = ffn.prune_and_pack(tops, masks, [], half, True, True, True)
assert torch.equal(dense, want)
assert torch.equal(unpacked(packed, 128, 64), want)
assert torch.equal(unpacked(packed_t, 64, 128), want.t())
assert ffn.prune_and_pack(tops, masks, [], half, True, False, False)[1].numel() == 0

soft, beta = Sparse24("soft"), torch.tensor([1.37])
want = torch.cat([soft.prune(w.half(), {"beta": beta}) for w in tops])
packed, none, dense = ffn.prune_and_pack(tops, [], [beta, beta], half, True, False, True)
assert torch.equal(dense, want) and torch.equal(unpacked(packed, 128, 64), want)

for act in ACTS:
    check_gate(act, half)
check_drawn("swiglu", half, 64, 128)
check_drawn("geglu", half, 64, 64)
z, dh, rows, clocks = gate_case(64, 64, half)
named = ffn.glu_grad(z, dh, rows, clocks, "swiglu")
assert all(torch.equal(a, b) for a, b in zip(ffn.glu_grad(z, dh, rows, clocks), named))
assert torch.equal(ffn.glu(z), ffn.glu(z, "swiglu")) and not torch.equal(ffn.glu(z), ffn.glu(z, "geglu"))

from shoestring.methods.sparse24.kernels.masked_decay import masked_decay_, masked_decay_ref_
w, grad, mask = torch.randn(30, 70), torch.randn(30, 70), torch.rand(30, 70) < 0.5
want = grad.clone()
masked_decay_ref_(want, w, mask, 0.37)
masked_decay_(grad, w, mask, 0.37)
torch.testing.assert_close(grad, want)
assert not torch.equal(grad, w)

# The whole layer with dense products against its three linears one by one.
from shoestring.formats import FormatLinear
from shoestring.methods.sparse24.gated_ffn import FfnProductPlan, fusable, run
from shoestring.methods.sparse24.products import ALL_DENSE
format = Sparse24("tile", hold_mask=True, weight_grad="mvue")
act = "geglu_tanh"
torch.manual_seed(0)
gate, up, down = (FormatLinear(i, o, bias=False, format=format) for i, o in ((64, 64),) * 3)
assert fusable(gate, up, down)
x, dy = torch.randn(2, 32, 64).half().requires_grad_(), torch.randn(2, 32, 64).half()
results = []
for one_by_one in (True, False):
    if one_by_one:
        y = down(glu_ref(gate(x), up(x), act))
    else:
        y = run(x, [gate, up, down], FfnProductPlan(ALL_DENSE, ALL_DENSE), act)
    tensors = (x, gate.weight, up.weight, down.weight)
    results.append((y.detach(), *torch.autograd.grad(y, tensors, dy)))
# Roundings between the two differ, and a draw with them now and then: most of dW must be the same.
for name, want, got in zip(("y", "dx", "dgate", "dup", "ddown"), *results):
    assert want.dtype == got.dtype and got.shape == want.shape
    error = float((got - want).float().norm() / want.float().norm())
    assert error < (0.03 if name in ("dgate", "dup") else 3e-3), (act, name, error)
assert not fusable(gate, up, FormatLinear(64, 64, bias=False, format=Sparse24()))
"""


@pytest.mark.slow
def test_kernels_match_the_references() -> None:
    run_interpreted(FP8 + INTERPRETED)


# -- on a GPU ----------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gradient_is_drawn_where_it_is_made(act: str, dtype: torch.dtype) -> None:
    check_gate(act, dtype, "cuda")
    check_drawn(act, dtype, 128, 576, "cuda")  # by CUDA C++


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("select", "act"), [("tile", "swiglu"), ("soft", "swiglu"), ("tile", "geglu")])
def test_sparse_products_give_what_dense_ones_give(select: str, act: str) -> None:
    format = Sparse24(select, hold_mask=select == "tile", weight_grad="mvue")
    torch.manual_seed(0)
    shapes = ((256, 512), (256, 512), (512, 256))
    linears = [FormatLinear(i, o, bias=False, format=format, device="cuda") for i, o in shapes]
    x = torch.randn(2, 512, 256, device="cuda").bfloat16().requires_grad_()
    dy = torch.randn(2, 512, 256, device="cuda").bfloat16()
    first = (0, 0, 0, 0)
    sparse = ProductPlan(first, first if select == "tile" else None, first)
    results = []
    for plan in (FfnProductPlan(ALL_DENSE, ALL_DENSE), FfnProductPlan(sparse, sparse)):
        y = run(x, linears, plan, act)
        results.append((y.detach(), *torch.autograd.grad(y, (x, *(linear.weight for linear in linears)), dy)))
    one_by_one = linears[2](activated(linears[0](x), act) * linears[1](x))
    assert float((results[1][0] - one_by_one).float().norm() / one_by_one.float().norm()) < 1e-2
    # A gradient that is rounded differently is now and then drawn differently.
    for limit, dense, got in zip((0.01, 0.01, 0.1, 0.1, 0.01), *results, strict=True):
        assert got.dtype == dense.dtype and got.is_contiguous()
        assert float((got - dense).float().norm() / dense.float().norm()) < limit
