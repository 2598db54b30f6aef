"""Hostile bodies cost little: what is too large is refused before the expensive part of the work."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("pydantic", reason="the server needs shoestring[serve]")

from shoestring.errors import suggest
from shoestring.model.tokenizer import Tokenizer
from shoestring.serve.http import request_parsing
from shoestring.serve.http.grammar import wanted_schema
from shoestring.serve.http.request_parsing import (
    MAX_TOKENIZE_BYTES,
    Limits,
    detokenize,
    encode_within,
    parse_completion,
    tokenize,
)
from shoestring.serve.http.request_schema import (
    MAX_MESSAGES,
    MAX_STRUCTURE,
    ApiError,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    read_json,
    validated,
)
from shoestring.serve.http.responses import json_pieces
from tiny import chat_tokenizer

TINY = chat_tokenizer()
LIMITS = Limits(TINY.vocab_size, 64, max_texts=72)


def refusal(work: Callable[[], Any], seconds: float = 2.0) -> ApiError:
    """The 400 that comes of it, soon. The seconds are for a busy machine: without the bounds these take many more."""
    began = time.monotonic()
    with pytest.raises(ApiError) as refused:
        work()
    assert refused.value.status == 400 and time.monotonic() - began < seconds
    assert len(refused.value.message) < 400
    return refused.value


def test_a_name_of_megabytes_is_cut_before_it_is_compared() -> None:
    began = time.monotonic()
    assert "'max_tokens'" in suggest("max_token" + "x" * 2, ["max_tokens"])
    assert suggest("max_tokens" * 400_000, ["max_tokens", "temperature"]) == ""
    assert time.monotonic() - began < 5
    error = refusal(lambda: CompletionBody.parse({"k" * (3 << 20): 1}))
    assert error.code == "unknown_parameter" and len(error.param or "") == 100
    assert refusal(lambda: validated(TokenizeBody, {"k" * (3 << 20): 1})).code == "unknown_parameter"


@pytest.mark.parametrize("name", ["logit_bias", "stream_options", "model", "temperature"])
def test_only_the_first_of_many_mistakes_is_described(name: str) -> None:
    wrong: Any = ["x"] * 2_000_000 if name == "model" else {str(i): "x" for i in range(300_000)}
    refusal(lambda: CompletionBody.parse({"prompt": "a", "stream": True, name: wrong}))


def test_millions_of_ids_are_refused_by_their_number() -> None:
    ids: list[Any] = [1] * 2_000_000
    body = CompletionBody.parse({"prompt": ids})
    assert refusal(lambda: parse_completion(body, TINY, LIMITS)).code == "context_length_exceeded"
    error = refusal(lambda: detokenize(DetokenizeBody(tokens=["x"] * 2_000_000), TINY, LIMITS))
    assert "2000000 ids" in error.message and "65536" in error.message


def test_messages_are_bounded_in_number() -> None:
    body = ChatBody.parse({"messages": [{"role": "user", "content": ""}] * (MAX_MESSAGES + 1)})
    assert f"at most {MAX_MESSAGES}" in refusal(lambda: body.chat).message


@pytest.mark.parametrize(
    "body", [b'{"prompt": [' + b"[]," * 1_000_000 + b"[]]}", b'{"a": 1,' + b'"b":1,' * 600_000 + b'"prompt": ""}']
)
def test_a_body_of_a_million_arrays_or_keys_is_refused_unparsed(body: bytes) -> None:
    assert str(MAX_STRUCTURE) in refusal(lambda: read_json(body)).message


def test_marks_inside_a_text_are_no_structure() -> None:
    text = '[{"a": "\\"["}] \\' * 100_000
    assert read_json(json.dumps({"prompt": text}).encode())["prompt"] == text


@pytest.mark.parametrize(
    "half", [b"\xed\xa0\x80", b"\xed\xbf\xbf", b"\\ud800", b"\\udfff\\ud800", b"\xff", b"\xc0\x80"]
)
def test_halves_of_characters_are_refused(half: bytes) -> None:
    assert refusal(lambda: read_json(b'{"prompt": "a' + half + b'"}')).code == "invalid_json"
    assert refusal(lambda: read_json(b'{"a' + half + b'": 1}')).code == "invalid_json"


def test_whole_characters_and_marks_of_order_are_taken() -> None:
    assert read_json(b'\xef\xbb\xbf{"prompt": "\\ud83d\\ude42"}') == {"prompt": "🙂"}


@pytest.mark.parametrize(
    "schema",
    [
        {"const": -(2**63)},
        {"enum": ["a", -(2**63) + 1]},
        {"type": "integer", "minimum": -(2**63), "maximum": -(2**63)},
        {"type": "object", "properties": {"a": {"items": [{"minimum": -1e19}]}}},
    ],
)
def test_numbers_that_crash_the_grammar_library_are_refused(schema: dict[str, Any]) -> None:
    def ask(schema: dict[str, Any]) -> str | None:
        return wanted_schema({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})

    assert "cannot be used" in refusal(lambda: ask(schema)).message
    assert ask({"type": "integer", "minimum": -(2**62), "maximum": 2**63 - 1})


# -- encoding ------------------------------------------------------------------------------------------------


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The characters of every text that is encoded."""
    sizes: list[int] = []
    encode = Tokenizer.encode

    def watched(self: Tokenizer, text: str, **options: Any) -> list[int]:
        sizes.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    return sizes


