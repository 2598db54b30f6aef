"""Block-wise training: it lowers the error it minimises, keeps every bit through pack and resume, and is one path
for every format and start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from refusals import refused
from shoestring.errors import UserError
from shoestring.formats import Dense, IntAsym, convert, formats_of, pack, parse_format
from shoestring.model import Decoder, ModelSpec, load_model, save_model
from shoestring.shrink.block_files import BlockFiles
from shoestring.shrink.blockwise import BlockTargets, Blockwise, block_loss, train_block, train_blocks, walk_pairs
from shoestring.shrink.calibrate import Calibration, block_linears, walk, windows
from shoestring.shrink.quantize import METHODS, BlockProgress, QuantizeReport, quantize, usual_inputs
from tiny import GPT2, QWEN2, loud_model, tokens

QUICK = Blockwise(init="rtn", epochs=2, batch=4, held_out=0.25)
CALIB = tokens(16, 24)
OTHER = torch.randint(0, 96, (8, 24), generator=torch.Generator().manual_seed(9))


def trained(
    label: str, settings: Blockwise = QUICK, spec: ModelSpec = QWEN2, inputs: str = "quantized", at: Tensor = CALIB
) -> tuple[Decoder, QuantizeReport]:
    model = loud_model(spec)
    calibration = Calibration(inputs=inputs)  # type: ignore[arg-type]
    return model, train_blocks(model, [("*", parse_format(label))], at, settings, calibration)


def logits(model: Decoder, at: Tensor = OTHER) -> Tensor:
    with torch.no_grad():
        return model(at)


def logit_error(model: Decoder, spec: ModelSpec = QWEN2) -> float:
    return float((logits(model) - logits(loud_model(spec))).square().mean())


# -- what it is for ------------------------------------------------------------------------------------------
@pytest.mark.few(1)
@pytest.mark.parametrize("label", ["int2:g32", "nf3:s2:g64"])
def test_training_beats_the_method_it_starts_from(label: str) -> None:
    """On a text it has not seen, by the whole model's logits."""
    start = loud_model()
    method = METHODS["awq"]
    text = tokens(32, 32)
    steps = walk(start, text, Calibration(inputs=usual_inputs(method)))
    quantize(start, [("*", parse_format(label))], steps, method)
    model, report = trained(label, replace(QUICK, init="awq", epochs=4), at=text)
    assert logit_error(model) < 0.97 * logit_error(start)
    assert len(report.blocks) == 3 and len(report.layers) == 21 and report.method == "blockwise"
    assert all(b["after"] < b["before"] for b in report.blocks)
    assert report.blocks[0]["after"] < 0.85 * report.blocks[0]["before"]


@pytest.mark.parametrize("init", list(METHODS))
@pytest.mark.few(4)
def test_every_start_and_both_kinds_of_inputs(init: str) -> None:
    inputs = "full" if init in ("rtn", "gptq") else "quantized"
    model, report = trained("int3:g32", replace(QUICK, init=init, epochs=1), inputs=inputs)
    assert all(b["after"] <= b["before"] for b in report.blocks)
    assert logits(model).isfinite().all()


def test_other_architectures_and_losses() -> None:
    model, report = trained("int3:g32", replace(QUICK, loss="square"), GPT2)
    assert all(b["after"] < b["before"] for b in report.blocks)
    plain = loud_model(GPT2)
    quantize(plain, [("*", parse_format("int3:g32"))], walk(plain, CALIB), METHODS["rtn"])
    assert logit_error(model, GPT2) < logit_error(plain, GPT2)


def test_a_learned_clip_leaves_weights_and_norms() -> None:
    settings = replace(QUICK, train="grid", init="clip", epochs=4, lr_scale=0.02)
    model, report = trained("int2:g32", settings)
    original = loud_model()
    assert all(b["after"] <= b["before"] for b in report.blocks)
    assert any(b["after"] < 0.99 * b["before"] for b in report.blocks)
    for name, layer in ((n, m) for i in range(3) for n, m in block_linears(model.blocks[i]).items()):
        assert layer.format.label == "int2:g32:fixed", name
    for mine, theirs in zip(model.blocks, original.blocks, strict=True):
        assert torch.equal(mine.attn_norm.weight, theirs.attn_norm.weight)  # type: ignore[union-attr]
        w, q = theirs.mlp.up.weight, mine.mlp.up  # type: ignore[union-attr]
        again = q.format.fake(w.detach(), q.format_state())  # type: ignore[union-attr]
        # The same weights, rounded on another grid: nothing else moved.
        assert torch.equal(again, q.weight)  # type: ignore[union-attr]


