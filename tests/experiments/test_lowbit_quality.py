"""The table of experiments/lowbit_quality in small: a model that learned a Markov chain, at 2 bits; and its layout."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chain_subject import chain_subject

from benchmarks import results
from experiments import lowbit_methods, lowbit_quality, lowbit_tables
from experiments.lowbit_methods import evaluate, shrink, unformat
from experiments.sparse24_quality import GPT2
from experiments.stories260k import BOS, StoryCodec, load_stories
from experiments.trained_model import fingerprint, save_trained
from shoestring.evals.perplexity import perplexity
from shoestring.formats import parse_format
from shoestring.formats.convert import format_linears
from shoestring.mesh import open_mesh
from shoestring.model import Decoder, ModelSpec
from shoestring.model.parallel import init_weights
from shoestring.shrink.blockwise import Blockwise
from shoestring.shrink.qat import Rates
from shoestring.train.shards import TokenShards
from tiny import chain, small_corpus, taught


@pytest.mark.lab
def test_settings_by_name_do_what_they_say(tmp_path: Path) -> None:
    model, text = taught(3)[0], TokenShards(chain(3_000, 1), None, "short")
    subject = chain_subject(
        model, text, 512, 8, steps=4, batch=8, blockwise=Blockwise(epochs=1, batch=4), cache_folder=tmp_path / "cache"
    )
    subject.top = 16
    embed = model.embed.weight.detach().clone()
    got, told = shrink(subject, "ours@live,0.5,gamma=0,batch=4,rest=0,blocks=0", "int2:g32", 0)
    assert torch.equal(got.embed.weight, embed) and not (tmp_path / "cache").exists()
    assert told == {"training_tokens": 1024, "rates": 0.5, "live": True, "batch": 4, "text_id": "short"}
    unformat(got)
    got, told = shrink(subject, "ours@norm=0", "int2:g32", 0)  # the defaults otherwise
    assert not torch.equal(got.embed.weight, embed) and (tmp_path / "cache").exists()
    assert told == {"training_tokens": 1024, "rates": 1.0, "live": False, "batch": 8, "text_id": "short"}
    unformat(got)
    got, told = shrink(subject, "ours@blocks=0,norm=0,mix=nf2:s1:g32+nf3:s1:g32", "nf2:s2:g32", 0)
    chosen = {m.format.label for _, m in format_linears(got)}
    assert len(chosen) > 1 and unformat(got) <= parse_format("nf2:s2:g32").bits_per_weight((32, 32)) + 1e-6

    got, told = shrink(subject, "ours@live,derived,gamma=0.5,weight=0,norm=0,rest=1e-2", "int2:g32", 0)
    assert told["training_tokens"] == 1024  # none of them block by block
    w, full = (state["blocks.0.attn.v.weight"] for state in (got.state_dict(), subject.original))
    assert w.abs().max() <= full.abs().max() and not torch.equal(w, full)  # clamped, as BitDistiller's
    unformat(got)
    subject.valid, ends = subject.test, []
    for keep in ("", ",best"):  # at a rate that ruins the model
        got, told = shrink(subject, f"bitdistiller@1,batch=4,clip=full{keep}", "int2:g32", 0)
        assert told == {"training_tokens": 1024, "lr": 1.0, "batch": 4, "text_id": "short"}
        ends.append(perplexity(got, subject.test, context=subject.context).value)
        unformat(got)
    assert ends[1] < ends[0]
    got, told = shrink(subject, "bitdistiller@1e-3,mix=nf2:s1:g32+nf3:s1:g32", "nf2:s2:g32", 0)
    assert len({m.format.label for _, m in format_linears(got)}) > 1
    unformat(got)


@pytest.mark.slow
@pytest.mark.lab
def test_orderings_at_two_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = taught(250)
    subject = chain_subject(
        model, text, 4096, 32, steps=60, batch=16, lr=5e-4, top=16, blockwise_part=0.125,
        blockwise=Blockwise(epochs=2, batch=16),
        rates=Rates(weight=1e-2, scale=3e-3, zero=1e-2, norm=1e-2, rest=2e-2), cache_folder=tmp_path / "cache",
    )  # fmt: skip
    found = {"dense": evaluate(subject)["perplexity"]}
    for method in ("rtn", "awq", "gptq", "bitdistiller", "ours"):
        got, told = shrink(subject, method, "int2:g32", 0)
        bits = unformat(got)
        assert bits == pytest.approx(2.75)
        found[method] = evaluate(subject)["perplexity"]
        assert (told["training_tokens"] > 0) == (method in ("bitdistiller", "ours"))
    assert found["dense"] < 2.8
    assert found["bitdistiller"] < 0.8 * min(found["gptq"], found["awq"]), found
    assert found["ours"] < found["bitdistiller"], found
    # Another part of the rates starts from the blocks that are trained already, in passes of a few rows.
    monkeypatch.delattr(lowbit_methods, "train_blocks")
    subject.micro = 5
    got, told = shrink(subject, "ours@0.5", "int2:g32", 0)
    unformat(got)
    assert told["rates"] == 0.5 and evaluate(subject)["perplexity"] < found["bitdistiller"]


@pytest.mark.lab
def test_a_model_that_was_kept_is_shrunk_on_its_own_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """GPT-2's shape in small (layer norms, biases, learned positions), every kind of method."""
    corpus = small_corpus(tmp_path)
    shape: dict[str, Any] = {
        **GPT2, "d_model": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "head_dim": 32, "d_ff": 128,
    }  # fmt: skip
    model = Decoder(ModelSpec(vocab_size=corpus.tokenizer.vocab_size, max_positions=64, **shape))
    init_weights(model, 0)
    save_trained(tmp_path / "kept", model, corpus, mesh=open_mesh(), seed=7, tokens=12345)
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    cells = [f"{m} int2:g64" for m in ("rtn", "clip", "awq", "gptq", "bitdistiller", "ours@live,gamma=0,batch=2,0.25")]
    common = ["lowbit_quality", "--part", "kept", "--only", *cells, "--steps", "4"]
    monkeypatch.setattr(sys, "argv", common)
    with pytest.raises(SystemExit, match="--kept"):
        lowbit_quality.main()
    more = ["--kept", tmp_path / "kept", "--tokens", 1024, "--batch", 4, "--folder", tmp_path / "work"]
    monkeypatch.setattr(sys, "argv", [*common, *map(str, more)])
    lowbit_quality.main()
    assert "FAILED" not in (told := capsys.readouterr().out), told
    lines = [json.loads(text) for text in (tmp_path / "lowbit_quality.jsonl").read_text().splitlines()]
    assert [n["case"] for n in lines] == ["dense", *cells]
    config = lines[-1]["config"]
    assert (config["model_seed"], config["model_tokens"], config["context"]) == (7, 12345, 64)
    assert config["corpus"] == corpus.train.fingerprint[:8] and config["parameters"] == model.spec.num_params()
    assert all(np.isfinite(n["value"]) for n in lines) and len({n["value"] for n in lines}) == len(lines)
    assert all(n["quality"]["valid"] != n["quality"]["perplexity"] for n in lines)  # of another part
    shown = lowbit_tables.table()
    columns = "bits/weight | rounding | clip search (16k) | AWQ (16k) | GPTQ (16k) | BitDistiller | ours"
    assert f"GPT-2's small shape, trained here | {columns}" in shown and "(seed 7, " in shown
    assert config["weights"] == fingerprint(model)[:8]


@pytest.mark.assets
def test_stories260k_is_read_as_it_was_trained(assets: Path) -> None:
    home = assets / "models/stories260k"
    model, codec = load_stories(home / "stories260K.bin"), StoryCodec(home / "tok512.bin")
    story = (assets / "text/tinystories_2M.txt").read_text().split("<|endoftext|>")[3].strip()
    ids = codec.encode(story)
    text = b"".join(codec.pieces[i] for i in ids).decode()
    assert text.replace("<0x0A> ", "\n").strip() == story
    assert perplexity(model, torch.tensor([BOS, *ids]), context=256).value < 8  # 512 tokens; chance is 512
