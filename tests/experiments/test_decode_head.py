from __future__ import annotations

import pytest
import torch

from experiments import decode_head


def test_heads_are_compared_on_the_same_hidden_states() -> None:
    gen = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(300, 8, generator=gen), torch.randn(11, 8, generator=gen)
    target = torch.randint(0, 11, (300,), generator=gen)
    plain = torch.nn.functional.cross_entropy(hidden @ head.T, target).exp().item()
    assert decode_head.compare(hidden, target, head, head) == pytest.approx((plain, plain, 0.0, 1.0), abs=1e-4)
    other = head + 0.3 * torch.randn(11, 8, generator=gen)
    p, q = ((hidden @ w.T).log_softmax(-1) for w in (head, other))
    kl = torch.nn.functional.kl_div(q, p, log_target=True, reduction="batchmean").item()
    same = (p.argmax(-1) == q.argmax(-1)).float().mean().item()
    assert decode_head.compare(hidden, target, head, other)[2:] == pytest.approx((kl, same), rel=1e-4)
