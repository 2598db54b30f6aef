"""Scoring a long prompt: other texts get their steps between its parts, and it can be left midway."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("httpx")
import httpx
from serving import running, wait_for

PROMPT = [10 + i % 200 for i in range(200)]
CHUNK = 16
SCORED = {"prompt": PROMPT, "max_tokens": 1, "echo": True, "logprobs": 1, "seed": 1}


@pytest.fixture(scope="module")
def service() -> Iterator[Any]:
    with running(chunk=CHUNK) as service:
        yield service


def test_texts_go_on_between_the_parts(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, steps = service.engine.runner, list[int]()
    of = runner.prompt_logprob_parts

    def counted(*given: Any) -> Iterator[Any]:
        for part in of(*given):
            steps.append(service.engine.stats.num_steps)
            yield part

    with httpx.Client(base_url=service.url, timeout=60) as http:
        alone = http.post("/v1/completions", json=SCORED).json()["choices"][0]
        monkeypatch.setattr(runner, "prompt_logprob_parts", counted)
        body = {"prompt": "hi", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as other:
            lines = other.iter_lines()  # one that is dropped would close the stream
            next(lines)
            beside = http.post("/v1/completions", json=SCORED).json()["choices"][0]
    assert len(steps) == -(-(len(PROMPT) - 1) // CHUNK)
    assert all(b > a for a, b in itertools.pairwise(steps))
    assert len(alone["logprobs"]["tokens"]) == len(PROMPT) + 1 and beside["text"] == alone["text"]
    told, want = (choice["logprobs"]["token_logprobs"][1:] for choice in (beside, alone))
    assert told == pytest.approx(want, abs=1e-4)


def test_a_client_may_leave_midway(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, num_parts = service.engine.runner, 0
    of, begun, gone = runner.prompt_logprob_parts, threading.Event(), threading.Event()

    def paused(*given: Any) -> Iterator[Any]:
        nonlocal num_parts
        for part in of(*given):
            num_parts += 1
            begun.set()
            assert gone.wait(30)
            yield part

    monkeypatch.setattr(runner, "prompt_logprob_parts", paused)
    with pytest.raises(httpx.ReadTimeout):  # which closes the connection
        httpx.post(service.url + "/v1/completions", json={**SCORED, "prompt": PROMPT[:-1]}, timeout=0.3)
    assert begun.wait(30)
    wait_for(lambda: not service.engine_thread._inbox.empty())  # the cancellation
    gone.set()
    wait_for(lambda: service.client.num_open == 0)
    assert num_parts <= 2
    monkeypatch.undo()
    assert httpx.post(service.url + "/v1/completions", json=SCORED, timeout=60).status_code == 200
