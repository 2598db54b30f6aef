"""What clients may send, and the one error they get back.

A request body is validated in full before it reaches the engine: types are strict (no "5" for 5, no true for
1), ranges are named, and a parameter nobody knows is refused with a suggestion rather than ignored, because a
misspelt parameter that does nothing costs its user a day. OpenAI parameters that cannot matter here (`user`,
`store`, ...) are accepted; those that would matter but are not built (`tools`, ...) are refused unless they
ask for nothing.

`ApiError` is every error a client sees, as OpenAI's object {"error": {message, type, param, code}}.
"""

from __future__ import annotations

import re
import reprlib
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import from_json

from shoestring.errors import UserError, suggest
from shoestring.serve.engine.sampling import check_setting

MAX_STOP_STRINGS, MAX_STOP_LENGTH = 16, 512
MAX_BIASES = 4096
MAX_LOGPROBS = 20
MAX_MESSAGES = 4096
MAX_STREAM_OPTIONS = 16
# Objects, arrays and keys in a body. Hundreds of thousands of them keep the parser and the garbage collector busy for
# so long, while no other thread runs, that streams would stop.
MAX_STRUCTURE = 1 << 16
ROLES = ("system", "developer", "user", "assistant", "tool")


class ApiError(Exception):
    """A response other than 200. Its message is for the client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    @property
    def type(self) -> str:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        return kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}


Penalty = Annotated[float, Field(ge=-2, le=2)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # accepted: chunks are never padded here


class Body(BaseModel):
    """What both kinds of generation share. None means the default, as everywhere in OpenAI's API."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: Any = Field(None, description="string, or list of strings")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = None
    ignore_eos: bool | None = None
    mark_drafts: bool | None = None  # say in a stream which tokens a drafter had guessed

    # OpenAI parameters that change nothing here, and values of unsupported ones that ask for nothing.
    IGNORED: ClassVar[frozenset[str]] = frozenset({"user"})
    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @field_validator("temperature", "top_p", "top_k", "min_p", "seed")
    @classmethod
    def _as_anywhere(cls, value: Any, field: ValidationInfo) -> Any:
        """The ranges of `Sampling`, and its words; what clients leave out has defaults of its own."""
        if value is not None:
            check_setting(str(field.field_name), value)
        return value

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> Any:
        known = [name for name in cls.model_fields if name not in cls.NEUTRAL]
        _check_entries(raw, "logit_bias", MAX_BIASES)
        _check_entries(raw, "stream_options", MAX_STREAM_OPTIONS)
        kept = {}
        for name, value in raw.items():
            if name in cls.NEUTRAL:
                if value is not None and value not in cls.NEUTRAL[name]:
                    raise ApiError(400, f"{name} is not supported by this server; leave it out", param=name)
            elif name in known:
                kept[name] = value
            elif name not in cls.IGNORED:
                raise _unknown(name, known)
        try:
            return cls.model_validate(kept)
        except ValidationError as error:
            raise _explained(error) from None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        good = isinstance(stop, list) and len(stop) <= MAX_STOP_STRINGS
        if not good or not all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_LENGTH for s in stop):
            raise ApiError(
                400,
                f"stop must be a string or up to {MAX_STOP_STRINGS} strings, "
                f"none empty or longer than {MAX_STOP_LENGTH} characters",
                param="stop",
            )
        return tuple(stop)

    def biases(self, vocab: int) -> tuple[tuple[int, float], ...]:
        found = []
        for key, value in (self.logit_bias or {}).items():
            token = int(key) if key.isascii() and key.isdecimal() and len(key) < 10 else -1
            if not 0 <= token < vocab:
                raise ApiError(
                    400, f"logit_bias names token {_shown(key)}; token ids are 0 to {vocab - 1}", param="logit_bias"
                )
            found.append((token, value))
        return tuple(found)


