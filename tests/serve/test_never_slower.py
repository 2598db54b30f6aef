"""The whole engine on a fake clock: no drafter costs 2%, with prompts to read, pauses and texts to catch up on.

Every pass of a model moves the clock by what such passes take on a GPU, relative to each other; the host is free.
Requests come in rounds; the first rounds, in which the controller learns, do not count.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from tiny_serve import near_copy, tiny_decoder

from shoestring.serve import DraftModel, Engine, Sampling
from shoestring.serve import chain_graph as chain_module
from shoestring.serve import engine as engine_module
from shoestring.serve import read_graph as read_module
from shoestring.serve import runner as runner_module
from shoestring.serve.cuda_graphs import StepGraphs
from shoestring.serve.kv_cache import Span
from shoestring.serve.runner import Batch, Runner

DRAFTER = 0.1  # of the time that the target takes for the same


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, slow: Any) -> None:
        """`slow`: the target; all others are drafters."""
        self.now, clock = 0.0, self
        launch, run, chain = StepGraphs._launch, Runner._run_fused, chain_module.launch_chain
        read = read_module.launch_read

        def took(model: Any, rows: int, passes: int = 1) -> None:
            one = 1.0 + 0.01 * rows
            clock.now += (
                one * passes * (1.0 if model.embed.data_ptr() == slow.embed.weight.data_ptr() else DRAFTER)
            )

        def launched(graphs: StepGraphs, spans: Sequence[Span], *rest: Any) -> Any:
            took(graphs.fused, sum(s.num for s in spans))
            return launch(graphs, spans, *rest)

        def has_read(graphs: StepGraphs, spans: Sequence[Span], *rest: Any) -> Any:
            took(graphs.fused, sum(s.num for s in spans))
            return read(graphs, spans, *rest)

        def ran(runner: Runner, batch: Batch, *rest: Any) -> Any:
            took(runner._fused, 2 * sum(s.num for s in batch.spans))  # launched one by one
            return run(runner, batch, *rest)

        def chained(graphs: StepGraphs, spans: Sequence[Span], *rest: Any) -> Any:
            took(graphs.fused, len(spans), rest[2])
            return chain(graphs, spans, *rest)

        monkeypatch.setattr(StepGraphs, "_launch", launched)
        monkeypatch.setattr(Runner, "_run_fused", ran)
        monkeypatch.setattr(runner_module, "launch_chain", chained)
        monkeypatch.setattr(runner_module, "launch_read", has_read)
        monkeypatch.setattr(engine_module.time, "perf_counter", lambda: self.now)


@pytest.mark.parametrize("batch", [1, 6])
@pytest.mark.parametrize("noise", [9.0, 0.0])
def test_a_drafter_never_costs_two_percent(batch: int, noise: float, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_decoder(0)
    clock = Clock(monkeypatch, target)
    draw = random.Random(batch)
    prompts = [[draw.randrange(29) for _ in range(20)] for _ in range(batch)]
    sampling = Sampling(max_tokens=40, ignore_eos=True)

    def seconds(drafter: DraftModel | None, rounds: int = 9) -> float:
        engine = Engine(
            target,
            max_requests=batch,
            max_context=64,
            chunk=64,
            graphs=True,
            drafter=drafter,
            prefix_cache=False,
        )
        for i in range(rounds):
            if i == 2:
                began = clock.now
            engine.generate(prompts, sampling)
        if drafter is not None:
            assert engine.stats.num_drafted > 0, "it never tried"
        return clock.now - began

    plain = seconds(None)
    drafter = DraftModel(near_copy(target, noise), graphs=True)
    drafter.pool.prefix_cache = False
    found = seconds(drafter)
    assert found < 1.02 * plain
    if not noise:
        assert found < 0.6 * plain
