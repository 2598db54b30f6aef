"""GGUF files: every block type, agreement with transformers, refusals, and the real SmolLM2."""

from __future__ import annotations

import errno
import json
import os
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from refusals import refused
from shoestring.cli.app import run_cli
from shoestring.model import Decoder, gguf_file
from shoestring.model.folder import load_model, read_spec
from shoestring.model.gguf import load_gguf, read_metadata
from shoestring.model.gguf_file import BLOCK_TYPES, open_gguf
from shoestring.model.spec import LinearRope
from shoestring.model.tokenizer import Tokenizer

HF_TO_GGUF = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


@pytest.fixture(scope="module")
def vocabulary() -> dict[str, Any]:
    model = json.loads(Tokenizer.train(["the cat sat on the mat " * 9], 260).backend.to_str())["model"]
    return {
        "tokens": sorted(model["vocab"], key=model["vocab"].get),
        "merges": [" ".join(pair) for pair in model["merges"]],
    }


def tiny_hf(arch: str, *, tied: bool = False, width: int = 64) -> Any:
    import transformers

    torch.manual_seed(0)
    config_class = {
        "llama": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
    }[arch]
    config = config_class(
        vocab_size=260, hidden_size=width, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=width // 4, intermediate_size=2 * width, max_position_embeddings=128, rope_theta=5000.0,
        tie_word_embeddings=tied, initializer_range=0.2,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():  # norms and biases too: their mapping must matter
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def gguf_name(name: str) -> str:
    stem, leaf = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        layer, part = stem.removeprefix("model.layers.").split(".", 1)
        return f"blk.{layer}.{HF_TO_GGUF[part]}.{leaf}"
    return f"{HF_TO_GGUF[stem]}.{leaf}"


def pairs_from_halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of Llama models."""
    split = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return split.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    vocabulary: dict[str, Any],
    model: Any,
    kind: Type = Type.F32,
    *,
    arch: str = "llama",
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    leave_out: str = "",
    raw: dict[str, tuple[np.ndarray, Type]] | None = None,
) -> Path:
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    numbers = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim if arch == "qwen3" else None, "rope.freq_base": 5000.0,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, **(metadata or {}),
    }  # fmt: skip
    for key, value in numbers.items():
        if isinstance(value, str):
            writer.add_string(f"{arch}.{key}", value)
        elif isinstance(value, list):
            writer.add_array(f"{arch}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{arch}.{key}", value)
        elif value is not None:
            writer.add_uint32(f"{arch}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary["tokens"])
    writer.add_token_merges(vocabulary["merges"])
    writer.add_token_types([3] + [1] * (len(vocabulary["tokens"]) - 1))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        target, weight = gguf_name(name), tensor.numpy()
        if arch == "llama" and (".attn_q." in target or ".attn_k." in target):
            heads = config.num_attention_heads if ".attn_q." in target else config.num_key_value_heads
            weight = pairs_from_halves(weight, heads)
        if target == leave_out:
            continue
        if raw and target in raw:
            writer.add_tensor(target, raw[target][0], raw_dtype=raw[target][1])
        elif weight.ndim == 1 or kind == Type.F32:
            writer.add_tensor(target, np.ascontiguousarray(weight))
        else:
            blocks = gguf.quants.quantize(np.ascontiguousarray(weight), kind)
            writer.add_tensor(target, blocks, raw_dtype=kind)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


TOKENS = torch.tensor([[5, 200, 33, 7, 150, 91, 12, 0, 255, 42]])


def our_logits(path: Path) -> Tensor:
    spec, state, _ = load_gguf(path)
    model = Decoder(spec)
    model.load_state_dict(state)
    with torch.no_grad():
        return model(TOKENS)


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1])
def test_logits_like_transformers_reading_the_same_file(tmp_path: Path, vocabulary: dict[str, Any], kind: Type) -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    tied = kind == Type.Q8_0
    model, theirs = tiny_hf("llama", tied=tied), tiny_hf("llama", tied=tied)
    path = write_gguf(tmp_path / "m.gguf", vocabulary, model, kind)
    converted_weights = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=theirs)["tensors"]
    result = theirs.load_state_dict(converted_weights, strict=False)
    assert not result.unexpected_keys
    assert result.missing_keys == ["lm_head.weight"] * tied
    with torch.no_grad():
        original, converted = model(TOKENS).logits, theirs(TOKENS).logits
    ours = our_logits(path)
    assert original.std() > 0.5  # the comparison is not one of zeros
    torch.testing.assert_close(ours, converted, atol=1e-5, rtol=1e-5)
    if kind == Type.F32:
        torch.testing.assert_close(ours, original, atol=1e-5, rtol=1e-5)
    else:
        assert not torch.allclose(ours, original, atol=1e-5)


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_qwen_like_the_original(tmp_path: Path, vocabulary: dict[str, Any], arch: str, tied: bool) -> None:
    model = tiny_hf(arch, tied=tied)
    path = write_gguf(tmp_path / "m.gguf", vocabulary, model, arch=arch)
    with torch.no_grad():
        expected = model(TOKENS).logits
    torch.testing.assert_close(our_logits(path), expected, atol=1e-5, rtol=1e-5)
    spec, _, _ = load_gguf(path)
    assert (spec.model_type, spec.tied, spec.qkv_bias, spec.qk_norm) == (arch, tied, arch == "qwen2", arch == "qwen3")


def test_spec_and_tokenizer(tmp_path: Path, vocabulary: dict[str, Any]) -> None:
    path = write_gguf(tmp_path / "m.gguf", vocabulary, tiny_hf("llama", tied=True), Type.Q8_0)
    spec, state, tokenizer = load_gguf(path)
    assert (spec.vocab_size, spec.d_model, spec.num_layers, spec.head_dim) == (260, 64, 2, 16)
    assert (spec.num_heads, spec.num_kv_heads, spec.d_ff, spec.max_positions) == (4, 2, 128, 128)
    assert (spec.rope_theta, spec.norm_eps, spec.tied) == (5000.0, 1e-6, True)
    assert (spec.bos_id, spec.eos_id) == (0, 0)
    assert all(t.dtype == torch.float32 for t in state.values())
    assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"
    path.unlink()
    assert state["norm.weight"].sum() > 0  # tensors are copies, not views of the file


# --- K-quants against the format's definition, element by element -------------------------------


def test_every_type_that_the_package_decodes(tmp_path: Path, vocabulary: dict[str, Any]) -> None:
    """Random blocks of each type: the same values as the package gives for the same bytes."""
    rng, model, path = np.random.default_rng(0), tiny_hf("llama", width=256), tmp_path / "m.gguf"
    kinds = [Type[name] for name in BLOCK_TYPES]
    raw = {}
    for kind in kinds:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        raw[kind] = rng.integers(0, 32, (512, 256 // block * size), dtype=np.uint8)
        if kind not in (Type.F32, Type.F16, Type.BF16):
            try:
                gguf.quants.dequantize(raw[kind], kind)
            except NotImplementedError:  # pragma: no cover
                pytest.fail(f"{kind.name} is stated as readable")
    others = [k for k in Type if k not in kinds]
    for kind in others:  # the list is complete
        with pytest.raises(NotImplementedError):
            gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    # Six types a file: two layers of three matrices of this shape.
    names = [f"blk.{layer}.ffn_{part}.weight" for layer in (0, 1) for part in ("gate", "up")]
    for i in range(0, len(kinds), len(names)):
        chosen = dict(zip(names, kinds[i : i + len(names)], strict=False))
        write_gguf(path, vocabulary, model, raw={name: (raw[kind], kind) for name, kind in chosen.items()})
        file = open_gguf(path)
        for name, kind in chosen.items():
            tensor = file.tensors[name]
            assert tensor.kind == kind.name
            expected = torch.from_numpy(np.array(gguf.quants.dequantize(raw[kind], kind), dtype=np.float32))
            assert torch.equal(file.rows(tensor).nan_to_num(7.0), expected.nan_to_num(7.0)), kind
            some = file.rows(tensor, slice(100, 103))
            assert torch.equal(some.nan_to_num(7.0), expected[100:103].nan_to_num(7.0))


# --- rotary scaling -------------------------------------------------------------------------------


def llama3_factors(factor: float) -> np.ndarray:
    """One divisor per frequency, from transformers' own Llama-3 frequencies."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, head_dim=64, rope_parameters=scaling, max_position_embeddings=131072
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / 500000.0 ** (torch.arange(0, 64, 2) / 64)
    return (plain / scaled).numpy().astype(np.float32)


def test_llama3_scaling_is_recognised(tmp_path: Path, vocabulary: dict[str, Any]) -> None:
    model = tiny_hf("llama", width=256)

    def load(factors: np.ndarray) -> Any:
        path = write_gguf(
            tmp_path / "m.gguf", vocabulary, model, metadata={"rope.freq_base": 500000.0},
            extra={"rope_freqs.weight": factors},
        )  # fmt: skip
        return load_gguf(path)[0].rope_scaling

    for factor in (8.0, 32.0):
        scaling = load(llama3_factors(factor))
        assert scaling.factor == pytest.approx(factor, rel=1e-5)
        assert (scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_positions) == (1, 4, 8192)
    assert load(np.ones(32, dtype=np.float32)) is None
    for strange in (np.linspace(1, 9, 32, dtype=np.float32), np.full(7, 8, dtype=np.float32)):
        refused("not Llama-3's", load, strange)


def test_a_factor_without_a_type_is_linear(tmp_path: Path, vocabulary: dict[str, Any]) -> None:
    """llama.cpp's default type is "linear"; files from before there were types have `rope.scale_linear`."""
    model = tiny_hf("llama")
    for keys, scaling in (
        ({"rope.scaling.factor": 4.0}, LinearRope(4.0)),
        ({"rope.scale_linear": 4.0}, LinearRope(4.0)),
        ({"rope.scaling.factor": 2.0, "rope.scale_linear": 4.0}, LinearRope(2.0)),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scale_linear": 1.0}, None),
    ):
        path = write_gguf(tmp_path / "m.gguf", vocabulary, model, metadata=keys)
        assert load_gguf(path)[0].rope_scaling == scaling, keys


IDS = {"blk.1.ffn_up.weight": (np.ones((128, 64), np.int32), Type.I32)}

# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metadata": {"block_count": None}}, r"metadata of llama has no 'block_count'"),
        ({"metadata": {"feed_forward_length": [128, 64]}}, "differs per layer"),
        ({"metadata": {"expert_count": 8, "expert_used_count": 2}}, r"lacks \d+ tensors.*mlp\.experts"),
        (
            {"metadata": {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}},
            "no 'rope.scaling.original_context_le",
        ),
        ({"metadata": {"rope.scaling.type": "ntk", "rope.scaling.factor": 4.0}}, "positions by 'ntk'"),
        ({"metadata": {"rope.dimension_count": 8}}, "rotates 8 of 16"),
        ({"metadata": {"block_count": 3}}, "lacks 9 tensors"),
        ({"metadata": {"feed_forward_length": 96}}, r"ffn_\w+\.weight has the shape"),
        ({"leave_out": "blk.1.ffn_up.weight"}, r"lacks 1 tensors.*blocks\.1\.mlp\.up\.weight"),
        ({"leave_out": "token_embd.weight"}, r"no tensor token_embd\.weight"),
        ({"extra": {"blk.0.ssm_a.weight": np.ones(4, np.float32)}}, r"blk\.0\.ssm_a\.weight is not part"),
        ({"extra": {"blk.0.ffn_norm.bias": np.ones(64, np.float32)}}, r"ffn_norm\.bias is not part"),
        ({"extra": {"cls.weight": np.ones(4, np.float32)}}, r"cls\.weight is not part"),
        ({"metadata": {"attention.head_count": 0}}, r"attention\.head_count must be a positive whole number, not 0"),
        ({"metadata": {"attention.head_count": 128}}, r"128 heads.*64.*attention\.key_length"),
        ({"metadata": {"attention.head_count_kv": 0}}, r"head_count_kv must be a positive"),
        ({"metadata": {"attention.head_count": "4"}}, r"head_count must be a positive"),
        ({"metadata": {"block_count": 9999}}, "asks for 9999 layers"),
        ({"metadata": {"embedding_length": 64.0}}, "embedding_length must be a positive whole number"),
        (
            {"metadata": {"attention.layer_norm_rms_epsilon": float("nan")}},
            "epsilon must be a number from 1e-12 to 0.1",
        ),
        ({"metadata": {"attention.layer_norm_rms_epsilon": 0.0}}, "epsilon must be a number"),
        ({"metadata": {"rope.freq_base": -10000.0}}, r"freq_base must be a number from 1 to 1e\+15, not -10000"),
        ({"metadata": {"rope.freq_base": float("inf")}}, r"freq_base must be a number"),
        ({"metadata": {"attention.sliding_window": -5.0}}, "sliding_window must be a whole number"),
        ({"arch": "gemma"}, "'gemma'; supported in GGUF files: llama"),
        ({"arch": "mamba", "raw": IDS}, "architecture 'mamba'"),  # before the types
        ({"raw": IDS}, r"ffn_up\.weight' is stored as I32.*supported: F32.*NVFP4"),
    ],
)
def test_refusals(tmp_path: Path, vocabulary: dict[str, Any], options: dict[str, Any], message: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", vocabulary, tiny_hf("llama"), **options)
    refused(message, load_gguf, path)


def test_the_file_is_read_once_and_only_where_asked(
    tmp_path: Path, vocabulary: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf", vocabulary, tiny_hf("llama"), Type.Q8_0)
    opened, decoded = [], []
    plain_map, plain_rows = gguf_file._mapped, gguf_file.GgufFile.rows
    monkeypatch.setattr(gguf_file, "_mapped", lambda p: opened.append(p) or plain_map(p))
    monkeypatch.setattr(
        gguf_file.GgufFile, "rows", lambda self, t, *index: decoded.append(t.name) or plain_rows(self, t, *index)
    )
    assert run_cli(["inspect", str(path)]) == 0
    assert len(opened) == 1 and decoded == []
    loaded = load_model(path)
    assert len(opened) == 2 and len(decoded) == len(set(decoded)) == len(loaded.model.state_dict())


def test_vocabulary_larger_than_embedding(tmp_path: Path, vocabulary: dict[str, Any]) -> None:
    longer = {**vocabulary, "tokens": [*vocabulary["tokens"], "<x>", "<y>"]}
    path = write_gguf(tmp_path / "m.gguf", longer, tiny_hf("llama"))
    refused("262 tokens but only 260 embedding rows", load_gguf, path)


def test_damaged_files(tmp_path: Path, vocabulary: dict[str, Any]) -> None:
    whole = write_gguf(tmp_path / "m.gguf", vocabulary, tiny_hf("llama")).read_bytes()
    path = tmp_path / "cut.gguf"
    for size in (4, 20, 60, 500, 3000, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:size])
        refused("truncated or damaged", load_gguf, path)
    at = whole.index(b"tokenizer.ggml.token_type") + len("tokenizer.ggml.token_type") + 8
    path.write_bytes(whole[:at] + struct.pack("<Q", 1 << 50) + whole[at + 8 :])  # a list of 10^15 numbers
    refused("truncated or damaged", load_gguf, path)
    path.write_bytes(whole.replace(b"smollm", b"sm\xff\xffm\xff"))  # its kind of vocabulary, which is no text now
    refused("truncated or damaged", load_gguf, path)
    for content in (b"", b"PK\x03\x04 something else"):
        path.write_bytes(content)
        refused("not a GGUF file", load_gguf, path)
    refused("cannot read", load_gguf, tmp_path / "absent.gguf")


def test_tensors_lie_one_behind_the_other(tmp_path: Path, vocabulary: dict[str, Any]) -> None:
    whole = write_gguf(tmp_path / "m.gguf", vocabulary, tiny_hf("llama")).read_bytes()
    name = b"blk.1.attn_norm.weight"
    at = whole.index(name) + len(name) + 4 + 8 + 4  # behind dims and type
    offset = struct.unpack("<Q", whole[at : at + 8])[0]
    path = tmp_path / "moved.gguf"
    for moved in (offset - 32, offset + 32, 0, offset + 4):  # over its neighbours, over a gap, not aligned
        path.write_bytes(whole[:at] + struct.pack("<Q", moved) + whole[at + 8 :])
        refused(r"is damaged: tensor .* begins at byte", load_gguf, path)
    assert run_cli(["inspect", str(path)]) == 2
    os.mkfifo(tmp_path / "pipe.gguf")
    refused("a pipe", load_gguf, tmp_path / "pipe.gguf")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokens", [1, 2]), ("tokens", "abc"), ("merges", [["a", "b"]]), ("scores", [float("nan")]),
        ("token_type", ["a"]), ("bos_token_id", -1), ("eos_token_id", "0"), ("unknown_token_id", 99),
        ("add_bos_token", 3), ("tokens", ["x" * 5000, "y"]),
    ],
)  # fmt: skip
def test_vocabularies_of_the_wrong_type(key: str, value: Any) -> None:
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "a"],
        "tokenizer.ggml.scores": [0.0, -1.0],
        "tokenizer.ggml.token_type": [2, 1],
    }
    assert Tokenizer.from_gguf(fields).vocab_size == 2
    refused(
        f"tokenizer.ggml.{key}|the GGUF vocabulary", Tokenizer.from_gguf, {**fields, f"tokenizer.ggml.{key}": value}
    )


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))], ids=str)
@pytest.mark.parametrize("call", ["mmap.mmap", "shoestring.model.gguf_file.GgufFile._parse"])
def test_no_memory_is_not_a_damaged_file(
    tmp_path, vocabulary, monkeypatch, capsys, error: Exception, call: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", vocabulary, tiny_hf("llama"))

    def full(*args: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(call, full)
    assert run_cli(["inspect", str(path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: out of host memory") and told.count("\n") == 1, told


def test_other_errors_of_the_reader_keep_their_traceback(
    tmp_path: Path, vocabulary: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf", vocabulary, tiny_hf("llama"))

    def broken(*args: Any, **options: Any) -> None:
        raise AttributeError("no such thing in this version of gguf")

    with monkeypatch.context() as patch:
        patch.setattr(gguf_file.GgufFile, "_parse", broken)
        with pytest.raises(AttributeError):
            load_gguf(path)

    def unreadable(*args: Any, **options: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("mmap.mmap", unreadable)
    refused(r"cannot read .*m\.gguf", load_gguf, path)


# --- the real model -------------------------------------------------------------------------------


def test_smollm2(smollm2_file: Path) -> None:
    """What its header says; its perplexity, which all of its tensors decide, is in tests/evals/test_smollm2.py."""
    spec, _ = read_spec(smollm2_file)
    assert (spec.d_model, spec.num_layers, spec.num_heads, spec.num_kv_heads) == (576, 30, 9, 3)
    assert (spec.d_ff, spec.vocab_size, spec.rope_theta, spec.tied) == (1536, 49152, 100000.0, True)
    assert read_metadata(smollm2_file)["general.architecture"] == "llama"
