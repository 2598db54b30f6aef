"""The skipping bench on a tiny model: every part runs, lines are whole, tables lay them out; a text that is read as if
it were written gets the likelihoods of the set that each position has."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import results
from experiments import skipping, skipping_online, skipping_sets
from experiments.skipping_online import OFFLINE, ONLINE, OURS, WHOLE, Reader
from shoestring.methods.skipping.policies import NUM_WATCHED, AdaSkip
from shoestring.model import Decoder, ModelSpec, Tokenizer, save_model
from shoestring.model.parallel import init_weights
from shoestring.model.skip import SkipSet, StandIn, Sublayer

TEXT = "the quick brown fox jumps over the lazy dog. pack my box with five dozen liquor jugs.\n" * 40
OPTIONS = (
    "--windows 2 --window 32 --rows 32 --lookahead 2 --tokens 64 --items 2 --new 6 --context-sets 32 64 "
    "--prompts 2 --continuation 24 --repeats 1"
)


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A tiny model, texts, and where sets go, as options; contexts are small, results go beside them."""
    tokenizer = Tokenizer.train([TEXT], 300)
    model = Decoder(ModelSpec(tokenizer.vocab_size, 32, 5, 4, 2, 8, 64, 128, eos_id=tokenizer.eos_id))
    init_weights(model, 0)
    save_model(tmp_path / "model", model, tokenizer)
    for name in ("valid", "test"):
        path = tmp_path / f"text/wikitext-2/{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TEXT)
    (tmp_path / "eval").mkdir()
    item = {"context": "pack my box with five dozen liquor", "continuation": " jugs"}
    (tmp_path / "eval/lambada_openai.jsonl").write_text((json.dumps(item) + "\n") * 2)
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    monkeypatch.setenv("SHOESTRING_COMMIT", "none")  # git need not be asked for each of the many lines
    monkeypatch.setattr(skipping, "CONTEXTS", (32, 64))
    return ["--model", str(tmp_path / "model"), "--assets", str(tmp_path), "--sets", str(tmp_path / "sets")]


@pytest.mark.lab
def test_every_part_runs_and_its_table_is_whole(
    paths: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["x", "sets", "quality", "draft-set", "drafts", "online", *paths, *OPTIONS.split()]
    monkeypatch.setattr(sys, "argv", argv)
    skipping.main()
    lines = [n for n in results.newest("skipping") if n["metric"] == "decode_speedup"]
    assert len(lines) == 2 * (1 + 4 * 2)
    assert {n["case"] for n in lines} == {"whole model", *skipping_sets.METHODS}
    assert all(n["quality"]["perplexity"] > 1 for n in lines)
    assert skipping.table().count("\n| CPU |") == 18
    assert "| lossless |" in skipping.drafts() and "6 of 6" in skipping.drafts()
    assert skipping.costs().count("attention") == 2
    check_online(tmp_path / "sets")
    before = len((tmp_path / "results/skipping.jsonl").read_text().splitlines())
    monkeypatch.setattr(sys, "argv", ["x", "quality", *argv[6:]])
    skipping.main()  # goes on where it was stopped: nothing is left
    assert len((tmp_path / "results/skipping.jsonl").read_text().splitlines()) == before


def check_online(sets: Path) -> None:
    lines = [n for n in results.newest("skipping") if n["metric"] == skipping_online.METRIC]
    assert [n["case"] for n in lines] == 2 * [WHOLE, OFFLINE, ONLINE, OFFLINE, ONLINE, OURS, OURS]
    assert [n["quality"]["prompts"] for n in lines] == 7 * [2] + 7 * [1]
    for n in lines:
        quality = n["quality"]
        assert quality["perplexity"] > 1 and n["value"] > 0
        if n["case"] in (OFFLINE, ONLINE):
            assert quality["sublayers"] == {1.2: 2, 1.4: 3}[n["config"]["alpha"]]
        if n["case"] == ONLINE:
            assert len(quality["ffns_added"]) == quality["prompts"]
    assert len(list((sets / "online").glob("measured-*.json"))) >= 2
    assert skipping_online.table().count("\n| CPU |") == 14


def double_decoder(seed: int) -> Decoder:
    """fp64, so that equal means equal; its last FFN does less than the others."""
    torch.manual_seed(seed)
    model = Decoder(ModelSpec(29, 16, 4, 4, 2, 4, 24, 64)).double().eval()
    model.compute_dtype = torch.float64
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim > 1:
                param.normal_(0, 0.5)
        model.blocks[-1].mlp.down.weight.mul_(0.5)  # type: ignore[union-attr, operator]
    return model


def likelihoods(model: Decoder, tokens: list[int], num_new: int, skip: SkipSet | None) -> Tensor:
    """By one forward over everything, with one set for all positions."""
    with torch.no_grad():
        logits_TV = model(torch.tensor([tokens]), skip=skip)[0]
    return F.cross_entropy(logits_TV[:-1], torch.tensor(tokens[1:]), reduction="none")[-num_new:]


def watched_cosines(model: Decoder, tokens: list[int], num_prompt: int, skip: SkipSet) -> list[float]:
    """Per layer over the first new tokens, by one forward."""
    found = []

    def watch(layer: int, kind: str, x: Tensor, y: Tensor) -> None:
        rows = slice(num_prompt, num_prompt + NUM_WATCHED)
        if kind == "mlp":
            found.append(float(F.cosine_similarity(x[0, rows], y[0, rows], dim=-1).mean()))

    with torch.no_grad():
        model(torch.tensor([tokens]), skip=skip, watch=watch)
    return found


def test_a_text_is_read_with_the_set_of_each_position() -> None:
    """What the last block's FFN does reaches no other position. So where AdaSkip adds just that one, rows before the
    change are those of the offline set and rows after it those of the larger one, each set in a forward of its own."""
    model, num_prompt, num_new = double_decoder(3), 18, 30
    tokens = torch.randint(29, (num_prompt + num_new,), generator=torch.Generator().manual_seed(1)).tolist()
    fixed = SkipSet({Sublayer(1, "attn"): StandIn(torch.tensor([1.1]))})
    larger = fixed.plus({Sublayer(3, "mlp"): StandIn(torch.tensor([1.2]))})
    read = Reader(model, len(tokens), num_new)
    *others, last = watched_cosines(model, tokens, num_prompt, fixed)
    assert last > max(others)

    reached = read(tokens, AdaSkip(fixed, last - 1e-9, (1.0, 1.0, 1.0, 1.2)))
    assert reached.skip == larger
    before, after = (likelihoods(model, tokens, num_new, skip) for skip in (fixed, larger))
    border = NUM_WATCHED + 1  # the row of the last watched token predicts the one behind it
    torch.testing.assert_close(
        torch.tensor(reached.nll, dtype=torch.float64), torch.cat([before[:border], after[border:]])
    )
    assert (before - after)[border:].abs().max() > 1e-3
    assert skipping_online.perplexity_behind([reached]) == pytest.approx(math.exp(after[border:].mean()))

    missed = read(tokens, AdaSkip(fixed, last + 1e-9, (1.0, 1.0, 1.0, 1.2)))
    assert missed.skip == fixed
    torch.testing.assert_close(torch.tensor(missed.nll, dtype=torch.float64), before)
    whole = read(tokens)
    assert whole.skip is None
    torch.testing.assert_close(torch.tensor(whole.nll, dtype=torch.float64), likelihoods(model, tokens, num_new, None))
