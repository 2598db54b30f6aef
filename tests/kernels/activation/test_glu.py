"""The gated activation: kernels under Triton's interpreter and on a GPU against fp64, and plain torch elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from interpreted import run_interpreted
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shoestring.kernels.activation import glu as module
from shoestring.kernels.activation.gates import GATES, activated
from shoestring.kernels.activation.glu import glu, glu_pair, glu_ref
from shoestring.model.spec import GATED

ACTS = list(GATES)
HALF, BF16, FULL = torch.float16, torch.bfloat16, torch.float32
SHAPES = [(1, 1), (3, 7), (5, 1023), (2, 3, 64)]  # less than a block, more than one, none a multiple
LARGE = [0.0, 60.0, -60.0, 1e4, -1e4]
PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
}


def test_models_and_kernels_know_the_same_gates() -> None:
    assert set(GATED) == set(GATES)


def once_rounded(got: Tensor, want: Tensor) -> None:
    """`got` is `want` up to one rounding to its dtype and those of fp32 before it."""
    assert want.dtype == torch.float64 and got.isfinite().all()
    rtol = 2e-6 if got.dtype == FULL else 0.6 * torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=3e-6)


def pair_case(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """Gate, up and the gradient of their product; rows of zeros, and gates far from zero."""
    g = torch.Generator().manual_seed(sum(shape))
    gate, up, dout = (torch.randn(shape, generator=g).clamp(-3, 3) for _ in range(3))
    gate = gate * 2
    if gate.numel() > 20:
        large = LARGE if dtype == HALF else [*LARGE, 1e30, -1e30]
        gate.view(-1)[: len(large)] = torch.tensor(large)
    if shape[0] > 2:
        gate[-1], up[-1], dout[-2] = 0, 0, 0
    return [t.to(device, dtype) for t in (gate, up, dout)]


def exact(gate: Tensor, up: Tensor, dout: Tensor, act: str) -> tuple[Tensor, Tensor, Tensor]:
    """The product and its two gradients, in fp64."""
    g, u = (t.detach().double().requires_grad_() for t in (gate, up))
    out = PLAIN[act](g) * u
    return out.detach(), *torch.autograd.grad(out, (g, u), dout.double())


def by_kernel(gate: Tensor, up: Tensor, dout: Tensor, act: str) -> tuple[Tensor, Tensor, Tensor]:
    g, u = (t.detach().requires_grad_() for t in (gate, up))
    out = glu_pair(g, u, act)
    assert type(out.grad_fn).__name__ == "_GluPairBackward", "plain torch ran"
    saved = out.grad_fn.saved_tensors  # type: ignore[union-attr]
    assert [t.data_ptr() for t in saved] == [g.data_ptr(), u.data_ptr()]
    return out.detach(), *torch.autograd.grad(out, (g, u), dout)


def check_pair(act: str, dtype: torch.dtype, shape: tuple[int, ...], device: str = "cpu") -> None:
    tensors = pair_case(shape, dtype, device)
    for got, want in zip(by_kernel(*tensors, act), exact(*tensors, act), strict=True):
        assert got.dtype == dtype and got.shape == shape and got.is_contiguous()
        once_rounded(got, want)


def check_joined(act: str, dtype: torch.dtype, rows: int, width: int, device: str = "cpu") -> None:
    gate, up, _ = pair_case((rows, width), dtype, device)
    want = PLAIN[act](gate.double()) * up.double()
    both = torch.cat([gate, up], dim=1)
    once_rounded(glu(both, act), want)
    once_rounded(glu_ref(gate, up, act), want)
    assert glu(both[:0], act).shape == (0, width)


def check_strides(act: str, device: str = "cpu") -> None:
    """Inputs that have no kernel go through plain torch; gradients may come in any strides."""
    gate, up, dout = pair_case((6, 40), HALF, device)
    for g, u in [
        (gate.t(), up.t()),
        (gate[:, ::2], up[:, ::2]),
        (gate, up.t().contiguous().t()),
        (gate.float(), up),
        (gate.double(), up.double()),
    ]:
        g = g.detach().requires_grad_()
        out = glu_pair(g, u, act)
        assert type(out.grad_fn).__name__ == "MulBackward0" and torch.equal(out, activated(g, act) * u)
    for other in (dout[:1, :1].expand(6, 40), dout.t().contiguous().t()):
        for got, want in zip(by_kernel(gate, up, other, act), exact(gate, up, other, act), strict=True):
            once_rounded(got, want)
    none = [t[:0] for t in (gate, up, dout)]
    assert all(t.shape == (0, 40) for t in by_kernel(*none, act))
    want = by_kernel(gate, up, dout, act)[0]
    with torch.no_grad():
        assert torch.equal(glu_pair(gate, up, act), want)


def check_recomputed(act: str, device: str = "cpu") -> None:
    """Activation checkpointing gives the same bits."""
    gate, up, dout = pair_case((5, 130), FULL, device)
    want = by_kernel(gate, up, dout, act)
    for reentrant in (False, True):
        g, u = (t.detach().requires_grad_() for t in (gate, up))
        out = checkpoint(glu_pair, g, u, act, use_reentrant=reentrant)
        out.backward(dout)
        assert all(torch.equal(a, b) for a, b in zip((out, g.grad, u.grad), want, strict=True))


INTERPRETED = """
from test_glu import ACTS, FULL, HALF, SHAPES, check_joined, check_pair, check_recomputed, check_strides
for act in ACTS:
    for dtype in (HALF, FULL):
        for shape in SHAPES:
            check_pair(act, dtype, shape)
        for rows, width in [(1, 300), (5, 7), (2, 1100)]:
            check_joined(act, dtype, rows, width)
    check_strides(act)
    check_recomputed(act)
