"""Hugging Face config.json, to and from a ModelSpec.

`spec_from_hf` reads a config.json of one of MODEL_TYPES with the defaults that `transformers` gives to a missing
field; `spec_to_hf` writes it back and proves, by reading its own output, that nothing was lost. A field that asks for
arithmetic the decoder does not have (another rotary type, ALiBi, multipliers, ...) is an error, never an approximation.

Left out on purpose: tensor names (hf_names.py), files (folder.py), GGUF (gguf.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

from shoestring.errors import UserError, shown, suggest
from shoestring.json_files import REQUIRED, Fields, read_object
from shoestring.model.spec import (
    DynamicRope,
    Experts,
    LinearRope,
    Llama3Rope,
    LongRope,
    ModelSpec,
    RopeScaling,
    YarnRope,
)

_ARCHITECTURE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
MODEL_TYPES = tuple(_ARCHITECTURE)
# Sizes that a config.json must have: our name, Hugging Face's.
_SIZES = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_positions": "max_position_embeddings",
}
_GPT2_SIZES = {
    "vocab_size": "vocab_size",
    "d_model": "n_embd",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "max_positions": "n_positions",
}

# What `transformers` takes for a missing field, where that is not Llama's.
_EPS = {**dict.fromkeys(("phi3", "olmo2", "mixtral", "olmoe"), 1e-5)}
_THETA = {"smollm3": 2_000_000.0, "gemma3_text": 1_000_000.0, "mixtral": 1_000_000.0}
_TIED = ("smollm3", "gemma2", "gemma3_text")
# Its default number of key/value heads is right for few models of these families: the field must be there.
_KV_HEADS_GIVEN = ("mistral", "qwen2", "qwen3", "smollm3", "gemma2", "gemma3_text", "mixtral", "qwen2_moe", "qwen3_moe")
_ATTENTION_BIAS = ("llama", "qwen3", "smollm3", "olmo2", "qwen3_moe", "olmoe", "gemma2", "gemma3_text")
_MLP_BIAS = ("llama", "smollm3")
_GEMMA = ("gemma2", "gemma3_text")
_HEAD_DIM = {"qwen3": 128, "gemma2": 256, "gemma3_text": 256}  # whatever the width
_QK_NORM = {"qwen3": "head", "qwen3_moe": "head", "gemma3_text": "head", "olmo2": "width", "olmoe": "width"}
_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
_WINDOW_EVERYWHERE = ("mixtral", "phi3", "qwen3_moe")  # layer_types is not looked at

# Fields that change the arithmetic, and the values under which they do not. Anything else is refused, but for the
# families that read the field.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "attention_multiplier", "clip_qkv"), (None,)),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"), (None, 1.0)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), (None, 0)),
    **dict.fromkeys(("alibi", "is_encoder_decoder", "add_cross_attention"), (None, False)),
    **dict.fromkeys(("use_bidirectional_attention", "scale_attn_by_inverse_layer_idx"), (None, False)),
    "scale_attn_weights": (None, True),
    "partial_rotary_factor": (None, 1.0),
    "no_rope_layers": (None, []),
}
_READ_BY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), _GEMMA),
    **dict.fromkeys(("num_experts", "num_local_experts"), _EXPERTS),
    "partial_rotary_factor": ("phi3", "gpt_neox"),
    "no_rope_layers": ("smollm3",),
}
_GATES = {
    "silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh", "gelu_new": "geglu_tanh",
}  # fmt: skip
_GATE_NAMES = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_pytorch_tanh"}
_GELU = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}

# What a value may be without making the arithmetic meaningless in fp32.
EPS_RANGE: dict[str, float] = {"least": 1e-12, "most": 0.1}
THETA_RANGE: dict[str, float] = {"least": 1.0, "most": 1e15}
SCALING_RANGE: dict[str, float] = {"least": 1e-6, "most": 1e6}
PART_RANGE: dict[str, float] = {"least": 1e-6, "most": 1.0}
MOST_WINDOW = 2**31 - 1
ORIGINAL = "original_max_position_embeddings"
MOST_TOKEN_ID = 2**31 - 1


# -- config.json -> spec -------------------------------------------------------------------------------------


def token_ids(config: Fields, key: str) -> tuple[int, ...]:
    value = config.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i <= MOST_TOKEN_ID for i in ids):
        raise UserError(f"{config.where}: {key} must be a token id, a list of token ids or null, not {shown(value)}")
    return tuple(ids)


def _end_ids(config: Fields) -> dict[str, Any]:
    bos, eos = token_ids(config, "bos_token_id"), token_ids(config, "eos_token_id")
    return {"bos_id": next(iter(bos), None), "eos_id": next(iter(eos), None), "extra_eos_ids": eos[1:]}


def _refuse_unknown_arithmetic(config: Fields, model_type: str) -> None:
    for key, neutral in _NEUTRAL.items():
        if key in config and config.get(key) not in neutral and model_type not in _READ_BY.get(key, ()):
            raise UserError(
                f"config.json: {key}={shown(config.get(key))} asks for arithmetic the decoder does not have; "
                f"only {' or '.join(repr(n) for n in neutral)} is supported"
            )
    quantized = config.get("quantization_config")
    method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
    if quantized is not None and method not in ("shoestring", "compressed-tensors", "fp8", "gptq", "awq"):
        raise UserError(
            f"config.json: quantization_config says the weights are packed by {shown(method)}, which is not read; "
            "give the folder of the unquantized model (float32, float16 or bfloat16 safetensors)"
        )


def spec_of_folder(folder: Path) -> ModelSpec:
    """The ModelSpec of a folder's config.json; errors name the folder."""
    path = folder / "config.json"
    values = read_object(path)
    try:
        return spec_from_hf(values)
    except UserError as error:
        raise UserError(str(error).replace("config.json", str(path), 1)) from None


