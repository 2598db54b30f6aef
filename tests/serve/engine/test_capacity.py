"""How many requests run at once: memory bounds them, and so does the time of a step."""

from __future__ import annotations

import pytest
import torch

from shoestring.model.spec import ModelSpec
from shoestring.serve import Engine
from shoestring.serve.engine import capacity
from tiny import LLAMA, random_model

SPEC_1B = ModelSpec(32000, 2048, 16, 32, 8, 64, 8192, 131072)


@pytest.mark.parametrize(
    ("seconds", "most", "chosen"),
    [
        (lambda rows: 0.002, 256, 256),  # weights are read once: more rows cost nothing
        (lambda rows: 0.002, 100, 64),  # memory holds no more
        (lambda rows: 0.002, 3, 3),
        (lambda rows: 0.001 + rows / 32 * 0.001, 256, 128),  # from 32 rows on, arithmetic
        (lambda rows: rows * 0.001, 256, 8),  # no gain at all
        (lambda rows: 0.002 if rows < 64 else 0.2, 256, 32),  # a step that takes too long
    ],
)
def test_requests_double_while_it_pays(seconds, most: int, chosen: int) -> None:  # type: ignore[no-untyped-def]
    assert capacity.choose_requests(most, seconds, "cuda") == chosen


def test_memory_bounds_requests_and_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, half = torch.device("cpu"), torch.float16
    assert capacity.bytes_per_position(SPEC_1B, half) == 32768
    monkeypatch.setattr(capacity, "free_bytes", lambda device: 2**30)
    assert capacity.requests_by_memory(SPEC_1B, 131072, half, cpu) == 8  # of 2,048 positions: 64 MiB each
    assert capacity.requests_by_memory(SPEC_1B, 128, half, cpu) == 32  # as many as a CPU may have
    assert capacity.blocks_by_memory(SPEC_1B, 2048, half, cpu) == int(0.85 * 2**30 // (32768 * 16))
    assert capacity.blocks_by_memory(SPEC_1B, 131072, half, cpu) == 8192  # one text of full length
    monkeypatch.setattr(capacity, "free_bytes", lambda device: 2**20)
    assert capacity.requests_by_memory(SPEC_1B, 131072, half, cpu) == 1


def test_an_engine_limits_itself_by_what_it_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(LLAMA)
    engine = Engine(model, max_requests=32, max_context=32, most_blocks=5)
    assert engine.cache.pool.num_blocks == 5 and engine.cache.pool.grows
    monkeypatch.setattr(engine.runner, "measure_seconds", lambda rows, skip=None: 0.01 if rows <= 16 else 0.5)
    assert engine.limit_requests() == engine.scheduler.max_requests == 16
    assert Engine(model, max_context=32, most_blocks=1).cache.pool.num_blocks == 2  # one request fits
