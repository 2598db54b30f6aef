"""Clients share the engine: one that asks for many texts does not keep the others waiting, and no text changes."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")
from serving import running, wait_for  # noqa: E402

from shoestring.serve import Sampling  # noqa: E402
from shoestring.serve.engine.engine import Engine  # noqa: E402
from shoestring.serve.http.fair_line import FairLine, who_gives_way  # noqa: E402
from tiny import chat_tokenizer, served_model  # noqa: E402

TEXT = "/v1/completions"


@dataclass(eq=False)
class Waiting:
    client: str
    number: int


def test_the_client_with_the_fewest_running_texts_is_next() -> None:
    line: FairLine[Waiting] = FairLine()
    for client, number in (("a", 1), ("a", 2), ("b", 1), ("a", 3), ("c", 1), ("b", 2)):
        line.put(client, Waiting(client, number))
    running: Counter[str] = Counter()
    order = []
    while line:
        text = line.pop(line.next_client(running))
        running[text.client] += 1
        order.append(f"{text.client}{text.number}")
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_a_text_that_ran_before_is_its_clients_next() -> None:
    line: FairLine[Waiting] = FairLine()
    new, old = Waiting("a", 2), Waiting("a", 1)
    line.put("a", new)
    line.put("a", old, first=True)
    assert line.pop("a") is old and line.remove("a", new) and not line.remove("a", new) and len(line) == 0


def test_who_gives_way() -> None:
    assert who_gives_way(Counter(a=4), "b") == "a"
    assert who_gives_way(Counter(a=4, b=1), "b") == "a"
    assert who_gives_way(Counter(a=2, b=1), "b") is None  # b would have more than a then
    assert who_gives_way(Counter(a=1), "b") is None
    assert who_gives_way(Counter(a=4), "a") is None


@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_a_newcomer_is_served_while_another_client_fills_the_queue(drafter: str | None) -> None:
    tokenizer = chat_tokenizer()
    offline = Engine(served_model(tokenizer.vocab_size), tokenizer)
    samplings = [Sampling(temperature=0.9, seed=i, max_tokens=100, ignore_eos=True) for i in range(6)]
    expected = [c.text for c in offline.generate([f"The {i}" for i in range(6)], samplings)]

    def ask(client: Any, **body: Any) -> Any:
        return client.post(TEXT, json={"temperature": 0.9, "ignore_eos": True, **body})

    with (
        running(max_requests=2, max_queue=8, drafter=drafter) as service,
        httpx.Client(base_url=service.url, timeout=120) as newcomer,
        httpx.Client(
            base_url=service.url, timeout=120, transport=httpx.HTTPTransport(local_address="127.0.0.2")
        ) as greedy,
        ThreadPoolExecutor(6) as pool,
    ):
        asked = [pool.submit(ask, greedy, prompt=f"The {i}", seed=i, max_tokens=100) for i in range(6)]
        wait_for(lambda: service.client.num_open == 6)
        for _ in range(3):  # none waits for a text of 100 tokens
            before = service.engine.stats.num_steps
            assert ask(newcomer, prompt="I", max_tokens=1).status_code == 200
            assert service.engine.stats.num_steps - before < 60
        # The greedy client's own part is full before the queue is.
        refused = ask(greedy, prompt=["a"] * 3, max_tokens=1)
        assert refused.status_code == 429 and "your part of the queue" in refused.json()["error"]["message"]
        assert service.engine.stats.num_preemptions >= 1
        assert [a.result().json()["choices"][0]["text"] for a in asked] == expected
        wait_for(lambda: service.client.num_open == 0 and service.engine.cache.pool.num_used == 0)


def test_a_text_that_gave_way_still_follows_its_grammar() -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "minItems": 8, "maxItems": 8}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    asked = {"messages": [{"role": "user", "content": "a"}], "seed": 3, "temperature": 1.0, "response_format": form}
    with (
        running(max_requests=2, max_queue=8) as service,
        httpx.Client(base_url=service.url, timeout=120) as newcomer,
        httpx.Client(
            base_url=service.url, timeout=120, transport=httpx.HTTPTransport(local_address="127.0.0.2")
        ) as greedy,
        ThreadPoolExecutor(4) as pool,
    ):
        alone = greedy.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]["content"]
        texts = [pool.submit(greedy.post, "/v1/chat/completions", json=asked) for _ in range(4)]
        while not all(text.done() for text in texts):
            assert newcomer.post(TEXT, json={"prompt": "I", "max_tokens": 1}).status_code == 200
        assert service.engine.stats.num_preemptions > 0
        assert {text.result().json()["choices"][0]["message"]["content"] for text in texts} == {alone}


def test_a_text_that_gave_way_can_be_cancelled_and_expires() -> None:
    with running(max_requests=2, max_queue=8, deadline_s=2.0) as service:
        with httpx.Client(base_url=service.url, timeout=120) as first, ThreadPoolExecutor(4) as pool:
            long = {"prompt": "The", "max_tokens": 4000, "ignore_eos": True}
            mine = [pool.submit(first.post, TEXT, json=long) for _ in range(2)]
            wait_for(lambda: service.client.snapshot.num_running == 2)
            transport = httpx.HTTPTransport(local_address="127.0.0.2")
            other = httpx.Client(base_url=service.url, timeout=0.5, transport=transport)
            with other, pytest.raises(httpx.ReadTimeout):
                other.post(TEXT, json=long)  # runs beside one of the first client's; the other one waits
            assert service.engine.stats.num_preemptions >= 1
            assert {answer.result().status_code for answer in mine} <= {200, 408}
        wait_for(lambda: service.client.num_open == 0 and service.engine.cache.pool.num_used == 0)
