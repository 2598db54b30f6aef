"""Parity with `transformers` on tiny random models; config.json and names both ways; refused configs."""

from __future__ import annotations

import copy
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from refusals import refused
from shoestring.errors import UserError
from shoestring.model.hf import spec_from_hf, spec_to_hf
from shoestring.model.spec import Llama3Rope, ModelSpec
from shoestring.model.transformer import Decoder
from tiny import from_hf_names, to_hf_names

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
GPT2 = {
    "vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 500.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.5, 2.0, 4.0, 6.0]}
ORIGINAL = {"original_max_position_embeddings": 32}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SMALL},
    "llama-tied-mha": {"model_type": "llama", **SMALL, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "llama-bias": {"model_type": "llama", **SMALL, "attention_bias": True, "mlp_bias": True},
    "llama-head-dim": {"model_type": "llama", **SMALL, "head_dim": 16, "rms_norm_eps": 1e-5},
    "llama3-old": {"model_type": "llama", **SMALL, "rope_theta": 500.0, "rope_scaling": LLAMA3},
    "llama3-new": {"model_type": "llama", **SMALL, "rope_parameters": {**LLAMA3, "rope_theta": 500.0}},
    "llama-geglu": {"model_type": "llama", **SMALL, "hidden_act": "gelu"},
    "qwen3-geglu": {"model_type": "qwen3", **SMALL, "head_dim": 8, "hidden_act": "gelu_pytorch_tanh"},
    "mistral": {"model_type": "mistral", **SMALL, "sliding_window": 5, "head_dim": 6},
    "mistral-full": {"model_type": "mistral", **SMALL, "sliding_window": None},
    "qwen2": {"model_type": "qwen2", **SMALL, "tie_word_embeddings": True},
    "qwen2-window": {
        "model_type": "qwen2", **SMALL, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", **SMALL, "head_dim": 12, "attention_bias": True},
    "qwen3-window": {
        "model_type": "qwen3", **SMALL, "head_dim": 16, "use_sliding_window": True, "sliding_window": 6,
        "layer_types": ["full_attention", "full_attention", "sliding_attention"],
    },
    "gpt2": {"model_type": "gpt2", **GPT2},
    "gpt2-untied": {
        "model_type": "gpt2", **GPT2, "tie_word_embeddings": False, "n_inner": 40, "activation_function": "gelu",
    },
    "llama-linear": {"model_type": "llama", **SMALL, "rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "llama-dynamic": {"model_type": "llama", **SMALL, "rope_scaling": {"type": "dynamic", "factor": 3.0}},
    "qwen3-yarn": {"model_type": "qwen3", **SMALL, "head_dim": 16, "rope_parameters": YARN},
    "gemma2": {"model_type": "gemma2", **SMALL, "head_dim": 12, "sliding_window": 5, "query_pre_attn_scalar": 20},
    "gemma2-caps": {
        "model_type": "gemma2", **SMALL, "head_dim": 12, "attn_logit_softcapping": 0.7,
        "final_logit_softcapping": 1.1,
    },
    "gemma3": {"model_type": "gemma3_text", **SMALL, "num_hidden_layers": 7, "head_dim": 12, "sliding_window": 5},
    "gemma3-scaled": {
        "model_type": "gemma3_text",
        **SMALL,
        "head_dim": 16,
        "sliding_window": 4,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 900.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
        },
    },
    "phi3": {"model_type": "phi3", **SMALL, "sliding_window": 7},
    "phi3-longrope": {"model_type": "phi3", **SMALL, **ORIGINAL, "rope_scaling": LONGROPE},
    "phi3-long": {"model_type": "phi3", **SMALL, "original_max_position_embeddings": 20, "rope_scaling": LONGROPE},
    "phi3-part": {
        "model_type": "phi3", **SMALL, **ORIGINAL, "partial_rotary_factor": 0.75,
        "rope_scaling": {**LONGROPE, "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.5, 2.0, 4.0]},
    },
    "olmo2": {"model_type": "olmo2", **SMALL},
    "smollm3": {"model_type": "smollm3", **SMALL, "num_hidden_layers": 5, "rope_theta": 500.0},
    "smollm3-flags": {"model_type": "smollm3", **SMALL, "no_rope_layers": [0, 1, 0], "tie_word_embeddings": False},
    "gpt-neox": {"model_type": "gpt_neox", **SMALL, "rotary_pct": 0.5},
    "gpt-neox-serial": {"model_type": "gpt_neox", **SMALL, "use_parallel_residual": False, "attention_bias": False},
    "mixtral": {"model_type": "mixtral", **SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2-moe": {
        "model_type": "qwen2_moe", **SMALL, **MOE, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1],
    },
    "qwen2-moe-window": {
        "model_type": "qwen2_moe", **SMALL, **MOE, "num_hidden_layers": 4, "shared_expert_intermediate_size": 40,
        "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2,
    },
    "qwen3-moe": {"model_type": "qwen3_moe", **SMALL, **MOE, "head_dim": 12, "norm_topk_prob": True},
    "olmoe": {"model_type": "olmoe", **SMALL, "num_experts": 4, "num_experts_per_tok": 3},
}  # fmt: skip
for neox in ("gpt-neox", "gpt-neox-serial"):
    del CONFIGS[neox]["num_key_value_heads"]


def reference(config: dict[str, Any]) -> Any:
    """A `transformers` model with random weights everywhere, norms and biases included."""
    fields = {k: v for k, v in copy.deepcopy(config).items() if k != "model_type"}
    fields.setdefault("pad_token_id", 0)  # some families' default lies outside of this vocabulary
    torch.manual_seed(0)
    hf_config = transformers.AutoConfig.for_model(config["model_type"], **fields)
    # Eager: with torch's fused attention `transformers` leaves Gemma 2's cap of the scores out.
    model = transformers.AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model


def stored(model: Any) -> dict[str, torch.Tensor]:
    """The tensors of a folder that `transformers` writes: names of experts and of heads differ in memory."""
    if not (hasattr(model.config, "num_experts_per_tok") or model.config.model_type == "gpt_neox"):
        return model.state_dict()
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(f"{folder}/model.safetensors")


def ours(model: Any, config: dict[str, Any]) -> Decoder:
    spec = spec_from_hf(config)
    decoder = Decoder(spec)
    decoder.load_state_dict(from_hf_names(spec, stored(model)))
    return decoder.eval()


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(0, 97, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers_and_names_go_both_ways(name: str, tokens: torch.Tensor) -> None:
    config = CONFIGS[name]
    model = reference(config)
    decoder = ours(model, config)
    spec = decoder.spec
    with torch.no_grad():
        want = model(tokens).logits
        got = decoder(tokens)
    assert want.std() > 0.1  # the comparison below would be empty for a model that says nothing
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)

    assert spec.num_params() == sum(p.numel() for p in decoder.parameters())
    assert spec.num_params() == sum(p.numel() for p in model.parameters())

    back = to_hf_names(spec, decoder.state_dict())
    theirs = stored(model)
    for key, tensor in back.items():
        assert torch.equal(tensor, theirs[key]), key
    assert set(theirs) - set(back) <= {"lm_head.weight"} if spec.tied else set(theirs) == set(back)

    # config.json: what transformers would write, and what we write, both give the same spec.
    assert spec_from_hf(model.config.to_dict()) == spec
    written = spec_to_hf(spec)
    assert spec_from_hf(written) == spec
    again = reference(written)
    again.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, want, atol=1e-6, rtol=1e-6)


