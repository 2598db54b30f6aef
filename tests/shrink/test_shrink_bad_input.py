"""What goes wrong when a model is quantized: each is said by name, early, and nothing of the user's is touched."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shoestring.cli.app import run_cli
from shoestring.formats import convert, pack, parse_format
from shoestring.model import load_model, save_model
from shoestring.shrink import block_files

SMALL = ["model=model", "calib=calib.txt", "calib_windows=4", "calib_context=32", "format=int4:g32"]


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str], own_home: Path) -> Callable[..., str]:
    """The one-line error of a recipe, which leaves no run folder."""

    def call(recipe: str, *argv: str) -> str:
        before = {p.name for p in own_home.iterdir()}
        capsys.readouterr()
        code = run_cli(["run", recipe, *argv, "device=cpu", "run=never"])
        out, err = capsys.readouterr()
        assert code == 2 and err.startswith("error: ") and err.count("\n") == 1, (code, out, err)
        assert {p.name for p in own_home.iterdir()} - {"cache"} == before - {"cache"}
        return err

    return call


def contents(folder: Path) -> dict[str, tuple[str, int]]:
    return {p.name: (hashlib.sha256(p.read_bytes()).hexdigest(), p.stat().st_mtime_ns) for p in folder.iterdir()}


def test_calibration_that_is_empty_short_or_not_text(fails: Callable[..., str], own_home: Path) -> None:
    for text in ("", "   \n", "abc"):
        (own_home / "calib.txt").write_text(text)
        assert "give a longer text" in fails("shrink/ptq", *SMALL), text
    (own_home / "calib.txt").write_bytes(b"\xff\xfe\x00bad")
    assert "calib.txt" in fails("shrink/ptq", *SMALL)
    for source in ("nowhere.txt", "nowhere"):
        for recipe in ("shrink/ptq", "shrink/skip_set"):
            said = fails(recipe, "model=model", "context=32", f"calib={source}")
            assert f"calib={source} does not exist" in said


def test_a_group_that_does_not_divide_names_those_that_do(fails: Callable[..., str]) -> None:
    for recipe in ("shrink/ptq", "shrink/rtn"):
        argv = ["model=model", "format=int4:g48"] + (["calib=calib.txt"] if recipe.endswith("ptq") else [])
        message = fails(recipe, *argv)
        assert "blocks.0.attn.q: Group 48 does not divide input width 64: use group 32, 64, or 0" in message


LOWBIT = ["model=model", "data=calib.txt", "format=int2:g32", "context=32"]
TRAINED = ["model=model", "data=corpus.jsonl", "format=int2:g32", "context=32", "batch=4", "micro=2", "steps=2"]
BUDGET = [a for a in TRAINED if not a.startswith(("format", "data"))] + ["bits_budget=3"]
WRITTEN = ["model=model", "prompts=prompts.txt", "format=int2:g32", "context=32", "micro=none", "max_new=8"]
DRAFTER = ["model=model", "prompts=calib.txt", "context=32"]


@pytest.mark.parametrize("text", ["", "a"])
def test_a_text_too_short_to_evaluate(text: str, fails: Callable[..., str], own_home: Path) -> None:
    (own_home / "short.txt").write_text(text)
    skip_set = ["model=model", "calib=calib.txt", "calib_context=32", "context=32"]
    for recipe, argv in (
        ("rtn", ["model=model", "format=int4:g32"]),
        ("ptq", SMALL),
        ("bitdistiller", TRAINED),
        ("lowbit_best", TRAINED),
        ("skip_set", skip_set),
    ):
        said = fails(f"shrink/{recipe}", *argv, "text=short.txt")
        assert "short.txt has less than two tokens" in said, recipe
    assert "flatters" in fails("shrink/skip_set", *skip_set, "text=model/../calib.txt")


@pytest.mark.parametrize(
    ("recipe", "argv", "said"),
    [
        ("shrink/ptq", [*SMALL, "bits_budget=3", "candidates="], "candidates= is empty"),
        ("shrink/ptq", [*SMALL, "bits_budget=3", "damage_windows=0"], "damage_windows=0"),
        ("shrink/ptq", [*SMALL, "bits_budget=nan"], "bits_budget='nan'"),
        ("shrink/ptq", [*SMALL, "bits_budget=1", "candidates=int2:g32,int4:g32"], "the smallest candidates need"),
        ("shrink/lowbit_best", [*TRAINED, "bits_budget=1", "candidates=int2:g32"], "the smallest candidates need"),
        ("shrink/ptq", [*SMALL[:1], *SMALL[2:], "calib=calib.txt,"], "calib=calib.txt, has no text beside one of its"),
        ("shrink/ptq", [*SMALL[:1], *SMALL[2:], "calib=,calib.txt"], "calib=,calib.txt has no text beside one of"),
        (
            "shrink/ptq",
            [*SMALL[:1], *SMALL[2:], "calib=corpus.jsonl, calib.txt", "text=calib.txt"],
            "are the same file",
        ),
        ("shrink/ptq", [*SMALL, "damping=1e300"], "damping=1e+300 is not possible for GPTQ"),
        ("shrink/prune24", ["model=model", "calib=calib.txt", "damping=1e300", "train=none"], "for SparseGPT"),
        ("shrink/ptq", [*SMALL, "spill=nowhere/at/all"], "spill=nowhere/at/all is not a folder"),
        ("shrink/lowbit_best", [*LOWBIT, "bits_budget=3", "candidates=,"], "candidates= is empty"),
        (
            "shrink/lowbit_best",
            [*TRAINED, "bits_budget=3", "candidates=int2:g32,int4:g48"],
            "blocks.0.attn.q: Group 48 does not divide",
        ),
        (
            "shrink/lowbit_best",
            [*BUDGET, "candidates=int2:g32,int2:g32", "data=calib.txt"],
            "give two or more different formats",
        ),
        ("shrink/ptq", [*SMALL, "bits_budget=3", "candidates=dense"], "give two or more different formats"),
        ("shrink/lowbit_best", [*BUDGET, "candidates=int4:g48", "data=calib.txt"], "Group 48 does not divide"),
        ("shrink/lowbit_best", [*BUDGET, "candidates=int4:g32", "data=calib.txt"], "candidates need 4.7"),
        (
            "shrink/lowbit_best",
            [*BUDGET, "candidates=int2:g32,sparse24", "grids=derived", "data=calib.txt"],
            "no range that follows its weights",
        ),
        ("shrink/lowbit_best", [*TRAINED[:2], "context=32", "format=dense"], "every layer stays dense"),
        ("shrink/lowbit_best", [*TRAINED, "windows=4000"], "4000 windows of 32 need"),
        (
            "shrink/lowbit_best",
            [*BUDGET, "data=corpus.jsonl", "candidates=int2:g32,int4:g32", "damage_windows=4000"],
            "4000 windows of 32 need",
        ),
        ("shrink/bitdistiller", [*TRAINED, "calib_windows=4000"], "4000 windows of 32 need"),
        ("shrink/bitdistiller", [*WRITTEN, "batch=400"], "12,801 are needed"),
        ("shrink/bitdistiller", [*WRITTEN, "batch=4", "calib_windows=400"], "12,800 are needed"),
        # The run would have noticed it after its training, and a resumed run may not change it.
        ("shrink/lowbit_best", [*TRAINED, "embed=int5"], "no format 'int5'"),
        ("shrink/bitdistiller", [*TRAINED, "embed=int4:g48"], "embed: Group 48 does not divide"),
        ("shrink/prune24", ["model=model", "calib=calib.txt", "train=none", "embed=int4:g48"], "embed: Group 48 does"),
        ("shrink/lowbit_best", [*LOWBIT, "gamma=2"], "gamma=2.0"),
        ("shrink/bitdistiller", [*LOWBIT, "k=0"], "k=0"),
        ("shrink/drafter", [*DRAFTER, "d_model=65"], "multiple of 32"),
        ("shrink/drafter", [*DRAFTER, "layers=0", "d_model=64"], "layers=0 is not possible"),
        ("shrink/drafter", [*DRAFTER, "layers=1", "reference_steps=-1"], "reference_steps=-1"),
        ("shrink/skip_set", ["model=model", "calib=calib.txt", "out=no/such/x.json"], "there is no folder"),
    ],
)
def test_settings_that_cannot_work_are_said_before_any_work(
    recipe: str, argv: list[str], said: str, fails: Callable[..., str]
) -> None:
    assert said in fails(recipe, *argv)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_name_the_layer(value: float, fails: Callable[..., str], own_home: Path) -> None:
    loaded = load_model(own_home / "model")
    with torch.no_grad():
        loaded.model.blocks[1].mlp.down.weight[3, 5] = value  # type: ignore[union-attr]
    save_model(own_home / "model", loaded.model, loaded.tokenizer)
    rounded = ("shrink/rtn", ["model=model", "format=nf3:g32"])
    trained = [(recipe, TRAINED) for recipe in ("shrink/bitdistiller", "shrink/lowbit_best")]
    for recipe, more in (("shrink/ptq", SMALL), rounded, *trained):
        assert "blocks.1.mlp.down.weight holds NaN or infinite values" in fails(recipe, *more)


def test_a_model_that_is_packed_already(fails: Callable[..., str], own_home: Path) -> None:
    loaded = load_model(own_home / "model")
    convert(loaded.model, [("*", parse_format("int4:g32"))])
    pack(loaded.model)
    save_model(own_home / "model", loaded.model, loaded.tokenizer)
    assert "int4:g32 already" in fails("shrink/ptq", *SMALL)
    for recipe in ("shrink/bitdistiller", "shrink/lowbit_best"):
        assert "blocks.0.attn.q is int4:g32 already" in fails(recipe, *TRAINED)
    assert "packed already" in fails("shrink/rtn", "model=model", "format=nf3:g32")


@pytest.mark.parametrize("label", ["int2:g32", "int4:g32", "int4:sym:g32", "int8:g0", "nf4:g32", "fp3:s1:g32"])
def test_zero_and_constant_groups_keep_their_value(label: str) -> None:
    w = torch.zeros(4, 64)
    w[1], w[2], w[3, 32:] = 0.25, -3.0, 1e-3
    format = parse_format(label)
    parts = format.encode(w, {n: a.tensor for n, a in format.state(w).items()})
    got = format.decode(parts, torch.float32)
    assert got.isfinite().all() and not got[0].any() and not got[3, :32].any()
    coarse = 0.51 / 7.5 if "sym" in label else 0.01  # the middle of the codes leaves one end half a step short
    torch.testing.assert_close(got, w, rtol=coarse, atol=1e-6)


@pytest.mark.usefixtures("warm_python")
def test_killed_in_the_middle_of_a_block_it_goes_on_and_the_source_is_untouched(own_home: Path) -> None:
    """SIGKILL while block 1 is being written: no handler runs, half a file stays behind."""
    before = contents(own_home / "model")
    script = """
