"""Prompts of megabytes: what cannot fit is refused by its bytes, and what is encoded keeps nobody waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import running, tiny_tokenizer
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from shoestring.model.tokenizer import Tokenizer

httpx = pytest.importorskip("httpx")

CONTEXT = 64
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def body_of(path: str, text: str) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    return {**asked, "max_tokens": 1}


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_what_cannot_fit_is_refused_without_being_encoded(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = tiny_tokenizer().longest_token()
    assert longest is not None
    encoded: list[int] = []
    encode_batch = Tokenizer.encode_batch

    def counted(self: Tokenizer, texts: list[str], *, special: bool = True) -> list[list[int]]:
        encoded.append(sum(map(len, texts)))
        return encode_batch(self, texts, special=special)

    with running(max_context=CONTEXT) as service, httpx.Client(base_url=service.url, timeout=60) as client:
        monkeypatch.setattr(Tokenizer, "encode_batch", counted)
        for text in ("x" * (CONTEXT * longest), "日本" * 500_000):
            answer = client.post(path, json=body_of(path, text))
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["code"] == "context_length_exceeded", error
            assert error["type"] == "invalid_request_error" and f"holds {CONTEXT} tokens" in error["message"]
        assert not encoded
        # What could fit is counted in tokens, and fits or does not.
        assert client.post(path, json=body_of(path, "x" * (CONTEXT + 1))).status_code == 400
        assert client.post(path, json=body_of(path, "x" * 8)).status_code == 200
        assert len(encoded) == 2


def test_a_text_of_the_longest_tokens_fits_to_the_last() -> None:
    tokenizer = tiny_tokenizer()
    longest = tokenizer.longest_token()
    names = tokenizer.backend.get_vocab(with_added_tokens=True)
    assert longest == max(map(len, names)) == len("<|endoftext|>")
    text = "<|endoftext|>" * (CONTEXT - 1)
    with running(max_context=CONTEXT) as service:
        answer = httpx.post(service.url + TEXT, json=body_of(TEXT, text), timeout=60)
        assert answer.status_code == 200 and answer.json()["usage"]["prompt_tokens"] == CONTEXT - 1
        answer = httpx.post(service.url + TEXT, json=body_of(TEXT, text + "<|endoftext|>"), timeout=60)
        assert answer.status_code == 400


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    """The event loop and the engine are such threads."""
    tokenizer = tiny_tokenizer()
    text = "The quick brown fox jumps over the lazy dog. " * 30_000
    done = threading.Event()
    worker = threading.Thread(target=lambda: (tokenizer.encode(text), done.set()))
    began = last = time.perf_counter()
    longest_wait = 0.0
    worker.start()
    while not done.is_set():
        time.sleep(0.002)
        now = time.perf_counter()
        longest_wait, last = max(longest_wait, now - last), now
    assert longest_wait < (last - began) / 2


# -- how long a text a token may stand for -------------------------------------------------------------------

TINY = tiny_tokenizer()
LONGEST = TINY.longest_token()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.text(max_size=8), st.sampled_from(["<|endoftext|>", " fox", "\n\n", "0123"]))))
def test_no_text_has_more_bytes_than_its_tokens_allow(parts: list[str]) -> None:
    text = "".join(parts).encode("utf-8", "ignore").decode()
    assert LONGEST is not None
    assert len(text.encode()) <= LONGEST * len(TINY.encode(text, special=False))


def normalized(tokenizer: Tokenizer) -> None:
    tokenizer.backend.normalizer = normalizers.NFC()


def stripping(tokenizer: Tokenizer) -> None:
    tokenizer.backend.add_special_tokens([AddedToken("<mask>", lstrip=True)])


def truncated(tokenizer: Tokenizer) -> None:
    tokenizer.backend.enable_truncation(8)


def dropping(tokenizer: Tokenizer) -> None:
    words = pre_tokenizers.Split(Regex(" +"), behavior="removed")
    tokenizer.backend.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel()])


def unspelt(tokenizer: Tokenizer) -> None:
    tokenizer.backend.model = models.BPE(vocab={"a": 0, "b": 1}, merges=[])


@pytest.mark.parametrize("change", [normalized, stripping, truncated, dropping, unspelt])
def test_where_text_may_vanish_no_length_is_said(change: Callable[[Tokenizer], None]) -> None:
    tokenizer = tiny_tokenizer()
    known = tokenizer.longest_token()
    assert known is not None
    change(tokenizer)
    assert tokenizer.longest_token() is None
    # And rightly so: here are texts with more bytes than their tokens would allow.
    texts = ("a" + " " * 1000 + "<mask>", " " * 1000, "z" * 1000, "\u1100\u1161\u11a8" * 100, "fox " * 1000)
    if change is not normalized:  # it shortens by less than the longest token here
        assert any(len(t.encode()) > known * len(tokenizer.encode(t, special=False)) for t in texts)