def test_a_long_text_is_refused_by_its_beginning(encoded: list[int]) -> None:
    text = "The quick brown fox " * 10_000
    error = refusal(lambda: encode_within(text, TINY, 1, LIMITS))
    assert error.code == "context_length_exceeded" and encoded == [16 * 64]


def test_many_long_prompts_are_refused_at_the_first(encoded: list[int]) -> None:
    body = CompletionBody.parse({"prompt": ["def main(argv): " * 2000] * 64})
    assert refusal(lambda: parse_completion(body, TINY, LIMITS)).code == "context_length_exceeded"
    assert encoded == [16 * 64]


@pytest.mark.parametrize("text", [" " * 3000, "\n" * 1500, "The " * 12, "日本語" * 7, ""])
def test_what_fits_has_the_same_tokens_as_ever(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it was encoded in parts: a token may stand for many characters."""
    monkeypatch.setattr(request_parsing, "FIRST_PART", 2)
    ids = TINY.encode(text)
    limits = Limits(TINY.vocab_size, len(ids) + 1, max_texts=1)
    assert encode_within(text, TINY, 1, limits) == ids
    if len(ids) > 1:
        short = Limits(TINY.vocab_size, len(ids), max_texts=1)
        assert refusal(lambda: encode_within(text, TINY, 1, short)).code == "context_length_exceeded"


def test_tokenize_says_what_it_takes(encoded: list[int]) -> None:
    body = TokenizeBody(prompt="ä" * (MAX_TOKENIZE_BYTES // 2 + 1))
    error = refusal(lambda: tokenize(body, TINY))
    assert f"{MAX_TOKENIZE_BYTES + 2} bytes" in error.message and f"at most {MAX_TOKENIZE_BYTES}" in error.message
    assert not encoded


def test_log_probabilities_are_bounded_over_the_whole_request() -> None:
    asked = {"prompt": "a", "n": 72, "logprobs": 20, "ignore_eos": True}
    limits = Limits(TINY.vocab_size, 4096, max_texts=72)
    error = refusal(lambda: parse_completion(CompletionBody.parse({**asked, "max_tokens": 4000}), TINY, limits))
    assert error.param == "logprobs" and "at most 4194304" in error.message
    assert len(parse_completion(CompletionBody.parse({**asked, "max_tokens": 40}), TINY, limits).samplings) == 72


def test_json_in_pieces_is_the_same_json() -> None:
    entry = {"token": "ä\n", "logprob": -1.5, "top_logprobs": [{"bytes": [1, 2]}] * 3}
    for value in (
        {"choices": [{"logprobs": {"content": [entry] * 200}, "text": "x"}] * 2, "usage": None},
        {"tokens": list(range(1000))},
        {"a": [], "b": {}, "c": [[]], "d": [1.5, None, True]},
        [],
    ):
        pieces = list(json_pieces(value))
        assert json.loads("".join(pieces)) == value
        assert "".join(pieces) == json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        assert max(map(len, pieces)) < 12_000
