from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoestring.errors import UserError
from shoestring.evals import perplexity, scoring
from shoestring.evals.perplexity import windows
from shoestring.model import Decoder
from tiny import tiny_llama

TOKENS = torch.randint(0, 300, (205,), generator=torch.Generator().manual_seed(0))


def as_transformers(model: Decoder) -> Any:
    """The `transformers` model with the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    s = model.spec
    other = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=s.vocab_size,
            hidden_size=s.d_model,
            intermediate_size=s.d_ff,
            num_hidden_layers=s.num_layers,
            num_attention_heads=s.num_heads,
            num_key_value_heads=s.num_kv_heads,
            head_dim=s.head_dim,
            max_position_embeddings=s.max_positions,
            rms_norm_eps=s.norm_eps,
            tie_word_embeddings=True,
        )
    )
    names = {
        "attn_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        **{f"attn.{n}": f"self_attn.{n}_proj" for n in "qkvo"},
        **{f"mlp.{n}": f"mlp.{n}_proj" for n in ("gate", "up", "down")},
    }
    state = {"model.embed_tokens.weight": model.embed.weight, "model.norm.weight": model.norm.weight}
    for layer in range(s.num_layers):
        for ours, theirs in names.items():
            state[f"model.layers.{layer}.{theirs}.weight"] = model.get_parameter(f"blocks.{layer}.{ours}.weight")
    missing = other.load_state_dict(state, strict=False)
    assert missing.missing_keys == ["lm_head.weight"] and not missing.unexpected_keys
    return other.eval()


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
    model = tiny_llama()
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
    model = tiny_llama()
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
        perplexity(tiny_llama(), tokens, **{"context": 32, **settings})  # type: ignore[arg-type]
