"""The 2:4 recipes through the real command line, in miniature; resume; what they leave behind."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from refusals import refused
from shoestring.cli.app import run_cli
from shoestring.formats import FormatLinear
from shoestring.methods.sparse24 import tune
from shoestring.methods.sparse24.format import Sparse24
from shoestring.methods.sparse24.kernels import cusparselt_table
from shoestring.methods.sparse24.kernels.masks import is_24
from shoestring.methods.sparse24.recipes import fst
from shoestring.methods.sparse24.training import save_packed
from shoestring.model import load_model
from shoestring.runlog import read_jsonl

TINY = [
    *("size=tiny", "d_model=32", "num_layers=2", "num_heads=2", "num_kv_heads=2", "d_ff=64", "vocab_size=300"),
    *("context=16", "batch=4", "warmup=2", "log_every=5", "eval_every=0", "flip_every=2", "device=cpu"),
]


@pytest.fixture(autouse=True)
def in_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOESTRING_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("\n".join(f"line {i} of {i * i} words" for i in range(1500)))


def run(recipe: str, *options: str) -> None:
    given = {option.split("=")[0] for option in options}
    rest = [option for option in TINY if option.split("=")[0] not in given]
    assert run_cli(["run", recipe, "data=text.txt", *rest, *options]) == 0


def test_a_probe_too_short_to_measure_ends_before_any_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["run", "train/sparse24_fst", "data=text.txt", *TINY, "probe=3", "run=short"]) == 2
    assert "give at least 4" in capsys.readouterr().err
    assert not (tmp_path / "short").exists()


@pytest.mark.parametrize("weight_grad", ["mvue", pytest.param("auto", marks=pytest.mark.lab)])
def test_fst_delivers_a_dense_model_and_resumes(tmp_path: Path, weight_grad: str) -> None:
    run("train/sparse24_fst", f"weight_grad={weight_grad}", "steps=18", "refresh=4", "save_every=10", "run=whole")
    metrics = read_jsonl(tmp_path / "whole/metrics.jsonl")
    for name in ("flip_rate", "mask_change", "kept_magnitude", "masked_magnitude", "mu", "masked_decay"):
        assert any(name in row for row in metrics), name
    weights = load_file(tmp_path / "whole/model/model.safetensors")
    assert not any("mask" in name for name in weights)
    assert not is_24(weights["model.layers.0.mlp.up_proj.weight"])
    page = (tmp_path / "whole/report.html").read_text()
    assert "Flip rate" in page and "Kept and masked weights" in page

    # The checkpoint of step 10 goes on to the same model.
    for newer in (tmp_path / "whole/checkpoints").glob("step-*18"):
        newer.rename(tmp_path / "later")
    assert run_cli(["run", "train/sparse24_fst", "resume=whole"]) == 0
    again = load_file(tmp_path / "whole/model/model.safetensors")
    assert all(torch.equal(again[name], value) for name, value in weights.items())


def test_fst_without_a_finish_delivers_24_weights_that_training_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: dict[torch.Size, torch.Tensor] = {}
    multiply = Sparse24.train_with

    def noting(format: Sparse24, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            used[weight.shape] = weight.detach() != 0
        return multiply(format, weight, *rest)

    monkeypatch.setattr(Sparse24, "train_with", noting)
    run("train/sparse24_fst", "finish=0", "steps=12", "refresh=4", "num_layers=1", "run=out")  # 12: a refresh is due
    weights = load_file(tmp_path / "out/model/model.safetensors")
    pruned = {name for name in weights if ".mlp." in name}
    assert len(pruned) == 3 and all(is_24(weights[name]) for name in pruned)
    down = weights["model.layers.0.mlp.down_proj.weight"]
    assert torch.equal(down != 0, used[down.shape])
    tokens = torch.arange(12)[None]
    a, b = (load_model(tmp_path / "out" / kind).model(tokens) for kind in ("model", "packed"))
    assert torch.equal(a, b)
    packed = json.loads((tmp_path / "out/packed/shoestring.json").read_text())
    assert {m["format"]["name"] for m in packed["modules"].values()} == {"sparse24"}


def test_a_finish_however_short_has_a_dense_step_and_is_not_packed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("train/sparse24_fst", "finish=0.01", "steps=8", "run=short")
    assert "step 7: dense from here on" in capsys.readouterr().out
    refused(r"blocks.0.mlp.gate is not 2:4 after training", save_packed, tmp_path / "short", "*.mlp.*", torch.float32)
    assert not (tmp_path / "short/packed").exists()


@pytest.mark.parametrize("finish", ["0", "0.5"])
def test_a_run_without_a_sparse_step_ends_before_any_work(finish: str, command: Callable[..., str]) -> None:
    args = ["run", "train/sparse24_fst", "data=text.txt", *TINY, f"finish={finish}", "run=o"]
    err = command(*args, "steps=4" if finish == "0" else "steps=8", fails=True)
    assert "no step would be sparse" in err and "the first 4 and the last" in err and not Path("o").exists()


def test_what_a_resumed_run_may_not_change_is_said_and_leaves_it_as_it_was(
    tmp_path: Path, command: Callable[..., str]
) -> None:
    run("train/sparse24_fst", "steps=18", "refresh=4", "save_every=8", "run=o")
    before = {p: p.read_bytes() for p in sorted(tmp_path.glob("o/**/*")) if p.is_file()}
    for setting, said in {
        "decay=1e-3": "was started with decay=None",
        "finish=0": "was started with finish=0.1666",
        "weight_grad=mvue": "was started with weight_grad=exact",
        "d_ff=128": "was started with d_ff=64",
        "batch=8": "was started with batch=4",
        "steps=96": "o is dense since step 15",
        "steps=17": "steps=17 is less than the 18 that o has done: give 18 or more",
    }.items():
        assert said in command("run", "train/sparse24_fst", "resume=o", setting, fails=True), setting
        assert {p: p.read_bytes() for p in sorted(tmp_path.glob("o/**/*")) if p.is_file()} == before
    # A text that moved is the same text; another one is seen when the checkpoint is read, and changes nothing either.
    (tmp_path / "moved.txt").write_text((tmp_path / "text.txt").read_text())
    lines = (tmp_path / "text.txt").read_text().splitlines()
    (tmp_path / "other.txt").write_text("\n".join(reversed(lines)))
    err = command("run", "train/sparse24_fst", "resume=o", "data=other.txt", fails=True)
    assert "corpus" in err and (tmp_path / "o/config.json").read_bytes() == before[tmp_path / "o/config.json"]
    assert run_cli(["run", "train/sparse24_fst", "resume=o", "data=moved.txt"]) == 0
    run("train/sparse24_sste", "steps=4", "save_every=2", "run=s")
    assert "was started with method=sste" in command(
        "run", "train/sparse24_sste", "resume=s", "method=srste", fails=True
    )
    run("train/sparse24_sste", "steps=6", "resume=s")  # longer is fine where nothing ends
    run("train/sparse24_fst", "finish=0", "steps=8", "refresh=4", "save_every=4", "run=f")
    assert run_cli(["run", "train/sparse24_fst", "resume=f", "steps=12"]) == 0


def test_a_text_that_leaves_nothing_to_validate_on_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    run("train/sparse24_sste", "steps=1", "eval_every=1", "run=o")  # one document
    assert "no validation: 0 tokens were set aside for it and a row needs 17" in capsys.readouterr().out


def test_settings_that_would_do_nothing_are_refused(command: Callable[..., str]) -> None:
    args = ["run", "train/sparse24_sste", "data=text.txt", *TINY, "run=o"]
    assert "decay=0.001 only applies to method=srste" in command(*args, "decay=1e-3", fails=True)
    assert not Path("o").exists()


def test_a_given_decay_starts_densely_too(capsys: pytest.CaptureFixture[str]) -> None:
    run("train/sparse24_fst", "decay=1e-3", "warmup=2", "steps=6", "save_every=3", "run=o")
    told = capsys.readouterr().out
    assert "step 2: sparse" in told and "step 5: dense from here on" in told
    # As runs of earlier versions: sparse at once, which a resumed run stays.
    run("train/sparse24_fst", "decay=1e-3", "probe=0", "steps=3", "save_every=2", "finish=0", "run=at_once")
    assert run_cli(["run", "train/sparse24_fst", "resume=at_once", "steps=5", "probe=4"]) == 0
    assert ": sparse" not in capsys.readouterr().out


def test_gradients_are_pruned_where_that_gains_time(
    tmp_path: Path, command: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(**settings: Any) -> str:
        return fst.with_weight_grad(fst.Config(**settings)).weight_grad

    assert [chosen(size=size) for size in ("gpt2-774m", "llama-1b")] == ["exact", "mvue"]
    assert chosen(size="llama-1b", d_model=1024) == "exact"
    assert chosen(size="llama-1b", weight_grad="exact") == "exact"
    assert chosen(size="tiny", weight_grad="mvue") == "mvue"

    # A run keeps what it began with, whatever a later version would choose; what it goes on from counts, too.
    run("train/sparse24_sste", "steps=1", "run=first")
    assert json.loads((tmp_path / "first/config.json").read_text())["config"]["weight_grad"] == "exact"
    monkeypatch.setattr(fst, "PRUNED_GRADIENTS_FROM", 32)
    assert chosen(init_from="first", size="tiny") == "mvue"
    assert run_cli(["run", "train/sparse24_sste", "resume=first", "steps=2"]) == 0
    assert json.loads((tmp_path / "first/config.json").read_text())["config"]["weight_grad"] == "exact"
    assert "nowhere" in command("run", "train/sparse24_fst", "init_from=nowhere", "run=o", fails=True)


@pytest.mark.parametrize("recipe", ["train/sparse24_fst", "train/sparse24_sste"])
def test_an_older_torch_is_refused_on_several_processes(
    recipe: str, command: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["run", recipe, "data=text.txt", *TINY, "weight_grad=mvue", "mesh.dp=2", "run=o"]
    assert "torchrun" in command(*args, fails=True)  # a version that can: the next thing that is wrong
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    assert "needs torch 2.12 or newer, this is 2.11.0" in command(*args, fails=True)
    assert not Path("o").exists()


def test_a_resumed_run_goes_on_with_the_algorithms_of_its_first_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def machine(gpu: str, algorithm: int) -> None:
        def measure(m: int, k: int, n: int, dtype: torch.dtype) -> cusparselt_table.Measured:
            return cusparselt_table.Measured(m, k, n, str(dtype), (algorithm,) * 4, 1.0, 2.0)

        cusparselt_table.TABLE.forget()
        monkeypatch.setenv("SHOESTRING_CACHE", str(tmp_path / f"cache{algorithm}"))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: gpu)
        monkeypatch.setattr(cusparselt_table, "measure", measure)

    def resume() -> None:
        (newest,) = (tmp_path / "out/checkpoints").glob("step-*2")
        shutil.rmtree(newest)
        assert run_cli(["run", "train/sparse24_sste", "resume=out"]) == 0

    monkeypatch.setattr(tune, "has_sparse_products", lambda: True)
    shape = (256, 64, 64)  # gate and up as one
    machine("GPU A", 1)
    tiny = ("d_model=64", "d_ff=128", "weight_grad=mvue")
    run("train/sparse24_sste", *tiny, "steps=2", "save_every=1", "run=out")
    (kept,) = (tmp_path / "out").glob("cusparselt-GPU_A*.json")
    assert {m.algorithms for m in cusparselt_table.read_table(kept)} == {(1,) * 4}
    machine("GPU A", 2)
    resume()
    assert cusparselt_table.chosen_algorithms(*shape, torch.float32) == (1,) * 4
    assert not list((tmp_path / "cache2").glob("cusparselt-*"))  # nothing was measured
    machine("GPU B", 3)
    capsys.readouterr()
    resume()
    assert cusparselt_table.chosen_algorithms(*shape, torch.float32) == (3,) * 4
    assert {m.algorithms for m in cusparselt_table.read_table(kept)} == {(1,) * 4}  # for when it goes back
    assert list((tmp_path / "out").glob("cusparselt-GPU_B*.json"))
    assert f"algorithms of another GPU or torch ({kept.name}): measured anew" in capsys.readouterr().out
    for table in (tmp_path / "out").glob("cusparselt-*.json"):
        table.unlink()
    (tmp_path / "out" / "cslt-GPU_B-torch2.json").write_text("{}")
    resume()
    said = "algorithms of an earlier version of Shoestring (cslt-GPU_B-torch2.json): measured anew"
    assert said in capsys.readouterr().out
    cusparselt_table.TABLE.forget()


def test_sste_delivers_24_weights_dense_and_packed(tmp_path: Path) -> None:
    run("train/sparse24_sste", "weight_grad=mvue", "steps=6", "run=out")
    assert "shoestring generate out/packed" in (tmp_path / "out/report.html").read_text()
    weights = load_file(tmp_path / "out/model/model.safetensors")
    pruned = [name for name in weights if ".mlp." in name]
    assert len(pruned) == 6 and all(is_24(weights[name]) for name in pruned)
    assert not any(is_24(weights[name]) for name in weights if ".self_attn." in name)
    packed = json.loads((tmp_path / "out/packed/shoestring.json").read_text())
    assert {m["format"]["name"] for m in packed["modules"].values()} == {"sparse24"}
    tokens = torch.arange(12)[None]
    a, b = (load_model(tmp_path / "out" / kind).model(tokens) for kind in ("model", "packed"))
    assert torch.equal(a, b)
    run("train/sparse24_sste", "steps=3", "method=srste", "weight_grad=exact", "precision=fp8", "run=older")
    assert is_24(load_file(tmp_path / "older/model/model.safetensors")["model.layers.1.mlp.down_proj.weight"])


def test_a_bf16_run_is_packed_in_bf16_without_losing_anything(tmp_path: Path) -> None:
    run("train/sparse24_sste", "steps=2", "dtype=bf16", "run=half")
    dense = load_file(tmp_path / "half/model/model.safetensors")
    parts = load_file(tmp_path / "half/packed/packed.safetensors")
    values = {name: t for name, t in parts.items() if name.endswith("weight_values")}
    assert len(values) == 6 and all(t.dtype == torch.bfloat16 for t in values.values())
    about = json.loads((tmp_path / "half/packed/shoestring.json").read_text())
    assert about["compute_dtype"] == "bfloat16"
    down = load_model(tmp_path / "half/packed").model.get_submodule("blocks.1.mlp.down")
    assert isinstance(down, FormatLinear)
    decoded = down.effective_weight(torch.float32)
    assert torch.equal(decoded, dense["model.layers.1.mlp.down_proj.weight"].float())


def test_a_width_that_does_not_fit_is_said_before_training(capsys: pytest.CaptureFixture[str]) -> None:
    options = [o for o in TINY if not o.startswith("d_ff")]
    code = run_cli(["run", "train/sparse24_fst", "data=text.txt", *options, "d_ff=60", "steps=20"])
    err = capsys.readouterr().err
    assert code == 2 and "mlp.down" in err and "multiple of 8, not 60" in err


def test_the_snippet_of_the_page_runs() -> None:
    page = (Path(__file__).parents[3] / "docs/methods/sparse24.md").read_text()
    snippets = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert snippets  # the others are fragments
    names: dict[str, Any] = {"__name__": "snippet"}
    exec(compile(snippets[0], "sparse24.md", "exec", dont_inherit=True), names)
    assert names["model"][0].packed
