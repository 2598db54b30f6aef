"""The table of 2:4 pre-training: rows stop in time and go on, and what is recorded is what the table shows."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from benchmarks import results
from experiments import sparse24_quality
from experiments.python_corpus import open_prepared
from experiments.sparse24_quality import Deadline, Size, make_hooks
from experiments.sparse24_tables import curves, stable_table, table
from experiments.trained_model import open_trained
from shoestring.formats import Dense, FormatLinear, parse_format
from shoestring.mesh import open_mesh
from shoestring.methods.sparse24.training import sparse_layers
from shoestring.model import load_model
from shoestring.runlog import RunLog
from shoestring.train.objectives import CrossEntropy
from shoestring.train.step import Run
from shoestring.train.trainer import train
from tiny import small_corpus

TINY = Size(
    {"d_model": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16, "d_ff": 64},
    vocab_size=300, context=32, batch=4, micro=4, steps=24, warmup=8, lr=2e-3, refresh=4,
)  # fmt: skip


@pytest.mark.parametrize("from_pruned", [False, True])
def test_the_dense_finish_may_start_from_the_pruned_weights(from_pruned: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(FormatLinear(16, 8, bias=False, format=parse_format("sparse24:tile:held")))
    run = Run(model, torch.optim.SGD(model.parameters(), lr=0.1), None, RunLog(None, quiet=True))  # type: ignore[arg-type]
    layer, x = sparse_layers(model)[0], torch.randn(5, 16)
    before, kept = model(x).detach(), layer.linear.weight.detach().clone()
    size = replace(TINY, steps=6, decay=0.0, from_pruned=from_pruned)  # a given decay: no dense probe
    finish = make_hooks("FST exact", size, model, 0)[-1]
    run.step = 5
    finish.after_step(run)
    assert isinstance(layer.linear.format, Dense)
    assert torch.allclose(model(x), before, atol=1e-6) == from_pruned
    assert torch.equal(layer.linear.weight[layer.mask()], kept[layer.mask()])
    with torch.no_grad():
        layer.linear.weight.fill_(1.0)
    run.step = 6
    finish.after_step(run)
    assert layer.linear.weight.eq(1.0).all()  # weights that have grown since stay


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_corpus(tmp_path_factory.mktemp("corpus")).folder


def tiny_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, corpus: Path) -> tuple[Any, ...]:
    """Rows of a tiny model, recorded under `tmp_path`: the arguments of a call."""
    monkeypatch.setitem(sparse24_quality.SIZES, "gpt2-124m", TINY)
    monkeypatch.setattr(sparse24_quality, "EVAL_BATCHES", 1)
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    return ("--size", "gpt2-124m", "--corpus", corpus, "--folder", tmp_path / "rows")


def call(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["sparse24_quality", *map(str, arguments)])
    sparse24_quality.main()


@pytest.mark.lab
def test_rows_are_recorded_go_on_where_they_stopped_and_fill_the_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = (*tiny_rows(monkeypatch, tmp_path, corpus), "--missing")
    assert table() == "No row has been finished yet."

    with monkeypatch.context() as hopeless:
        hopeless.setattr(Deadline, "WINDOW", 0.0)
        hopeless.setattr(Deadline, "SLACK", -1.0)
        call(hopeless, *common, "--patience", 0, "--rows", "FST:0")
    assert "step 2 of 24" in (told := capsys.readouterr().out) and "s a row" in told
    assert not (tmp_path / "sparse24_quality.jsonl").exists()
    assert list((tmp_path / "rows").glob("*/checkpoints/*"))
    call(monkeypatch, *common, "--keep", tmp_path / "kept", "--rows", "dense:0")
    call(monkeypatch, *common, "--keep", tmp_path / "kept", "--rows", "FST:0")
    kept = load_model(tmp_path / "kept/gpt2-124m-dense-0")
    assert kept.tokenizer is not None and kept.model.spec.vocab_size == kept.tokenizer.vocab_size
    _, its_corpus, trained = open_trained(tmp_path / "kept/gpt2-124m-dense-0", "cpu")
    assert its_corpus.folder == corpus.absolute() and trained["model_seed"] == 0
    assert trained["model_tokens"] == TINY.steps * TINY.batch * TINY.context
    lines = [json.loads(text) for text in (tmp_path / "sparse24_quality.jsonl").read_text().splitlines()]
    assert [n["case"] for n in lines] == ["dense", "FST"]
    assert lines[1]["baseline_value"] == lines[0]["value"]
    parts = lines[1]["quality"]["loss_by_part"]
    assert len(parts) > 0 and sum(parts) / len(parts) == pytest.approx(lines[1]["value"], abs=2e-4)
    # The model that was kept is the one that was measured.
    again = SimpleNamespace(model=kept.model, mesh=open_mesh())
    losses = sparse24_quality.validation_losses(again, open_prepared(corpus), TINY)  # type: ignore[arg-type]
    assert losses == pytest.approx(lines[0]["quality"]["loss_by_part"], abs=2e-4)
    assert lines[1]["quality"]["mu"] is not None and lines[1]["quality"]["flip_curve"][-1][0] == 24
    assert lines[0]["config"]["corpus"] == open_prepared(corpus).train.fingerprint[:8]
    capsys.readouterr()
    call(monkeypatch, *common, "--rows", "dense:0", "FST:0")  # both are known now
    assert "validation loss" not in capsys.readouterr().out
    shown = table()
    assert shown.count("\n| ") == 3 and f"{lines[1]['value']:.4f}" in shown and "%" in shown
    call(monkeypatch, *common, "--refresh", 6, "--rows", "dense:0", "FST:0")  # dense has no masks: known
    (other,) = [json.loads(text) for text in (tmp_path / "sparse24_quality.jsonl").read_text().splitlines()][2:]
    assert other["case"] == "FST, masks every 6" and other["quality"]["masks_every"] == 6
    assert table().count("\n| ") == 4 and curves().count("\n| ") == 4
    # So is a learning rate that stays for long; what others found is no baseline for it.
    assert stable_table() == "No row has been finished yet."
    call(monkeypatch, *common, "--schedule", "wsd", "--rows", "FST:0", "dense:0")
    stable = [json.loads(text) for text in (tmp_path / "sparse24_quality.jsonl").read_text().splitlines()][3:]
    assert [n["config"]["schedule"] for n in stable] == ["wsd", "wsd"]
    assert stable[0]["baseline_value"] is None and stable[0]["value"] != lines[1]["value"]
    assert stable_table().count("\n| ") == 3 and table().count("\n| ") == 4
    # A row of another corpus starts a table of its own.
    other = {**lines[0], "value": 9.0, "config": {**lines[0]["config"], "corpus": "another"}}
    with (tmp_path / "sparse24_quality.jsonl").open("a") as f:
        f.write(json.dumps(other) + "\n")
    assert table().count("\n| ") == 2 and "9.0000" in table()


@pytest.mark.parametrize(("case", "graphs"), [("dense", 1), ("FST", 2)])
@pytest.mark.lab
def test_a_row_compiles_one_block_and_fst_its_sparse_one_too(
    monkeypatch: pytest.MonkeyPatch, corpus: Path, case: str, graphs: int
) -> None:
    """Not one for each layer, and none for new masks, measured flips, decay, the dense finish or the evaluation."""
    counter = CompileCounterWithBackend("aot_eager")
    compile_as_usual = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda block: compile_as_usual(block, backend=counter))
    torch._dynamo.reset()
    size = replace(TINY, shape={**TINY.shape, "num_layers": 2}, steps=12, warmup=4, compile="blocks", measurements=2)
    text = open_prepared(corpus)
    run, data = sparse24_quality.build(case, size, text, 0, None)
    hooks = sparse24_quality.make_hooks(case, size, run.model, 0)
    train(run, data, CrossEntropy(), steps=size.steps, hooks=hooks)
    assert len(sparse24_quality.validation_losses(run, text, size)) > 0
    assert counter.frame_count == graphs


def test_fp8_weight_gradients_differ_from_exact_ones_in_the_weight_gradient_alone() -> None:
    torch.manual_seed(0)
    exact, rounded = sparse24_quality.FORMATS["FST exact"], sparse24_quality.FORMATS["FST FP8 gradient"]
    w, x, bias, dz = torch.randn(16, 32), torch.randn(2, 24, 32), torch.randn(16), torch.randn(2, 24, 16)
    state = {name: aux.tensor for name, aux in exact.state(w).items()}
    found = []
    for format in (exact, rounded):
        leaves = [t.clone().requires_grad_() for t in (x, w, bias)]
        z = format.train_linear(leaves[0], leaves[1], state, leaves[2])
        found.append((z, *torch.autograd.grad(z, leaves, dz)))
    (z, dx, dw, db), (z8, dx8, dw8, db8) = found
    assert torch.allclose(z, z8, atol=1e-5) and torch.allclose(dx, dx8, atol=1e-5) and torch.allclose(db, db8)
    error = ((dw8 - dw).norm() / dw.norm()).item()
    assert 0.01 < error < 0.1  # E5M2 has 2 bits of mantissa
