"""`shoestring run shrink/bitdistiller` in miniature, through the real command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from interrupted import dying
from shoestring.cli.app import run_cli
from shoestring.model import load_model
from shoestring.runlog import read_jsonl
from shoestring.serve.engine.engine import Engine


@pytest.fixture
def cli(cli: Callable[..., str]) -> Callable[..., str]:
    return partial(cli, "run", "shrink/bitdistiller", "device=cpu")


SMALL = [
    "model=model", "format=int2:g32", "num_prompts=12", "max_new=40", "calib_windows=4", "context=32", "batch=4",
    "micro=2", "steps=6", "lr=1e-3", "log_every=1", "save_every=2", "text=test.txt", "eval_context=32",
    "eval_tokens=256",
]  # fmt: skip
PROMPTS = [*SMALL, "prompts=prompts.txt", "max_requests=4"]


def test_text_clip_and_training_end_in_a_packed_model(cli: Callable[..., str], here: Path) -> None:
    before_files = {p: p.read_bytes() for p in (here / "model").iterdir()}
    out = cli(*PROMPTS, "run=live")
    assert "gamma 0." in out and "packed model in live/model" in out
    before, after = read_jsonl(here / "live/evals.jsonl")
    assert before["format"] == "dense" and after["format"] == "int2:g32 + int8:sym:g0"
    losses = [row["loss"] for row in read_jsonl(here / "live/metrics.jsonl")]
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert len(read_jsonl(here / "live/self_text.jsonl")) == 12
    told = json.loads((here / "live/model/quantization.json").read_text())
    assert 0 < told["gamma"] < 1 and told["method"] == "shrink/bitdistiller"
    packed = load_model(here / "live").model
    assert packed.blocks[0].mlp.up.packed  # type: ignore[union-attr]
    assert (here / "live/report.html").is_file() and not (here / "live/checkpoints").exists()
    assert {p: p.read_bytes() for p in (here / "model").iterdir()} == before_files


def test_cached_teacher_and_a_corpus(cli: Callable[..., str], here: Path) -> None:
    cli(*SMALL, "data=corpus.jsonl", "teacher=cached", "k=300", "run=cached", "out=packed")
    cli(*SMALL, "data=corpus.jsonl", "teacher=live", "run=same")
    cached, live = ([row["loss"] for row in read_jsonl(here / f"{name}/metrics.jsonl")] for name in ("cached", "same"))
    # All tokens are kept: only the 16 bits of the cache differ.
    assert cached == pytest.approx(live, rel=2e-2)
    assert load_model(here / "packed").model.blocks[1].attn.q.packed  # type: ignore[union-attr]


def test_layers_that_a_rule_leaves_dense(cli: Callable[..., str], here: Path) -> None:
    rules = "rules=*.mlp.down=dense;*=int2:g32"
    cli(*(a for a in SMALL if not a.startswith("format")), "data=corpus.jsonl", rules, "run=partly")
    block = load_model(here / "partly").model.blocks[0]
    assert block.mlp.up.packed and not block.mlp.down.packed  # type: ignore[union-attr]
    assert read_jsonl(here / "partly/evals.jsonl")[-1]["format"] == "int2:g32 + dense + int8:sym:g0"


@pytest.mark.parametrize("stage", ["training", pytest.param("text", marks=pytest.mark.lab)])
def test_a_stopped_run_goes_on_in_its_stage(
    cli: Callable[..., str], here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stage: str
) -> None:
    if not (here / "whole").exists():
        cli(*PROMPTS, "run=whole")
    name = f"cut-{stage}"
    with monkeypatch.context() as patch:
        if stage == "text":
            patch.setattr(Engine, "step", dying(60, Engine.step))
        else:
            from shoestring.methods.distill import cakld

            patch.setattr(cakld.Cakld, "__call__", dying(9, cakld.Cakld.__call__))
        assert f"stopped; continue with `shoestring run shrink/bitdistiller resume={name}`" in cli(
            *PROMPTS, f"run={name}", fails=True
        )
    assert not (here / f"{name}/model").exists()
    saved = (here / name / "config.json").read_text()
    (here / "empty.txt").write_text("")
    refused = {
        "format=int3:g32": "was started with format=int2:g32",
        "text=empty.txt": "was started with text=test.txt",  # and evaluated on it
        "eval_tokens=128": "was started with eval_tokens=256",
        "run=elsewhere": f"resume={name} goes on in that folder",
    }
    if stage == "training":
        refused["steps=2"] = f"steps=2 is less than the 4 that {name} has done"
    for argument, why in refused.items():
        assert why in cli(f"resume={name}", argument, fails=True)
    assert (here / name / "config.json").read_text() == saved and not (here / "elsewhere").exists()
    with monkeypatch.context() as patch:  # and once more when the model is saved, but not the report
        patch.setattr("shoestring.recipes.shrink_run.write_report", dying(0, print))
        assert run_cli(["run", "shrink/bitdistiller", f"resume={name}"]) != 0
    assert (here / name / "model").exists()
    (here / name / "model/quantization.json").unlink()
    assert ("resumed from" in capsys.readouterr().out) == (stage == "training")
    cli(f"resume={name}")
    assert json.loads((here / name / "model/quantization.json").read_text())["gamma"] > 0
    assert [row["model"] for row in read_jsonl(here / name / "evals.jsonl")] == ["before", "after"]
    assert not (here / name / "checkpoints").exists()
    for file in ("self_text.jsonl", "model/packed.safetensors"):
        assert (here / name / file).read_bytes() == (here / "whole" / file).read_bytes(), file
    assert "finished" in cli(f"resume={name}", fails=True)


def test_bad_input_is_one_line_and_leaves_no_run(cli: Callable[..., str], here: Path) -> None:
    (here / "short.jsonl").write_text('{"text": "abc abc"}')
    (here / "empty.txt").write_text("")
    before = {p.name for p in here.iterdir()}

    def said(*argv: str) -> str:
        changed = {a.split("=")[0] for a in argv}
        return cli(*[a for a in SMALL if a.split("=")[0] not in changed], *argv, fails=True)

    assert "model= is empty" in said("model=", "data=corpus.jsonl")
    without = [a for a in SMALL if not a.startswith("model=")]
    assert "model= is missing" in cli(*without, "data=corpus.jsonl", fails=True)
    assert "prompts= (the model" in said()
    assert "flatters" in said("data=test.txt") and "flatters" in said("data=model/../test.txt")
    assert "gives no prompt" in said("prompts=empty.txt")
    assert "prompts=nowhere does not exist" in said("prompts=nowhere")
    assert "micro that divides" in said("prompts=prompts.txt", "batch=4", "micro=3")
    assert "validation split" in said("data=short.jsonl") or "windows of" in said("data=short.jsonl")
    assert "use group" in said("prompts=prompts.txt", "format=int2:g48")
    assert "every layer stays dense" in said("prompts=prompts.txt", "format=dense")
    assert "positions" in said("prompts=prompts.txt", "context=4096")
    assert "does not exist" in said("prompts=prompts.txt", "text=nowhere.txt")
    assert {p.name for p in here.iterdir()} - {"cache"} == before - {"cache"}