import os, signal, sys
from pathlib import Path
from shoestring.shrink import block_files
whole = block_files.save_file
def save_file(tensors, path, metadata):
    if "block-00001" in str(path):
        Path(path).write_bytes(b"half a file")
        os.kill(os.getpid(), signal.SIGKILL)
    whole(tensors, path, metadata=metadata)
block_files.save_file = save_file
from shoestring.cli.app import run_cli
sys.exit(run_cli(sys.argv[1:]))
"""
    argv = ["run", "shrink/ptq", *SMALL, "device=cpu"]
    killed = subprocess.run([sys.executable, "-c", script, *argv, "run=cut"], capture_output=True, cwd=own_home)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert block_files.BlockFiles(own_home / "cut/blocks").count() == 1 and not (own_home / "cut/model").exists()
    assert run_cli(["run", "shrink/ptq", "resume=cut"]) == 0
    assert run_cli([*argv, "run=whole"]) == 0
    packed = "model/packed.safetensors"
    assert (own_home / "cut" / packed).read_bytes() == (own_home / "whole" / packed).read_bytes()
    assert contents(own_home / "model") == before


def test_a_full_disk_is_one_line_and_the_run_goes_on_later(
    own_home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = block_files.save_file

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        if "block-00001" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        whole(tensors, path, metadata=metadata)

    monkeypatch.setattr(block_files, "save_file", full)
    assert run_cli(["run", "shrink/ptq", *SMALL, "device=cpu", "run=cut"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: cannot write block 1") and "resume=" in error
    assert [p.name for p in (own_home / "cut/blocks").iterdir()] == ["block-00000.safetensors"]
    monkeypatch.setattr(block_files, "save_file", whole)
    assert run_cli(["run", "shrink/ptq", "resume=cut"]) == 0
    assert load_model(own_home / "cut/model").model.blocks[2].mlp.up.packed  # type: ignore[union-attr]
