"""The CPU decode bench: its perplexity is that of the evaluation, its table says what was measured."""

from __future__ import annotations

import pytest
import torch

from benchmarks import cpu_decode
from shoestring.evals.perplexity import perplexity
from shoestring.model import Decoder, ModelSpec


def test_perplexity_of_logits_is_perplexity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_decode, "CONTEXT", 16)
    torch.manual_seed(0)
    model = Decoder(ModelSpec(96, 64, 2, 4, 2, 16, 128, 64))
    tokens = torch.randint(96, (48,))
    wanted = perplexity(model, tokens, context=16).value
    assert cpu_decode.perplexity(model, tokens) == pytest.approx(wanted, rel=1e-5)
    assert cpu_decode.perplexity_by_token(model, tokens) == pytest.approx(wanted, rel=1e-5)


def test_steps_of_several_requests_are_timed_together() -> None:
    torch.manual_seed(0)
    model = Decoder(ModelSpec(96, 64, 2, 4, 2, 16, 128, 64))
    seconds = cpu_decode.time_steps(model, [3, 4, 5], new=6, threads=torch.get_num_threads(), streams=3)
    assert len(seconds["prompt"]) == 1 and len(seconds["wall"]) == len(seconds["processor"]) == 5
