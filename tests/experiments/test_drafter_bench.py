"""The drafter bench on a tiny model, in its three calls: what one leaves the next goes on with; tables are whole."""

from __future__ import annotations

import copy
import gc
import json
import re
import shutil
import signal
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import controller_start, drafter_peers, drafter_speed, drafter_tables, drafter_watch, results
from experiments import drafter, drafter_target
from shoestring.errors import UserError
from shoestring.methods.drafter.model import first_layers
from shoestring.model import Decoder, ModelSpec, load_model
from shoestring.model.parallel import init_weights
from shoestring.serve import Engine, Output
from tiny import tiny_llama

SHAPE = {"d_model": 32, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "d_ff": 64}
TINY = drafter_target.Size(
    SHAPE, 300, 0.8, 32, 4, 0.3, 1, 2e-3, 1, 0, 12, 32, 4, 2, 1e-3, 8, 3, 8, 6, 2, 1,
    small_layers=2, small_width=64, small_batch=4, small_seconds=0.2, small_lr=2e-3,
)  # fmt: skip


@pytest.fixture
def tiny_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--size smoke in seconds, with results of its own."""
    monkeypatch.setenv("SHOESTRING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    monkeypatch.setitem(drafter_target.SIZES, "smoke", TINY)
    corpus = tmp_path / "corpus.jsonl"
    texts = [{"text": f"the {i}. fox and the {i % 7} dogs\n" * 9} for i in range(300)]
    corpus.write_text("".join(json.dumps(text) + "\n" for text in texts))
    tokenize = drafter_target.tokenize_corpus
    monkeypatch.setattr(
        drafter_target,
        "tokenize_corpus",
        lambda source, *args, **kw: tokenize(str(corpus) if source == "python" else source, *args, **kw),
    )


@pytest.mark.lab
@pytest.mark.usefixtures("tiny_text")
def test_prepared_trained_and_timed_by_three_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(drafter_speed.QUEUES, 1, 1)

    def call(main: object, *args: str) -> None:
        monkeypatch.setattr(sys, "argv", ["x", "--keep", str(tmp_path / "kept"), *args])
        main()  # type: ignore[operator]

    size = ["--size", "smoke"]
    with pytest.raises(SystemExit, match="not prepared within"):
        call(drafter.main, *size, "--wait", "0.1")
    call(drafter.main, *size, "--prepare")
    assert not results.newest("drafter") and (tmp_path / "kept/ready.json").is_file()
    monkeypatch.setattr(drafter, "train_target", None)  # it is there
    call(
        drafter.main,
        *size,
        "--no-speed",
        "--cases",
        "AdaSPEC",
        "AdaSPEC, 2.5x batch",
        "LK",
        "--longer",
        "LK",
        "--longer-steps",
        "3",
    )
    lines = results.newest("drafter")
    budgets = {(n["case"], n["config"]["budget"]) for n in lines}
    assert budgets == {
        ("n-gram lookup", "no training"),
        ("first layers, untrained", "no training"),
        ("small model, not distilled", "no training"),
        ("LK", "equal steps"),
        ("AdaSPEC", "equal steps"),
        ("AdaSPEC", "equal compute"),
        ("AdaSPEC, 2.5x batch", "equal steps"),
        ("AdaSPEC, 2.5x batch", "equal compute"),
        ("LK", "more steps"),
        ("n-gram, then LK", "more steps"),
        ("n-gram of 4, then LK", "more steps"),
    }
    assert all(n["ratio"] is None and 0 <= n["quality"]["sampled_acceptance"] <= 1 for n in lines)
    assert drafter.table().count("\n| AdaSPEC |") == 2 and drafter.batches() == "Not measured yet."

    call(drafter_speed.main, "--repeats", "1", "--batches", "1", "2")
    lines = results.newest("drafter")
    timed = [n for n in lines if n["metric"] == "tokens_per_s" and n["config"]["budget"] != "batches"]
    assert len(timed) == 10 and all(n["ratio"] > 0 and n["quality"]["sampled_ratio"] > 0 for n in timed)
    many = [
        (n["config"]["batch"], n["config"]["drafter"], n["config"]["text"]) for n in lines if "batch" in n["config"]
    ]
    assert len(many) == 2 * (3 + 3) + 2  # one controller for all loads with greedy texts only
    loads = [n for n in lines if "batch" in n["config"]]
    assert all(n["quality"]["ratio_sum"] > 0 and n["config"]["load"] == "refilled" for n in loads)
    chosen = [n for n in loads if n["config"]["drafter"] != drafter_speed.PLAIN_AGAIN]
    assert all(set(n["quality"]["steps"]) <= {"plain", "drafted", "probe"} for n in chosen)
    assert any(n["quality"]["steps"].get("plain") for n in chosen)
    again = [n for n in loads if n not in chosen]  # two runs that do the same; nobody chose anything
    assert [n["config"]["batch"] for n in again] == [2, 2] and not any("steps" in n["quality"] for n in again)
    assert all(0 < share < 1 for n in loads for share in n["quality"]["reading"])
    assert {n["config"]["drafter"] for n in chosen} == {"LK", "n-gram, then LK", "first layers, untrained"}
    rows = drafter.table().splitlines()
    assert sum(row.startswith("| LK |") for row in rows) == 2, "the timed line stands for both"
    assert drafter.batches().count(" to ") == 14 + 1  # a row a load, and the header

    before = len(results.newest("drafter"))
    call(
        drafter_speed.main,
        "--repeats",
        "1",
        "--batches",
        "1",
        "--sampled-only",
        "--temperatures",
        "0.7",
        "--rules",
        "coupled",
        "block",
    )
    added = results.newest("drafter")[before:]
    assert {(n["config"]["batch"], n["config"]["text"]) for n in added} == {(1, "drawn at 0.7")}
    assert [n["config"].get("rule") for n in added] == [None] * 3 + ["block"] * 3


class Calls:
    """Calls of the bench for `rows` alone, of 30 steps each, that a signal may cut off at a step of a training."""

    def __init__(self, rows: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
        self.rows, self.folder, self.monkeypatch, self.capsys = rows, folder, monkeypatch, capsys
        self.seen: list[tuple[str, int]] = []  # steps that the trainings of the last call logged
        self.stop = "", 0
        log = drafter.PaceLog.log

        def signalling(pace: drafter.PaceLog, step: int, **scalars: Any) -> None:
            log(pace, step, **scalars)
            self.seen.append((pace.what, step))
            if self.seen[-1] == self.stop:
                signal.raise_signal(signal.SIGTERM)

        monkeypatch.setattr(drafter.PaceLog, "log", signalling)

    def __call__(self, folder: str, *more: str, stop: tuple[str, int] = ("", 0)) -> tuple[list[dict[str, Any]], str]:
        """What the call recorded, and what it printed."""
        self.seen, self.stop, before = [], stop, len(results.recorded("drafter"))
        given = ["x", "--size", "smoke", "--steps", "30", "--no-speed", "--target-folder", str(self.folder / folder)]
        self.monkeypatch.setattr(sys, "argv", [*given, "--rows", *self.rows, *more])
        before_signals = signal.getsignal(signal.SIGTERM)
        drafter.main()
        assert signal.getsignal(signal.SIGTERM) is before_signals
        return results.recorded("drafter")[before:], self.capsys.readouterr().out


@pytest.mark.usefixtures("tiny_text")
@pytest.mark.lab
def test_a_training_that_was_cut_off_is_measured_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows alone, with a target that is trained once; the second call ends with the drafter of a whole training."""
    rows = ["DistillSpec:equal steps", "DistillSpec, on-policy:equal steps"]
    call = Calls(rows, tmp_path, monkeypatch, capsys)
    lines, told = call("kept", stop=("DistillSpec, equal steps", 10))  # too early for a row
    assert not lines and "cut off at step 10 of 30" in told and "not measured" in told
    assert f"no time for {rows[1].replace(':', ', ')}" in told and "next: the target's training, 0 s" in told
    monkeypatch.setattr(drafter, "train_target", None)  # it is there
    lines, told = call("kept", stop=("DistillSpec, equal steps", 20))
    (line,) = lines
    assert line["config"]["budget"] == "equal steps, cut" and "the same call goes on" in told
    assert "next: DistillSpec, equal steps, 30 steps, 10 of them done" in told
    assert (line["config"]["steps"], line["config"]["planned_steps"]) == (20, 30)
    assert not list((tmp_path / "kept/rows").glob("*")), "not for drafter_speed.py"
    shutil.copytree(tmp_path / "kept", tmp_path / "other")
    shutil.rmtree(tmp_path / "other/training")
    found, told = call("kept")
    assert [n["config"]["budget"] for n in found] == ["equal steps"] * 2 and "target's training" not in told
    assert all("planned_steps" not in n["config"] and n["config"]["steps"] == 30 for n in found)
    assert not list((tmp_path / "kept/training").glob("*"))
    whole, told = call("other")
    assert [n["quality"] for n in whole] == [n["quality"] for n in found]
    assert re.search(r"next: DistillSpec, on-policy, equal steps, 30 steps, no estimate yet\n", told)
    known = drafter.Seconds(tmp_path / "other/seconds.json").known
    assert set(known) == {"scores", "measurement", "DistillSpec", "DistillSpec, on-policy"}
    found, told = call("other", "--deadline", "0.001")
    assert not found and told.count("no time for") == 2
    with pytest.raises(UserError, match="--size smoke made"):
        call("kept", "--size", "cpu")
    with pytest.raises(SystemExit):
        call("kept", "--rows", "DistillSpec:for ever")