def spec_from_hf(values: dict[str, Any]) -> ModelSpec:
    """The ModelSpec of a parsed config.json; UserError where it cannot be computed faithfully."""
    if not isinstance(values, dict):
        raise UserError(f"config.json must hold a JSON object, not {type(values).__name__}")
    config = Fields(values, "config.json")
    model_type = config.get("model_type")
    if model_type is None:
        raise UserError("config.json has no 'model_type'; this is not the folder of a Hugging Face model")
    if model_type not in MODEL_TYPES:
        raise UserError(
            f"config.json: model_type {shown(model_type)} is not supported; supported: "
            f"{', '.join(MODEL_TYPES)} (SmolLM2 is llama).{suggest(str(model_type), list(MODEL_TYPES))}"
        )
    _refuse_unknown_arithmetic(config, model_type)
    if model_type == "gpt2":
        return _from_gpt2(config)
    return _from_neox(config) if model_type == "gpt_neox" else _from_llama_like(config, model_type)


def _from_llama_like(config: Fields, model_type: str) -> ModelSpec:
    sizes = {ours: config.whole(theirs) for ours, theirs in _SIZES.items()}
    num_layers, num_heads = sizes["num_layers"], sizes["num_heads"]
    kv_default = REQUIRED if model_type in _KV_HEADS_GIVEN and "num_key_value_heads" not in config else num_heads
    window, full_layers = _windows(config, model_type, num_layers)
    attention_bias = model_type in _ATTENTION_BIAS and config.flag("attention_bias", False)
    return ModelSpec(
        **sizes,
        **_end_ids(config),
        **_rope(config, model_type),
        num_kv_heads=config.whole("num_key_value_heads", kv_default),
        head_dim=_head_dim(config, model_type, sizes["d_model"], num_heads),
        d_ff=config.whole("intermediate_size"),
        model_type=model_type,
        norm="rms_offset" if model_type in _GEMMA else "rms",
        norm_eps=config.number("rms_norm_eps", _EPS.get(model_type, 1e-6), **EPS_RANGE),
        norm_placement="both" if model_type in _GEMMA else "post" if model_type == "olmo2" else "pre",
        act=_gate(config, model_type),
        no_rope_layers=_no_rope_layers(config, num_layers) if model_type == "smollm3" else (),
        qk_norm=model_type in _QK_NORM,
        qk_norm_over=cast(Literal["head", "width"], _QK_NORM.get(model_type, "head")),
        qkv_bias=attention_bias or model_type == "qwen2" or _qwen2_moe_bias(config, model_type),
        out_bias=attention_bias,
        mlp_bias=model_type in _MLP_BIAS and config.flag("mlp_bias", False),
        tied=config.flag("tie_word_embeddings", model_type in _TIED),
        experts=_experts(config, model_type, num_layers) if model_type in _EXPERTS else None,
        sliding_window=window,
        full_layers=full_layers,
        **(_gemma(config, model_type) if model_type in _GEMMA else {}),
    )


