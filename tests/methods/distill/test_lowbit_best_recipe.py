"""`shoestring run shrink/lowbit_best` in miniature, through the real command line; and the pieces of shrink/qat."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_bitdistiller_recipe import SMALL

from experiments.lowbit_methods import learn_grids
from interrupted import dying
from refusals import refused
from shoestring.cli.app import run_cli
from shoestring.errors import UserError
from shoestring.formats import FormatLinear, convert, parse_format
from shoestring.formats.convert import store_states
from shoestring.mesh import MeshConfig, open_mesh
from shoestring.methods.distill.cakld import Cakld
from shoestring.methods.distill.lowbit_best import Config
from shoestring.methods.distill.stages import BestSettings, micro_of, part_of
from shoestring.model import load_model
from shoestring.recipes.shrink_run import run_once
from shoestring.runlog import RunLog, read_jsonl
from shoestring.shrink import blockwise
from shoestring.shrink.blockwise import Blockwise, train_blocks
from shoestring.shrink.calibrate import Calibration, walk
from shoestring.shrink.clip import Clip
from shoestring.shrink.qat import FallingRates, Rates, clip_weights, read_grids, relative_adamw
from shoestring.train.step import Run
from tiny import loud_model, tokens


@pytest.fixture
def cli(cli: Callable[..., str]) -> Callable[..., str]:
    return partial(cli, "run", "shrink/lowbit_best", "device=cpu")


BEST = [a for a in SMALL if not a.startswith(("calib_windows", "lr="))]
BEST += ["data=corpus.jsonl", "windows=8", "epochs=2", "k=32"]


def test_a_small_batch_needs_no_other_rows_per_pass() -> None:
    given = {(2, 8): 2, (12, 8): 6, (16, 8): 8, (12, 5): 5, (12, None): None}
    for (batch, micro), rows in given.items():
        assert micro_of(Config(batch=batch, micro=micro)) == rows
    assert micro_of(Config(batch=6, mesh=MeshConfig(dp=2))) == 3


def test_blocks_then_end_to_end(cli: Callable[..., str], here: Path) -> None:
    out = cli(*(a for a in BEST if a[:5] not in ("batch", "micro")), "batch=16", "micro=16", "run=best")
    assert "block by block: 3/3" in out and "training tokens end to end" in out
    before, after = read_jsonl(here / "best/evals.jsonl")
    assert before["format"] == "dense" and after["format"] == "int2:g32 + int8:sym:g0"
    assert after["bits_per_weight"] == 2.75  # of the layers
    told = json.loads((here / "best/model/quantization.json").read_text())
    assert told["method"] == "shrink/lowbit_best" and told["gamma"] == 0
    assert len(told["blocks"]) == 3 and all(b["after"] <= b["before"] for b in told["blocks"])
    assert told["blocks"][0]["after"] < 0.95 * told["blocks"][0]["before"]
    losses = [row["loss"] for row in read_jsonl(here / "best/metrics.jsonl")]
    assert len(losses) == 6 and losses[-1] < losses[0]
    model = load_model(here / "best").model
    assert all(m.packed for m in model.blocks.modules() if isinstance(m, FormatLinear))
    assert not (here / "best/blocks").exists()


@pytest.mark.parametrize("grids", ["learned", pytest.param("derived", marks=pytest.mark.lab)])
def test_mixed_bits_under_a_budget(cli: Callable[..., str], here: Path, grids: str) -> None:
    argv = [a for a in BEST if not a.startswith(("format", "windows" if grids == "derived" else "format"))]
    out = cli(*argv, f"run=mixed-{grids}", f"grids={grids}", "bits_budget=3.2", "candidates=int2:g32,int4:g32")
    assert "of 3.2 bits per weight" in out
    row = read_jsonl(here / f"mixed-{grids}/evals.jsonl")[-1]
    assert 2.75 < row["bits_per_weight"] <= 3.2 and "int2:g32" in row["format"] and "int4:g32" in row["format"]
    told = json.loads((here / f"mixed-{grids}/model/quantization.json").read_text())
    assert told["mixed_bits"]["budget"] == 3.2
    assert ("blocks" in told) == (grids == "learned")


def test_what_does_not_go_together_is_said_before_any_work(cli: Callable[..., str], here: Path) -> None:
    said = cli(*BEST, "rules=*=int2:g32", "bits_budget=3", fails=True)
    assert "give one of them" in said
    said = cli(*BEST, "grids=derived", "init=awq", fails=True)
    assert "init=awq" in said and "grids=learned" in said


@pytest.mark.parametrize("grids", ["derived", pytest.param("learned", marks=pytest.mark.lab)])
def test_at_three_bits_nothing_is_trained_block_by_block(cli: Callable[..., str], here: Path, grids: str) -> None:
    argv = [a for a in BEST if not a.startswith(("format", "windows"))]
    name = f"three-{grids}"
    out = cli(*argv, f"run={name}", "format=nf3:s2:g32", *(["grids=learned"] if grids == "learned" else []))
    told = json.loads((here / name / "model/quantization.json").read_text())
    if grids == "learned":  # from the clipped grids
        assert len(told["blocks"]) == 3 and all(b["after"] == b["before"] for b in told["blocks"])
    else:
        assert told["grids"] == "derived" and "clip by block: 3/3" in out and "blocks" not in told
    losses = [row["loss"] for row in read_jsonl(here / name / "metrics.jsonl")]
    assert losses[-1] < losses[0]
    assert read_jsonl(here / name / "evals.jsonl")[-1]["format"] == "nf3:s2:g32 + int8:sym:g0"


@pytest.mark.parametrize("teacher", ["live", pytest.param("cached", marks=pytest.mark.lab)])
def test_as_sure_as_the_full_model(cli: Callable[..., str], here: Path, teacher: str) -> None:
    cli(*BEST, f"run={teacher}", f"teacher={teacher}", "gamma=none")
    assert read_jsonl(here / teacher / "evals.jsonl")[-1]["model"] == "after"
    told = json.loads((here / teacher / "model/quantization.json").read_text())
    assert 0 < told["gamma"] < 1 and (here / teacher / "gamma.json").exists() == (teacher == "live")


@pytest.mark.parametrize("stage", ["training", pytest.param("blocks", marks=pytest.mark.lab)])
def test_a_stopped_run_goes_on_in_its_stage(
    cli: Callable[..., str], here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stage: str
) -> None:
    if not (here / "best-whole").exists():
        cli(*BEST, "run=best-whole")
    name = f"best-cut-{stage}"
    with monkeypatch.context() as patch:
        if stage == "blocks":
            patch.setattr(blockwise, "train_block", dying(2, blockwise.train_block))
        else:
            patch.setattr(Cakld, "__call__", dying(9, Cakld.__call__))
        assert f"resume={name}" in cli(*BEST, f"run={name}", fails=True)
    with monkeypatch.context() as patch:  # and once more when the model is saved, but not the report
        patch.setattr("shoestring.recipes.shrink_run.write_report", dying(0, print))
        assert run_cli(["run", "shrink/lowbit_best", f"resume={name}"]) != 0
    assert ("resumed from" in capsys.readouterr().out) == (stage == "training")
    cli(f"resume={name}")
    assert "finished" in cli(f"resume={name}", fails=True)
    assert [row["model"] for row in read_jsonl(here / name / "evals.jsonl")] == ["before", "after"]
    whole = (here / "best-whole/model/packed.safetensors").read_bytes()
    assert (here / name / "model/packed.safetensors").read_bytes() == whole


# -- the pieces ----------------------------------------------------------------------------------------------


def test_learned_grids_start_where_the_method_left_them() -> None:
    model, rules = loud_model(), [("*", parse_format("int3:g32"))]
    report = train_blocks(model, rules, tokens(), Blockwise(epochs=1, keep_masters=True))
    with torch.no_grad():
        want = model(tokens())
    rounded = model.blocks[1].mlp.up.weight.detach().clone()  # type: ignore[union-attr]
    grids = read_grids(model)
    learn_grids(model, rules, report.masters)
    layer = model.blocks[1].mlp.up  # type: ignore[union-attr]
    assert isinstance(layer, FormatLinear) and layer.format.label == "int3:g32:learned"
    assert set(report.masters) == set(grids) and not torch.equal(layer.weight, rounded)
    with torch.no_grad():  # other weights, in the same bins
        torch.testing.assert_close(model(tokens()), want, rtol=1e-4, atol=1e-4)
    scale = layer.trained_state()["scale"]
    with torch.no_grad():
        scale.mul_(1.5)
    store_states(model, grids)
    assert torch.equal(scale, grids["blocks.1.mlp.up"]["scale"])


def test_the_usual_part_of_the_rates() -> None:
    def part(label: str, **given: Any) -> float:
        return part_of(BestSettings(**given), [("*", parse_format(label))])

    assert [part(f) for f in ("int2:g64", "int4:g64", "int8:g0")] == [0.25] * 3
    assert part("nf3:s2:g64") == part("int2:g64", grids="derived") == 0.5  # scales follow the weights
    assert part("nf3:s2:g64", grids="learned") == 0.25 and part("nf3:s2:g64", part=1.0) == 1.0
    assert Rates(weight=1e-2, scale=0.0).softer(0.5) == Rates(5e-3, 0.0, 2.5e-3, 1e-3, 2.5e-3)


def test_rates_are_parts_of_what_they_move() -> None:
    model, rules = loud_model(), [("*", parse_format("int3:g32"))]
    convert(model, [(g, f.learn_grid()) for g, f in rules])  # type: ignore[attr-defined]
    optimizer = relative_adamw(model, Rates(weight=1e-3, scale=2e-3, zero=1e-2, norm=0.0, rest=0.0))
    lrs = {id(p): g["lr"] for g in optimizer.param_groups for p in g["params"]}
    layer = model.blocks[0].attn.q  # type: ignore[union-attr]
    assert isinstance(layer, FormatLinear)

    def near(value: float) -> Any:
        return pytest.approx(value, rel=0.05)

    kept = layer.trained_state()
    assert lrs[id(layer.weight)] == near(1e-3 * layer.weight.square().mean().sqrt().item())
    assert lrs[id(kept["scale"])] == near(2e-3 * kept["scale"].mean().item())
    assert lrs[id(kept["zero"])] == near(1e-2)
    assert not model.embed.weight.requires_grad and not model.norm.weight.requires_grad
    run = Run(model, optimizer, open_mesh(), RunLog(None, quiet=True))
    hook = FallingRates(11, warmup=1, floor=0.1)
    for step, part in ((0, 1.0), (1, 1.0), (10, 0.1)):
        run.step = step
        hook.before_step(run)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(optimizer.param_groups[0]["full_lr"] * part)
    refused("learning rates", Rates, 0, 0, 0, 0, 0)
    refused("learning rates", Rates, weight=2.0)


def test_clipping_clamps_groups_but_not_query_and_key() -> None:
    model, plain = loud_model(), loud_model()
    steps = walk(model, tokens(), Calibration(inputs="full"))
    clip_weights(model, [("*", parse_format("int2:g32"))], steps, Clip())
    block, old = model.blocks[0], plain.blocks[0]
    assert torch.equal(block.attn.q.weight, old.attn.q.weight)  # type: ignore[union-attr]
    new_w, old_w = block.mlp.up.weight, old.mlp.up.weight  # type: ignore[union-attr]
    moved = new_w != old_w
    assert 0.005 < moved.float().mean() < 0.3  # type: ignore[union-attr]
    assert (new_w.abs() <= old_w.abs() + 1e-7).all()  # type: ignore[operator, union-attr]


def test_a_stage_is_done_once_and_failures_are_told(tmp_path: Path) -> None:
    mesh, calls = open_mesh(), []
    run_once(mesh, tmp_path, "stage", lambda: calls.append(1))
    run_once(mesh, tmp_path, "stage", lambda: calls.append(2))
    assert calls == [1]

    def fails() -> None:
        raise UserError("no room")

    refused("no room", run_once, mesh, tmp_path, "other", fails)
    assert not (tmp_path / "other.done").exists()
