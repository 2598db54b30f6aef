"""compressed-tensors folders: the real packages read ours with our logits, we read theirs, and the refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from refusals import refused
from shoestring.cli.inspect import folder_weights
from shoestring.errors import UserError
from shoestring.formats import FormatLinear, IntAsym, convert, pack, parse_format
from shoestring.model import Decoder, ModelSpec, load_model, save_model
from shoestring.model.compressed_tensors import pack_zeros, save_compressed_tensors, unpack_zeros
from shoestring.model.export import export_model
from shoestring.model.spec import Experts
from tiny import logits, random_model

# d_ff 72 has no whole number of words of zero points (72 * 4 / 32), heads of 16 rows even less.
SPEC = ModelSpec(97, 64, 2, 4, 2, 16, 72, 64, tied=False, bos_id=1, eos_id=2)
SPECS = {
    "llama": SPEC,
    "mistral": replace(SPEC, model_type="mistral", sliding_window=5),
    "qwen2": replace(SPEC, model_type="qwen2", qkv_bias=True, tied=True),
    "qwen3": replace(SPEC, model_type="qwen3", qk_norm=True, norm_eps=1e-6, tied=True),
}
GPT2 = ModelSpec(
    97, 32, 2, 4, 4, 8, 48, 64, model_type="gpt2", norm="layer", act="gelu_tanh", positions="learned",
    qkv_bias=True, out_bias=True, mlp_bias=True, bos_id=1, eos_id=2,
)  # fmt: skip
# Every width of SPEC is a multiple of 8; 72 has the groups 8, 24, 72.
KINDS = [
    *("int4:g8", "int4:sym:g8", "int8:g0", "int8:sym:g0", "int4:g0:bfloat16", "int8:sym:g8:bfloat16"),
    *("int2:sym:g8", "int3:sym:g8"),
]


def quantized(
    spec: ModelSpec = SPEC, *rules: tuple[str, str], packed: bool = True, skip: tuple[str, ...] = ("head",)
) -> Decoder:
    model = random_model(spec)
    convert(model, [(glob, parse_format(f)) for glob, f in rules], skip=skip)
    if packed:
        pack(model)
    return model


def from_transformers(path: Path) -> torch.nn.Module:
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_computes_our_logits(kind: str, tmp_path: Path) -> None:
    model = quantized(SPEC, ("*", kind))
    save_compressed_tensors(tmp_path / "ct", model, dtype=torch.float32)
    theirs = from_transformers(tmp_path / "ct")
    torch.testing.assert_close(logits(theirs), logits(model), atol=1e-5, rtol=1e-5)
    # Not only close: after the first pass the decoded weight is there, and it is ours bit for bit.
    ours, other = (model.get_submodule("blocks.1.mlp.down"), theirs.get_submodule("model.layers.1.mlp.down_proj"))
    assert isinstance(ours, FormatLinear)
    assert torch.equal(other.weight, ours.effective_weight(torch.float32))


@pytest.mark.parametrize("name", SPECS)
def test_every_architecture_with_linear_layers(name: str, tmp_path: Path) -> None:
    model = quantized(SPECS[name], ("*", "int4:g8"))
    out = save_compressed_tensors(tmp_path / "ct", model, dtype=torch.float32)
    theirs = from_transformers(out)
    torch.testing.assert_close(logits(theirs), logits(model), atol=1e-5, rtol=1e-5)
    loaded = load_model(out)
    assert loaded.spec == SPECS[name]
    assert torch.equal(logits(loaded.model), logits(model))
    assert all(m.packed for n, m in loaded.model.named_modules() if isinstance(m, FormatLinear) and n != "head")


def test_experts_and_the_gates_that_stay_dense(tmp_path: Path) -> None:
    """A gate that is not named as dense is a packed layer to readers: transformers took random numbers for it."""
    experts = Experts(4, 2, 32, shared_d_ff=48)
    spec = replace(SPEC, model_type="qwen2_moe", qkv_bias=True, experts=experts, norm_eps=1e-6)
    kept = ["lm_head", *(f"model.layers.{i}.mlp.{gate}" for i in range(2) for gate in ("gate", "shared_expert_gate"))]
    for layout, format in (("compressed-tensors", "int4:sym:g8"), ("fp8", "fp8")):
        source = save_model(tmp_path / f"from-{layout}", quantized(spec, ("*", format)))
        out = export_model(source, tmp_path / layout, layout, torch.float32)
        about = json.loads((out.path / "config.json").read_text())["quantization_config"]
        assert sorted(about["ignore"]) == sorted(kept)
        assert out.note is None
    ours = load_model(tmp_path / "compressed-tensors").model
    theirs = from_transformers(tmp_path / "compressed-tensors")
    torch.testing.assert_close(logits(theirs), logits(ours), atol=0.02, rtol=0.02)  # it decodes experts in fp16
    asymmetric = save_model(tmp_path / "asymmetric", quantized(spec, ("*", "int4:g8")))
    assert "symmetric" in str(export_model(asymmetric, tmp_path / "ct", "compressed-tensors").note)


def test_several_formats_a_packed_head_and_dense_layers_in_one_folder(tmp_path: Path) -> None:
    rules = (("blocks.0.attn.*", "dense"), ("*.mlp.*", "int8:sym:g8"), ("head", "int8:g0"), ("*", "int4:g8"))
    model = quantized(SPEC, *rules)
    out = save_compressed_tensors(tmp_path / "ct", model, dtype=torch.float32)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert len(config["config_groups"]) == 3 and len(config["ignore"]) == 4
    torch.testing.assert_close(logits(from_transformers(out)), logits(model), atol=1e-5, rtol=1e-5)
    again = load_model(out).model
    assert torch.equal(logits(again), logits(model))
    formats = {n: m.format.label for n, m in again.named_modules() if isinstance(m, FormatLinear)}
    assert formats["blocks.0.attn.q"] == "dense" and formats["head"] == "int8:g0"
    assert formats["blocks.1.attn.q"] == "int4:g8" and formats["blocks.1.mlp.up"] == "int8:sym:g8"


def test_a_model_in_training_is_written_as_it_computes(tmp_path: Path) -> None:
    model = quantized(SPEC, ("*", "int4:g8"), packed=False)
    save_compressed_tensors(tmp_path / "ct", model, dtype=torch.float32)
    assert model.blocks[0].attn.q.weight is not None  # type: ignore[union-attr]
    assert torch.equal(logits(load_model(tmp_path / "ct").model), logits(model))


def test_zero_points_that_were_moved_are_written(tmp_path: Path) -> None:
    model = quantized(SPEC, ("*", "int4:sym:g8"))
    moved = model.get_submodule("blocks.0.attn.q")
    moved.weight_zero[3, 2] = 5  # type: ignore[index, operator]
    out = save_compressed_tensors(tmp_path / "ct", model, dtype=torch.float32)
    torch.testing.assert_close(logits(from_transformers(out)), logits(model), atol=1e-5, rtol=1e-5)
    assert torch.equal(logits(load_model(out).model), logits(model))


def test_shards_default_dtype_and_inspection(tmp_path: Path) -> None:
    model = quantized(SPEC, ("*", "int4:g8:bfloat16"))
    out = save_compressed_tensors(tmp_path / "ct", model, shard_bytes=10_000)
    assert len(list(out.glob("model-*.safetensors"))) > 2
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    stored = {s.name: s for s in folder_weights(out)}
    up = stored["model.layers.0.mlp.up_proj.weight"]
    assert up.kind == "int4:g8:bfloat16" and up.shape == (72, 64)
    # codes 4, scale 16/8, zero 4/8 (packed here, a byte in our own folders), weight_shape 128 bits
    assert up.bits == 72 * 64 * (4 + 2 + 0.5) + 128
    head = stored["lm_head.weight"]
    assert head.kind == "bf16" and head.bits == 97 * 64 * 16


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_zero_points_as_the_package_packs_them(bits: int) -> None:
    zero = torch.randint(0, 2**bits, (75, 5), dtype=torch.uint8)
    packed = pack_zeros(zero, bits)
    assert torch.equal(unpack_zeros(packed, bits, 75), zero)
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    signed = (zero.to(torch.int16) - 2 ** (bits - 1)).to(torch.int8)
    assert torch.equal(packed, helpers.pack_to_int32(signed, bits, packed_dim=0))


# -- folders that others wrote -------------------------------------------------------------------------------


def compress_elsewhere(folder: Path, scheme: dict[str, Any], scale: Callable[[torch.Tensor], Any]) -> None:
    """A dense Llama folder, quantized by the real package with grids of the test's own."""
    package = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    save_model(folder, random_model(SPEC))
    tensors = load_file(folder / "model.safetensors")
    layers = [n.removesuffix(".weight") for n in tensors if n.endswith("_proj.weight")]
    made = quantization.QuantizationScheme(targets=["Linear"], weights=quantization.QuantizationArgs(**scheme))
    for layer in layers:
        weight = tensors.pop(f"{layer}.weight")
        s, z = scale(weight)
        state = {"weight": weight, "weight_scale": s} | ({} if z is None else {"weight_zero_point": z})
        state = package.PackedQuantizationCompressor.compress(state, made)
        tensors.update({f"{layer}.{n}": t for n, t in state.items()})
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": None}},
        "ignore": ["lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_folder_packed_elsewhere_loads_with_its_logits(symmetric: bool, tmp_path: Path) -> None:
    scheme = {
        "num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": 8, "dynamic": False,
    }  # fmt: skip

    def grid(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        g = w.unflatten(1, (-1, 8))
        if symmetric:
            return (g.abs().amax(-1) / 7.5).bfloat16().float(), None
        s = ((g.amax(-1) - g.amin(-1)) / 15).bfloat16().float()
        return s, (torch.round(-g.amin(-1) / s) - 8).clamp(-8, 7).to(torch.int8)

    compress_elsewhere(tmp_path / "ct", scheme, grid)
    theirs = from_transformers(tmp_path / "ct")
    loaded = load_model(tmp_path / "ct").model
    torch.testing.assert_close(logits(loaded), logits(theirs), atol=2e-3, rtol=2e-3)  # fp32 scales: 16 bits here
    q = loaded.blocks[0].attn.q  # type: ignore[union-attr]
    assert isinstance(q, FormatLinear) and q.format == IntAsym(4, 8, symmetric=symmetric)
    save_compressed_tensors(tmp_path / "again", loaded, dtype=torch.float32)
    a, b = load_file(tmp_path / "ct/model.safetensors"), load_file(tmp_path / "again/model.safetensors")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[n], b[n]) for n in a if n.endswith(("_packed", "_zero_point", "_shape")))