MIXED = ["full_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("model_type", "layer_types"),
    [
        ("mistral", MIXED),  # Ministral's file: AutoConfig looks at layer_types, Mistral's own class does not
        ("mistral", ["full_attention"] * 3),
        ("mistral", ["sliding_attention"] * 3),
        ("gemma2", ["full_attention"] * 3),
        ("gemma3_text", ["full_attention"] * 3),
    ],
)
def test_layer_types_of_a_file_decide_as_in_transformers(
    model_type: str, layer_types: list[str], tokens: torch.Tensor, tmp_path: Path
) -> None:
    config = {"model_type": model_type, **SMALL, "head_dim": 8, "sliding_window": 5, "layer_types": layer_types}
    wanted, state = None, None
    for file in (config, spec_to_hf(spec_from_hf(config))):  # one that was given, and the one that is written for it
        (tmp_path / "config.json").write_text(json.dumps(file))
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(tmp_path, pad_token_id=0), attn_implementation="eager"
        ).eval()
        state = state or model.state_dict()
        model.load_state_dict(state)
        with torch.no_grad():
            logits = model(tokens).logits
            wanted = logits if wanted is None else wanted
            torch.testing.assert_close(ours(model, file)(tokens), wanted, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(logits, wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("given", [{}, {"_sliding_window_pattern": 2}, {"sliding_window_pattern": 2}])
def test_the_pattern_of_gemma3_is_the_one_that_transformers_reads(given: dict[str, int], tmp_path: Path) -> None:
    config = {"model_type": "gemma3_text", **SMALL, "num_hidden_layers": 7, "sliding_window": 5, **given}
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path).layer_types
    spec = spec_from_hf(config)
    assert spec.full_layers == tuple(i for i, kind in enumerate(theirs) if kind == "full_attention")


def test_the_windows_and_scalings_above_matter(tokens: torch.Tensor) -> None:
    """Guards the parity test: dropping the feature changes the logits."""
    for name, change in [
        ("mistral", {"sliding_window": None}),
        ("qwen2-window", {"use_sliding_window": False}),
        ("qwen2-window", {"max_window_layers": 0}),
        ("llama3-old", {"rope_scaling": None}),
        ("llama-linear", {"rope_scaling": None}),
        ("qwen3-yarn", {"rope_parameters": {"rope_theta": 500.0}}),
        ("gemma2", {"sliding_window": 64}),
        ("gemma2", {"query_pre_attn_scalar": 12}),
        ("gemma2-caps", {"attn_logit_softcapping": None}),
        ("gemma2-caps", {"final_logit_softcapping": None}),
        ("gemma3", {"rope_local_base_freq": 20.0}),
        ("phi3-longrope", {"rope_scaling": None}),
        ("smollm3", {"no_rope_layers": [1] * 5}),
        ("gpt-neox", {"rotary_pct": 1.0}),
        ("gpt-neox", {"use_parallel_residual": False}),
        ("mixtral", {"num_experts_per_tok": 1}),
        ("qwen3-moe", {"norm_topk_prob": False}),
    ]:
        config = CONFIGS[name]
        model = reference(config)
        with torch.no_grad():
            right, wrong = ours(model, config)(tokens), ours(model, {**config, **change})(tokens)
        assert (right - wrong).abs().max() > 1e-3, name


def test_llama3_scaling_is_written_in_both_spellings() -> None:
    spec = spec_from_hf(CONFIGS["llama3-old"])
    assert spec == spec_from_hf(CONFIGS["llama3-new"])
    assert spec.rope_scaling == Llama3Rope(8.0, 1.0, 4.0, 16)
    written = spec_to_hf(spec)
    assert written["rope_scaling"]["rope_type"] == "llama3"
    assert written["rope_parameters"]["rope_theta"] == written["rope_theta"] == 500.0
    assert spec_from_hf({k: v for k, v in written.items() if k != "rope_scaling"}) == spec
    assert spec_from_hf({k: v for k, v in written.items() if k != "rope_parameters"}) == spec
    refused("disagree", spec_from_hf, {**written, "rope_scaling": {**LLAMA3, "factor": 4.0}})


def test_several_end_tokens_survive() -> None:
    spec = spec_from_hf({**CONFIGS["llama"], "eos_token_id": [2, 7, 9]})
    assert spec.eos_id == 2 and spec.eos_ids == (2, 7, 9)
    assert spec_to_hf(spec)["eos_token_id"] == [2, 7, 9]


def test_names_of_a_bare_checkpoint_and_constants() -> None:
    """openai-community/gpt2 has no 'transformer.' prefix, but its causal masks; old Llamas have inv_freq."""
    model = reference(CONFIGS["gpt2"])
    spec = spec_from_hf(CONFIGS["gpt2"])
    bare = {k.removeprefix("transformer."): v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    bare["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    state = from_hf_names(spec, bare)
    assert set(state) == set(Decoder(spec).state_dict())
    d = spec.d_model
    assert torch.equal(state["blocks.1.attn.v.weight"], bare["h.1.attn.c_attn.weight"][:, 2 * d :].t())

    llama = spec_from_hf(CONFIGS["llama"])
    assert from_hf_names(llama, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}) == {}
    with pytest.raises(AssertionError, match="q_norm"):
        from_hf_names(llama, {"model.layers.0.self_attn.q_norm.scale.weight": torch.ones(4)})


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_packed_names_map_like_weight(name: str) -> None:
    spec = spec_from_hf(CONFIGS[name])
    state = Decoder(spec).state_dict()
    packed = {}
    for key, value in state.items():
        if ".attn.q.weight" in key or ".mlp.up.weight" in key:
            packed[key + "_codes"] = torch.zeros(3, 5, dtype=torch.uint8)
            packed[key + "_scale"] = torch.rand(7)
        else:
            packed[key] = value
    hf = to_hf_names(spec, packed)
    module = "transformer.h.0.attn.q_proj" if name == "gpt2" else "model.layers.0.self_attn.q_proj"
    assert hf[f"{module}.weight_codes"].shape == (3, 5)
    assert not any("c_attn" in key for key in hf)
    back = from_hf_names(spec, hf)
    assert back.keys() == packed.keys()
    assert all(torch.equal(back[k], packed[k]) for k in packed)


@pytest.mark.parametrize(
    ("base", "change", "words"),
    [
        ("llama", {"model_type": "deepseek_v3"}, ["deepseek_v3", "llama, mistral, qwen2, qwen3, smollm3"]),
        ("llama", {"model_type": "lama"}, ["Did you mean 'llama'"]), ("llama", {"model_type": None}, ["model_type"]),
        ("llama", {"hidden_size": None}, ["hidden_size"]), ("llama", {"hidden_size": "32"}, ["hidden_size", "'32'"]),
        ("llama", {"hidden_size": 33}, ["hidden_size=33", "head_dim"]),
        ("llama", {"num_hidden_layers": 0}, ["num_hidden_layers"]),
        ("llama", {"num_hidden_layers": True}, ["num_hidden_layers"]),
        ("llama", {"rms_norm_eps": "small"}, ["rms_norm_eps"]),
        ("llama", {"tie_word_embeddings": "yes"}, ["tie_word_embeddings"]),
        ("llama", {"num_key_value_heads": 3}, ["num_kv_heads=3"]),
        ("llama", {"vocab_size": 1 << 40}, ["vocab_size=1099511627776", "1 to 67,108,864"]),
        ("llama", {"num_hidden_layers": 20_000}, ["num_layers=20000", "1 to 10,000"]),
        ("llama", {"head_dim": 7}, ["head_dim=7"]), ("llama", {"hidden_act": "relu"}, ["hidden_act", "silu", "gelu"]),
        ("llama", {"hidden_act": ["silu"]}, ["hidden_act=['silu']"]),
        ("gpt2", {"activation_function": {}}, ["activation_function={}"]),
        ("llama", {"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, ["ntk", "yarn", "llama3"]),
        ("llama", {"rope_scaling": {"type": "linear", "factor": -2.0}}, ["factor", "-2.0"]),
        ("llama", {"rope_scaling": {"type": "linear"}}, ["factor"]),
        ("qwen3", {"rope_scaling": {**YARN, "beta_fast": "many"}}, ["beta_fast"]),
        ("phi3", {"rope_scaling": {**LONGROPE, "long_factor": [1.0, 2.0]}}, ["[2, 4]", "needs 4"]),
        ("phi3", {"rope_scaling": {**LONGROPE, "short_factor": [1.0, None]}}, ["short_factor"]),
        ("phi3", {"partial_rotary_factor": 1.5}, ["1.5"]), ("gpt-neox", {"rotary_pct": 0.1}, ["0 of head_dim=8"]),
        ("gemma2", {"attn_logit_softcapping": 0.0}, ["attn_logit_softcapping"]),
        ("gemma3", {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ("gemma3", {"rope_parameters": {"full_attention": {}, "sliding_attention": 3}}, ["rope_parameters"]),
        ("smollm3", {"no_rope_layers": [1, 0]}, ["no_rope_layers", "5"]),
        ("mixtral", {"num_experts_per_tok": 9}, ["9 of 4 experts"]),
        ("qwen2-moe", {"mlp_only_layers": "none"}, ["mlp_only_layers"]),
        ("olmoe", {"clip_qkv": 8.0}, ["clip_qkv=8.0"]), ("llama", {"rope_scaling": "llama3"}, ["rope_scaling"]),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, ["low_freq_factor"]),
        ("llama", {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, ["high_freq_factor"]),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
        ("llama", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ("llama", {"layer_types": ["sliding_attention"] * 3}, ["sliding"]),
        ("llama", {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping=50.0"]),
        ("llama", {"num_local_experts": 8}, ["num_local_experts=8"]),
        ("llama", {"quantization_config": {"quant_method": "aqlm"}}, ["aqlm", "unquantized"]),
        ("llama", {"eos_token_id": "</s>"}, ["eos_token_id"]),
        ("mistral", {"num_key_value_heads": None, "sliding_window": "4"}, ["sliding_window"]),
        ("phi3", {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}, ["layer_types"]),
        ("qwen2-window", {"layer_types": ["full_attention"]}, ["layer_types", "3"]),
        ("qwen2-window", {"layer_types": ["chunked_attention"] * 3}, ["chunked_attention"]),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, ["without a sliding window"]),
        ("gpt2", {"activation_function": "relu"}, ["relu", "gelu_new"]),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx"]),
        ("gpt2", {"scale_attn_weights": False}, ["scale_attn_weights"]), ("gpt2", {"n_head": 5}, ["n_head=5"]),
    ],
)  # fmt: skip
def test_what_cannot_be_computed_faithfully_is_refused(base: str, change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        spec_from_hf({**CONFIGS[base], **change})
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_missing_kv_heads_are_guessed_for_llama_only() -> None:
    for name in ("llama", "qwen2"):
        config = {k: v for k, v in CONFIGS[name].items() if k != "num_key_value_heads"}
        if name == "llama":
            assert spec_from_hf(config).num_kv_heads == 4
        else:
            refused("num_key_value_heads", spec_from_hf, config)


def test_a_spec_that_its_model_type_cannot_say_names_one_that_can() -> None:
    spec = ModelSpec(97, 32, 2, 4, 2, 8, 48, 64, qk_norm=True)
    refused(r"qk_norm=True.*qwen3", spec_to_hf, spec)
    refused(r"'llama' model cannot have act='gelu'", spec_to_hf, ModelSpec(97, 32, 2, 4, 2, 8, 48, 64, act="gelu"))
    refused(r"norm='rms'.*no supported model_type", spec_to_hf, replace(spec_from_hf(CONFIGS["gpt2"]), norm="rms"))
    refused("mistral", spec_to_hf, ModelSpec(97, 30, 2, 4, 2, 8, 48, 64))
    refused("no supported model_type", spec_to_hf, ModelSpec(97, 32, 2, 4, 2, 8, 48, 64, qk_norm=True, mlp_bias=True))
