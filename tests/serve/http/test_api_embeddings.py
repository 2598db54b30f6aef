"""Embeddings: of a decoder against its own hidden states, of an encoder against transformers, over real HTTP."""

from __future__ import annotations

import itertools
import json
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

openai = pytest.importorskip("openai")
import httpx  # noqa: E402
from serving import running, wait_for  # noqa: E402

from shoestring.errors import UserError  # noqa: E402
from shoestring.serve.engine.embedding import embedding_batches, embedding_parts  # noqa: E402
from shoestring.serve.engine.encoder import folder_pooling, is_encoder, load_encoder  # noqa: E402
from shoestring.serve.http.server import ServeOptions, Service, listen  # noqa: E402
from tiny import chat_tokenizer, served_model  # noqa: E402

TEXTS = ["The quick brown fox", "Ein Bär", "def main(argv):\n    return 0", "x"]


@pytest.fixture(scope="module")
def service() -> Iterator[Any]:
    with running(chunk=16) as started:
        yield started


@pytest.fixture(scope="module")
def client(service: Any) -> Any:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=60)


def expected(ids: list[int], pooling: str = "mean") -> Tensor:
    model = served_model(chat_tokenizer().vocab_size)
    with torch.no_grad():
        hidden_TD = model.hidden(torch.tensor([ids]))[0]
    return normalize(hidden_TD.mean(0) if pooling == "mean" else hidden_TD[-1], dim=0)


def test_vectors_are_the_hidden_states_of_the_last_layer(client: Any) -> None:
    tokenizer = chat_tokenizer()
    for pooling in ("mean", "last"):
        answer = client.embeddings.create(model="tiny", input=TEXTS, extra_body={"pooling": pooling})
        assert [d.index for d in answer.data] == [0, 1, 2, 3] and answer.object == "list"
        for text, found in zip(TEXTS, answer.data, strict=True):
            assert torch.allclose(torch.tensor(found.embedding), expected(tokenizer.encode(text), pooling), atol=1e-5)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(len(tokenizer.encode(t)) for t in TEXTS)


def test_only_streams_are_reminded_to_say_something(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoestring.serve.http.app.KEEP_ALIVE_S", 0.0)
    assert len(client.embeddings.create(model="tiny", input=TEXTS).data) == len(TEXTS)
    assert client.completions.create(model="tiny", prompt="a", max_tokens=3).usage.completion_tokens <= 3


def test_every_form_of_input_and_output(client: Any, service: Any) -> None:
    ids = [chat_tokenizer().encode(text) for text in TEXTS[:2]]
    want = [expected(i) for i in ids]
    with httpx.Client(base_url=service.url) as http:

        def vectors(given: Any, **more: Any) -> list[Any]:
            answer = http.post("/v1/embeddings", json={"input": given, "encoding_format": "float", **more})
            assert answer.status_code == 200, answer.text
            return [torch.tensor(d["embedding"]) for d in answer.json()["data"]]

        for given, num in ((TEXTS[0], 1), (TEXTS[:2], 2), (ids[0], 1), (ids, 2)):
            found = vectors(given)
            assert len(found) == num and all(torch.allclose(f, w, atol=1e-5) for f, w in zip(found, want, strict=False))
        (short,) = vectors(TEXTS[0], dimensions=8)
        assert short.shape == (8,) and torch.allclose(short, normalize(want[0][:8], dim=0), atol=1e-5)
    coded = client.embeddings.create(model="tiny", input=TEXTS[0], encoding_format="base64", dimensions=8).data[0]
    import base64

    raw = torch.frombuffer(bytearray(base64.b64decode(coded.embedding)), dtype=torch.float32)
    assert torch.allclose(raw, short, atol=1e-6)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "input must be"),
        ({"input": ""}, "input must be"),
        ({"input": ["a", ""]}, "input must be"),
        ({"input": []}, "input must be"),
        ({"input": [1, "a"]}, "input must be"),
        ({"input": [99999]}, "token id 99999"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 1000}, "more than this model's vectors have: 32"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "pooling": "cls"}, "pooling cls is for encoders"),
        ({"input": ["a"] * 2049}, "at most 2048"),
        ({"input": [5] * 5000}, "context holds 4096"),
        ({"input": [[5] * 4096] * 65}, "more than 262144 tokens"),
        ({"input": "a", "inptu": "b"}, "unknown parameter 'inptu'"),
    ],
)
def test_what_is_refused(service: Any, body: dict[str, Any], said: str) -> None:
    answer = httpx.post(f"{service.url}/v1/embeddings", json=body)
    assert answer.status_code in (400, 404) and said in answer.json()["error"]["message"]


