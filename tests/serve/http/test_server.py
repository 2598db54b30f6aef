"""The server under load and in trouble: queues, vanished clients, deadlines, a dead engine."""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import logging
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")
from serving import running, wait_for  # noqa: E402

from shoestring.errors import UserError  # noqa: E402
from shoestring.model import Tokenizer, save_model  # noqa: E402
from shoestring.serve import Engine, Sampling  # noqa: E402
from shoestring.serve.engine.logit_rules import SamplingWithRules, TokenLogprob  # noqa: E402
from shoestring.serve.http.engine_client import WAKE, EngineClient, OutputCollector  # noqa: E402
from shoestring.serve.http.engine_messages import (  # noqa: E402
    ChoiceDelta,
    EngineFacts,
    EngineSnapshot,
    PendingChoice,
    Report,
    deadline_error,
)
from shoestring.serve.http.engine_thread import kv_usage  # noqa: E402
from shoestring.serve.http.http_server import _LineFormatter  # noqa: E402
from shoestring.serve.http.responses import ENCODE, CompletionResponse  # noqa: E402
from shoestring.serve.http.server import EngineStuck, ServeOptions, Service, _name_of, listen, main  # noqa: E402
from tiny import chat_tokenizer, sentencepiece_fields, served_model  # noqa: E402

TEXT = "/v1/completions"
LONG = {"prompt": "The", "max_tokens": 4000, "ignore_eos": True, "seed": 1}


@pytest.fixture
def service() -> Iterator[Any]:
    with running(max_requests=2, max_queue=2) as started:
        yield started


def test_a_model_goes_by_the_name_of_its_run(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "config.json").write_text('{"recipe": "train/dense"}')
    (tmp_path / "other" / "model").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "second" / "model")
    names = {
        p: _name_of(tmp_path / p) for p in ("first", "first/model", "second/model", "other/model", "link", "x.gguf")
    }
    assert list(names.values()) == ["first", "first", "second", "model", "second", "x"]
    assert _name_of("org/name@main") == "name" == _name_of("org/more/name.gguf")