class CompletionBody(Body):
    prompt: Any = Field(None, description="string, list of strings, token ids, or list of lists of token ids")
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: int | None = None

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {"suffix": ("",)}

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or token ids."""
        given = self.prompt
        if _is_prompt(given):
            return [given]
        if isinstance(given, list) and given and all(_is_prompt(p) for p in given):
            return given
        raise ApiError(
            400,
            "prompt must be a string, a list of strings, a list of token ids or a list of such lists, not empty",
            param="prompt",
        )


class ChatBody(Body):
    messages: Any = Field(None, description="list of objects with `role` and `content`")
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: dict[str, Any] | None = None

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {
            *("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"),
            *("prompt_cache_retention", "parallel_tool_calls", "reasoning_effort", "verbosity"),
        }
    )
    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"], []),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
    }

    @property
    def num_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def chat(self) -> list[dict[str, str]]:
        """The messages with plain text contents, as chat templates want them."""
        if not isinstance(self.messages, list) or not self.messages:
            raise ApiError(400, "messages must be a list of at least one {role, content}", param="messages")
        if len(self.messages) > MAX_MESSAGES:
            raise ApiError(
                400, f"messages has {len(self.messages)} entries; at most {MAX_MESSAGES} are taken", param="messages"
            )
        return [_message(m, f"messages[{i}]") for i, m in enumerate(self.messages)]


def _message(given: Any, where: str) -> dict[str, str]:
    if not isinstance(given, dict):
        raise ApiError(400, f"{where} must be an object with role and content", param=where)
    role = given.get("role")
    if role not in ROLES:
        raise ApiError(400, f"{where}.role is {_shown(role)}; it must be one of {', '.join(ROLES)}", param=where)
    # Messages that the server wrote and a client sends back have these; empty ones mean nothing.
    extra = {k for k, v in given.items() if v} - {"role", "content", "name", "refusal", "annotations"}
    if extra:
        raise ApiError(400, f"{where} has {_shown(min(extra))}, which is not supported", param=where)
    message = {"role": "system" if role == "developer" else role, "content": _content(given, role, where)}
    if given.get("name") is not None:
        if not isinstance(given["name"], str):
            raise ApiError(400, f"{where}.name must be a string", param=where)
        message["name"] = given["name"]
    return message


def _content(message: dict[str, Any], role: str, where: str) -> str:
    content = message.get("content")
    if content is None and role == "assistant":
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [None]:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ApiError(
                400, f'{where}.content must be a string or a list of {{"type": "text", "text": ...}} parts', param=where
            )
        texts.append(part["text"])
    return "".join(texts)


class TokenizeBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    model: str | None = None
    prompt: str | None = None
    messages: Any = Field(None, description="list of objects with `role` and `content`")
    add_special_tokens: bool = True


class DetokenizeBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    model: str | None = None
    tokens: Any = Field(None, description="list of token ids")
    skip_special_tokens: bool = False


def validated(cls: type[BaseModel], raw: dict[str, Any]) -> Any:
    known = list(cls.model_fields)
    unknown = next((name for name in raw if name not in known), None)
    if unknown is not None:
        raise _unknown(unknown, known)
    try:
        return cls.model_validate(raw)
    except ValidationError as error:
        raise _explained(error) from None


def read_json(body: bytes) -> dict[str, Any]:
    """The JSON object in a request body, with text that can be encoded again.

    The parser is pydantic's: it is two to three times as fast as Python's (no other thread runs meanwhile) and refuses
    halves of surrogate pairs, written out or as bytes. Python's takes both, and they fail when they are encoded.
    """
    if has_much_structure(body):
        raise ApiError(
            400, f"the request body has more than {MAX_STRUCTURE} objects, arrays and keys", code="too_large"
        )
    try:
        raw = from_json(body.removeprefix(b"\xef\xbb\xbf"), allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        reason = str(error)[:200]
        if "recursion" in reason:
            raise ApiError(400, "the request body is nested too deeply", code="invalid_json") from None
        raise ApiError(400, f"the request body is not JSON in UTF-8: {reason}", code="invalid_json") from None
    if not isinstance(raw, dict):
        raise ApiError(400, "the request body must be a JSON object", code="invalid_json")
    return raw


_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


def has_much_structure(body: bytes) -> bool:
    """Whether there are more than MAX_STRUCTURE objects, arrays and keys; what is inside strings does not count."""

    def count(begin: int, end: int) -> int:
        return sum(body.count(mark, begin, end) for mark in (b"[", b"{", b":"))

    if count(0, len(body)) <= MAX_STRUCTURE:
        return False
    num = at = 0
    for string in _STRING.finditer(body):
        num += count(at, string.start())
        at = string.end()
        if num > MAX_STRUCTURE:
            return True
    return num + count(at, len(body)) > MAX_STRUCTURE


def _check_entries(raw: dict[str, Any], name: str, most: int) -> None:
    """Before validation, which would describe every wrong entry."""
    value = raw.get(name)
    if isinstance(value, dict) and len(value) > most:
        raise ApiError(400, f"{name} has {len(value)} entries; at most {most}", param=name)


def _unknown(name: str, known: list[str]) -> ApiError:
    hint = suggest(name, known)
    return ApiError(400, f"unknown parameter {_shown(name)}.{hint}", param=name[:100], code="unknown_parameter")


def _explained(error: ValidationError) -> ApiError:
    """The first thing that is wrong, in one line."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"] if not str(part).startswith("constrained-"))
    ours = first.get("ctx", {}).get("error")
    if isinstance(ours, UserError):  # of `check_setting`
        return ApiError(400, str(ours), param=where)
    reason = first["msg"][:1].lower() + first["msg"][1:]
    given = "" if first["type"] == "missing" else f" (given {_shown(first.get('input'))})"
    return ApiError(400, f"{where}: {reason}{given}", param=where[:100])


def are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(t) is int for t in value)


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or (bool(value) and are_ids(value))


_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 77


def _shown(value: Any) -> str:
    """A value for an error message; only the beginning of a large one is looked at."""
    text = _short.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
