"""Drawing tokens: the kernels and the way of a CPU against the reference, which test_sampling.py compares
with its definition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from interpreted import run_interpreted

from shoestring.kernels.gemv.embed_argmax import NO_TOKEN, PIECE, argmax_token_, finite_argmax
from shoestring.kernels.sampling.noise import gumbel
from shoestring.kernels.sampling.sample_tokens import (
    LEAST_VOCAB,
    logit_thresholds,
    logit_thresholds_ref,
    sample_tokens_,
    sample_tokens_ref_,
)
from shoestring.kernels.sampling.sample_tokens_cpu import _most_noise

SETTINGS = [  # temperature, top_k, top_p, min_p
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 0.9, 0.0),
    (1.3, 0, 0.3, 0.0),
    (0.9, 7, 1.0, 0.0),
    (2.0, 40, 0.8, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 10**6, 1.0, 0.05),
    (0.8, 30, 0.95, 0.2),
    (1.5, 0, 1e-9, 0.0),
]


def settings(num: int, device: str, first: int = 0) -> torch.Tensor:
    """One of the rows after the other, in steps of 3 (all ten before any of them again)."""
    return settings_of([SETTINGS[(first + 3 * r) % len(SETTINGS)] for r in range(num)], device)


def settings_of(rows: list[tuple[float, int, float, float]], device: str) -> torch.Tensor:
    columns = [(t, k, p, math.log(m) if m else -math.inf) for t, k, p, m in rows]
    return torch.tensor(columns, dtype=torch.float64, device=device).T.contiguous()


def numbers(num: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Seeds of all 64 bits, and positions."""
    generator = torch.Generator().manual_seed(1)
    seeds = torch.randint(-(2**63), 2**63 - 1, (num,), generator=generator)
    return seeds.to(device), torch.randint(0, 10000, (num,), generator=generator).to(device)


def both(logits: torch.Tensor, parameters: torch.Tensor, *, cuts: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    device = str(logits.device)
    seeds, positions = numbers(len(logits), device)
    got, want = torch.full((2, len(logits)), -5, device=device)
    sample_tokens_(logits, parameters, seeds, positions, got, cuts=cuts)
    sample_tokens_ref_(logits, parameters, seeds, positions, want, cuts=cuts)
    return got, want


def check_tokens(
    device: str = "cpu", num: int = 10, dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16)
) -> None:
    """Ten rows are one of each setting: under the interpreter a row with cuts takes a quarter of a second, so that
    only the longest have all."""
    generator = torch.Generator().manual_seed(0)
    for vocab in (5001, 2048, 37):
        interpreted = num == 10
        rows = 4 if interpreted and vocab < 5000 else num
        for dtype in dtypes[vocab == 37 :][:1] if interpreted else dtypes:
            logits = (3 * torch.randn(rows, vocab, generator=generator)).to(device, dtype)
            for cuts in (True, False):
                got, want = both(logits, settings(rows, device, first=vocab % 2), cuts=cuts)
                assert torch.equal(got, want), (vocab, dtype, cuts, got - want)


