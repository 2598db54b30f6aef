"""The plan of a decoder: what it computes, described once for every executor.

`plan_decoder(spec)` is the only place where a ModelSpec becomes arithmetic:

    x = embed(token), plus positions(p) where positions are learned
    for every layer, for every sublayer in its order:   x = x + sublayer(norm(x))
    logits = head(final_norm(x))

    attn   q, k, v = x W + b; q and k normed per head; q and k rotated by position (RoPE);
           o(softmax(scale q k^T) v), causal, over at most `window` positions
    mlp    down(act(gate(x)) * up(x)) where gated, else down(act(up(x)))

`Decoder.forward` (transformer.py) computes every plan. The fused step (serve/engine/fused_decoder.py), the two CPU
steps (serve/engine/cpu_decode.py) and tensor parallelism (parallel.py) each declare a `Support`: the values of every
field that they compute. Other values are refused with a reason, and the engine runs the model's own forward. So a new
architecture is a field here with its value in `plan_decoder`, its names in hf_names.py and its arithmetic in
transformer.py; executors that do not declare the field refuse it, and tests/model/test_layer_plan.py fails until the
field's values are listed there.

Not part of a plan: weights, their names and Formats, the vocabulary, and whether the head is tied.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Literal

from shoestring.model.skip import KINDS, Kind
from shoestring.model.spec import GATED, ModelSpec, RopeScaling


@dataclass(frozen=True)
class NormPlan:
    kind: Literal["rms", "layer"]  # layer: with a bias
    eps: float


@dataclass(frozen=True)
class RopePlan:
    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class AttentionPlan:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: NormPlan | None = None
    rope: RopePlan | None = None
    window: int | None = None  # positions that a row sees, itself included; None: all before it
    scale: float | None = None  # of the scores; None: 1 / sqrt(head_dim)


@dataclass(frozen=True)
class MlpPlan:
    d_ff: int
    act: Literal["swiglu", "geglu", "geglu_tanh", "gelu_tanh", "gelu"]
    bias: bool = False

    @property
    def gated(self) -> bool:
        return self.act in GATED


@dataclass(frozen=True)
class LayerPlan:
    d_model: int
    attn_norm: NormPlan
    attn: AttentionPlan
    mlp_norm: NormPlan
    mlp: MlpPlan
    order: tuple[Kind, ...] = KINDS  # of the sublayers, each of which adds to the residual stream

    def __post_init__(self) -> None:
        assert sorted(self.order) == sorted(KINDS)


@dataclass(frozen=True)
class DecoderPlan:
    layers: tuple[LayerPlan, ...]
    final_norm: NormPlan
    learned_positions: bool = False

    def __post_init__(self) -> None:
        # The KV cache has one shape for all layers.
        shapes = {(p.d_model, p.attn.num_heads, p.attn.num_kv_heads, p.attn.head_dim) for p in self.layers}
        assert len(shapes) == 1


def plan_decoder(spec: ModelSpec) -> DecoderPlan:
    norm = NormPlan(spec.norm, spec.norm_eps)
    mlp = MlpPlan(spec.d_ff, spec.act, spec.mlp_bias)
    windows = [spec.window(layer) for layer in range(spec.num_layers)]
    made = {w: LayerPlan(spec.d_model, norm, _plan_attention(spec, w), norm, mlp) for w in set(windows)}
    return DecoderPlan(tuple(made[w] for w in windows), norm, spec.positions == "learned")


def _plan_attention(spec: ModelSpec, window: int | None) -> AttentionPlan:
    return AttentionPlan(
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.qkv_bias,
        spec.out_bias,
        qk_norm=NormPlan("rms", spec.norm_eps) if spec.qk_norm else None,
        rope=RopePlan(spec.rope_theta, spec.rope_scaling) if spec.positions == "rope" else None,
        window=window,
    )


# -- what an executor computes ------------------------------------------------------------------------------


PARTS = (DecoderPlan, LayerPlan, NormPlan, AttentionPlan, RopePlan, MlpPlan)


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
