"""Tools as OpenAI's own client uses them: choices, streams, results sent back, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("llguidance")
from serving import running  # noqa: E402

from tiny import chat_tokenizer  # noqa: E402

# The part of Qwen2.5's template that has to do with tools.
TEMPLATE = """
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n<tools>' }}
  {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
  {{- '\\n</tools>\\n<tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
  {{- '<|im_start|>' + message.role + '\\n' + message.content }}
  {%- for tool_call in message.tool_calls or [] %}
    {%- set call = tool_call.function %}
    {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson + '}\\n</tool_call>' }}
  {%- endfor %}
  {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Bonn"]}}, "required": ["city"]}
CITY["additionalProperties"] = False  # type: ignore[assignment]


def function(name: str, parameters: dict[str, Any] | None = CITY) -> dict[str, Any]:
    made: dict[str, Any] = {"name": name, "description": f"Gives the {name}."}
    return {"type": "function", "function": made if parameters is None else {**made, "parameters": parameters}}


def called(arguments: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": arguments}}]}


TOOLS = [function("weather"), function("time"), function("now", None)]
ASK: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Weather?"}],
    "seed": 3,
    "max_tokens": 600,
}


@pytest.fixture(scope="module")
def chats() -> Iterator[Any]:
    with running(TEMPLATE) as service:
        yield openai.OpenAI(base_url=f"{service.url}/v1", api_key="x", max_retries=0).chat.completions


def test_required_calls_follow_their_schema(chats: Any) -> None:
    named = {"type": "function", "function": {"name": "time"}}
    for choice, names in (("required", {"weather", "time", "now"}), (named, {"time"})):
        answer = chats.create(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, n=2, **ASK)
        for found in answer.choices:
            assert found.finish_reason == "tool_calls" and found.message.content is None
            (call,) = found.message.tool_calls
            assert call.type == "function" and call.id.startswith("call_") and call.function.name in names
            arguments = json.loads(call.function.arguments)
            assert arguments == {} if call.function.name == "now" else arguments["city"] in ("Rome", "Bonn")
        assert len({c.message.tool_calls[0].id for c in answer.choices}) == 2


def test_a_stream_builds_the_same_calls(chats: Any) -> None:
    ask = {**ASK, "tools": TOOLS, "tool_choice": "required", "logprobs": True, "max_tokens": 150}
    whole = chats.create(**ask).choices[0]
    chunks = [c.choices[0] for c in chats.create(stream=True, **ask)]
    assert chunks[0].delta.role == "assistant" and chunks[0].delta.content is None
    assert chunks[-1].finish_reason == whole.finish_reason and not chunks[-1].delta.tool_calls
    assert len(whole.message.tool_calls) > 1
    deltas = [call for c in chunks for call in c.delta.tool_calls or []]
    for index, expected in enumerate(whole.message.tool_calls):
        first, *rest = [d for d in deltas if d.index == index]
        assert first.function.name == expected.function.name and first.id and first.type == "function"
        assert all(d.id is None and d.function.name is None for d in rest)
        assert "".join(d.function.arguments for d in (first, *rest)) == expected.function.arguments
    assert not any(c.delta.content for c in chunks)
    streamed = [t.bytes for c in chunks if c.logprobs for t in c.logprobs.content]
    assert streamed == [t.bytes for t in whole.logprobs.content]


def test_a_call_that_is_cut_off_says_so(chats: Any) -> None:
    found = chats.create(tools=TOOLS, tool_choice="required", **{**ASK, "max_tokens": 50}).choices[0]
    assert found.finish_reason == "length"
    assert len(found.message.tool_calls) == 1 and "}" not in found.message.tool_calls[0].function.arguments


def test_calls_and_results_reach_the_template(chats: Any) -> None:
    called = chats.create(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **ASK).choices[0].message
    (call,) = called.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    messages = [*ASK["messages"], called.model_dump(), result]
    answer = chats.create(tools=TOOLS, **{**ASK, "messages": messages, "max_tokens": 3})
    assert answer.choices[0].finish_reason in ("stop", "length")
    function = {"name": call.function.name, "arguments": json.loads(call.function.arguments)}
    plain = {"role": "assistant", "content": "", "tool_calls": [{"id": call.id, "function": function}]}
    tools = [{**t, "function": {**t["function"], "parameters": t["function"].get("parameters")}} for t in TOOLS]
    tools[2]["function"]["parameters"] = {"type": "object", "properties": {}, "additionalProperties": False}
    from transformers.utils.chat_template_utils import render_jinja_template

    chat = [*ASK["messages"], plain, result]
    (theirs,), _ = render_jinja_template([chat], tools=tools, chat_template=TEMPLATE, add_generation_prompt=True)
    assert call.function.name in theirs and "<tools>" in theirs
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = TEMPLATE
    assert tokenizer.render_chat(chat, tools=tools) == theirs
    assert answer.usage.prompt_tokens == len(tokenizer.encode(theirs, special=False))
    # With tool_choice none the model does not see the tools, and what it writes is text.
    without = chats.create(tools=TOOLS, tool_choice="none", **{**ASK, "max_tokens": 3})
    assert without.usage.prompt_tokens < 60 and without.choices[0].message.tool_calls is None


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, r"tools\[0\] must be"),
    ({"tools": [function("a b")]}, "1 to 64 letters"),
    ({"tools": [function("a"), function("a")]}, "two functions"),
    ({"tools": [function("a")] * 129}, "at most 128"),
    ({"tools": [function("a", [])]}, "must be a JSON schema"),  # type: ignore[arg-type]
    ({"tools": [{"type": "function", "function": {"name": "a", "returns": {}}}]}, "'returns', which is not supported"),
    ({"tool_choice": "required"}, "there are no tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "not among the tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice must be"),
    ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "does not go with tools"),
    ({"tools": TOOLS, "tool_choice": "required", "extra_body": {"ignore_eos": True}}, "ignore_eos do not go"),
    ({"tools": [function("a", {"const": "x" * 70_000})], "tool_choice": "required"}, "more than 65536 characters"),
    ({"tools": [function("a", {"$ref": "#/nowhere"})], "tool_choice": "required"}, "cannot be used"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "'tool_calls', which is not supported"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {}}]}]}, r"tool_calls\[0\] must be"),
    ({"messages": [called("[]")]}, "must be a JSON object"),
    ({"messages": [called("{")]}, "must be a JSON object"),
    ({"messages": [called("[" * 70_000)]}, "more than 65536 objects"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": 5}]}, "tool_call_id must be a string"),
]


