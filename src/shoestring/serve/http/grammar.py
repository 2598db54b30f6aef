"""JSON by construction: `response_format` as a mask over the next token.

The grammar and its matcher are those of the `llguidance` library, which is optional
(pip install 'shoestring[grammar]'). A `JsonGrammar` follows one text. It returns the tokens that may follow
what was written, drafts included, and gets to that state by rolling its matcher back to the common prefix. So it does
not matter which drafts were accepted.

Whitespace between values is bounded: a model could otherwise write line breaks for ever.

Left out: regular expressions, Lark grammars and tool calls, which the library could do as well.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoestring.model.tokenizer import Tokenizer
from shoestring.serve.http.request_schema import ApiError

log = logging.getLogger("shoestring.serve")

ANY_OBJECT = {"type": "object"}
WHITESPACE = r"[ \n\t]{0,24}"


class Grammars:
    """Makes grammars for one tokenizer; its table of the vocabulary is built when first needed (~1 s)."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, list(eos_ids)
        self._lock = threading.Lock()
        self._table: Any = None

    def of(self, response_format: dict[str, Any] | None) -> Callable[[], JsonGrammar] | None:
        """What makes a grammar per text; None for plain text. Anything wrong is a 400."""
        schema = wanted_schema(response_format)
        if schema is None:
            return None
        try:
            import llguidance
        except ModuleNotFoundError:
            raise _refused(
                "JSON formats need the package llguidance on the server (pip install 'shoestring[grammar]'); "
                'without it ask for JSON in the prompt and use {"type": "text"}'
            ) from None
        if not self._eos_ids:
            raise _refused("this model has no end-of-text token, so an answer of this format could not end")
        try:
            options: Any = {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE}
            grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
        except ValueError as error:
            raise _refused(f"the JSON schema cannot be used: {_first_line(error)}") from None
        matcher = llguidance.LLMatcher(self._vocabulary(llguidance), grammar, log_level=0)
        if matcher.is_error():
            raise _refused(f"the JSON schema cannot be used: {_first_line(matcher.get_error())}")
        return lambda: JsonGrammar(matcher.deep_copy(), self._eos_ids)

    def _vocabulary(self, llguidance: Any) -> Any:
        with self._lock:
            if self._table is None:
                size = max(self._vocab_size, self._tokenizer.vocab_size)
                text = self._tokenizer.backend.to_str()
                self._table = llguidance.LLTokenizer(text, n_vocab=size, eos_token=self._eos_ids)
            return self._table


class JsonGrammar:
    """The `Grammar` of one text. Owned by the thread that steps the engine."""

    def __init__(self, matcher: Any, eos_ids: Sequence[int]) -> None:
        self._matcher, self._eos_ids = matcher, list(eos_ids)
        self._consumed: list[int] = []

    def allowed(self, written: Sequence[int], vocab: int) -> Tensor | None:
        if not self._go_to(list(written)):
            return None  # after a draft that the row before does not allow: this row is not used
        mask = bytearray(self._matcher.compute_bitmask())
        if self._matcher.is_error():
            # The grammar exceeded the library's limits: the text can only end.
            log.warning("a grammar failed midway: %s", _first_line(self._matcher.get_error()))
            allowed_V = torch.zeros(vocab, dtype=torch.bool)
            allowed_V[self._eos_ids] = True
            return allowed_V
        bits = torch.frombuffer(mask, dtype=torch.uint8)
        flags = (bits[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
        return flags.flatten()[:vocab].bool()

    def _go_to(self, written: list[int]) -> bool:
        """Bring the matcher to the state after `written`; False where the grammar has no such text."""
        same = 0
        while same < min(len(written), len(self._consumed)) and written[same] == self._consumed[same]:
            same += 1
        if same < len(self._consumed):
            self._matcher.rollback(len(self._consumed) - same)
            del self._consumed[same:]
        rest = written[same:]
        num = self._matcher.try_consume_tokens(rest) if rest else 0
        self._consumed.extend(rest[:num])
        return num == len(rest)


def wanted_schema(response_format: dict[str, Any] | None) -> dict[str, Any] | bool | None:
    """The JSON schema that a response_format asks for; None for plain text."""
    if response_format is None or response_format.get("type") == "text":
        return None
    kind = response_format.get("type")
    if kind == "json_object":
        return ANY_OBJECT
    if kind != "json_schema":
        raise _refused('response_format needs a type: "text", "json_object" or "json_schema"')
    given = response_format.get("json_schema")
    schema = given.get("schema") if isinstance(given, dict) else None
    if not isinstance(schema, dict):
        raise _refused("response_format json_schema needs json_schema.schema, an object")
    return schema


def _refused(message: str) -> ApiError:
    return ApiError(400, message, param="response_format")


def _first_line(error: object) -> str:
    return (str(error).strip().splitlines() or ["unknown"])[0][:300]
