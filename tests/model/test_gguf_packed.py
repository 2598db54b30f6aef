"""GGUF files whose quantized matrices stay packed: the same values in every architecture, what is rounded once more,
and 8-bit activations on such a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from test_gguf_write import FAMILIES, family_model, logits_of, packed_model

from refusals import refused
from shoestring.cli.app import run_cli
from shoestring.formats import convert, int8_activations, pack, parse_format
from shoestring.formats.convert import format_hosts
from shoestring.formats.int8_activations import quantize_activations
from shoestring.formats.int_asym import IntAsym
from shoestring.kernels.runtime.cpp import find_compiler
from shoestring.model import load_model, save_model
from shoestring.model.gguf import GgufSource, is_quantized
from shoestring.model.gguf_blocks import GRIDS, decode_blocks, decode_grid
from shoestring.model.gguf_write import save_gguf
from shoestring.serve.engine.cpu_decode import CompiledDecodeStep, executor_of
from tiny import LLAMA, random_model, tiny_tokenizer

SPEC = replace(LLAMA, d_model=64, head_dim=16, d_ff=96)  # rows are whole blocks, and one step takes such heads
needs_kernels = pytest.mark.skipif(int8_activations.refusal() is not None, reason=str(int8_activations.refusal()))


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_matrices_of_every_architecture_have_the_values_of_the_file(family: str, tmp_path: Path) -> None:
    save_gguf(tmp_path / "m.gguf", family_model(family), tiny_tokenizer(), kind="Q4_0")
    dense, packed = (load_model(tmp_path / "m.gguf", packed=p).model for p in (False, True))
    labels = {name: host.format.label for name, host in format_hosts(packed) if host.packed}
    # Embeddings and heads are Q8_0, which has fewer errors; rows that are no blocks are dense.
    assert set(labels.values()) == {"int4:sym:g32", "int8:sym:g32"}
    assert labels["embed"] == "int8:sym:g32" and len(labels) >= len(dict(format_hosts(packed))) - 2
    for name, host in format_hosts(packed):
        original = dense.get_submodule(name)
        assert torch.equal(host.effective_weight(torch.float32), original.weight), name  # type: ignore[arg-type]
    torch.testing.assert_close(logits_of(packed), logits_of(dense), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "label"),
    [("Q5_0", "int8:g32"), ("Q8_0", "int8:sym:g32"), ("Q4_1", "int4:min:g32"), ("Q5_1", "int8:min:g32")],
)
def test_other_grids_of_ours(kind: str, label: str, tmp_path: Path) -> None:
    save_gguf(tmp_path / "m.gguf", random_model(SPEC), tiny_tokenizer(), kind=kind)
    dense, packed = (load_model(tmp_path / "m.gguf", packed=p).model for p in (False, True))
    mlp, other = packed.blocks[0].mlp.down, dense.blocks[0].mlp.down  # type: ignore[union-attr]
    assert mlp.format.label == label  # type: ignore[union-attr]
    assert torch.equal(mlp.effective_weight(torch.float32), other.weight)  # type: ignore[operator, union-attr]
    written = save_gguf(tmp_path / "again.gguf", packed, tiny_tokenizer())
    assert all(about.exact for about in written)
    # Five bits are held in eight, and written in five again.
    assert {about.kind for about in written if about.name.endswith("ffn_down.weight")} == {kind}


@pytest.mark.parametrize("kind", GRIDS)
def test_random_blocks_of_every_grid(kind: str) -> None:
    """Bit for bit; K types within what rounding d and m to fp16 costs."""
    number = GGMLQuantizationType[kind]
    block, size = GGML_QUANT_SIZES[number]
    data = torch.randint(256, (24, 3, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    steps = torch.rand(24, 3, 2, generator=torch.Generator().manual_seed(1)) * 1e-3 + 1e-3
    steps[0, 0] = 0  # a block of zeros, or of one value
    data[..., : 2 if kind in ("Q4_0", "Q5_0", "Q8_0") else 4] = (
        (steps[..., :1] if kind in ("Q4_0", "Q5_0", "Q8_0") else steps).half().view(torch.uint8)
    )
    data = data.flatten(1)
    format, parts, want = GRIDS[kind], decode_grid(data, kind), decode_blocks(data, kind)
    empty = format.empty_parts((24, 3 * block), torch.float32)
    assert {n: (t.shape, t.dtype) for n, t in parts.items()} == {n: (t.shape, t.dtype) for n, t in empty.items()}
    got = format.decode(parts, torch.float32)
    if not kind.endswith("_K"):
        assert torch.equal(got, want)
    largest = 2.0**-11 * (31 * parts["scale"].float().abs() + parts.get("offset", parts["scale"]).float().abs())
    assert ((got - want).abs() <= largest.repeat_interleave(32, dim=1)).all() and want.std() > 1e-3


def test_scales_beyond_fp16_are_damage(tmp_path: Path) -> None:
    spec = replace(SPEC, d_model=256, head_dim=64, d_ff=256)
    save_gguf(tmp_path / "m.gguf", random_model(spec), tiny_tokenizer(), kind="Q4_1")
    source = GgufSource(tmp_path / "m.gguf", packed=True)
    blocks = torch.zeros(256, 144, dtype=torch.uint8)
    blocks[:, :2], blocks[:, 4:16] = torch.tensor([6e4]).half().view(torch.uint8), 63
    refused(
        r"m\.gguf: tensor blk\.0\.\S+ has values beyond fp16; it is damaged",
        source._checked,
        decode_grid(blocks, "Q4_K"),
        "blk.0.ffn_down.weight",
    )


@pytest.mark.parametrize("label", ["int4:min:g32", "int4:min:g0", "int3:min:g32", "int2:min:g0", "int8:min:g32"])
def test_levels_from_an_offset_are_written_as_they_are(label: str, tmp_path: Path) -> None:
    model = packed_model(SPEC, label)
    save_gguf(tmp_path / "m.gguf", model, tiny_tokenizer())
    read = load_model(tmp_path / "m.gguf", packed=True).model
    for name, host in format_hosts(model):
        again = read.get_submodule(name).effective_weight(torch.float32)  # type: ignore[operator]
        assert torch.equal(again, host.effective_weight(torch.float32)), name
    down = read.blocks[0].mlp.down  # type: ignore[union-attr]
    assert down.packed == (label != "int8:min:g32")  # type: ignore[union-attr]  # its codes fit into no block
    if label != "int8:min:g32":
        assert down.format.label == "int4:min:g32"  # type: ignore[union-attr]


@needs_kernels
@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("kind", ["Q4_1", "Q5_1"])
def test_a_file_with_offsets_is_multiplied_as_it_is(kind: str, tmp_path: Path) -> None:
    save_gguf(tmp_path / "m.gguf", random_model(SPEC).eval(), tiny_tokenizer(), kind=kind)
    dense, packed = (load_model(tmp_path / "m.gguf", packed=p).model.eval() for p in (False, True))
    quantize_activations(packed)
    assert all(host.tiled for _, host in format_hosts(packed))
    assert executor_of(packed) is CompiledDecodeStep
    for name, host in format_hosts(packed):
        original = dense.get_submodule(name).weight
        assert torch.equal(host.effective_weight(torch.float32), original), name  # type: ignore[arg-type]
    assert (logits_of(packed) - logits_of(dense)).norm() < 0.06 * logits_of(dense).norm()


@pytest.mark.parametrize("kind", ["MXFP4"])
def test_other_kinds_are_rounded_once_more_to_8_bits(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoestring.model.gguf.ENCODED_ROWS", 24)
    save_gguf(tmp_path / "m.gguf", random_model(SPEC), tiny_tokenizer(), kind=kind)
    dense, packed = (load_model(tmp_path / "m.gguf", packed=p).model for p in (False, True))
    for name, host in format_hosts(packed):
        want = dense.get_submodule(name).weight
        assert isinstance(want, torch.Tensor)
        assert host.packed and host.format == IntAsym(8, 32, symmetric=name in ("embed", "head"))
        bound = 0 if host.format.symmetric else host.format.error_bound(want, {})  # those are Q8_0
        assert ((host.effective_weight(torch.float32) - want).abs() <= bound).all(), name
    assert (logits_of(packed) - logits_of(dense)).norm() < 0.06 * logits_of(dense).norm()


def test_a_file_without_quantized_matrices_and_a_folder_have_nothing_to_pack(tmp_path: Path) -> None:
    model = random_model(SPEC)
    save_gguf(tmp_path / "m.gguf", model, tiny_tokenizer(), kind="F16")
    save_model(tmp_path / "m", model, tiny_tokenizer())
    assert not is_quantized(tmp_path / "m.gguf")
    for path in (tmp_path / "m.gguf", tmp_path / "m"):
        read = load_model(path, packed=True).model
        assert not any(host.packed for _, host in format_hosts(read))
        if int8_activations.refusal() is None:
            refused("there are none", quantize_activations, read)


@needs_kernels
@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
def test_layers_of_several_kinds_are_one_step(tmp_path: Path) -> None:
    model = random_model(SPEC).eval()
    rules = {"*.attn.v": "int8:sym:g32", "*.mlp.down": "int4:g32", "embed": "int8:sym:g32", "*": "int4:sym:g32"}
    convert(model, [(name, parse_format(label)) for name, label in rules.items()], skip=())
    pack(model)
    save_gguf(tmp_path / "m.gguf", model, tiny_tokenizer())
    read = load_model(tmp_path / "m.gguf", packed=True).model
    assert is_quantized(tmp_path / "m.gguf")
    assert {host.format.label for _, host in format_hosts(read)} == {"int4:sym:g32", "int8:g32", "int8:sym:g32"}
    torch.testing.assert_close(logits_of(read), logits_of(model), atol=1e-4, rtol=1e-4)
    quantize_activations(read)
    assert executor_of(read) is CompiledDecodeStep


@needs_kernels
def test_the_command_line_multiplies_the_blocks_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_gguf(tmp_path / "m.gguf", packed_model(SPEC, "int4:sym:g32"), tiny_tokenizer())
    command = ["generate", str(tmp_path / "m.gguf"), "the cat", "--max-tokens", "4", "--device", "cpu"]
    assert run_cli([*command, "--int8-activations"]) == 0
    assert capsys.readouterr().out.startswith("the cat")
