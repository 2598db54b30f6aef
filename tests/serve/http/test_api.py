"""What OpenAI's own client sees: answers, streams, log-probabilities, usage; against a real server."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")
from serving import running  # noqa: E402

from shoestring.serve import Engine, Sampling  # noqa: E402
from shoestring.serve.speculative.verify import Verifier, as_verifier  # noqa: E402
from tiny import chat_tokenizer, served_model  # noqa: E402

HELLO = [{"role": "user", "content": "Hello café 🙂"}]


@pytest.fixture(scope="module")
def service() -> Iterator[Any]:
    with running(max_requests=4, max_queue=16) as started:
        yield started


@pytest.fixture(scope="module")
def client(service: Any) -> Any:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=60)


def offline(prompt: str | list[int], **sampling: Any) -> Any:
    tokenizer = chat_tokenizer()
    engine = Engine(served_model(tokenizer.vocab_size), tokenizer)
    return engine.generate([prompt], Sampling(**sampling))[0]


def test_completions_are_what_the_engine_says(client: Any) -> None:
    sampling = {"temperature": 0.8, "top_p": 0.9, "seed": 7, "max_tokens": 24}
    answer = client.completions.create(
        model="tiny", prompt="The quick", extra_body={"top_k": 40, "min_p": 0.01}, **sampling
    )
    expected = offline("The quick", top_k=40, min_p=0.01, **sampling)
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.object == "text_completion" and answer.model == "tiny"
    assert answer.usage.prompt_tokens == expected.num_prompt
    assert answer.usage.completion_tokens == len(expected.token_ids)
    assert answer.usage.total_tokens == expected.num_prompt + len(expected.token_ids)


def test_a_silent_stream_sends_comments_also_without_chunks(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """HTTP/1.0 has no chunks: the events follow the header as they are."""
    step = service.engine.step

    def slow_step() -> Any:
        time.sleep(0.1)
        return step()

    body = json.dumps({"prompt": "a", "max_tokens": 3, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    monkeypatch.setattr("shoestring.serve.http.app.KEEP_ALIVE_S", 0.04)
    monkeypatch.setattr(service.engine, "step", slow_step)
    url = httpx.URL(service.url)
    with socket.create_connection((url.host, url.port), timeout=60) as raw:
        raw.sendall(head.encode() + body)
        received = b"".join(iter(lambda: raw.recv(65536), b"")).decode()
    header, _, events = received.partition("\r\n\r\n")
    assert "chunked" not in header.lower() and ": waiting\n\n" in events
    told = [line for line in events.split("\n\n") if line and line != ": waiting"]
    assert told[-1] == "data: [DONE]" and len(told) >= 2
    assert {json.loads(line.removeprefix("data: "))["object"] for line in told[:-1]} == {"text_completion"}


def test_chats_are_rendered_with_the_template(client: Any) -> None:
    messages = [{"role": "developer", "content": "Be brief."}, *HELLO]
    parts = [messages[0], {"role": "user", "content": [{"type": "text", "text": HELLO[0]["content"]}]}]
    rendered = "<system>Be brief.\n<user>Hello café 🙂\n<assistant>"
    expected = offline(chat_tokenizer().encode(rendered), max_tokens=20)
    for given in (messages, parts):
        answer = client.chat.completions.create(model="tiny", messages=given, temperature=0, max_completion_tokens=20)
        assert answer.choices[0].message.content == expected.text
        assert answer.choices[0].message.role == "assistant"
        assert answer.usage.prompt_tokens == expected.num_prompt
        assert answer.object == "chat.completion"
    # An answer can be sent back as it came.
    again = [*messages, answer.choices[0].message.model_dump(), *HELLO]
    assert client.chat.completions.create(model="tiny", messages=again, max_tokens=2).usage.prompt_tokens > 30


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_says_the_same_as_the_whole_answer(client: Any, n: int) -> None:
    ask = {"model": "tiny", "messages": HELLO, "seed": 3, "max_tokens": 30, "n": n, "logprobs": True}
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert len({(c.id, c.created, c.model, c.object) for c in chunks}) == 1
    assert chunks[0].object == "chat.completion.chunk"
    assert chunks[-1].choices == []
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(chunks[-1].usage, name) == getattr(whole.usage, name)
    assert all(c.usage is None for c in chunks[:-1])
    for choice in whole.choices:
        mine = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == choice.index]
        assert mine[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in mine) == choice.message.content
        assert [c.finish_reason for c in mine if c.finish_reason] == [choice.finish_reason]
        assert mine[-1].delta.content is None
        streamed = [t for c in mine if c.logprobs for t in c.logprobs.content]
        assert [t.bytes for t in streamed] == [t.bytes for t in choice.logprobs.content]
    assert len({c.message.content for c in whole.choices}) == n  # the choices differ
    if n > 1:  # the first choice is what n=1 says, and the prompt is counted once
        alone = client.chat.completions.create(**{**ask, "n": 1})
        assert alone.choices[0].message.content == whole.choices[0].message.content
        assert alone.usage.prompt_tokens == whole.usage.prompt_tokens


def test_a_drafter_changes_no_text_and_is_marked(client: Any) -> None:
    ask = {"model": "tiny", "prompt": "The dog. The dog. The", "max_tokens": 60, "temperature": 0.3, "seed": 2}
    biased = {**ask, "logit_bias": {"70": 3, "71": 3}, "frequency_penalty": -0.5, "logprobs": 1}
    expected = [client.completions.create(**a).choices[0] for a in (ask, biased)]
    with running(drafter="ngram") as service:
        drafted = openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0)
        got = [drafted.completions.create(**a).choices[0] for a in (ask, biased)]
        assert [g.text for g in got] == [e.text for e in expected]
        assert got[1].logprobs.tokens == expected[1].logprobs.tokens
        assert got[1].logprobs.token_logprobs == pytest.approx(expected[1].logprobs.token_logprobs, abs=1e-3)
        service.engine.drafting.controller = None  # always draft, whether it pays or not
        marked = {**biased, "logprobs": None, "stream": True, "extra_body": {"mark_drafts": True}}
        tokens = [t for c in drafted.completions.create(**marked) for t in c.choices[0].tokens]
        assert len(tokens) == len(expected[1].logprobs.tokens)
        spelt = b"".join(bytes(t["bytes"]) for t in tokens).decode(errors="replace")
        assert spelt.startswith(expected[1].text)
        assert 0 < sum(t["drafted"] for t in tokens) <= service.engine.stats.num_accepted
        metrics = httpx.get(f"{service.url}/metrics").text
        assert 'spec_decode_num_accepted_tokens_per_pos_total{model_name="tiny",position="0"}' in metrics


def test_the_mean_accepted_length_can_be_had_from_the_metrics() -> None:
    with running(drafter="ngram") as service:
        service.engine.drafting.controller = None  # always draft, whether it pays or not
        seen: list[tuple[int, int]] = []
        observe = service.engine.drafter.observe

        def watched(request: Any, num_drafted: int, num_accepted: int) -> None:
            seen.append((num_drafted, num_accepted))
            observe(request, num_drafted, num_accepted)

        service.engine.drafter.observe = watched
        # Two texts at once, so that a step has several drafts; repetitive, so that some are accepted.
        body = {"prompt": "The dog. The dog. The", "n": 2, "max_tokens": 60, "temperature": 0.3, "seed": 2}
        biased = {**body, "logit_bias": {"70": 3, "71": 3}, "frequency_penalty": -0.5, "ignore_eos": True}
        with httpx.Client(base_url=service.url, timeout=60) as http:
            assert http.post("/v1/completions", json=biased).status_code == 200
            told = _metrics(http)
        stats, kinds = service.engine.stats, ("drafts", "draft_tokens", "accepted_tokens")
        counted = [told[f'shoestring:spec_decode_num_{k}_total{{model_name="tiny"}}'] for k in kinds]
        assert counted == [stats.num_drafts, stats.num_drafted, stats.num_accepted]
        num_drafted, num_accepted = (sum(column) for column in zip(*seen, strict=True))
        assert counted == [len(seen), num_drafted, num_accepted]
        assert num_accepted > 0 and len(seen) < num_drafted  # else the three could be mixed up


def test_a_prompt_asked_again_is_cached(client: Any) -> None:
    prompt = "A prompt that nobody has asked before, long enough for some blocks of keys and values. " * 2
    cached = []
    for _ in range(2):
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=2)
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached[0] == 0 < cached[1] < answer.usage.prompt_tokens


def test_many_prompts_of_all_kinds_in_one_request(client: Any) -> None:
    tokenizer = chat_tokenizer()
    texts = ["The quick brown", "def main"]
    ids = [tokenizer.encode(t) for t in texts]
    ask = {"model": "tiny", "temperature": 0, "max_tokens": 6}
    by_text = client.completions.create(prompt=texts, **ask)
    by_ids = client.completions.create(prompt=ids, **ask)
    assert [c.text for c in by_text.choices] == [c.text for c in by_ids.choices]
    assert [c.index for c in by_text.choices] == [0, 1]
    assert by_text.choices[1].text == client.completions.create(prompt=ids[1], **ask).choices[0].text
    assert by_text.usage.prompt_tokens == sum(map(len, ids))
    # An empty text begins a new one.
    assert client.completions.create(prompt="", **ask).usage.prompt_tokens == 1


def test_seeds_decide_and_stop_strings_cut(client: Any) -> None:
    def say(**more: Any) -> Any:
        return client.completions.create(model="tiny", prompt="The", max_tokens=40, **more).choices[0]

    text = say(seed=1).text
    assert say(seed=1).text == text != say(seed=2).text
    stop = text[8:11]
    cut = say(seed=1, stop=[stop, "never seen"])
    assert cut.text == text[: text.index(stop)] and cut.finish_reason == "stop"
    streamed = client.completions.create(model="tiny", prompt="The", max_tokens=40, seed=1, stop=stop, stream=True)
    assert "".join(c.choices[0].text for c in streamed) == cut.text


SPLIT = "A 🦊🐻: né, 漢字𝄞!"  # characters that the tokenizer has not seen: up to four tokens each


def saying(ids: Sequence[int], num_prompt: int) -> Verifier:
    """A `verify` that lets every text be these tokens, whatever the model thinks."""

    def say(_logits: Any, checks: Sequence[Any]) -> list[list[int]]:
        return [[ids[(check.position - num_prompt) % len(ids)]] for check in checks]

    return as_verifier(say)


def test_characters_split_over_tokens_arrive_whole() -> None:
    tokenizer = chat_tokenizer()
    ids, prompt = tokenizer.encode(SPLIT), tokenizer.encode("The")
    chat = tokenizer.encode_chat(HELLO)
    assert [len(tokenizer.encode(c)) for c in "🦊𝄞"] == [3, 4]
    engine = Engine(served_model(tokenizer.vocab_size), tokenizer, verify=saying(ids, len(prompt)))
    with running() as service, httpx.Client(base_url=service.url, timeout=60) as http:
        ask = openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=60)
        named = ask.completions.create(model="gpt-4o", prompt=prompt, max_tokens=1)
        assert named.model == "tiny"  # a server without keys has one user and one model, whatever the client calls it
        for num in (3, 4, 5, len(ids) + 4):  # the first two end within the first 🦊, the last in the second
            expected = engine.generate([prompt], Sampling(max_tokens=num))[0].text
            assert expected == {3: "A ", 4: "A ", 5: "A 🦊"}.get(num, SPLIT + "A ")
            service.engine.pipeline.verify = saying(ids, len(prompt))
            body = {"model": "tiny", "prompt": prompt, "max_tokens": num}
            answer = ask.completions.create(**body)
            assert (answer.choices[0].text, answer.usage.completion_tokens) == (expected, num)
            pieces = [c.choices[0].text for c in ask.completions.create(**body, stream=True)]
            assert "".join(pieces) == expected
            sent = http.post("/v1/completions", json={**body, "stream": True}).text
            assert "\ufffd" not in sent and "\\ufffd" not in sent
            service.engine.pipeline.verify = saying(ids, len(chat))
            body = {"model": "tiny", "messages": HELLO, "max_tokens": num}
            assert ask.chat.completions.create(**body).choices[0].message.content == expected
            chunks = ask.chat.completions.create(**body, stream=True)
            assert "".join(c.choices[0].delta.content or "" for c in chunks) == expected
        # A stop string is found although it takes three tokens, too.
        cut = ask.chat.completions.create(model="tiny", messages=HELLO, max_tokens=num, stop=["🐻"])
        assert cut.choices[0].message.content == "A 🦊" and cut.choices[0].finish_reason == "stop"


def test_bias_penalties_and_min_tokens_change_the_text(client: Any) -> None:
    tokenizer = chat_tokenizer()
    (wanted,) = tokenizer.encode("e")

    def say(**more: Any) -> Any:
        ask = {"model": "tiny", "prompt": "The", "max_tokens": 12, "temperature": 0, **more}
        return client.completions.create(**ask).choices[0]

    assert say(logit_bias={str(wanted): 100}).text == "e" * 12
    # Each time it is written it loses 2; other tokens overtake it.
    assert set(say(logit_bias={str(wanted): 8}, frequency_penalty=2).text) > {"e"}
    end = str(tokenizer.eos_id)
    ended = say(logit_bias={end: 100})
    assert ended.text == "" and ended.finish_reason == "stop"
    kept = say(logit_bias={end: 100}, extra_body={"min_tokens": 5}, logprobs=0)
    assert kept.finish_reason == "stop" and len(kept.logprobs.tokens) == 6
    assert say(logit_bias={end: 100}, extra_body={"ignore_eos": True}).finish_reason == "length"


def test_chat_logprobs_name_tokens_and_bytes(client: Any) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=20, temperature=0, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0  # greedy: the likeliest
        assert bytes(entry.bytes).decode(errors="replace") == entry.token
    spelt = b"".join(bytes(e.bytes) for e in content).decode(errors="replace")
    assert spelt.startswith(answer.choices[0].message.content)
    assert client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=1).choices[0].logprobs is None


def test_echo_scores_prompts_as_lm_eval_wants_it(client: Any) -> None:
    """echo + logprobs + max_tokens 1: log-likelihoods of given tokens, the first one unknown."""
    import torch

    tokenizer = chat_tokenizer()
    model = served_model(tokenizer.vocab_size)
    prompts = [tokenizer.encode("The quick brown fox"), tokenizer.encode("return 0")]
    ask = {"model": "tiny", "temperature": 0, "seed": 1234, "echo": True, "logprobs": 1}
    answer = client.completions.create(prompt=prompts, max_tokens=1, **ask)
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([prompt]))[0].log_softmax(-1)
        told = choice.logprobs
        assert len(told.tokens) == len(prompt) + 1 and told.token_logprobs[0] is None
        mine = [expected[i, t].item() for i, t in enumerate(prompt[1:])]
        assert told.token_logprobs[1:-1] == pytest.approx(mine, abs=1e-4)
        assert told.token_logprobs[-1] == pytest.approx(expected[-1].max().item(), abs=1e-4)
        greedy = [p == max(top.values()) for p, top in zip(told.token_logprobs[1:], told.top_logprobs[1:], strict=True)]
        likeliest = expected.argmax(-1).tolist()
        assert greedy == [*(a == b for a, b in zip(likeliest, prompt[1:], strict=False)), True]
        assert choice.text.startswith(tokenizer.decode(prompt))
    # max_tokens 0 scores and writes nothing; without logprobs it only repeats.
    scored = client.completions.create(prompt=prompts, max_tokens=0, **ask)
    assert [c.logprobs.token_logprobs for c in scored.choices] == [
        c.logprobs.token_logprobs[:-1] for c in answer.choices
    ]
    assert scored.usage.completion_tokens == 0
    plain = client.completions.create(model="tiny", prompt="The quick", max_tokens=0, echo=True)
    assert plain.choices[0].text == "The quick"
    streamed = list(client.completions.create(prompt=prompts, max_tokens=1, stream=True, **ask))
    for i, choice in enumerate(answer.choices):
        mine = [c.choices[0] for c in streamed if c.choices[0].index == i]
        assert "".join(c.text for c in mine) == choice.text
        assert [p for c in mine for p in c.logprobs.token_logprobs] == choice.logprobs.token_logprobs
        assert [p for c in mine for p in c.logprobs.text_offset] == choice.logprobs.text_offset


def test_models_tokens_health_and_metrics(client: Any, service: Any) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with httpx.Client(base_url=service.url) as http:
        tokens = http.post("/tokenize", json={"prompt": "Bär 🙂"}).json()
        assert tokens["tokens"] == chat_tokenizer().encode("Bär 🙂") and tokens["count"] == len(tokens["tokens"])
        assert http.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": "Bär 🙂"}
        chat = http.post("/tokenize", json={"messages": HELLO}).json()
        assert chat["tokens"] == chat_tokenizer().encode_chat(HELLO)
        health = http.get("/health")
        assert health.status_code == 200 and health.json() == {"status": "ok"}
        before = _metrics(http)
        client.completions.create(model="tiny", prompt="The", max_tokens=9, seed=1, extra_body={"ignore_eos": True})
        after = _metrics(http)
        grown = {k: after[k] - before.get(k, 0.0) for k in after}
        label = '{model_name="tiny"}'
        assert grown[f"shoestring:generation_tokens_total{label}"] == 9
        assert grown[f"shoestring:prompt_tokens_total{label}"] == len(chat_tokenizer().encode("The"))
        assert grown['shoestring:request_success_total{finished_reason="length",model_name="tiny"}'] == 1
        assert grown[f"shoestring:time_to_first_token_seconds_count{label}"] == 1
        assert grown[f"shoestring:inter_token_latency_seconds_count{label}"] == 8
        assert grown[f"shoestring:e2e_request_latency_seconds_count{label}"] == 1
        assert after[f"shoestring:num_requests_running{label}"] == 0
        assert after[f"shoestring:kv_cache_usage_perc{label}"] == 0
        stats = http.get("/stats").json()
        assert stats["num_running"] == 0 and stats["chat"] is True
        page = http.get("/")
        assert page.status_code == 200 and "default-src 'none'" in page.headers["content-security-policy"]
        assert "frame-ancestors 'none'" in page.headers["content-security-policy"]  # no other site shows it as its own
        for path in ("/web/app.js", "/web/style.css"):
            assert path in page.text and http.get(path).status_code == 200


def _metrics(http: Any) -> dict[str, float]:
    lines = http.get("/metrics").text.splitlines()
    return {name: float(value) for name, value in (x.rsplit(" ", 1) for x in lines if not x.startswith("#"))}
