"""GPTQ and AWQ folders: unpacked by a reference that is written from the definition of the layouts, code by code."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shoestring.errors import UserError
from shoestring.formats import convert, pack, parse_format
from shoestring.model import Decoder, load_model, save_model
from shoestring.model.export import export_model
from shoestring.model.gptq_awq import save_gptq_awq
from tiny import GPT2, LLAMA, from_hf_names, logits, random_model, tiny_tokenizer

SPEC = replace(LLAMA, d_model=64, head_dim=16, d_ff=96, qkv_bias=True, model_type="qwen2")


def packed(format: str, *rules: tuple[str, str]) -> Decoder:
    model = random_model(SPEC).eval()
    convert(model, [(glob, parse_format(f)) for glob, f in (rules or (("*", format),))])
    pack(model)
    return model


def bit_field(words: list[int], first: int, bits: int) -> int:
    """Bits [first, first + bits) of a stream of 32-bit words, lowest first."""
    word, at = divmod(first, 32)
    both = words[word] | (words[word + 1] << 32 if at + bits > 32 else 0)
    return both >> at & (1 << bits) - 1


def streams(words: Tensor) -> list[list[int]]:
    """The rows of int32 words as unsigned numbers."""
    return (words.long() & 0xFFFFFFFF).tolist()


def gptq_weight(tensors: dict[str, Tensor], module: str, bits: int, *, version2: bool) -> Tensor:
    """AutoGPTQ's definition: columns of qweight and rows of qzeros are streams of codes, zero points are less one."""
    columns, zeros = streams(tensors[f"{module}.qweight"].t()), streams(tensors[f"{module}.qzeros"])
    scales, groups = tensors[f"{module}.scales"].float(), tensors[f"{module}.g_idx"].tolist()
    less = 0 if version2 else 1
    numbers = [
        [
            bit_field(stream, column * bits, bits) - bit_field(zeros[group], row * bits, bits) - less
            for column, group in enumerate(groups)
        ]
        for row, stream in enumerate(columns)
    ]
    return torch.tensor(numbers) * scales.t()[:, groups]


