"""Prompts of megabytes: what cannot fit is refused by its bytes, and what is encoded keeps nobody waiting."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from serving import running
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from shoestring.model.gguf import read_metadata
from shoestring.model.tokenizer import Spelling, Tokenizer, letter_bytes
from shoestring.serve.http.request_parsing import Limits, parse_completion
from shoestring.serve.http.request_schema import ApiError, CompletionBody
from tiny import chat_tokenizer

httpx = pytest.importorskip("httpx")

CONTEXT = 64
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def spelling_of(tokenizer: Tokenizer) -> Spelling:
    spelling = tokenizer.spelling()
    assert spelling is not None
    return spelling


def body_of(path: str, text: str) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    return {**asked, "max_tokens": 1}


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_what_cannot_fit_is_refused_without_being_encoded(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = spelling_of(chat_tokenizer()).longest
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
    tokenizer = chat_tokenizer()
    longest = spelling_of(tokenizer).longest
    names = tokenizer.backend.get_vocab(with_added_tokens=True)
    assert longest == max(map(len, names)) == len("<|endoftext|>")
    text = "<|endoftext|>" * (CONTEXT - 1)
    with running(max_context=CONTEXT) as service:
        answer = httpx.post(service.url + TEXT, json=body_of(TEXT, text), timeout=60)
        assert answer.status_code == 200 and answer.json()["usage"]["prompt_tokens"] == CONTEXT - 1
        answer = httpx.post(service.url + TEXT, json=body_of(TEXT, text + "<|endoftext|>"), timeout=60)
        assert answer.status_code == 400


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    """The event loop and the engine are such threads. Turns are counted, not timed: hundreds, or 2 to 4 where the
    library keeps the interpreter to itself."""
    tokenizer = chat_tokenizer()
    text = "The quick brown fox jumps over the lazy dog. " * 30_000
    done = threading.Event()
    worker = threading.Thread(target=lambda: (tokenizer.encode(text), done.set()))
    turns = 0
    worker.start()
    while not done.is_set():
        time.sleep(0.002)
        turns += 1
    assert turns > 20


# -- how long a text a token may stand for -------------------------------------------------------------------

TINY = chat_tokenizer()
PARTS = st.one_of(st.text(max_size=8), st.sampled_from(["<|endoftext|>", " fox", "\n\n", "0123", "\x04", "\U00040000"]))
TEXT_OF_PARTS = st.lists(PARTS).map(lambda parts: "".join(parts).encode("utf-8", "ignore").decode())


def lacking(missing: frozenset[int], unknown: str | None = None) -> Tokenizer:
    """The tiny tokenizer without the letters of these bytes, and without the tokens that have them."""
    told = json.loads(TINY.backend.to_str())
    letters = {letter for letter, byte in letter_bytes().items() if byte in missing}
    model, marks = told["model"], {token["content"] for token in told["added_tokens"]}
    kept = {name for name in model["vocab"] if name in marks or not letters & set(name)}
    model["vocab"] = {name: number for number, name in enumerate(sorted(kept))}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in kept]
    model["unk_token"], model["fuse_unk"] = unknown, unknown is not None
    for token in told["added_tokens"]:
        token["id"] = model["vocab"][token["content"]]
    return Tokenizer(Backend.from_str(json.dumps(told)))


@settings(max_examples=60, deadline=None)
@given(TEXT_OF_PARTS)
def test_no_text_has_more_bytes_than_its_tokens_allow(text: str) -> None:
    spelling = spelling_of(TINY)
    assert not spelling.vanishing
    assert len(text.encode()) <= spelling.longest * len(TINY.encode(text, special=False))


@settings(max_examples=40, deadline=None)
@given(TEXT_OF_PARTS, st.frozensets(st.integers(0, 255)), st.sampled_from([None, "<|endoftext|>"]))
@example("日本" * 40 + "x", frozenset("日本".encode()), None)
@example("eeee" * 40 + "x", frozenset(b"e"), "<|endoftext|>")  # all of them are one unknown
@example("eeee" * 40 + "x", frozenset(range(256)), None)
def test_bytes_without_a_letter_are_not_counted(text: str, missing: frozenset[int], unknown: str | None) -> None:
    tokenizer = lacking(missing, unknown)
    spelling = spelling_of(tokenizer)
    assert set(spelling.vanishing) == missing
    num_counted = sum(byte not in missing for byte in text.encode())
    assert spelling.fewest_tokens(text) == -(-num_counted // spelling.longest)
    assert spelling.fewest_tokens(text) <= len(tokenizer.encode(text, special=False))


@pytest.fixture(scope="module")
def smollm2(smollm2_file: Path) -> Tokenizer:
    return Tokenizer.from_gguf(read_metadata(smollm2_file))


@pytest.fixture(scope="module")
def smollm2_spelling(smollm2: Tokenizer) -> Spelling:
    return spelling_of(smollm2)


@settings(max_examples=60, deadline=None)
@given(text=st.one_of(TEXT_OF_PARTS, TEXT_OF_PARTS.map(lambda text: text + ("\n" + " " * 80) * 9)))
def test_no_text_has_fewer_tokens_of_smollm2_than_its_bytes_need(
    text: str, smollm2: Tokenizer, smollm2_spelling: Spelling
) -> None:
    assert smollm2_spelling.fewest_tokens(text) <= len(smollm2.encode(text, special=False))


def test_smollm2_refuses_by_bytes_what_cannot_fit_and_nothing_else(
    smollm2: Tokenizer, smollm2_spelling: Spelling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its vocabulary lacks letters, also of bytes that texts have."""
    spelling = smollm2_spelling
    assert len(spelling.vanishing) == 21 and {0x04, 0xF1} <= set(spelling.vanishing)
    limits = Limits(smollm2.vocab_size, CONTEXT, max_texts=1, spelling=spelling)

    def asked(text: str) -> int:
        return len(parse_completion(CompletionBody(prompt=text, max_tokens=1), smollm2, limits).prompts[0])

    longest = "\n" + " " * 80
    assert len(longest) == spelling.longest and asked(longest * (CONTEXT - 1)) == CONTEXT - 1
    assert asked("\x04" * 100_000 + "Hi") == asked("Hi")
    monkeypatch.setattr(Tokenizer, "encode_batch", lambda *_, **__: pytest.fail("encoded"))
    for text in ("x" * 100_000, "\x04" * 100_000 + "x" * spelling.longest * CONTEXT):
        with pytest.raises(ApiError, match=f"holds {CONTEXT} tokens"):
            asked(text)


def normalized(tokenizer: Tokenizer) -> None:
    tokenizer.backend.normalizer = normalizers.NFC()


def stripping(tokenizer: Tokenizer) -> None:
    tokenizer.backend.add_special_tokens([AddedToken("<mask>", lstrip=True)])


def truncated(tokenizer: Tokenizer) -> None:
    tokenizer.backend.enable_truncation(8)


def dropping(tokenizer: Tokenizer) -> None:
    words = pre_tokenizers.Split(Regex(" +"), behavior="removed")
    tokenizer.backend.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel()])


@pytest.mark.parametrize("change", [normalized, stripping, truncated, dropping])
def test_where_text_may_vanish_no_length_is_said(change: Callable[[Tokenizer], None]) -> None:
    tokenizer = chat_tokenizer()
    known = spelling_of(tokenizer)
    change(tokenizer)
    assert tokenizer.spelling() is None
    # And rightly so: here are texts with more bytes than their tokens would allow.
    texts = ("a" + " " * 1000 + "<mask>", " " * 1000, "\u1100\u1161\u11a8" * 100, "fox " * 1000)
    if change is not normalized:  # it shortens by less than the longest token here
        assert any(known.fewest_tokens(t) > len(tokenizer.encode(t, special=False)) for t in texts)
