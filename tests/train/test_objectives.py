"""Chunked losses against the plain ones: values, gradients and what they keep."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from refusals import refused
from shoestring.model import Decoder, Head, ModelSpec
from shoestring.train.objectives import CHUNK_BYTES, CrossEntropy, Distill, chunked_head, default_chunk
from shoestring.train.step import IGNORED, Micro


def tiny(vocab: int = 97, *, tied: bool = True, seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(ModelSpec(vocab, 32, 2, 4, 2, 8, 64, 64, tied=tied))


def masked_micro(vocab: int = 97) -> Micro:
    g = torch.Generator().manual_seed(1)
    stream = torch.randint(0, vocab, (3, 21), generator=g)
    targets = stream[:, 1:].clone()
    targets[0, :7] = IGNORED
    targets[2] = IGNORED
    return Micro(stream[:, :-1].contiguous(), targets, torch.arange(60).view(3, 20))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunk", [1, 7, 60, 1000, 0])
def test_chunked_cross_entropy_equals_plain(tied: bool, chunk: int) -> None:
    micro = masked_micro()
    assert micro.num_counted == 13 + 20
    plain, chunked = tiny(tied=tied), tiny(tied=tied)
    want = CrossEntropy(chunk=None)(plain, micro)
    got = CrossEntropy(chunk=chunk)(chunked, micro)
    (want / 33).backward()
    (got / 33).backward()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for (name, a), b in zip(plain.named_parameters(), chunked.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_all_masked_rows_give_zero_loss_and_gradient() -> None:
    micro = masked_micro()
    micro = Micro(micro.tokens_BT, torch.full_like(micro.targets_BT, IGNORED), micro.index_BT)
    model = tiny()
    loss = CrossEntropy()(model, micro)
    loss.backward()
    assert micro.num_counted == 0
    assert loss.item() == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_padding_of_the_logits_is_zero_whatever_memory_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in 16 bits on a CPU with AMX read it beside an odd last column, and NaN times 0 is NaN."""
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *size: self.new_full(size, float("nan")))
    paddings: list[torch.Tensor] = []

    def watch(logits: torch.Tensor, lo: int, hi: int) -> tuple[torch.Tensor, torch.Tensor]:
        pitch = logits.stride(0)
        paddings.append(logits.as_strided((hi - lo, pitch), (pitch, 1))[:, logits.shape[1] :].clone())
        return logits.float().sum(), torch.ones_like(logits)

    hidden = torch.randn(2, 5, 8, requires_grad=True)
    chunked_head(hidden, Head(torch.randn(21, 8)), watch, chunk=4).backward()
    assert [p.shape for p in paddings] == [(4, 11), (4, 11), (2, 11)] and not any(p.any() for p in paddings)


def test_largest_tensor_of_a_chunked_loss_is_one_chunk_of_logits() -> None:
    biggest = 0

    def watch(logits: torch.Tensor, lo: int, hi: int) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal biggest
        biggest = max(biggest, logits.numel())
        return logits.sum(), torch.ones_like(logits)

    hidden = torch.randn(2, 50, 8, requires_grad=True)
    weight = torch.randn(1000, 8, requires_grad=True)
    chunked_head(hidden, Head(weight), watch, chunk=16).backward()
    assert biggest == 16 * 1000
    torch.testing.assert_close(hidden.grad, weight.sum(0).detach().expand_as(hidden))
    torch.testing.assert_close(
        weight.grad, hidden.flatten(0, 1).sum(0).detach().expand_as(weight), rtol=1e-4, atol=1e-4
    )


def test_default_chunks_are_even_and_bounded() -> None:
    assert default_chunk(16384, 128256, 2) * 128256 * 2 <= CHUNK_BYTES * 1.1
    assert default_chunk(100, 50, 4) == 128
    rows = default_chunk(32768, 50304, 2)
    assert rows % 128 == 0 and -(-32768 // rows) * rows - 32768 < rows


def test_distillation_is_the_kl_of_the_definition() -> None:
    micro, temperature = masked_micro(), 2.0
    student, teacher = tiny(seed=1), tiny(seed=2)
    plain = tiny(seed=1)
    got = Distill(teacher, temperature=temperature, kl=0.7, ce=0.3, chunk=9)(student, micro)
    with torch.no_grad():
        p = F.log_softmax(teacher(micro.tokens_BT) / temperature, -1)
    logits = plain(micro.tokens_BT)
    q = F.log_softmax(logits / temperature, -1)
    counted = micro.targets_BT != IGNORED
    kl = (p.exp() * (p - q)).sum(-1)[counted].sum() * temperature**2
    ce = F.cross_entropy(logits.flatten(0, 1), micro.targets_BT.flatten(), ignore_index=IGNORED, reduction="sum")
    want = 0.7 * kl + 0.3 * ce
    want.backward()
    got.backward()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for (name, a), b in zip(plain.named_parameters(), student.named_parameters(), strict=True):
        torch.testing.assert_close(b[1].grad, a.grad, rtol=1e-4, atol=1e-5, msg=name)
    assert all(not t.requires_grad for t in teacher.parameters())


def test_distillation_refuses_another_vocabulary() -> None:
    refused(
        "vocabulary",
        Distill(tiny(50)),
        tiny(97),
        Micro(torch.zeros(1, 4).long(), torch.zeros(1, 4).long(), torch.zeros(1, 4).long()),
    )