def _gate(config: Fields, model_type: str) -> Literal["swiglu", "geglu", "geglu_tanh"]:
    # Gemma's hidden_act is a leftover of its first release, which `transformers` does not look at.
    key, default = ("hidden_activation", "gelu_pytorch_tanh") if model_type in _GEMMA else ("hidden_act", "silu")
    return cast(Literal["swiglu", "geglu", "geglu_tanh"], _activation(config, key, default, _GATES))


def _activation(config: Fields, key: str, default: str, known: dict[str, str]) -> str:
    act = config.get(key, default)
    if not isinstance(act, str) or act not in known:
        raise UserError(
            f"config.json: {key}={shown(act)} is not supported for {config.get('model_type')}; supported: "
            f"{', '.join(known)}"
        )
    return known[act]


def _gemma(config: Fields, model_type: str) -> dict[str, Any]:
    def cap(key: str, default: float | None) -> float | None:
        if key in config and config.get(key) is None:
            return None
        return None if key not in config and default is None else config.number(key, default, **SCALING_RANGE)

    second = model_type == "gemma2"
    return {
        "attn_scale": config.number("query_pre_attn_scalar", 256, **SCALING_RANGE) ** -0.5,
        "attn_softcap": cap("attn_logit_softcapping", 50.0 if second else None),
        "logit_softcap": cap("final_logit_softcapping", 30.0 if second else None),
        "scaled_embeddings": True,
    }


def _no_rope_layers(config: Fields, num_layers: int) -> tuple[int, ...]:
    """SmolLM3 lists for every layer whether it rotates (1) or not (0); by default every fourth does not."""
    flags = config.get("no_rope_layers")
    if flags is None:
        interval = config.whole("no_rope_layer_interval", 4)
        return tuple(i for i in range(num_layers) if (i + 1) % interval == 0)
    if not isinstance(flags, list) or len(flags) != num_layers or any(f not in (0, 1) for f in flags):
        raise UserError(f"config.json: no_rope_layers must be a list of 0 or 1 for each of the {num_layers} layers")
    return tuple(i for i, rotates in enumerate(flags) if not rotates)


def _qwen2_moe_bias(config: Fields, model_type: str) -> bool:
    return model_type == "qwen2_moe" and config.flag("qkv_bias", True)


def _experts(config: Fields, model_type: str, num_layers: int) -> Experts:
    key = "num_local_experts" if "num_local_experts" in config else "num_experts"
    shared = {"num": config.whole(key), "top_k": config.whole("num_experts_per_tok")}
    if model_type == "mixtral":
        return Experts(**shared, d_ff=config.whole("intermediate_size"))
    renormalize = config.flag("norm_topk_prob", False)
    if model_type == "olmoe":
        return Experts(**shared, d_ff=config.whole("intermediate_size"), renormalize=renormalize)
    dense = config.list("mlp_only_layers", None) or []
    if any(type(i) is not int or i < 0 for i in dense):
        raise UserError(f"config.json: mlp_only_layers must be a list of layer numbers, not {shown(dense)}")
    step = config.whole("decoder_sparse_step", 1)
    return Experts(
        **shared,
        d_ff=config.whole("moe_intermediate_size"),
        renormalize=renormalize,
        shared_d_ff=config.whole("shared_expert_intermediate_size") if model_type == "qwen2_moe" else 0,
        dense_layers=tuple(i for i in range(num_layers) if i in dense or (i + 1) % step),
    )


