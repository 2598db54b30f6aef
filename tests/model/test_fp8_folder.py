"""FP8 folders, both ways: DeepSeek's and Qwen's blocks, compressed-tensors' rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from refusals import refused
from shoestring.cli.inspect import summarize
from shoestring.formats import Fp8, convert, pack, parse_format
from shoestring.model import load_model, save_model
from shoestring.model.export import export_model
from tiny import QWEN2, random_model

SPEC = replace(QWEN2, d_model=192, d_ff=160, tied=False)
TOKENS = torch.arange(24).view(2, 12)


def packed(label: str, folder: Path) -> torch.Tensor:
    model = random_model(SPEC)
    convert(model, [("*", parse_format(label))])
    pack(model)
    save_model(folder, model)
    with torch.no_grad():
        return model(TOKENS)


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return load_model(folder).model(TOKENS)


@pytest.mark.parametrize("label", ["fp8:b128", "fp8:b128:bfloat16", "fp8"])
def test_out_and_in_again(label: str, tmp_path: Path) -> None:
    want = packed(label, tmp_path / "ours")
    assert torch.equal(logits(tmp_path / "ours"), want)
    export_model(tmp_path / "ours", tmp_path / "theirs", "fp8", torch.float32)
    assert torch.equal(logits(tmp_path / "theirs"), want)
    tensors = load_file(tmp_path / "theirs/model.safetensors")
    weight = tensors["model.layers.0.mlp.up_proj.weight"]
    about = json.loads((tmp_path / "theirs/config.json").read_text())["quantization_config"]
    assert weight.dtype == torch.float8_e4m3fn and weight.shape == (160, 192)
    if label == "fp8":
        assert about["format"] == "float-quantized" and "lm_head" in about["ignore"]
        assert tensors["model.layers.0.mlp.up_proj.weight_scale"].shape == (160, 1)
    else:
        assert about["quant_method"] == "fp8" and about["weight_block_size"] == [128, 128]
        scale = tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]
        assert scale.shape == (2, 2) and about["modules_to_not_convert"] == ["lm_head"]
        # The values as the readers of this layout compute them.
        spread = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)[:160, :192]
        ours = load_model(tmp_path / "ours").model.get_submodule("blocks.0.mlp.up").effective_weight(torch.float32)  # type: ignore[operator]
        assert torch.equal(weight.float() * spread, ours)
    rows = {row[0]: row for row in summarize(tmp_path / "theirs")[1].rows}
    assert rows["model.layers.*.mlp.up_proj.weight"][3] == label


@pytest.mark.parametrize("layout", ["fp8", "compressed-tensors"])
def test_packed_ends_are_written_dense(layout: str, tmp_path: Path) -> None:
    model = random_model(SPEC)
    ends = [("embed", parse_format("int8:g0")), ("head", parse_format("int8:g0"))]
    convert(model, [*ends, ("*", parse_format("fp8:b128" if layout == "fp8" else "int4:g32"))])
    pack(model)
    save_model(tmp_path / "ours", model)
    export_model(tmp_path / "ours", tmp_path / "theirs", layout, torch.float32)
    there = load_model(tmp_path / "theirs").model
    assert not there.embed.packed and there.head is not None and not there.head.packed
    torch.testing.assert_close(logits(tmp_path / "theirs"), logits(tmp_path / "ours"), rtol=1e-4, atol=1e-4)


def test_one_scale_for_a_whole_weight_and_scales_of_activations(tmp_path: Path) -> None:
    packed("fp8", tmp_path / "ours")
    export_model(tmp_path / "ours", tmp_path / "theirs", "fp8", torch.float32)
    path = tmp_path / "theirs/model.safetensors"
    tensors = load_file(path)
    for name in [n for n in tensors if n.endswith("weight_scale")]:
        tensors[name] = torch.tensor(0.01)
        tensors[name.replace("weight_scale", "input_scale")] = torch.tensor(1.0)
    save_file(tensors, path)
    up = load_model(tmp_path / "theirs").model.get_submodule("blocks.1.mlp.up")
    weight = tensors["model.layers.1.mlp.up_proj.weight"].float() * torch.tensor(0.01)
    assert up.format == Fp8() and torch.equal(up.effective_weight(torch.float32), weight)  # type: ignore[operator]


def test_what_does_not_fit_is_one_line(tmp_path: Path) -> None:
    packed("int4:g32", tmp_path / "ints")
    refused(r"cannot hold blocks\.0\.attn\.q as int4:g32", export_model, tmp_path / "ints", tmp_path / "out", "fp8")
    packed("fp8:b128", tmp_path / "ours")
    export_model(tmp_path / "ours", tmp_path / "theirs", "fp8")
    path = tmp_path / "theirs/model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    save_file({**tensors, name: torch.ones(3, 3)}, path)
    refused(r"has shape \[3, 3\] for a weight of \[160, 192\]", load_model, tmp_path / "theirs")
    save_file({n: t for n, t in tensors.items() if n != name}, path)
    refused(r"weight_scale_inv' is missing", load_model, tmp_path / "theirs")
    bad = tensors["model.layers.0.mlp.up_proj.weight"].view(torch.uint8).clone()
    bad[0, 0] = 127
    save_file({**tensors, "model.layers.0.mlp.up_proj.weight": bad.view(torch.float8_e4m3fn)}, path)
    refused("holds NaN values", load_model, tmp_path / "theirs")
    config = json.loads((tmp_path / "theirs/config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [64, 64]
    (tmp_path / "theirs/config.json").write_text(json.dumps(config))
    refused(r"weight_block_size is \[64, 64\]", load_model, tmp_path / "theirs")
