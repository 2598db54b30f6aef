from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_evals import as_transformers, tiny_model

from shoestring.errors import UserError
from shoestring.evals import perplexity, scoring
from shoestring.evals.perplexity import windows

TOKENS = torch.randint(0, 300, (205,), generator=torch.Generator().manual_seed(0))


def reference(model: object, tokens: torch.Tensor, context: int, stride: int) -> tuple[float, int]:
    """The sliding-window loop of the `transformers` documentation, counting exactly."""
    nll, count, previous_end = 0.0, 0, 0
    for begin in range(0, len(tokens), stride):
        end = min(begin + context, len(tokens))
        ids = tokens[None, begin:end]
        labels = ids.clone()
        labels[:, : -(end - previous_end)] = -100
        with torch.no_grad():
            loss = model(ids, labels=labels).loss  # type: ignore[operator]
        num = int((labels[:, 1:] != -100).sum())
        if num:
            nll, count = nll + float(loss) * num, count + num
        previous_end = end
        if end == len(tokens):
            break
    return nll / count, count


@pytest.mark.parametrize(("context", "stride"), [(64, 64), (64, 16), (50, 49), (32, 1), (2, 1)])
def test_equals_the_transformers_loop(context: int, stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    tokens = TOKENS if stride > 1 else TOKENS[:60]
    want, count = reference(as_transformers(model), tokens, context, stride)
    monkeypatch.setattr(scoring, "BLOCK_LOGITS", 7 * 300)  # several blocks of logits per window
    seen: list[tuple[int, int]] = []
    for batch in (1, 3):
        got = perplexity(
            model, tokens, context=context, stride=stride, batch=batch, progress=lambda *at: seen.append(at)
        )
        assert (got.num_tokens, got.context, got.stride) == (count, context, stride)
        assert got.nll == pytest.approx(want, abs=2e-5)
        assert got.value == pytest.approx(math.exp(want), rel=1e-4)
        assert seen[-1] == (count, count)


@given(st.integers(2, 80), st.integers(2, 20), st.integers(1, 20))
def test_windows_count_each_token_once(num_tokens: int, context: int, stride: int) -> None:
    stride = min(stride, context)
    counted: list[int] = []
    for w in windows(num_tokens, context, stride):
        assert w.start < w.counted_from < w.stop <= num_tokens and w.stop - w.start <= context
        if w.start and stride < context:
            assert w.stop - w.counted_from <= stride and w.counted_from - w.start >= context - stride
        counted.extend(range(w.counted_from, w.stop))
    left_out = {0} if stride < context else set(range(0, num_tokens, context))
    assert counted == [t for t in range(num_tokens) if t not in left_out]


def test_max_tokens_and_default_stride() -> None:
    model = tiny_model()
    cut = perplexity(model, TOKENS, context=32, max_tokens=96)
    assert cut == perplexity(model, TOKENS[:96], context=32, stride=32)
    assert cut.num_tokens == 3 * 31


@pytest.mark.parametrize(
    ("tokens", "settings", "reason"),
    [
        (TOKENS[:1], {}, "at least 2"),
        (TOKENS[:0], {}, "0 tokens"),
        (TOKENS, {"context": 65}, "64 positions"),
        (TOKENS, {"context": 1}, "context=1"),
        (TOKENS, {"stride": 33}, "stride=33"),
        (TOKENS, {"stride": 0}, "stride=0"),
        (TOKENS, {"max_tokens": 1}, "max_tokens=1"),
        (TOKENS, {"batch": 0}, "batch=0"),
        (TOKENS[None], {}, "shape"),
        (TOKENS + 200, {}, "vocabulary of 300"),
    ],
)
def test_bad_input(tokens: torch.Tensor, settings: dict[str, int], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        perplexity(tiny_model(), tokens, **{"context": 32, **settings})  # type: ignore[arg-type]