def awq_weight(tensors: dict[str, Tensor], module: str, group: int) -> Tensor:
    """AutoAWQ's definition: nibble k of a word belongs to output 8 * word + (0, 2, 4, 6, 1, 3, 5, 7)[k]."""
    codes, zeros = streams(tensors[f"{module}.qweight"]), streams(tensors[f"{module}.qzeros"])
    scales = tensors[f"{module}.scales"].float()
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    places = [(row // 8, order.index(row % 8)) for row in range(scales.shape[1])]
    numbers = [
        [
            (words[word] >> 4 * k & 15) - (zeros[column // group][word] >> 4 * k & 15)
            for column, words in enumerate(codes)
        ]
        for word, k in places
    ]
    return torch.tensor(numbers) * scales.t().repeat_interleave(group, dim=1)


def read(folder: Path) -> tuple[dict[str, Tensor], dict[str, object]]:
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())[
        "quantization_config"
    ]


def unpacked(tensors: dict[str, Tensor], weight_of: object) -> Decoder:
    """A dense model of the folder's weights, as another program would understand them."""
    dense = {n: t.float() for n, t in tensors.items() if n.rpartition(".")[2] in ("weight", "bias")}
    for name in tensors:
        if name.endswith(".qweight"):
            module = name.removesuffix(".qweight")
            dense[f"{module}.weight"] = weight_of(module)  # type: ignore[operator]
    model = Decoder(SPEC)
    model.load_state_dict(from_hf_names(SPEC, dense))
    return model.eval()


@pytest.mark.parametrize(
    ("format", "bits", "group"),
    [("int4:g32", 4, 32), ("int4:sym:g0", 4, -1), ("int8:g64", 8, 64), ("int3:sym:g32", 3, 32), ("int2:g32", 2, 32)],
)
def test_gptq(format: str, bits: int, group: int, tmp_path: Path) -> None:
    if bits == 8:
        model = packed(format, ("blocks.*.attn.*", format), ("blocks.*.mlp.[gu]*", format), ("*", "int8:g96"))
        save_model(tmp_path / "m", model, tiny_tokenizer())
        with pytest.raises(UserError, match=r"one kind of integers.*int8:g64.*int8:g96"):
            export_model(tmp_path / "m", tmp_path / "out", "gptq", torch.float32)
        format, group = "int8:g32", 32
    model = packed(format)
    save_model(tmp_path / "p", model, tiny_tokenizer())
    exported = export_model(tmp_path / "p", tmp_path / "out", "gptq", torch.float32)
    assert "vLLM" in exported.reader
    tensors, about = read(tmp_path / "out")
    assert (about["quant_method"], about["bits"], about["group_size"]) == ("gptq", bits, group)
    assert about["sym"] == (":sym" in format) and about["desc_act"] is False
    assert json.loads((tmp_path / "out" / "quantize_config.json").read_text()) == about
    has_zero = any(
        bool((m.weight_zero == 0).any()) for m in model.modules() if "weight_zero" in dict(m.named_buffers())
    )
    assert about["checkpoint_format"] == ("gptq_v2" if has_zero else "gptq")
    down = gptq_weight(tensors, "model.layers.1.mlp.down_proj", bits, version2=has_zero)
    assert torch.equal(down, model.blocks[1].mlp.down.effective_weight(torch.float32))
    again = load_model(tmp_path / "out").model
    assert torch.equal(logits(again), logits(model)) and again.blocks[0].attn.q.packed
    if format == "int4:g32":
        theirs = unpacked(tensors, lambda m: gptq_weight(tensors, m, bits, version2=has_zero))
        assert torch.equal(logits(theirs), logits(model))


def test_gptq_says_where_a_zero_point_is_zero(tmp_path: Path) -> None:
    model = random_model(SPEC).eval()
    with torch.no_grad():
        model.blocks[0].mlp.up.weight[:3].abs_()
    convert(model, [("*", parse_format("int4:g32"))])
    pack(model)
    assert bool((model.blocks[0].mlp.up.weight_zero == 0).any())
    save_model(tmp_path / "p", model)
    export_model(tmp_path / "p", tmp_path / "out", "gptq", torch.float32)
    tensors, about = read(tmp_path / "out")
    assert about["checkpoint_format"] == "gptq_v2"
    up = gptq_weight(tensors, "model.layers.0.mlp.up_proj", 4, version2=True)
    assert torch.equal(up, model.blocks[0].mlp.up.effective_weight(torch.float32))
    assert torch.equal(logits(load_model(tmp_path / "out").model), logits(model))


@pytest.mark.parametrize("format", ["int4:g32", "int4:sym:g32"])
def test_awq(format: str, tmp_path: Path) -> None:
    model = packed(format, ("embed", "int4:g32"), ("blocks.0.*", format), ("blocks.1.mlp.*", format))
    save_model(tmp_path / "p", model, tiny_tokenizer())
    export_model(tmp_path / "p", tmp_path / "out", "awq", torch.float32)
    tensors, about = read(tmp_path / "out")
    assert (about["quant_method"], about["bits"], about["group_size"], about["version"]) == ("awq", 4, 32, "gemm")
    assert "model.layers.1.self_attn.q_proj" in about["modules_to_not_convert"]
    assert torch.equal(logits(unpacked(tensors, lambda m: awq_weight(tensors, m, 32))), logits(model))
    assert torch.equal(logits(load_model(tmp_path / "out").model), logits(model))


@pytest.mark.parametrize(
    ("method", "rules", "message"),
    [
        ("awq", [("*", "int3:g32")], r"awq folders hold int4, and model\.layers\.0\.self_attn\.q_proj is int3:g32"),
        ("gptq", [("*", "nf4:g32")], "hold int2, int3, int4, int8.*nf4"),
        ("gptq", [("blocks.0.*", "int4:g32")], r"every layer of the blocks, and model\.layers\.1\..* is dense"),
        ("gptq", [("blocks.*", "int4:g32:bfloat16")], "float16 scales"),
        ("awq", [("blocks.0.*", "int4:g32"), ("*", "int4:g16")], "one kind of integers"),
    ],
)
def test_refusals(method: str, rules: list[tuple[str, str]], message: str, tmp_path: Path) -> None:
    save_model(tmp_path / "p", packed("", *rules))
    with pytest.raises(UserError, match=message):
        export_model(tmp_path / "p", tmp_path / "out", method)
    assert not (tmp_path / "out").exists()


def test_biases_of_zeros_that_old_packers_added(tmp_path: Path) -> None:
    """AutoGPTQ gave every layer a bias, also where the model has none (Llama-2-7B-Chat-GPTQ)."""
    model = random_model(SPEC)
    convert(model, [("*", parse_format("int4:g32"))])
    pack(model)
    folder = save_gptq_awq(tmp_path / "out", model, method="gptq", dtype=torch.float32)
    tensors = load_file(folder / "model.safetensors")
    modules = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    added = {f"{m}.bias": torch.zeros(tensors[f"{m}.scales"].shape[1]) for m in modules}
    added = {name: zeros for name, zeros in added.items() if name not in tensors}  # q, k and v have their own
    save_file({**tensors, **added}, folder / "model.safetensors")
    assert torch.equal(logits(load_model(folder).model), logits(model))
    added["model.layers.1.mlp.down_proj.bias"][3] = 1
    save_file({**tensors, **added}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"'model\.layers\.1\.mlp\.down_proj\.bias' has no place"):
        load_model(folder)


def test_models_without_such_layers(tmp_path: Path) -> None:
    save_model(tmp_path / "dense", random_model(SPEC))
    with pytest.raises(UserError, match=r"the model has none: quantize it first"):
        export_model(tmp_path / "dense", tmp_path / "out", "gptq")
    model = random_model(GPT2)
    convert(model, [("*", parse_format("int4:g32"))])
    pack(model)
    save_model(tmp_path / "gpt2", model)
    with pytest.raises(UserError, match="separate Linear layers, and a gpt2 model has none"):
        export_model(tmp_path / "gpt2", tmp_path / "out", "awq")


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
    model = packed("int4:sym:g32")
    save_model(tmp_path / "p", model)
    export_model(tmp_path / "p", tmp_path / "out", layout)
    stored, about = read(tmp_path / "out")
    file = tmp_path / "out" / "config.json"
    whole = json.loads(file.read_text())
    file.write_text(json.dumps({**whole, "quantization_config": {**about, **config}}))
    for leaf, t in tensors.items():
        name = f"model.layers.0.self_attn.q_proj.{leaf}"
        if t is None:
            del stored[name]
        else:
            stored[name] = t.to(torch.int32)
    save_file(stored, tmp_path / "out" / "model.safetensors")
    with pytest.raises(UserError, match=message):
        load_model(tmp_path / "out")
