"""`/v1/responses` with OpenAI's own client: the answers of chats, in another form; and every field has its place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("llguidance")
import httpx  # noqa: E402
from serving import running  # noqa: E402

from tiny import TOOL_CHAT_TEMPLATE  # noqa: E402

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Bonn"]}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "parameters": {**CITY, "additionalProperties": False}}
ASK: dict[str, Any] = {"model": "tiny", "extra_body": {"seed": 3}}
CALLS: dict[str, Any] = {
    "input": "Weather?",
    "tools": [WEATHER],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with running(TOOL_CHAT_TEMPLATE) as service:
        yield openai.OpenAI(base_url=f"{service.url}/v1", api_key="x", max_retries=0)


def test_answers_are_those_of_chats(client: Any) -> None:
    found = client.responses.create(
        input="Hello", instructions="Be brief.", max_output_tokens=20, metadata={"a": "b"}, **ASK
    )
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    chat = client.chat.completions.create(model="tiny", messages=messages, seed=3, max_tokens=20)
    assert found.output_text == chat.choices[0].message.content
    assert found.usage.input_tokens == chat.usage.prompt_tokens and found.usage.output_tokens == 20
    assert found.status == "incomplete" and found.incomplete_details.reason == "max_output_tokens"
    assert found.output[0].status == "incomplete" and found.metadata == {"a": "b"} and found.object == "response"
    # The items of an answer can be sent back as they came.
    turn = [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}, found.output[0].model_dump()]
    again = client.responses.create(input=[*turn, {"role": "user", "content": "More"}], max_output_tokens=2, **ASK)
    parts = [*messages[1:], {"role": "assistant", "content": found.output_text}, {"role": "user", "content": "More"}]
    chat = client.chat.completions.create(model="tiny", messages=parts, seed=3, max_tokens=2)
    assert again.usage.input_tokens == chat.usage.prompt_tokens and again.output_text == chat.choices[0].message.content


def test_a_stream_of_text(client: Any) -> None:
    ask = {**ASK, "input": "Hello", "max_output_tokens": 20}
    whole = client.responses.create(**ask)
    events = list(client.responses.create(stream=True, **ask))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = [e.type for e in events]
    assert kinds[:4] == [
        *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added")
    ]
    assert kinds[-4:] == [
        *("response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete")
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert "".join(e.delta for e in events[4:-4]) == events[-4].text == whole.output_text
    last = events[-1].response
    assert last.output_text == whole.output_text and last.usage == whole.usage and last.id == events[0].response.id


def test_calls_and_their_outputs(client: Any) -> None:
    found = client.responses.create(**CALLS, **ASK)
    (call,) = found.output
    assert found.status == "completed" and call.type == "function_call" and call.name == "weather"
    assert json.loads(call.arguments)["city"] in ("Rome", "Bonn")
    with client.responses.stream(**CALLS, **ASK) as stream:  # the client's own accumulation
        events = list(stream)
        last = stream.get_final_response()
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments == last.output[0].arguments and len(deltas) > 1
    assert last.output[0].call_id == next(e.item.call_id for e in events if e.type == "response.output_item.added")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    turn = [{"role": "user", "content": "Weather?"}, call.model_dump(), output]
    answer = client.responses.create(input=turn, tools=[WEATHER], max_output_tokens=2, **ASK)
    assert answer.usage.input_tokens > found.usage.input_tokens
    named = {"type": "function", "name": "weather"}
    assert client.responses.create(**{**CALLS, "tool_choice": named}, **ASK).output[0].name == "weather"


def test_text_of_a_schema(client: Any) -> None:
    form = {"type": "json_schema", "name": "city", "schema": WEATHER["parameters"], "strict": True}
    found = client.responses.create(input="A city", text={"format": form}, **ASK)
    assert json.loads(found.output_text)["city"] in ("Rome", "Bonn") and found.text.format.name == "city"


def test_errors_in_a_stream_are_events(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from shoestring.serve.http import grammar

    monkeypatch.setitem(grammar.LIBRARY_LIMITS, "max_items_in_row", 50)
    schema = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(20)}}
    form = {"type": "json_schema", "name": "x", "schema": schema}
    ask = {"input": "a", "text": {"format": form}, "max_output_tokens": 99, "stream": True, "seed": 1}
    answer = httpx.post(f"{client.base_url}responses", json=ask, timeout=60).text
    last = json.loads(answer.strip().splitlines()[-1].removeprefix("data: "))
    assert last["type"] == "error" and last["code"] == "schema_too_complex" and "too complex" in last["message"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "input must be"),
    ({"input": []}, "input must be"),
    ({"input": [5]}, r"input[0] has the type None"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "'reasoning'; it must be a message"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role is 'tool'"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content must be"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "call_id, name and arguments"),
    ({"input": [{"type": "function_call_output", "output": "f"}]}, "input[0].call_id"),
    ({"input": "a", "tools": [{"type": "web_search"}]}, "no other is built"),
    ({"input": "a", "text": {"format": 5}}, "text must be"),
    ({"input": "a", "text": {"format": {"type": "xml"}}}, "needs a type"),
    *(
        ({"input": "a", name: value}, f"{name} is not supported")
        for name, value in {
            "background": True,
            "conversation": "c",
            "include": ["reasoning.encrypted_content"],
            "previous_response_id": "resp_1",
            "prompt": {"id": "p"},
            "top_logprobs": 3,
            "truncation": "auto",
            "n": 2,
            "stop": "x",
            "max_tokens": 5,
        }.items()
    ),
    ({"input": "a", "max_output_token": 5}, "Did you mean 'max_output_tokens'"),
]


@pytest.mark.parametrize(("body", "said"), REFUSED)
def test_what_is_refused(client: Any, body: dict[str, Any], said: str) -> None:
    answer = httpx.post(f"{client.base_url}responses", json=body)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]


def test_what_has_no_effect(client: Any) -> None:
    neutral = {"store": True, "user": "me", "reasoning": {"effort": "low"}, "truncation": "disabled", "include": []}
    body = {"input": "a", "max_output_tokens": 1, "background": False, "stream_options": {}, **neutral}
    answer = httpx.post(f"{client.base_url}responses", json=body)
    assert answer.status_code == 200 and answer.json()["store"] is False
