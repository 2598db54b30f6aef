"""`/v1/responses` in its simple form: a chat by other names, without state.

A request becomes a `ChatBody` and goes the way of every chat. `ResponseObject` writes the answer as OpenAI's response
object, or as the typed events of its streams. Nothing is stored, so a client sends the whole conversation each time:
`previous_response_id` and `conversation` are refused, `store` has no effect.

Left out: tools other than functions, images and files, reasoning items, log-probabilities.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from shoestring.serve.http.engine_messages import ChoiceDelta
from shoestring.serve.http.request_schema import ApiError, Body, ChatBody, shown_value
from shoestring.serve.http.responses import CompletionResponse, written
from shoestring.serve.http.tool_calls import TextPart

TEXT_PARTS = ("input_text", "output_text", "text")
ROLES = ("system", "developer", "user", "assistant")


class ResponsesBody(Body):
    input: Any = Field(None, description="string, or list of messages, function calls and their outputs")
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    text: Any = Field(None, description="object with `format`: text, json_object or json_schema")
    tools: Any = Field(None, description="list of functions")
    tool_choice: Any = Field(None, description="none, auto, required, or a function")
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {
            *("user", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
            *("prompt_cache_options", "reasoning", "max_tool_calls"),
        }
    )
    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        "access_programs": ([],),
        "background": (False,),
        "context_management": (),
        "conversation": (),
        "image": (),
        "include": ([],),
        "mark_drafts": (False,),
        "max_tokens": (),
        "moderation": (),
        "n": (),
        "previous_response_id": (),
        "prompt": (),
        "stop": (),
        "stream_options": ({}, {"include_obfuscation": False}, {"include_obfuscation": True}),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }
    INSTEAD: ClassVar[dict[str, str]] = {
        "conversation": "send the whole conversation as input",
        "max_tokens": "use max_output_tokens",
        "previous_response_id": "nothing is stored, so send the whole conversation as input",
    }

    def as_chat(self) -> ChatBody:
        """The same as a chat. Anything wrong is a 400."""
        shared: tuple[str, ...] = (
            "model",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "seed",
            "stream",
            "logit_bias",
            "presence_penalty",
        )
        shared += ("frequency_penalty", "repetition_penalty", "min_tokens", "ignore_eos", "parallel_tool_calls")
        raw = {name: getattr(self, name) for name in shared}
        raw["messages"] = _messages(self.input, self.instructions)
        raw["max_completion_tokens"] = self.max_output_tokens
        raw["response_format"] = _response_format(self.text)
        raw["tools"] = None if self.tools is None else _chat_tools(self.tools)
        raw["tool_choice"] = _chat_tool_choice(self.tool_choice)
        chat: ChatBody = ChatBody.parse({name: value for name, value in raw.items() if value is not None})
        chat._ignored = self._ignored
        return chat


def _messages(given: Any, instructions: str | None) -> list[dict[str, Any]]:
    """Chat messages of an input. Calls belong to the assistant's message before them."""
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str) and given:
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise ApiError(400, "input must be a string or a list of items, not empty", param="input")
    for i, item in enumerate(given):
        where = f"input[{i}]"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            role = item.get("role")
            if role not in ROLES:
                roles = ", ".join(ROLES)
                raise ApiError(400, f"{where}.role is {shown_value(role)}; it must be one of {roles}", param="input")
            messages.append({"role": role, "content": _text(item.get("content"), f"{where}.content")})
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            if not all(isinstance(v, str) for v in (*function.values(), item.get("call_id"))):
                raise ApiError(400, f"{where} must have call_id, name and arguments, all strings", param="input")
            call = {"id": item["call_id"], "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            if not isinstance(item.get("call_id"), str):
                raise ApiError(400, f"{where}.call_id must be a string", param="input")
            output = _text(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
        else:
            known = "a message, a function_call or a function_call_output"
            raise ApiError(400, f"{where} has the type {shown_value(kind)}; it must be {known}", param="input")
    return messages


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    parts: list[Any] = content if isinstance(content, list) else [None]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") not in TEXT_PARTS or not isinstance(part.get("text"), str):
            form = '{"type": "input_text", "text": ...}'
            raise ApiError(400, f"{where} must be a string or a list of {form} parts", param="input")
    return "".join(part["text"] for part in parts)


def _response_format(text: Any) -> dict[str, Any] | None:
    if text is None:
        return None
    form = text.get("format") if isinstance(text, dict) else None
    if not isinstance(text, dict) or text.keys() - {"format", "verbosity"} or not isinstance(form, dict | None):
        raise ApiError(400, 'text must be {"format": {"type": ...}}', param="text")
    if form is None or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}}


def _chat_tools(given: Any) -> list[dict[str, Any]]:
    """Tools of chats have their function in an object of its own."""
    if not isinstance(given, list) or not all(isinstance(t, dict) and t.get("type") == "function" for t in given):
        form = '{"type": "function", "name": ..., "parameters": ...}'
        raise ApiError(400, f"tools must be a list of {form}; no other is built", param="tools")
    return [{"type": "function", "function": {k: v for k, v in t.items() if k != "type"}} for t in given]


def _chat_tool_choice(given: Any) -> Any:
    if isinstance(given, dict) and given.get("type") == "function" and "function" not in given:
        return {"type": "function", "function": {"name": given.get("name")}}
    return given