@pytest.mark.usefixtures("tiny_text")
@pytest.mark.lab
def test_a_reference_that_was_trained_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """AdaSPEC is cut off in the training of its reference, in the reference's losses and in its own training."""
    row = "AdaSPEC, equal steps"
    call = Calls([row.replace(", ", ":")], tmp_path, monkeypatch, capsys)
    call("kept", "--prepare")
    shutil.copytree(tmp_path / "kept", tmp_path / "whole")
    assert not call("kept", stop=(f"the reference of {row}", 10))[0]
    losses = drafter.reference_losses

    def cut(*args: Any, **more: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return losses(*args, **more)

    monkeypatch.setattr(drafter, "reference_losses", cut)
    assert not call("kept")[0]
    assert call.seen == [(f"the reference of {row}", step) for step in (20, 30)]
    monkeypatch.setattr(drafter, "reference_losses", losses)
    assert not call("kept", stop=(row, 10))[0]
    assert call.seen == [(row, 10)]
    known = drafter.Seconds(tmp_path / "kept/seconds.json").known
    found, _ = call("kept")
    assert call.seen == [(row, 20), (row, 30)]
    assert drafter.Seconds(tmp_path / "kept/seconds.json").known.keys() - known.keys() == {"measurement"}
    assert not list((tmp_path / "kept/training").glob("*"))
    whole, _ = call("whole")
    assert call.seen == [(what, step) for what in (f"the reference of {row}", row) for step in (10, 20, 30)]
    assert [n["quality"] for n in whole] == [n["quality"] for n in found] and len(whole) == 1
    assert row.split(",")[0] in drafter.Seconds(tmp_path / "whole/seconds.json").known


@pytest.mark.usefixtures("tiny_text")
@pytest.mark.lab
def test_a_drafter_that_begins_with_a_small_model_counts_its_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = Calls(["DistillSpec:equal steps", "DistillSpec, pre-trained:equal steps"], tmp_path, monkeypatch, capsys)
    plain, small = calls("kept", "--target-steps", "2")[0]
    told = json.loads((tmp_path / "kept/small.json").read_text())
    assert (plain["config"]["layers"], small["config"]["layers"], small["config"]["width"]) == (1, 2, 64)
    assert small["config"]["small_tokens"] == told["tokens"] > 0 and "small_tokens" not in plain["config"]
    spec, case = load_model(tmp_path / "kept/small").spec, next(c for c in drafter.CASES if c.small)
    target = load_model(tmp_path / "kept/target").spec
    flops = told["tokens"] * spec.flops_per_token(TINY.context) + 30 * drafter.step_flops(target, TINY, case)
    assert small["config"]["teraflops"] == pytest.approx(flops / 1e12, rel=0.01)

    monkeypatch.setattr(drafter, "train_small", None)  # it is kept
    calls("kept", "--seed", "2")

    at = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("kept/drafters/*/drafter.json")}
    assert len(at) == 4 and all(len(said["acceptance"]) == drafter.NUM_DRAFTS for said in at.values())
    given = ["x", "--keep", str(tmp_path / "kept"), "--queues", "2", "--temperatures", "1"]
    monkeypatch.setattr(sys, "argv", given)
    controller_start.main()
    lines = results.newest("controller_start")
    known = at["DistillSpec-pre-trained-equal-steps-1"]["acceptance"]
    assert [(n["case"], n["metric"], n["config"].get("acceptance")) for n in lines] == [
        (case, run, chances)
        for case, chances in ((controller_start.KNOWN, known), (controller_start.UNKNOWN, None))
        for run in ("first", "second")
    ]
    assert all(0 < n["quality"]["lowest"] <= n["quality"]["mean"] for n in lines)
    assert controller_start.table().count("| 1 | kernel by kernel | acceptance ") == 2
    monkeypatch.setattr(sys, "argv", [*given, "--drafter", "LK"])
    with pytest.raises(UserError, match="has DistillSpec; DistillSpec, pre-trained"):
        controller_start.main()


