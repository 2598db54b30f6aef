"""What clients may send, and the one error they get back.

A request body is validated in full before it reaches the engine: types are strict (no "5" for 5, no true for 1), ranges
are named, and a parameter nobody knows is refused with a suggestion rather than ignored, because a misspelt parameter
that does nothing costs its user a day. OpenAI parameters that cannot matter here (`user`, `store`, ...) are accepted,
and a header of the answer names them; those that would matter but are not built (`audio`, ...) are refused unless they
ask for nothing.

`ApiError` is every error a client sees, as OpenAI's object {"error": {message, type, param, code}}.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, ValidationInfo, field_validator
from pydantic_core import from_json

from shoestring.errors import UserError, suggest
from shoestring.serve.engine.sampling import check_setting

MAX_STOP_STRINGS, MAX_STOP_LENGTH = 16, 512
MAX_BIASES = 4096
MAX_LOGPROBS = 20
MAX_MESSAGES = 4096
MAX_STREAM_OPTIONS = 16
MAX_TOOLS = 128  # as OpenAI
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
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


# `check_setting` has the ranges; those here are for the schema, from which the reference is made.
Penalty = Annotated[float, Field(json_schema_extra={"minimum": -2, "maximum": 2})]
RepetitionPenalty = Annotated[float, Field(json_schema_extra={"exclusiveMinimum": 0, "maximum": 100})]


def without_effect(names: Iterable[str]) -> dict[str, str]:
    """The header that names settings which are accepted and change nothing."""
    told = ", ".join(sorted(names))
    return {"X-Shoestring-Without-Effect": told} if told else {}


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
    repetition_penalty: RepetitionPenalty | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = None
    ignore_eos: bool | None = None
    mark_drafts: bool | None = None  # say in a stream which tokens a drafter had guessed

    _ignored: tuple[str, ...] = PrivateAttr(())  # that the client gave

    # OpenAI parameters that change nothing here, and values of unsupported ones that ask for nothing.
    IGNORED: ClassVar[frozenset[str]] = frozenset({"user"})
    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {}
    INSTEAD: ClassVar[dict[str, str]] = {}  # what to use instead of an unsupported parameter

    @field_validator(
        *("temperature", "top_p", "top_k", "min_p", "seed"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    )
    @classmethod
    def _as_anywhere(cls, value: Any, field: ValidationInfo) -> Any:
        """The ranges of the engine, and its words; what clients leave out has defaults of its own."""
        if value is not None:
            check_setting(str(field.field_name), value)
        return value

    @classmethod
    @cache
    def _known(cls) -> list[str]:
        return [name for name in cls.model_fields if name not in cls.NEUTRAL]

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> Any:
        known = cls._known()
        _check_entries(raw, "logit_bias", MAX_BIASES)
        _check_entries(raw, "stream_options", MAX_STREAM_OPTIONS)
        kept, ignored = {}, list[str]()
        for name, value in raw.items():
            if name in cls.NEUTRAL:
                if value is not None and value not in cls.NEUTRAL[name]:
                    instead = cls.INSTEAD.get(name, "leave it out")
                    raise ApiError(400, f"{name} is not supported by this server; {instead}", param=name)
            elif name in known:
                kept[name] = value
            elif name not in cls.IGNORED:
                raise _unknown(name, known)
            elif value is not None:
                ignored.append(name)
        try:
            made = cls.model_validate(kept)
        except ValidationError as error:
            raise _explained(error) from None
        made._ignored = tuple(ignored)
        return made

    @property
    def headers(self) -> dict[str, str]:
        """What the answer says about its request."""
        return without_effect(self._ignored)

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
                known = f"token ids are 0 to {vocab - 1}"
                raise ApiError(400, f"logit_bias names token {shown_value(key)}; {known}", param="logit_bias")
            found.append((token, value))
        return tuple(found)


class LoadAdapterBody(BaseModel):
    """As vLLM's."""

    model_config = ConfigDict(strict=True, extra="forbid")
    lora_name: Annotated[str, Field(min_length=1, max_length=200)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]


class UnloadAdapterBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    lora_name: Annotated[str, Field(min_length=1, max_length=200)]
    lora_int_id: int | None = None  # accepted: vLLM's number of it


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
    tools: Any = Field(None, description="list of functions")
    tool_choice: Any = Field(None, description="none, auto, required, or a function")
    parallel_tool_calls: bool | None = None

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {
            *("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"),
            *("prompt_cache_retention", "prompt_cache_options", "reasoning_effort", "verbosity"),
        }
    )
    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"], []),
        "audio": (),
        "moderation": (),
        "prediction": (),
        "web_search_options": (),
    }
    INSTEAD: ClassVar[dict[str, str]] = {"functions": "use tools", "function_call": "use tool_choice"}

    @property
    def num_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def tool_request(self) -> ToolRequest | None:
        """The tools that the model may use; None where it may use none."""
        tools = _tools(self.tools)
        mode, names = _tool_choice(self.tool_choice, [tool.name for tool in tools])
        if not tools or mode == "none":
            return None
        required = [tool for tool in tools if tool.name in names] if mode == "required" else []
        return ToolRequest(tools, required, self.parallel_tool_calls is not False)

    @property
    def chat(self) -> list[dict[str, Any]]:
        """The messages with plain text contents, as chat templates want them."""
        if not isinstance(self.messages, list) or not self.messages:
            raise ApiError(400, "messages must be a list of at least one {role, content}", param="messages")
        if len(self.messages) > MAX_MESSAGES:
            raise ApiError(
                400, f"messages has {len(self.messages)} entries; at most {MAX_MESSAGES} are taken", param="messages"
            )
        _check_arguments_size(self.messages)
        return [_message(m, f"messages[{i}]") for i, m in enumerate(self.messages)]


@dataclass(frozen=True)
class Tool:
    name: str
    parameters: dict[str, Any]  # a JSON schema
    given: dict[str, Any]  # as the client wrote it, for the chat template


@dataclass(frozen=True)
class ToolRequest:
    tools: list[Tool]
    required: list[Tool]  # of which one must be called; none: the model decides
    parallel: bool  # several calls in one answer


NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def _tools(given: Any) -> list[Tool]:
    if given is None:
        return []
    if not isinstance(given, list) or len(given) > MAX_TOOLS:
        raise ApiError(400, f"tools must be a list of at most {MAX_TOOLS} functions", param="tools")
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(given)]
    names = [tool.name for tool in tools]
    again = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if again is not None:
        raise ApiError(400, f"tools has two functions with the name {shown_value(again)}", param="tools")
    return tools


def _tool(given: Any, where: str) -> Tool:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(given, dict) or given.get("type") != "function" or not isinstance(function, dict):
        raise ApiError(
            400,
            f'{where} must be {{"type": "function", "function": {{"name": ..., "parameters": ...}}}}',
            param="tools",
        )
    known = ("name", "description", "parameters", "strict")
    unknown = next((key for key in function if key not in known), None)
    if unknown is not None:
        raise ApiError(400, f"{where}.function has {shown_value(unknown)}, which is not supported", param="tools")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise ApiError(
            400,
            f"{where}.function.name is {shown_value(name)}; give 1 to 64 letters, digits, '_', '-' or '.'",
            param="tools",
        )
    if not isinstance(function.get("description"), str | None):
        raise ApiError(400, f"{where}.function.description must be a string", param="tools")
    if not isinstance(function.get("strict"), bool | None):
        raise ApiError(400, f"{where}.function.strict must be true or false", param="tools")
    if not isinstance(parameters, dict | None):
        raise ApiError(400, f"{where}.function.parameters must be a JSON schema, an object", param="tools")
    parameters = NO_PARAMETERS if parameters is None else parameters
    # Templates write descriptions and parameters without asking whether there are any.
    shown = {"name": name, "description": function.get("description") or "", "parameters": parameters}
    return Tool(name, parameters, {"type": "function", "function": shown})


def _tool_choice(given: Any, names: list[str]) -> tuple[Literal["none", "auto", "required"], list[str]]:
    """The mode, and the names of the functions that may be called."""
    if given is None or given == "auto":
        return "auto", names
    if given == "none":
        return "none", names
    if given == "required":
        if not names:
            raise ApiError(400, "tool_choice is required, but there are no tools", param="tool_choice")
        return "required", names
    function = given.get("function") if isinstance(given, dict) and given.get("type") == "function" else None
    if not isinstance(function, dict):
        raise ApiError(
            400,
            'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}',
            param="tool_choice",
        )
    name = function.get("name")
    if not isinstance(name, str) or name not in names:
        raise ApiError(400, f"tool_choice names {shown_value(name)}, which is not among the tools", param="tool_choice")
    return "required", [name]


