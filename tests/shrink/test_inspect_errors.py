"""`shoestring inspect` shows the errors that quantization wrote beside the weights: by kind, and layer by layer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest

RUN = ["run", "shrink/ptq", "device=cpu", "model=model", "calib_windows=4", "calib_context=32"]
MIXED = "rules=blocks.1.attn.q=dense;*.mlp.*=nf3:g32;*.attn.*=int4:g32"
OURS = {"up_proj": "mlp.up", "q_proj": "attn.q", "v_proj": "attn.v"}


def row(page: str, *words: str) -> list[str]:
    (found,) = (line.split() for line in page.splitlines() if all(w in line for w in words))
    return found


def test_output_errors_by_kind_and_by_layer(cli: Callable[..., str], here: Path) -> None:
    cli(*RUN, MIXED, "method=gptq", "calib=calib.txt", "run=gptq")
    told = json.loads((here / "gptq/model/quantization.json").read_text())
    errors = {layer["name"]: layer for layer in told["layers"]}

    kinds = cli("inspect", "gptq")
    assert "output error, median" in kinds and "measured by gptq" in kinds
    outputs = [errors[f"blocks.{i}.mlp.up"]["output_error"] for i in range(3)]
    found = row(kinds, "model.layers.*.mlp.up_proj.weight")
    assert float(found[-4]) == pytest.approx(median(outputs), rel=1e-3)
    assert float(found[-3]) == pytest.approx(max(outputs), rel=1e-3)
    assert found[-2:] == ["in", f"layers.{outputs.index(max(outputs))}"]
    # Two layers of a kind are quantized and one is not: it has no error, and they have their own.
    outputs = [errors[f"blocks.{i}.attn.q"]["output_error"] for i in (0, 2)]
    assert float(row(kinds, "layers.0,2.self_attn.q_proj.weight")[-4]) == pytest.approx(sum(outputs) / 2, rel=1e-3)
    assert "in" not in row(kinds, "layers.1.self_attn.q_proj.weight")
    assert "in" not in row(kinds, "embed_tokens")

    layers = cli("inspect", "gptq/model", "--layers")
    assert layers.count("up_proj.weight") == 3 and "layers.*" not in layers and "count" not in layers
    for theirs, ours in OURS.items():
        for i in range(3):
            found, error = (row(layers, f"model.layers.{i}.", f"{theirs}.weight"), errors.get(f"blocks.{i}.{ours}"))
            if error is None:
                assert found[4] == "f16" and float(found[5]) == 16 and len(found) == 7  # no error behind the megabytes
                continue
            assert found[4] == error["format"]
            assert float(found[5]) == pytest.approx(error["bits_per_weight"], rel=1e-2)
            numbers = [error["weight_error"], error["output_error"]]
            assert [float(x) for x in found[-2:]] == pytest.approx(numbers, rel=1e-3)


def test_what_was_not_measured_has_no_column(cli: Callable[..., str], here: Path) -> None:
    plain = cli("inspect", "model", "--layers")
    assert "error" not in plain and row(plain, "model.layers.2.mlp.up_proj.weight")[1:4] == ["128", "x", "64"]
    cli(*RUN, "format=int4:g32", "method=rtn", "run=rounded")  # no text, so no outputs
    assert "output error" not in cli("inspect", "rounded/model")
    layers = cli("inspect", "rounded/model", "--layers")
    assert "weight error" in layers and "output error" not in layers