def open_stream(url: str, body: dict[str, Any]) -> socket.socket:
    """A client that has sent its request and read the first bytes of the answer."""
    host, port = url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)), timeout=120)
    content = json.dumps(body).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    client.sendall(head.encode() + f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return client


def memory_is_free(service: Any) -> bool:
    return service.client.num_open == 0 and not service.engine.busy and kv_usage(service.engine) == 0


def test_what_the_start_made_is_never_looked_at_for_garbage() -> None:
    gc.unfreeze()  # what conftest.py has frozen
    with running(max_requests=1, freezes=True) as service:
        wait_for(lambda: gc.get_freeze_count() > 10_000)
        assert httpx.get(f"{service.url}/health").status_code == 200
    wait_for(lambda: gc.get_freeze_count() == 0)
    gc.freeze()


def test_vanished_clients_free_their_places_at_once(service: Any) -> None:
    streaming = open_stream(service.url, {**LONG, "stream": True})
    assert b"200 OK" in streaming.recv(4096)
    waiting_whole = open_stream(service.url, LONG)
    wait_for(lambda: service.client.snapshot.num_running == 2)
    queued = open_stream(service.url, {**LONG, "stream": True})
    two_texts = open_stream(service.url, {**LONG, "n": 1})
    wait_for(lambda: service.client.num_open == 4)
    # Full: two run, two wait.
    full = httpx.post(service.url + TEXT, json=LONG)
    assert full.status_code == 429 and full.json()["error"]["code"] == "queue_full"
    assert 1 <= int(full.headers["retry-after"]) <= 60
    with pytest.raises(openai.RateLimitError):
        openai.OpenAI(base_url=f"{service.url}/v1", api_key="x", max_retries=0).completions.create(
            model="tiny", **{k: v for k, v in LONG.items() if k != "ignore_eos"}
        )
    queued.close()  # leaves the queue
    wait_for(lambda: service.client.num_open == 3)
    streaming.close()
    wait_for(lambda: service.client.num_open == 2)
    waiting_whole.close()
    two_texts.close()
    wait_for(lambda: memory_is_free(service))
    steps = service.engine.stats.num_steps
    assert steps < 3000  # nobody's 4000 tokens were computed
    answer = httpx.post(service.url + TEXT, json={**LONG, "max_tokens": 5})
    assert answer.json()["usage"]["completion_tokens"] == 5
    assert service.engine.stats.num_steps <= steps + 6


@pytest.mark.parametrize("stream", [False, True])
def test_memory_of_a_vanished_client_is_free_before_the_next_step(service: Any, stream: bool) -> None:
    """Exact in steps: the engine is stopped within one until the cancellation is in the thread's inbox."""
    engine, client, pool = service.engine, service.client, service.engine.cache.pool
    step, cancel = engine.step, client.cancel
    hold, held, noticed = threading.Event(), threading.Event(), threading.Event()
    starts: list[tuple[set[int], int, int]] = []  # at each step's: who runs, their blocks, all used blocks

    def watched_step() -> Any:
        blocks = sum(len(r.table.blocks) for r in engine.running)
        starts.append(({r.id for r in engine.running}, blocks, pool.num_used))
        if hold.is_set() and not noticed.is_set():
            held.set()
            assert noticed.wait(20)
        return step()

    def watched_cancel(choices: Any) -> None:
        cancel(choices)
        noticed.set()

    engine.step, client.cancel = watched_step, watched_cancel
    staying = open_stream(service.url, {**LONG, "prompt": "I stay", "stream": True})
    wait_for(lambda: len(engine.running) == 1)
    (kept,) = engine.running
    leaving = open_stream(service.url, {**LONG, "stream": stream})
    wait_for(lambda: any(len(running) == 2 for running, _, _ in starts))
    hold.set()
    wait_for(held.is_set)
    num_before = len(starts)
    assert starts[-1][0] > {kept.id} and not noticed.is_set()
    leaving.close()
    wait_for(lambda: len(starts) > num_before)
    running, blocks, used = starts[num_before]
    assert running == {kept.id} and used == blocks > 0
    # Alone, there is no next step at all.
    noticed.clear()
    held.clear()
    wait_for(held.is_set)
    num_before, num_steps = len(starts), engine.stats.num_steps
    staying.close()
    wait_for(lambda: memory_is_free(service))
    assert len(starts) == num_before and engine.stats.num_steps == num_steps + 1  # the one that was held


def test_concurrent_streams_are_whole_and_never_mixed() -> None:
    """Sixteen clients at once, a third of which leave midway: the others get what offline decoding gives."""
    tokenizer = chat_tokenizer()
    engine = Engine(served_model(tokenizer.vocab_size), tokenizer)
    sampling = [Sampling(temperature=0.9, seed=i, max_tokens=20 + i) for i in range(16)]
    prompts = [f"The {i} quick" for i in range(16)]
    expected = [c.text for c in engine.generate(prompts, sampling)]
    with running(max_requests=5, max_queue=20) as service:

        def ask(i: int) -> str | None:
            client = openai.OpenAI(base_url=f"{service.url}/v1", api_key="x", max_retries=0, timeout=60)
            asked = {"prompt": prompts[i], "temperature": 0.9, "seed": i, "max_tokens": 20 + i}
            stream = client.completions.create(model="tiny", stream=True, **asked)
            text = ""
            for chunk in stream:
                text += chunk.choices[0].text
                if i % 3 == 2 and len(text) > 3:
                    stream.close()
                    return None
            return text

        with ThreadPoolExecutor(16) as pool:
            got = list(pool.map(ask, range(16)))
        assert [t for t in got if t is not None] == [e for i, e in enumerate(expected) if got[i] is not None]
        assert sum(t is not None for t in got) >= 11
        wait_for(lambda: memory_is_free(service))


def test_deadlines_end_requests_with_an_error() -> None:
    with running(max_requests=1, max_queue=2, deadline_s=0.5) as service:
        late = httpx.post(service.url + TEXT, json=LONG, timeout=120)
        assert late.status_code == 408 and late.json()["error"]["code"] == "deadline_exceeded"
        assert late.headers["x-should-retry"] == "false"
        lines = httpx.post(service.url + TEXT, json={**LONG, "stream": True}, timeout=120).text.split("\n\n")
        assert json.loads(lines[-3][6:])["error"]["code"] == "deadline_exceeded"
        assert lines[-2:] == ["data: [DONE]", ""]
        wait_for(lambda: memory_is_free(service))


@pytest.mark.parametrize("path", [TEXT, "/v1/responses"])
def test_what_was_written_before_an_error_is_streamed(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the event loop is slow, the last tokens and the error are read together."""

    def submit(choices: Any, collector: OutputCollector) -> None:
        collector.put(0, ("one ", (1,)))
        collector.put(0, ("two", (2,)))
        collector.put(0, ChoiceDelta(error=deadline_error(choices[0])))

    with running(max_requests=1) as service:
        monkeypatch.setattr(service.client, "submit", submit)
        body = {"input" if path == "/v1/responses" else "prompt": "a", "stream": True}
        events = httpx.post(service.url + path, json=body, timeout=120).text.split("\n\n")
    told = [i for i, event in enumerate(events) if "one two" in event]
    assert told and told[0] < next(i for i, event in enumerate(events) if "deadline_exceeded" in event)


def test_a_dead_engine_is_told_and_never_shown() -> None:
    with running(max_requests=2) as service:
        broken = threading.Event()
        step = service.engine.step

        def breaking_step() -> Any:
            if broken.is_set():
                raise RuntimeError("secret detail")
            return step()

        service.engine.step = breaking_step
        client = open_stream(service.url, {**LONG, "stream": True})
        received = client.recv(65536)
        broken.set()
        while b"[DONE]" not in received:
            part = client.recv(65536)
            assert part
            received += part
        assert b"engine_dead" in received and b"secret" not in received and b"Traceback" not in received
        health = httpx.get(service.url + "/health")
        assert health.status_code == 503 and health.json() == {"status": "dead"}
        again = httpx.post(service.url + TEXT, json=LONG)
        assert again.status_code == 503 and again.json()["error"]["code"] == "engine_dead"
        assert httpx.get(service.url + "/metrics").status_code == 200


def test_a_stuck_engine_does_not_hold_its_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that never returns: deadlines, /health and the exit do not wait for it."""
    monkeypatch.setattr("shoestring.serve.http.app.LATE_S", 0.1)
    monkeypatch.setattr("shoestring.serve.http.server.STOP_S", 0.3)
    tokenizer = chat_tokenizer()
    options = ServeOptions(max_requests=2, max_queue=4, deadline_s=0.4, drain_s=0.1)
    service = Service(served_model(tokenizer.vocab_size), tokenizer, options, listen("127.0.0.1", 0), "tiny")
    step, stuck, release, ended = service.engine.step, threading.Event(), threading.Event(), []

    def stuck_step() -> Any:
        stuck.set()
        assert release.wait(60)
        return step()

    def run() -> None:
        try:
            service.run()
        except EngineStuck as error:
            ended.append(str(error))

    service.engine.step = stuck_step  # type: ignore[method-assign]
    server = threading.Thread(target=run, daemon=True)
    server.start()
    wait_for(lambda: service.server.started)
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(httpx.post, service.url + TEXT, json=LONG | {"stream": s}) for s in (False, True)]
        assert stuck.wait(20)
        whole, stream = (a.result(20) for a in asked)
        assert whole.status_code == 408 and whole.json()["error"]["code"] == "deadline_exceeded"
        assert stream.text.endswith("data: [DONE]\n\n") and "deadline_exceeded" in stream.text
        health = httpx.get(service.url + "/health")
        assert health.status_code == 503 and health.json()["status"] == "stuck"
        last = pool.submit(httpx.post, service.url + TEXT, json=LONG)
        wait_for(lambda: service.client.num_open == 3, 10)
        service.stop()
        assert last.result(20).json()["error"]["code"] in ("draining", "deadline_exceeded")  # whichever comes first
    server.join(20)
    assert not server.is_alive() and "stuck in a step" in ended[0]
    release.set()  # what the engine still writes has no readers
    wait_for(lambda: not service.engine_thread.alive, 10)
    assert service.client.num_open == 0 and not service.engine.busy


def test_unread_text_is_merged_not_piled_up() -> None:
    async def read() -> list[Any]:
        box = OutputCollector()
        for i in range(6):
            box.put(i % 2, ChoiceDelta(str(i), (i,), drafted=(i == 4,)) if i in (0, 4) else (str(i), (i,)))
        first = await asyncio.wait_for(box.take(), 5)
        box.put(1, ChoiceDelta("x", (9,), finish_reason="stop"))
        second = await asyncio.wait_for(box.take(), 5)
        reader = asyncio.ensure_future(box.take())
        await asyncio.sleep(0)  # it waits
        box.put(1, ("y", (8,)))
        assert await asyncio.wait_for(reader, 5) == {1: ChoiceDelta("y", (8,), drafted=(False,))}
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(box.take(), 0.01)
        box.remind()
        assert await asyncio.wait_for(box.take(), 5) == {}
        box.close()
        return [first, second, await asyncio.wait_for(box.take(), 5)]

    first, second, third = asyncio.run(read())
    drafted = (False, False, True)
    assert first == {
        0: ChoiceDelta("024", (0, 2, 4), drafted=drafted),
        1: ChoiceDelta("135", (1, 3, 5), drafted=(False,) * 3),
    }
    assert second == {1: ChoiceDelta("x", (9,), finish_reason="stop")} and third is None


def test_the_event_loop_looks_for_requests_between_the_events_of_many_texts() -> None:
    order: list[Any] = []

    async def read(number: int, box: OutputCollector) -> None:
        for _ in range(2):
            order.append((number, await box.take()))

    async def serve() -> None:
        facts = EngineFacts(300, 64, 16, (0,), True, 100, 100)
        client = EngineClient(facts, SimpleNamespace(post=lambda _: None), chat_tokenizer(), EngineSnapshot())  # type: ignore[arg-type]
        boxes = [OutputCollector() for _ in range(70)]
        for box in boxes:
            client.submit([PendingChoice([1], SamplingWithRules(stop=("x",)))], box)
        readers = [asyncio.ensure_future(read(number, box)) for number, box in enumerate(boxes)]
        await asyncio.sleep(0)
        numbers = list(client._open)
        client.receive(Report((numbers, ["a"] * 70, [5] * 70)))
        asyncio.get_running_loop().call_soon(order.append, "a request")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        client.receive(Report((numbers, ["b"] * 70, [6] * 70)))  # while some readers of the first still wait
        await asyncio.wait_for(asyncio.gather(*(asyncio.wait({r}, timeout=0.2) for r in readers)), 5)
        for reader in readers:
            reader.cancel()

    asyncio.run(serve())
    assert order.index("a request") <= WAKE
    found: dict[int, str] = {}
    for number, told in filter(lambda one: one != "a request", order):
        found[number] = found.get(number, "") + told[0].text
    assert found == dict.fromkeys(range(70), "ab")


def test_a_text_goes_on_where_the_prompt_ends() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_fields())
    the = tokenizer.backend.token_to_id("▁the")

    async def serve() -> str:
        facts = EngineFacts(300, 64, 16, (0,), True, 100, 100)
        client = EngineClient(facts, SimpleNamespace(post=lambda _: None), tokenizer, EngineSnapshot())  # type: ignore[arg-type]
        box = OutputCollector()
        client.submit([PendingChoice(tokenizer.encode("in a"), SamplingWithRules())], box)
        client.receive(Report((list(client._open), [""], [the])))
        return (await box.take())[0].text  # type: ignore[index]

    assert asyncio.run(serve()) == " the"


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("streams", [False, True])
def test_offsets_of_tokens_are_places_in_the_text(kind: str, echo: bool, streams: bool) -> None:
    tokenizer = chat_tokenizer() if kind == "bytes" else Tokenizer.from_gguf(sentencepiece_fields())
    end = tokenizer.special["eos_token"]
    asked, told = f"the{end}\U0001f600n", "he\U0001f600 the"
    prompt = [tokenizer.bos_id, *tokenizer.encode(asked, special=False)]
    new = [*tokenizer.encode(told, special=False)[kind != "bytes" :], tokenizer.eos_id, tokenizer.encode("\u00e9")[-2]]
    made = CompletionResponse("m", tokenizer, [prompt], [asked] if echo else None, 1, True, False)
    stream, pieces = tokenizer.stream(after=prompt), list[dict[str, Any]]()
    for i, token in enumerate(new):
        last = i == len(new) - 1
        delta = ChoiceDelta(
            *(stream.step(token), (token,), (TokenLogprob(token, -1.0, ()),)),
            prompt_logprobs=(None, *(TokenLogprob(t, -1.0, ()) for t in prompt[1:])) if echo and not i else None,
            finish_reason="length" if last else None,
        )
        made.add(0, delta)
        if streams:
            pieces += [json.loads(event[6:])["choices"][0] for event in made.chunks(0, delta)]
    if not streams:
        pieces = made.whole()["choices"]
    text = "".join(piece["text"] for piece in pieces)
    assert text == asked * echo + told
    names = [name for piece in pieces for name in piece["logprobs"]["tokens"]]
    places = [place for piece in pieces for place in piece["logprobs"]["text_offset"]]
    assert len(names) == len(places) == len(new) + len(prompt) * echo
    for i, (name, place) in enumerate(zip(names, places, strict=True)):
        if name.startswith("bytes:"):
            assert text[place : place + 1] in ("\U0001f600", "")  # all of its tokens; the last character is not whole
        elif name != end and name != tokenizer.special["bos_token"]:
            begins = name.lstrip() if i < len(prompt) * echo else name  # SentencePiece has more spaces than the prompt
            assert text.startswith(begins, place), (name, place)
    if echo:
        assert places[: len(prompt)].count(0) == 2 and places[len(prompt)] == len(asked)
        assert text.startswith(end, places[prompt.index(tokenizer.eos_id, 1)])


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("usage", [False, True])
def test_events_of_a_text_alone_are_the_bytes_that_the_library_writes(chat: bool, usage: bool) -> None:
    made = CompletionResponse("a model", chat_tokenizer(), [[1]] * 2, None, 1, False, chat, include_usage=usage)
    for text in ("first", 'a "quoted"\\ line\n\t\x00\x1f\x7f', "\u00e9\u2028\U0001f600", "</script>"):
        delta = ChoiceDelta(text, (5,), drafted=(False,))
        made.add(1, delta)
        *_, told = made.chunks(1, delta)
        head, choices = json.loads(told[6:]), {"delta": {"content": text}} if chat else {"text": text}
        assert head["choices"] == [{"index": 1, **choices, "logprobs": None, "finish_reason": None}]
        assert head.get("usage", "none") == (None if usage else "none")
        assert told == f"data: {ENCODE(head)}\n\n"


