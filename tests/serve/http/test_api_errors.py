"""Everything a client can do wrong: a 4xx with OpenAI's error object, and the server goes on."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.client import HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import quote_from_bytes

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")
from serving import nothing_is_left, running, wait_for  # noqa: E402

from shoestring.serve.http.grammar import Grammars  # noqa: E402
from shoestring.serve.http.request_parsing import Limits, parse_chat  # noqa: E402
from shoestring.serve.http.request_schema import ApiError, ChatBody  # noqa: E402
from shoestring.serve.http.responses import CompletionResponse  # noqa: E402
from tiny import chat_tokenizer  # noqa: E402

HELLO = [{"role": "user", "content": "Hello"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CONTEXT = 48  # so that a text without a limit of its own is soon over


@pytest.fixture(scope="module")
def service() -> Iterator[Any]:
    limits = {"max_requests": 4, "max_queue": 4, "max_context": CONTEXT, "max_body_mb": 1}
    with running(api_keys=("first", "second"), **limits) as started:
        yield started


@pytest.fixture(scope="module")
def http(service: Any) -> Iterator[Any]:
    headers = {"Authorization": "Bearer second", "Content-Type": "application/json"}
    with httpx.Client(base_url=service.url, headers=headers, timeout=60) as client:
        yield client


def refused(response: Any, status: int, *words: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text
    for word in words:
        assert word in error["message"]
    return error


def test_the_openai_client_raises_its_own_errors(service: Any) -> None:
    def client(key: str) -> Any:
        return openai.OpenAI(base_url=f"{service.url}/v1", api_key=key, max_retries=0)

    with pytest.raises(openai.AuthenticationError) as wrong_key:
        client("third").models.list()
    assert wrong_key.value.code == "invalid_api_key"
    good = client("first").chat.completions
    with pytest.raises(openai.NotFoundError) as wrong_model:
        good.create(model="gpt-4o", messages=HELLO)
    assert wrong_model.value.code == "model_not_found" and "'tiny'" in wrong_model.value.message
    with pytest.raises(openai.BadRequestError) as misspelt:
        good.create(model="tiny", messages=HELLO, extra_body={"top_kk": 3})
    assert misspelt.value.param == "top_kk" and "'top_k'" in misspelt.value.message
    with pytest.raises(openai.BadRequestError) as too_long:
        good.create(model="tiny", messages=[{"role": "user", "content": "x " * 5000}])
    assert too_long.value.code == "context_length_exceeded"
    answer = good.create(model="tiny", messages=HELLO, max_tokens=2, user="me", store=False, tools=[])
    assert answer.usage.completion_tokens <= 2


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_defect_is_logged_and_not_shown(
    service: Any, http: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    def fail(*_given: object) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(service.engine_thread, "metrics_text", fail)
    monkeypatch.setattr("shoestring.serve.http.app.tokenize", fail)
    path, body = ("/metrics", None) if method == "GET" else ("/tokenize", {"prompt": "a"})
    response = http.request(method, path, json=body)
    refused(response, 500, "internal error", response.headers["x-request-id"])
    assert "secret" not in response.text
    wait_for(lambda: "RuntimeError: a secret" in caplog.text)
    assert caplog.text.count("Traceback") == 1 and f"{response.headers['x-request-id']} failed" in caplog.text


def test_a_panic_of_a_library_while_a_small_request_is_read_is_a_defect_too(
    http: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Panic(BaseException):  # of a library in Rust
        pass

    def panic(*_given: object) -> None:
        raise Panic("a secret")

    monkeypatch.setattr("shoestring.serve.http.app.parse_completion", panic)
    response = http.post(TEXT, json={"prompt": "a"})
    refused(response, 500, "internal error", response.headers.get("x-request-id", ""))
    wait_for(lambda: "Panic: a secret" in caplog.text)


def test_a_stream_ends_with_the_error_of_the_thread_that_writes_it(
    http: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_given: object) -> None:
        raise ApiError(503, "too much to do", code="overloaded")

    monkeypatch.setattr("shoestring.serve.http.app.RENDERED_INLINE", -1)
    monkeypatch.setattr(CompletionResponse, "chunks", refuse)
    told = http.post(TEXT, json={"prompt": "a", "max_tokens": 2, "stream": True}).text
    assert json.loads(told.removeprefix("data: ").partition("\n")[0])["error"]["code"] == "overloaded"
    assert told.endswith("data: [DONE]\n\n") and "Traceback" not in caplog.text


def test_who_leaves_while_a_thread_writes_is_no_defect(
    service: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writes, may_end = threading.Event(), threading.Event()

    def wait(*_given: object) -> list[str]:
        writes.set()
        assert may_end.wait(60)
        return []

    monkeypatch.setattr("shoestring.serve.http.app.RENDERED_INLINE", -1)
    monkeypatch.setattr(CompletionResponse, "chunks", wait)
    body = json.dumps({"prompt": "a", "max_tokens": 20, "ignore_eos": True, "stream": True})
    head = (
        f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer first\r\nContent-Type: application/json\r\n"
    )
    url = httpx.URL(service.url)
    with socket.create_connection((url.host, url.port), timeout=60) as client:  # nothing is told before the first token
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        assert writes.wait(60)
    wait_for(lambda: not service.server.server_state.tasks)
    may_end.set()
    wait_for(lambda: nothing_is_left(service))
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (TEXT, {}, "prompt must be"),
        (TEXT, {"prompt": []}, "prompt must be"),
        (TEXT, {"prompt": [[1, 2], []]}, "prompt must be"),
        (TEXT, {"prompt": [1, True]}, "prompt must be"),
        (TEXT, {"prompt": [[1, 99999]]}, "token id 99999"),
        (TEXT, {"prompt": [-1]}, "token id -1"),
        (TEXT, {"prompt": "a", "max_tokens": -1}, "max_tokens"),
        (TEXT, {"prompt": "a", "max_tokens": "5"}, "max_tokens"),
        (TEXT, {"prompt": "a", "temperature": "1"}, "temperature"),
        (TEXT, {"prompt": "a", "n": 0}, "n:"),
        (TEXT, {"prompt": "a", "n": 10**9}, "at most 7"),
        (TEXT, {"prompt": ["a"] * 9}, "at most 7"),
        (TEXT, {"prompt": "a", "logprobs": 21}, "logprobs"),
        (TEXT, {"prompt": "a", "logprobs": True}, "logprobs"),
        (TEXT, {"prompt": "a", "stop": ""}, "stop must be"),
        (TEXT, {"prompt": "a", "stop": ["a"] * 17}, "stop must be"),
        (TEXT, {"prompt": "a", "stop": {"a": 1}}, "stop must be"),
        (TEXT, {"prompt": "a", "suffix": "b"}, "suffix is not supported"),
        (TEXT, {"prompt": "a", "best_of": 4}, "best_of"),
        (TEXT, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        (TEXT, {"prompt": "a", "logit_bias": {"99999": 1}}, "99999"),
        (TEXT, {"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias"),
        (TEXT, {"prompt": "a", "min_tokens": 17}, "min_tokens=17"),
        (TEXT, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options needs"),
        (TEXT, {"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        (TEXT, {"prompt": "x" * 20000}, "context"),
        (CHAT, {}, "messages must be"),
        (CHAT, {"messages": []}, "messages must be"),
        (CHAT, {"messages": ["hi"]}, "messages[0]"),
        (CHAT, {"messages": [{"role": "robot", "content": "hi"}]}, "'robot'"),
        (CHAT, {"messages": [{"role": ["user"], "content": "hi"}]}, "role"),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "tool_calls"),
        (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}, "tools[0] must be"),
        (CHAT, {"messages": HELLO, "response_format": {"type": "json_schema"}}, "json_schema.schema"),
        (CHAT, {"messages": HELLO, "response_format": {"type": "xml"}}, "response_format"),
        (CHAT, {"messages": HELLO, "top_logprobs": 2}, "needs logprobs"),
        (CHAT, {"messages": HELLO, "max_completion_tokens": 0}, "max_completion_tokens"),
        (CHAT, {"messages": HELLO, "stream": "yes"}, "stream"),
        ("/tokenize", {}, "either prompt or messages"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {"tokens": [99999]}, "99999"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
    ],
)
def test_bad_values_are_named(http: Any, path: str, body: dict[str, Any], words: str) -> None:
    assert refused(http.post(path, json=body), 400, words)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("temperature", (-0.1, 1e7), (0.0, 1e-300, 1e6)),
        ("top_k", (-2, 2**31 + 1, 10**400), (-1, 0, 2**31)),
        ("top_p", (-0.1, 1.5), (0.0, 5e-324, 1.0)),
        ("min_p", (-0.1, 1.5), (0.0, 1.0)),
        ("seed", (-(2**63) - 1, 2**64), (-(2**63), 2**64 - 1)),
    ],
)
def test_the_command_line_takes_and_refuses_the_same(
    http: Any, command: Callable[..., str], name: str, bad: tuple[float, ...], good: tuple[float, ...], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")  # found before settings are checked, and broken when it is loaded
    for value in (*bad, *good):
        said = {
            command(*verb, f"--{name.replace('_', '-')}={value}", fails=True)
            for verb in (("generate", tmp_path, "hi"), ("chat", tmp_path))
        }
        answer = http.post(TEXT, json={"prompt": "a", "max_tokens": 2, name: value})
        if value in bad:
            error = refused(answer, 400, "is not allowed; it must be")
            assert error["param"] == name and said == {f"error: {error['message']}\n"}
        else:
            assert answer.status_code == 200 and all("config.json" in line for line in said)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"messages": [{"role": "user", "content": "\\udfff"}]}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"a":' * 20000 + b"1" + b"}" * 20000,
        b'{"prompt": ' + b"[" * 20000 + b"]" * 20000 + b"}",
    ],
    ids=lambda b: repr(b[:40]),
)
@pytest.mark.parametrize("path", [TEXT, CHAT, "/tokenize"])
def test_bodies_that_are_no_good_json(http: Any, path: str, body: bytes) -> None:
    refused(http.post(path, content=body), 400)


def test_paths_methods_types_sizes_and_keys(http: Any, service: Any) -> None:
    refused(http.get("/v1/nothing"), 404, "/v1/nothing")
    refused(http.get("/web/api.py"), 404)
    refused(http.get("/web/..%2Fapi.py"), 404)
    refused(http.get("/v1/models/other"), 404, "other")
    refused(http.get(TEXT), 405, f"{TEXT} does not take GET; it takes POST")
    refused(http.post(TEXT, content=b'{"prompt": "a"}', headers={"Content-Type": "text/plain"}), 415)
    # Too large, with and without its size said beforehand; the connection is good for the next request.
    big = json.dumps({"prompt": "a" * (3 << 20)}).encode()
    refused(http.post(TEXT, content=big), 413, "1048576")
    refused(http.post(TEXT, content=(big[i : i + 65536] for i in range(0, len(big), 65536))), 413)
    assert http.post(TEXT, json={"prompt": "a", "max_tokens": 1}).status_code == 200
    for headers in ({}, {"Authorization": "second"}, {"Authorization": "Basic second"}, {"Authorization": "Bearer x"}):
        answer = httpx.post(service.url + TEXT, json={"prompt": "a"}, headers=headers)
        assert refused(answer, 401)["type"] == "authentication_error"
        assert answer.headers["www-authenticate"] == "Bearer"
    assert httpx.get(service.url + "/metrics").status_code == 401
    assert httpx.get(service.url + "/health").status_code == 200
    # CORS is off: another site's page learns nothing.
    asked = {"Origin": "https://other.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in httpx.options(service.url + TEXT, headers=asked).headers
    # A request id comes back, and one that could break a log line does not.
    assert http.get("/version", headers={"X-Request-Id": "abc123"}).headers["x-request-id"] == "abc123"
    assert http.get("/version", headers={"X-Request-Id": "a b"}).headers["x-request-id"] != "a b"


def test_a_body_of_10_mb_is_refused_by_default() -> None:
    text = b'{"prompt": "' + b"a" * (10 << 20) + b'"}'
    headers = {"Content-Type": "application/json"}
    with running() as service, httpx.Client(base_url=service.url, timeout=60, headers=headers) as client:
        for path in (TEXT, CHAT, "/tokenize", "/detokenize"):
            for body in (text, b"\0" * (10 << 20)):
                error = refused(client.post(path, content=body), 413, str(4 << 20))
                assert error["code"] == "too_large" and error["type"] == "invalid_request_error"
        parts = (text[i : i + 65536] for i in range(0, len(text), 65536))  # its size is not said beforehand
        refused(client.post(TEXT, content=parts), 413, str(4 << 20))
        assert nothing_is_left(service) and service.engine.stats.num_steps == 0
        answer = client.post(TEXT, json={"prompt": "a", "max_tokens": 2, "ignore_eos": True})
        assert answer.json()["usage"]["completion_tokens"] == 2
        assert client.get("/health").json() == {"status": "ok"}


def test_cors_and_missing_chat_template() -> None:
    with running(allow_origins=("https://app.example",)) as service:
        service.engine_thread.engine.tokenizer.chat_template = None
        asked = {
            "Origin": "https://app.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        }
        allowed = httpx.options(service.url + CHAT, headers=asked)
        assert allowed.headers["access-control-allow-origin"] == "https://app.example"
        asked["Origin"] = "https://other.example"
        assert httpx.options(service.url + CHAT, headers=asked).status_code == 400
        refused(httpx.post(service.url + CHAT, json={"messages": HELLO}), 400, "no chat template")
        assert httpx.get(service.url + "/stats").json()["chat"] is False


@pytest.mark.parametrize("path", ["/", "/web/app.js", "/web/style.css"])
def test_a_page_comes_whole_whatever_range_is_asked_for(service: Any, path: str) -> None:
    whole = httpx.get(service.url + path)
    assert whole.status_code == 200 and whole.headers["x-content-type-options"] == "nosniff"
    for asked in ("bytes=0-1", "bytes=9-1", "bytes=0-0,2-3,99999999999-", "x"):
        part = httpx.get(service.url + path, headers={"Range": asked})
        assert (part.status_code, part.content) == (200, whole.content)


# -- any request at all; tests/fuzz has any body ----------------------------------------------------------------


def fuzzed(num: int) -> settings:
    return settings(max_examples=num, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


ROUTES = [
    *(TEXT, CHAT, "/tokenize", "/detokenize", "/tokenizer_info", "/v1/models", "/v1/models/tiny"),
    *("/health", "/metrics", "/stats", "/version", "/", "/web/app.js"),
]
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "BREW"]
# Bytes as they are would end a line or a header; everything else is the server's to judge.
line_st = st.binary(max_size=12).map(lambda b: b.translate(None, b"\r\n"))
target_st = st.one_of(
    st.sampled_from(ROUTES).map(str.encode),
    st.builds(
        lambda route, more: (route + more).encode(),
        st.sampled_from(ROUTES),
        st.sampled_from(["/", "/..", "/%2e%2e/%2e%2e/etc/passwd", "%00", "%ff", ";a", "//", "/../health"]),
    ),
    st.builds(
        lambda folder, name: (folder + quote_from_bytes(name)).encode(),
        st.sampled_from(["/", "/v1/models/", "/web/"]),
        st.binary(max_size=12),
    ),
    line_st.map(lambda b: b"/" + b),
)
query_st = st.one_of(
    st.just(b""),
    st.sampled_from([b"?", b"?a=1&a=2", b"?stream=true", b"?api_key=second", b"?%ff=%", b"?" + b"x" * 3000]),
    st.binary(max_size=12).map(lambda b: b"?" + quote_from_bytes(b).encode()),
)
KEY = b"Bearer second"
JSON = b"application/json"
HEADERS: dict[bytes, st.SearchStrategy[bytes]] = {
    b"Authorization": st.sampled_from([b"", b"Bearer", b"Bearer  ", b"Basic c2Vjb25k", b"bearer second"])
    | line_st.map(lambda b: b"Bearer " + b)
    | line_st,
    b"Content-Type": st.sampled_from([b"", b"text/plain", b"application/json; charset=latin-1", b"APPLICATION/JSON"])
    | line_st,
    b"Accept": st.sampled_from([b"text/event-stream", b"*/*;q=x"]) | line_st,
    b"Accept-Encoding": st.just(b"gzip, br") | line_st,
    b"Content-Encoding": st.just(b"gzip") | line_st,
    b"Expect": st.just(b"100-continue") | line_st,
    b"Origin": st.just(b"https://other.example") | line_st,
    b"Range": st.sampled_from([b"bytes=0-1", b"bytes=9-1", b"bytes=-", b"bytes=0-0,2-3,99999999999-"]) | line_st,
    b"If-None-Match": line_st,
    b"X-Request-Id": st.just(b"a" * 65) | line_st,
    b"X-Forwarded-For": line_st,
    b"Cookie": line_st,
}
body_st = st.one_of(
    st.just(b""),
    st.binary(max_size=30),
    st.sampled_from([b'{"prompt": "a", "max_tokens": 2}', b'{"messages": [{"role": "user", "content": "a"}]}']),
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    """A method and the bytes of a request with it, whose end can be told."""
    method = draw(st.sampled_from(METHODS))
    target, query, body = draw(target_st), draw(query_st), draw(body_st)
    # Mostly with the right key and type: what is refused for these tests nothing behind them.
    given_headers = {b"Authorization": KEY, b"Content-Type": JSON}
    for name in draw(st.lists(st.sampled_from(sorted(HEADERS)), max_size=3, unique=True)):
        given_headers[name] = draw(HEADERS[name])
    given_headers |= {b"Host": b"x", b"Connection": b"close", b"Content-Length": str(len(body)).encode()}
    head = b"".join(name + b": " + value + b"\r\n" for name, value in given_headers.items())
    return method, method.encode() + b" " + target + query + b" HTTP/1.1\r\n" + head + b"\r\n" + body


def answered(service: Any, method: str, sent: bytes) -> tuple[int, str, bytes]:
    """Status, content type and body of the answer to these bytes; no client of ours puts them right."""
    host, port = service.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=120) as client:
        client.sendall(sent)
        answer = HTTPResponse(client, method=method)
        answer.begin()
        return answer.status, answer.getheader("Content-Type", ""), answer.read()


@fuzzed(250)
@given(requests())
def test_no_request_makes_the_server_fail(service: Any, given_request: tuple[str, bytes]) -> None:
    method, sent = given_request
    status, kind, body = answered(service, method, sent)
    assert 200 <= status < 500, (sent, status, body)
    assert b"Traceback" not in body, (sent, body)
    if status == 400 and kind.startswith("text/plain"):
        return  # no HTTP: said by uvicorn, before anything of ours has seen it
    if status >= 400 and method != "HEAD":
        assert kind == "application/json", (sent, kind, body)
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    path = sent.split(b" ", 2)[1].split(b"?")[0]
    has_key = b"earer second\r\n" in sent
    assert (status == 401) == (not has_key and path not in (b"/", b"/health", b"/web/app.js")), (sent, status)
    wait_for(lambda: nothing_is_left(service))


def test_the_server_is_still_well(http: Any, service: Any) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    assert nothing_is_left(service)
    assert chat_tokenizer().vocab_size == service.engine.model.spec.vocab_size


def test_a_chat_whose_tokens_the_model_does_not_have_is_refused_when_it_is_parsed() -> None:
    """The engine thread adds prompts without another check: a vocabulary smaller than the tokenizer's shows here."""
    tokenizer = chat_tokenizer()
    body = ChatBody.parse({"messages": [{"role": "user", "content": "hello"}]})
    limits = Limits(tokenizer.vocab_size, 64, max_texts=1)
    parsed = parse_chat(body, tokenizer, limits, Grammars(tokenizer, tokenizer.vocab_size, ()))
    vocab = max(parsed.prompts[0])  # one too small
    with pytest.raises(ApiError, match=f"token id {vocab} is outside the vocabulary") as refused:
        parse_chat(body, tokenizer, replace(limits, vocab_size=vocab), Grammars(tokenizer, vocab, ()))
    assert refused.value.status == 400