def test_the_loss_counts_tokens_alike() -> None:
    target = torch.ones(1, 2, 4)
    target[0, 1] *= 100  # a token with huge activations
    out = target + torch.tensor([0.1, 10.0]).view(1, 2, 1)
    assert float(block_loss(out, target, "token")) == pytest.approx(0.01, rel=1e-3)
    small, large = out.clone(), out.clone()
    small[0, 0], large[0, 1] = target[0, 0], target[0, 1]
    assert float(block_loss(small, target, "token")) == pytest.approx(0.005, rel=1e-3)
    assert float(block_loss(large, target, "square")) < 1e-3 * float(block_loss(small, target, "square"))


def test_a_block_never_ends_worse_than_it_started() -> None:
    """Learning rates that wreck it: the best state on the held-out windows is the untrained one."""
    wild = replace(QUICK, lr_weight=1.0, lr_scale=1.0, lr_zero=1.0, lr_norm=1.0)
    _, report = trained("nf3:s2:g64", wild)
    still = replace(QUICK, lr_weight=0.0, lr_scale=0.0, lr_zero=0.0, lr_norm=0.0)
    model, plain = trained("nf3:s2:g64", still)
    assert all(b["after"] <= b["before"] for b in report.blocks)
    assert report.blocks[0]["after"] == plain.blocks[0]["after"] == plain.blocks[0]["before"]
    assert logits(model).isfinite().all()


# -- what is stored ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("label", ["int2:g32", "nf3:s2:g64", "int4:sym:g32", "nf2:s1:g0"])
def test_pack_save_and_load_keep_every_bit(label: str, tmp_path: Path) -> None:
    model, _ = trained(label, replace(QUICK, epochs=1))
    before = logits(model)
    names = pack(model)
    assert len(names) == 21 and torch.equal(logits(model), before)
    save_model(tmp_path / "packed", model)
    again = load_model(tmp_path / "packed").model
    assert torch.equal(logits(again), before)
    assert {f.label for f in formats_of(again).values()} == {parse_format(label).label}


def test_what_is_stored_is_what_the_last_forward_multiplied_with() -> None:
    """The block as trained and the block as left give the same outputs, bit for bit."""
    model = loud_model()
    step = next(walk_pairs(model, CALIB, Calibration(), 0))
    block, targets = model.blocks[step.index], step.targets
    formats = dict.fromkeys(block_linears(block), parse_format("int3:g32"))
    seen: list[Tensor] = []

    class Watch(BlockTargets):
        def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
            seen.append(rows)
            return super().batch(rows)

    watch = Watch(targets.seen, targets.target, targets.args, targets.device)
    made = train_block(
        block,
        watch,
        step.statistics,
        formats,
        QUICK,
        step.index,
        sources=model.input_sources(block),  # type: ignore[arg-type]
    )
    assert [e.name for e in made.errors] == list(formats) and all(e.output_error for e in made.errors)
    held = seen[0]
    x, y = targets.batch(held)
    with torch.no_grad():
        error = float(block_loss(block(x, *targets.args), y, "token"))
    assert error == pytest.approx(made.notes["after"], rel=1e-6)
    assert set(made.grids["attn.q"]) == {"scale", "zero"}
    # Held-out windows are never trained on.
    trained_on = torch.cat([rows for rows in seen if not torch.isin(rows, held).all()])
    assert not torch.isin(trained_on, held).any() and len(trained_on.unique()) == 12


def test_half_precision_models_keep_their_dtype_and_bits() -> None:
    model = loud_model().to(torch.bfloat16)
    model.compute_dtype = torch.bfloat16
    model.blocks = model.blocks[:1]
    report = train_blocks(model, [("*", parse_format("int3:g32"))], CALIB, QUICK)
    assert report.blocks[0]["after"] < report.blocks[0]["before"]
    assert {p.dtype for n, p in model.named_parameters() if "_scale" not in n and "_zero" not in n} == {torch.bfloat16}
    before = logits(model)
    pack(model, dtype=torch.bfloat16)
    assert torch.equal(logits(model), before)


# -- stopping, spilling, seeds -------------------------------------------------------------------------------
@pytest.mark.parametrize("inputs", ["quantized", "full"])
def test_a_stopped_run_ends_with_the_same_bits(inputs: str, tmp_path: Path) -> None:
    files = BlockFiles(tmp_path / "blocks")
    whole, told = trained("nf3:g64", inputs=inputs)
    spilled = Calibration(inputs=inputs, memory_gb=0, folder=str(tmp_path))  # type: ignore[arg-type]

    def go_on(progress: BlockProgress | None) -> tuple[Decoder, QuantizeReport]:
        model, rules = loud_model(), [("*", parse_format("nf3:g64"))]
        return model, train_blocks(model, rules, CALIB, QUICK, spilled, progress=progress, files=files)

    def stop(done: int, total: int, error: float) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go_on(stop)
    assert files.count() == 2 and [p.name for p in tmp_path.iterdir()] == ["blocks"]
    model, report = go_on(None)
    assert report.to_json() == told.to_json()
    for (name, t), (_, other) in zip(model.state_dict().items(), whole.state_dict().items(), strict=True):
        assert torch.equal(t, other), name


