"""GGUF metadata to and from a ModelSpec.

llama.cpp decides much of the arithmetic by the name of the architecture (a row of families.py); the metadata holds the
sizes and a few switches. `spec_from_metadata` says what llama.cpp would compute; `metadata_of` writes the metadata of
a spec and proves, by reading it back, that llama.cpp would compute that spec. What it cannot express is an error.

Left out on purpose: tensor names (gguf_names.py), the vocabulary (vocabulary.py, gguf_vocabulary.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shoestring.errors import UserError, shown
from shoestring.json_files import Fields
from shoestring.model.attention import rope_frequencies
from shoestring.model.families import FAMILIES, Family, family_of
from shoestring.model.gguf_names import gguf_names
from shoestring.model.hf import EPS_RANGE, MOST_WINDOW, SCALING_RANGE, THETA_RANGE, default_act
from shoestring.model.layer_plan import RopePlan
from shoestring.model.spec import (
    MOST_LAYERS,
    DynamicRope,
    Experts,
    LinearRope,
    Llama3Rope,
    LongRope,
    ModelSpec,
    RopeScaling,
    YarnRope,
)

# Tensors that hold divisors of rotary frequencies, not weights.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_FREQS, _LONG, _SHORT = ROPE_TENSORS
# Lists of one value per layer: windows (true or false). Others mean layers that differ, which the decoder has not.
_PER_LAYER = ("attention.sliding_window_pattern",)


def spec_from_metadata(
    where: str,
    arch: str,
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_tensors: Mapping[str, Tensor],
    ends: Mapping[str, Any],
) -> ModelSpec:
    """`arch`: the architecture; `shapes` of all tensors by their names in the file; `ends`: bos_id and eos_id."""
    own = {k.removeprefix(f"{arch}."): v for k, v in metadata.items() if k.startswith(f"{arch}.")}
    for key, value in own.items():
        if isinstance(value, list) and key not in _PER_LAYER:
            raise UserError(f"{where}: {arch}.{key} differs per layer ({shown(value[:4])}), which cannot be built")
    given = Fields(own, f"{where}, metadata of {arch}")
    d_model, num_heads = given.whole("embedding_length"), given.whole("attention.head_count")
    if d_model < num_heads and "attention.key_length" not in given:
        raise UserError(
            f"{where} has {num_heads} heads and a width of {d_model}, but no {arch}.attention.key_length; it is damaged"
        )
    head_dim = given.whole("attention.key_length", d_model // num_heads)
    if given.whole("attention.value_length", head_dim) != head_dim:
        raise UserError(f"{where} has values and keys of different widths, which the decoder cannot build")
    num_layers = given.whole("block_count", most=MOST_LAYERS)
    family = _family(given, where, arch)
    window, full_layers = _windows(given, family, num_layers)
    theta = _short(given.number("rope.freq_base", 10000.0, **THETA_RANGE))
    return ModelSpec(
        vocab_size=shapes["token_embd.weight"][0],
        d_model=d_model,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=given.whole("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        d_ff=given.whole("feed_forward_length"),
        max_positions=given.whole("context_length"),
        model_type=family.name,
        norm_eps=_short(given.number(_eps_key(family), **EPS_RANGE)),
        parallel_residual="parallel_residual" in family.keys and given.flag("use_parallel_residual"),
        act=default_act(family),
        rope_theta=theta,
        rope_scaling=_rope_scaling(given, where, family, theta, head_dim, rope_tensors),
        rotary_fraction=_rotary_fraction(given, where, family, head_dim),
        no_rope_layers=tuple(i for i in range(num_layers) if "no_rope_layers" in family.keys and i % 4 == 3),
        window_rope_theta=_short(given.number("rope.freq_base_swa", 10000.0, **THETA_RANGE))
        if "window_rope_theta" in family.keys
        else None,
        tied="output.weight" not in shapes,
        attn_scale=_gemma_scale(num_layers, d_model, num_heads, head_dim) if "attn_scale" in family.keys else None,
        attn_softcap=_cap(given, family, "attn_softcap") if family.gguf and family.gguf.caps_scores else None,
        logit_softcap=_cap(given, family, "logit_softcap"),
        experts=_experts(given, family, shapes),
        sliding_window=window,
        full_layers=full_layers,
        **{**family.fixed, **_parts_stored(shapes)},
        **ends,
    )


def _parts_stored(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, bool]:
    """What the tensors of the first layer say: whether q and k are normed, and which layers have biases."""
    parts = {
        "qk_norm": ("attn_q_norm.weight",),
        "qkv_bias": ("attn_q.bias", "attn_qkv.bias"),
        "out_bias": ("attn_output.bias",),
        "mlp_bias": ("ffn_down.bias", "ffn_gate.bias"),
    }
    return {field: any(f"blk.0.{name}" in shapes for name in names) for field, names in parts.items()}


def _eps_key(family: Family) -> str:
    layer_norm = family.fixed.get("norm") == "layer"
    return "attention.layer_norm_epsilon" if layer_norm else "attention.layer_norm_rms_epsilon"


def metadata_of(
    spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, int | float | bool | str], dict[str, Tensor]]:
    """Metadata (without the architecture's prefix) and rotary tensors of a spec; UserError for what cannot be said.

    `shapes`: of the tensors that will be written, by their names in the file.
    """
    family, names = family_of(spec), gguf_names(spec)
    said: dict[str, int | float | bool | str] = {
        "block_count": spec.num_layers,
        "context_length": spec.max_positions,
        "embedding_length": spec.d_model,
        "feed_forward_length": spec.d_ff,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "vocab_size": spec.vocab_size,
        _eps_key(family): spec.norm_eps,
    }
    if spec.head_dim * spec.num_heads != spec.d_model or names.says_head_dim:
        said |= {"attention.key_length": spec.head_dim, "attention.value_length": spec.head_dim}
    if spec.positions == "rope":
        said |= {"rope.freq_base": spec.rope_theta, "rope.dimension_count": spec.rotary_dim}
    if spec.sliding_window is not None:
        said["attention.sliding_window"] = spec.sliding_window
    if "parallel_residual" in family.keys:
        said["use_parallel_residual"] = spec.parallel_residual
    if spec.window_rope_theta is not None:
        said["rope.freq_base_swa"] = spec.window_rope_theta
    for field in ("attn_softcap", "logit_softcap"):
        if (cap := getattr(spec, field)) is not None and field in family.keys:
            said[family.keys[field].name] = cap
    if spec.experts is not None:
        said |= {"expert_count": spec.experts.num, "expert_used_count": spec.experts.top_k}
        if family.expert_width:
            said["expert_feed_forward_length"] = spec.experts.d_ff
        if spec.experts.shared_d_ff:
            said["expert_shared_feed_forward_length"] = spec.experts.shared_d_ff
    scaling, tensors = _written_scaling(spec)
    said |= scaling
    _check_said(spec, names.architecture, said, shapes, tensors)
    return said, tensors


def _check_said(
    spec: ModelSpec,
    arch: str,
    said: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, Tensor],
) -> None:
    read = spec_from_metadata(
        "the file",
        arch,
        {f"{arch}.{k}": v for k, v in said.items()},
        shapes,
        tensors,
        {"bos_id": spec.bos_id, "eos_id": spec.eos_id, "extra_eos_ids": spec.extra_eos_ids},
    )
    if isinstance(spec.rope_scaling, DynamicRope):  # changes nothing within max_positions
        spec = dataclasses.replace(spec, rope_scaling=None)
    theirs, ours = dataclasses.asdict(read), dataclasses.asdict(spec)
    # A tied head may have to be stored twice. A Mistral without a window is a Llama.
    free = {"tied", "model_type"}
    differ = [k for k in ours if k not in free and not _same(ours[k], theirs[k])]
    if differ:
        name = differ[0]
        raise UserError(
            f"llama.cpp computes a {arch} model with {name}={shown(theirs[name])}, this one has "
            f"{shown(ours[name])}: it cannot be written as GGUF; use a Hugging Face folder (--as dense)"
        )


def _same(ours: Any, theirs: Any) -> bool:
    """Equal as fp32, in which the file stores numbers."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(_same(ours[k], theirs[k]) for k in ours)
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(_same(a, b) for a, b in zip(ours, theirs, strict=True))
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=1e-6)
    return bool(ours == theirs)


