"""HTTP in a process of its own: messages survive the way, features work over it, and each process notices the end of
the other."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

httpx = pytest.importorskip("httpx")
from serving import wait_for  # noqa: E402

from shoestring.model import save_model  # noqa: E402
from shoestring.serve.engine.logit_rules import LogitRules, SamplingWithRules, TokenLogprob  # noqa: E402
from shoestring.serve.http import http_process  # noqa: E402
from shoestring.serve.http.app import SILENT_S  # noqa: E402
from shoestring.serve.http.engine_client import EngineClient  # noqa: E402
from shoestring.serve.http.engine_messages import (  # noqa: E402
    CODEC,
    ChoiceDelta,
    EmbeddingJob,
    EngineFacts,
    EngineSnapshot,
    PendingChoice,
    Report,
    frame,
    received,
)
from shoestring.serve.http.grammar import GrammarSource  # noqa: E402
from shoestring.serve.http.http_process import EngineConnection, HttpProcess, HttpProcessLost  # noqa: E402
from shoestring.serve.http.message_codec import LOCAL, FrameReader  # noqa: E402
from shoestring.serve.http.request_schema import ApiError  # noqa: E402
from shoestring.state.reshard.version import WeightsVersion  # noqa: E402
from tiny import chat_tokenizer, served_model  # noqa: E402
from warm_process import WarmPopen  # noqa: E402

TEXT = "/v1/completions"
LONG = {"prompt": "The", "max_tokens": 4000, "ignore_eos": True, "stream": True}
# Imports once, serves several times: each server is a process of its own, with an HTTP process beside it.
SERVERS = """
import os, sys
from pathlib import Path
from shoestring.cli.app import run_cli
from shoestring.errors import as_command
from shoestring.serve.http.server import ServeOptions, main
for name in sys.argv[2:]:
    if not os.fork():
        sys.stderr = open(Path(sys.argv[1]) / f"{name}.log", "w", buffering=1)
        if name == "drains":
            os.environ["SHOESTRING_API_KEY"] = "secret"
            options = ["--port", "0", "--drain", "20", "--device", "cpu", "--drafter", "ngram"]
            os._exit(run_cli(["serve", str(Path(sys.argv[1]) / "tiny"), *options]))
        options = ServeOptions(port=0, max_requests=2, drafter="ngram")
        as_command(lambda: main(Path(sys.argv[1]) / "tiny", options, apart=True))
        os._exit(0)
for _ in sys.argv[2:]:
    pid, status = os.wait()
    print(pid, status, flush=True)
