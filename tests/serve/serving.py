"""A real server with a tiny random model, for the tests of the HTTP API."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

for name in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(name, reason="the server needs shoestring[serve]")

from shoestring.model import Decoder, ModelSpec, Tokenizer  # noqa: E402

TEXTS = [
    "The quick brown fox jumps over the lazy dog. " * 3,
    "def main(argv):\n    return 0\n" * 3,
    "Ein Bär, zwei Bären; naïve café, 日本語, 🙂🙃. " * 3,
]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny_tokenizer(chat: bool = True) -> Tokenizer:
    tokenizer = Tokenizer.train(TEXTS, 300)
    tokenizer.chat_template = TEMPLATE if chat else None
    return tokenizer


def tiny_model(vocab_size: int, max_positions: int = 4096) -> Decoder:
    spec = ModelSpec(
        vocab_size=vocab_size,
        d_model=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        d_ff=48,
        max_positions=max_positions,
    )
    torch.manual_seed(0)
    model = Decoder(spec)
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim > 1:
                param.normal_(0, 0.4)
    return model.eval()


@contextlib.contextmanager
def running(**options: object) -> Iterator[object]:
    """A Service on a free port of 127.0.0.1, in a thread of this process."""
    from shoestring.serve.drafters import open_drafter
    from shoestring.serve.server import ServeOptions, Service, listen

    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer.vocab_size)
    listener = listen("127.0.0.1", 0)
    made = ServeOptions(**options)  # type: ignore[arg-type]
    drafter = None if made.drafter is None else open_drafter(made.drafter, model)
    service = Service(model, tokenizer, made, listener, "tiny", drafter)
    thread = threading.Thread(target=service.run, daemon=True)
    thread.start()
    wait_for(lambda: service.server.started)
    try:
        yield service
    finally:
        service.stop()
        thread.join(20)
        assert not thread.is_alive(), "the server did not stop"


def wait_for(happened: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)
