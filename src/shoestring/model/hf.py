"""Hugging Face config.json, to and from a ModelSpec, by the rows of families.py.

`spec_from_hf` reads a config.json of one of the families with the defaults that `transformers` gives to a missing
field; `spec_to_hf` writes it back and proves, by reading its own output, that nothing was lost. A field that asks for
arithmetic the decoder does not have (another rotary type, ALiBi, multipliers, ...) is an error, never an approximation.

Left out on purpose: tensor names (hf_names.py), files (folder.py), GGUF (gguf.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoestring.errors import UserError, shown, suggest
from shoestring.json_files import Fields, read_object
from shoestring.model.families import FAMILIES, MODEL_TYPES, Family, Key, Windows
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
# Names of activations, the one that is written first: of gated feed-forward layers, and of the others.
_GATES = {
    "silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh", "gelu_new": "geglu_tanh",
}  # fmt: skip
_UNGATED = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu2": "relu2"}

# What a value may be without making the arithmetic meaningless in fp32.
EPS_RANGE: dict[str, float] = {"least": 1e-12, "most": 0.1}
THETA_RANGE: dict[str, float] = {"least": 1.0, "most": 1e15}
SCALING_RANGE: dict[str, float] = {"least": 1e-6, "most": 1e6}
PART_RANGE: dict[str, float] = {"least": 1e-6, "most": 1.0}
_RANGES = {
    "norm_eps": EPS_RANGE,
    "rotary_fraction": PART_RANGE,
    **dict.fromkeys(("rope_theta", "window_rope_theta"), THETA_RANGE),
    **dict.fromkeys(("attn_scale", "attn_softcap", "logit_softcap"), SCALING_RANGE),
}
_FLAGS = ("tied", "parallel_residual", "qkv_bias", "out_bias", "mlp_bias", "renormalize")
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


def _refuse_unknown_arithmetic(config: Fields, family: Family) -> None:
    read = {key.name for key in (*family.keys.values(), *family.experts.values())}
    read |= {"partial_rotary_factor"} if "rotary_fraction" in family.keys else set()
    read |= {"num_experts", "num_local_experts"} if family.experts else set()
    for key, neutral in _NEUTRAL.items():
        if key in config and config.get(key) not in neutral and key not in read:
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
    family = FAMILIES[model_type]
    _refuse_unknown_arithmetic(config, family)
    elsewhere = {k.name: config.get(k.read_from) for k in family.keys.values() if k.read_from in config}
    config = Fields({**elsewhere, **config.values}, config.where)
    read = {field: _read(config, family, field, key) for field, key in family.keys.items()}
    num_layers, num_heads = read["num_layers"], read["num_heads"]
    read["num_kv_heads"] = read.get("num_kv_heads") or num_heads
    read["head_dim"] = read.get("head_dim") or _divide_width(family, read["d_model"], num_heads)
    read["d_ff"] = read["d_ff"] or 4 * read["d_model"]
    if "rope_theta" in read:
        read |= _rope(config, family, read)
    if family.windows is not None or "layer_types" in config:
        read["sliding_window"], read["full_layers"] = _windows(config, family, num_layers)
    bos, eos = token_ids(config, "bos_token_id"), token_ids(config, "eos_token_id")
    return ModelSpec(
        **family.fixed,
        **read,
        model_type=model_type,
        experts=_experts(config, family, num_layers) if family.experts else None,
        bos_id=next(iter(bos), None),
        eos_id=next(iter(eos), None),
        extra_eos_ids=eos[1:],
    )


def _read(config: Fields, family: Family, field: str, key: Key) -> Any:
    """The value of one field of ModelSpec or Experts."""
    if field in _FLAGS:
        return config.flag(key.name, key.missing)
    if field == "act":
        return _activation(config, family, key)
    if field == "no_rope_layers":
        return _no_rope_layers(config, config.whole(family.keys["num_layers"].name))
    if field in ("attn_softcap", "logit_softcap"):  # an explicit null: no cap
        wanted = config.get(key.name, key.missing) is not None
        return config.number(key.name, key.missing, **_RANGES[field]) if wanted else None
    if field in _RANGES:
        value = config.number(key.name, key.missing, **_RANGES[field])
        return value**-0.5 if field == "attn_scale" else value
    if field == "num_kv_heads" and key.name in config:  # null: as many as heads, also where the field must be there
        return config.whole(key.name, None)
    return config.whole(key.name, key.missing)


def _activation(config: Fields, family: Family, key: Key) -> str:
    act, known = config.get(key.name, key.missing), _GATES if family.gated else _UNGATED
    if not isinstance(act, str) or act not in known:
        raise UserError(
            f"config.json: {key.name}={shown(act)} is not supported for {family.name}; supported: {', '.join(known)}"
        )
    return known[act]


def default_act(family: Family) -> Any:
    """The activation of its models, unless config.json has another."""
    return (_GATES if family.gated else _UNGATED)[family.keys["act"].missing]


def _no_rope_layers(config: Fields, num_layers: int) -> tuple[int, ...]:
    """SmolLM3 lists for every layer whether it rotates (1) or not (0); by default every fourth does not."""
    flags = config.get("no_rope_layers")
    if flags is None:
        interval = config.whole("no_rope_layer_interval", 4)
        return tuple(i for i in range(num_layers) if (i + 1) % interval == 0)
    if not isinstance(flags, list) or len(flags) != num_layers or any(f not in (0, 1) for f in flags):
        raise UserError(f"config.json: no_rope_layers must be a list of 0 or 1 for each of the {num_layers} layers")
    return tuple(i for i, rotates in enumerate(flags) if not rotates)


def _experts(config: Fields, family: Family, num_layers: int) -> Experts:
    keys = dict(family.experts)
    # Some releases of `transformers` write one name, some the other.
    keys["num"] = Key("num_local_experts" if "num_local_experts" in config else "num_experts")
    chosen_layers = keys.pop("dense_layers", None)
    read = {field: _read(config, family, field, key) for field, key in keys.items()}
    if chosen_layers is not None:
        dense = config.list(chosen_layers.name, None) or []
        if any(type(i) is not int or i < 0 for i in dense):
            raise UserError(f"config.json: {chosen_layers.name} must be a list of layer numbers, not {shown(dense)}")
        step = config.whole("decoder_sparse_step", 1)
        read["dense_layers"] = tuple(i for i in range(num_layers) if i in dense or (i + 1) % step)
    return Experts(**read)


def _divide_width(family: Family, d_model: int, num_heads: int) -> int:
    if d_model % num_heads:
        width, heads = (family.keys[field].name for field in ("d_model", "num_heads"))
        raise UserError(
            f"config.json: {width}={d_model} is not a multiple of {heads}={num_heads} and there is no head_dim"
        )
    return d_model // num_heads


def _windows(config: Fields, family: Family, num_layers: int) -> tuple[int | None, tuple[int, ...]]:
    """(sliding window, layers that attend to everything all the same)."""
    window: int | None = None
    full: tuple[int, ...] = ()
    windows, kinds = family.windows, config.get("layer_types")
    if windows is not None and (not windows.switched or config.flag("use_sliding_window", False)):
        missing = None if windows.null_means_none and "sliding_window" in config else windows.missing
        window = config.whole("sliding_window", missing, most=MOST_WINDOW)
        full = _layers_without_window(config, windows, num_layers)
    if kinds is not None:
        named = _full_layers(kinds, num_layers)
        if windows is not None and windows.by_layer:
            full = named
        elif windows is not None and len(named) not in (0, num_layers):
            raise UserError(f"config.json: layer_types of a {family.name} model must be all the same kind")
        if len(named) < num_layers and window is None:
            raise UserError(
                f"config.json: layer_types asks for sliding_attention in a {family.name} model without a sliding window"
            )
    if window is None or len(full) == num_layers:
        return None, ()
    return window, full


def _layers_without_window(config: Fields, windows: Windows, num_layers: int) -> tuple[int, ...]:
    every_layer = range(num_layers)
    if windows.layers == "every":
        every = config.whole(windows.every_key, windows.every) if windows.every_key else windows.every
        return tuple(range(every - 1, num_layers, every))
    if windows.layers == "unrotated":
        return tuple(i for i in every_layer if i not in _no_rope_layers(config, num_layers))
    if windows.layers == "all":
        return ()
    first = config.whole("max_window_layers", 28, least=0)
    if windows.layers == "behind":
        return tuple(every_layer[:first])
    return tuple(i for i in every_layer if i % 2 or i >= first)


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


def _rope(config: Fields, family: Family, read: dict[str, Any]) -> dict[str, Any]:
    """The spec's rotary fields. Both spellings: rope_theta + rope_scaling (transformers 4) and rope_parameters
    (transformers 5), which Gemma 3 has by layer type."""
    given = {key: config.get(key) for key in ("rope_scaling", "rope_parameters")}
    for key, value in given.items():
        if value is not None and not isinstance(value, dict):
            raise UserError(f"config.json: {key} must be an object or null, not {shown(value)}")
    base = {"rope_theta": read["rope_theta"], "rotary_fraction": read.get("rotary_fraction", 1.0)}
    by_layer = given["rope_parameters"] or {}
    if "window_rope_theta" in family.keys and "full_attention" in by_layer:
        return _rope_by_layer(base, Fields(by_layer, "config.json, rope_parameters"), config, family)
    found = [
        _rope_fields(base, Fields(rope, f"config.json, {key}"), config, family) for key, rope in given.items() if rope
    ]
    if len(found) == 2 and found[0] != found[1]:
        raise UserError(
            "config.json: rope_scaling and rope_parameters disagree; keep the one the model was trained with"
        )
    return found[0] if found else {**base, "rope_scaling": None}


def _rope_by_layer(base: dict[str, Any], by_layer: Fields, config: Fields, family: Family) -> dict[str, Any]:
    whole, windowed = (
        _rope_fields(base, Fields(by_layer.object(kind), f"{by_layer.where}.{kind}"), config, family)
        for kind in ("full_attention", "sliding_attention")
    )
    if windowed["rope_scaling"] is not None:
        raise UserError(f"{by_layer.where}.sliding_attention is scaled; only full_attention may be")
    return {**whole, "window_rope_theta": windowed["rope_theta"]}


def _rope_fields(base: dict[str, Any], rope: Fields, config: Fields, family: Family) -> dict[str, Any]:
    if any(isinstance(v, dict) for v in rope.values.values()):
        raise UserError(f"{rope.where} differs by layer type, which this model_type does not have")
    fraction = rope.number("partial_rotary_factor", base["rotary_fraction"], **PART_RANGE)
    if fraction != 1.0 and "rotary_fraction" not in family.keys:
        raise UserError(f"{rope.where}: partial_rotary_factor={fraction!r} is not supported here; only 1.0 is")
    return {
        "rope_theta": rope.number("rope_theta", base["rope_theta"], **THETA_RANGE),
        "rotary_fraction": fraction,
        "rope_scaling": _rope_scaling(rope, config, family),
    }


def _rope_scaling(rope: Fields, config: Fields, family: Family) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if family.original_positions is not None and kind in ("su", "yarn"):
        kind = "longrope"  # what Phi-3's first releases called it
    if not isinstance(kind, str) or kind not in _ROPE_KINDS:
        raise UserError(f"{rope.where} has rope_type {shown(kind)}; supported: {', '.join(_ROPE_KINDS)}")
    return _ROPE_KINDS[kind](rope, config, family)


def _original_positions(rope: Fields, config: Fields, family: Family) -> int:
    # Phi-3 has it beside the rotary fields, where it comes first.
    beside = config.whole(ORIGINAL, family.original_positions, most=MOST_WINDOW)
    if beside is not None:
        return beside
    return rope.whole(ORIGINAL, config.whole("max_position_embeddings"), most=MOST_WINDOW)


def _llama3(rope: Fields, config: Fields, family: Family) -> Llama3Rope:
    factors = {key: rope.number(key, **SCALING_RANGE) for key in ("factor", "low_freq_factor", "high_freq_factor")}
    scaling = Llama3Rope(**factors, original_positions=_original_positions(rope, config, family))
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise UserError(f"{rope.where} needs high_freq_factor > low_freq_factor")
    return scaling


def _yarn(rope: Fields, config: Fields, family: Family) -> YarnRope:
    original = _original_positions(rope, config, family)
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


def _longrope(rope: Fields, config: Fields, family: Family) -> LongRope:
    original = _original_positions(rope, config, family)
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


_ROPE_KINDS: dict[str, Callable[[Fields, Fields, Family], RopeScaling | None]] = {
    "default": lambda rope, config, family: None,
    "linear": lambda rope, config, family: LinearRope(rope.number("factor", **SCALING_RANGE)),
    "dynamic": lambda rope, config, family: DynamicRope(rope.number("factor", **SCALING_RANGE)),
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


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
    if FAMILIES[spec.model_type].whole_heads and spec.d_model % spec.num_heads:
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
    family = FAMILIES[spec.model_type]
    out: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": spec.model_type,
        "bos_token_id": spec.bos_id,
        "eos_token_id": list(spec.eos_ids) if len(spec.eos_ids) > 1 else spec.eos_id,
        "pad_token_id": None,  # some families' default may lie outside of this vocabulary
        "use_cache": True,
        **family.written,
    }
    for field, key in family.keys.items():
        out[key.name] = _written(spec, family, field, key)
        if key.written_to:
            out[key.written_to] = out[key.name]
    if family.original_positions is not None and isinstance(spec.rope_scaling, LongRope):
        out[ORIGINAL] = spec.rope_scaling.original_positions
    if family.experts and spec.experts is not None:
        out |= {key.name: getattr(spec.experts, field) for field, key in family.experts.items()}
        if (dense := family.experts.get("dense_layers")) is not None:
            out |= {"decoder_sparse_step": 1, dense.name: list(spec.experts.dense_layers)}
    if family.windows is not None:
        out |= _write_windows(spec, family.windows)
    return out | _write_rope(spec, family) if "rope_theta" in family.keys else out


def _written(spec: ModelSpec, family: Family, field: str, key: Key) -> Any:
    if field == "act":  # what a family cannot say is noticed by `_lost`
        known = _GATES if family.gated else _UNGATED
        return next((theirs for theirs, ours in known.items() if ours == spec.act), key.missing)
    if field == "no_rope_layers":
        return [int(i not in spec.no_rope_layers) for i in range(spec.num_layers)]
    if field == "attn_scale":  # what the inverse square root of is the scale; a whole number where it was one
        scalar = spec.head_dim if spec.attn_scale is None else spec.attn_scale**-2
        return round(scalar) if math.isclose(scalar, round(scalar), rel_tol=1e-9) else scalar
    return getattr(spec, field)


def _write_windows(spec: ModelSpec, windows: Windows) -> dict[str, Any]:
    out: dict[str, Any] = {"sliding_window": spec.sliding_window}
    if windows.every and spec.sliding_window is None:
        out["sliding_window"] = spec.max_positions  # `transformers` wants one, even where no layer has it
    if windows.switched:
        out["use_sliding_window"] = spec.sliding_window is not None
    if windows.layers in ("behind", "before"):
        windowed = [i for i in range(spec.num_layers) if spec.window(i) is not None]
        out["max_window_layers"] = windowed[0] if windowed else spec.num_layers
    # A Mistral with layer_types is a Ministral to `transformers`; one with a window everywhere should stay a Mistral.
    if windows.by_layer and (windows.layers != "all" or _normal(spec).full_layers):
        out["layer_types"] = [
            "full_attention" if spec.window(i) is None else "sliding_attention" for i in range(spec.num_layers)
        ]
    return out


def _write_rope(spec: ModelSpec, family: Family) -> dict[str, Any]:
    """Both spellings, so that transformers 4 and 5 read the same angles."""
    base: dict[str, Any] = {"rope_theta": spec.rope_theta}
    if "rotary_fraction" in family.keys:
        base["partial_rotary_factor"] = spec.rotary_fraction
    scaling = _write_scaling(spec.rope_scaling)
    new = {**(scaling or {"rope_type": "default"}), **base}
    if "window_rope_theta" in family.keys:
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