def _short(value: float) -> float:
    """Stored as fp32; 9.999999747378752e-06 was meant as 1e-05 and is written back to config.json as that."""
    return float(f"{value:.7g}")


def _cap(given: Fields, family: Family, field: str) -> float | None:
    if field not in family.keys:
        return None
    key = family.keys[field]
    return _short(given.number(key.name, key.missing or 0.0, least=0.0, most=1e6)) or None


def _family(given: Fields, where: str, arch: str) -> Family:
    """Several may be one architecture: Mixtral is a Llama with experts, Mistral one with windows."""
    rows = [f for f in FAMILIES.values() if f.gguf is not None and f.gguf.architecture == arch]
    num = given.whole("expert_count", 0, least=0)
    if num and not any(f.experts for f in rows):
        raise UserError(f"{where} holds a mixture of {num} experts, which no {arch} model has")
    alike = [f for f in rows if bool(f.experts) == bool(num)] or rows
    windowed = bool(given.get("attention.sliding_window")) and len(alike) > 1
    return next((f for f in alike if windowed and f.windows is not None), alike[0])


def _windows(given: Fields, family: Family, num_layers: int) -> tuple[int | None, tuple[int, ...]]:
    """(sliding window, layers without it). llama.cpp reads a window only for some architectures."""
    names, windows = family.gguf, family.windows
    if names is None or not names.windows:
        return None, ()
    window = given.whole("attention.sliding_window", names.window, least=0, most=MOST_WINDOW)
    if not window:
        return None, ()
    if windows is None or not windows.every:
        return window, ()
    pattern = given.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != num_layers or any(not isinstance(p, bool) for p in pattern):
            raise UserError(f"{given.where}: sliding_window_pattern must be true or false for each layer")
        return window, tuple(i for i, windowed in enumerate(pattern) if not windowed)
    every = given.whole("attention.sliding_window_pattern", windows.every)
    return window, tuple(range(every - 1, num_layers, every))