def test_the_number_of_texts_follows_the_machine_where_none_is_given() -> None:
    with running() as service:
        measured = service.engine_thread.max_running
        assert 1 <= measured <= 32 and service.engine.scheduler.max_requests == measured  # type: ignore[union-attr]
        assert service.client.facts.max_queue == 64
    with running(max_requests=3, max_queue=1) as service:
        assert service.engine_thread.max_running == 3 and service.client.facts.max_queue == 1


def test_a_drain_that_takes_too_long_says_so() -> None:
    with running(drain_s=0.1) as service:
        client = open_stream(service.url, {**LONG, "stream": True})
        received = client.recv(65536)
        service.stop()
        while part := client.recv(65536):
            received += part
        assert b"shut down before this text was finished" in received and b"[DONE]" in received


def test_bad_options_are_said_before_the_model_is_loaded() -> None:
    with pytest.raises(UserError, match="port=70000"):
        ServeOptions(port=70000)
    with pytest.raises(UserError, match=r"host='' is not allowed; give .* 0\.0\.0\.0 for all"):
        ServeOptions(host="")  # a socket would take it for every address
    with pytest.raises(UserError, match="API key is empty"):
        ServeOptions(api_keys=(" ",))
    with listen("127.0.0.1", 0) as taken, pytest.raises(UserError, match="cannot listen"):
        listen("127.0.0.1", taken.getsockname()[1])