def _from_neox(config: Fields) -> ModelSpec:
    sizes = {ours: config.whole(theirs) for ours, theirs in _SIZES.items()}
    attention_bias = config.flag("attention_bias", True)
    return ModelSpec(
        **sizes,
        **_end_ids(config),
        **_rope(config, "gpt_neox"),
        num_kv_heads=sizes["num_heads"],
        head_dim=_divide_width(sizes["d_model"], sizes["num_heads"], "hidden_size", "num_attention_heads"),
        d_ff=config.whole("intermediate_size"),
        model_type="gpt_neox",
        norm="layer",
        norm_eps=config.number("layer_norm_eps", 1e-5, **EPS_RANGE),
        parallel_residual=config.flag("use_parallel_residual", True),
        act=cast(Literal["gelu_tanh", "gelu"], _activation(config, "hidden_act", "gelu", _GELU)),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=True,
        tied=config.flag("tie_word_embeddings", False),
    )


def _head_dim(config: Fields, model_type: str, d_model: int, num_heads: int) -> int:
    head_dim = config.whole("head_dim", None)
    if head_dim is not None:
        return head_dim
    if model_type in _HEAD_DIM:
        return _HEAD_DIM[model_type]
    return _divide_width(d_model, num_heads, "hidden_size", "num_attention_heads")


def _divide_width(d_model: int, num_heads: int, width_key: str, heads_key: str) -> int:
    if d_model % num_heads:
        raise UserError(
            f"config.json: {width_key}={d_model} is not a multiple of {heads_key}={num_heads} and there is no head_dim"
        )
    return d_model // num_heads


def _windows(config: Fields, model_type: str, num_layers: int) -> tuple[int | None, tuple[int, ...]]:
    """(sliding window, layers that attend to everything all the same)."""
    window, full = _window_defaults(config, model_type, num_layers)
    kinds = config.get("layer_types")
    if kinds is not None:
        named = _full_layers(kinds, num_layers)
        if model_type in _WINDOW_EVERYWHERE:
            if len(named) not in (0, num_layers):
                raise UserError(f"config.json: layer_types of a {model_type} model must be all the same kind")
        elif model_type not in ("llama", "olmo2", "olmoe"):  # these have no window at all
            full = named
        if len(named) < num_layers and window is None:
            raise UserError(
                f"config.json: layer_types asks for sliding_attention in a {model_type} model without a sliding window"
            )
    if window is None or len(full) == num_layers:
        return None, ()
    return window, full


def _window_defaults(config: Fields, model_type: str, num_layers: int) -> tuple[int | None, tuple[int, ...]]:
    """The same where config.json has no layer_types."""
    if model_type in ("llama", "olmo2", "olmoe"):
        return None, ()
    if model_type == "mistral":
        # Absent means 4096 in `transformers`; null means no window.
        return (config.whole("sliding_window", None, most=MOST_WINDOW) if "sliding_window" in config else 4096), ()
    if model_type in ("mixtral", "phi3"):
        return config.whole("sliding_window", None, most=MOST_WINDOW), ()
    if model_type in _GEMMA:
        # `transformers` writes _sliding_window_pattern beside layer_types and never reads it.
        pattern = 2 if model_type == "gemma2" else config.whole("sliding_window_pattern", 6)
        return config.whole("sliding_window", 4096, most=MOST_WINDOW), tuple(range(pattern - 1, num_layers, pattern))
    if not config.flag("use_sliding_window", False):
        return None, ()
    window = config.whole("sliding_window", None if model_type == "smollm3" else 4096, most=MOST_WINDOW)
    if model_type == "qwen3_moe":
        return window, ()
    if model_type == "smollm3":  # the layers that do not rotate have the window
        windowed = _no_rope_layers(config, num_layers)
        return window, tuple(i for i in range(num_layers) if i not in windowed)
    first = config.whole("max_window_layers", 28, least=0)
    if model_type == "qwen2_moe":  # every other layer before that one has the window, not those behind it
        return window, tuple(i for i in range(num_layers) if i % 2 or i >= first)
    return window, tuple(range(min(first, num_layers)))