def _experts(given: Fields, family: Family, shapes: Mapping[str, tuple[int, ...]]) -> Experts | None:
    if not family.experts or family.gguf is None:
        return None
    used, d_ff = given.whole("expert_used_count"), given.whole("feed_forward_length")
    if family.expert_width:
        d_ff = given.whole("expert_feed_forward_length", d_ff // used)
    stored = shapes.get("blk.0.ffn_gate_shexp.weight")
    shared = given.whole("expert_shared_feed_forward_length", stored[0] if stored else 0, least=0)
    shared = shared if "shared_d_ff" in family.experts else 0
    return Experts(given.whole("expert_count"), used, d_ff, family.gguf.renormalized, shared)


def _rotary_fraction(given: Fields, where: str, family: Family, head_dim: int) -> float:
    rotary = given.whole("rope.dimension_count", head_dim)
    if rotary != head_dim and "rotary_fraction" not in family.keys:
        raise UserError(f"{where} rotates {rotary} of {head_dim} dims per head; only whole heads are supported")
    return rotary / head_dim


def _gemma_scale(num_layers: int, d_model: int, num_heads: int, head_dim: int) -> float:
    """llama.cpp knows the 27-billion models, which scale otherwise, by their number of layers."""
    return (d_model // num_heads if num_layers in (46, 62) else head_dim) ** -0.5


# -- rotary scaling ------------------------------------------------------------------------------------------


def _rope_scaling(
    given: Fields, where: str, family: Family, theta: float, head_dim: int, tensors: Mapping[str, Tensor]
) -> RopeScaling | None:
    if _FREQS in tensors:
        return _llama3(where, theta, head_dim, tensors[_FREQS])
    if _LONG in tensors or _SHORT in tensors:
        if not (_LONG in tensors and _SHORT in tensors):
            raise UserError(f"{where} has only one of the tensors {_LONG} and {_SHORT}; get it again")
        long, short = (tuple(map(_short, tensors[n].tolist())) for n in (_LONG, _SHORT))
        factor = _short(given.number("rope.scaling.attn_factor", 1.0, **SCALING_RANGE))
        return LongRope(short, long, given.whole("rope.scaling.original_context_length"), factor)
    kind = given.text("rope.scaling.type", "linear")
    # Files from before there were types have the other key.
    factor = given.number("rope.scaling.factor", given.get("rope.scale_linear", 1.0), **SCALING_RANGE)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return LinearRope(_short(factor))
    if kind == "yarn" and "window_rope_theta" not in family.keys:
        magnitude = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
        return YarnRope(
            _short(factor),
            given.whole("rope.scaling.original_context_length"),
            _short(magnitude * given.number("rope.scaling.attn_factor", 1.0, **SCALING_RANGE)),
            _short(given.number("rope.scaling.yarn_beta_fast", 32.0, **SCALING_RANGE)),
            _short(given.number("rope.scaling.yarn_beta_slow", 1.0, **SCALING_RANGE)),
        )
    raise UserError(f"{where} scales rotary positions by {shown(kind)}; none, linear, yarn and Llama-3's can be read")


def _llama3(where: str, theta: float, head_dim: int, factors: Tensor) -> Llama3Rope | None:
    """llama.cpp stores Llama-3 scaling as one divisor per frequency; find the parameters that give these divisors."""
    if bool((factors == 1).all()):
        return None
    plain = rope_frequencies(RopePlan(theta), head_dim)
    if factors.shape == plain.shape:
        guess = Llama3Rope(_short(float(factors.max())), 1.0, 4.0, 8192)
        scaled = rope_frequencies(RopePlan(theta, guess), head_dim)
        if torch.allclose(plain / scaled, factors, rtol=1e-4):
            return guess
    raise UserError(
        f"{where} stretches its rotary frequencies ({_FREQS}) in a way that is not Llama-3's; "
        "it would compute something else here, so it is refused"
    )


def _written_scaling(spec: ModelSpec) -> tuple[dict[str, int | float | bool | str], dict[str, Tensor]]:
    match spec.rope_scaling:
        case LinearRope(factor):
            return {"rope.scaling.type": "linear", "rope.scaling.factor": factor}, {}
        case YarnRope() as yarn:
            magnitude = 1.0 if yarn.factor <= 1 else 0.1 * math.log(yarn.factor) + 1.0
            said: dict[str, int | float | bool | str] = {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": yarn.factor,
                "rope.scaling.original_context_length": yarn.original_positions,
                "rope.scaling.yarn_beta_fast": yarn.beta_fast,
                "rope.scaling.yarn_beta_slow": yarn.beta_slow,
            }
            if not math.isclose(magnitude, yarn.attention_factor, rel_tol=1e-6):
                said["rope.scaling.attn_factor"] = yarn.attention_factor / magnitude
            return said, {}
        case LongRope() as rope:
            return {
                "rope.scaling.attn_factor": rope.attention_factor,
                "rope.scaling.original_context_length": rope.original_positions,
            }, {_LONG: torch.tensor(rope.long), _SHORT: torch.tensor(rope.short)}
        case Llama3Rope() as rope:
            plain = rope_frequencies(RopePlan(spec.rope_theta), spec.head_dim)
            return {}, {_FREQS: plain / rope_frequencies(RopePlan(spec.rope_theta, rope), spec.head_dim)}
        case None | DynamicRope():
            return {}, {}
