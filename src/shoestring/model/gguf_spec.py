"""GGUF metadata to and from a ModelSpec.

llama.cpp decides much of the arithmetic by the name of the architecture; the metadata holds the sizes and a few
switches. `spec_from_metadata` says what llama.cpp would compute; `metadata_of` writes the metadata of a spec and
proves, by reading it back, that llama.cpp would compute that spec. What it cannot express is an error.

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
from shoestring.model.gguf_names import Architecture, architecture_for
from shoestring.model.hf import EPS_RANGE, MOST_WINDOW, SCALING_RANGE, THETA_RANGE
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
_GEMMA = ("gemma2", "gemma3")
_PARTIAL = ("phi3", "gptneox")  # may rotate a part of each head
_RENORMALIZED = ("llama", "qwen3moe")  # the weights of the chosen experts are divided by their sum
_LAYER_NORM = ("gpt2", "gptneox")
# Lists of one value per layer: windows (true or false). Others mean layers that differ, which the decoder has not.
_PER_LAYER = ("attention.sliding_window_pattern",)


def spec_from_metadata(
    where: str,
    architecture: Architecture,
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_tensors: Mapping[str, Tensor],
    ends: Mapping[str, Any],
) -> ModelSpec:
    """`shapes` of all tensors by their names in the file; `ends`: bos_id and eos_id."""
    arch = architecture.name
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
    window, full_layers = _windows(given, arch, num_layers)
    experts = _experts(given, where, arch, shapes)
    rotary_fraction = _rotary_fraction(given, where, arch, head_dim)
    eps = "attention.layer_norm_epsilon" if arch in _LAYER_NORM else "attention.layer_norm_rms_epsilon"
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
        model_type=_model_type(architecture, window, experts),
        norm="layer" if arch in _LAYER_NORM else "rms_offset" if arch in _GEMMA else "rms",
        norm_eps=_short(given.number(eps, **EPS_RANGE)),
        norm_placement="both" if arch in _GEMMA else "post" if arch == "olmo2" else "pre",
        parallel_residual=arch == "gptneox" and given.flag("use_parallel_residual"),
        act={"gpt2": "gelu_tanh", "gptneox": "gelu"}.get(arch, "geglu_tanh" if arch in _GEMMA else "swiglu"),  # type: ignore[arg-type]
        positions="learned" if arch == "gpt2" else "rope",
        rope_theta=theta,
        rope_scaling=_rope_scaling(given, where, arch, theta, head_dim, rope_tensors),
        rotary_fraction=rotary_fraction,
        no_rope_layers=tuple(i for i in range(num_layers) if arch == "smollm3" and i % 4 == 3),
        window_rope_theta=_short(given.number("rope.freq_base_swa", 10000.0, **THETA_RANGE))
        if arch == "gemma3"
        else None,
        qk_norm="blk.0.attn_q_norm.weight" in shapes,
        qk_norm_over="width" if arch in ("olmo2", "olmoe") else "head",
        qkv_bias="blk.0.attn_q.bias" in shapes or "blk.0.attn_qkv.bias" in shapes,
        out_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_down.bias" in shapes or "blk.0.ffn_gate.bias" in shapes,
        tied="output.weight" not in shapes,
        attn_scale=_gemma_scale(num_layers, d_model, num_heads, head_dim) if arch in _GEMMA else None,
        attn_softcap=_cap(given, "attn_logit_softcapping", 50.0) if arch == "gemma2" else None,
        logit_softcap=_cap(given, "final_logit_softcapping", 30.0 if arch == "gemma2" else 0.0)
        if arch in _GEMMA
        else None,
        scaled_embeddings=arch in _GEMMA,
        experts=experts,
        sliding_window=window,
        full_layers=full_layers,
        **ends,
    )


def metadata_of(
    spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, int | float | bool | str], dict[str, Tensor]]:
    """Metadata (without the architecture's prefix) and rotary tensors of a spec; UserError for what cannot be said.

    `shapes`: of the tensors that will be written, by their names in the file.
    """
    architecture = architecture_for(spec)
    arch = architecture.name
    said: dict[str, int | float | bool | str] = {
        "block_count": spec.num_layers,
        "context_length": spec.max_positions,
        "embedding_length": spec.d_model,
        "feed_forward_length": spec.d_ff,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "vocab_size": spec.vocab_size,
        "attention.layer_norm_epsilon" if arch in _LAYER_NORM else "attention.layer_norm_rms_epsilon": spec.norm_eps,
    }
    if spec.head_dim * spec.num_heads != spec.d_model or arch in ("qwen3", "qwen3moe", *_GEMMA):
        said |= {"attention.key_length": spec.head_dim, "attention.value_length": spec.head_dim}
    if spec.positions == "rope":
        said |= {"rope.freq_base": spec.rope_theta, "rope.dimension_count": spec.rotary_dim}
    if spec.sliding_window is not None:
        said["attention.sliding_window"] = spec.sliding_window
    if arch == "gptneox":
        said["use_parallel_residual"] = spec.parallel_residual
    if spec.window_rope_theta is not None:
        said["rope.freq_base_swa"] = spec.window_rope_theta
    for key, cap in (("attn_logit_softcapping", spec.attn_softcap), ("final_logit_softcapping", spec.logit_softcap)):
        if cap is not None:
            said[key] = cap
    if spec.experts is not None:
        said |= {"expert_count": spec.experts.num, "expert_used_count": spec.experts.top_k}
        if arch in ("qwen2moe", "qwen3moe"):
            said["expert_feed_forward_length"] = spec.experts.d_ff
        if spec.experts.shared_d_ff:
            said["expert_shared_feed_forward_length"] = spec.experts.shared_d_ff
    scaling, tensors = _written_scaling(spec)
    said |= scaling
    _check_said(spec, architecture, said, shapes, tensors)
    return said, tensors


def _check_said(
    spec: ModelSpec,
    architecture: Architecture,
    said: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, Tensor],
) -> None:
    read = spec_from_metadata(
        "the file",
        architecture,
        {f"{architecture.name}.{k}": v for k, v in said.items()},
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
            f"llama.cpp computes a {architecture.name} model with {name}={shown(theirs[name])}, this one has "
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


def _cap(given: Fields, key: str, default: float) -> float | None:
    return _short(given.number(key, default, least=0.0, most=1e6)) or None


def _model_type(architecture: Architecture, window: int | None, experts: Experts | None) -> str:
    if architecture.name != "llama":
        return architecture.model_types[0]
    return "mixtral" if experts else "mistral" if window else "llama"


def _windows(given: Fields, arch: str, num_layers: int) -> tuple[int | None, tuple[int, ...]]:
    """(sliding window, layers without it). llama.cpp reads a window only for some architectures."""
    if arch not in ("llama", "phi3", *_GEMMA):
        return None, ()
    window = given.whole("attention.sliding_window", 4096 if arch == "gemma2" else None, least=0, most=MOST_WINDOW)
    if not window:
        return None, ()
    if arch not in _GEMMA:
        return window, ()
    pattern = given.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != num_layers or any(not isinstance(p, bool) for p in pattern):
            raise UserError(f"{given.where}: sliding_window_pattern must be true or false for each layer")
        return window, tuple(i for i, windowed in enumerate(pattern) if not windowed)
    every = given.whole("attention.sliding_window_pattern", 2 if arch == "gemma2" else 6)
    return window, tuple(range(every - 1, num_layers, every))


def _experts(given: Fields, where: str, arch: str, shapes: Mapping[str, tuple[int, ...]]) -> Experts | None:
    num = given.whole("expert_count", 0, least=0)
    if arch not in ("llama", "qwen2moe", "qwen3moe", "olmoe"):
        if num:
            raise UserError(f"{where} holds a mixture of {num} experts, which no {arch} model has")
        return None
    if not num and arch == "llama":
        return None
    used, d_ff = given.whole("expert_used_count"), given.whole("feed_forward_length")
    if arch in ("qwen2moe", "qwen3moe"):
        d_ff = given.whole("expert_feed_forward_length", d_ff // used)
    stored = shapes.get("blk.0.ffn_gate_shexp.weight")
    shared = given.whole("expert_shared_feed_forward_length", stored[0] if stored else 0, least=0)
    return Experts(given.whole("expert_count"), used, d_ff, arch in _RENORMALIZED, shared if arch == "qwen2moe" else 0)


def _rotary_fraction(given: Fields, where: str, arch: str, head_dim: int) -> float:
    rotary = given.whole("rope.dimension_count", head_dim)
    if rotary != head_dim and arch not in _PARTIAL:
        raise UserError(f"{where} rotates {rotary} of {head_dim} dims per head; only whole heads are supported")
    return rotary / head_dim


def _gemma_scale(num_layers: int, d_model: int, num_heads: int, head_dim: int) -> float:
    """llama.cpp knows the 27-billion models, which scale otherwise, by their number of layers."""
    return (d_model // num_heads if num_layers in (46, 62) else head_dim) ** -0.5


# -- rotary scaling ------------------------------------------------------------------------------------------


def _rope_scaling(
    given: Fields, where: str, arch: str, theta: float, head_dim: int, tensors: Mapping[str, Tensor]
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
    if kind == "yarn" and arch != "gemma3":
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