def test_more_steps_cost_what_the_largest_case_costs() -> None:
    spec, size = ModelSpec(4096, 512, 8, 8, 4, 64, 1536, 512), drafter_target.SIZES["medium"]
    args = SimpleNamespace(rows=[("DistillSpec", "more steps"), ("LK", "equal steps")], longer_steps=0)
    longer, usual = drafter.plan_of(args, spec, size)  # type: ignore[arg-type]
    assert (longer.steps, usual.steps) == (1733, 400)
    costs = [p.steps * drafter.step_flops(spec, size, p.case) for p in (longer, usual)]
    largest = 400 * drafter.step_flops(spec, size, drafter.LARGEST)
    assert costs[0] == pytest.approx(largest, rel=1e-3) and costs[1] < largest / 4


@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.few(1)
def test_a_drafter_written_into_a_running_engine_is_measured_as_one_of_its_own(
    trimmed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the programs that a GPU captures."""
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(drafter, "DraftModel", partial(drafter.DraftModel, graphs=True))
    target, others = tiny_llama(), [first_layers(tiny_llama(seed=seed), 1) for seed in (1, 2, 0)]
    bench = object.__new__(drafter.Bench)
    bench.target, bench.folder, bench.seed, bench.name, bench.layers = target, tmp_path, 1, "tiny", 1
    bench.size, bench.prompts = replace(TINY, new_tokens=24), [[1, 2, 3, 4], [9, 8, 7, 6]]
    bench.vocab_ids = [*range(0, 300, 2), 9] if trimmed else None
    bench.seconds = drafter.Seconds(tmp_path / "seconds.json")

    def measured(model: Decoder) -> dict[str, Any]:
        row = bench.keep("LK", "equal steps", copy.deepcopy(model), steps=2)
        bench.measure(row)
        return row.told["quality"]

    bench.engine, bench.served = None, {}
    shared = [measured(model) for model in others]
    (served,) = bench.served.values()
    assert served.runner.num_graphs > 0
    for model, found in zip(others, shared, strict=True):
        bench.engine, bench.served = None, {}
        assert measured(model) == found
    assert len({json.dumps(found) for found in shared}) == 3, "they differ"


def test_a_training_is_estimated_from_others_of_its_kind(tmp_path: Path) -> None:
    distil, adaspec, on_policy = (drafter.CASES[i] for i in (0, 3, 4))
    cost = {distil.name: 2.0, adaspec.name: 5.0, on_policy.name: 3.0}
    seconds = drafter.Seconds(tmp_path / "seconds.json")

    def about(case: drafter.Case, steps: int) -> float | None:
        found = drafter.Seconds(tmp_path / "seconds.json")  # as a later call reads it
        return found.of_training(drafter.Planned(case, "equal steps", steps), lambda c: cost[c.name])

    assert about(distil, 10) is None
    seconds.note(distil.name, 0.5)
    assert about(distil, 10) == 5.0 and about(adaspec, 10) == 12.5
    assert about(on_policy, 10) is None, "its own text takes time, not operations"


def test_who_serves() -> None:
    def row(case: str, budget: str, drafter: str) -> dict[str, Any]:
        return {"case": case, "drafter": drafter, "config": {"budget": budget}}

    rows = [
        row("AdaSPEC", "equal steps", "a"),
        row("LK", "more steps", "b"),
        row("LK", "equal compute", "c"),
        row("n-gram, then LK", "more steps", "ngram+b"),
        row("first layers, untrained", "no training", "d"),
    ]
    names = ["AdaSPEC", "LK"]
    assert [r["drafter"] for r in drafter_speed.serve_rows(rows, names)] == ["b", "ngram+b", "d"]
    assert [r["drafter"] for r in drafter_speed.serve_rows(rows[:1] + rows[2:], names)] == ["a", "d"]
    assert drafter_speed.serve_rows(rows[2:4], names) == []


def test_adaspec_is_compared_run_by_run_with_as_much_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)

    def note(case: str, budget: str, steps: int, teraflops: float, length: float, **config: Any) -> None:
        kinds = ("accepted_length", "sampled_0.7_accepted_length", "sampled_accepted_length")
        results.record(
            bench="drafter", case=case, metric="acceptance", unit="1", samples=[0.5],
            quality={name: length + i for i, name in enumerate(kinds)},
            config={"target": "T", "budget": budget, "steps": steps, "teraflops": teraflops, **config},
        )  # fmt: skip

    note("DistillSpec", "equal steps", 200, 1.0, 2.0)
    assert drafter_tables.adaspec() == drafter_tables.NOTHING
    note("AdaSPEC, 2.5x batch", "equal steps", 200, 4.0, 3.0, seed=2)  # of another run
    assert drafter_tables.adaspec() == drafter_tables.NOTHING
    note("AdaSPEC, 2.5x batch", "equal steps", 200, 4.0, 2.1)
    note("DistillSpec", "more steps", 400, 2.0, 2.2)  # less compute than AdaSPEC
    begin = "| T | 1 | 2.00 / 3.00 / 4.00 (200 steps) | 2.10 / 3.10 / 4.10 (200 steps) |"
    assert f"{begin}  |" in drafter_tables.adaspec()
    note("DistillSpec", "more steps", 800, 4.0, 2.3)
    assert f"{begin} 2.30 / 3.30 / 4.30 (800 steps) |" in drafter_tables.adaspec()


def test_tables_show_trained_drafters_and_the_newest_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)

    def note(target: str, budget: str, ratio: float, **config: Any) -> None:
        results.record(
            bench="drafter",
            case=config.pop("case", "LK"),
            metric="tokens_per_s",
            unit="tokens/s",
            samples=[100.0 * ratio],
            baseline="plain",
            baseline_value=100.0,
            ratio=ratio,
            quality={"ratio_p20_p80": [ratio, ratio]},
            config={"target": target, "budget": budget, "drafter": "LK", "text": "greedy", **config},
        )

    for target, steps in (("Llama 2x3, old", 50), ("Llama 2x3, new", 250), ("Llama 1x1, small", 9)):
        note(target, "equal steps", 1.5, steps=steps, teraflops=1390.0, layers=1)
        note(target, "batches", 1.1 if "old" in target else 1.3, batch=4)
    found = drafter.table()
    assert "Llama 2x3, new" in found and "Llama 1x1, small" in found and "old" not in found
    assert "| 1,390 |" in found
    assert drafter.batches().count("| 1.30 |") == 2 and "| 1.10 |" not in drafter.batches()
    config = {"drafter": "LK", "text": "greedy", "batch": 4}
    line = {"baseline_value": 100, "value": 97, "ratio": 0.9749, "quality": {}, "config": config}
    assert drafter_tables._batch_row(line)[2:8] == ["4", "closed", "100", "97", "0.975", "0.97 to 0.97"]
    assert "| LK | greedy | 4 | closed |" in drafter.batches()
    note("Llama 2x3, new", "batches", 1.2, batch=4, load="refilled")
    assert "| LK | greedy | 4 | refilled |" in drafter.batches()
    assert drafter_tables._did({"plain": 9}) == "none" and drafter_tables._did(None) == ""
    assert drafter_tables._did({"plain": 9, "probe": 2}) == "none but 2 probes"
    assert drafter_tables._did({"plain": 9, "probe": 1}) == "none but 1 probe"
    assert drafter_tables._did({"plain": 1, "drafted": 7, "probe": 2}) == "90%"
    assert drafter_tables.peers() == "Not measured yet."
    note("Llama 2x3, new", drafter_tables.PEER, 1.2, case="transformers, assisted generation")
    assert "| 100 | 120 | 1.20 (1.20 to 1.20) |" in drafter_tables.peers()
    assert "assisted" not in drafter.table()
    # Every run trains its target anew: shown are the one with most drafters and the last one.
    note("Llama 2x3, new", "equal steps", 1.5, steps=250, case="AdaSPEC", layers=1)
    for target in ("Llama 2x3, between", "Llama 2x3, last"):
        note(target, "equal steps", 1.5, steps=400, layers=1)
    shown = drafter.table()
    assert "2x3, new" in shown and "2x3, last" in shown and "between" not in shown and "old" not in shown


def test_sampled_speeds_are_told_against_both_kinds_of_plain_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    target = "Llama 2x3, 6M parameters, trained on 30.1M tokens of English (validation perplexity 25, 9 tokens)"

    def note(speed: float, without: float, batch: int, text: str, **config: Any) -> None:
        results.record(
            bench="drafter",
            case=f"batch {batch}",
            metric="tokens_per_s",
            unit="tokens/s",
            samples=[speed],
            baseline="plain",
            baseline_value=without,
            ratio=speed / without,
            config={"target": target, "budget": "batches", "drafter": "LK", "batch": batch, "load": "refilled"}
            | {"text": text, "layers": 1, **config},
        )

    assert drafter_tables.sampled() == drafter_tables.NOTHING
    one = {"plain": drafter_tables.ONE_KERNEL}
    for text, speed in (("drawn", 150.0), ("drawn at 0.7", 180.0), ("greedy", 999.0)):
        note(speed, 100.0, 1, text)
        note(124.0, 125.0, 1, text, **one)
        note(600.0, 400.0, 4, text, **one)  # with several requests there is no such kernel
    found = drafter_tables.sampled()
    begin = "| Llama 2x3, 30.1M tokens of English (perplexity 25) | LK |"
    assert f"{begin} drawn | 100 | 150 | 1.50 | 1.50 | 125 | 0.992 | 1.20 |" in found
    assert f"{begin} drawn at 0.7 | 100 | 180 | 1.80 | 1.50 | 125 | 0.992 | 1.44 |" in found
    assert "greedy" not in found and drafter_tables.sampled_target() == target
    assert drafter_tables.speeds(target, "drawn")["LK"][1]["ratio"] == 1.5
    assert "LK, plain steps in one kernel | drawn | 1 |" in drafter.batches()
    assert "LK | drawn | 4 |" in drafter.batches()


def test_expanded_blocks_add_nothing_yet() -> None:
    spec = ModelSpec(50, 32, 2, 4, 2, 8, 64, 16)
    small, large = Decoder(spec), Decoder(replace(spec, num_layers=6))
    for seed, model in enumerate((small, large)):
        init_weights(model, seed)
    tokens = torch.arange(12)[None]
    want = small(tokens)
    assert not torch.allclose(large(tokens), want)
    assert torch.allclose(drafter_target.expand(small, large)(tokens), want, atol=1e-6)
    large(tokens).sum().backward()
    assert large.blocks[1].mlp.down.weight.grad.abs().sum() > 0  # type: ignore[union-attr, operator]


def test_english_and_python_are_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = drafter_target.documents
    code = [SimpleNamespace(text=f"def f{i}():\n    return {i}\n") for i in range(40)]
    monkeypatch.setattr(drafter_target, "documents", lambda s, **kw: code if s == "python" else read(s))
    (tmp_path / "english/wiki").mkdir(parents=True)
    for name in ("wiki/valid", "wiki/test", "stories"):
        texts = [f"{name} {i}: Once there was a fox." for i in range(20)]
        (tmp_path / f"english/{name}.txt").write_text("<|endoftext|>".join(texts))
    path = Path(drafter_target.english_and_python(tmp_path / "english", tmp_path / "mixed", 1.0))
    found = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    assert len(found) == 80 and not any("test" in text for text in found)
    assert 5 < sum(text.startswith("def") for text in found[:40]) < 35, "every part is a mixture"


def test_a_turn_that_came_too_late_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"plain": 100, "good": 180}
    asked: list[str] = []

    def run(self: drafter_speed.Turns, way: drafter_speed.Way, temperature: float) -> drafter_speed.Run:
        asked.append(way.name)
        return drafter_speed.Run(rates[way.name], 1.0, steps=Counter(plain=1))

    monkeypatch.setattr(drafter_speed.Turns, "run", run)
    turns = drafter_speed.Turns(None, [[1]], [8], 1)  # type: ignore[arg-type]
    ways = [drafter_speed.Way("plain"), drafter_speed.Way("good", turns=4)]
    found = turns.measure(ways, 0.0, repeats=5, until=0.0)
    assert len(found.warm) == drafter_speed.WARM_TURNS and len(found.turns) == 1
    assert found.total(1) == pytest.approx(1.8)
    assert found.ratios(1) == [1.8] and found.first(1) == 1.8
    assert len(turns.measure(ways, 0.0, repeats=5, until=1e12).turns) == 5
    asked.clear()
    few = drafter_speed.Way("good", turns=2)
    pairs, fewer = turns.measure_pairs([ways[1], few], 0.0, until=1e12)
    assert pairs.of(1) == [180.0] * 4 and len(pairs.warm) == 1 and pairs.first(1) == 1.8
    assert len(fewer.turns) == 2 and pairs.steps(1) == {"plain": 4} and pairs.seconds() == 1.0
    assert asked[:8] == ["plain", "good", "plain", "good", "good", "plain", "good", "plain"]


def test_all_seconds_count_by_what_was_written_in_them() -> None:
    run = drafter_speed.Run
    found = drafter_speed.Rates([], [[run(100, 1.0), run(90, 0.5)], [run(100, 1.0), run(110, 2.0, reading=0.5)]])
    assert found.reading(0) == 0 and found.reading(1) == pytest.approx(1.0 / 2.5)
    assert found.ratios(1) == pytest.approx([1.8, 0.55]) and found.total(1) == pytest.approx(200 / 2.5 / 100)


def test_a_run_ends_when_a_place_stays_empty() -> None:
    """Whoever ends is followed by the next, so there are always `batch` requests; the last texts are not waited for."""
    model = Decoder(ModelSpec(50, 32, 2, 4, 2, 8, 64, 64))
    init_weights(model, 0)
    engine = Engine(model, max_requests=8, prefix_cache=False, eos_ids=())
    lengths = drafter_speed.uneven(9, 12)
    assert max(lengths) == 12 and min(lengths) >= 6 and len(set(lengths)) > 4
    turns = drafter_speed.Turns(engine, [[1, 2, i] for i in range(9)], lengths, 3)
    seen, step = [], engine.step

    def noted() -> list[Output]:
        seen.append(len(engine.running) + len(engine.waiting))
        return step()

    engine.step = noted  # type: ignore[method-assign]
    found = turns.run(drafter_speed.Way("plain"), 0.0)
    assert set(seen) == {3}, "never fewer at once"
    assert not engine.busy and engine.cache.pool.num_used == 0
    # Three places for as long as there is somebody for each: as many tokens as steps, threefold.
    ends = [0, 0, 0]
    for length in lengths:
        ends[ends.index(min(ends))] += length
    assert found.tokens == 3 * min(ends) == 3 * len(seen) < sum(lengths)
    assert 0 < found.reading < 1 and found.steps == {}


def test_time_is_shared_by_what_is_expected() -> None:
    rows = [{"drafter": "a"}, {"drafter": "ngram+a"}, {"drafter": "first"}]
    assert drafter_speed.turns_of(rows, 1, 6) == {"a": 6, "ngram+a": 3, "first": 3}
    assert drafter_speed.turns_of(rows, 64, 2) == {"a": 2, "first": 2, drafter_speed.PLAIN_AGAIN: 2}
    whole = sum(drafter_speed.expected(rows, batch, drafter_speed.TURNS) for batch in drafter_speed.BATCHES)
    assert whole < 146, "loading and graphs come on top, and 160 seconds are for all"
    assert all(drafter_speed.QUEUES[batch] > 2 * batch for batch in drafter_speed.BATCHES)


def test_drafters_that_are_not_served_are_measured_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"case": "LK", "drafter": "lk", "config": {"budget": "equal compute"}}]
    monkeypatch.setattr(drafter_speed, "Kept", lambda *args: SimpleNamespace(rows=rows, engine=SimpleNamespace()))
    asked: list[float] = []
    found = drafter_speed.Rates([], [])

    def measure(kept: object, temperature: float, *rest: object) -> drafter_speed.Rates:
        asked.append(temperature)
        return found

    monkeypatch.setattr(drafter_speed, "measure_one_at_a_time", measure)
    drafter_speed.measure_all(Path("kept"))
    assert asked == [0.0, 1.0]


def test_a_slow_step_says_where_its_time_went() -> None:
    class Reader:
        def propose(self, requests: list[int], n: int) -> list[int]:
            self._read([(requests[0], 30), (requests[0], 12)])
            return requests

        def _read(self, part: list[tuple[int, int]]) -> None:
            gc.collect()

    drafter, controller = Reader(), drafter_watch.Watched(lambda rows: 0.002)
    controller.proposed = drafter_watch.watch(drafter)
    for _ in range(6):
        assert controller.choose(1) == 0
        controller.record_step(1, 0.002, 1)
    assert controller.choose(1) == 8 and drafter.propose([7], 8) == [7]
    controller.record_drafting(1, 8, 0.06, caught_up=True)
    controller.record_step(9, 0.01, 3)
    found = controller.told(1)
    assert "read 8 of 1 requests 70.0 ms" in found and "1 passes that read 42 rows with 0 alloc" in found
    collected = re.search(r"1 collections of ([0-9.]+) ms", found)
    assert collected and float(collected[1]) > 0
    assert "plain: 6 in 12 ms gave 6" in found and "slow" not in controller.told(1)


def test_the_peer_has_fewer_turns_where_time_is_short() -> None:
    assert drafter_peers.fit(20.0, 0.06, 96) == (96, 3)
    assert drafter_peers.fit(6.0, 0.06, 96) == (33, 3)
    assert drafter_peers.fit(3.0, 0.06, 96) == (25, 2)
    assert drafter_peers.fit(1.2, 0.06, 96) == (20, 1) and drafter_peers.fit(-1.0, 0.06, 96) == (1, 1)
