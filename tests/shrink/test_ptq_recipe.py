"""`shoestring run shrink/ptq` from a model folder to a packed one, through the real command line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from interrupted import dying
from refusals import refused
from shoestring.cli.app import run_cli
from shoestring.evals.model_row import check_apart
from shoestring.model import load_model, save_model
from shoestring.recipes.shrink import ptq
from shoestring.recipes.shrink_run import calibration_windows
from shoestring.runlog import read_jsonl
from shoestring.shrink.block_files import BlockFiles
from shoestring.shrink.gptq import Gptq
from shoestring.shrink.quantize import quantize


@pytest.fixture
def cli(cli: Callable[..., str]) -> Callable[..., str]:
    return partial(cli, "run", "shrink/ptq", "device=cpu")


SMALL = ["model=model", "calib_windows=6", "calib_context=32", "context=32", "max_tokens=512"]


def test_gptq_end_to_end(cli: Callable[..., str], here: Path) -> None:
    argv = [*SMALL, "format=int3:g32", "calib=calib.txt", "text=test.txt"]
    out = cli(*argv, "run=gptq", "dense_out=dense")
    assert "gptq+clip by block: 3/3" in out and "21 layers at 3.75 bits per weight, embed as int8:sym:g0" in out
    before, after = read_jsonl(here / "gptq/evals.jsonl")
    assert (
        before["format"] == "dense" and after["format"] == "int3:g32 + int8:sym:g0" and after["bits_per_weight"] == 3.75
    )
    cli(*argv, "run=rtn", "method=rtn")
    rounded = read_jsonl(here / "rtn/evals.jsonl")[1]
    assert after["perplexity"] != rounded["perplexity"]

    told = json.loads((here / "gptq/model/quantization.json").read_text())
    plain = json.loads((here / "rtn/model/quantization.json").read_text())
    assert told["method"] == "gptq+clip" and told["calibration_tokens"] == 6 * 32 and len(told["layers"]) == 22
    by_name = {layer["name"]: layer for layer in told["layers"]}
    for layer in plain["layers"][:6]:  # the first block sees the same inputs in both
        assert by_name[layer["name"]]["output_error"] < layer["output_error"]
    page = (here / "gptq/report.html").read_text()
    assert "Error by block" in page and "blocks.2.mlp.down" in page
    assert [row["step"] for row in read_jsonl(here / "gptq/metrics.jsonl")] == [1, 2, 3]

    packed = load_model(here / "gptq").model
    dense = load_model(here / "dense").model
    for name in ("blocks.1.mlp.up", "embed"):
        layer = packed.get_submodule(name)
        assert layer.packed and (layer.effective_weight(torch.float32) == dense.get_submodule(name).weight).all()  # type: ignore


@pytest.mark.parametrize("recipe", ["rtn", "ptq"])
def test_a_place_too_small_for_the_result_is_said_before_weights_are_read(
    recipe: str, command: Callable[..., str], own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ["method=rtn"] if recipe == "ptq" else []
    argv = ["run", f"shrink/{recipe}", "model=model", "format=int4:g32", "text=test.txt", "max_tokens=64", *more]
    command(*argv, "device=cpu", "run=first")
    size, usage = (own_home / "first/model/packed.safetensors").stat().st_size, shutil.disk_usage(own_home)

    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    with monkeypatch.context() as patch:
        patch.setattr("shoestring.recipes.shrink.rtn.load_model", read)
        patch.setattr("shoestring.recipes.shrink_run.load_model", read)
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=int(0.85 * size)))
        said = command(*argv, "device=cpu", "run=second", fails=True)
        assert "cannot write second/model: it needs" in said and "choose another folder" in said
        assert not (own_home / "second").exists()
        if recipe == "ptq":
            patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=size // 3))
            budget = ["bits_budget=3", "calib=calib.txt", "run=second"]
            said = command("run", "shrink/ptq", "model=model", *budget, "device=cpu", fails=True)
            assert "cannot write second/model: it needs" in said, "the cheapest candidate says how little it can be"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=size))
    command(*argv, "device=cpu", "run=second")
    assert (own_home / "second/model/packed.safetensors").stat().st_size == size


def test_the_clip_before_gptq_has_the_objective_that_is_asked_for() -> None:
    for objective in ("group", "row"):
        method = ptq.pick_method(ptq.Config(method="gptq+clip", objective=objective))  # type: ignore[arg-type]
        assert isinstance(method, Gptq) and method.clip is not None and method.clip.objective == objective


def test_windows_longer_than_the_model_reads_are_cut_and_that_is_said(cli: Callable[..., str], here: Path) -> None:
    asked = ["model=model", "calib=calib.txt", "calib_windows=2", "calib_context=100"]
    out = cli(*asked, "method=rtn", "format=int4:g32", "run=long")
    assert "calib_context=100 is more than the model's 64 positions: windows of 64 are used" in out
    assert json.loads((here / "long/model/quantization.json").read_text())["calibration_tokens"] == 2 * 64


@pytest.mark.parametrize("method", ["clip", "awq", "gptq+clip"])
def test_other_methods_and_sources(cli: Callable[..., str], here: Path, method: str) -> None:
    source = {"clip": "calib.txt", "awq": "corpus.jsonl,own", "gptq+clip": "corpus.jsonl"}[method]
    cli(*SMALL, "rules=*.mlp.*=nf3:g32;*.attn.*=int4:g32", f"method={method}", f"calib={source}", f"out=out-{method}",
        "memory_gb=0", f"run=run-{method}", "inputs=quantized")  # fmt: skip
    told = json.loads((here / f"out-{method}/quantization.json").read_text())
    assert told["method"] == method
    assert {layer["format"] for layer in told["layers"]} == {"nf3:s2:g32", "int4:g32", "int8:sym:g0"}
    assert all(0 < layer["output_error"] < 0.2 for layer in told["layers"] if layer["name"] != "embed")
    assert load_model(here / f"out-{method}").model.blocks[0].mlp.up.packed  # type: ignore[union-attr]


def test_calibration_on_several_texts_and_on_what_the_model_writes(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(here)
    loaded = load_model(here / "model")
    read = [calibration_windows(loaded, "model", text, num, 16, "gptq") for text, num in (("calib.txt", 2), ("own", 3))]
    both = calibration_windows(loaded, "model", "calib.txt,own", 4, 16, "gptq")
    assert both.shape == (4, 16) and torch.equal(both[:2], read[0]) and torch.equal(both[2:], read[1][:2])
    assert torch.equal(calibration_windows(loaded, "model", None, 3, 16, "gptq"), read[1])
    assert "the model writes 3 windows" in capsys.readouterr().out
    loaded.model.compute_dtype = torch.bfloat16  # as when it is streamed
    refused("needs a calibration text", calibration_windows, loaded, "model", None, 3, 16, "gptq")
    refused("2 texts and calib_windows=1", calibration_windows, loaded, "model", "calib.txt,own", 1, 16, "gptq")
    refused("the same file", check_apart, {"text": "calib.txt", "calib": "test.txt,calib.txt"}, "calib")


@pytest.mark.parametrize("place", ["before", "after"])
def test_ctrl_c_while_evaluating(
    cli: Callable[..., str], here: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    argv = [*SMALL, "method=rtn", "format=int3:g32", "text=test.txt", f"run=eval-{place}"]
    monkeypatch.setattr(ptq, "evaluate_row", dying(["before", "after"].index(place), ptq.evaluate_row))
    assert f"resume=eval-{place}" in cli(*argv, fails=True)
    monkeypatch.undo()
    monkeypatch.chdir(here)
    cli(f"resume=eval-{place}")
    assert [r["model"] for r in read_jsonl(here / f"eval-{place}/evals.jsonl")] == ["before", "after"]


def test_a_resumed_run_is_not_touched_before_all_is_checked(
    cli: Callable[..., str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "own.txt").write_text((here / "test.txt").read_text())
    (here / "empty.txt").write_text("")
    with monkeypatch.context() as patch:
        patch.setattr("shoestring.shrink.blockwise.quantize", dying(0, quantize))
        stopped = cli(*SMALL, "calib=calib.txt", "format=int3:g32", "text=own.txt", "run=held", fails=True)
    assert "stopped after 0 of 3 blocks" in stopped
    saved = (here / "held/config.json").read_text()
    for argument in ("text=empty.txt", "text=test.txt", "data=corpus.jsonl", "context=16", "max_tokens=64"):
        assert f"was started with {argument.split('=')[0]}=" in cli("resume=held", argument, fails=True)
    assert "resume=held goes on in that folder" in cli("resume=held", "run=elsewhere", fails=True)
    (here / "own.txt").write_text("")  # the same text, and there is nothing in it any more
    assert "own.txt has less than two tokens" in cli("resume=held", fails=True)
    assert (here / "held/config.json").read_text() == saved and not (here / "elsewhere").exists()


def test_without_a_text_the_last_tenth_of_the_calibration_text_is_measured(cli: Callable[..., str], here: Path) -> None:
    long = (here / "calib.txt").read_text() * 6
    (here / "long.txt").write_text(long)
    said = cli("model=model", "calib=long.txt", "calib_windows=2", "calib_context=16", "format=int4:g32", "run=tenth",
               "context=16", "max_tokens=64")  # fmt: skip
    rows = read_jsonl(here / "tenth/evals.jsonl")
    assert [row["text"] for row in rows] == ["long.txt (its last tenth, not calibrated on)"] * 2
    assert all(row["perplexity"] > 1 for row in rows) and "no perplexity" not in said
    (here / "brief.txt").write_text(long[:400])
    said = cli("model=model", "calib=brief.txt", "calib_windows=1", "calib_context=16", "format=int4:g32", "run=short")
    assert (
        "perplexity is not measured, and loss where it was calibrated; give text=FILE" in said
        and "perplexity" not in read_jsonl(here / "short/evals.jsonl")[0]
    )


def test_ctrl_c_and_resume(cli: Callable[..., str], here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = [*SMALL, "format=int3:g32", "calib=calib.txt", "text=test.txt"]
    cli(*argv, "run=whole")
    save = BlockFiles.save

    def stop(self: BlockFiles, index: int, *rest: Any) -> None:
        save(self, index, *rest)
        if index == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(BlockFiles, "save", stop)
    assert run_cli(["run", "shrink/ptq", *argv, "run=cut", "device=cpu"]) != 0
    assert not (here / "cut/model").exists()
    monkeypatch.setattr(BlockFiles, "save", save)
    assert "was started with format=int3:g32" in cli("resume=cut", "format=int2:g32", fails=True)
    with monkeypatch.context() as patch:  # and once more when the model is saved, but not the report
        patch.setattr("shoestring.recipes.shrink_run.write_report", lambda *a, **k: 1 / 0)
        assert run_cli(["run", "shrink/ptq", "resume=cut", "out=elsewhere"]) == 1
    (here / "mine").mkdir()
    (here / "mine/config.json").write_text("{}")
    assert "mine exists already" in cli("resume=cut", "out=mine", fails=True)
    cli("resume=cut", "out=elsewhere")
    assert [row["model"] for row in read_jsonl(here / "cut/evals.jsonl")] == ["before", "after"]
    (here / "elsewhere").rename(here / "cut/model")
    assert (
        read_jsonl(here / "cut/evals.jsonl")[1]["perplexity"] == read_jsonl(here / "whole/evals.jsonl")[1]["perplexity"]
    )
    assert [row["step"] for row in read_jsonl(here / "cut/metrics.jsonl")] == [1, 2, 3]
    assert (here / "cut/model/packed.safetensors").read_bytes() == (
        here / "whole/model/packed.safetensors"
    ).read_bytes()
    assert not (here / "cut/blocks").exists()
    assert "nothing to go on with" in cli("resume=cut", fails=True)


def test_a_run_does_not_go_on_with_other_weights(
    command: Callable[..., str], own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks that it has would be those of another model."""
    save = BlockFiles.save

    def stop(self: BlockFiles, index: int, *rest: Any) -> None:
        save(self, index, *rest)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(BlockFiles, "save", stop)
        argv = [*SMALL, "format=int3:g32", "calib=calib.txt", "run=cut", "device=cpu"]
        assert run_cli(["run", "shrink/ptq", *argv]) != 0
    weights = own_home / "model/model.safetensors"
    old, tensors = weights.read_bytes(), load_file(weights)
    tensors["model.layers.0.mlp.up_proj.weight"] *= 1.01
    save_file(tensors, weights, metadata={"format": "pt"})
    said = command("run", "shrink/ptq", "resume=cut", fails=True)
    assert "the weights of model are not those that this run began with" in said
    weights.write_bytes(old)  # a copy is the same model
    command("run", "shrink/ptq", "resume=cut")