def test_long_and_short_texts_and_who_shares_a_batch() -> None:
    lengths = [3, 40, 5, 4, 1, 16]
    batches = embedding_batches(lengths, 16)
    assert sorted(itertools.chain(*batches)) == list(range(6)) and [1] in batches and [5] in batches
    assert all(len(b) * max(lengths[i] for i in b) <= 16 or len(b) == 1 for b in batches) and len(batches) == 4
    model, text = served_model(300), [7 + i % 200 for i in range(50)]
    for pooling in ("mean", "last", "cls"):
        *_, whole = embedding_parts(model, [text], pooling, 64)  # type: ignore[arg-type]
        *early, parts = embedding_parts(model, [text], pooling, 16)  # type: ignore[arg-type]
        assert early == [None] * 3 and whole is not None and parts is not None
        assert torch.allclose(whole, parts, atol=1e-4)


def test_texts_go_on_beside_embeddings_and_clients_may_leave(service: Any) -> None:
    body = {"prompt": "hi", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with (
        httpx.Client(base_url=service.url, timeout=60) as http,
        http.stream("POST", "/v1/completions", json=body) as other,
    ):
        lines = other.iter_lines()  # one that is dropped would close the stream
        next(lines)
        before = service.engine.stats.num_steps
        many = {"input": [[5 + i] * 30 for i in range(20)]}
        assert len(http.post("/v1/embeddings", json=many).json()["data"]) == 20
        assert service.engine.stats.num_steps >= before + 20  # a step after every part
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/embeddings", json={"input": [[5] * 3000] * 60}, timeout=0.5)
    wait_for(lambda: service.client.num_open == 0)
    metrics = httpx.get(f"{service.url}/metrics").text
    assert 'request_success_total{finished_reason="abort",model_name="tiny"}' in metrics


# -- encoders ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("bert")
    tokenizer = chat_tokenizer(chat=False)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.BertConfig(vocab_size=tokenizer.vocab_size, max_position_embeddings=64, **sizes)
    transformers.BertModel(config).save_pretrained(folder)
    tokenizer.save(folder)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    return folder


def test_an_encoder_is_served_for_embeddings(bert: Path) -> None:
    from transformers import BertModel

    encoder = load_encoder(bert)
    assert is_encoder(bert) and folder_pooling(bert) == "cls"
    service = Service(encoder, encoder.tokenizer, ServeOptions(pooling="mean"), listen("127.0.0.1", 0), "bert")
    thread = threading.Thread(target=service.run, daemon=True)
    thread.start()
    wait_for(lambda: service.server.started)
    try:
        with httpx.Client(base_url=service.url) as http:
            theirs = BertModel.from_pretrained(bert).eval()
            for pooling in ("mean", "cls"):
                answer = http.post("/v1/embeddings", json={"input": TEXTS, "pooling": pooling}).json()
                for text, found in zip(TEXTS, answer["data"], strict=True):
                    with torch.no_grad():
                        hidden = theirs(torch.tensor([encoder.tokenizer.encode(text)])).last_hidden_state[0]
                    want = normalize(hidden.mean(0) if pooling == "mean" else hidden[0], dim=0)
                    assert torch.allclose(torch.tensor(found["embedding"]), want, atol=1e-5)
            refused = http.post("/v1/completions", json={"prompt": "a"})
            assert refused.status_code == 400 and "is an encoder" in refused.text
            assert "context holds 64" in http.post("/v1/embeddings", json={"input": [5] * 65}).text
            assert http.get("/health").status_code == 200 and http.get("/stats").json()["num_new_tokens"] == 0
    finally:
        service.stop()
        thread.join(60)
    assert not thread.is_alive()


def test_an_encoder_that_cannot_be_loaded_is_one_line(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:
    (tmp_path / "config.json").write_text((bert / "config.json").read_text())
    with pytest.raises(UserError, match="no safetensors"):
        load_encoder(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    said = command("serve", bert, "--port", "0", "--device", "cpu", fails=True)
    assert "pip install 'shoestring[encoders]'" in said
    assert "give auto, mean, last, cls" in command("serve", bert, "--pooling", "max", fails=True)
    with socket.socket() as free:  # the port was given back
        free.bind(("127.0.0.1", 0))