def check_edges(device: str = "cpu", num: int = 10) -> None:
    """Ties with the last token kept stay; tokens at -inf are never drawn; a mass that is nearly one token's."""
    vocab, many = 3000, 5 if num == 10 else 2 * num  # as many rows as the interpreter is quick with
    ties = torch.linspace(0, -8, vocab).repeat(num, 1)
    ties[:, 5:50] = ties[:, 5:6]  # of k = 7 and of the nucleus all of these stay
    barred = torch.randn(num, vocab, generator=torch.Generator().manual_seed(2))
    barred[:, 100:] = -torch.inf
    sharp = torch.zeros(num, vocab)
    sharp[:, 1234] = 40.0
    for logits in (ties, barred, sharp):
        rows = 4 if num == 10 and logits is not ties else num
        got, want = both(logits[:rows].to(device), settings(rows, device, first=rows % 2))
        assert torch.equal(got, want), got - want
        assert logits[range(rows), got.cpu()].isfinite().all()
    drawn = both(ties[:1].repeat(many, 1).to(device), settings_of([SETTINGS[4]] * many, device))[0]
    assert set(range(50)) >= set(drawn.tolist()) and len(set(drawn.tolist())) > min(many // 4, 40)  # k = 7


@pytest.mark.parametrize("check", ["check_tokens", "check_edges", "check_not_finite"])
def test_drawing_under_the_interpreter(check: str) -> None:
    run_interpreted(f"import test_sample_tokens as t; t.{check}()")


@pytest.mark.parametrize("vocab", [99, LEAST_VOCAB])
def test_without_kernels(vocab: int) -> None:
    got, want = both(torch.randn(20, vocab, dtype=torch.float64), settings(20, "cpu"))
    assert torch.equal(got, want) and (got >= 0).all()


def test_drawing_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoestring.kernels.sampling.sample_tokens.LEAST_VOCAB", 1)
    check_tokens("cpu", 60, (torch.float32, torch.float16, torch.bfloat16, torch.float64))
    check_edges("cpu", 60)


def check_not_finite(device: str = "cpu") -> None:
    """NO_TOKEN where there is a NaN or no finite largest logit, in any piece of a row; other rows are not touched."""
    inf, nan, vocab = math.inf, math.nan, PIECE + 40
    ends = [(nan, nan), (1.0, nan), (nan, 1.0), (inf, 1.0), (1.0, inf), (-inf, nan), (-inf, -inf)]
    rows = [torch.tensor([first] * (vocab - 1) + [last]) for first, last in ends]
    fine = torch.linspace(-1, 1, vocab)
    fine[: PIECE + 5] = -inf  # a whole piece without a token that may be chosen
    logits, num = torch.stack([*rows, fine]).to(device), len(ends)
    for setting in SETTINGS[:3]:
        got, want = both(logits, settings_of([setting] * (num + 1), device), cuts=setting[2] < 1)
        assert got.tolist() == want.tolist() and got[num] > PIECE, setting
        assert got[:num].tolist() == [NO_TOKEN] * num
    out, arrived = torch.full((num + 1,), -5, device=device), torch.zeros(num + 1, dtype=torch.int32, device=device)
    for instead in (NO_TOKEN, 0):
        argmax_token_(logits, out, arrived, instead)
        assert out.tolist() == finite_argmax(logits, instead).tolist() == [instead] * num + [vocab - 1]


def test_the_first_of_equal_logits_is_chosen() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        logits = torch.randint(0, 5, (9, 1003), generator=torch.Generator().manual_seed(0)).to(dtype)
        logits[0] = 1
        assert finite_argmax(logits).tolist() == [row.index(max(row)) for row in logits.tolist()]


def test_logits_that_are_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    check_not_finite()
    monkeypatch.setattr("shoestring.kernels.sampling.sample_tokens.LEAST_VOCAB", 1)
    check_not_finite()


@hypothesis_settings(deadline=None)
@given(st.one_of(st.integers(0, 2**52 - 1), st.integers(2**52 - 64, 2**52 - 1)))
def test_the_bound_lies_above_the_noise(bits: int) -> None:
    bound, noise = _most_noise(torch.tensor([bits])), gumbel(torch.tensor([bits]))
    assert bound.double() >= noise - 1e-5
    assert bits < 2**51 or bits > 2**52 - 64 or bound - noise < 0.5  # and not by much, where tokens win


def test_a_flat_row_looks_further_than_the_likeliest_tokens() -> None:
    """A nucleus of half the vocabulary, by a sort and without one."""
    flat = 1e-3 * torch.randn(6, 9000, generator=torch.Generator().manual_seed(3))
    p = torch.tensor([1e-9, 0.01, 0.1, 0.5, 0.9, 0.999999])
    off = torch.zeros(6, dtype=torch.int64), torch.full((6,), -torch.inf)
    want = logit_thresholds_ref(flat, off[0], p, off[1])
    got = logit_thresholds(flat, torch.stack([torch.ones(6), off[0], p, off[1]]).double())
    num_got, num_want = ((flat >= f[:, None]).sum(dim=1) for f in (got, want))
    assert (num_got - num_want).abs().max() <= 1  # the last one may lie at the very edge
    assert num_got.tolist()[0] == 1 and 4000 < num_got[3] < 5000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_drawing_on_the_gpu() -> None:
    check_tokens("cuda", 60, (torch.float32, torch.float16, torch.bfloat16))
    check_edges("cuda", 100)
    check_not_finite("cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_real_vocabulary_on_the_gpu() -> None:
    """Many rows of bf16 logits with a long tail. A sum in another order may move a token at the very edge of top_p:
    what is drawn differs in no more than a few of the rows that have one."""
    generator = torch.Generator().manual_seed(4)
    logits = (4 * torch.randn(500, 128256, generator=generator)).to("cuda", torch.bfloat16)
    got, want = both(logits, settings(500, "cuda"))
    wrong = (got != want).nonzero().flatten().tolist()
    assert len(wrong) <= 2 and all(SETTINGS[3 * r % len(SETTINGS)][2] < 1 for r in wrong), wrong
