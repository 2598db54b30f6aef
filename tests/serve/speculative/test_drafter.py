"""The smallest legal drafter: one class with `propose`, through a real engine and in every place that takes one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from naive_decoding import naive_texts
from replayed import TickingClock

from shoestring.serve import Draft, Drafter, DrafterStack, Engine, NgramDrafter, Request, Sampling
from shoestring.serve.engine.block_pool import BlockPool
from tiny import tiny_decoder


class Smallest(Drafter):
    """Every other draft is the text's last token; the rest are wrong more often than not."""

    def propose(self, requests: Sequence[Request], n: int) -> list[Draft]:
        return [Draft([r.tokens[-1], *r.tokens[: n - 1]]) for r in requests]


def accounted(pool: BlockPool) -> bool:
    return pool.num_free + pool.num_used + pool.num_cached == pool.num_blocks


def test_a_drafter_needs_propose_and_nothing_else() -> None:
    with pytest.raises(TypeError, match="propose"):
        Drafter()  # type: ignore[abstract]
    drafter, request = Smallest(), Request([1, 2], 2, Sampling(), 0)
    drafter.observe(request, 1, 0)
    drafter.release(request)
    drafter.warm_up(4, ("greedy",), (1, 2), 64)
    assert not drafter.is_behind([request]) and not drafter.caught_up and drafter.num_graphs == 0


@pytest.mark.parametrize("num_drafts", [1, 3, None])
@pytest.mark.parametrize("graphs", [None, True])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.few(5)
def test_the_smallest_drafter_changes_no_text_and_loses_no_block(
    num_drafts: int | None, graphs: bool | None, stacked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`num_drafts` None: warm-up and the draft-length controller use every member of the protocol."""
    TickingClock(monkeypatch)
    target = tiny_decoder(0)
    prompts = [[1, 2, 3], [4, 5, 6, 7], [8, 1, 1, 1]]
    samplings = [
        Sampling(max_tokens=20, ignore_eos=True),
        Sampling(max_tokens=9, ignore_eos=True),
        Sampling(max_tokens=16, ignore_eos=True, temperature=0.8, seed=5),
    ]
    want = naive_texts(target, prompts, samplings)
    drafter = DrafterStack([NgramDrafter(longest=2), Smallest()]) if stacked else Smallest()
    engine = Engine(
        target, max_requests=2, block_size=4, num_blocks=24, drafter=drafter, num_drafts=num_drafts, graphs=graphs
    )
    assert engine.draft_controller is None or num_drafts is None
    for _ in range(2):
        assert [c.token_ids for c in engine.generate(prompts, samplings)] == want
    assert engine.stats.num_drafted > engine.stats.num_accepted
    pool = engine.cache.pool
    assert pool.num_used == 0 and accounted(pool)


def test_blocks_are_accounted_for_at_every_step() -> None:
    engine = Engine(tiny_decoder(0), block_size=2, num_blocks=20, drafter=Smallest(), num_drafts=4)
    for prompt in ([1, 2, 3], [4, 5], [6, 7, 8]):
        engine.add(prompt, Sampling(max_tokens=12, ignore_eos=True))
    while engine.busy:
        engine.step()
        assert accounted(engine.cache.pool)
    assert engine.stats.num_drafted > 0 and engine.cache.pool.num_used == 0


def test_an_engine_without_a_drafter_has_no_prospects_to_wait_for() -> None:
    engine = Engine(tiny_decoder(0), chunk=5)
    engine.scheduler.running.append(Request([1, 2], 2, Sampling(max_tokens=9), 0))
    limit, left, behind = engine.drafting.prospects()
    assert (limit, left, behind()) == (4, 9.0, False) and engine.num_graphs == 0
