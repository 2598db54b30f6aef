"""GPTQ and AWQ folders are read as packed models, bit for bit, or refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from foreign_folders import save_gptq_awq
from refusals import refused
from shoestring.formats import convert, pack, parse_format
from shoestring.model import Decoder, load_model, save_model
from shoestring.model.export import export_model
from tiny import LLAMA, logits, random_model

SPEC = replace(LLAMA, d_model=64, head_dim=16, d_ff=96, qkv_bias=True, model_type="qwen2")


def packed(format: str, layers: str = "blocks.*") -> Decoder:
    model = random_model(SPEC).eval()
    convert(model, [(layers, parse_format(format))])
    pack(model)
    return model


def assert_reads(folder: Path, model: Decoder) -> None:
    """The same model, in the same Formats."""
    again = load_model(folder).model
    assert torch.equal(logits(again), logits(model))
    for layer in ("attn.q", "mlp.down"):
        want, got = (m.get_submodule(f"blocks.1.{layer}") for m in (model, again))
        assert got.packed == want.packed
        if want.packed:
            assert got.format == want.format


@pytest.mark.parametrize("format", ["int4:g32", "int4:sym:g0", "int8:g32", "int3:sym:g32", "int2:g32"])
def test_gptq(format: str, tmp_path: Path) -> None:
    model = packed(format)
    save_gptq_awq(tmp_path / "q", model, "gptq")
    assert_reads(tmp_path / "q", model)


@pytest.mark.parametrize("smallest", [0, 1])
def test_both_versions_of_gptq(smallest: int, tmp_path: Path) -> None:
    """Zero points are stored less one in the first, as they are in the second."""
    model = packed("int4:g32")
    for layer in model.modules():
        if "weight_zero" in dict(layer.named_buffers(recurse=False)):
            layer.weight_zero.clamp_(smallest, 15)
    up = model.blocks[0].mlp.up
    up.weight_zero[:3] = smallest
    _, about = save_gptq_awq(tmp_path / "q", model, "gptq")
    assert about["checkpoint_format"] == ("gptq" if smallest else "gptq_v2")
    assert_reads(tmp_path / "q", model)


@pytest.mark.parametrize(("format", "layers"), [("int4:g32", "blocks.*"), ("int4:g0", "blocks.0.*")])
def test_awq(format: str, layers: str, tmp_path: Path) -> None:
    model = packed(format, layers)
    save_gptq_awq(tmp_path / "q", model, "awq")
    assert_reads(tmp_path / "q", model)


def test_biases_of_zeros_that_old_packers_added(tmp_path: Path) -> None:
    """AutoGPTQ gave every layer a bias, also where the model has none (Llama-2-7B-Chat-GPTQ)."""
    model, folder = packed("int4:g32"), tmp_path / "q"
    tensors, _ = save_gptq_awq(folder, model, "gptq")
    modules = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    added = {f"{m}.bias": torch.zeros(tensors[f"{m}.scales"].shape[1]) for m in modules}
    added = {name: zeros for name, zeros in added.items() if name not in tensors}  # q, k and v have their own
    save_file({**tensors, **added}, folder / "model.safetensors")
    assert_reads(folder, model)
    added["model.layers.1.mlp.down_proj.bias"][3] = 1
    save_file({**tensors, **added}, folder / "model.safetensors")
    refused(r"'model\.layers\.1\.mlp\.down_proj\.bias' has no place", load_model, folder)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_they_are_not_written(method: str, tmp_path: Path) -> None:
    save_model(tmp_path / "p", packed("int4:g32"))
    refused(
        rf"--as {method} .*still read.*--as compressed-tensors", export_model, tmp_path / "p", tmp_path / "out", method
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("layout", "config", "tensors", "message"),
    [
        ("gptq", {"bits": 5}, {}, "bits=5"),
        ("gptq", {"group_size": 16}, {}, "do not fit 4 bits in groups of 16"),
        ("gptq", {"dynamic": {"x": {"bits": 8}}}, {}, "rules of its own"),
        ("awq", {"version": "gemv"}, {}, "other orders"),
        ("gptq", {}, {"g_idx": torch.arange(64).flip(0) // 32}, "reordered"),
        ("gptq", {}, {"qzeros": torch.full((2, 8), -1)}, "understand differently"),
        ("gptq", {}, {"scales": None}, "scales' is missing"),
        ("awq", {}, {"qweight": torch.zeros(64, 7)}, "download it again"),
        ("gptq", {}, {"qweight": torch.zeros(())}, "download it again"),
        ("gptq", {}, {"scales": torch.zeros(0, 64)}, "download it again"),
        ("gptq", {"group_size": "32"}, {}, "group_size='32'"),
    ],
)
def test_folders_that_are_not_read(
    layout: str, config: dict[str, object], tensors: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    stored, about = save_gptq_awq(tmp_path, packed("int4:sym:g32"), layout)
    file = tmp_path / "config.json"
    whole = json.loads(file.read_text())
    file.write_text(json.dumps({**whole, "quantization_config": {**about, **config}}))
    for leaf, t in tensors.items():
        name = f"model.layers.0.self_attn.q_proj.{leaf}"
        if t is None:
            del stored[name]
        else:
            stored[name] = t.to(torch.int32)
    save_file(stored, tmp_path / "model.safetensors")
    refused(message, load_model, tmp_path)