@pytest.mark.parametrize(
    ("text", "message"), [("{{ bos_token }}\n{% for m in %}", "line 2: Expected an expression"), ("", "it is empty")]
)
def test_a_broken_chat_template_is_said_before_the_model_is_loaded(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "chat.jinja").write_text(text)
    with pytest.raises(UserError, match=rf"chat\.jinja is broken, {message}"):
        main(tmp_path / "no model", ServeOptions(port=0, chat_template=tmp_path / "chat.jinja"))


@pytest.mark.parametrize("own", [False, True])
def test_a_model_with_a_broken_chat_template_is_served_with_a_warning(
    own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = chat_tokenizer()
    working, tokenizer.chat_template = tokenizer.chat_template, "{% endfor %}"
    folder = save_model(tmp_path / "tiny", served_model(tokenizer.vocab_size), tokenizer)
    (tmp_path / "chat.jinja").write_text(str(working))
    monkeypatch.setattr("shoestring.serve.http.server.log_to_stderr", lambda: None)
    monkeypatch.setattr(Service, "run", lambda self, on_started: on_started())
    with caplog.at_level("INFO", logger="shoestring.serve"):
        main(folder, ServeOptions(port=0, chat_template=tmp_path / "chat.jinja" if own else None))
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "serving tiny at http://127.0.0.1:" in caplog.text
    assert len(warnings) == (0 if own else 1)
    assert own or "tiny is broken, line 1: Encountered unknown tag 'endfor'" in warnings[0]


def test_a_line_of_the_log_is_as_the_library_writes_it() -> None:
    plain = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    ours = _LineFormatter()
    for created in (1.0, 1.9996, 2.001, 86_399.5, 1.5, 1.8e9):
        record = logging.makeLogRecord({"created": created, "msecs": created % 1 * 1000, "levelname": "INFO"})
        record.msg, record.args = "%s of %d", ("a line", 2)
        assert ours.format(record) == plain.format(record)
    record.exc_info = (UserError, UserError("why"), None)
    assert ours.format(record) == plain.format(record) and "UserError: why" in ours.format(record)


def test_without_fastapi_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("server", "http_process", "http_server", "app"):
        monkeypatch.delitem(sys.modules, f"shoestring.serve.http.{name}")
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(UserError, match=r"fastapi.*pip install 'shoestring\[serve\]'"):
        importlib.import_module("shoestring.serve.http.server")