def _check_arguments_size(messages: list[Any]) -> None:
    """Arguments are JSON in strings, whose structure `read_json` has not counted."""
    calls = [call for m in messages if isinstance(m, dict) for call in _list(m.get("tool_calls"))]
    functions = [call.get("function") for call in calls if isinstance(call, dict)]
    texts = [f.get("arguments") for f in functions if isinstance(f, dict)]
    if has_much_structure(b",".join(text.encode() for text in texts if isinstance(text, str))):
        raise ApiError(
            400,
            f"the arguments of tool_calls have more than {MAX_STRUCTURE} objects, arrays and keys",
            code="too_large",
        )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _message(given: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ApiError(400, f"{where} must be an object with role and content", param=where)
    role = given.get("role")
    if role not in ROLES:
        raise ApiError(400, f"{where}.role is {shown_value(role)}; it must be one of {', '.join(ROLES)}", param=where)
    # Messages that the server wrote and a client sends back have these; empty ones mean nothing.
    known = {"role", "content", "name", "refusal", "annotations"}
    known |= {"assistant": {"tool_calls"}, "tool": {"tool_call_id"}}.get(role, set())
    extra = {k for k, v in given.items() if v} - known
    if extra:
        raise ApiError(400, f"{where} has {shown_value(min(extra))}, which is not supported", param=where)
    message: dict[str, Any] = {"role": "system" if role == "developer" else role}
    message["content"] = _content(given, role, where)
    for key in ("name", "tool_call_id"):
        if given.get(key) is not None:
            if not isinstance(given[key], str):
                raise ApiError(400, f"{where}.{key} must be a string", param=where)
            message[key] = given[key]
    if given.get("tool_calls"):
        if not isinstance(given["tool_calls"], list):
            raise ApiError(400, f"{where}.tool_calls must be a list", param=where)
        message["tool_calls"] = [_tool_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(given["tool_calls"])]
    return message


def _tool_call(given: Any, where: str) -> dict[str, Any]:
    """A call that the model made, with its arguments as an object: so templates want them."""
    function = given.get("function") if isinstance(given, dict) else None
    good = isinstance(function, dict) and isinstance(function.get("name"), str) and isinstance(given.get("id"), str)
    if not good or given.get("type", "function") != "function":
        form = '{"id": ..., "type": "function", "function": {"name": ..., "arguments": "{...}"}}'
        raise ApiError(400, f"{where} must be {form}", param=where)
    assert isinstance(function, dict)
    arguments = function.get("arguments")
    try:
        arguments = from_json(arguments or "{}", allow_inf_nan=False) if isinstance(arguments, str | None) else None
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise ApiError(400, f"{where}.function.arguments must be a JSON object, written as a string", param=where)
    return {"id": given["id"], "type": "function", "function": {"name": function["name"], "arguments": arguments}}


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
    return_token_strs: bool = False


class EmbeddingBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    model: str | None = None
    input: Any = Field(None, description="string, list of strings, token ids, or list of lists of token ids")
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    pooling: Literal["mean", "last", "cls"] | None = None
    user: Any = Field(None, description="without effect")

    @property
    def inputs(self) -> list[str | list[int]]:
        given = self.input
        if _is_prompt(given) and given:
            return [given]
        if isinstance(given, list) and given and all(_is_prompt(p) and p for p in given):
            return given
        raise ApiError(
            400,
            "input must be a string, a list of strings, a list of token ids or a list of such lists; none may be empty",
            param="input",
        )


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

    if len(body) <= MAX_STRUCTURE or count(0, len(body)) <= MAX_STRUCTURE:
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
    return ApiError(400, f"unknown parameter {shown_value(name)}.{hint}", param=name[:100], code="unknown_parameter")


def _explained(error: ValidationError) -> ApiError:
    """The first thing that is wrong, in one line."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"] if not str(part).startswith("constrained-"))
    ours = first.get("ctx", {}).get("error")
    if isinstance(ours, UserError):  # of `check_setting`
        return ApiError(400, str(ours), param=where)
    reason = first["msg"][:1].lower() + first["msg"][1:]
    given = "" if first["type"] == "missing" else f" (given {shown_value(first.get('input'))})"
    return ApiError(400, f"{where}: {reason}{given}", param=where[:100])


def are_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int}  # a bool is none


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or (bool(value) and are_ids(value))


_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 77


def shown_value(value: Any) -> str:
    """A value for an error message; only the beginning of a large one is looked at."""
    text = _short.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