def _full_layers(kinds: Any, num_layers: int) -> tuple[int, ...]:
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise UserError(f"config.json: layer_types must be a list with one entry for each of the {num_layers} layers")
    unknown = sorted({str(k) for k in kinds} - {"full_attention", "sliding_attention"})
    if unknown:
        raise UserError(
            f"config.json: layer_types has {shown(unknown[0])}; supported: full_attention, sliding_attention"
        )
    return tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")


# -- rotary positions ----------------------------------------------------------------------------------------


def _rope(config: Fields, model_type: str) -> dict[str, Any]:
    """The spec's rotary fields. Both spellings: rope_theta + rope_scaling (transformers 4) and rope_parameters
    (transformers 5), which Gemma 3 has by layer type."""
    given = {key: config.get(key) for key in ("rope_scaling", "rope_parameters")}
    for key, value in given.items():
        if value is not None and not isinstance(value, dict):
            raise UserError(f"config.json: {key} must be an object or null, not {shown(value)}")
    theta = config.number(_THETA_KEY.get(model_type, "rope_theta"), _THETA.get(model_type, 10000.0), **THETA_RANGE)
    part = config.number(_PART_KEY[model_type], _PART[model_type], **PART_RANGE) if model_type in _PART else 1.0
    base = {"rope_theta": theta, "rotary_fraction": part}
    by_layer = given["rope_parameters"] or {}
    if model_type == "gemma3_text":
        base["window_rope_theta"] = config.number("rope_local_base_freq", 10000.0, **THETA_RANGE)
        if "full_attention" in by_layer:
            return _rope_by_layer(base, Fields(by_layer, "config.json, rope_parameters"), config)
    found = [_rope_fields(base, Fields(rope, f"config.json, {key}"), config) for key, rope in given.items() if rope]
    if len(found) == 2 and found[0] != found[1]:
        raise UserError(
            "config.json: rope_scaling and rope_parameters disagree; keep the one the model was trained with"
        )
    return found[0] if found else {**base, "rope_scaling": None}


_THETA_KEY = {"gpt_neox": "rotary_emb_base"}
_PART = {"phi3": 1.0, "gpt_neox": 0.25}  # of a head that is rotated
_PART_KEY = {"phi3": "partial_rotary_factor", "gpt_neox": "rotary_pct"}


def _rope_by_layer(base: dict[str, Any], by_layer: Fields, config: Fields) -> dict[str, Any]:
    whole, windowed = (
        _rope_fields(base, Fields(by_layer.object(kind), f"{by_layer.where}.{kind}"), config)
        for kind in ("full_attention", "sliding_attention")
    )
    if windowed["rope_scaling"] is not None:
        raise UserError(f"{by_layer.where}.sliding_attention is scaled; only full_attention may be")
    return {**whole, "window_rope_theta": windowed["rope_theta"]}


def _rope_fields(base: dict[str, Any], rope: Fields, config: Fields) -> dict[str, Any]:
    if any(isinstance(v, dict) for v in rope.values.values()):
        raise UserError(f"{rope.where} differs by layer type, which this model_type does not have")
    fraction = rope.number("partial_rotary_factor", base["rotary_fraction"], **PART_RANGE)
    if fraction != 1.0 and config.get("model_type") not in _PART:
        raise UserError(f"{rope.where}: partial_rotary_factor={fraction!r} is not supported here; only 1.0 is")
    return {
        **base,
        "rope_theta": rope.number("rope_theta", base["rope_theta"], **THETA_RANGE),
        "rotary_fraction": fraction,
        "rope_scaling": _rope_scaling(rope, config),
    }


def _rope_scaling(rope: Fields, config: Fields) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if config.get("model_type") == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"  # what its first releases called it
    if not isinstance(kind, str) or kind not in _ROPE_KINDS:
        raise UserError(f"{rope.where} has rope_type {shown(kind)}; supported: {', '.join(_ROPE_KINDS)}")
    return _ROPE_KINDS[kind](rope, config)


def _original_positions(rope: Fields, config: Fields) -> int:
    # Phi-3 has it beside the rotary fields, where it comes first.
    beside = config.whole(ORIGINAL, 4096 if config.get("model_type") == "phi3" else None, most=MOST_WINDOW)
    if beside is not None:
        return beside
    return rope.whole(ORIGINAL, config.whole("max_position_embeddings"), most=MOST_WINDOW)


