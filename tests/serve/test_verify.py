from __future__ import annotations

import torch

from shoestring.serve.sampling import Sampling, sample
from shoestring.serve.verify import Check, accept, coupled


def test_accept_takes_equal_drafts_and_one_more() -> None:
    assert accept([], [5]) == [5]
    assert accept([1, 2, 3], [1, 2, 3, 4]) == [1, 2, 3, 4]
    assert accept([1, 9, 3], [1, 2, 3, 4]) == [1, 2]
    assert accept([9, 2], [1, 2, 3]) == [1]


def test_coupled_gives_what_plain_sampling_gives_at_the_same_positions() -> None:
    logits = torch.randn(6, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn, greedy = Sampling(temperature=1.0, seed=4), Sampling()
    target = sample(logits, [drawn] * 4 + [greedy] * 2, [20, 21, 22, 23, 7, 8]).tolist()
    wrong = (target[1] + 1) % 11
    checks = [Check((target[0], wrong, target[2]), 20, drawn), Check((target[4],), 7, greedy)]
    assert coupled(logits, checks) == [target[:2], target[4:]]
    # Only the first row is conditioned on accepted text when the first draft is wrong.
    assert coupled(logits[:2], [Check(((target[0] + 1) % 11,), 20, drawn)]) == [target[:1]]
