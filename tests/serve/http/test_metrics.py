"""Latencies that /metrics reports, against the clock of a client and against each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("httpx")
import httpx
from serving import running

STEP_S, NUM_TOKENS, NUM_REQUESTS = 0.01, 8, 4
LATENCIES = {
    "first": "time_to_first_token_seconds",
    "queue": "request_queue_time_seconds",
    "prefill": "request_prefill_time_seconds",
    "gap": "inter_token_latency_seconds",
    "decode": "request_decode_time_seconds",
    "e2e": "e2e_request_latency_seconds",
}


def read(http: Any) -> tuple[dict[str, float], dict[str, float]]:
    """Sums and counts by the short names above."""
    lines = http.get("/metrics").text.splitlines()
    found = {name: float(value) for name, value in (x.rsplit(" ", 1) for x in lines if not x.startswith("#"))}
    label = '{model_name="tiny"}'
    sums = {short: found[f"shoestring:{name}_sum{label}"] for short, name in LATENCIES.items()}
    return sums, {short: found[f"shoestring:{name}_count{label}"] for short, name in LATENCIES.items()}


@pytest.fixture(scope="module")
def service() -> Iterator[Any]:
    """One text at a time, with steps of at least STEP_S."""
    with running(max_requests=1) as service:
        step = service.engine.step  # type: ignore[attr-defined]

        def slow_step() -> Any:
            outputs = step()
            time.sleep(STEP_S)
            return outputs

        service.engine.step = slow_step  # type: ignore[attr-defined]
        yield service


def test_latencies_add_up_and_agree_with_a_client(service: Any) -> None:
    seen: list[tuple[float, float]] = []  # time to the first piece and to the end, of each request

    def ask(text: str) -> None:
        body = {"prompt": text, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True, "logprobs": 0}
        began, first = time.monotonic(), None
        with http.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if first is None and line.startswith("data: {"):
                    first = time.monotonic()
        assert first is not None
        seen.append((first - began, time.monotonic() - began))

    with httpx.Client(base_url=service.url, timeout=60) as http:
        before, num_before = read(http)
        threads = [threading.Thread(target=ask, args=[f"text {i}"]) for i in range(NUM_REQUESTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        after, num_after = read(http)
    grown = {name: after[name] - before[name] for name in LATENCIES}
    num = {name: num_after[name] - num_before[name] for name in LATENCIES}
    assert all(value > 0 for value in grown.values())
    assert num == {
        **dict.fromkeys(LATENCIES, NUM_REQUESTS), "gap": NUM_REQUESTS * (NUM_TOKENS - 1)
    }  # fmt: skip
    # The parts of a request are the whole.
    assert grown["queue"] + grown["prefill"] == pytest.approx(grown["first"], abs=1e-6)
    assert grown["gap"] == pytest.approx(grown["decode"], abs=1e-6)
    assert grown["first"] + grown["decode"] == pytest.approx(grown["e2e"], abs=1e-6)
    # A client sees each event a little later than the server reports it, never earlier.
    assert grown["first"] <= sum(first for first, _ in seen)
    assert grown["e2e"] <= sum(end for _, end in seen)
    # Every token takes a step, and a request waits for all steps of those before it.
    each = NUM_TOKENS * STEP_S
    assert grown["prefill"] >= NUM_REQUESTS * STEP_S
    assert grown["decode"] >= NUM_REQUESTS * (each - STEP_S)
    assert grown["queue"] >= 0.5 * each * sum(range(NUM_REQUESTS))  # half: they do not arrive at the same instant
    # What the client saw beyond that is HTTP: little beside the steps.
    assert sum(end for _, end in seen) - grown["e2e"] < grown["e2e"]


def test_a_request_that_asks_for_no_token_has_latencies_that_add_up(service: Any) -> None:
    with httpx.Client(base_url=service.url, timeout=60) as http:
        before, num_before = read(http)
        scored = {"prompt": "The fox", "max_tokens": 0, "echo": True, "logprobs": 1}
        assert http.post("/v1/completions", json=scored).status_code == 200
        one_step = {"prompt": "The fox", "max_tokens": 1}
        assert http.post("/v1/completions", json=one_step).status_code == 200
        after, num_after = read(http)
    grown = {name: after[name] - before[name] for name in LATENCIES}
    assert {name: num_after[name] - num_before[name] for name in ("first", "queue", "prefill", "decode", "e2e")} == {
        "first": 2, "queue": 2, "prefill": 2, "decode": 2, "e2e": 2
    }  # fmt: skip
    assert grown["queue"] >= 0 and grown["prefill"] > 0 and grown["decode"] == 0
    assert grown["queue"] + grown["prefill"] == pytest.approx(grown["first"], abs=1e-6)
    assert grown["first"] == pytest.approx(grown["e2e"], abs=1e-6)
