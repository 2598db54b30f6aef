"""A model that computes NaN answers with an error, never with an empty text or a bare NaN, and the server stays up."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

pytest.importorskip("httpx")
import httpx
from serving import running


def test_nan_is_a_500_and_the_server_goes_on() -> None:
    with running() as service, httpx.Client(base_url=service.url, timeout=60) as http:  # type: ignore[attr-defined]
        body = {"prompt": "The quick", "max_tokens": 4, "seed": 1}
        good = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        assert good
        model = service.engine.model  # type: ignore[attr-defined]
        kept = {name: p.detach().clone() for name, p in model.named_parameters()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(torch.nan)
        for more in ({}, {"temperature": 0}, {"logprobs": 2}, {"n": 2}, {"logit_bias": {"5": 3}}):
            answer = http.post("/v1/completions", json={**body, **more})
            check_error(answer.status_code, answer.json())
        scored = http.post("/v1/completions", json={**body, "echo": True, "logprobs": 1, "max_tokens": 0})
        check_error(scored.status_code, scored.json())
        streamed = http.post("/v1/completions", json={**body, "stream": True}).text.split("\n\n")
        check_error(500, json.loads(streamed[-3].removeprefix("data: "), parse_constant=no_constant))
        assert streamed[-2] == "data: [DONE]"
        messages = [{"role": "user", "content": "x"}]
        asked = {"messages": messages, "response_format": {"type": "json_object"}}
        chat = http.post("/v1/chat/completions", json=asked)
        check_error(chat.status_code, chat.json())
        assert http.get("/health").json() == {"status": "ok"}
        assert http.get("/stats").json()["kv_usage"] == 0
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(kept[name])
        assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == good


def check_error(status: int, body: dict[str, Any]) -> None:
    assert status == 500 and body["error"]["code"] == "nonfinite_logits" and body["error"]["type"] == "server_error"
    assert "not finite" in body["error"]["message"]


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")
