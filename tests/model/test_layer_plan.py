"""Every field of a decoder's plan is computed by the model, and computed or refused by every executor."""

from __future__ import annotations

import typing
import warnings
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest
import torch
from layer_plans import (
    BASE,
    OF_THE_DECODER,
    SPEC,
    VALUES,
    base_of,
    changed,
    combinations,
    decoder,
    in_the_suite,
    single_changes,
)
from torch import Tensor

from refusals import refused
from shoestring.formats import convert, pack, parse_format
from shoestring.formats.int8_activations import quantize_activations
from shoestring.kernels.lowbit.w4a8 import unusable as no_int8
from shoestring.kernels.runtime.triton_backend import fall_back
from shoestring.model import Decoder, ModelSpec, layer_plan, parallel
from shoestring.model.layer_plan import PARTS, DecoderPlan, LayerPlan, NormPlan, RopePlan, plan_decoder
from shoestring.serve.engine import cpu_decode, fused_decoder
from shoestring.serve.engine.block_pool import BlockPool, RowSpan
from shoestring.serve.engine.cpu_decode import CompiledDecodeStep, executor_of
from shoestring.serve.engine.fused_decoder import FusedDecoder
from shoestring.serve.engine.runner import Batch, Runner

SINGLE = single_changes()
IN_THE_SUITE = in_the_suite(SINGLE)
LAB = [pytest.param(name, marks=pytest.mark.lab) for name in SINGLE if name not in IN_THE_SUITE]
every_plan = pytest.mark.parametrize("name", [*IN_THE_SUITE, *LAB])
TOKENS = torch.randint(SPEC.vocab_size, (12,), generator=torch.Generator().manual_seed(1))
needs_int8 = pytest.mark.skipif(no_int8() is not None, reason=str(no_int8()))


def field_names(part: type = DecoderPlan, prefix: str = "") -> set[str]:
    """The names that `features` can give, from the declared types alone."""
    names: set[str] = set()
    hints = typing.get_type_hints(part, vars(layer_plan))
    for field in fields(part):
        name, kinds = prefix + field.name, typing.get_args(hints[field.name]) or (hints[field.name],)
        if field.name == "layers":
            names |= field_names(LayerPlan)
            continue
        parts = [k for k in kinds if k in PARTS]
        for kind in parts:
            names |= field_names(kind, f"{name}.")
        if not parts or type(None) in kinds:
            names.add(name)
    return names


def test_every_field_has_values_to_try() -> None:
    assert set(VALUES) == field_names()
    assert all(is_dataclass(part) for part in PARTS)
    for name, values in VALUES.items():
        assert values and all(changed(base_of(name), name, value) != base_of(name) for value in values)


@pytest.mark.parametrize("support", [fused_decoder.SUPPORT, cpu_decode.SUPPORT, parallel.SUPPORT])
def test_executors_declare_fields_that_exist(support: layer_plan.Support) -> None:
    free = support.any_value.split()
    assert len({*free, *support.only}) == len(free) + len(support.only), "declared twice"
    assert {*free, *support.only} <= field_names()


def test_a_field_that_an_executor_does_not_declare_is_refused() -> None:
    support = fused_decoder.SUPPORT
    assert support.missing(BASE) is None
    fewer = replace(support, any_value=support.any_value.replace("attn.out_bias", ""))
    assert fewer.missing(BASE) == "attn.out_bias=False"


def test_plans_follow_from_specs() -> None:
    spec = replace(SPEC, qk_norm=True, norm_eps=1e-6, sliding_window=7, full_layers=(0,), act="geglu", mlp_bias=True)
    first, second = plan_decoder(spec).layers
    assert first == replace(second, attn=replace(second.attn, window=None)) and second.attn.window == 7
    assert second.attn.qk_norm == NormPlan("rms", 1e-6) and second.attn.rope == RopePlan(10000.0)
    assert second.mlp.gated and second.mlp.bias and second.mlp.act == "geglu"
    learned = plan_decoder(ModelSpec(40, 32, 2, 4, 4, 15, 64, 32, norm="layer", act="gelu", positions="learned"))
    assert learned.learned_positions and learned.layers[0].attn.rope is None and not learned.layers[0].mlp.gated
    assert learned.final_norm.kind == "layer"


