"""JSON formats: a model of random weights answers with JSON of the schema, or the client is told why not."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

openai = pytest.importorskip("openai")
from naive_decoding import LookupDrafter  # noqa: E402
from serving import running  # noqa: E402

from shoestring.serve import Engine  # noqa: E402
from shoestring.serve.engine.logit_rules import SamplingWithRules, TokenHistory, VerifyWithRules  # noqa: E402
from shoestring.serve.http import grammar  # noqa: E402
from shoestring.serve.http.grammar import Grammars, GrammarSource, PriorityThreads, wanted_schema  # noqa: E402
from shoestring.serve.http.request_schema import ApiError  # noqa: E402
from shoestring.serve.speculative.verify import coupled  # noqa: E402
from tiny import chat_tokenizer, served_model  # noqa: E402

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}


def check_pet(text: str) -> None:
    pet = json.loads(text)
    assert set(pet) == {"name", "age", "kind", "tags"}
    assert len(pet["name"]) <= 12 and 0 <= pet["age"] <= 150 and pet["kind"] in ("cat", "dog")
    assert len(pet["tags"]) <= 3 and all(isinstance(t, bool) for t in pet["tags"])


@pytest.fixture(scope="module")
def chats() -> Iterator[Any]:
    pytest.importorskip("llguidance")
    with running() as service:
        yield openai.OpenAI(base_url=f"{service.url}/v1", api_key="x", max_retries=0).chat.completions


def test_answers_follow_the_schema(chats: Any) -> None:
    messages = [{"role": "user", "content": "A pet, please"}]
    ask: dict[str, Any] = {"model": "tiny", "messages": messages, "seed": 5}
    answer = chats.create(response_format=FORMAT, n=2, max_tokens=400, **ask)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        check_pet(choice.message.content)
    streamed = chats.create(response_format=FORMAT, stream=True, max_tokens=400, **ask)
    check_pet("".join(chunk.choices[0].delta.content or "" for chunk in streamed))
    anything = chats.create(response_format={"type": "json_object"}, max_tokens=30, **ask)
    if anything.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(anything.choices[0].message.content), dict)
    assert anything.choices[0].message.content.lstrip().startswith("{")


@pytest.mark.parametrize("schema", [{"type": "nonsense"}, {"$ref": "#/nowhere"}, {"type": "string", "pattern": "("}])
def test_schemas_that_cannot_be_used_are_refused(chats: Any, schema: dict[str, Any]) -> None:
    bad = {"type": "json_schema", "json_schema": {"name": "bad", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match="the JSON schema cannot be used"):
        chats.create(model="tiny", messages=[{"role": "user", "content": "x"}], response_format=bad)


def test_drafts_do_not_change_what_a_grammar_allows() -> None:
    pytest.importorskip("llguidance")
    tokenizer = chat_tokenizer()
    model = served_model(tokenizer.vocab_size)
    made = Grammars(tokenizer, tokenizer.vocab_size, sorted(tokenizer.eos_ids)).of(wanted_schema(FORMAT))
    assert made is not None
    texts = []
    for more in ({}, {"drafter": LookupDrafter(), "num_drafts": 3}):
        engine = Engine(model, tokenizer, verify=VerifyWithRules(coupled), **more)  # type: ignore[arg-type]
        prompt = tokenizer.encode('{"name": "true true true", "tags": [true, true]}')
        sampling = SamplingWithRules(
            temperature=1.0, seed=4, max_tokens=400, grammar=made(), history=TokenHistory(tuple(prompt))
        )
        request = engine.add(prompt, sampling)
        while engine.busy:
            engine.step()
        check_pet(request.text)
        texts.append(request.text)
    assert texts[0] == texts[1]
    assert engine.stats.num_drafted > 0


def test_without_the_library_the_client_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    grammars = Grammars(chat_tokenizer(), 300, [0])
    assert grammars.of(None) is None and wanted_schema({"type": "text"}) is None
    with pytest.raises(ApiError, match="llguidance") as refused:
        grammars.of(wanted_schema({"type": "json_object"}))
    assert refused.value.status == 400 and refused.value.param == "response_format"
    assert "tool_choice" not in str(refused.value)
    with pytest.raises(
        ApiError, match="auto where the model's chat template knows tools; where it does not"
    ) as refused:
        grammars.of(GrammarSource("start: /x/", lark=True))
    assert refused.value.status == 400 and refused.value.param == "tools"


# -- limits --------------------------------------------------------------------------------------------


def properties(num: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(num)}}


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"const": "x" * 1_000_000}, "more than 65536 characters"),
        ({"enum": [f"value {i}" for i in range(20_000)]}, "more than 65536 characters"),
        ({"type": "string", "pattern": "ab?" * 3000}, "a string of 9000 characters"),
        ({"items": {"anyOf": [properties(501)]}}, "501 properties"),
        ({"items": {"type": "integer", "multipleOf": 99991}}, "multipleOf above 10000"),
    ],
    ids=["const", "enum", "pattern", "properties", "multipleOf"],
)
def test_schemas_beyond_the_limits_are_refused_before_they_cost_anything(schema: dict[str, Any], said: str) -> None:
    with pytest.raises(ApiError, match=said) as refused:
        wanted_schema(json_schema(schema))
    assert refused.value.status == 400 and refused.value.code == "schema_too_complex"


def test_a_grammar_that_becomes_too_complex_midway_is_an_error_and_not_an_early_end(
    chats: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(grammar.LIBRARY_LIMITS, "max_items_in_row", 50)
    schema = properties(20)  # the first token is fine
    ask: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 100}
    with pytest.raises(openai.BadRequestError, match="too complex to go on"):
        chats.create(response_format=json_schema(schema), **ask)
    assert chats.create(**ask).choices[0].finish_reason in ("stop", "length")


def test_hostile_schemas_do_not_hold_up_others(chats: Any) -> None:
    """The slowest schemas within the limits, new ones all the time, beside a stream and newcomers."""
    hostile = [
        {"type": "array", "items": {"const": "x" * 8000}, "minItems": 50},
        properties(490),
        {"type": "array", "items": {"type": "integer", "multipleOf": 9973}, "minItems": 50},
        {"const": "x" * 1_000_000},
    ]
    ask: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    chats.create(response_format=FORMAT, max_tokens=1, **ask)  # the table of the vocabulary
    began = time.monotonic()
    for _ in range(5):
        chats.create(max_tokens=10, **ask)
    quiet, stop = time.monotonic() - began, threading.Event()  # as busy as this machine is with other work

    def attack(which: int) -> None:
        num = 0
        while not stop.is_set():
            num += 1
            schema = {**hostile[which], "title": f"{num}"}  # never seen before
            with contextlib.suppress(openai.BadRequestError):
                chats.create(response_format=json_schema(schema), max_tokens=20, **ask)

    threads = [threading.Thread(target=attack, args=[i]) for i in range(len(hostile))]
    for thread in threads:
        thread.start()
    gaps, firsts, end = [], [], time.monotonic() + 1.5
    stream = chats.create(stream=True, extra_body={"ignore_eos": True}, max_tokens=3000, **ask)
    next(iter(stream))
    while time.monotonic() < end:
        began = time.monotonic()
        for _ in itertools.islice(stream, 10):
            gaps.append(time.monotonic() - began)
            began = time.monotonic()
        began = time.monotonic()
        chats.create(max_tokens=1, **ask)
        firsts.append(time.monotonic() - began)
    stream.close()
    stop.set()
    for thread in threads:
        thread.join()
    assert len(gaps) >= 10 and max(gaps) < 1.0 + 5 * quiet
    assert max(firsts) < 2.0 + 5 * quiet


def test_schemas_are_kept_and_slow_ones_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance")
    grammars = Grammars(chat_tokenizer(), 300, [0])
    kept, slow, third = (wanted_schema(json_schema({"title": title})) for title in ("kept", "slow", "third"))
    assert grammars.must_compile(kept) and not grammars.must_compile(None)
    assert grammars.of(kept) is grammars.of(kept) and not grammars.must_compile(kept)
    monkeypatch.setattr(grammar, "COMPILE_LIMIT_S", 0.0)
    assert grammars.of(kept) is not None
    with pytest.raises(ApiError, match="takes too long to compile"):
        grammars.of(slow)
    assert not grammars.must_compile(slow)
    with pytest.raises(ApiError, match="takes too long to compile"):
        grammars.of(slow)
    monkeypatch.setattr(grammar, "NUM_COMPILED", 1)
    with pytest.raises(ApiError):
        grammars.of(third)
    assert grammars.must_compile(kept)


def test_of_waiting_jobs_the_cheapest_is_next() -> None:
    threads, gate = PriorityThreads("test", 1), threading.Event()
    order: list[float] = []
    first = threads.submit(0.0, lambda: gate.wait(30))
    rest = [threads.submit(cost, lambda cost=cost: order.append(cost)) for cost in (3.0, 1.0, 2.0)]
    gate.set()
    for job in (first, *rest):
        job.result(30)
    assert order == [1.0, 2.0, 3.0]