"""


# -- messages -------------------------------------------------------------------------------------------------


def sent(*message: Any) -> list[Any]:
    """What arrives of it, in pieces and between two others."""
    data = frame(*message)
    reader, whole, found = FrameReader(CODEC), data + data + data, []
    for start in range(0, len(whole), 7):
        found += reader.feed(whole[start : start + 7])
    assert len(found) == 3 and {kind for kind, _ in found} == {message[0]}
    return found[1][1]


def told_to(client: socket.socket) -> tuple[str, list[Any]]:
    (message,) = FrameReader(CODEC).feed(client.recv(65536))
    return message


def test_a_report_arrives_as_it_was() -> None:
    scored = (TokenLogprob(5, -0.25, ((5, -0.25), (7, -math.inf))),)
    parts = [
        (3, ChoiceDelta("\ud800 é", (5, 6), scored, (None, *scored), "stop", 4, None, (True, False))),
        (4, ChoiceDelta(error=ApiError(429, "no", param="n", code="full", headers={"Retry-After": "2"}))),
        (5, ChoiceDelta(vectors_ND=torch.tensor([[1.5, -2.0, 3.0]]), versions=(("run@3", 0),))),
        (6, ChoiceDelta(vectors_ND=torch.tensor([[4.0], [5.0]]))),
    ]
    snapshot = EngineSnapshot(1, 2, 0.5, drafts=True, version=WeightsVersion("run", 3, "ab"))
    report = Report(([1, 2], ["a", '"\n'], [10, 11]), parts, [3, 4], snapshot, ApiError(503, "gone"), True)
    (found,) = sent("report", report)
    assert tuple(found.pieces) == report.pieces and found.ended == [3, 4] and found.dead
    assert found.snapshot == snapshot and str(found.closed) == "gone"
    assert found.parts[0] == parts[0]
    error = found.parts[1][1].error
    assert error is not None and vars(error) == vars(parts[1][1].error)
    assert torch.equal(found.parts[2][1].vectors_ND, parts[2][1].vectors_ND)  # type: ignore[arg-type]
    assert torch.equal(found.parts[3][1].vectors_ND, parts[3][1].vectors_ND)  # type: ignore[arg-type]
    assert found.parts[2][1].versions == (("run@3", 0),)


def test_choices_arrive_as_they_were_and_prompts_are_sent_once() -> None:
    prompt, source = list(range(1000)), GrammarSource('{"type": "object"}')
    rules = LogitRules(((3, 1.5),), 0.5, 0.25, 1.1, 2, (0, 9))
    sampling = SamplingWithRules(0.5, 3, 0.9, 0.1, 2**63 + 5, 7, ("é", "x"), True, frozenset({4}), rules, 2, source)  # type: ignore[arg-type]
    given = [PendingChoice(prompt, sampling, 12.5, 3, client="k a", arrived=1.25, id=i) for i in range(50)]
    given.append(PendingChoice([], SamplingWithRules(), embedding=EmbeddingJob([[1, 2], prompt, [3]], "last"), id=50))
    assert len(frame("add", given)) < 4 * 1003 + 50 * 600
    made: list[GrammarSource] = []

    def grammar_of(source: GrammarSource) -> Any:
        made.append(source)
        return lambda: source

    found = received(sent("add", given)[0], grammar_of)
    assert made == [source] * 50
    for choice, want in zip(found, given, strict=True):
        for field in ("prompt", "deadline", "score_prompt", "no_new_tokens", "client", "arrived", "id"):
            assert getattr(choice, field) == getattr(want, field)
    assert found[0].sampling == sampling and found[0].sampling.grammar == source
    assert found[0].sampling.history.prompt == tuple(prompt)
    last = found[-1].embedding
    assert last is not None and last.texts == [[1, 2], prompt, [3]] and last.pooling == "last"
    assert found[0].prompt is found[1].prompt  # one list, as it was
    state = {"started", "first_token", "last_token", "request", "num_sent", "done"}
    assert {f.name for f in fields(PendingChoice) if f.metadata == LOCAL} == state  # a new field is sent


# -- one side alone ------------------------------------------------------------------------------------------------


def test_who_asks_an_engine_that_goes_is_told_at_once() -> None:
    async def ask_twice() -> EngineClient:
        engine, connection = socket.socketpair()
        early: list[tuple[str, list[Any]]] = [("report", [Report(snapshot=EngineSnapshot(drafts=True))])]
        port = EngineConnection(FrameReader(CODEC), early)
        facts = EngineFacts(29, 64, 16, (0,), True, 2, 2)
        client = EngineClient(facts, port, chat_tokenizer(), EngineSnapshot())
        await port.open(connection, client, SimpleNamespace(server=SimpleNamespace(should_exit=True)))  # type: ignore[arg-type]
        assert client.snapshot.drafts  # it came together with the first frame
        answered: Future[bytes] = Future()
        answered.set_result(b"")
        port._asked[99] = answered  # its worker thread has not come to take it
        waits = asyncio.create_task(asyncio.to_thread(port.metrics_text))
        await asyncio.to_thread(engine.recv, 1)
        engine.close()
        for asked in (waits, asyncio.to_thread(port.metrics_text)):
            with pytest.raises(ApiError, match="the engine has stopped"):
                await asyncio.wait_for(asked, 10)
        return client

    client = asyncio.run(ask_twice())
    assert not client.alive and client.closed is not None and client.closed.code == "engine_dead"


def test_an_engine_that_goes_while_a_question_is_on_its_way_to_the_event_loop() -> None:
    async def ask() -> list[Any]:
        engine, connection = socket.socketpair()
        port, failed = EngineConnection(FrameReader(CODEC), []), list[Any]()
        client = EngineClient(EngineFacts(29, 64, 16, (0,), True, 2, 2), port, chat_tokenizer(), EngineSnapshot())
        await port.open(connection, client, SimpleNamespace(server=SimpleNamespace(should_exit=True)))  # type: ignore[arg-type]
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
        with ThreadPoolExecutor(1) as thread:
            asked = thread.submit(port.metrics_text)
            wait_for(lambda: port._asked)  # the event loop does nothing meanwhile
            port.connection_lost(None)
            with pytest.raises(ApiError, match="the engine has stopped"):
                await asyncio.wrap_future(asked)
        engine.close()
        return failed

    assert asyncio.run(ask()) == []


def test_what_is_sent_in_one_turn_of_the_event_loop_goes_together_and_in_order() -> None:
    async def send() -> None:
        engine, connection = socket.socketpair()
        port, written = EngineConnection(FrameReader(CODEC), []), list[bytes]()
        client = EngineClient(EngineFacts(29, 64, 16, (0,), True, 2, 2), port, chat_tokenizer(), EngineSnapshot())
        await port.open(connection, client, SimpleNamespace(server=SimpleNamespace(should_exit=True)))  # type: ignore[arg-type]
        port._transport = SimpleNamespace(write=written.append)  # type: ignore[assignment]
        for message in (("cancel", [1]), ("cancel", [2])):
            port.post(message)  # type: ignore[arg-type]
        port.count_rejected()
        assert written == []
        await asyncio.sleep(0)
        port.post(("cancel", [3]))
        await asyncio.sleep(0)
        told = [FrameReader(CODEC).feed(data) for data in written]
        assert told == [[("cancel", [[1]]), ("cancel", [[2]]), ("rejected", [])], [("cancel", [[3]])]]
        engine.close()

    asyncio.run(send())


class Panic(BaseException):
    """As of a library that is written in Rust."""


@pytest.mark.parametrize("kind", [RuntimeError, Panic])
def test_a_request_that_cannot_be_read_fails_alone(kind: type[BaseException]) -> None:
    engine, http = socket.socketpair()
    sampling = SamplingWithRules(grammar=GrammarSource("{}"))  # type: ignore[arg-type]
    given = sent("add", [PendingChoice([1], sampling, id=7)])

    def broken(source: GrammarSource) -> Any:
        raise kind("a defect of a library")

    thread = SimpleNamespace(latest=EngineSnapshot(), post=pytest.fail, metrics_text=pytest.fail)
    grammars = SimpleNamespace(of=broken, must_compile=lambda source: False)
    process = HttpProcess(0, engine)
    process._pass_on("add", given, thread, grammars)  # type: ignore[arg-type]
    _, (report,) = told_to(http)
    assert report.ended == [7] and report.parts[0][1].error is not None and report.parts[0][1].error.status == 500
    http.settimeout(20)
    process._pass_on("compile", [3, GrammarSource("{}")], thread, grammars)  # type: ignore[arg-type]
    answer, (ticket, error, found) = told_to(http)
    assert (answer, ticket, error.status, found) == ("answer", 3, 500, b"")


def test_a_forgotten_grammar_holds_up_no_other_message() -> None:
    compiles, posted = threading.Event(), queue.SimpleQueue[Any]()

    def compile_slowly(source: GrammarSource) -> Any:
        assert compiles.wait(30)
        return lambda: source

    thread = SimpleNamespace(latest=EngineSnapshot(), post=posted.put, metrics_text=pytest.fail)
    grammars = SimpleNamespace(of=compile_slowly, must_compile=lambda source: True)
    process = HttpProcess(0, socket.socketpair()[0])

    def pass_on(choices: list[PendingChoice]) -> None:
        process._pass_on("add", sent("add", choices), thread, grammars)  # type: ignore[arg-type]

    constrained = SamplingWithRules(grammar=GrammarSource("{}"))  # type: ignore[arg-type]
    pass_on([PendingChoice([1], constrained, id=7), PendingChoice([1], constrained, id=8)])
    pass_on([PendingChoice([1], SamplingWithRules(), id=9)])
    process._pass_on("cancel", [[8, 9]], thread, grammars)  # type: ignore[arg-type]
    kind, (other,) = posted.get(timeout=30)
    assert kind == "add" and other.id == 9 and posted.get(timeout=30) == ("cancel", [8, 9])
    compiles.set()
    kind, late = posted.get(timeout=30)
    assert kind == "add" and [choice.id for choice in late] == [7, 8]
    assert posted.get(timeout=30) == ("cancel", [8])  # the engine did not know it when it was cancelled


def test_an_http_process_that_ended_badly_is_named() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    process = HttpProcess(os.posix_spawn(sys.executable, ["python", "-Sc", "raise SystemExit(3)"], os.environ), ours)
    with socket.socket() as listener, pytest.raises(HttpProcessLost, match="ended with code 3; the server stops"):
        process.open(listener, *[None] * 5)  # type: ignore[arg-type]  # before it serves
    process._told_to_stop = True  # while it drains
    with pytest.raises(HttpProcessLost, match="ended with code 3; the server stops"):
        process.run(*[None] * 3)  # type: ignore[arg-type]
    process.close()


def test_an_http_process_that_does_not_drain_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_process, "LEAVE_S", 0.2)
    ours, theirs = socket.socketpair()
    with theirs:
        deaf = "import signal, time; signal.signal(signal.SIGUSR1, signal.SIG_IGN); print(flush=True); time.sleep(600)"
        command = [sys.executable, "-c", deaf]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[theirs.fileno()])
        assert child.stdout is not None and child.stdout.readline()
    process = HttpProcess(child.pid, ours, drain_s=0.3)
    process.stop()
    began = time.monotonic()
    with pytest.raises(HttpProcessLost, match="was ended by SIGKILL"):
        process.run(SimpleNamespace(seconds_in_step=0.0), *[None] * 2)  # type: ignore[arg-type]
    assert time.monotonic() - began < 20
    process.close()


# -- two processes ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    folder, tokenizer = tmp_path_factory.mktemp("servers"), chat_tokenizer()
    save_model(folder / "tiny", served_model(tokenizer.vocab_size), tokenizer)
    command = [sys.executable, "-c", SERVERS, str(folder), "drains", "lives", "stopped", "loses_http", "loses_engine"]
    started = WarmPopen(command, stdout=subprocess.PIPE, text=True)
    yield folder, started
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended by itself
        for process in psutil.Process(started.pid).children(recursive=True):
            process.kill()
    started.wait()


def server(folder: Path, name: str) -> tuple[str, psutil.Process, psutil.Process]:
    """Its address, and the processes of the engine and of HTTP."""
    log = folder / f"{name}.log"
    wait_for(lambda: log.is_file() and "playground at" in log.read_text(), 90)
    found = re.search(r"at http://127.0.0.1:(\d+)/v1", log.read_text())
    assert found
    (http,) = [c.pid for c in psutil.net_connections() if c.status == "LISTEN" and c.laddr.port == int(found[1])]
    process = psutil.Process(http)
    engine = process.parent()
    assert engine is not None
    return f"http://127.0.0.1:{found[1]}", engine, process


def open_stream(url: str, num: int = 4000) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=60)
    content = json.dumps({**LONG, "max_tokens": num}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    client.sendall(head.encode() + f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
    assert b"200 OK" in client.recv(4096)
    return client


def rest_of(client: socket.socket) -> bytes:
    received = b""
    while b"[DONE]" not in received and (part := client.recv(65536)):
        received += part
    return received


def test_sigterm_drains_and_exits_cleanly(servers: Any) -> None:
    url, engine, _ = server(servers[0], "drains")
    log_text = (servers[0] / "drains.log").read_text
    body = {**LONG, "max_tokens": 400}
    key = {"Authorization": "Bearer secret"}
    assert httpx.post(url + TEXT, json=body).status_code == 401
    with httpx.stream("POST", url + TEXT, json=body, timeout=60, headers=key) as answer:
        lines = answer.iter_lines()
        first = next(lines)
        engine.send_signal(signal.SIGTERM)
        wait_for(lambda: "draining: 1 texts" in log_text())
        rest = list(lines)
    # The text that was being written came to its end; whoever came later was not let in.
    assert rest[-2:] == ["data: [DONE]", ""] and not any('"error"' in line for line in rest)
    texts = [json.loads(line[6:])["choices"][0] for line in [first, *rest] if line.startswith("data: {")]
    assert texts[-1]["finish_reason"] == "length"
    with pytest.raises(httpx.TransportError):
        httpx.get(url + "/health")
    assert f"{engine.pid} 0\n" == servers[1].stdout.readline()
    assert "Traceback" not in log_text() and "new=400 finish=length" in log_text()


def test_every_kind_of_answer_comes_through(servers: Any) -> None:
    url, engine, http = server(servers[0], "lives")
    with httpx.Client(base_url=url, timeout=60) as client:
        assert client.get("/stats").json()["drafter"]  # before the first request, too
        body = {"prompt": ["The quick", "A"], "n": 2, "max_tokens": 3, "logprobs": 2, "echo": True, "seed": 1}
        whole = client.post(TEXT, json=body | {"ignore_eos": True}).json()
        assert [len(c["logprobs"]["tokens"]) for c in whole["choices"]] and whole["usage"]["completion_tokens"] == 12
        assert all(len(top) >= 2 for top in whole["choices"][0]["logprobs"]["top_logprobs"][1:])
        numbers = client.post("/v1/embeddings", json={"input": "The"}).json()["data"][0]["embedding"]
        assert len(numbers) > 1 and abs(sum(x * x for x in numbers) - 1) < 1e-5
        told = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "boolean"}}}
        chat = {"messages": [{"role": "user", "content": "?"}], "response_format": told}
        for _ in range(2):  # compiled, then known
            answer = client.post("/v1/chat/completions", json=chat).json()
            assert answer["choices"][0]["message"]["content"] in ("true", "false")
        told["json_schema"] = {"name": "x", "schema": {"type": "object", "properties": {"a": {"$ref": "#/no"}}}}
        for _ in range(2):
            refused = client.post("/v1/chat/completions", json=chat)
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "response_format"
        counted = re.search(
            r'shoestring:prompt_tokens_total\{model_name="tiny"\} ([\d.]+)', client.get("/metrics").text
        )
        assert counted and float(counted[1]) > 10
        stream = open_stream(url)
        wait_for(lambda: client.get("/stats").json()["num_running"] == 1)
        stream.close()  # who leaves is no longer computed
        wait_for(lambda: client.get("/stats").json()["num_running"] == 0)
        assert client.get("/health").json() == {"status": "ok"}
    http.send_signal(signal.SIGTERM)  # as a service manager does, to both; and a terminal
    http.send_signal(signal.SIGINT)
    stream = open_stream(url)
    engine.send_signal(signal.SIGTERM)
    wait_for(lambda: "draining: 1 texts" in (servers[0] / "lives.log").read_text())
    engine.send_signal(signal.SIGTERM)  # the second does not wait
    wait_for(lambda: not http.is_running())
    assert f"{engine.pid} 0\n" == servers[1].stdout.readline()
    assert "Traceback" not in (servers[0] / "lives.log").read_text()


def test_processes_that_are_stopped(servers: Any) -> None:
    """An idle engine that is stopped is not healthy; an HTTP process that is stopped drains all the same."""
    url, engine, http = server(servers[0], "stopped")
    time.sleep(SILENT_S + 1)  # idle for longer than a silence may be: its beat keeps it healthy
    assert httpx.get(url + "/health").json() == {"status": "ok"}
    engine.suspend()
    wait_for(lambda: httpx.get(url + "/health").status_code == 503, SILENT_S + 10)
    assert httpx.get(url + "/health").json()["status"] == "silent"
    engine.resume()
    wait_for(lambda: httpx.get(url + "/health").status_code == 200)
    stream = open_stream(url, 400)
    http.suspend()
    engine.send_signal(signal.SIGTERM)
    assert b"[DONE]" in rest_of(stream)
    began = time.monotonic()
    assert f"{engine.pid} 0\n" == servers[1].stdout.readline()
    assert time.monotonic() - began < 30 and "Traceback" not in (servers[0] / "stopped.log").read_text()


def test_without_http_the_engine_ends_and_says_why(servers: Any) -> None:
    url, engine, http = server(servers[0], "loses_http")
    open_stream(url)
    http.kill()
    assert servers[1].stdout.readline() == f"{engine.pid} {2 << 8}\n"
    log = (servers[0] / "loses_http.log").read_text()
    assert "the HTTP process was ended by SIGKILL; the server stops" in log and "Traceback" not in log


def test_without_the_engine_clients_are_told_and_http_ends(servers: Any) -> None:
    url, engine, http = server(servers[0], "loses_engine")
    client = open_stream(url)
    engine.kill()
    last = rest_of(client)
    assert b"engine_dead" in last and b"data: [DONE]" in last
    wait_for(lambda: not psutil.pid_exists(http.pid))
    assert "the engine's process is gone; the server stops" in (servers[0] / "loses_engine.log").read_text()
