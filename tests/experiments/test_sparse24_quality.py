"""The table of 2:4 pre-training: rows stop in time and go on, and what is recorded is what the table shows."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
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
from experiments.sparse24_quality import Deadline, Size, Turn, make_hooks, rows_of, thinned, without_options
from experiments.sparse24_tables import CASES, curves, stable_table, table
from experiments.time_budget import Limits
from experiments.trained_model import open_trained
from shoestring.errors import UserError
from shoestring.formats import Dense, FormatLinear, parse_format
from shoestring.mesh import open_mesh
from shoestring.methods.sparse24.training import sparse_layers
from shoestring.model import Tokenizer, load_model
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


def drive(deadline: Deadline, seconds_per_step: float, steps: int, stopped: list[int]) -> int:
    """Steps of equal length until the deadline asks to stop."""
    now = [0.0]
    deadline.clock = lambda: now[0]
    for step in range(1, steps + 1):
        now[0] += seconds_per_step
        deadline.after_step(SimpleNamespace(step=step))  # type: ignore[arg-type]
        if stopped:
            return step
    return steps


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    asked: list[int] = []
    monkeypatch.setattr(sparse24_quality.signal, "raise_signal", asked.append)
    return asked


def test_a_row_that_will_be_finished_goes_on(stopped: list[int]) -> None:
    deadline = Deadline(100.0, 400, patience=20)
    assert drive(deadline, 0.24, 400, stopped) == 400 and not stopped
    assert deadline.pace == pytest.approx(1 / 0.24, rel=0.05)


def test_a_hopeless_row_stops_after_its_patience_and_says_its_pace(stopped: list[int]) -> None:
    deadline = Deadline(100.0, 400, patience=20)
    step = drive(deadline, 0.5, 400, stopped)
    assert 20 / 0.5 <= step <= 27 / 0.5 and len(stopped) == 1
    assert deadline.pace == pytest.approx(2.0) and "left" in deadline.reason


def test_without_patience_a_row_runs_until_the_time_is_over(stopped: list[int]) -> None:
    assert drive(Deadline(100.0, 400), 0.5, 400, stopped) == 201 and len(stopped) == 1


def test_a_compilation_does_not_count_as_the_pace(stopped: list[int]) -> None:
    deadline, now = Deadline(100.0, 400, patience=20), [0.0]
    deadline.clock = lambda: now[0]
    for step in range(1, 401):
        now[0] += 12.0 if step == 60 else 0.2
        deadline.after_step(SimpleNamespace(step=step))  # type: ignore[arg-type]
    assert not stopped


def test_rows_are_asked_for_one_by_one() -> None:
    assert rows_of(["dense:1", "SR-STE exact", "FST:2"], None, [0]) == [
        ("dense", 1), ("SR-STE exact", 0), ("FST", 2),
    ]  # fmt: skip
    seeds = rows_of(None, None, [0, 1, 2])
    assert len(seeds) == len(CASES) + 4 and seeds.count(("FST", 2)) == 1 and ("S-STE", 1) not in seeds
    with pytest.raises(UserError, match="fst"):
        rows_of(["fst:1"], None, [0])


def test_calls_of_a_file_do_not_read_the_file_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--size", "cpu", "--calls", "F", "--at-once=2", "--seconds", "9", "--micro", "4"]
    assert without_options(given, "--calls", "--at-once", "--seconds") == ["--size", "cpu", "--micro", "4"]
    calls = tmp_path / "calls.txt"
    calls.write_text('# wanted\n--rows "FST exact:0" --decay 6e-5\n\n--rows dense:1  # a seed\n')
    asked: list[list[str]] = []

    def start(command: list[str]) -> subprocess.Popen[bytes]:
        asked.append(command)
        hangs = "FST exact:0" in command
        return subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({600 * hangs})"])

    monkeypatch.setattr(sparse24_quality, "start_child", start)
    monkeypatch.setattr(sparse24_quality, "GRACE", 0.2)
    monkeypatch.setattr(sys, "argv", ["sparse24_quality", *given])
    sparse24_quality.run_calls(calls, 2, None, Limits(0.5))  # type: ignore[arg-type]
    assert sorted(command[3:-2] for command in asked) == [
        ["--size", "cpu", "--micro", "4", "--rows", "FST exact:0", "--decay", "6e-5"],
        ["--size", "cpu", "--micro", "4", "--rows", "dense:1"],
    ]
    assert f"stopped 0 s after its time: {shlex.join(asked[0][3:-2])}" in capsys.readouterr().out
    sparse24_quality.run_calls(calls, 2, None, Limits(0.0))  # type: ignore[arg-type]  # the time is over
    assert len(asked) == 2

    def run_rows(args: argparse.Namespace, *_: Any) -> None:
        rows.append((args.rows, args.decay, args.micro))
        raise torch.OutOfMemoryError("too large")

    rows: list[Any] = []
    monkeypatch.setattr(sparse24_quality, "run_rows", run_rows)
    sparse24_quality.run_calls(calls, 1, None, Limits())  # type: ignore[arg-type]  # in this process
    assert rows == [(["FST exact:0"], 6e-5, 4), (["dense:1"], None, 4)] and len(asked) == 2
    # A call whose row was cut off comes first.
    (tmp_path / "kept" / "cpu-dense-1" / "checkpoints" / "step-00000004").mkdir(parents=True)
    monkeypatch.setattr(sys, "argv", ["sparse24_quality", *given, "--folder", str(tmp_path / "kept")])
    rows.clear()
    sparse24_quality.run_calls(calls, 1, None, Limits())  # type: ignore[arg-type]
    assert [row[0] for row in rows] == [["dense:1"], ["FST exact:0"]]


def test_a_signal_ends_all_calls_and_each_may_save(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = tmp_path / "calls.txt"
    calls.write_text("--rows dense:0\n--rows dense:1\n--rows dense:2\n")
    child = (
        "import pathlib, signal, sys, time\n"
        "place = pathlib.Path(sys.argv[1])\n"
        "signal.signal(signal.SIGTERM, lambda *_: ((place / 'saved').touch(), sys.exit(0)))\n"
        "(place / 'begun').touch()\n"
        "time.sleep(600)\n"
    )
    places = iter([tmp_path / name for name in "abc"])

    def start(command: list[str]) -> subprocess.Popen[bytes]:
        place = next(places)
        place.mkdir()
        return subprocess.Popen([sys.executable, "-c", child, str(place)])

    def ask() -> None:
        while not all((tmp_path / name / "begun").exists() for name in "ab"):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(sparse24_quality, "start_child", start)
    monkeypatch.setattr(sys, "argv", ["sparse24_quality"])
    asking = threading.Thread(target=ask)
    asking.start()
    limits = Limits()
    with limits.handled():
        sparse24_quality.run_calls(calls, 2, None, limits)  # type: ignore[arg-type]
    asking.join()
    assert all((tmp_path / name / "saved").exists() for name in "ab") and not (tmp_path / "c").exists()
    assert "left out" in capsys.readouterr().out


def test_a_thinned_curve_keeps_its_end() -> None:
    curve = [(step, 1.0 / step) for step in range(1, 152)]
    thin = thinned(curve)
    assert 24 <= len(thin) <= 30 and thin[-1] == [151, 0.00662] and thin == sorted(thin)


def test_one_row_trains_at_a_time(tmp_path: Path) -> None:
    run: Any = SimpleNamespace(step=0)
    first, second = Turn(tmp_path / "turn", after=2), Turn(tmp_path / "turn", after=2)
    first.after_step(run)
    second.after_step(run)  # nobody waits before its steps are compiled
    first.after_step(run)
    waiting = threading.Thread(target=second.after_step, args=(run,))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    first.done()
    waiting.join(5)
    assert not waiting.is_alive()
    second.done()
    Turn(None, after=1).after_step(run)


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


def test_a_signal_ends_a_call_and_what_was_cut_off_comes_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = tiny_rows(monkeypatch, tmp_path, corpus)

    class Asking(Deadline):
        def after_step(self, run: Any) -> None:
            if run.step == 5:
                signal.raise_signal(signal.SIGTERM)

    def recorded() -> list[tuple[str, int]]:
        return [(n["case"], n["config"]["seed"]) for n in results.recorded("sparse24_quality")]

    with monkeypatch.context() as asked:
        asked.setattr(sparse24_quality, "Deadline", Asking)
        call(asked, *common, "--rows", "dense:1", "dense:0")
    told = capsys.readouterr().out
    assert not recorded() and "left for the next call: dense, seed 0" in told
    assert "cut off: dense, seed 1: asked to stop; stopped at step 5 of 24 and saved; no pace yet; first in the" in told
    validate = sparse24_quality.validation_losses

    def asked_meanwhile(*args: Any) -> list[float]:
        signal.raise_signal(signal.SIGTERM)
        return validate(*args)

    with monkeypatch.context() as asked:
        asked.setattr(sparse24_quality, "validation_losses", asked_meanwhile)
        call(asked, *common, "--missing", "--rows", "dense:0", "dense:1")
    told = capsys.readouterr().out
    assert recorded() == [("dense", 1)] and "dense, seed 1: was cut off in an earlier call and goes on" in told
    assert "left for the next call: dense, seed 0" in told and not list((tmp_path / "rows").glob("*"))
    with monkeypatch.context() as asked:
        asked.setattr(sparse24_quality, "Deadline", Asking)
        call(asked, *common[:4], "--rows", "dense:0")
    assert "nothing is left of it: --folder keeps it" in capsys.readouterr().out and len(recorded()) == 1
    call(monkeypatch, *common, "--rows", "dense:1", "--folder", tmp_path / "whole")
    (cut, whole) = results.recorded("sparse24_quality")
    assert cut["value"] == whole["value"], "a row that was cut off ends as a whole one does"


def test_another_decay_is_a_row_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = (*tiny_rows(monkeypatch, tmp_path, corpus), "--missing", "--rows", "dense:0", "SR-STE:0")
    call(monkeypatch, *common)
    call(monkeypatch, *common, "--decay", 2e-4)  # the published one: both are known
    call(monkeypatch, *common, "--decay", 0.02)  # dense has no decay: known
    lines = [json.loads(text) for text in (tmp_path / "sparse24_quality.jsonl").read_text().splitlines()]
    assert [n["case"] for n in lines] == ["dense", "SR-STE", "SR-STE, decay 0.02"]
    assert lines[2]["config"] == {**lines[1]["config"], "decay": 0.02} and "decay" not in lines[1]["config"]
    assert lines[2]["baseline_value"] == lines[0]["value"] and lines[2]["value"] != lines[1]["value"]
    rows = [row.split(" | ") for row in table().splitlines()]
    assert [row[1] for row in rows if row[0].startswith("| SR-STE")] == ["2:4", "2:4"] and len(rows) >= 5
    capsys.readouterr()
    call(monkeypatch, *common, "--decay", 0.02)
    assert "validation loss" not in capsys.readouterr().out
    for wrong in (-1e-4, float("nan"), float("inf")):
        with pytest.raises(UserError, match="use 0 or more"):
            call(monkeypatch, *common, "--decay", wrong)
    call(monkeypatch, *common[:-2], "FST:0")
    call(monkeypatch, *common[:-2], "FST:0", "--decay", 0)  # neither probe nor controller
    found, fixed = results.newest("sparse24_quality", tmp_path)[-2:]
    assert (found["case"], fixed["case"]) == ("FST", "FST, decay 0") and fixed["config"]["decay"] == 0
    assert found["quality"]["mu"] is not None and fixed["quality"]["mu"] is None


def test_the_pace_of_rows_is_printed_and_nothing_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sparse24_quality.SIZES, "gpt2-124m", TINY)
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    call(monkeypatch, "--size", "gpt2-124m", "--corpus", corpus, "--pace", 12, "--rows", "dense", "FST")
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("pace:")]
    assert [line.split()[1] for line in told] == ["dense", "FST"] and "tokens/s" in told[1]
    assert not list(tmp_path.glob("*.jsonl"))
    with pytest.raises(UserError, match="use 8 or more"):
        call(monkeypatch, "--pace", 7)


def test_a_stable_rate_falls_where_fst_is_dense() -> None:
    size = replace(TINY, schedule="wsd")
    rates = [size.rate()(step) for step in range(size.steps)]
    assert rates[7:21] == [size.lr] * 14  # the last four steps are a sixth of them
    assert rates[20:] == pytest.approx([size.lr * share for share in (1, 3 / 4, 1 / 2, 1 / 4)])
    assert TINY.rate()(12) < size.lr


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


def test_a_corpus_without_its_own_tokenizer_is_refused(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(UserError, match="not a whole prepared corpus"):
        open_prepared(tmp_path)
    other = tmp_path / "other"
    shutil.copytree(corpus, other)
    Tokenizer.train(iter(["another text", "of other words"]), 280).save(other)
    with pytest.raises(UserError, match="not the tokenizer"):
        open_prepared(other)


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
