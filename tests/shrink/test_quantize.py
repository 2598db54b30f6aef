"""Whole models: AWQ's folding, what pack keeps, reports, bad input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from refusals import refused
from shoestring.errors import UserError
from shoestring.formats import FormatLinear, convert, formats_of, pack, parse_format
from shoestring.model import Decoder, ModelSpec, load_model, save_model
from shoestring.shrink.awq import Awq, best_scale, every, fold_scale
from shoestring.shrink.block_files import BlockFiles
from shoestring.shrink.calibrate import Calibration, block_linears, walk
from shoestring.shrink.quantize import METHODS, BlockProgress, Method, QuantizeReport, Rtn, plan, quantize, usual_inputs
from tiny import GPT2, QWEN2, loud_model, tokens

TWO_LAYERS = replace(QWEN2, num_layers=2)


def shrunk(label: str, method: Method, spec: ModelSpec = QWEN2) -> tuple[Decoder, QuantizeReport]:
    model = loud_model(spec)
    steps = walk(model, tokens(), Calibration(inputs=usual_inputs(method)))
    return model, quantize(model, [("*", parse_format(label))], steps, method)


def logits(model: Decoder) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens())


# -- what is stored ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("label", "name"),
    [("nf3:s2:g64", name) for name in METHODS]
    + [(label, name) for label in ("int3:g32", "nf2:s1:g0") for name in ("rtn", "gptq+clip+cd", "awq")],
)
@pytest.mark.few(8)
def test_pack_save_and_load_keep_every_bit_of_the_choice(name: str, label: str, tmp_path: Path) -> None:
    chosen: dict[str, torch.Tensor] = {}

    class Spy:
        name = "spy"

        def __init__(self) -> None:
            self.method = METHODS[name]

        def choose(self, layer, w, statistics, format, state):  # type: ignore[no-untyped-def]
            choice = self.method.choose(layer, w, statistics, format, state)
            chosen[layer] = choice.weight.clone()
            return choice

    model = loud_model(TWO_LAYERS)
    steps = walk(model, tokens(), Calibration(inputs=usual_inputs(METHODS[name])))
    quantize(model, [("*", parse_format(label))], steps, Spy())
    assert len(chosen) == 2 * 7
    before = logits(model)
    pack(model)
    for layer, weight in chosen.items():
        assert torch.equal(model.get_submodule(layer).effective_weight(torch.float32), weight)
    assert torch.equal(logits(model), before)
    # Packed, a chosen grid is an ordinary one: no trace of how it came about.
    assert {f.label for f in formats_of(model).values()} == {parse_format(label).label}
    save_model(tmp_path / "packed", model)
    again = load_model(tmp_path / "packed").model
    assert torch.equal(logits(again), before)
    for layer, weight in chosen.items():
        assert torch.equal(again.get_submodule(layer).effective_weight(torch.float32), weight)


def test_bfloat16_weights_pack_to_the_same_choice() -> None:
    model = loud_model().to(torch.bfloat16)
    model.compute_dtype = torch.bfloat16
    report = quantize(model, [("*", parse_format("int4:g32"))], walk(model, tokens(2, 8)), METHODS["gptq"])
    assert max(e.output_error or 0 for e in report.layers) < 0.1
    before = {n: m.effective_weight(torch.bfloat16) for n, m in model.named_modules() if isinstance(m, FormatLinear)}
    pack(model, dtype=torch.bfloat16)
    for name, weight in before.items():
        assert torch.equal(model.get_submodule(name).effective_weight(torch.bfloat16), weight)


def test_rounding_here_is_rounding_there() -> None:
    """Method rtn is `convert` + `pack`, bit for bit."""
    ours, _ = shrunk("nf3:s2:g64", Rtn())
    plain = loud_model()
    convert(plain, [("*", parse_format("nf3:s2:g64"))])
    assert torch.equal(logits(ours), logits(plain))


# -- quality -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("label", ["int3:g32", "nf3:s2:g64"])
def test_every_method_moves_the_outputs_less_than_rounding(label: str) -> None:
    exact = logits(loud_model())
    errors, layers = {}, {}
    for name in ("rtn", "clip", "gptq", "gptq+clip", "awq"):
        model, report = shrunk(label, METHODS[name])
        errors[name] = float((logits(model) - exact).square().mean())
        layers[name] = sum(e.output_error or 0 for e in report.layers) / len(report.layers)
    for name in ("clip", "gptq", "gptq+clip", "awq"):
        assert layers[name] < layers["rtn"], (name, layers)
    assert errors["gptq"] < 0.7 * errors["rtn"] and errors["awq"] < errors["rtn"], errors


def test_the_report_has_every_layer_and_its_errors() -> None:
    model, report = shrunk("int3:g32", METHODS["gptq"])
    assert [e.name for e in report.layers if e.name.startswith("blocks.0.attn.")] == [
        f"blocks.0.attn.{n}" for n in "qkvo"
    ]
    assert len(report.layers) == 21 and report.converted.bits_per_weight == pytest.approx(3.75)
    original = loud_model()
    for e in report.layers[:7]:
        old, new = (m.get_submodule(e.name).weight.detach() for m in (original, model))
        assert e.weight_error == pytest.approx(float((new - old).square().sum() / old.square().sum()), rel=1e-3)
        assert e.output_error is not None and 0 < e.output_error < e.weight_error
    data = report.to_json()
    assert data["method"] == "gptq" and len(data["layers"]) == 21 and data["layers"][0]["format"] == "int3:g32"


# -- AWQ -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "spec", [QWEN2, GPT2, replace(QWEN2, act="geglu")], ids=["llama with grouped heads", "gpt2", "geglu"]
)
def test_folding_leaves_the_model_as_it_was(spec: ModelSpec) -> None:
    model = loud_model(spec)
    before = logits(model)
    gen = torch.Generator().manual_seed(5)
    num_folds = 0
    for block in model.blocks:
        for fold in model.input_sources(block):
            width = block_linears(block)[fold.readers[0]].in_features
            s = fold.expand(torch.exp(torch.randn(width // fold.repeat, generator=gen)))
            assert fold.reduce(s) == pytest.approx(s.view(-1, fold.repeat, fold.span)[:, 0].flatten())
            fold_scale(block_linears(block), fold, s)
            num_folds += 1
    assert num_folds == len(model.blocks) * (4 if spec.gated else 3)
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)
    moved = [not torch.equal(p, q) for p, q in zip(model.parameters(), loud_model(spec).parameters(), strict=True)]
    assert sum(moved) >= 7 * len(model.blocks)


def test_scaled_statistics_are_those_of_the_folded_model() -> None:
    model = loud_model()
    step = next(iter(walk(model, tokens())))
    block, format = model.blocks[0], parse_format("int2:g32")
    formats = dict.fromkeys(block_linears(block), format)
    now = Awq(ratios=4).scale_inputs(block, model.input_sources(block), step.statistics, formats)  # type: ignore[arg-type]
    assert now["attn.q"] is not step.statistics["attn.q"]
    seen = next(iter(walk(model, tokens()))).statistics
    for name in formats:
        torch.testing.assert_close(now[name].hessian, seen[name].hessian, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(now[name].magnitude, seen[name].magnitude, rtol=1e-3, atol=1e-3)


def test_the_search_may_look_at_some_rows_only() -> None:
    w = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(every(w, 256), w)
    some = every(w, 25)
    assert some.shape == (25, 8) and torch.equal(some[1], w[4] * 2)  # 4 rows stand for one: squares times 4


def test_no_scaling_where_none_helps() -> None:
    model = loud_model()
    step = next(iter(walk(model, tokens())))
    fold = model.input_sources(model.blocks[0])[0]
    stats = step.statistics["attn.q"]
    w = {"attn.q": torch.zeros(64, 64)}
    assert best_scale(w, stats, {"attn.q": parse_format("int3:g32")}, fold, 10) is None  # type: ignore[dict-item]


def test_layers_of_a_fold_may_stay_dense() -> None:
    model = loud_model()
    before = logits(model)
    rules = [("*.mlp.down", parse_format("int8:g32")), ("*.attn.k", parse_format("int8:g32"))]
    quantize(model, rules, walk(model, tokens(), Calibration(inputs="full")), METHODS["awq"])
    assert set(formats_of(model)) == {f"blocks.{i}.{n}" for i in range(3) for n in ("attn.k", "mlp.down")}
    assert (logits(model) - before).square().mean() < 1e-3 * before.var()


# -- stopping and going on -----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_a_stopped_run_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    method, rules, files = METHODS[name], [("*", parse_format("nf3:g64"))], BlockFiles(tmp_path / "blocks")
    whole, told = shrunk("nf3:g64", method)

    def go_on(progress: BlockProgress | None) -> tuple[Decoder, QuantizeReport]:
        model, calibration = loud_model(), Calibration(inputs=usual_inputs(method))
        steps = walk(model, tokens(), calibration, start=files.count())
        return model, quantize(model, rules, steps, method, progress=progress, files=files)

    def stop(done: int, total: int, error: float) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go_on(stop)
    assert files.count() == 2
    model, report = go_on(None)
    assert files.count() == 3 and report.to_json() == told.to_json()
    for (name, t), (_, other) in zip(model.state_dict().items(), whole.state_dict().items(), strict=True):
        assert torch.equal(t, other), name
    files.path(1).write_bytes(b"damaged")
    refused("block-00001", go_on, None)


# -- rules and bad input -------------------------------------------------------------------------------------
def test_mixed_formats_and_a_named_head() -> None:
    from dataclasses import replace

    spec = replace(QWEN2, tied=False)
    rules = [
        ("head", parse_format("int8:g64")),
        ("*.mlp.*", parse_format("nf3:g64")),
        ("*.attn.v", parse_format("int4:g32")),
    ]
    model = loud_model(spec)
    report = quantize(model, rules, walk(model, tokens()), METHODS["gptq"])
    by_name = {e.name: e for e in report.layers}
    assert by_name["head"].output_error is None and by_name["head"].weight_error < 1e-3
    assert by_name["blocks.2.attn.v"].format == "int4:g32" and "blocks.2.attn.q" not in by_name
    pack(model)
    assert logits(model).isfinite().all()


def test_bad_models_and_rules_are_named_before_any_work() -> None:
    def fails(model: Decoder, label: str = "int3:g32") -> str:
        before = {n: t.clone() for n, t in model.state_dict().items()}
        with pytest.raises(UserError) as caught:
            quantize(model, [("*", parse_format(label))], walk(model, tokens()), Rtn())
        assert all(torch.equal(t, before[n]) or t.isnan().any() for n, t in model.state_dict().items())
        return str(caught.value)

    assert "blocks.0.attn.q: Group 48" in fails(loud_model(), "int3:g48")
    bad = loud_model()
    with torch.no_grad():
        bad.blocks[1].mlp.up.weight[2, 2] = float("inf")  # type: ignore[union-attr]
    assert "blocks.1.mlp.up.weight holds NaN or infinite" in fails(bad)
    packed = loud_model()
    convert(packed, [("*", parse_format("int4:g32"))])
    assert "int4:g32 already" in fails(packed)
    pack(packed)
    assert "int4:g32 already" in fails(packed)
    refused("matches no linear layer", plan, loud_model(), [("*.mpl.*", parse_format("int4"))], ())
    refused("AWQ with 0 ratios", Awq, ratios=0)


def test_constant_and_zero_weights_survive_every_method() -> None:
    for method in METHODS.values():
        model = loud_model(TWO_LAYERS)
        with torch.no_grad():
            model.blocks[0].attn.v.weight.zero_()  # type: ignore[union-attr]
            model.blocks[1].mlp.up.weight.fill_(0.25)  # type: ignore[union-attr]
        steps = walk(model, tokens(2, 8), Calibration(inputs=usual_inputs(method)))
        quantize(model, [("*", parse_format("nf3:g32"))], steps, method)
        assert logits(model).isfinite().all()
        assert not model.blocks[0].attn.v.weight.any()  # type: ignore[union-attr]