class ResponseObject:
    """The answer to one request, over the `CompletionResponse` that collects it: whole, or as events."""

    def __init__(self, collected: CompletionResponse, body: ResponsesBody) -> None:
        self._collected, self._body = collected, body
        self._choice = collected.choices[0]
        self.id = "resp_" + secrets.token_hex(24)
        self._message_id = "msg_" + secrets.token_hex(24)
        self._items: list[str] = []  # the ids of what the output has, in order: one message at most, and calls
        self._open: str | None = None  # the item that is written
        self._num_events = 0

    # -- what the handler asks of any answer -------------------------------------------------------------------
    @property
    def done(self) -> bool:
        return self._collected.done

    @property
    def size(self) -> int:
        return self._collected.size

    def add(self, index: int, delta: ChoiceDelta) -> None:
        self._collected.add(index, delta)
        for part in self._choice.fresh:
            item = self._message_id if isinstance(part, TextPart) else self._call_item(part.index)
            if item not in self._items:
                self._items.append(item)

    def whole(self) -> dict[str, Any]:
        if not self._items:  # an answer without a token of text
            self._items.append(self._message_id)
        return self._object(self._status, [self._item(item, "completed") for item in self._items])

    def first_chunks(self) -> list[str]:
        begun = {"response": self._object("in_progress", [])}
        return [self._event("response.created", begun), self._event("response.in_progress", begun)]

    def chunks(self, index: int, delta: ChoiceDelta) -> list[str]:
        """The events for this delta, which must have been added."""
        found: list[str] = []
        for part in self._choice.fresh:
            item = self._message_id if isinstance(part, TextPart) else self._call_item(part.index)
            if item != self._open:
                found += [*self._closing(), *self._opening(item)]
            if isinstance(part, TextPart):
                place = {**self._place(item), "content_index": 0, "logprobs": []}
                found.append(self._event("response.output_text.delta", {**place, "delta": part.text}))
            elif part.arguments:
                place = self._place(item)
                found.append(self._event("response.function_call_arguments.delta", {**place, "delta": part.arguments}))
        return found

    def last_chunks(self) -> list[str]:
        found = [] if self._items else self._opening(self._message_id)
        found += self._closing()
        return [*found, self._event(f"response.{self._status}", {"response": self.whole()})]

    def error_chunks(self, error: ApiError) -> list[str]:
        return [self._event("error", {"code": error.code, "message": error.message, "param": error.param})]

    # -- parts -------------------------------------------------------------------------------------------------
    @property
    def _status(self) -> str:
        return "incomplete" if self._choice.finish_reason == "length" else "completed"

    def _call_item(self, index: int) -> str:
        return "fc_" + self._choice.calls[index].id.removeprefix("call_")

    def _place(self, item: str) -> dict[str, Any]:
        return {"item_id": item, "output_index": self._items.index(item)}

    def _item(self, item: str, status: str) -> dict[str, Any]:
        if status == "completed" and self._status == "incomplete" and item == self._items[-1]:
            status = "incomplete"
        if item == self._message_id:
            content = [] if status == "in_progress" else [_text_part(self._choice.text)]
            return {"id": item, "type": "message", "status": status, "role": "assistant", "content": content}
        call = next(c for i, c in enumerate(self._choice.calls) if self._call_item(i) == item)
        arguments = "" if status == "in_progress" else call.arguments
        told = {"id": item, "type": "function_call", "status": status, "call_id": call.id, "name": call.name}
        return {**told, "arguments": arguments}

    def _opening(self, item: str) -> list[str]:
        if item not in self._items:
            self._items.append(item)
        self._open, at = item, self._place(item)
        added = {"output_index": at["output_index"], "item": self._item(item, "in_progress")}
        found = [self._event("response.output_item.added", added)]
        if item == self._message_id:
            found.append(self._event("response.content_part.added", {**at, "content_index": 0, "part": _text_part("")}))
        return found

    def _closing(self) -> list[str]:
        """The events that end the item that is written. A message that goes on after a call is told again whole."""
        item, self._open = self._open, None
        if item is None:
            return []
        at, whole = self._place(item), self._item(item, "completed")
        if item == self._message_id:
            part, place = whole["content"][0], {**at, "content_index": 0}
            found = [
                self._event("response.output_text.done", {**place, "text": part["text"], "logprobs": []}),
                self._event("response.content_part.done", {**place, "part": part}),
            ]
        else:
            ended = {**at, "name": whole["name"], "arguments": whole["arguments"]}
            found = [self._event("response.function_call_arguments.done", ended)]
        return [*found, self._event("response.output_item.done", {"output_index": at["output_index"], "item": whole})]

    def _event(self, kind: str, told: dict[str, Any]) -> str:
        self._num_events += 1
        body = {"type": kind, **told, "sequence_number": self._num_events - 1}
        return f"event: {kind}\ndata: {written(body)}\n\n"

    def _object(self, status: str, output: Sequence[dict[str, Any]]) -> dict[str, Any]:
        body = self._body
        ended = status in ("completed", "incomplete")
        form = (body.text or {}).get("format") or {"type": "text"}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._collected.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._collected.model,
            "output": list(output),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": form},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": self._usage() if ended else None,
        }

    def _usage(self) -> dict[str, Any]:
        counted = self._collected.usage()
        return {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": counted["prompt_tokens_details"]["cached_tokens"]},
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counted["total_tokens"],
        }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
