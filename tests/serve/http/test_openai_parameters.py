"""Every parameter that OpenAI's own client can send is known here by name: it works, has no effect, or is refused."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

openai = pytest.importorskip("openai")

from shoestring.serve.http.request_schema import ApiError, ChatBody, CompletionBody, EmbeddingBody, validated  # noqa: E402
from shoestring.serve.http.responses_api import ResponsesBody  # noqa: E402

OF_THE_CLIENT = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
LEGACY: list[tuple[type[Any], str, Any, str | None]] = [  # None: accepted
    (CompletionBody, "echo", True, None),
    (CompletionBody, "logit_bias", {"1": 5}, None),
    (CompletionBody, "logprobs", 3, None),
    (CompletionBody, "suffix", "x", "suffix is not supported"),
    (CompletionBody, "suffix", "", None),
    (ChatBody, "functions", [{"name": "f"}], "functions is not supported by this server; use tools"),
    (ChatBody, "functions", [], None),
    (ChatBody, "function_call", {"name": "f"}, "use tool_choice"),
    (ChatBody, "function_call", "auto", None),
    (ChatBody, "max_tokens", 5, None),
    (ChatBody, "user", "me", None),
    (ChatBody, "audio", {"voice": "x"}, "audio is not supported"),
    (ResponsesBody, "previous_response_id", "x", "nothing is stored"),
]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat.completions", ChatBody),
        ("completions", CompletionBody),
        ("responses", ResponsesBody),
        ("embeddings", EmbeddingBody),
    ],
)
def test_every_parameter_of_the_client_is_known(path: str, body: Any) -> None:
    endpoint: Any = openai.OpenAI(api_key="x")
    for name in path.split("."):
        endpoint = getattr(endpoint, name)
    known = {*body.model_fields, *getattr(body, "IGNORED", ()), *getattr(body, "NEUTRAL", ())}
    assert not inspect.signature(endpoint.create).parameters.keys() - OF_THE_CLIENT - known


@pytest.mark.parametrize(("body", "name", "value", "said"), LEGACY)
def test_legacy_parameters(body: Any, name: str, value: Any, said: str | None) -> None:
    if said is None:
        assert body.parse({name: value}) is not None
        return
    with pytest.raises(ApiError, match=said) as refused:
        body.parse({name: value})
    assert refused.value.param == name


def test_unknown_parameters_are_refused() -> None:
    for parse in (ChatBody.parse, CompletionBody.parse, ResponsesBody.parse, lambda raw: validated(EmbeddingBody, raw)):
        with pytest.raises(ApiError, match="unknown parameter 'surprise'"):
            parse({"surprise": 1})
