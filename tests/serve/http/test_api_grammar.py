"""JSON formats: a model of random weights answers with JSON of the schema, or the client is told why not."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

openai = pytest.importorskip("openai")
from naive_decoding import LookupDrafter  # noqa: E402
from serving import running  # noqa: E402

from shoestring.serve import Engine  # noqa: E402
from shoestring.serve.engine.logit_rules import SamplingWithRules, TokenHistory, VerifyWithRules  # noqa: E402
from shoestring.serve.http.grammar import Grammars  # noqa: E402
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
    made = Grammars(tokenizer, tokenizer.vocab_size, sorted(tokenizer.eos_ids)).of(FORMAT)
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
    assert grammars.of(None) is None and grammars.of({"type": "text"}) is None
    with pytest.raises(ApiError, match="llguidance") as refused:
        grammars.of({"type": "json_object"})
    assert refused.value.status == 400 and refused.value.param == "response_format"
