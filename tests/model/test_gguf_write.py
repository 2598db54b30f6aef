"""GGUF out: every architecture read back and by transformers, exact grids, vocabularies, refusals."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import quants
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from torch import Tensor

from refusals import refused
from shoestring.cli.app import run_cli
from shoestring.evals.model_row import size_of, stored_format
from shoestring.formats import convert, pack, parse_format
from shoestring.model import Decoder, load_model, save_model
from shoestring.model.export import export_model
from shoestring.model.export_names import KINDS, LLAMA_TYPES
from shoestring.model.gguf_blocks import encode_blocks, encode_grid
from shoestring.model.gguf_file import open_gguf
from shoestring.model.gguf_vocabulary import HARD_TO_CUT, vocabulary_metadata
from shoestring.model.gguf_write import least_bits, save_gguf
from shoestring.model.hf import spec_from_hf
from shoestring.model.spec import LinearRope, Llama3Rope, LongRope, ModelSpec, YarnRope
from shoestring.model.tokenizer import Tokenizer
from shoestring.model.vocabulary import set_byte_level
from shoestring.shrink.whole_model import EMBED
from tiny import CAT_TEXT, LLAMA, chat_tokenizer, random_model, tiny_tokenizer

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 5e5, "tie_word_embeddings": False}, "mistral": {"head_dim": 32, "sliding_window": 8},
    "qwen2": {"rms_norm_eps": 1e-5}, "qwen3": {"head_dim": 32}, "smollm3": {"num_hidden_layers": 4},
    "gemma2": {"head_dim": 32, "sliding_window": 6, "query_pre_attn_scalar": 32},
    "gemma3_text": {"num_hidden_layers": 7, "head_dim": 32, "sliding_window": 6, "query_pre_attn_scalar": 32},
    "phi3": {"partial_rotary_factor": 0.5, "tie_word_embeddings": False, "pad_token_id": 0}, "olmo2": {},
    "gpt_neox": {"num_key_value_heads": None}, "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {**MOE, "head_dim": 32, "norm_topk_prob": True},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "num_key_value_heads": None},
}  # fmt: skip
# transformers reads GGUF files of these itself: what was written is compared with somebody else's understanding.
READ_BY_TRANSFORMERS = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "qwen3_moe", "gpt2")
IDS = torch.randint(1, 300, (2, 20), generator=torch.Generator().manual_seed(1))


def config_of(family: str) -> Any:
    fields = {k: v for k, v in {**SMALL, **FAMILIES[family]}.items() if v is not None}
    return transformers.AutoConfig.for_model(family, **copy.deepcopy(fields))


def family_model(family: str) -> Decoder:
    return random_model(spec_from_hf(config_of(family).to_dict())).eval()


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        out = model(IDS)
    return out if isinstance(out, Tensor) else out.logits


def packed_model(spec: ModelSpec, format: str) -> Decoder:
    model = random_model(spec).eval()
    convert(model, [("*", parse_format(format))])
    pack(model)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_is_the_same_model(family: str, tmp_path: Path) -> None:
    model, path = family_model(family), tmp_path / "m.gguf"
    written = save_gguf(path, model, tiny_tokenizer(), kind="F32")
    assert all(t.exact for t in written)
    read = load_model(path)
    assert read.tokenizer is not None and read.tokenizer.encode(CAT_TEXT) == tiny_tokenizer().encode(CAT_TEXT)
    same = {"tied": model.spec.tied, "bos_id": model.spec.bos_id, "eos_id": model.spec.eos_id}
    assert replace(read.spec, **same, extra_eos_ids=()) == replace(model.spec, extra_eos_ids=())
    want = logits_of(model)
    torch.testing.assert_close(logits_of(read.model), want, atol=1e-5, rtol=1e-5)
    assert want.std() > 0.1


@pytest.mark.parametrize("family", READ_BY_TRANSFORMERS)
def test_transformers_reads_the_same_model(family: str, tmp_path: Path) -> None:
    model = family_model(family)
    save_gguf(tmp_path / "m.gguf", model, tiny_tokenizer(), kind="F32")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    file = str(tmp_path / "m.gguf")
    # Its reader passes over some metadata (the width of heads, the size of experts), hence our config.
    theirs = transformers.AutoModelForCausalLM.from_config(config_of(family), attn_implementation="eager").float()
    weights = load_gguf_checkpoint(file, return_tensors=True, model_to_load=theirs)["tensors"]
    result = theirs.load_state_dict(weights, strict=False)
    assert not result.unexpected_keys and result.missing_keys in ([], ["lm_head.weight"])
    torch.testing.assert_close(logits_of(theirs.eval()), logits_of(model), atol=2e-4, rtol=2e-5)


@pytest.mark.parametrize(
    ("format", "kind"),
    [
        ("int4:sym:g32", "Q4_0"), ("int4:sym:g64", "Q4_0"), ("int4:g32", "Q5_0"), ("int3:g32", "Q4_0"),
        ("int2:g64", "Q4_0"), ("int8:sym:g32", "Q8_0"), ("int8:sym:g0", "Q8_0"),
    ],
)  # fmt: skip
def test_grids_that_are_llama_cpps_are_written_exactly(format: str, kind: str, tmp_path: Path) -> None:
    model = packed_model(
        replace(LLAMA, d_model=64, d_ff=96 if "64" not in format else 128, num_heads=4, head_dim=16), format
    )
    written = save_gguf(tmp_path / "m.gguf", model, tiny_tokenizer())
    matrices = [t for t in written if t.name.startswith("blk.") and "norm" not in t.name]
    assert {t.kind for t in matrices} == {kind} and all(t.exact for t in written)
    read = load_model(tmp_path / "m.gguf")
    assert torch.equal(logits_of(read.model), logits_of(model))
    per_weight = {"Q4_0": 4.5, "Q5_0": 5.5, "Q8_0": 8.5}[kind]
    size = (tmp_path / "m.gguf").stat().st_size
    assert size_of(read) == {"megabytes": round(size / 1e6, 3), "bits_per_weight": per_weight}
    assert stored_format(read) == kind


def test_a_packed_embedding_keeps_its_codes(tmp_path: Path) -> None:
    model = random_model(replace(LLAMA, d_model=64, d_ff=96, head_dim=16)).eval()
    convert(model, [("embed", parse_format("int4:sym:g32")), ("*", parse_format("int3:g32"))])
    pack(model)
    save_model(tmp_path / "p", model, tiny_tokenizer())
    exported = export_model(tmp_path / "p", tmp_path / "m.gguf")
    assert {t.kind for t in exported.tensors} == {"Q4_0", "F32"} and all(t.exact for t in exported.tensors)
    assert torch.equal(logits_of(load_model(tmp_path / "m.gguf").model), logits_of(model))


@pytest.mark.parametrize(("embed", "auto", "note"), [(EMBED, "Q8_0", None), ("int8:g0", "F32", "no smaller type")])
def test_an_embedding_of_8_bits_is_never_rounded_to_4(embed: str, auto: str, note: str | None, tmp_path: Path) -> None:
    """`EMBED`, the default of the recipes, is exact; what no type but F32 holds is said."""
    model = random_model(replace(LLAMA, d_model=64, d_ff=96, head_dim=16)).eval()
    convert(model, [("embed", parse_format(embed)), ("*", parse_format("int4:g32"))])
    pack(model)
    save_model(tmp_path / "p", model, tiny_tokenizer())
    exported = export_model(tmp_path / "p", tmp_path / "m.gguf")
    kinds = {t.name: t.kind for t in exported.tensors}
    assert kinds["token_embd.weight"] == auto and kinds["blk.0.ffn_up.weight"] == "Q5_0"
    assert all(t.exact for t in exported.tensors)
    assert note is None if exported.note is None else note is not None and note in exported.note
    small = {t.name: t for t in export_model(tmp_path / "p", tmp_path / "s.gguf", kind="Q4_1").tensors}
    assert small["token_embd.weight"].kind == "Q8_0" and small["blk.0.ffn_up.weight"].kind == "Q4_1"
    assert small["token_embd.weight"].exact is (embed == EMBED) and small["token_embd.weight"].relative_error < 0.01


def test_codes_are_kept_where_only_the_offset_is_rounded(tmp_path: Path) -> None:
    weight = torch.randn(16, 64)
    format = parse_format("int4:g32")
    state = {name: aux.tensor for name, aux in format.state(weight).items()}
    parts = format.encode(weight, state)
    values = format.decode(parts, torch.float32)
    kept, again = encode_grid(format, parts, values, "Q4_1"), encode_blocks(values, "Q4_1")
    assert kept is not None and not kept.exact
    assert kept.error < 0.25 * again.error and (kept.error / kept.norm) ** 0.5 < 1e-3
    assert encode_grid(format, parts, values, "Q4_0") is None  # codes minus zero points go from -15 to 15
    assert encode_grid(parse_format("int4:g8"), parts, values, "Q5_0") is None  # groups inside a block


@pytest.mark.parametrize("kind", KINDS)
def test_rounded_weights_are_those_of_the_package(kind: str, tmp_path: Path) -> None:
    model = random_model(replace(LLAMA, d_model=64, d_ff=96, head_dim=16)).eval()
    written = {t.name: t for t in save_gguf(tmp_path / "m.gguf", model, tiny_tokenizer(), kind=kind.lower())}
    file = open_gguf(tmp_path / "m.gguf")
    up = file.tensors["blk.1.ffn_up.weight"]
    want = model.blocks[1].mlp.up.weight.detach()
    raw = quants.quantize(want.numpy(), Type[kind])
    assert up.kind == kind
    assert np.array_equal(file.rows(up).numpy(), quants.dequantize(raw, Type[kind]))
    error = float((file.rows(up) - want).norm() / want.norm())
    assert written[up.name].relative_error == pytest.approx(error, rel=1e-4, abs=1e-12)
    assert file.tensors["token_embd.weight"].kind == (kind if kind in ("F16", "BF16", "F32") else "Q8_0")
    assert file.tensors["blk.0.attn_norm.weight"].kind == "F32"


def test_a_file_is_written_back_as_it_was(tmp_path: Path) -> None:
    """`auto` finds the types that a file had."""
    model = random_model(replace(LLAMA, d_model=64, d_ff=96, head_dim=16)).eval()
    save_gguf(tmp_path / "a.gguf", model, chat_tokenizer(), kind="Q4_1")
    exported = export_model(tmp_path / "a.gguf", tmp_path / "b.gguf")
    assert all(t.exact for t in exported.tensors)
    a, b = (open_gguf(tmp_path / f"{x}.gguf") for x in "ab")
    assert {n: t.kind for n, t in a.tensors.items()} == {n: t.kind for n, t in b.tensors.items()}
    assert all(torch.equal(a.rows(t), b.rows(b.tensors[n])) for n, t in a.tensors.items())
    assert a.metadata()["tokenizer.chat_template"] == b.metadata()["tokenizer.chat_template"]


def test_a_part_that_numpy_wrote_replaces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, path = random_model(LLAMA), tmp_path / "model.gguf"
    path.write_bytes(b"before")

    def cut_short(*_: object) -> None:
        raise OSError("512 requested and 7 written")  # numpy's, without an errno

    monkeypatch.setattr("shoestring.model.gguf_write._write", cut_short)
    refused(
        r"512 requested and 7 written, perhaps because the disk is full.*free some", save_gguf, path, model,
        tiny_tokenizer(), kind="F32",
    )  # fmt: skip
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]


def test_rows_that_are_no_blocks_stay_in_16_bits(tmp_path: Path) -> None:
    written = save_gguf(tmp_path / "m.gguf", random_model(replace(LLAMA, d_ff=40)), tiny_tokenizer(), kind="Q8_0")
    kinds = {t.name: t.kind for t in written}
    assert kinds["blk.0.ffn_down.weight"] == "F16" and kinds["blk.0.ffn_up.weight"] == "Q8_0"


ROPE = {
    "linear": (LLAMA, LinearRope(2.0)),
    "yarn": (LLAMA, YarnRope(4.0, 32, 1.1386294)),
    "yarn of another magnitude": (LLAMA, YarnRope(4.0, 32, 1.5, 16.0, 2.0)),
    "llama3": (replace(LLAMA, rope_theta=5e5), Llama3Rope(8.0, 1.0, 4.0, 8192)),
    "longrope": (
        replace(LLAMA, model_type="phi3", tied=False, max_positions=2048),
        LongRope((1.0, 1.5, 2.0, 2.5), (3.0, 3.5, 4.0, 4.5), 512, 1.19),
    ),
}


@pytest.mark.parametrize("kind", ROPE)
def test_rotary_scaling_comes_back(kind: str, tmp_path: Path) -> None:
    spec, scaling = ROPE[kind]
    model = random_model(replace(spec, rope_scaling=scaling)).eval()
    save_gguf(tmp_path / "m.gguf", model, tiny_tokenizer(), kind="F32")
    read = load_model(tmp_path / "m.gguf")
    assert type(read.spec.rope_scaling) is type(scaling)
    torch.testing.assert_close(logits_of(read.model), logits_of(model), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": Llama3Rope(8.0, 1.0, 4.0, 4096)}, "not Llama-3's"),
        ({"rope_scaling": YarnRope(4.0, 32, 1.1386294, truncate=False)}, "rope_scaling"),
        ({"act": "geglu"}, "act='swiglu', this one has 'geglu'"),
        ({"model_type": "qwen2", "sliding_window": 8}, "sliding_window=None, this one has 8"),
        ({"model_type": "smollm3", "no_rope_layers": (0,)}, r"no_rope_layers=\(\)"),
        ({"model_type": "gemma3_text"}, "norm"),
    ],
)
def test_what_llama_cpp_does_not_compute_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    refused(message, save_gguf, tmp_path / "m.gguf", random_model(replace(LLAMA, **changes)), tiny_tokenizer())
    assert list(tmp_path.iterdir()) == []


# --- vocabularies ---------------------------------------------------------------------------------


def trained(model: Any, trainer: Any, **parts: Any) -> Tokenizer:
    backend = Backend(model)
    for name, part in parts.items():
        setattr(backend, name, part)
    backend.train_from_iterator([CAT_TEXT * 20, *HARD_TO_CUT], trainer)
    return Tokenizer(backend, special={"eos_token": "</s>", "unk_token": "<unk>"})


def sentencepiece(prefix: bool) -> Tokenizer:
    spaces = normalizers.Replace(" ", "▁")
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    tokenizer = trained(
        models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True),
        trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False),
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), spaces] if prefix else [spaces]),
    )
    stored = json.loads(tokenizer.backend.to_str())
    stored["added_tokens"] = stored["added_tokens"][:3]
    return Tokenizer(
        Backend.from_str(json.dumps(stored)), special={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    )


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_by_scores(prefix: bool) -> None:
    tokenizer = sentencepiece(prefix)
    metadata = vocabulary_metadata(tokenizer, tokenizer.vocab_size + 3)
    assert (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.add_space_prefix"]) == ("llama", prefix)
    assert metadata["tokenizer.ggml.tokens"][-1].startswith("[PAD")
    assert metadata["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6] and metadata["tokenizer.ggml.token_type"][-1] == 5
    read = Tokenizer.from_gguf(metadata)
    for text in (CAT_TEXT, "the cat  sat\n\non 12 mats", "日本 😀"):
        assert read.encode(text) == tokenizer.encode(text)
        assert read.decode(read.encode(text)) == text


def test_byte_level_names_and_special_tokens() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.backend.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    tokenizer = Tokenizer(tokenizer.backend, special=tokenizer.special, chat_template=tokenizer.chat_template)
    metadata = vocabulary_metadata(tokenizer, tokenizer.vocab_size)
    assert metadata["tokenizer.ggml.pre"] == "smollm"
    read = Tokenizer.from_gguf(metadata)
    assert (read.bos_id, read.eos_id, read.eos_ids) == (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eos_ids)
    assert len(read.eos_ids) == 2 and read.chat_template == tokenizer.chat_template
    for pattern, ignore, name in (("llama3", True, "llama-bpe"), ("llama3", False, "dbrx"), ("qwen2", False, "qwen2")):
        stored = json.loads(tokenizer.backend.to_str())
        stored["model"]["ignore_merges"] = ignore
        backend = Backend.from_str(json.dumps(stored))
        set_byte_level(backend, pattern)
        other = Tokenizer(backend, special=tokenizer.special, add_bos=name == "llama-bpe")
        assert vocabulary_metadata(other, other.vocab_size)["tokenizer.ggml.pre"] == name


def test_vocabularies_that_llama_cpp_cannot_read_are_refused() -> None:
    unigram = trained(
        models.Unigram(),  # type: ignore[call-arg]
        trainers.UnigramTrainer(
            vocab_size=200, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
        ),
    )
    refused(r"kind Unigram.*--as dense", vocabulary_metadata, unigram, unigram.vocab_size)
    words = tiny_tokenizer()
    words.backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), words.backend.pre_tokenizer])
    refused(r"no name in llama\.cpp", vocabulary_metadata, words, words.vocab_size)
    lower = tiny_tokenizer()
    lower.backend.normalizer = normalizers.Lowercase()
    refused(r"no name in llama\.cpp", vocabulary_metadata, lower, lower.vocab_size)
    ends = tiny_tokenizer()
    ends.backend.post_processor = processors.TemplateProcessing(
        single=["$A", "<|endoftext|>"], special_tokens=[("<|endoftext|>", 0)]
    )
    refused(r"cuts .* otherwise", vocabulary_metadata, Tokenizer(ends.backend, special=ends.special), 300)


# --- the command ----------------------------------------------------------------------------------


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(tmp_path / "m", random_model(replace(LLAMA, d_model=64, head_dim=16, d_ff=96)), chat_tokenizer())
    out = tmp_path / "m.gguf"
    assert run_cli(["export", str(tmp_path / "m"), str(out), "--type", "q8_0"]) == 0
    told = capsys.readouterr().out
    assert "llama.cpp" in told and "Q8_0" in told and "relative error" in told
    assert load_model(out).tokenizer.chat_template == chat_tokenizer().chat_template
    before = out.read_bytes()
    for arguments, said in (
        ([str(out), "--type", "q8_0"], "exists"),
        ([str(tmp_path / "o.gguf"), "--type", "q9"], "cannot be written: use auto, MXFP4"),
        ([str(tmp_path / "o"), "--as", "gguf"], "called OUT.gguf"),
        ([str(tmp_path / "o.gguf"), "--as", "dense"], "a folder is not"),
        ([str(tmp_path / "o"), "--type", "q8_0"], "is for GGUF files"),
        ([str(tmp_path / "o.gguf"), "--dtype", "bf16"], "--dtype is for folders"),
    ):
        assert run_cli(["export", str(tmp_path / "m"), *arguments]) == 2
        told = capsys.readouterr().err
        assert said in told and told.count("\n") == 1, told
    assert out.read_bytes() == before and sorted(p.name for p in tmp_path.iterdir()) == ["m", "m.gguf"]
    save_model(tmp_path / "mute", random_model(LLAMA))
    assert run_cli(["export", str(tmp_path / "mute"), str(tmp_path / "o.gguf")]) == 2
    assert "no tokenizer" in capsys.readouterr().err


def test_k_types_need_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llama_cpp", None)
    refused(
        "pip install llama-cpp-python", export_model, tmp_path / "absent", tmp_path / "m.gguf",
        kind=next(iter(LLAMA_TYPES)),
    )  # fmt: skip


def test_the_least_bits_of_a_type_are_in_its_name() -> None:
    assert [least_bits(kind) for kind in ("auto", "Q8_0", "Q4_K_M", "IQ3_XS")] == [4.25, 8.5, 36.0, 35.0]
