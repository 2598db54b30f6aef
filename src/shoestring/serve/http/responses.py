"""Responses in OpenAI's form: whole objects and the chunks of a stream, for completions and for chats.

A `CompletionResponse` collects the deltas of all choices of one request and can be written either way.
Everything here is pure but for the id and the time of creation.

Every generated token counts in `usage` and appears in the log-probabilities, also the one that ended the text
and those cut off with a stop string.
"""

from __future__ import annotations

import base64
import codecs
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from shoestring.model.tokenizer import Tokenizer
from shoestring.serve.engine.logit_rules import TokenLogprob
from shoestring.serve.http.engine_messages import ChoiceDelta
from shoestring.serve.http.request_parsing import ToolUse
from shoestring.serve.http.request_schema import ApiError
from shoestring.serve.http.tool_calls import CallPart, Part, TextPart, ToolCallParser

LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have


class TextOffsets:
    """Where tokens begin in the text of a completion. It has whole characters only, so the tokens of one begin where it
    does; and no special tokens but those that a prompt was written with."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes, self._special, self._num = tokenizer.token_bytes, tokenizer.special_ids, 0
        self._new_decoder = codecs.getincrementaldecoder("utf-8")
        self._decode = self._new_decoder("replace").decode

    def of_prompt(self, prompt: Sequence[int], echo: str) -> list[int]:
        """Of its tokens in the text that it is repeated as; what is written begins behind that."""
        decode, at, offsets = self._new_decoder("replace").decode, 0, []
        for token in prompt:
            offsets.append(min(at, len(echo)))
            text = decode(self._bytes(token))
            if token in self._special and not echo.startswith(text, at):  # a BOS
                continue
            at += len(text) - (text[:1] == " " != echo[at : at + 1])  # SentencePiece puts spaces before some words
        self._num = len(echo)
        return offsets

    def of_next(self, token: int) -> int:
        offset = self._num
        if token not in self._special:
            self._num += len(self._decode(self._bytes(token)))
        return offset


@dataclass
class Call:
    """A tool call, as far as it is written."""

    id: str
    name: str
    arguments: str = ""

    def body(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass
class Choice:
    text: str = ""  # with tools: what stands outside of calls
    num_tokens: int = 0
    num_cached: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: str | None = None
    offsets: TextOffsets | None = None  # of the log-probabilities of a completion
    begun: bool = False  # its first chunk has been sent
    parser: ToolCallParser | None = None
    calls: list[Call] = field(default_factory=list)
    fresh: list[Part] = field(default_factory=list)  # of the delta added last
    # Which weights wrote it, and from which token on, where they may change; an addition to OpenAI's form.
    weights: list[dict[str, Any]] = field(default_factory=list)

    @property
    def marked(self) -> dict[str, Any]:
        return {"weights": self.weights} if self.weights else {}

    def add_text(self, text: str, ended: bool) -> None:
        if self.parser is None:
            self.fresh = [TextPart(text)] if text else []
            self.text += text
            return
        self.fresh = [*self.parser.feed(text), *(self.parser.finish() if ended else ())]
        for part in self.fresh:
            if isinstance(part, TextPart):
                self.text += part.text


@dataclass
class CompletionResponse:
    """The response to one request: choice i belongs to prompt i // n."""

    model: str
    tokenizer: Tokenizer
    prompts: list[list[int]]
    echo: list[str] | None  # the prompt texts, if the client wants them before the completions
    n: int
    logprobs: bool
    chat: bool
    include_usage: bool = False
    mark_drafts: bool = False
    tools: ToolUse | None = None
    id: str = ""
    created: int = 0
    choices: list[Choice] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.id = ("chatcmpl-" if self.chat else "cmpl-") + secrets.token_hex(12)
        self.created = int(time.time())
        self._num_done = 0
        self._is_plain = not self.logprobs and not self.mark_drafts  # most events tell a text and nothing else
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        # What all chunks begin with; without the closing brace.
        self._chunk_head = f'{{"id":"{self.id}","object":"{kind}","created":{self.created},"model":{QUOTE(self.model)}'
        self._token_bytes = self.tokenizer.token_bytes
        make = None if self.tools is None else self.tools.parser
        self.choices = [Choice(parser=None if make is None else make()) for _ in range(len(self.prompts) * self.n)]

    @property
    def done(self) -> bool:
        return self._num_done == len(self.choices)

    @property
    def num_new(self) -> int:
        return sum(c.num_tokens for c in self.choices)

    @property
    def size(self) -> int:
        """Entries to write: tokens, and their log-probabilities with alternatives."""
        scored = (entry for c in self.choices for entry in (*c.logprobs, *(c.prompt_logprobs or ())))
        return self.num_new + sum(1 + len(entry.top) for entry in scored if entry is not None)

    def add(self, index: int, delta: ChoiceDelta) -> None:
        choice = self.choices[index]
        choice.add_text(delta.text, delta.finish_reason is not None)
        if choice.parser is not None:
            self._add_calls(choice)
        choice.num_tokens += len(delta.token_ids)
        choice.num_cached = max(choice.num_cached, delta.num_cached)
        choice.logprobs.extend(delta.logprobs)
        if delta.prompt_logprobs is not None:
            choice.prompt_logprobs = choice.prompt_logprobs or []
            choice.prompt_logprobs.extend(delta.prompt_logprobs)
        if delta.versions:
            choice.weights = [{"version": version, "first_token": first} for version, first in delta.versions]
        if delta.finish_reason is not None:
            self._num_done += choice.finish_reason is None
            called = choice.calls and delta.finish_reason == "stop"
            choice.finish_reason = "tool_calls" if called else delta.finish_reason

    def _add_calls(self, choice: Choice) -> None:
        for part in choice.fresh:
            if isinstance(part, CallPart):
                if part.name is not None:
                    assert self.tools is not None
                    choice.calls.append(Call(self.tools.form.call_id(), part.name))
                choice.calls[part.index].arguments += part.arguments

    def usage(self) -> dict[str, Any]:
        prompt = sum(len(p) for p in self.prompts)  # n choices of one prompt count it once
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.num_new,
            "total_tokens": prompt + self.num_new,
            "prompt_tokens_details": {"cached_tokens": sum(c.num_cached for c in self.choices[:: self.n])},
        }

    # -- whole ----------------------------------------------------------------------------------------------
    def whole(self) -> dict[str, Any]:
        kind = "chat.completion" if self.chat else "text_completion"
        choices = [self._whole_choice(i) for i in range(len(self.choices))]
        return {**self._head(kind), "choices": choices, "usage": self.usage()}

    def _whole_choice(self, index: int) -> dict[str, Any]:
        choice = self.choices[index]
        common = {"index": index, "finish_reason": choice.finish_reason, **choice.marked}
        if self.chat:
            message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
            if choice.calls:
                message |= {"content": choice.text or None, "tool_calls": [call.body() for call in choice.calls]}
            return {**common, "message": message, "logprobs": self._chat_logprobs(choice.logprobs)}
        before = "" if self.echo is None else self.echo[index // self.n]
        return {**common, "text": before + choice.text, "logprobs": self._text_logprobs(index, choice.logprobs)}

    # -- stream ---------------------------------------------------------------------------------------------
    def chunks(self, index: int, delta: ChoiceDelta) -> list[str]:
        """The events for this delta, which must have been added."""
        choice = self.choices[index]
        if self._is_plain and delta.text and choice.begun and delta.finish_reason is None and choice.parser is None:
            return [self._text_event(index, delta.text)]
        has_tokens = bool(delta.text or delta.token_ids)
        found = []
        if self.chat:
            if not choice.begun:
                found.append(
                    self._chat_chunk(index, {"role": "assistant", "content": "" if self.tools is None else None})
                )
            contents = [self._chat_content(choice, part) for part in choice.fresh]
            if not contents and has_tokens and (self.logprobs or self.mark_drafts):
                contents = [{"content": ""}]
            for i, content in enumerate(contents):  # the tokens are told once
                found.append(self._chat_chunk(index, content, delta if i == 0 else None))
            if delta.finish_reason is not None:
                found.append(self._chat_chunk(index, {}, finish_reason=choice.finish_reason, more=choice.marked))
        elif has_tokens or delta.finish_reason is not None:
            before = "" if choice.begun or self.echo is None else self.echo[index // self.n]
            logprobs = self._text_logprobs(index, delta.logprobs)
            marks = self._marks(delta) | choice.marked
            part = {"index": index, "text": before + delta.text, "logprobs": logprobs, **marks}
            found.append(self._event([{**part, "finish_reason": delta.finish_reason}]))
        choice.begun = choice.begun or bool(found)
        return found

    def first_chunks(self) -> list[str]:
        """Nothing is told before the first token."""
        return []

    def error_chunks(self, error: ApiError) -> list[str]:
        return [event(error.body()), "data: [DONE]\n\n"]

    def last_chunks(self) -> list[str]:
        usage = [self._event([], self.usage())] if self.include_usage else []
        return [*usage, "data: [DONE]\n\n"]

    def _chat_content(self, choice: Choice, part: Part) -> dict[str, Any]:
        if isinstance(part, TextPart):
            return {"content": part.text}
        call: dict[str, Any] = {"index": part.index, "function": {"arguments": part.arguments}}
        if part.name is not None:
            whole = choice.calls[part.index]
            function = {"name": whole.name, "arguments": part.arguments}
            call = {"index": part.index, "id": whole.id, "type": "function", "function": function}
        return {"tool_calls": [call]}

    def _chat_chunk(
        self,
        index: int,
        content: dict[str, Any],
        delta: ChoiceDelta | None = None,
        finish_reason: str | None = None,
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        logprobs = self._chat_logprobs(delta.logprobs) if delta is not None and delta.logprobs else None
        marks = {} if delta is None else self._marks(delta)
        return self._event(
            [{"index": index, "delta": content, "logprobs": logprobs, "finish_reason": finish_reason, **marks, **more}]
        )

    def _marks(self, delta: ChoiceDelta) -> dict[str, Any]:
        """Which tokens of a chunk were drafted, for clients that want it; an addition to OpenAI's form."""
        if not self.mark_drafts:
            return {}
        pairs = zip(delta.token_ids, delta.drafted, strict=True)
        return {"tokens": [{"bytes": list(self._token_bytes(t)), "drafted": d} for t, d in pairs]}

    def _text_event(self, index: int, text: str) -> str:
        """What `_event` writes of a text alone, in a third of the time."""
        told = f'"delta":{{"content":{QUOTE(text)}}}' if self.chat else f'"text":{QUOTE(text)}'
        more = ',"usage":null' if self.include_usage else ""
        choice = f'{{"index":{index},{told},"logprobs":null,"finish_reason":null}}'
        return f'data: {self._chunk_head},"choices":[{choice}]{more}}}\n\n'

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> str:
        told = ENCODE(choices) if self._is_plain else written(choices)
        more = f',"usage":{"null" if usage is None else ENCODE(usage)}' if self.include_usage else ""
        return f'data: {self._chunk_head},"choices":{told}{more}}}\n\n'

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    # -- log-probabilities ----------------------------------------------------------------------------------
    def _chat_logprobs(self, given: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None

        def entry(token: int, logprob: float) -> dict[str, Any]:
            raw = self._token_bytes(token)
            return {"token": raw.decode(errors="replace"), "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(raw)}

        content = [{**entry(g.token, g.logprob), "top_logprobs": [entry(t, p) for t, p in g.top]} for g in given]
        return {"content": content, "refusal": None}

    def _text_logprobs(self, index: int, given: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """OpenAI's older form; advances the choice's offsets. The prompt comes first where echoed."""
        if not self.logprobs:
            return None
        choice, prompt = self.choices[index], self.prompts[index // self.n]
        choice.offsets = choice.offsets or TextOffsets(self.tokenizer)
        entries: list[TokenLogprob | None] = list(given)
        tokens, offsets = [g.token for g in given], list[int]()
        if self.echo is not None and not choice.begun:
            assert choice.prompt_logprobs is not None
            entries = [*choice.prompt_logprobs, *entries]
            tokens = [*prompt, *tokens]
            offsets = choice.offsets.of_prompt(prompt, self.echo[index // self.n])
        offsets += [choice.offsets.of_next(g.token) for g in given]
        return {
            "tokens": [self._name(token) for token in tokens],
            "token_logprobs": [None if e is None else max(e.logprob, LEAST_LOGPROB) for e in entries],
            "top_logprobs": [None if e is None else self._top(e) for e in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens and, as OpenAI has it, the chosen one."""
        pairs = [*entry.top, (entry.token, entry.logprob)]
        top: dict[str, float] = {}
        for token, logprob in pairs:
            top.setdefault(self._name(token), max(logprob, LEAST_LOGPROB))
        return top

    def _name(self, token: int) -> str:
        raw = self._token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:  # part of a character: named by its bytes, so that names differ
            return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)


def embedding_response(
    model: str, vectors_ND: Tensor, num_tokens: int, dimensions: int, as_base64: bool
) -> dict[str, Any]:
    """Vectors of length 1, of their first `dimensions` numbers."""
    found = torch.nn.functional.normalize(vectors_ND[:, :dimensions].float(), dim=1)
    data = []
    for index, vector in enumerate(found):
        told: Any = vector.tolist()
        if as_base64:
            told = base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()
        data.append({"object": "embedding", "index": index, "embedding": told})
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}


ENCODE = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
QUOTE = json.encoder.encode_basestring  # of a text: what ENCODE writes
PIECE = 64  # entries of a list that are written at once


def event(body: dict[str, Any]) -> str:
    return f"data: {written(body)}\n\n"


def written(value: Any) -> str:
    return "".join(json_pieces(value))


def json_pieces(value: Any) -> Iterator[str]:
    """`value` as JSON, long lists in pieces: no other thread runs while the library writes one."""
    if isinstance(value, dict):
        yield "{"
        for i, (name, inner) in enumerate(value.items()):
            yield ("," if i else "") + json.dumps(name, ensure_ascii=False) + ":"
            yield from json_pieces(inner)
        yield "}"
    elif isinstance(value, list) and any(isinstance(v, dict | list) for v in value[:1]) and len(value) <= PIECE:
        yield "["
        for i, inner in enumerate(value):
            yield "," if i else ""
            yield from json_pieces(inner)
        yield "]"
    elif isinstance(value, list) and len(value) > PIECE:
        yield "["
        for i in range(0, len(value), PIECE):
            yield ("," if i else "") + ENCODE(value[i : i + PIECE])[1:-1]
        yield "]"
    else:
        yield ENCODE(value)