def test_the_seed_decides_the_order() -> None:
    one, _ = trained("int2:g32", replace(QUICK, epochs=1))
    same, _ = trained("int2:g32", replace(QUICK, epochs=1))
    other, _ = trained("int2:g32", replace(QUICK, epochs=1, seed=1))
    assert torch.equal(logits(one), logits(same)) and not torch.equal(logits(one), logits(other))


# -- rules and bad input -------------------------------------------------------------------------------------
def test_dense_layers_stay_and_formats_mix() -> None:
    model = loud_model()
    rules = [("*.mlp.down", Dense()), ("*.mlp.*", parse_format("nf3:g64")), ("*", parse_format("int4:g32"))]
    report = train_blocks(model, rules, CALIB, replace(QUICK, init="clip"))
    assert torch.equal(model.blocks[1].mlp.down.weight, loud_model().blocks[1].mlp.down.weight)  # type: ignore[union-attr]
    assert {e.format for e in report.layers} == {"nf3:s2:g64", "int4:g32"} and len(report.layers) == 18
    assert all(p.requires_grad for n, p in model.named_parameters() if "_scale" not in n and "_zero" not in n)


def test_constant_and_zero_groups_survive() -> None:
    model = loud_model()
    with torch.no_grad():
        model.blocks[0].attn.v.weight.zero_()  # type: ignore[union-attr]
        model.blocks[1].mlp.up.weight.fill_(0.25)  # type: ignore[union-attr]
    train_blocks(model, [("*", IntAsym(bits=2, group=32))], CALIB, QUICK)
    pack(model)
    assert logits(model).isfinite().all()


def test_bad_input_is_named_before_any_work() -> None:
    def fails(model: Decoder, label: str = "int3:g32", at: Tensor = CALIB) -> str:
        before = {n: t.clone() for n, t in model.state_dict().items()}
        with pytest.raises(UserError) as caught:
            train_blocks(model, [("*", parse_format(label))], at, QUICK)
        assert all(torch.equal(t, before[n]) or t.isnan().any() for n, t in model.state_dict().items())
        return str(caught.value)

    assert "blocks.0.attn.q: Group 48 does not divide input width 64: use group 32, 64" in fails(
        loud_model(), "int3:g48"
    )
    bad = loud_model()
    with torch.no_grad():
        bad.blocks[1].mlp.up.weight[2, 2] = float("nan")  # type: ignore[union-attr]
    assert "blocks.1.mlp.up.weight holds NaN or infinite" in fails(bad)
    packed = loud_model()
    convert(packed, [("*", parse_format("int4:g32"))])
    pack(packed)
    assert "int4:g32 already" in fails(packed)
    assert "give [windows, context]" in fails(loud_model(), at=CALIB[:0])
    assert "vocabulary" in fails(loud_model(), at=torch.full((4, 8), 200))
    assert "has no grid" in fails(loud_model(), "sparse24")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"init": "gtpq"}, "use one of rtn"),
        ({"epochs": 0}, "0 epochs"),
        ({"lr_weight": 3.0}, "between 0 and 1"),
        ({"held_out": 0.9}, "between 0 and 0.5"),
    ],
)
def test_settings_are_checked(settings: dict[str, object], said: str) -> None:
    refused(said, Blockwise, **settings)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.assets
def test_a_real_model_gains_on_text_it_was_not_trained_on(assets: Path, smollm2_file: Path) -> None:
    """The first two blocks of SmolLM2-135M at 2 bits."""
    loaded = load_model(smollm2_file)
    assert loaded.tokenizer is not None
    text = (assets / "text/wikitext-2/valid.txt").read_text()[:12_000]
    at = windows(torch.tensor(loaded.tokenizer.encode(text)), 12, 128)
    loaded.model.blocks = loaded.model.blocks[:2]
    settings = Blockwise(init="rtn", epochs=2, batch=1, held_out=0.25)
    report = train_blocks(loaded.model, [("*", parse_format("int2:g64"))], at, settings)
    assert all(b["after"] < 0.85 * b["before"] for b in report.blocks), report.blocks
    assert report.converted.bits_per_weight == pytest.approx(2.375)
