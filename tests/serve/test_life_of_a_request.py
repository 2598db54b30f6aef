"""docs/life_of_a_request.md names the files that one request and one token cross: traced here, and compared."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

import shoestring
from shoestring.serve import Engine, Sampling
from tiny import tiny_decoder

for name in ("fastapi", "uvicorn", "prometheus_client", "httpx"):
    pytest.importorskip(name, reason="the server needs shoestring[serve]")

import httpx  # noqa: E402
from serving import running  # noqa: E402

from shoestring.serve.http.app import READ_INLINE  # noqa: E402

PACKAGE = Path(shoestring.__file__).parent
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "life_of_a_request.md").read_text("utf-8")


class Trace:
    """The files of the package in which a function was called while it was on."""

    def __init__(self) -> None:
        self.on = False
        self.files: set[str] = set()

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if self.on and event == "call":
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(PACKAGE):
                self.files.add(path.relative_to(PACKAGE).as_posix())


@contextmanager
def traced() -> Iterator[Trace]:
    trace = Trace()
    before = sys.getprofile()
    threading.setprofile(trace)  # threads that start from here on: the server's, the engine's, the tokenizer's
    sys.setprofile(trace)
    try:
        yield trace
    finally:
        sys.setprofile(before)
        threading.setprofile(before)


def listed(heading: str) -> set[str]:
    """The files in the first column of the table under a heading of the page."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `([\w/]+\.py)` \|", section, re.MULTILINE))


def test_an_http_request_crosses_the_files_of_the_page() -> None:
    with traced() as trace, running() as service:
        host, port = service.server.servers[0].sockets[0].getsockname()  # type: ignore[attr-defined]
        client = httpx.Client(base_url=f"http://{host}:{port}", timeout=120)
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
        sent = {"content": json.dumps(body).ljust(READ_INLINE + 1), "headers": {"content-type": "application/json"}}
        assert client.post("/v1/completions", **sent).status_code == 200  # what only a first request does
        trace.on = True
        assert client.post("/v1/completions", **sent).status_code == 200
        trace.on = False
    wanted = listed("One HTTP request")
    assert {file for file in trace.files if file.startswith("serve/http/")} == wanted and len(wanted) <= 13


def test_a_decoded_token_crosses_the_files_of_the_page() -> None:
    """On a CPU the captured program runs as Python: what a CUDA graph replays is left out of the comparison."""
    engine = Engine(tiny_decoder(), max_requests=2, max_context=64, graphs=True, prefix_cache=False)
    engine.add([1, 2, 3], Sampling(max_tokens=24))
    for _ in range(6):  # prefill, the first step that runs ahead, and graphs that are made on the way
        engine.step()
    with traced() as trace:
        trace.on = True
        for _ in range(4):
            assert engine.step()
        trace.on = False
    program = ("fused_decoder", "merged_linear", "kv_cache", "prompt_attention")
    inside_the_graph = {f"serve/engine/{name}.py" for name in program}
    wanted = listed("One token on a GPU")
    crossed = {file for file in trace.files if file.startswith("serve/")} - inside_the_graph
    assert crossed == wanted and len(wanted) <= 9