def _llama3(rope: Fields, config: Fields) -> Llama3Rope:
    factors = {key: rope.number(key, **SCALING_RANGE) for key in ("factor", "low_freq_factor", "high_freq_factor")}
    scaling = Llama3Rope(**factors, original_positions=_original_positions(rope, config))
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise UserError(f"{rope.where} needs high_freq_factor > low_freq_factor")
    return scaling


def _yarn(rope: Fields, config: Fields) -> YarnRope:
    original = _original_positions(rope, config)
    factor = rope.number("factor", config.whole("max_position_embeddings") / original, **SCALING_RANGE)

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    by_default = magnitude(1.0)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        both = [rope.number(key, **SCALING_RANGE) for key in ("mscale", "mscale_all_dim")]
        by_default = magnitude(both[0]) / magnitude(both[1])
    return YarnRope(
        factor,
        original,
        rope.number("attention_factor", by_default, **SCALING_RANGE),
        rope.number("beta_fast", 32.0, **SCALING_RANGE),
        rope.number("beta_slow", 1.0, **SCALING_RANGE),
        rope.flag("truncate", True),
    )


def _longrope(rope: Fields, config: Fields) -> LongRope:
    original = _original_positions(rope, config)
    factor = rope.number("factor", config.whole("max_position_embeddings") / original, **SCALING_RANGE)
    by_default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(max(2, original)))
    return LongRope(
        _numbers(rope, "short_factor"),
        _numbers(rope, "long_factor"),
        original,
        rope.number("attention_factor", by_default, **SCALING_RANGE),
    )


def _numbers(rope: Fields, name: str) -> tuple[float, ...]:
    values = rope.list(name)
    return tuple(Fields({name: v}, rope.where).number(name, **SCALING_RANGE) for v in values)


