"""The recipes through the real command line: a whole path in miniature, Ctrl-C and resume, bad inputs."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shoestring.config import REQUIRED, apply_overrides, describe
from shoestring.errors import UserError
from shoestring.evals.model_row import measure_speed_of
from shoestring.model import Decoder, ModelSpec, save_model
from shoestring.paths import cache_folder
from shoestring.recipes import demo
from shoestring.recipes.find import builtin_recipes, load_recipe
from shoestring.recipes.train import dense, speedrun
from shoestring.runlog import read_jsonl
from shoestring.state.run_lock import hold_run
from shoestring.state.storage import SafeReader
from shoestring.train.pretraining import ModelConfig, new_spec

pytestmark = pytest.mark.usefixtures("warm_python")
TINY = ["size=tiny", "d_model=64", "num_layers=2", "num_heads=4", "num_kv_heads=2", "d_ff=128", "vocab_size=320"]
SHORT = ["context=32", "batch=4", "micro=2", "warmup=2", "log_every=1", "eval_every=5", "device=cpu"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 documents of a few made-up sentences."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnoprstuvw", k=draw.randint(2, 7))) for _ in range(150)]
    path = tmp_path_factory.mktemp("corpus") / "texts.jsonl"
    sentences = [" ".join(draw.choices(words, k=draw.randint(4, 12))) + "." for _ in range(1500)]
    lines = [json.dumps({"text": " ".join(sentences[i : i + 5])}) for i in range(0, 1500, 5)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(autouse=True)
def in_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches and runs/ go where the test looks; C++ that is compiled already is not compiled again."""
    compiled = cache_folder() / "kernels"
    compiled.mkdir(mode=0o700, parents=True, exist_ok=True)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernels").symlink_to(compiled)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOESTRING_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def cli(command: Callable[..., str]) -> Callable[..., str]:
    return command


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_train_eval_generate_shrink_inspect_export(cli: Callable[..., str], corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    out = cli("run", "train/dense", f"data={corpus}", "steps=5", f"run={run}", *TINY, *SHORT)
    assert f"shoestring generate {run}" in out and "perplexity" in out

    saved = json.loads((run / "config.json").read_text())
    assert saved["recipe"] == "train/dense" and saved["config"]["steps"] == 5
    assert saved["versions"]["torch"] == torch.__version__
    metrics = read_jsonl(run / "metrics.jsonl")
    losses = [row["loss"] for row in metrics if "loss" in row]
    assert len(losses) == 5 and losses[-1] < losses[0]
    assert [row["step"] for row in metrics if "val_loss" in row] == [5]
    assert list((run / "tb").iterdir())
    first = read_jsonl(run / "evals.jsonl")[0]
    assert 1 < first["perplexity"] < 320 and first["context"] == 32
    page = (run / "report.html").read_text()
    assert "<svg" in page and "val_loss" in page

    out = cli("eval", run, "--context", 32, "--speed")
    rows = read_jsonl(run / "evals.jsonl")
    assert len(rows) == 2 and rows[1]["decode_tokens_per_s"] > 0
    assert rows[1]["perplexity"] == pytest.approx(first["perplexity"], rel=1e-4)

    text = cli("generate", run, "the quick", "--max-tokens", 8)
    assert text.startswith("the quick") and len(text) > len("the quick\n")

    packed = tmp_path / "packed-run"
    out = cli("run", "shrink/rtn", f"model={run}", "format=nf3", f"run={packed}", "context=32", "device=cpu")
    before, after = read_jsonl(packed / "evals.jsonl")
    assert before["format"] == "dense" and after["format"].startswith("nf3")
    assert before["perplexity"] == pytest.approx(first["perplexity"], rel=1e-4)  # on the run's own corpus
    assert after["perplexity"] != before["perplexity"]
    assert after["bits_per_weight"] < 4 < before["bits_per_weight"] == 32
    assert after["megabytes"] < before["megabytes"]
    assert "<svg" in (packed / "report.html").read_text()

    assert cli("generate", packed, "the quick", "--max-tokens", 8).startswith("the quick")
    shown = cli("inspect", packed)
    assert "nf3" in shown and "shrink/rtn" in shown and "q_proj" in shown
    shown = cli("inspect", run)
    assert "train/dense" in shown and "val_loss" in shown and "f32" in shown

    cli("export", packed, tmp_path / "hf", "--dtype", "fp32")
    dense, exported = weights(run / "model"), weights(tmp_path / "hf")
    assert dense.keys() == exported.keys()
    name = "model.layers.0.mlp.up_proj.weight"
    error = dense["model.embed_tokens.weight"] - exported["model.embed_tokens.weight"]
    assert 0 < error.norm() < 0.02 * exported["model.embed_tokens.weight"].norm()  # int8
    assert not torch.equal(dense[name], exported[name])
    assert exported[name].unique(dim=None).numel() < dense[name].unique().numel() / 2


def test_rules_out_and_dense_out(cli: Callable[..., str], corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    cli("run", "train/dense", f"data={corpus}", "steps=1", f"run={run}", *TINY, *SHORT)
    text = tmp_path / "text.txt"
    text.write_text("the quick red fox jumps over the lazy dog. " * 20)
    rules = "*.mlp.*=nf3:g32;*.attn.*=int4"
    argv = [f"model={run}", f"rules={rules}", f"text={text}", "context=32", "device=cpu"]
    out = cli("run", "shrink/rtn", *argv, f"out={tmp_path / 'packed'}", f"dense_out={tmp_path / 'dense'}")
    assert "nf3" in out and "int4" in out and "text.txt" in out
    packed = json.loads((tmp_path / "packed" / "shoestring.json").read_text())["modules"]
    assert packed["model.layers.1.self_attn.q_proj"]["format"]["name"] == "int_asym"
    assert packed["model.layers.1.mlp.up_proj"]["format"]["group"] == 32
    assert (tmp_path / "dense" / "model.safetensors").is_file()
    err = cli("run", "shrink/rtn", f"model={run}", "rules=*.mlpp.*=nf3", fails=True)
    assert "matches no linear layer" in err
    assert "exists already" in cli("run", "shrink/rtn", *argv, f"out={tmp_path / 'packed'}", fails=True)
    assert "packed" in cli("run", "shrink/rtn", f"model={tmp_path / 'packed'}", fails=True)


def test_going_on_from_a_model(cli: Callable[..., str], corpus: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    cli("run", "train/dense", f"data={corpus}", "steps=3", "act=geglu_tanh", f"run={first}", *TINY, *SHORT)
    assert json.loads((first / "model/config.json").read_text())["hidden_act"] == "gelu_pytorch_tanh"
    argv = [f"data={corpus}", f"init_from={first}", "steps=1", "lr=1e-9", f"run={second}", *SHORT]
    cli("run", "train/dense", *argv)
    old, new = weights(first / "model"), weights(second / "model")
    assert old.keys() == new.keys()
    for name in old:
        torch.testing.assert_close(old[name], new[name], rtol=0, atol=1e-6)
    assert read_jsonl(second / "metrics.jsonl")[0]["loss"] < read_jsonl(first / "metrics.jsonl")[0]["loss"]
    # The tokenizer of another model does not fit.
    other = tmp_path / "other"
    cli("run", "train/dense", f"data={corpus}", "steps=1", f"run={other}", *TINY[:-1], "vocab_size=400", *SHORT)
    assert "has its own" in cli("run", "train/dense", *argv[:3], "act=swiglu", *SHORT, fails=True)
    err = cli("run", "train/dense", *argv[:3], f"tokenizer={other / 'model'}", *SHORT, fails=True)
    assert "tokens" in err and "init_from" in err


def test_ctrl_c_saves_and_resuming_gives_the_same_weights(
    cli: Callable[..., str], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 40
    common = ["run", "train/dense", f"data={corpus}", f"steps={steps}", "save_every=15", *TINY, *SHORT]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    cli(*common, f"run={whole}")

    process = subprocess.Popen(
        [sys.executable, "-m", "shoestring", *common, f"run={cut}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while len(read_jsonl(cut / "metrics.jsonl")) < 4 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2, err
    assert err.count("\n") == 1 and f"resume={cut}" in err and "Traceback" not in err
    stopped = max(row["step"] for row in read_jsonl(cut / "metrics.jsonl"))
    assert 4 <= stopped < steps
    assert (cut / "checkpoints" / f"step-{stopped:08d}").is_dir() and not (cut / "model").exists()
    assert "without a finished model" in cli("generate", cut, "the", fails=True)
    assert f"{stopped}" in cli("inspect", cut / "checkpoints" / f"step-{stopped:08d}")
    assert f"{stopped}  disk" in re.sub(" +", "  ", cli("ckpt", "ls", cut))
    assert "is a checkpoint" in cli("generate", cut / "checkpoints" / f"step-{stopped:08d}", "the", fails=True)

    def full_disk(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(source), None, str(target))

    def unreadable(source: Path, _: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(source))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", full_disk)
        said = cli("ckpt", "export", cut, tmp_path / "copy", fails=True)
        assert f"cannot write {tmp_path / 'copy'}: No space left on device; free some space" in said
        patch.setattr(shutil, "copyfile", unreadable)
        assert f"cannot read {cut / 'checkpoints'}" in cli("ckpt", "export", cut, tmp_path / "copy", fails=True)
    assert not [path for path in tmp_path.iterdir() if "copy" in path.name]
    absent = cli("ckpt", "export", cut, tmp_path / "copy", "--step", 77, fails=True)
    assert f"no complete version of step 77 is on this host; `shoestring ckpt ls {cut}` lists what is" in absent
    cli("ckpt", "export", cut, tmp_path / "copy")
    SafeReader(tmp_path / "copy").verify()

    cli("run", "train/dense", f"resume={cut}")
    uninterrupted, resumed = weights(whole / "model"), weights(cut / "model")
    assert all(torch.equal(uninterrupted[name], resumed[name]) for name in uninterrupted)

    def losses(folder: Path) -> list[tuple[int, float]]:
        return [(r["step"], r["loss"]) for r in read_jsonl(folder / "metrics.jsonl") if "loss" in r]

    assert losses(cut) == losses(whole)


def test_what_is_suggested_next_can_be_done(cli: Callable[..., str], corpus: Path, tmp_path: Path) -> None:
    tiny = [s for s in TINY if not s.startswith(("d_model", "d_ff"))]
    argv = ["run", "train/dense", f"data={corpus}", "steps=2", *tiny, *SHORT]
    for width, d_ff, fits in ((64, 64, "int4"), (32, 96, "int4:g32"), (80, 64, "int4:g0"), (80, 60, None)):
        said = cli(*argv, f"d_model={width}", f"d_ff={d_ff}", f"run={tmp_path / f'{width}-{d_ff}'}")
        found = [line for line in said.splitlines() if line.startswith("shoestring quantize ")]
        assert [line.split()[-1] for line in found] == ([] if fits is None else [fits])
        for line in found:
            cli(*line.split()[1:], "context=32", "device=cpu")


def test_ctrl_c_before_the_first_step_says_how_to_go_on(
    cli: Callable[..., str], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object, **settings: object) -> None:
        raise KeyboardInterrupt

    run, train = tmp_path / "run", dense.train
    monkeypatch.setattr(dense, "train", interrupted)
    said = cli("run", "train/dense", f"data={corpus}", "steps=2", f"run={run}", *TINY, *SHORT, fails=True)
    assert f"stopped; continue with `shoestring run train/dense resume={run}`" in said
    monkeypatch.setattr(dense, "train", train)
    assert "starting at step 0" in cli("run", "train/dense", f"resume={run}")
    assert (run / "model/model.safetensors").is_file()


def test_a_resumed_run_does_not_go_back(cli: Callable[..., str], corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    cli("run", "train/dense", f"data={corpus}", "steps=4", f"run={run}", *TINY, *SHORT)
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    (empty := tmp_path / "empty.txt").touch()  # reading it would be another error
    said = cli("run", "train/dense", f"resume={run}", "steps=3", f"data={empty}", fails=True)
    assert f"steps=3 is less than the 4 that {run} has done: give 4 or more" in said
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before
    cli("run", "train/dense", f"resume={run}", "steps=4")  # nothing is left to do, and that is fine
    saved = json.loads((run / "config.json").read_text())
    saved["config"]["preempt_s"] = 30.0  # without effect here, and refused only where it is given anew
    saved["config"]["levels"]["budget"] = 0.02
    (run / "config.json").write_text(json.dumps(saved))
    cli("run", "train/dense", f"resume={run}", "steps=5")
    assert [row["model"] for row in read_jsonl(run / "evals.jsonl")] == ["run, step 4", "run, step 5"]


def test_heads_of_a_size_follow_what_is_given() -> None:
    def heads(**settings: Any) -> tuple[int, int]:
        spec = new_spec(ModelConfig(**settings), vocab_size=256, context=64)
        return spec.num_heads, spec.num_kv_heads

    assert heads(size="gpt2-124m", num_heads=24) == (24, 24)  # GPT-2 shares no keys
    assert heads(size="gpt2-124m", d_model=32, num_heads=2) == (2, 2)
    assert heads(size="tiny", num_heads=8) == (8, 2)
    assert heads(size="tiny", num_heads=1) == (1, 1)
    assert heads(size="tiny", num_heads=8, num_kv_heads=4) == (8, 4)


BAD: dict[str, tuple[list[str], str]] = {
    "empty corpus": (["data=EMPTY"], "EMPTY"),
    "no such corpus": (["data=nowhere"], "nowhere"),
    "not UTF-8": (["data=BINARY"], "UTF-8"),
    "too many ranks": (["data=CORPUS", "mesh.dp=2"], "torchrun --nproc-per-node 2"),
    "heads": (["data=CORPUS", "num_heads=5"], "num_heads=5"),
    "odd heads, before any text is read": (["data=EMPTY", "d_model=60"], "heads of 15 dims"),
    "a gate that GPT-2 has not": (["data=EMPTY", "size=gpt2-124m", "act=geglu"], "whose layers have GELU"),
    "keys that GPT-2 does not share": (
        ["data=EMPTY", "size=gpt2-124m", "d_model=64", "num_heads=4", "num_kv_heads=2"],
        "cannot have num_kv_heads=2",
    ),
    "a graph without a GPU": (["data=EMPTY", "graph=true"], "needs one CUDA GPU, this run has 1 x cpu"),
    "tokenizer": (["data=CORPUS", "tokenizer=nowhere"], "nowhere"),
    "init": (["data=CORPUS", "init_from=nowhere"], "nowhere"),
    "init without a tokenizer": (["data=CORPUS", "init_from=BARE"], "BARE has no tokenizer"),
    "dtype": (["data=CORPUS", "dtype=int8"], "allowed are auto, fp32, bf16"),
    "device": (["data=CORPUS", "device=cuda:99"], "device"),
    "context": (["data=CORPUS", "context=1000000"], "context"),
    "no steps": (["data=CORPUS", "steps=0"], "steps=0 is not possible; give 1 or more"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_inputs_leave_nothing_behind(cli: Callable[..., str], corpus: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "EMPTY.txt").write_text("")
    (tmp_path / "BINARY.txt").write_bytes(b"caf\xe9 \xff\xfe" * 1000)
    bare = save_model(tmp_path / "BARE", Decoder(ModelSpec(300, 64, 1, 2, 2, 32, 64, 64)))
    places = {"EMPTY": tmp_path / "EMPTY.txt", "BINARY": tmp_path / "BINARY.txt", "CORPUS": corpus, "BARE": bare}
    argv, needle = BAD[name]
    argv = [f"{key}={places.get(value, value)}" for key, value in (a.split("=") for a in argv)]
    small = [s for s in (*TINY, *SHORT, "steps=2") if s.split("=")[0] not in {a.split("=")[0] for a in argv}]
    assert needle in cli("run", "train/dense", *argv, *small, fails=True)
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize("name", builtin_recipes())
def test_a_count_that_makes_no_sense_is_refused(name: str) -> None:
    """Below zero always, and zero where neither the default nor the help says what zero does."""
    config = load_recipe(name).Config
    settings = describe(config)
    required = [f"{row.key}=x" for row in settings if row.default == REQUIRED]
    counts = [row for row in settings if "int" in row.type.split(" | ")]
    assert counts
    for row in counts:
        zero = row.default == "0" or re.search(r"\b0\b", row.help) or row.key == "warmup"
        for value in (-1,) if zero else (-1, 0):
            with pytest.raises(UserError, match=rf"^{row.key}={value} is not possible; give \d+ or more$"):
                apply_overrides(config, [*required, f"{row.key}={value}"])


def test_a_run_folder_is_never_overwritten(cli: Callable[..., str], corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious.txt").write_text("mine")
    err = cli("run", "train/dense", f"data={corpus}", f"run={tmp_path / 'run'}", fails=True)
    assert "exists already" in err
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["precious.txt"]


def test_a_quick_demo_does_less_where_nothing_else_is_said() -> None:
    quick = demo.quickened(demo.Config(quick=True, steps=7))
    assert (quick.steps, quick.max_mb, quick.eval_tokens) == (7, demo.QUICK["max_mb"], demo.QUICK["eval_tokens"])
    assert demo.QUICK["max_mb"] < demo.Config().max_mb and demo.QUICK["eval_tokens"] < demo.Config().eval_tokens
    told = demo.time_spent({"train small": 400.0, "write page": 0.2, "chat pretrained": 500.0})
    assert "15.0 minutes: chat pretrained 500 s, train small 400 s." in told and "quick=true" in told
    assert "quick=true" not in demo.time_spent({"train small": 900.0}, quick=True)


def test_the_demo_in_miniature(
    cli: Callable[..., str], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "CONTEXT", 64)
    monkeypatch.setenv("SHOESTRING_API_KEY", "of another server")
    monkeypatch.setattr(demo, "CALIB_WINDOWS", 8)
    monkeypatch.setattr(demo, "measure_speed_of", partial(measure_speed_of, prompt=16, new=4, repeats=1))
    options = ["steps=3", f"data={corpus}", "d_model=64", "eval_tokens=256", "pretrained=false", "device=cpu"]
    out = cli("demo", *options, f"run={tmp_path / 'demo'}")
    assert "skipped" in out and "report" in out
    rows: list[dict[str, Any]] = read_jsonl(tmp_path / "demo" / "evals.jsonl")
    assert [r["format"].split(":")[0] for r in rows] == [
        *("dense", "int4", "nf3", "int2", "int2", "int2", "sparse24", "sparse24+int4")
    ]
    methods = ["rtn", "gptq+clip", "blockwise", "sparsegpt", "sparsegpt, gptq"]
    assert [r["model"] for r in rows[3:]] == [f"small, {method}" for method in methods]
    # A pruned run is measured on the run's own validation text, where the command names no other.
    assert all(r["perplexity"] > 1 for r in read_jsonl(tmp_path / "demo" / "prune24" / "evals.jsonl"))
    sizes = [r["megabytes"] for r in rows]
    assert sizes[:6] == sorted(sizes[:6], reverse=True) and sizes[3] < sizes[7] < sizes[6] < sizes[0]
    assert "'completion_tokens': " in out  # what the server answered
    assert "dp=4 to tp=2: " in out and "--- with demo@3-" in out  # weights that a running server took over
    assert "gradients over 2 replicas by int4" in out and "in 10 steps" in out
    page = (tmp_path / "demo" / "report.html").read_text()
    assert page.count("<svg") == 2 and "def main(" in page
    assert page.index("<svg") < page.index("times smaller layers") < page.index("<table")  # a picture, three numbers
    assert f"shoestring quantize {tmp_path / 'demo' / 'train'} int4" in out  # the command of a stage
    assert "over HTTP (the same text, with n-gram drafts)" in page
    assert all(f"[{number}/{len(demo.STAGES)}] " in out for number in range(1, len(demo.STAGES) + 1))


@pytest.mark.ranks
@pytest.mark.parametrize(("number", "reason"), [("SIGKILL", "Connection "), ("SIGSTOP", "Timed out waiting 6000ms")])
def test_a_lost_rank_is_one_line_that_says_how_to_go_on(
    number: str, reason: str, cli: Callable[..., str], run_ranks: Callable[..., str], corpus: Path, tmp_path: Path
) -> None:
    """One that is killed is noticed at once, one that is stopped after mesh.timeout_s."""
    run = tmp_path / "run"
    settings = [f"data={corpus}", "steps=6", "save_every=2", f"run={run}", *TINY, *SHORT]
    settings += ["mesh.dp=2", *(["mesh.timeout_s=6"] if number == "SIGSTOP" else [])]
    script = Path(__file__).with_name("train") / "ranks_lost.py"
    with pytest.raises(AssertionError) as failed:
        run_ranks(2, script, str(tmp_path), number, "run", "train/dense", *settings, timeout=120)
    said = [line.strip() for line in str(failed.value).splitlines()]
    assert "--- rank 0, exit 2:" in said and "--- rank 1, exit -9:" in said, said
    (line,) = (line for line in said if line.startswith("error: "))
    assert line.startswith(f"error: lost another process of this job ({reason}")
    again = f"torchrun --nproc-per-node 2 -m shoestring run train/dense resume={run}"
    assert line.endswith(f"continue with `{again}`") and "Traceback" not in str(failed.value)
    out = cli("run", "train/dense", f"resume={run}", "mesh.dp=1")
    assert "step-00000002 at step 2" in out
    assert [row["step"] for row in read_jsonl(run / "metrics.jsonl") if "loss" in row] == [1, 2, 3, 4, 5, 6]


def test_a_run_that_is_being_written_is_not_resumed(cli: Callable[..., str], corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    cli("run", "train/dense", f"data={corpus}", "steps=2", "save_every=1", f"run={run}", *TINY, *SHORT)
    files = {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != ".lock"}
    with hold_run(run):
        assert f"{run} is in use by process {os.getpid()} on " in cli("run", "train/dense", f"resume={run}", fails=True)
    for part in (run / "checkpoints" / "step-00000002").glob("*.safetensors"):
        part.write_bytes(part.read_bytes()[:-1] + bytes([part.read_bytes()[-1] ^ 1]))
    damaged = cli("run", "train/dense", f"resume={run}", "steps=3", fails=True)
    assert "is damaged" in damaged and "resume_from=previous goes on from step-00000001" in damaged
    changed = {p for p in files if p.read_bytes() != files[p]}
    assert all("step-00000002" in str(p) for p in changed), changed
    assert "resume=FOLDER" in cli("run", "train/dense", f"data={corpus}", "resume_from=previous", fails=True)
    out = cli("run", "train/dense", f"resume={run}", "steps=3", "resume_from=previous")
    assert "at step 1" in out and "step-00000002.set-aside" in out
    assert json.loads((run / "config.json").read_text())["config"]["resume_from"] == "newest"
    assert [row["step"] for row in read_jsonl(run / "metrics.jsonl") if "loss" in row] == [1, 2, 3]


@pytest.mark.ranks
def test_two_ranks_are_the_same_command(
    cli: Callable[..., str], run_ranks: Callable[..., str], corpus: Path, tmp_path: Path
) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    common = ["run", "train/dense", f"data={corpus}", "steps=3", *TINY, *SHORT]
    cli(*common, f"run={alone}")
    script = tmp_path / "shoestring_on_ranks.py"
    script.write_text("from shoestring.cli.app import main\n\nmain()\n")
    out = run_ranks(2, script, *common, "mesh.dp=2", f"run={together}")
    assert out.count("run in") == 1 and f"shoestring generate {together}" in out
    ours, theirs = (
        [row["loss"] for row in read_jsonl(folder / "metrics.jsonl") if "loss" in row] for folder in (alone, together)
    )
    assert theirs == pytest.approx(ours, abs=1e-5)
    one, two = weights(alone / "model"), weights(together / "model")
    assert all(torch.allclose(one[name], two[name], atol=1e-4) for name in one)
    assert read_jsonl(together / "evals.jsonl")[0]["perplexity"] == pytest.approx(
        read_jsonl(alone / "evals.jsonl")[0]["perplexity"], rel=1e-4
    )
    cli("run", "train/dense", f"resume={together}", "mesh.dp=1", "steps=4")  # on another number of ranks
    assert [row["step"] for row in read_jsonl(together / "metrics.jsonl") if "loss" in row] == [1, 2, 3, 4]


def test_the_name_of_a_size_means_the_same_shape_for_ever() -> None:
    """Other heads of equal weights would be taken over by a resumed run without a word."""
    heads = [
        new_spec(cfg, vocab_size=256, context=64).num_heads for cfg in (dense.Config(size="base"), speedrun.Config())
    ]
    assert heads == [12, 6]


def test_speedrun_makes_a_qwen3_with_muon(cli: Callable[..., str], corpus: Path, tmp_path: Path) -> None:
    run, argv = tmp_path / "fast", [f"data={corpus}", *TINY, *SHORT, "compile=off"]
    cli("run", "train/speedrun", "steps=2", f"run={run}", *argv)
    saved, made = (json.loads((run / name / "config.json").read_text()) for name in (".", "model"))
    assert saved["config"]["optimizer"] == "muon" and saved["changed"].count("optimizer") == 0
    assert made["model_type"] == "qwen3" and made["tie_word_embeddings"] is False
    assert "started with optimizer=muon" in cli(
        "run", "train/speedrun", f"resume={run}", "optimizer=adamw", "steps=3", fails=True
    )
    cli("run", "train/speedrun", f"resume={run}", "steps=3")
    out = cli("report", run, run, "--out", tmp_path / "both")
    assert "last validation loss" in out and "Loss against tokens" in (tmp_path / "both" / "report.html").read_text()
    assert "no training run" in cli("report", tmp_path, fails=True)
    for setting, said in {"optimizer=lion": "adamw, muon", "cooldown=2": "0 to 1"}.items():
        assert said in cli("run", "train/speedrun", *argv, setting, fails=True)
    assert "or give qk_norm=false" in cli("run", "train/speedrun", "size=gpt2-124m", fails=True)
