"""Tools as OpenAI's own client uses them: choices, streams, results sent back, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("llguidance")
httpx = pytest.importorskip("httpx")
from serving import running  # noqa: E402

from shoestring.serve.http.generic_tools import plain_chat  # noqa: E402
from shoestring.serve.http.request_schema import ChatBody  # noqa: E402
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
def server() -> Iterator[Any]:
    with running(max_context=2048) as started:
        yield started


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


CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "add"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a", "content": "3"},
    {"role": "tool", "tool_call_id": "b", "content": "4"},
]


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_without_tools_is_asked_by_a_prompt_and_held_by_a_grammar(server: Any, stream: bool) -> None:
    with httpx.Client(base_url=server.url, timeout=120) as client:
        names, kinds = {tool["function"]["name"] for tool in TOOLS}, set()
        for seed in (0, 3) if stream else (0, 1, 4, 5):
            asked = {"messages": HISTORY if seed % 2 else ASK["messages"], "tools": TOOLS, "seed": seed}
            asked |= {"max_tokens": 400, "temperature": 2.0, "tool_choice": "required" if seed > 3 else "auto"}
            answer = client.post("/v1/chat/completions", json={**asked, "stream": stream, "user": "me"})
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-shoestring-tools"].startswith("generic prompt")
            assert answer.headers["x-shoestring-without-effect"] == "user"
            if stream:
                continue
            choice = answer.json()["choices"][0]
            kinds.add(choice["finish_reason"])
            if calls := choice["message"].get("tool_calls"):
                assert (
                    calls[0]["function"]["name"] in names and json.loads(calls[0]["function"]["arguments"]) is not None
                )
            else:
                assert seed <= 3 and not choice["message"]["content"].startswith("{")
        assert stream or "tool_calls" in kinds
        plain = client.post(
            "/v1/chat/completions", json={**ASK, "tools": TOOLS, "tool_choice": "none", "model": "tiny"}
        )
        assert plain.status_code == 200 and not [name for name in plain.headers if name.startswith("x-shoestring")]


def test_a_chat_with_tools_for_a_template_that_knows_none() -> None:
    tools = ChatBody.parse({"messages": HISTORY, "tools": TOOLS}).tool_request
    assert tools is not None
    chat = plain_chat(ChatBody.parse({"messages": HISTORY}).chat, tools.tools)
    assert [m["role"] for m in chat] == ["system", "user", "assistant", "user"]
    assert chat[0]["content"].startswith("Be kind.") and all(t["function"]["name"] in chat[0]["content"] for t in TOOLS)
    assert json.loads(chat[2]["content"]) == {"name": "add", "parameters": {"a": 1}}
    assert chat[3]["content"] == "Result: 3\nResult: 4"
    (alone,) = plain_chat([{"role": "user", "content": "hi"}], tools.tools)
    assert alone["role"] == "user" and alone["content"].startswith("hi\n\nYou can call")


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        ("/v1/completions", {"prompt": "a", "user": "x"}, "user"),
        (
            "/v1/chat/completions",
            {"reasoning_effort": "high", "verbosity": "low", "user": None},
            "reasoning_effort, verbosity",
        ),
        ("/v1/responses", {"input": "a", "reasoning": {"effort": "low"}, "store": False}, "reasoning, store"),
        ("/v1/embeddings", {"input": "a", "user": "x"}, "user"),
        ("/v1/completions", {"prompt": "a"}, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_settings_without_effect_are_named(
    server: Any, path: str, body: dict[str, Any], names: str | None, stream: bool
) -> None:
    if "chat" in path:
        body = {**body, "messages": [{"role": "user", "content": "a"}]}
    if path != "/v1/embeddings":
        body = {**body, "stream": stream, "max_output_tokens" if "responses" in path else "max_tokens": 2}
    answer = httpx.post(server.url + path, json=body, timeout=120)
    assert answer.status_code == 200 and answer.headers.get("x-shoestring-without-effect") == names


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
