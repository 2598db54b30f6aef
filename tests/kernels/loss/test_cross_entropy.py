"""The kernel under Triton's interpreter, against the reference in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from interpreted import run_interpreted
from layers import rms

from shoestring.kernels.loss.cross_entropy import cross_entropy_, cross_entropy_ref


def case(rows: int, vocab: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(rows * 1000 + vocab)
    logits = (torch.randn(rows, vocab, generator=g) * 4).to(dtype)
    target = torch.randint(0, vocab, (rows,), generator=g)
    target[::3] = -100
    return logits, target


def test_reference_is_torch_cross_entropy_and_its_gradient() -> None:
    logits, target = case(17, 101, torch.float64)
    logits.requires_grad_()
    want = F.cross_entropy(logits, target, ignore_index=-100, reduction="none")
    want.sum().backward()
    loss, grad = cross_entropy_ref(logits.detach(), target)
    torch.testing.assert_close(loss, want.detach())
    torch.testing.assert_close(grad, logits.grad)


def test_overwrites_its_input_and_survives_huge_logits() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [0.0, 0.0, 0.0]])
    loss, grad = cross_entropy_(logits, torch.tensor([1, -100]))
    assert grad is logits
    assert loss.tolist() == [2e4, 0.0]
    assert grad.tolist() == [[1.0, -1.0, 0.0], [0.0, 0.0, 0.0]]


INTERPRETED = """
import torch
from shoestring.kernels.loss.cross_entropy import cross_entropy_ref, cross_entropy_
from layers import rms
from test_cross_entropy import case
full, half = torch.float32, torch.float16
for rows, vocab, dtype in [(5, 7, full), (3, 8192, full), (4, 9001, half), (1, 1, full)]:
    logits, target = case(rows, vocab, dtype)
    # A pitch wider than the row, as the chunked head uses: what lies between rows must stay untouched.
    buffer = torch.full((rows, vocab + 5), 7.0, dtype=dtype)
    view = buffer[:, :vocab]
    view.copy_(logits)
    want_loss, want_grad = cross_entropy_ref(logits.double(), target)
    ref_loss, ref_grad = cross_entropy_ref(logits, target)
    loss, grad = cross_entropy_(view, target)
    assert grad.data_ptr() == buffer.data_ptr()
    assert rms(loss, want_loss) <= 2 * rms(ref_loss, want_loss) + 1e-6, (rows, vocab)
    assert rms(grad, want_grad) <= 2 * rms(ref_grad, want_grad) + 1e-9, (rows, vocab)
    assert (buffer[:, vocab:] == 7.0).all()
"""


@pytest.mark.slow
def test_kernel_matches_reference_under_the_interpreter() -> None:
    run_interpreted(INTERPRETED)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "vocab"), [(5, 7), (33, 50257), (64, 128256), (1, 1)])
def test_kernel_matches_reference_on_the_gpu(rows: int, vocab: int, dtype: torch.dtype) -> None:
    logits, target = (t.cuda() for t in case(rows, vocab, dtype))
    want_loss, want_grad = cross_entropy_ref(logits.double(), target)
    ref_loss, ref_grad = cross_entropy_ref(logits, target)
    loss, grad = cross_entropy_(logits, target)
    assert rms(loss, want_loss) <= 2 * rms(ref_loss, want_loss) + 1e-6
    assert rms(grad, want_grad) <= 2 * rms(ref_grad, want_grad) + 1e-9
