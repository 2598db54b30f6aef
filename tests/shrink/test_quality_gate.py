"""Broken models are not delivered, and layers out of line are listed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shoestring.formats import convert, pack, parse_format
from shoestring.model import load_model, save_model
from shoestring.runlog import read_jsonl
from shoestring.shrink.chosen_grid import LayerError
from shoestring.shrink.quality_gate import (
    broken_layers,
    broken_perplexity,
    broken_predictions,
    mean_kl,
    outliers,
    predictions,
)
from tiny import QWEN2, random_model


def layer(index: int, error: float | None, weight_error: float = 0.1, format: str = "int3:g64") -> LayerError:
    return LayerError(f"blocks.{index}.mlp.up", format, 3.4, weight_error, error)


def test_a_layer_is_measured_by_its_kind() -> None:
    usual = [layer(i, 0.01 + i / 1000) for i in range(8)]
    assert outliers(usual) == []
    found = outliers([*usual, layer(8, 0.2), layer(9, float("nan")), layer(10, 0.2, format="int2:g64")])
    assert {o.name for o in found} == {"blocks.8.mlp.up", "blocks.9.mlp.up"}  # another format is another kind
    assert "error 0.2, 13." in str(next(o for o in found if o.name == "blocks.8.mlp.up"))
    assert [o.name for o in outliers([*(layer(i, None) for i in range(4)), layer(4, None, 0.9)])] == ["blocks.4.mlp.up"]


def test_collapsed_and_infinite_layers_are_broken() -> None:
    model = random_model(QWEN2)
    with torch.no_grad():
        model.blocks[1].mlp.up.weight.fill_(0.46875)  # type: ignore[union-attr, operator]
    convert(model, [("*", parse_format("int4:g32"))])
    pack(model)
    assert broken_layers(model) == ["blocks.1.mlp.up (int4:g32) has collapsed: all of its weights are 0.46875"]
    model.blocks[0].attn.q.weight_scale[0, 0] = torch.inf  # type: ignore[union-attr, index]
    assert len(broken_layers(model)) == 2 and "blocks.0.attn.q (int4:g32) holds weights that are not finite" in str(
        broken_layers(model)
    )


def test_predictions_against_the_model_before() -> None:
    model, tokens = random_model(QWEN2).eval(), torch.arange(20)
    before = predictions(model, tokens)
    assert mean_kl(before, before) == 0 and mean_kl(None, before) is None and predictions(model, None) is None
    convert(model, [("*", parse_format("int8:g32"))])
    pack(model)
    near = mean_kl(before, predictions(model, tokens))
    with torch.no_grad():
        model.embed.weight.mul_(50)  # type: ignore[operator]
    far = mean_kl(before, predictions(model, tokens))
    assert near is not None and far is not None and near < 0.1 < 3 < far
    assert broken_predictions(near, 10) == [] and "nats per token" in broken_predictions(far, 10)[0]
    assert broken_predictions(float("nan"), 10), "what is no number is broken"


@pytest.mark.parametrize(
    ("values", "most", "said"),
    [
        ((20.0, 190.0), 10, None), ((20.0, 210.0), 10, "10.5 times the original one .allowed: 10"),
        ((20.0, float("nan")), 10, "perplexity is nan"), ((20.0, 30.0), 1.2, "1.5 times"), ((20.0,), 10, None),
    ],
)  # fmt: skip
def test_perplexity_against_the_model_before(values: tuple[float, ...], most: float, said: str | None) -> None:
    found = broken_perplexity([{"perplexity": v} for v in values], most)
    assert bool(found) == (said is not None)
    if said is not None:
        assert len(found) == 1 and re.search(said, found[0])


PTQ = ["run", "shrink/ptq", "device=cpu", "method=rtn", "context=32", "max_tokens=512"]


def test_a_broken_model_is_not_delivered_unless_forced(
    command: Callable[..., str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(here)
    loaded = load_model("model")
    with torch.no_grad():
        loaded.model.blocks[1].mlp.up.weight.fill_(0.46875)  # type: ignore[union-attr, operator]
    save_model("flat", loaded.model, loaded.tokenizer)
    argv = ["model=flat", "format=int4:g32", "text=test.txt"]
    err = command(*PTQ, *argv, "run=broken", fails=True)
    assert "the shrunk model is broken: blocks.1.mlp.up (int4:g32) has collapsed" in err
    assert "resume=broken force=true delivers it anyway" in err
    assert not (here / "broken/model").exists() and not (here / "broken/report.html").exists()
    out = command(*PTQ[:2], "resume=broken", "force=true")
    assert "broken: blocks.1.mlp.up" in out and load_model(here / "broken").model.embed.packed
    assert [row["model"] for row in read_jsonl(here / "broken/evals.jsonl")] == ["before", "after"]
    rounding = ["run", "shrink/rtn", *argv, "context=32", "device=cpu", "run=rounded"]
    err = command(*rounding, fails=True)
    assert "has collapsed" in err and "the same with force=true" in err and not (here / "rounded/model").exists()