@torch.no_grad()
@pytest.mark.parametrize("name", VALUES)
def test_the_model_computes_every_field(name: str) -> None:
    """Another value is another function: of the same weights, or of other ones."""
    before = base_of(name)
    for value in VALUES[name]:
        one, other = decoder(before), decoder(changed(before, name, value))
        shapes = [{n: p.shape for n, p in model.named_parameters()} for model in (one, other)]
        if shapes[0] == shapes[1]:
            other.load_state_dict(one.state_dict())
            assert not torch.allclose(one(TOKENS[None]), other(TOKENS[None]), rtol=1e-3, atol=1e-3)


# -- executors: each computes a plan or refuses it, and then the engine runs the model's own forward ---------


def stepwise(model: Decoder, run: Runner) -> Tensor:
    """Logits of TOKENS through the engine: a prompt, two rows at once, then single rows."""
    blocks, done, logits = [3, 1, 0, 2], 0, []
    run.refresh()
    for num in (7, 2, 1, 1, 1):
        rows = TOKENS[done : done + num].tolist()
        logits.append(run.forward(Batch([RowSpan(blocks, done, num)], rows, range(num))))
        done += num
    return torch.cat(logits)


@torch.no_grad()
def check_fused(plan: DecoderPlan) -> None:
    model = decoder(plan)
    want, reason = model(TOKENS[None])[0], FusedDecoder.unsupported(plan)
    if reason is None:
        run = Runner(model, BlockPool(5, 4), graphs=True)
    else:
        refused("cannot run fused", Runner, model, BlockPool(5, 4), graphs=True)
        run = Runner(model, BlockPool(5, 4))
        run._wanted = True  # as on a GPU
        fall_back.cache_clear()
        with pytest.warns(UserWarning, match="steps are not fused for"):
            assert not run.fast
    got = stepwise(model, run)
    assert (run._fused is None) == (reason is not None)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)  # norms are fp32 in the model


@every_plan
def test_the_fused_step(name: str) -> None:
    check_fused(SINGLE[name])


def test_the_fused_step_with_odd_heads() -> None:
    plan = changed(changed(changed(BASE, "attn.rope", None), "learned_positions", True), "attn.head_dim", 15)
    assert FusedDecoder.unsupported(plan) == "attn.head_dim=15"
    check_fused(plan)


def test_the_fused_step_on_combinations() -> None:
    for plan in combinations(60):
        check_fused(plan)


@torch.no_grad()
def check_cpu(plan: DecoderPlan, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the CPU step computes the plan."""
    model = decoder(plan, torch.float32)
    convert(model, [("blocks.*", parse_format("int4:g32"))])
    pack(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # slow on this machine, maybe
        quantize_activations(model)
        want, chosen = model(TOKENS[None])[0], executor_of(model)
    # Rounding inputs to 8 bits turns last bits into a level here and there, the more the deeper.
    bound = 0.06 * float(want.abs().max())
    computed = CompiledDecodeStep.unsupported(plan) is None
    assert chosen is (CompiledDecodeStep if computed else None)
    run = Runner(model, BlockPool(5, 4))
    got = stepwise(model, run)
    assert type(run._cpu) is (CompiledDecodeStep if computed else type(None))
    torch.testing.assert_close(got, want, rtol=0, atol=bound)
    return computed


@needs_int8
@every_plan
def test_the_cpu_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_cpu(SINGLE[name], monkeypatch)


@needs_int8
def test_the_cpu_steps_on_combinations(monkeypatch: pytest.MonkeyPatch) -> None:
    for plan in combinations(60):
        check_cpu(plan, monkeypatch)
    supported = BASE
    for name in ("attn.qkv_bias", "attn.out_bias", "mlp.bias", "attn.rope.theta", "attn.rope.scaling"):
        supported = changed(supported, name, VALUES[name][0])
        assert check_cpu(supported, monkeypatch)


@pytest.mark.ranks
@pytest.mark.parametrize("which", ["suite", pytest.param("all", marks=pytest.mark.lab)])
def test_tensor_parallelism(which: str, run_ranks: Callable[..., str]) -> None:
    out = run_ranks(2, Path(__file__).with_name("ranks_layer_plan.py"), which, timeout=180)
    plans = SINGLE if which == "all" else IN_THE_SUITE
    refused = {name for name, plan in plans.items() if parallel.SUPPORT.missing(plan)}
    assert refused and out.count("refused") == len(refused) + 1  # and one key/value head is not shared by two
    assert out.count("same logits") == len(plans) - len(refused) - 1


def test_the_fields_of_the_decoder_are_known() -> None:
    assert {n for n in field_names() if n.startswith(OF_THE_DECODER)} == field_names() - field_names(LayerPlan)
