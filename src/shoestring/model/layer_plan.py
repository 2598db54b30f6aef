"""The plan of a decoder: what it computes, described once for every executor.

`plan_decoder(spec)` is the only place where a ModelSpec becomes arithmetic:

    x = scale embed(token), plus positions(p) where positions are learned
    for every layer, for every sublayer in its order:   x = x + post_norm(sublayer(norm(x)))
    logits = softcap(head(final_norm(x)))

    attn   q, k, v = x W + b; q and k normed; q and k rotated by position (RoPE), or a part of each head;
           o(softmax(softcap(scale q k^T)) v), causal, over at most `window` positions
    mlp    down(act(gate(x)) * up(x)) where gated, else down(act(up(x)));
           with experts the sum of the `top_k` that a router chooses, each weighed by its softmax

A norm that is absent is the identity; `softcap(z)` is cap * tanh(z / cap). In a parallel layer both sublayers read the
layer's input.

`Decoder.forward` (transformer.py) computes every plan. The fused step (serve/engine/fused_decoder.py), the CPU
step (serve/engine/cpu_decode.py) and tensor parallelism (parallel.py) each declare a `Support`: the values of every
field that they compute. Other values are refused with a reason, and the engine runs the model's own forward. So a new
architecture is a field here with its value in `plan_decoder`, its names in families.py and its arithmetic in
transformer.py; executors that do not declare the field refuse it, and tests/model/test_layer_plan.py fails until the
field's values are listed there.

Not part of a plan: weights, their names and Formats, the vocabulary, and whether the head is tied.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Literal

from shoestring.model.skip import KINDS, Kind
from shoestring.model.spec import GATED, Experts, LongRope, ModelSpec, RopeScaling, YarnRope


@dataclass(frozen=True)
class NormPlan:
    kind: Literal["rms", "rms_offset", "layer"]  # rms_offset: x / rms(x) * (1 + weight); layer: with a bias
    eps: float


@dataclass(frozen=True)
class RopePlan:
    theta: float
    scaling: RopeScaling | None = None
    dim: int | None = None  # dims of a head that are rotated, from the first; None: all

    @property
    def table_scale(self) -> float:
        """What cosine and sine are multiplied by."""
        return self.scaling.attention_factor if isinstance(self.scaling, YarnRope | LongRope) else 1.0


@dataclass(frozen=True)
class AttentionPlan:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: NormPlan | None = None
    qk_norm_over: Literal["head", "width"] = "head"  # each head by itself, or all heads together
    rope: RopePlan | None = None
    window: int | None = None  # positions that a row sees, itself included; None: all before it
    scale: float | None = None  # of the scores; None: 1 / sqrt(head_dim)
    softcap: float | None = None


@dataclass(frozen=True)
class MlpPlan:
    d_ff: int
    act: Literal["swiglu", "geglu", "geglu_tanh", "gelu_tanh", "gelu", "relu2"]
    bias: bool = False

    @property
    def gated(self) -> bool:
        return self.act in GATED


@dataclass(frozen=True)
class ExpertsPlan:
    """What stands in place of one feed-forward layer; `LayerPlan.mlp` describes each expert."""

    num: int
    top_k: int
    renormalize: bool = True
    shared_d_ff: int = 0  # of an expert for every row, weighed by a sigmoid gate; 0: none


@dataclass(frozen=True)
class LayerPlan:
    d_model: int
    attn_norm: NormPlan | None
    attn: AttentionPlan
    mlp_norm: NormPlan | None
    mlp: MlpPlan
    order: tuple[Kind, ...] = KINDS  # of the sublayers, each of which adds to the residual stream
    attn_post_norm: NormPlan | None = None
    mlp_post_norm: NormPlan | None = None
    parallel: bool = False
    experts: ExpertsPlan | None = None

    def __post_init__(self) -> None:
        assert sorted(self.order) == sorted(KINDS)


@dataclass(frozen=True)
class DecoderPlan:
    layers: tuple[LayerPlan, ...]
    final_norm: NormPlan
    learned_positions: bool = False
    embed_scale: float | None = None
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        # The KV cache has one shape for all layers.
        shapes = {(p.d_model, p.attn.num_heads, p.attn.num_kv_heads, p.attn.head_dim) for p in self.layers}
        assert len(shapes) == 1


def plan_decoder(spec: ModelSpec) -> DecoderPlan:
    made: dict[tuple[object, ...], LayerPlan] = {}

    def plan_layer(layer: int) -> LayerPlan:
        key = (spec.window(layer), layer in spec.no_rope_layers, spec.experts_of(layer))
        return made.setdefault(key, _plan_layer(spec, layer))

    return DecoderPlan(
        tuple(plan_layer(layer) for layer in range(spec.num_layers)),
        NormPlan(spec.norm, spec.norm_eps),
        learned_positions=spec.positions == "learned",
        embed_scale=spec.d_model**0.5 if spec.scaled_embeddings else None,
        logit_softcap=spec.logit_softcap,
    )


def _plan_layer(spec: ModelSpec, layer: int) -> LayerPlan:
    norm, chosen = NormPlan(spec.norm, spec.norm_eps), spec.experts_of(layer)
    before = norm if spec.norm_placement in ("pre", "both") else None
    after = norm if spec.norm_placement in ("post", "both") else None
    return LayerPlan(
        spec.d_model,
        before,
        _plan_attention(spec, layer),
        before,
        MlpPlan(spec.d_ff if chosen is None else chosen.d_ff, spec.act, spec.mlp_bias),
        attn_post_norm=after,
        mlp_post_norm=after,
        parallel=spec.parallel_residual,
        experts=None if chosen is None else _plan_experts(chosen),
    )


def _plan_experts(experts: Experts) -> ExpertsPlan:
    return ExpertsPlan(experts.num, experts.top_k, experts.renormalize, experts.shared_d_ff)


def _plan_attention(spec: ModelSpec, layer: int) -> AttentionPlan:
    return AttentionPlan(
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.qkv_bias,
        spec.out_bias,
        qk_norm=NormPlan("rms" if spec.norm == "layer" else spec.norm, spec.norm_eps) if spec.qk_norm else None,
        qk_norm_over=spec.qk_norm_over,
        rope=_plan_rope(spec, layer),
        window=spec.window(layer),
        scale=spec.attn_scale,
        softcap=spec.attn_softcap,
    )


def _plan_rope(spec: ModelSpec, layer: int) -> RopePlan | None:
    if spec.positions != "rope" or layer in spec.no_rope_layers:
        return None
    dim = None if spec.rotary_dim == spec.head_dim else spec.rotary_dim
    if spec.window_rope_theta is not None and spec.window(layer) is not None:
        return RopePlan(spec.window_rope_theta, None, dim)
    return RopePlan(spec.rope_theta, spec.rope_scaling, dim)


# -- what an executor computes ------------------------------------------------------------------------------


PARTS = (DecoderPlan, LayerPlan, NormPlan, AttentionPlan, RopePlan, MlpPlan, ExpertsPlan)


@dataclass(frozen=True)
class Support:
    """The plans that an executor computes, by the names of `features`."""

    any_value: str  # fields whose every value is computed, separated by spaces
    only: Mapping[str, Container[object]]  # fields of which these values are

    def missing(self, plan: DecoderPlan) -> str | None:
        """The first feature of the plan that is not computed; None: all are."""
        free = self.any_value.split()
        for name, value in features(plan):
            if name not in free and value not in self.only.get(name, ()):
                return f"{name}={value!r}"
        return None


def features(plan: DecoderPlan) -> Iterator[tuple[str, object]]:
    """Every field of the plan and its parts by dotted name, ("attn.rope.theta", 10000.0). An absent part is its name
    with None; fields of a layer have no prefix."""
    return _features(plan, "")


def _features(part: object, prefix: str) -> Iterator[tuple[str, object]]:
    for field in fields(part):  # type: ignore[arg-type]
        name, value = prefix + field.name, getattr(part, field.name)
        if field.name == "layers":
            # By identity, which is cheaper than equality: layers with equal plans share the object.
            for layer in {id(layer): layer for layer in value}.values():
                yield from _features(layer, prefix)
        elif isinstance(value, PARTS):
            yield from _features(value, f"{name}.")
        else:
            yield name, value
