"""Fused distillation: the reference against autograd, the kernel under Triton's interpreter against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from interpreted import run_interpreted
from layers import rms

from shoestring.kernels.loss.distill import distill_, distill_ref

SETTINGS: list[dict[str, float]] = [
    {"forward": 1.0},
    {"forward": 0.67 * 4, "ce": 0.33, "temperature": 2.0},
    {"forward": 0.3, "reverse": 0.7},
    {"forward": 0.2, "reverse": 0.5, "ce": 0.1, "temperature": 0.5},
]


def case(rows: int, vocab: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(rows * 1000 + vocab)
    logits, teacher = ((torch.randn(rows, vocab, generator=g) * 3).to(dtype) for _ in range(2))
    target = torch.randint(0, vocab, (rows,), generator=g)
    target[::3] = -100
    return logits, teacher, target


@pytest.mark.parametrize("settings", SETTINGS)
def test_reference_is_the_divergence_and_its_gradient(settings: dict[str, float]) -> None:
    logits, teacher, target = case(11, 37, torch.float64)
    logits.requires_grad_()
    temperature = settings.get("temperature", 1.0)
    logp, logq = (torch.log_softmax(t / temperature, -1) for t in (teacher, logits))
    want = settings["forward"] * F.kl_div(logq, logp, log_target=True, reduction="none").sum(-1)
    want = want + settings.get("reverse", 0) * F.kl_div(logp, logq, log_target=True, reduction="none").sum(-1)
    want = want * (target >= 0)
    want = want + settings.get("ce", 0) * F.cross_entropy(logits, target, reduction="none")
    want.sum().backward()
    loss, grad = distill_ref(logits.detach(), teacher, target, **settings)
    torch.testing.assert_close(loss, want.detach())
    torch.testing.assert_close(grad, logits.grad)


def test_overwrites_its_input_and_survives_huge_logits() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [0.0, 0.0, 0.0]])
    loss, grad = distill_(logits, logits.clone(), torch.tensor([1, -100]), forward=1.0, reverse=1.0)
    assert grad is logits
    assert loss.tolist() == [0.0, 0.0]
    assert grad.tolist() == [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


def agree(rows: int, vocab: int, dtype: torch.dtype, device: str, settings: dict[str, Any]) -> None:
    logits, teacher, target = (t.to(device) for t in case(rows, vocab, dtype))
    # A pitch wider than the row, as the chunked head uses: what lies between rows must stay untouched.
    buffer = torch.full((rows, vocab + 5), 7.0, dtype=dtype, device=device)
    view = buffer[:, :vocab].copy_(logits)
    want_loss, want_grad = distill_ref(logits.double(), teacher.double(), target, **settings)
    ref_loss, ref_grad = distill_ref(logits, teacher, target, **settings)
    loss, grad = distill_(view, teacher, target, **settings)
    assert grad.data_ptr() == buffer.data_ptr()
    assert rms(loss, want_loss) <= 2 * rms(ref_loss, want_loss) + 1e-6
    # Both are fp32 inside; few values may all be rounded well in one of them, hence one rounding more.
    rounding = torch.finfo(torch.float32).eps * rms(want_grad, 0 * want_grad)
    assert rms(grad, want_grad) <= 2 * rms(ref_grad, want_grad) + rounding
    assert (buffer[:, vocab:] == 7.0).all()


INTERPRETED = """
import torch
from test_distill import SETTINGS, agree
full, half = torch.float32, torch.float16
for settings in SETTINGS:
    for rows, vocab, dtype in [(5, 7, full), (3, 4096, full), (4, 5001, half), (1, 1, full)]:
        agree(rows, vocab, dtype, "cpu", settings)
"""


@pytest.mark.slow
def test_kernel_matches_reference_under_the_interpreter() -> None:
    run_interpreted(INTERPRETED)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "vocab"), [(5, 7), (33, 50257), (64, 49152), (1, 1)])
@pytest.mark.parametrize("settings", SETTINGS)
def test_kernel_matches_reference_on_the_gpu(
    rows: int, vocab: int, dtype: torch.dtype, settings: dict[str, float]
) -> None:
    agree(rows, vocab, dtype, "cuda", settings)