BLOCKWISE = ["method=blockwise", "calib=calib.txt", "epochs=1", "train_batch=2"]


def test_blockwise_end_to_end_and_resume(cli: Callable[..., str], here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = [*SMALL, *BLOCKWISE, "format=int2:g32", "text=test.txt"]
    out = cli(*argv, "run=blockwise")
    assert "blockwise by block: 3/3" in out and "21 layers at 2.75 bits" in out
    told = json.loads((here / "blockwise/model/quantization.json").read_text())
    assert told["method"] == "blockwise" and len(told["blocks"]) == 3 and len(told["layers"]) == 22
    assert all(0 < b["after"] <= b["before"] for b in told["blocks"])
    save = BlockFiles.save

    def stop(self: BlockFiles, index: int, *rest: Any) -> None:
        save(self, index, *rest)
        if index == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(BlockFiles, "save", stop)
    assert run_cli(["run", "shrink/ptq", *argv, "run=bw-cut", "device=cpu"]) != 0
    monkeypatch.setattr(BlockFiles, "save", save)
    assert "was started with epochs=1" in cli("resume=bw-cut", "epochs=2", fails=True)
    cli("resume=bw-cut")
    packed = [(here / run / "model/packed.safetensors").read_bytes() for run in ("blockwise", "bw-cut")]
    assert packed[0] == packed[1]
    assert "between 0 and 1" in cli(*SMALL, *BLOCKWISE, "lr_weight=7", fails=True)


def test_a_budget_of_bits(cli: Callable[..., str], here: Path) -> None:
    argv = [*SMALL, "bits_budget=3.4", "candidates=int2:g32,int3:g32,int4:g32", "calib=calib.txt"]
    out = cli(*argv, "run=mixed", "method=clip", "damage_windows=2", "damage_units=block")
    assert "damage by block: 9/9" in out and "of 3.4 bits per weight" in out
    told = json.loads((here / "mixed/model/quantization.json").read_text())
    assert told["bits_per_weight"] <= 3.4 and told["mixed_bits"]["exact"]
    chosen = {layer["name"]: layer["format"] for layer in told["layers"]}
    for unit in told["mixed_bits"]["units"]:
        assert {chosen[name] for name in unit["layers"]} == {unit["format"]}
    assert len(set(chosen.values())) > 1
    assert json.loads((here / "mixed/mixed_bits.json").read_text()) == told["mixed_bits"]
    assert not (here / "mixed/damage.jsonl").exists()
    assert "give one of them" in cli(*argv, "rules=*=int4", fails=True)


# -- streamed ------------------------------------------------------------------------------------------------
STREAMED = ["model=half", *SMALL[1:], "calib=calib.txt", "text=test.txt"]


@pytest.fixture
def half(here: Path) -> Path:
    """A checkpoint in bf16: offloaded, it is narrower than what a CPU computes in."""
    if not (here / "half").exists():
        loaded = load_model(here / "model")
        save_model(here / "half", loaded.model, loaded.tokenizer, dtype=torch.bfloat16)
    return here / "half"


def artefacts(run: Path) -> list[Any]:
    told = json.loads((run / "model/quantization.json").read_text())
    rows = [{k: v for k, v in row.items() if k != "time"} for row in read_jsonl(run / "evals.jsonl")]
    return [(run / "model/packed.safetensors").read_bytes(), told, rows]


@pytest.mark.parametrize(
    "method",
    [
        ["method=gptq"],
        ["method=blockwise", "epochs=1", "held_out=0.3"],
        ["method=awq", "bits_budget=3.4", "candidates=int2:g32,int4:g32", "damage_windows=2"],
        ["method=rtn", "memory_gb=0"],
    ],
    ids=["gptq", "blockwise", "a budget", "rtn"],
)
@pytest.mark.few(2)
def test_streamed_runs_leave_the_same_files(cli: Callable[..., str], here: Path, half: Path, method: list[str]) -> None:
    argv = [*STREAMED, "format=int3:g32", *method]
    runs = {stream: here / f"{stream}-{method[0].split('=')[1]}" for stream in ("true", "false")}
    for stream, run in runs.items():
        cli(*argv, f"stream={stream}", f"run={run}", f"dense_out={run}-dense")
    assert artefacts(runs["true"]) == artefacts(runs["false"])
    dense = [Path(f"{run}-dense/model.safetensors").read_bytes() for run in runs.values()]
    assert dense[0] == dense[1]


def test_auto_streams_what_would_fill_the_device(
    cli: Callable[..., str], here: Path, half: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onloaded: list[Any] = []

    def spy(*args: Any, **options: Any) -> Any:
        onloaded.append(options["onload_device"])
        return quantize(*args, **options)

    loads: list[Any] = []

    def loading(path: str, **options: Any) -> Any:
        loads.append(options)
        return load_model(path, **options)

    monkeypatch.setattr("shoestring.shrink.blockwise.quantize", spy)
    monkeypatch.setattr("shoestring.recipes.shrink_run.load_model", loading)
    argv = ["model=half", "method=rtn", "format=nf3:g32"]
    cli(*argv, "run=roomy")
    monkeypatch.setattr("shoestring.host.block_offload.free_bytes", lambda device: 1000)
    cli(*argv, "run=crowded")
    cli(*argv, "run=told", "stream=false")
    assert onloaded == [None, torch.device("cpu"), None]
    # What fits goes to the device at once; the other stays in the host's memory, as it is stored.
    there = {"device": torch.device("cpu"), "dtype": torch.float32}
    assert loads == [there, {"dtype": torch.bfloat16}, there]
    assert artefacts(here / "roomy") == artefacts(here / "crowded") == artefacts(here / "told")
    assert "auto" in cli(*argv, "stream=yes", fails=True)


def test_bad_input_is_one_line_and_leaves_no_run(cli: Callable[..., str], here: Path) -> None:
    before = {p.name for p in here.iterdir()}
    assert "model= is missing" in cli("calib=calib.txt", fails=True)
    assert "flatters" in cli("model=model", "calib=test.txt", "text=test.txt", fails=True)
    (here / "short.txt").write_text("a b c")
    assert "give a longer text" in cli("model=model", "calib=short.txt", fails=True)
    (here / "short.txt").write_text("")
    assert "give a longer text" in cli("model=model", "calib=short.txt", fails=True)
    (here / "short.txt").unlink()
    assert "gptq" in cli("model=model", "method=gtpq", fails=True)
    assert "damping" in cli("model=model", "damping=0", fails=True)
    assert "use group" in cli(*SMALL, "calib=calib.txt", "format=int3:g48", "run=bad", fails=True)
    assert {p.name for p in here.iterdir()} == before
