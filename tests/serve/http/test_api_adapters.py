"""Adapters over HTTP: chosen by `model`, listed, loaded and unloaded with the admin key."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import running

from shoestring.errors import UserError
from shoestring.model.adapter_folder import merge_adapter_, read_adapter
from shoestring.serve import Engine, Sampling
from shoestring.serve.http.engine_messages import CODEC, PendingChoice, frame
from shoestring.serve.http.message_codec import FrameReader
from shoestring.serve.http.serve_options import ServeOptions
from tiny import chat_tokenizer, make_adapter, served_model

ADMIN = {"Authorization": "Bearer over all"}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ASK = {"prompt": "The quick", "max_tokens": 12, "temperature": 0}


def fresh() -> Any:
    return served_model(chat_tokenizer().vocab_size)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """below/a, below/b, below/c: adapters; outside: one that is not below; below/link: a way to it."""
    root, model = tmp_path_factory.mktemp("adapters"), fresh()
    for seed, place in enumerate(("below/a", "below/b", "below/c", "outside")):
        make_adapter(root / place, model, seed)
    (root / "below/link").symlink_to(root / "outside")
    (root / "below/file_link").mkdir()
    (root / "below/file_link/adapter_config.json").symlink_to(root / "outside/adapter_config.json")
    return root


@pytest.fixture(scope="module")
def texts(folder: Path) -> dict[str, str]:
    """Of each adapter, merged into the model."""
    made, tokenizer = {}, chat_tokenizer()
    for name in (None, "a", "b", "c"):
        model = fresh()
        if name is not None:
            merge_adapter_(model, read_adapter(folder / "below" / name, model).weights, requantize=False)
        sampling = Sampling(max_tokens=12)
        made[name or "tiny"] = Engine(model, tokenizer).generate([ASK["prompt"]], sampling)[0].text
    assert len(set(made.values())) == 4
    return made


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[httpx.Client]:
    options = {"adapters": (f"a={folder / 'below/a'}", f"b={folder / 'below/b'}")}
    keys = {"admin_key": "over all", "adapter_folder": folder / "below", "api_keys": ("one",)}
    headers = {"Authorization": "Bearer one"}
    with (
        running(max_requests=4, **options, **keys) as service,
        httpx.Client(base_url=service.url, timeout=60, headers=headers) as made,
    ):
        yield made


def written(client: httpx.Client, name: str, **more: Any) -> str:
    answer = client.post("/v1/completions", json={**ASK, "model": name, **more})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == name
    return answer.json()["choices"][0]["text"]


def test_requests_choose_by_model_at_the_same_time(client: httpx.Client, texts: dict[str, str]) -> None:
    cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
    assert list(cards) == ["tiny", "a", "b"] and cards["a"]["parent"] == "tiny" and "parent" not in cards["tiny"]
    assert client.get("/v1/models/b").json() == cards["b"]
    found: list[tuple[str, str]] = []
    threads = [
        threading.Thread(target=lambda n=name: found.append((n, written(client, n)))) for name in ("tiny", "a", "b") * 3
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 9 and all(text == texts[name] for name, text in found)
    chat = {"model": "a", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert client.post("/v1/chat/completions", json=chat).json()["model"] == "a"
    scored = written(client, "a", echo=True, logprobs=1)
    assert scored == ASK["prompt"] + texts["a"]


def test_names_that_are_not_there(client: httpx.Client) -> None:
    for path in ("/v1/completions", "/v1/embeddings", "/tokenize"):
        body = {"model": "c", "prompt": "x"} | ({"input": "x"} if "emb" in path else {})
        body.pop("prompt" if "emb" in path else "input", None)
        answer = client.post(path, json=body)
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
        assert "this server has 'tiny', 'a', 'b'" in answer.text
    assert client.get("/v1/models/c").status_code == 404
    answer = client.post("/v1/embeddings", json={"model": "a", "input": "x"})
    assert answer.status_code == 400 and "without adapters" in answer.text


def test_loading_and_unloading(client: httpx.Client, texts: dict[str, str], folder: Path) -> None:
    body = {"lora_name": "c", "lora_path": "c"}
    assert client.post(LOAD, json=body, headers=ADMIN).text == "Success: LoRA adapter 'c' added successfully."
    assert written(client, "c") == texts["c"]
    again = client.post(LOAD, json=body, headers=ADMIN)
    assert again.status_code == 400 and "already" in again.text
    # A text that has begun is finished; a new one is not taken.
    with client.stream("POST", "/v1/completions", json={**ASK, "model": "c", "stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert client.post(UNLOAD, json={"lora_name": "c"}, headers=ADMIN).status_code == 200
        assert client.post("/v1/completions", json={**ASK, "model": "c"}).status_code == 404
        assert list(lines)[-2:][0] == "data: [DONE]"
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["tiny", "a", "b"]
    gone = client.post(UNLOAD, json={"lora_name": "c"}, headers=ADMIN)
    assert gone.status_code == 404 and "there is no adapter 'c'; there are: a, b" in gone.text
    whole = {"lora_name": "c", "lora_path": str(folder / "below/c")}
    assert client.post(LOAD, json=whole, headers=ADMIN).status_code == 200
    assert client.post(UNLOAD, json={"lora_name": "c", "lora_int_id": 1}, headers=ADMIN).status_code == 200


def test_what_is_not_loaded(client: httpx.Client, folder: Path) -> None:
    for given in ("../outside", str(folder / "outside"), "link", "file_link", ".", "none", "a\0", "x" * 4000, "/etc"):
        answer = client.post(LOAD, json={"lora_name": "x", "lora_path": given}, headers=ADMIN)
        assert answer.status_code == 400 and "is no folder below" in answer.text, given
    for body, message in (
        ({"lora_name": "tiny", "lora_path": "c"}, "the name of the model itself"),
        ({"lora_name": "\n", "lora_path": "c"}, "cannot be called"),
        ({"lora_name": "x"}, "lora_path"),
        ({"lora_name": 3, "lora_path": "c"}, "lora_name"),
        ({"lora_name": "x", "lora_path": "c", "more": 1}, "more"),
    ):
        answer = client.post(LOAD, json=body, headers=ADMIN)
        assert answer.status_code == 400 and message in answer.text, body
    (folder / "below/broken").mkdir()
    (folder / "below/broken/adapter_config.json").write_text("{")
    answer = client.post(LOAD, json={"lora_name": "x", "lora_path": "broken"}, headers=ADMIN)
    assert answer.status_code == 400 and "is not valid JSON" in answer.text


def test_without_the_key_there_are_no_such_paths(client: httpx.Client) -> None:
    body = {"lora_name": "c", "lora_path": "c"}
    missing = client.post("/v1/nothing_lora_adapter", json=body)
    for path in (LOAD, UNLOAD):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "over all"}):
            answer = client.post(path, json=body, headers=headers)
            assert answer.status_code == missing.status_code == 404
            assert answer.json()["error"]["message"] == missing.json()["error"]["message"].replace(
                "/v1/nothing_lora_adapter", path
            )
    with running(max_requests=1) as service, httpx.Client(base_url=service.url) as other:
        assert other.post(LOAD, json=body, headers=ADMIN).status_code == 404


def test_options(tmp_path: Path) -> None:
    for given, message in (
        ({"adapters": ("a",)}, "is not NAME=DIR"),
        ({"adapters": ("a=x", "a=y")}, "given twice"),
        ({"admin_key": "k"}, "belong together"),
        ({"adapter_folder": tmp_path}, "belong together"),
        ({"admin_key": " ", "adapter_folder": tmp_path}, "empty or not ASCII"),
        ({"admin_key": "k", "adapter_folder": tmp_path / "none"}, "is no folder"),
    ):
        with pytest.raises(UserError, match=message):
            ServeOptions(**given)
    with pytest.raises(UserError, match="the name of the model itself"), running(adapters=("tiny=x",)):
        pass


def test_messages_between_the_processes_carry_adapters() -> None:
    from shoestring.serve.engine.logit_rules import SamplingWithRules

    reader = FrameReader(CODEC)
    sent = PendingChoice([1], SamplingWithRules(), adapter="a")
    ((_, (choices,)), (kind, given)) = reader.feed(frame("add", [sent]) + frame("adapter", 3, "a", "/x"))
    assert choices[0].adapter == "a" and (kind, given) == ("adapter", [3, "a", "/x"])
