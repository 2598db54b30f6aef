"""A real server with a tiny random model, for the tests of the HTTP API."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

for name in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(name, reason="the server needs shoestring[serve]")

from tiny import chat_tokenizer, served_model  # noqa: E402


@contextlib.contextmanager
def running(template: str | None = None, *, freezes: bool = False, **options: object) -> Iterator[object]:
    """A Service on a free port of 127.0.0.1, in a thread of this process; `template` is another chat template.

    `freezes`: whether it looks for garbage before it serves. In a process of tests this takes longer than all the rest.
    """
    from shoestring.serve.http import server
    from shoestring.serve.http.server import ServeOptions, Service, _read_adapters, listen
    from shoestring.serve.speculative.drafter_stack import open_drafter

    tokenizer = chat_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    model = served_model(tokenizer.vocab_size)
    listener = listen("127.0.0.1", 0)
    made = ServeOptions(**options)  # type: ignore[arg-type]
    drafter = None if made.drafter is None else open_drafter(made.drafter, model)
    adapters = _read_adapters(made, model, "tiny")
    service = Service(model, tokenizer, made, listener, "tiny", drafter, adapters=adapters)
    frozen = server.objects_frozen if freezes else contextlib.nullcontext
    with mock.patch.object(server, "objects_frozen", frozen):
        thread = threading.Thread(target=service.run, daemon=True)
        thread.start()
        wait_for(lambda: service.server.started)
    try:
        yield service
    finally:
        service.stop()
        thread.join(60)
        assert not thread.is_alive(), "the server did not stop"


def wait_for(happened: Callable[[], object], seconds: float = 120.0) -> None:
    """The seconds are for a machine that is busy with other work."""
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def nothing_is_left(service: Any) -> bool:
    """Of any request: no text is open or computed, and every block of keys and values can be had."""
    pool = service.engine.cache.pool
    idle = service.client.num_open == 0 and not service.engine.busy
    return idle and pool.num_used == 0 and pool.num_available == pool.num_blocks
