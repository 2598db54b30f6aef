"""Decoder plans that differ in every field: each value alone, in one layer only, and all kinds of combinations."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from shoestring.model import Decoder, ModelSpec
from shoestring.model.layer_plan import DecoderPlan, ExpertsPlan, NormPlan, RopePlan, plan_decoder
from shoestring.model.spec import LinearRope, Llama3Rope, LongRope, YarnRope

NORMS = ("attn_norm", "mlp_norm", "attn_post_norm", "mlp_post_norm")
# Parts that the base does not have, as they are where one of their fields is tried.
ABSENT: dict[str, Any] = {
    **dict.fromkeys(("attn.qk_norm", "attn_post_norm", "mlp_post_norm"), NormPlan("rms", 1e-5)),
    "experts": ExpertsPlan(4, 2),
}
SPEC = ModelSpec(40, 32, 2, 4, 2, 16, 64, 32)
BASE = plan_decoder(SPEC)
# Values of every field by its name in `features`, other than the base's. A new field fails a test until it is here.
VALUES: dict[str, tuple[Any, ...]] = {
    "learned_positions": (True,),
    "embed_scale": (3.0,),
    "logit_softcap": (2.0,),
    "final_norm.kind": ("layer", "rms_offset"),
    "final_norm.eps": (0.3,),
    "d_model": (64,),
    "order": (("mlp", "attn"),),
    "parallel": (True,),
    **dict.fromkeys(("attn_norm", "mlp_norm"), (None,)),
    **{name: (NormPlan("rms", 1e-5),) for name in ("attn_post_norm", "mlp_post_norm")},
    **{f"{norm}.kind": ("layer", "rms_offset") for norm in NORMS},
    **{f"{norm}.eps": (0.3,) for norm in NORMS},
    "experts": (ExpertsPlan(4, 2),),
    "experts.num": (5,),
    "experts.top_k": (1, 4),
    "experts.renormalize": (False,),
    "experts.shared_d_ff": (32,),
    "attn.num_heads": (2,),
    "attn.num_kv_heads": (1, 4),
    "attn.head_dim": (24,),
    "attn.qkv_bias": (True,),
    "attn.out_bias": (True,),
    "attn.qk_norm": (NormPlan("rms", 1e-5),),
    "attn.qk_norm.kind": ("layer", "rms_offset"),
    "attn.qk_norm.eps": (0.3,),
    "attn.qk_norm_over": ("width",),
    "attn.rope": (None,),
    "attn.rope.theta": (20.0,),
    "attn.rope.scaling": (
        Llama3Rope(8.0, 1.0, 4.0, 8),
        LinearRope(4.0),
        YarnRope(4.0, 16, 1.1),
        LongRope((1.0, 1.5) * 4, (2.0, 3.0) * 4, 24, 1.2),
    ),
    "attn.rope.dim": (8,),
    "attn.window": (3,),
    "attn.scale": (0.8,),
    "attn.softcap": (0.5,),
    "mlp.d_ff": (96,),
    "mlp.act": ("geglu", "geglu_tanh", "gelu", "gelu_tanh"),
    "mlp.bias": (True,),
}
OF_THE_DECODER = ("learned_positions", "final_norm", "embed_scale", "logit_softcap")
# One for all layers: the KV cache and the residual stream have one shape.
SHAPES = ("d_model", "attn.num_heads", "attn.num_kv_heads", "attn.head_dim")


def changed(plan: DecoderPlan, name: str, value: Any, layer: int | None = None) -> DecoderPlan:
    """The plan with another value of one field, in one layer or in all."""
    if name.startswith(OF_THE_DECODER):
        return _set(plan, name.split("."), value)
    layers = [p if layer not in (None, i) else _set(p, name.split("."), value) for i, p in enumerate(plan.layers)]
    return replace(plan, layers=tuple(layers))


def base_of(name: str) -> DecoderPlan:
    """A plan in which the field shows."""
    part = "attn.qk_norm" if name == "attn.qk_norm_over" else name.rpartition(".")[0]
    return changed(BASE, part, ABSENT[part]) if part in ABSENT else BASE


def _set(part: Any, path: list[str], value: Any) -> Any:
    if len(path) == 1:
        return replace(part, **{path[0]: value})
    held = getattr(part, path[0])
    if held is None:  # a field of a part that is absent
        held = {"rope": RopePlan(10000.0), "experts": ABSENT["experts"]}.get(path[0], NormPlan("rms", 1e-5))
    return replace(part, **{path[0]: _set(held, path[1:], value)})


def single_changes() -> dict[str, DecoderPlan]:
    """Each value in all layers and, where it may, in the second only."""
    plans = {"base": BASE}
    for name, values in VALUES.items():
        for value in values:
            label, base = f"{name}={type(value).__name__ if dataclasses.is_dataclass(value) else value}", base_of(name)
            plans[label] = changed(base, name, value)
            if not name.startswith(OF_THE_DECODER) and name not in SHAPES:
                plans[f"{label} in one layer"] = changed(base, name, value, layer=1)
    return plans


def in_the_suite(plans: dict[str, DecoderPlan]) -> dict[str, DecoderPlan]:
    """Of a value in all layers and in one, the latter: an executor that reads the first layer alone is seen, too."""
    return {name: plan for name, plan in plans.items() if f"{name} in one layer" not in plans}


def combinations(num: int, seed: int = 0) -> Iterator[DecoderPlan]:
    """Plans in which any field may have any value, in any layer."""
    rng = random.Random(seed)
    for _ in range(num):
        plan = BASE
        for name in rng.sample(list(VALUES), rng.randint(2, 8)):
            whole = name in SHAPES or name.startswith(OF_THE_DECODER)
            if "num" not in name:  # numbers of heads would have to divide: single changes have them
                plan = changed(plan, name, rng.choice(VALUES[name]), None if whole else rng.choice([None, 0, 1]))
        yield plan


def decoder(plan: DecoderPlan, dtype: torch.dtype = torch.float64) -> Decoder:
    """A random model with that plan; wide weights, so that every feature shows in the logits."""
    layer = plan.layers[0]
    sizes = {f.name: getattr(layer.attn, f.name) for f in dataclasses.fields(layer.attn) if f.type == "int"}
    spec = replace(SPEC, positions="learned" if plan.learned_positions else "rope", d_model=layer.d_model, **sizes)
    torch.manual_seed(0)
    model = Decoder(spec, plan).to(dtype)
    model.compute_dtype = dtype
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn_like(param) * 0.2 + (param.ndim == 1))
    return model.eval()
