"""Whole texts attend in few shapes wherever cuDNN, which makes a plan for each shape, could be chosen."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from naive_decoding import naive
from torch.backends.cuda import cudnn_sdp_enabled, enable_cudnn_sdp

from shoestring.model.attention import causal_attention
from shoestring.serve import DraftModel, Engine, Sampling
from shoestring.serve.engine import place_rows as place_rows_module
from shoestring.serve.engine import prompt_attention as module
from shoestring.serve.engine import runner as runner_module
from shoestring.serve.engine.logit_rules import prompt_logprob_parts
from shoestring.serve.engine.prompt_attention import limit_cudnn_plans, prompt_attention
from tiny import near_copy, tiny_decoder

LONG, STEP = 24, 16


class Calls:
    """Shapes that torch's attention is asked for: (whether cuDNN may be chosen, texts, rows)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "LONG", LONG)
        monkeypatch.setattr(module, "STEP", STEP)
        monkeypatch.setattr(module, "_planned", lambda q: cudnn_sdp_enabled())  # as on a GPU
        monkeypatch.setattr(place_rows_module, "LAUNCH_ROWS", 1)  # none of them by table
        self.met: set[tuple[bool, int, int]] = set()
        self.at: set[int] = set()  # addresses of the queries
        attend = F.scaled_dot_product_attention

        def attended(q: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
            self.met.add((cudnn_sdp_enabled(), q.shape[0], q.shape[2]))
            self.at.add(q.data_ptr())
            return attend(q, *rest, **options)

        monkeypatch.setattr(F, "scaled_dot_product_attention", attended)

    def check(self) -> None:
        """Short texts without cuDNN; with it one by one, and of few lengths."""
        assert cudnn_sdp_enabled()
        wrong = {(on, num, rows) for on, num, rows in self.met if on and (num > 1 or rows < LONG or rows % STEP)}
        assert not wrong


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [7, LONG, 2 * STEP, 41])
def test_padding_changes_nothing(
    rows: int, dtype: torch.dtype, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gen = torch.Generator().manual_seed(rows)
    q, k, v = (torch.randn(3, rows, heads, 8, generator=gen, dtype=dtype) for heads in (4, 2, 2))
    want = causal_attention(q, k, v, window=window)
    for num in (1, 3):
        for whole in ([rows] * num, [rows, 1]):
            calls = Calls(monkeypatch)
            with limit_cudnn_plans(whole):
                got = prompt_attention(q[:num], k[:num], v[:num], window=window)
            torch.testing.assert_close(got, want[:num])
            calls.check()
            if min(whole) >= LONG:
                assert calls.met == {(True, 1, -(-rows // STEP) * STEP)}
                # A text that needs no padding is not copied.
                assert (q.data_ptr() in calls.at) == (rows % STEP == 0)
            else:
                assert calls.met == {(False, num, rows)}


def test_nothing_is_padded_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no cuDNN there, and 4097 rows padded to 5120 would take half again as long."""
    planned = module._planned
    calls = Calls(monkeypatch)
    monkeypatch.setattr(module, "_planned", planned)
    q, k, v = (torch.randn(2, 41, 4, 8, dtype=torch.bfloat16) for _ in range(3))
    with limit_cudnn_plans([41, 41]):
        prompt_attention(q, k, v)
    assert calls.met == {(True, 2, 41)}


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("window", [None, 5])
def test_no_prompt_waits_for_a_plan(window: int | None, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets and draft models, fused and plain, prompts of all lengths, alone and together."""
    target = tiny_decoder(0, sliding_window=window, full_layers=(0,))
    draw = random.Random(3)
    asked = []
    for turn in range(12):
        many = [draw.randint(1, 50) for _ in range(draw.randint(1, 8))]
        nums = many if turn % 3 else [draw.randint(LONG, 60)]
        asked.append([[draw.randrange(29) for _ in range(num)] for num in nums])
    sampling = Sampling(max_tokens=4)
    want = [[naive(target, p, sampling) for p in prompts] for prompts in asked]
    calls = Calls(monkeypatch)
    monkeypatch.setattr(runner_module, "holds_prefill", lambda spans: False)  # as where they are too long for a graph
    drafter = DraftModel(near_copy(target, 0.03), graphs=graphs)
    engine = Engine(target, max_requests=6, chunk=100, graphs=graphs, drafter=drafter, num_drafts=2, prefix_cache=False)
    for prompts, texts in zip(asked, want, strict=True):
        assert [c.token_ids for c in engine.generate(prompts, sampling)] == texts
    list(prompt_logprob_parts(target, [1, 2, 3], 0, 512))
    calls.check()
    assert {rows for on, _, rows in calls.met if on} >= {2 * STEP, 3 * STEP}
    assert len({rows for on, _, rows in calls.met if not on}) > 10


def test_the_flag_is_put_back() -> None:
    first, second = limit_cudnn_plans([3]), limit_cudnn_plans([5, LONG])
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)  # in another thread, say
    assert not cudnn_sdp_enabled()
    second.__exit__(None, None, None)
    assert cudnn_sdp_enabled()
    with pytest.raises(ValueError), limit_cudnn_plans():
        raise ValueError
    assert cudnn_sdp_enabled()
    enable_cudnn_sdp(False)
    try:
        with limit_cudnn_plans():
            pass
        assert not cudnn_sdp_enabled()
    finally:
        enable_cudnn_sdp(True)
