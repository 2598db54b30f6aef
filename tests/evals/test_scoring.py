from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shoestring.errors import UserError
from shoestring.evals import scoring
from shoestring.evals.scoring import score
from shoestring.model.spec import LongRope
from tiny import LLAMA, tiny_llama


def naive(model: torch.nn.Module, prompt: list[int], continuation: list[int]) -> tuple[float, bool]:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + continuation]))[0, len(prompt) - 1 : -1]
    target = torch.tensor(continuation)
    log_prob = logits.log_softmax(-1).gather(1, target[:, None]).sum().item()
    return log_prob, bool((logits.argmax(-1) == target).all())


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("batch_rows", [1, 40, 1024])
def test_shared_prompts_and_padding_change_nothing(
    window: int | None, batch_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(replace(LLAMA, sliding_window=window))
    monkeypatch.setattr(scoring, "BLOCK_LOGITS", 5 * 300)
    gen = torch.Generator().manual_seed(0)

    def ids(num: int) -> list[int]:
        return torch.randint(0, 300, (num,), generator=gen).tolist()

    items = [
        (ids(p), [ids(n) for n in lengths]) for p, lengths in ((9, (1, 4, 2)), (3, (5,)), (1, (1, 1)), (20, (7, 3)))
    ]
    # One continuation that greedy decoding writes.
    with torch.no_grad():
        best = int(model(torch.tensor([items[0][0]]))[0, -1].argmax())
    items[0][1].append([best])
    scores = score(model, items, batch_rows=batch_rows)
    assert scores[0][-1].greedy
    for (prompt, continuations), row in zip(items, scores, strict=True):
        for continuation, got in zip(continuations, row, strict=True):
            log_prob, greedy = naive(model, prompt, continuation)
            assert got.log_prob == pytest.approx(log_prob, abs=1e-4)
            assert got.greedy == greedy


@pytest.mark.parametrize("batch_rows", [1, 1024])
def test_texts_beyond_the_original_context_of_longrope(batch_rows: int) -> None:
    """Each continuation is rotated by the length of its own text, whatever it shares a sequence or a batch with."""
    half = LLAMA.head_dim // 2
    rope = LongRope((1.0,) * half, (3.0,) * half, original_positions=12, attention_factor=1.0)
    model = tiny_llama(replace(LLAMA, rope_scaling=rope))
    items = [(list(range(5, 5 + num)), [[3], [9] * 4, [1, 2]]) for num in (4, 10, 30)]  # the second: on both sides
    items.append(([7, 8, 9], [[1] * 5] * 4))  # more rows than the original context, but short texts
    for (prompt, continuations), row in zip(items, score(model, items, batch_rows=batch_rows), strict=True):
        for continuation, got in zip(continuations, row, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + continuation[:-1]]))[0, len(prompt) - 1 :]
            log_prob = logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None]).sum().item()
            assert got.log_prob == pytest.approx(log_prob, abs=1e-4)


def test_a_long_prompt_loses_its_beginning() -> None:
    model = tiny_llama()
    prompt, continuation = list(range(100)), [5, 6, 7]
    kept = prompt[-62:]  # 62 + 2 read tokens fill the 64 positions
    assert score(model, [(prompt, [continuation])]) == score(model, [(kept, [continuation])])
    with pytest.raises(UserError, match="66 tokens"):
        score(model, [([1], [[2] * 66])])
    with pytest.raises(UserError, match="empty"):
        score(model, [([1], [[]])])