"""


def test_kernels_match_fp64_under_the_interpreter() -> None:
    run_interpreted(INTERPRETED)


# -- without kernels ---------------------------------------------------------------------------------


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("dtype", [BF16, FULL])
def test_plain_torch_is_what_a_cpu_trains_with_to_the_bit(act: str, dtype: torch.dtype) -> None:
    gate, up, dout = pair_case((5, 33), dtype)
    gate = gate.clamp(-1e4, 1e4)  # torch's own gradient of the tanh is not a number at 1e30
    results = []
    for product in (lambda g, u: glu_pair(g, u, act), lambda g, u: PLAIN[act](g) * u):
        g, u = (t.detach().requires_grad_() for t in (gate, up))
        out = product(g, u)
        results.append((out, *torch.autograd.grad(out, (g, u), dout)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("dtype", [HALF, BF16, FULL])
def test_the_reference_is_rounded_once(act: str, dtype: torch.dtype) -> None:
    check_joined(act, dtype, 3, 50)


def test_the_compiler_is_given_the_plain_expression(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without the compiler a kernel would be chosen, and could not run.
    monkeypatch.setattr(module, "triton_usable", lambda _: True)
    gate, up, _ = pair_case((3, 7), FULL)
    compiled = torch.compile(glu_pair, backend="eager", fullgraph=True)
    assert torch.equal(compiled(gate, up, "geglu"), F.gelu(gate) * up)


def test_a_gate_that_is_not_known_is_an_error() -> None:
    with pytest.raises(KeyError, match="reglu"):
        glu_pair(torch.ones(2, 2), torch.ones(2, 2), "reglu")


# -- on a GPU ----------------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("dtype", [BF16, HALF, FULL])
@pytest.mark.parametrize("shape", [*SHAPES, (4, 512, 1536)])
def test_products_and_gradients_match_fp64_on_the_gpu(act: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    check_pair(act, dtype, shape, "cuda")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("dtype", [BF16, HALF, FULL])
def test_rows_of_a_decoding_step_match_fp64_on_the_gpu(act: str, dtype: torch.dtype) -> None:
    for rows, width in [(1, 300), (5, 7), (2, 1100), (64, 4096)]:
        check_joined(act, dtype, rows, width, "cuda")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("act", ACTS)
def test_strides_and_recomputation_on_the_gpu(act: str) -> None:
    check_strides(act, "cuda")
    check_recomputed(act, "cuda")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("act", ACTS)
def test_forward_and_backward_are_captured_as_a_graph(act: str) -> None:
    first = pair_case((33, 640), BF16, "cuda")
    second = [t.flip(0).contiguous() for t in first]
    gate, up, dout = (t.clone() for t in first)
    gate.requires_grad_(), up.requires_grad_()

    def step() -> tuple[Tensor, ...]:
        out = glu_pair(gate, up, act)
        return out.detach(), *torch.autograd.grad(out, (gate, up), dout)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for tensors in (second, first):
        with torch.no_grad():
            for held, new in zip((gate, up, dout), tensors, strict=True):
                held.copy_(new)
        graph.replay()
        want = by_kernel(*tensors, act)
        assert all(torch.equal(a, b) for a, b in zip(captured, want, strict=True))