def damage(folder: Path, group: dict[str, Any], top: dict[str, Any], tensors: dict[str, torch.Tensor | None]) -> None:
    """Other fields of the quantization and of its group; other tensors of the first q, None: without it."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"].update(group)
    config["quantization_config"].update(top)
    (folder / "config.json").write_text(json.dumps(config))
    stored = load_file(folder / "model.safetensors")
    for leaf, t in tensors.items():
        if t is None:
            del stored[f"model.layers.0.self_attn.q_proj.{leaf}"]
        else:
            stored[f"model.layers.0.self_attn.q_proj.{leaf}"] = t
    save_file(stored, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("group", "top", "tensors", "words"),
    [
        ({"format": "float-quantized"}, {}, {}, ["float-quantized", "pack-quantized", "unquantized"]),
        ({"input_activations": {"num_bits": 8}}, {}, {}, ["activations", "W4A16"]),
        ({}, {"transform_config": {"config_groups": {"u": {}}}}, {}, ["transform_config"]),
        ({}, {}, {"weight_g_idx": torch.zeros(64, dtype=torch.int32)}, ["weight_g_idx", "act-order"]),
        ({}, {}, {"weight_scale": None}, ["q_proj.weight_scale", "missing"]),
        ({}, {}, {"weight_packed": torch.zeros(64, 10, dtype=torch.int32)}, ["[64, 10]", "2, 3, 4 and 8 bits"]),
        ({}, {}, {"weight_shape": torch.tensor([64, 64, 1])}, ["q_proj.weight_shape", "two sizes"]),
        ({}, {}, {"weight_zero_point": torch.zeros(3, 3).int()}, ["zero points", "q_proj", "[3, 3]"]),
        ({}, {"config_groups": {"group_0": []}}, {}, ["an unknown format"]),
    ],
)
def test_folders_that_cannot_be_read(
    group: dict[str, Any], top: dict[str, Any], tensors: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    save_compressed_tensors(tmp_path / "ct", quantized(SPEC, ("*", "int4:g8")))
    damage(tmp_path / "ct", group, top, tensors)
    said = refused(re.escape(words[0]), load_model, tmp_path / "ct")
    assert all(word in said for word in words), said


def test_a_layer_of_another_name_is_refused(tmp_path: Path) -> None:
    file = save_compressed_tensors(tmp_path / "ct", quantized(SPEC, ("*", "int4:g8"))) / "model.safetensors"
    tensors = load_file(file)
    save_file({n.replace("1.mlp.up_proj", "1.mlp.other_proj"): t for n, t in tensors.items()}, file)
    assert "llama" in refused("other_proj", load_model, tmp_path / "ct")


# -- export --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "words"),
    [
        ("nf3:g8", ["model.layers.0.self_attn.q_proj", "nf3:s2:g8", "--as packed", "--as dense", "int4"]),
        ("int3:g8", ["3 bits without zero points", "int3:g8", "--as packed", "int3:sym"]),
        ("sparse24", ["sparse24", "2:4", "--as packed"]),
    ],
)
def test_what_the_layout_cannot_hold(format: str, words: list[str], tmp_path: Path) -> None:
    save_model(tmp_path / "m", quantized(SPEC, ("*", format)))
    with pytest.raises(UserError) as error:
        export_model(tmp_path / "m", tmp_path / "out", "compressed-tensors")
    assert all(w in str(error.value) for w in words), error.value
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_other_refusals(tmp_path: Path) -> None:
    save_model(tmp_path / "dense", random_model(SPEC))
    refused(
        r"no quantized layer.*shoestring quantize", export_model, tmp_path / "dense", tmp_path / "out",
        "compressed-tensors",
    )  # fmt: skip
    refused("no packed layer", export_model, tmp_path / "dense", tmp_path / "out", "packed")
    refused(
        "a drafter made by shrink/drafter is a model of its own", export_model, tmp_path / "dense", tmp_path / "out",
        "speculators",
    )  # fmt: skip
    refused(r"--as 'onnx' is not possible", export_model, tmp_path / "dense", tmp_path / "out", "onnx")
    save_model(tmp_path / "gpt2", quantized(GPT2, ("*", "int4:g8")))
    refused(r"gpt2.*Conv1D.*--as packed", export_model, tmp_path / "gpt2", tmp_path / "out", "compressed-tensors")
    refused(
        r"scales are float16.*leave --dtype out", save_compressed_tensors, tmp_path / "out",
        quantized(SPEC, ("*", "int4:g8")), dtype=torch.bfloat16,
    )  # fmt: skip
    assert not (tmp_path / "out").exists()


def test_export_between_all_layouts(tmp_path: Path) -> None:
    model = quantized(SPEC, ("*", "int4:g8"))
    save_model(tmp_path / "a", model)
    before = {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()}
    assert "vLLM" in export_model(tmp_path / "a", tmp_path / "b", "compressed-tensors", torch.float32).reader
    export_model(tmp_path / "b", tmp_path / "c", "packed", torch.float32)
    export_model(tmp_path / "c", tmp_path / "d", "dense", torch.float32)
    for folder in "bcd":
        assert torch.equal(logits(load_model(tmp_path / folder).model), logits(model)), folder
    assert {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()} == before  # the source is never touched
