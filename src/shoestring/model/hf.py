"""Hugging Face config.json, to and from a ModelSpec.

`spec_from_hf` reads a config.json of model_type llama (SmolLM2 too), mistral, qwen2, qwen3 or gpt2, with the
defaults that `transformers` gives to a missing field; `spec_to_hf` writes it back and proves, by reading its
own output, that nothing was lost. A field that asks for arithmetic the decoder does not have (another rotary
type, experts, logit caps, ...) is an error, never an approximation.

Left out on purpose: tensor names (hf_names.py), files (folder.py), GGUF (gguf.py).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, cast

from shoestring.errors import UserError, shown, suggest
from shoestring.json_files import REQUIRED, Fields
from shoestring.model.spec import ModelSpec, RopeScaling

_ARCHITECTURE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
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

# Fields that change the arithmetic, and the values under which they do not. Anything else is refused.
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
_GATES = {
    "silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh", "gelu_new": "geglu_tanh",
}  # fmt: skip
_GATE_NAMES = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_pytorch_tanh"}
_GELU = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}

# What a value may be without making the arithmetic meaningless in fp32.
EPS_RANGE: dict[str, float] = {"least": 1e-12, "most": 0.1}
THETA_RANGE: dict[str, float] = {"least": 1.0, "most": 1e15}
SCALING_RANGE: dict[str, float] = {"least": 1e-6, "most": 1e6}
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


def _refuse_unknown_arithmetic(config: Fields) -> None:
    for key, neutral in _NEUTRAL.items():
        if key in config and config.get(key) not in neutral:
            raise UserError(
                f"config.json: {key}={shown(config.get(key))} asks for arithmetic the decoder does not have; "
                f"only {' or '.join(repr(n) for n in neutral)} is supported"
            )
    quantized = config.get("quantization_config")
    method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
    if quantized is not None and method not in ("shoestring", "compressed-tensors"):
        raise UserError(
            f"config.json: quantization_config says the weights are packed by {shown(method)}, which is not read; "
            "give the folder of the unquantized model (float32, float16 or bfloat16 safetensors)"
        )


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
    _refuse_unknown_arithmetic(config)
    return _from_gpt2(config) if model_type == "gpt2" else _from_llama_like(config, model_type)


def _from_llama_like(config: Fields, model_type: str) -> ModelSpec:
    act = config.get("hidden_act", "silu")
    if not isinstance(act, str) or act not in _GATES:
        raise UserError(
            f"config.json: hidden_act={shown(act)} is not supported for {model_type}; supported: {', '.join(_GATES)}"
        )
    sizes = {ours: config.whole(theirs) for ours, theirs in _SIZES.items()}
    num_heads = sizes["num_heads"]
    # `transformers` has other defaults for Mistral (8) and Qwen (32), right for few: the field must be there.
    kv_default = num_heads if model_type == "llama" or "num_key_value_heads" in config else REQUIRED
    window, first_window_layer = _windows(config, model_type, sizes["num_layers"])
    attention_bias = model_type in ("llama", "qwen3") and config.flag("attention_bias", False)
    theta, scaling = _rope(config)
    return ModelSpec(
        **sizes,
        **_end_ids(config),
        num_kv_heads=config.whole("num_key_value_heads", kv_default),
        head_dim=_head_dim(config, model_type, sizes["d_model"], num_heads),
        d_ff=config.whole("intermediate_size"),
        model_type=model_type,
        norm_eps=config.number("rms_norm_eps", 1e-6, **EPS_RANGE),
        act=cast(Literal["swiglu", "geglu", "geglu_tanh"], _GATES[act]),
        rope_theta=theta,
        rope_scaling=scaling,
        qk_norm=model_type == "qwen3",
        qkv_bias=attention_bias or model_type == "qwen2",
        out_bias=attention_bias,
        mlp_bias=model_type == "llama" and config.flag("mlp_bias", False),
        tied=config.flag("tie_word_embeddings", False),
        sliding_window=window,
        first_window_layer=first_window_layer,
    )


def _head_dim(config: Fields, model_type: str, d_model: int, num_heads: int) -> int:
    head_dim = config.whole("head_dim", None)
    if head_dim is not None:
        return head_dim
    if model_type == "qwen3":
        return 128  # what `transformers` assumes for Qwen3, whatever the width
    return _divide_width(d_model, num_heads, "hidden_size", "num_attention_heads")


def _divide_width(d_model: int, num_heads: int, width_key: str, heads_key: str) -> int:
    if d_model % num_heads:
        raise UserError(
            f"config.json: {width_key}={d_model} is not a multiple of {heads_key}={num_heads} and there is no head_dim"
        )
    return d_model // num_heads


def _windows(config: Fields, model_type: str, num_layers: int) -> tuple[int | None, int]:
    """(sliding window, first layer that has it)."""
    if model_type == "llama":
        window, first = None, 0
    elif model_type == "mistral":
        # Absent means 4096 in `transformers`; null means no window.
        window, first = (
            (config.whole("sliding_window", None, most=MOST_WINDOW) if "sliding_window" in config else 4096),
            0,
        )
    else:
        window = (
            config.whole("sliding_window", 4096, most=MOST_WINDOW) if config.flag("use_sliding_window", False) else None
        )
        first = config.whole("max_window_layers", 28, least=0)
    kinds = config.get("layer_types")
    if kinds is not None:
        first = _first_window_layer(kinds, num_layers)
        if model_type == "mistral" and first not in (0 if window is not None else num_layers, num_layers):
            raise UserError("config.json: layer_types of a mistral model must be all the same kind")
        if first < num_layers and window is None:
            raise UserError(
                f"config.json: layer_types asks for sliding_attention in a {model_type} model without a sliding window"
            )
        if model_type == "mistral":
            first = 0  # `transformers` applies Mistral's window to every layer, whatever layer_types says
    if window is None or first >= num_layers:
        return None, 0
    return window, first


def _first_window_layer(kinds: Any, num_layers: int) -> int:
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise UserError(f"config.json: layer_types must be a list with one entry for each of the {num_layers} layers")
    unknown = sorted({str(k) for k in kinds} - {"full_attention", "sliding_attention"})
    if unknown:
        raise UserError(f"config.json: layer_types has {unknown[0]!r}; supported: full_attention, sliding_attention")
    first = kinds.index("sliding_attention") if "sliding_attention" in kinds else num_layers
    if "full_attention" in kinds[first:]:
        raise UserError(
            "config.json: layer_types mixes full_attention above sliding_attention; only full layers "
            "followed by sliding layers are supported"
        )
    return first


def _rope(config: Fields) -> tuple[float, RopeScaling | None]:
    """Both spellings: rope_theta + rope_scaling (transformers 4) and rope_parameters (transformers 5)."""
    given = {key: config.get(key) for key in ("rope_scaling", "rope_parameters")}
    for key, value in given.items():
        if value is not None and not isinstance(value, dict):
            raise UserError(f"config.json: {key} must be an object or null, not {shown(value)}")
    theta = config.number("rope_theta", 10000.0, **THETA_RANGE)
    found = [_rope_fields(rope, key, theta, config) for key, rope in given.items() if rope]
    if len(found) == 2 and found[0] != found[1]:
        raise UserError(
            "config.json: rope_scaling and rope_parameters disagree; keep the one the model was trained with"
        )
    return found[0] if found else (theta, None)


def _rope_fields(rope: dict[str, Any], key: str, theta: float, config: Fields) -> tuple[float, RopeScaling | None]:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if any(isinstance(v, dict) for v in rope.values()):
        raise UserError(f"config.json: {key} differs by layer type; one rotary setting for all layers is supported")
    if kind not in ("default", "llama3"):
        raise UserError(f"config.json: {key} has rope_type {shown(kind)}; supported: 'default' and 'llama3'")
    if rope.get("partial_rotary_factor") not in (None, 1.0):
        raise UserError(
            f"config.json: partial_rotary_factor={shown(rope['partial_rotary_factor'])} is not supported; only 1.0 is"
        )
    fields = Fields(
        {**rope, ORIGINAL: rope.get(ORIGINAL, config.get("max_position_embeddings"))}, f"config.json, {key}"
    )
    theta = fields.number("rope_theta", theta, **THETA_RANGE)
    if kind == "default":
        return theta, None
    factors = {name: fields.number(name, **SCALING_RANGE) for name in ("factor", "low_freq_factor", "high_freq_factor")}
    scaling = RopeScaling(**factors, original_positions=fields.whole(ORIGINAL, most=MOST_WINDOW))
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise UserError(f"config.json: {key} needs high_freq_factor > low_freq_factor")
    return theta, scaling


def _from_gpt2(config: Fields) -> ModelSpec:
    # `transformers` accepts the Llama spellings of these fields for GPT-2 too.
    other = {theirs: _SIZES[ours] for ours, theirs in _GPT2_SIZES.items()}
    config = Fields({**{k: config.get(v) for k, v in other.items() if v in config}, **config.values}, config.where)
    act = config.get("activation_function", "gelu_new")
    if not isinstance(act, str) or act not in _GELU:
        raise UserError(
            f"config.json: activation_function={shown(act)} is not supported for gpt2; supported: {', '.join(_GELU)}"
        )
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
        act=cast(Literal["gelu_tanh", "gelu"], _GELU[act]),
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
    if spec.sliding_window is None or spec.first_window_layer >= spec.num_layers:
        spec = dataclasses.replace(spec, sliding_window=None, first_window_layer=0)
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
    return {**shared, **_write_llama_like(spec)}


def _write_llama_like(spec: ModelSpec) -> dict[str, Any]:
    out: dict[str, Any] = {
        "intermediate_size": spec.d_ff,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": _GATE_NAMES.get(spec.act, "silu"),  # what a family cannot say is noticed by `_lost`
        "rms_norm_eps": spec.norm_eps,
        **_write_rope(spec),
    }
    if spec.model_type in ("llama", "qwen3"):
        out["attention_bias"] = spec.qkv_bias
    if spec.model_type == "llama":
        out["mlp_bias"] = spec.mlp_bias
    if spec.model_type == "mistral":
        out["sliding_window"] = spec.sliding_window
    if spec.model_type in ("qwen2", "qwen3"):
        out["use_sliding_window"] = spec.sliding_window is not None
        out["sliding_window"] = spec.sliding_window
        out["max_window_layers"] = spec.first_window_layer if spec.sliding_window else spec.num_layers
        out["layer_types"] = [
            "full_attention" if spec.window(i) is None else "sliding_attention" for i in range(spec.num_layers)
        ]
    return out


def _write_rope(spec: ModelSpec) -> dict[str, Any]:
    """Both spellings, so that transformers 4 and 5 read the same angles."""
    theta: dict[str, Any] = {"rope_theta": spec.rope_theta}
    if spec.rope_scaling is None:
        return {**theta, "rope_scaling": None, "rope_parameters": {"rope_type": "default", **theta}}
    fields = dataclasses.asdict(spec.rope_scaling)
    original = fields.pop("original_positions")
    scaling = {"rope_type": "llama3", **fields, "original_max_position_embeddings": original}
    return {**theta, "rope_scaling": scaling, "rope_parameters": {**scaling, **theta}}