@pytest.mark.parametrize(("given", "said"), REFUSED)
def test_what_is_refused(chats: Any, given: dict[str, Any], said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        chats.create(**{**ASK, **given})


def test_models_without_tools_say_so() -> None:
    with running() as service, openai.OpenAI(base_url=f"{service.url}/v1", api_key="x", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="has no place for tools"):
            client.chat.completions.create(tools=TOOLS, **ASK)
        assert client.chat.completions.create(tools=TOOLS, tool_choice="none", **{**ASK, "max_tokens": 1}).choices


@pytest.mark.parametrize("form", ["auto", "mistral"])
def test_the_format_can_be_given(form: str) -> None:
    with (
        running("{{ tools }}{{ messages }}", tool_format=form) as service,
        openai.OpenAI(base_url=f"{service.url}/v1", api_key="x", max_retries=0) as client,
    ):
        if form == "auto":
            with pytest.raises(openai.BadRequestError, match="--tool-format, one of hermes, llama3, mistral"):
                client.chat.completions.create(tools=TOOLS, **ASK)
            return
        found = client.chat.completions.create(
            tools=TOOLS[:1], tool_choice="required", parallel_tool_calls=False, **ASK
        )
        found = found.choices[0]
        assert found.finish_reason == "tool_calls" and len(found.message.tool_calls[0].id) == 9