_ROPE_KINDS: dict[str, Callable[[Fields, Fields], RopeScaling | None]] = {
    "default": lambda rope, config: None,
    "linear": lambda rope, config: LinearRope(rope.number("factor", **SCALING_RANGE)),
    "dynamic": lambda rope, config: DynamicRope(rope.number("factor", **SCALING_RANGE)),
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def _from_gpt2(config: Fields) -> ModelSpec:
    # `transformers` accepts the Llama spellings of these fields for GPT-2 too.
    other = {theirs: _SIZES[ours] for ours, theirs in _GPT2_SIZES.items()}
    config = Fields({**{k: config.get(v) for k, v in other.items() if v in config}, **config.values}, config.where)
    sizes = {ours: config.whole(theirs) for ours, theirs in _GPT2_SIZES.items()}
    return ModelSpec(
        **sizes,
        **_end_ids(config),
        num_kv_heads=sizes["num_heads"],
        head_dim=_divide_width(sizes["d_model"], sizes["num_heads"], "n_embd", "n_head"),
        d_ff=config.whole("n_inner", 4 * sizes["d_model"]),
        model_type="gpt2",
        norm="layer",
        norm_eps=config.number("layer_norm_epsilon", 1e-5, **EPS_RANGE),
        act=cast(Literal["gelu_tanh", "gelu"], _activation(config, "activation_function", "gelu_new", _GELU)),
        positions="learned",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=config.flag("tie_word_embeddings", True),
    )


# -- spec -> config.json -------------------------------------------------------------------------------------


def spec_to_hf(spec: ModelSpec) -> dict[str, Any]:
    """A config.json that `transformers` computes exactly like `spec`; UserError where no such one exists."""
    lost = _lost(spec)
    if not lost:
        return _write(spec)
    fits = [m for m in MODEL_TYPES if not _lost(dataclasses.replace(spec, model_type=m))]
    remedy = f"use model_type {fits[0]!r}" if fits else "no supported model_type has this combination; change the spec"
    raise UserError(f"a Hugging Face {spec.model_type!r} model cannot have {', '.join(lost)}; {remedy}")


def _lost(spec: ModelSpec) -> list[str]:
    """The fields that do not survive a trip through config.json."""
    if spec.model_type not in MODEL_TYPES:
        return [f"model_type={spec.model_type!r}"]
    if spec.model_type == "llama" and spec.d_model % spec.num_heads:
        return [f"d_model={spec.d_model} with num_heads={spec.num_heads} (not a multiple)"]
    try:
        back = spec_from_hf(_write(spec))
    except UserError as error:
        return [str(error)]
    want = _normal(spec)
    return [
        f"{f.name}={getattr(want, f.name)!r}"
        for f in dataclasses.fields(ModelSpec)
        if getattr(back, f.name) != getattr(want, f.name)
    ]


def _normal(spec: ModelSpec) -> ModelSpec:
    """The same arithmetic with the fields that do not matter at their defaults."""
    full = tuple(i for i in range(spec.num_layers) if spec.window(i) is None)
    if len(full) == spec.num_layers:
        spec = dataclasses.replace(spec, sliding_window=None, full_layers=())
    else:
        spec = dataclasses.replace(spec, full_layers=full)
    if spec.positions == "learned":
        spec = dataclasses.replace(spec, rope_theta=10000.0, rope_scaling=None)
    return spec


def _write(spec: ModelSpec) -> dict[str, Any]:
    sizes = _GPT2_SIZES if spec.model_type == "gpt2" else _SIZES
    shared = {
        "architectures": [_ARCHITECTURE[spec.model_type]],
        "model_type": spec.model_type,
        **{theirs: getattr(spec, ours) for ours, theirs in sizes.items()},
        "tie_word_embeddings": spec.tied,
        "bos_token_id": spec.bos_id,
        "eos_token_id": list(spec.eos_ids) if len(spec.eos_ids) > 1 else spec.eos_id,
        "pad_token_id": None,  # some families' default may lie outside of this vocabulary
        "use_cache": True,
    }
    if spec.model_type == "gpt2":
        return {
            **shared,
            "n_ctx": spec.max_positions,
            "n_inner": spec.d_ff,
            "activation_function": "gelu" if spec.act == "gelu" else "gelu_new",
            "layer_norm_epsilon": spec.norm_eps,
            # The decoder has no dropout; a fine-tuning run elsewhere should not add it unasked.
            **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
        }
    if spec.model_type == "gpt_neox":
        return {**shared, **_write_neox(spec), **_write_rope(spec)}
    return {**shared, **_write_llama_like(spec), **_write_rope(spec)}


def _write_neox(spec: ModelSpec) -> dict[str, Any]:
    return {
        "intermediate_size": spec.d_ff,
        "hidden_act": "gelu" if spec.act == "gelu" else "gelu_new",
        "layer_norm_eps": spec.norm_eps,
        "use_parallel_residual": spec.parallel_residual,
        "attention_bias": spec.qkv_bias,
        "rotary_pct": spec.rotary_fraction,
        "rotary_emb_base": spec.rope_theta,
        **dict.fromkeys(("attention_dropout", "hidden_dropout"), 0.0),
    }


def _write_llama_like(spec: ModelSpec) -> dict[str, Any]:
    gate = _GATE_NAMES.get(spec.act, "silu")  # what a family cannot say is noticed by `_lost`
    out: dict[str, Any] = {
        "intermediate_size": spec.d_ff,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": gate,
        "rms_norm_eps": spec.norm_eps,
    }
    if spec.model_type in _ATTENTION_BIAS:
        out["attention_bias"] = spec.qkv_bias
    if spec.model_type in _MLP_BIAS:
        out["mlp_bias"] = spec.mlp_bias
    if spec.model_type == "smollm3":
        out["no_rope_layers"] = [int(i not in spec.no_rope_layers) for i in range(spec.num_layers)]
    if spec.model_type == "phi3":
        out["partial_rotary_factor"] = spec.rotary_fraction
        if isinstance(spec.rope_scaling, LongRope):
            out["original_max_position_embeddings"] = spec.rope_scaling.original_positions
    if spec.model_type in _GEMMA:
        out["hidden_activation"] = gate
        out["query_pre_attn_scalar"] = _scalar(spec)
        out["attn_logit_softcapping"], out["final_logit_softcapping"] = spec.attn_softcap, spec.logit_softcap
        if spec.model_type == "gemma3_text":
            out["rope_local_base_freq"] = spec.window_rope_theta
    if spec.experts is not None:
        out |= _write_experts(spec, spec.experts)
    return out | _write_windows(spec)


def _scalar(spec: ModelSpec) -> float:
    """What the inverse square root of is the scale of the scores; a whole number where it was one."""
    scalar = spec.head_dim if spec.attn_scale is None else spec.attn_scale**-2
    return round(scalar) if math.isclose(scalar, round(scalar), rel_tol=1e-9) else scalar


def _write_experts(spec: ModelSpec, experts: Experts) -> dict[str, Any]:
    out: dict[str, Any] = {"num_experts_per_tok": experts.top_k}
    # Some releases of `transformers` read one name, some the other.
    out |= dict.fromkeys(("num_local_experts",) if spec.model_type == "mixtral" else ("num_experts",), experts.num)
    if spec.model_type in ("mixtral", "olmoe"):
        out["intermediate_size"] = experts.d_ff
    if spec.model_type != "mixtral":
        out["norm_topk_prob"] = experts.renormalize
    if spec.model_type in ("qwen2_moe", "qwen3_moe"):
        out |= {
            "moe_intermediate_size": experts.d_ff,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(experts.dense_layers),
        }
    if spec.model_type == "qwen2_moe":
        out |= {"shared_expert_intermediate_size": experts.shared_d_ff, "qkv_bias": spec.qkv_bias}
    return out


def _write_windows(spec: ModelSpec) -> dict[str, Any]:
    if spec.model_type in ("llama", "olmo2", "olmoe"):
        return {}
    out: dict[str, Any] = {"sliding_window": spec.sliding_window}
    if spec.model_type in _GEMMA and spec.sliding_window is None:
        out["sliding_window"] = spec.max_positions  # `transformers` wants one, even where no layer has it
    if spec.model_type in ("qwen2", "qwen3", "smollm3", "qwen2_moe", "qwen3_moe"):
        out["use_sliding_window"] = spec.sliding_window is not None
    if spec.model_type in ("qwen2", "qwen3", "qwen2_moe"):
        windowed = [i for i in range(spec.num_layers) if spec.window(i) is not None]
        out["max_window_layers"] = windowed[0] if windowed else spec.num_layers
    # A Mistral with layer_types is a Ministral to `transformers`; one with a window everywhere should stay a Mistral.
    alike = spec.model_type == "mistral" and not _normal(spec).full_layers
    if spec.model_type not in _WINDOW_EVERYWHERE and not alike:
        out["layer_types"] = [
            "full_attention" if spec.window(i) is None else "sliding_attention" for i in range(spec.num_layers)
        ]
    return out


def _write_rope(spec: ModelSpec) -> dict[str, Any]:
    """Both spellings, so that transformers 4 and 5 read the same angles."""
    base: dict[str, Any] = {"rope_theta": spec.rope_theta}
    if spec.model_type in _PART:
        base["partial_rotary_factor"] = spec.rotary_fraction
    scaling = _write_scaling(spec.rope_scaling)
    new = {**(scaling or {"rope_type": "default"}), **base}
    if spec.model_type == "gemma3_text":
        local = {"rope_type": "default", "rope_theta": spec.window_rope_theta}
        new = {"full_attention": new, "sliding_attention": local}
    return {"rope_theta": spec.rope_theta, "rope_scaling": scaling, "rope_parameters": new}


def _write_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    fields = {name: list(v) if isinstance(v, tuple) else v for name, v in dataclasses.asdict(scaling).items()}
    renamed = {"short": "short_factor", "long": "long_factor", "original_positions": "original_max_position_embeddings"}
    kind = {Llama3Rope: "llama3", LinearRope: "linear", DynamicRope: "dynamic", YarnRope: "yarn", LongRope: "longrope"}
    return {"rope_type": kind[type(scaling)], **{renamed.get(name, name): v for name, v in fields.items()}}
