"""Memory that runs out is one line with exit code 2: which memory, where, what to do; and what is done is kept."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from refusals import refused
from shoestring.cli.app import run_cli
from shoestring.errors import as_command, during, memory_line, out_of_memory
from shoestring.methods.distill import cakld
from shoestring.methods.drafter import stages as drafter_stages
from shoestring.methods.sparse24 import stages
from shoestring.methods.sparse24.recipes import sste
from shoestring.recipes.shrink import ptq
from shoestring.runlog import read_jsonl
from shoestring.shrink import block_files, blockwise, qat, quantize
from shoestring.train import data

GPU = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.72 GiB"
HOST = (
    "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
    "allocate 4096000000000 bytes. Error code 12 (Cannot allocate memory)"
)
# fmt: off
PTQ = ["model=model", "calib=calib.txt", "calib_windows=4", "calib_context=32", "format=int4:g32"]
DENSE = [
    "data=calib.txt", "context=16", "batch=4", "micro=2", "steps=4", "vocab_size=280", "save_every=1", "eval_every=0",
    "device=cpu",
]
DRAFTER = [
    "model=model", "prompts=prompts.jsonl", "num_prompts=6", "new_tokens=24", "layers=1", "steps=2", "batch=2",
    "context=16", "held_out=2", "eval_tokens=4", "eval_every=0", "device=cpu",
]
LOWBIT = [
    "model=model", "data=corpus.jsonl", "context=32", "batch=4", "micro=2", "steps=4", "save_every=2", "log_every=1",
]
# fmt: on


def full(limit: int, action: Callable[..., Any], error: BaseException) -> Callable[..., Any]:
    """`action` for so many calls; there is no memory for the next one."""
    calls = []

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) > limit:
            raise error
        return action(*args, **kwargs)

    return call


def counted(action: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    calls: list[int] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return action(*args, **kwargs)

    return call, calls


def fails(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    capsys.readouterr()
    code = run_cli(list(argv))
    err = capsys.readouterr().err
    assert code == 2 and err.startswith("error: out of ") and err.count("\n") == 1, (code, err)
    return err


@pytest.mark.parametrize(
    ("error", "which"),
    [
        (torch.OutOfMemoryError(GPU), "GPU"), (RuntimeError("CUDA error: out of memory"), "GPU"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "GPU"),
        (MemoryError(), "host"), (RuntimeError(HOST), "host"),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."), "host"),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), "host"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), None), (KeyError("out of memory"), None),
    ],
)  # fmt: skip
def test_which_memory_ran_out(error: BaseException, which: str | None) -> None:
    assert out_of_memory(error) == which
    assert (memory_line(error) is None) == (which is None)


def test_what_torch_really_raises_on_a_cpu() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert out_of_memory(caught.value) == "host"
    line = memory_line(caught.value)
    assert line is not None and f"({1 << 60} bytes more asked for)" in line and "device" not in line


def test_it_is_seen_behind_what_a_compiler_or_a_graph_makes_of_it() -> None:
    def wrapped() -> None:
        try:
            with during("training"), during("block 3"):
                raise torch.OutOfMemoryError(GPU)
        except RuntimeError as error:
            raise RuntimeError("the backend failed") from error

    with pytest.raises(RuntimeError) as caught:
        wrapped()
    line = memory_line(caught.value)
    assert line is not None
    assert line.startswith("out of GPU memory (2.00 GiB more asked for) in block 3, in training: ask for less")
    assert "--device cpu" in line

    def hidden() -> None:
        try:
            raise torch.OutOfMemoryError(GPU)
        except RuntimeError:
            raise RuntimeError("another defect") from None

    with pytest.raises(RuntimeError) as caught:
        hidden()
    assert out_of_memory(caught.value) is None


@pytest.mark.parametrize(("stream", "error", "advised"), [
    ("auto", torch.OutOfMemoryError(GPU), True),
    ("false", torch.OutOfMemoryError(GPU), True),
    ("true", torch.OutOfMemoryError(GPU), False),
    ("auto", MemoryError(), False),
])  # fmt: skip
def test_a_gpu_that_is_too_small_is_told_of_streaming(stream: Any, error: Exception, advised: bool) -> None:
    assert ("give stream=true" in str(memory_line(error, ptq.Config(stream=stream)))) == advised


def test_verbs_and_benches_say_it_in_one_line(
    own_home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoestring.serve.engine.engine import Engine

    monkeypatch.setattr(Engine, "step", full(0, Engine.step, torch.OutOfMemoryError(GPU)))
    line = fails(capsys, "generate", "model", "abc", "--device", "cpu")
    assert "out of GPU memory (2.00 GiB more asked for) in serve/engine/engine.py, " in line
    assert "shorter context" in line and "--device cpu" in line and "resume" not in line

    def bench() -> None:
        raise MemoryError

    with pytest.raises(SystemExit) as stopped:
        as_command(bench)
    assert stopped.value.code == 2 and capsys.readouterr().err.startswith("error: out of host memory")


def test_training_says_what_to_make_smaller_and_goes_on(
    own_home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoestring.train.objectives import CrossEntropy

    with monkeypatch.context() as patch:
        patch.setattr(CrossEntropy, "__call__", full(5, CrossEntropy.__call__, RuntimeError(HOST)))
        line = fails(capsys, "run", "train/dense", *DENSE)  # into a folder of its own choice
    (folder,) = (own_home / "runs").iterdir()
    assert "out of host memory (4096000000000 bytes more asked for)" in line and "device=cpu" not in line
    assert "micro (now 2), batch (now 4), context (now 16)" in line and "recompute=true" in line
    assert f"resume={folder.relative_to(own_home)} goes on" in line
    assert run_cli(["run", "train/dense", f"resume={folder}", "micro=1"]) == 0
    assert "resumed from" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("recipe", "argv", "module", "name"),
    [
        ("train/sparse24_sste", [*DENSE, "flip_every=1"], sste, "deliver_packed"),
        ("shrink/prune24", [*PTQ[:-1], "train=none", "device=cpu"], stages, "prune"),
        ("shrink/drafter", DRAFTER, drafter_stages, "generate_text"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_run_that_chose_its_own_folder_is_named(
    recipe: str,
    argv: list[str],
    module: Any,
    name: str,
    own_home: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, name, full(0, print, MemoryError()))
        line = fails(capsys, "run", recipe, *argv)
    (folder,) = (own_home / "runs").iterdir()
    assert f"resume={folder.relative_to(own_home)} goes on" in line
    assert run_cli(["run", recipe, f"resume={folder}"]) == 0
    assert (folder / "report.html").is_file()


@pytest.mark.parametrize(
    ("recipe", "argv"),
    [
        ("train/dense", DENSE),
        ("shrink/bitdistiller", [*LOWBIT, "format=int2:g32", "device=cpu"]),
        ("shrink/prune24", [*PTQ[:-1], "data=corpus.jsonl", "context=32", "batch=4", "steps=2", "device=cpu"]),
        ("shrink/drafter", DRAFTER),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_pass_that_cannot_fit_is_refused_before_the_work(
    recipe: str, argv: list[str], own_home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where host memory runs out the system kills the process: nothing could be said then."""
    monkeypatch.setattr(data, "free_bytes", lambda device: 2000)
    assert run_cli(["run", recipe, *argv]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "in one pass need" in err and "make micro, batch or context smaller" in err
    assert not (own_home / "runs").exists()


def test_the_least_that_a_pass_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "free_bytes", lambda device: 64_000_000)
    cpu, width = torch.device("cpu"), 4 * 100
    data.check_pass(40, 1000, width, cpu, torch.float32)  # 1,600 bytes a token, 1,600,000 a row
    said = r"41 rows of context=1000 in one pass need 0\.1 GB .* enough for 40 rows: make"
    refused(said, data.check_pass, 41, 1000, width, cpu, torch.float32)
    data.check_pass(80, 1000, width, cpu, torch.bfloat16)
    monkeypatch.undo()
    refused(
        r"1,000,000 rows of context=2048 in one pass need 141,557\.8 GB .* has ",
        data.check_pass,
        1_000_000,
        2048,
        30 * 576,
        cpu,
        torch.float32,
    )  # on any machine


@pytest.mark.parametrize(
    ("method", "module", "name"), [("clip", quantize, "quantize_block"), ("blockwise", blockwise, "train_block")]
)
def test_quantizing_names_the_block_and_goes_on_behind_the_finished_ones(
    method: str,
    module: Any,
    name: str,
    own_home: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    argv = ["run", "shrink/ptq", *PTQ, f"method={method}", "epochs=1", "device=cpu"]
    action = getattr(module, name)
    with monkeypatch.context() as patch:
        patch.setattr(module, name, full(1, action, torch.OutOfMemoryError(GPU)))
        line = fails(capsys, *argv)  # into a folder of its own choice
    (folder,) = (own_home / "runs").iterdir()
    assert f"in block 1, in {method}: " in line and f"resume={folder.relative_to(own_home)} goes on" in line
    assert "calib_windows (now 4)" in line and "device=cpu" in line
    with monkeypatch.context() as patch:
        again, calls = counted(action)
        patch.setattr(module, name, again)
        assert run_cli(["run", "shrink/ptq", f"resume={folder}"]) == 0
    assert len(calls) == 2  # of three blocks
    assert run_cli([*argv, "run=whole"]) == 0
    packed = "model/packed.safetensors"
    assert (folder / packed).read_bytes() == (own_home / "whole" / packed).read_bytes()


def test_no_memory_in_the_first_block_leaves_a_run_that_can_go_on(
    own_home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(quantize, "quantize_block", full(0, quantize.quantize_block, MemoryError()))
        line = fails(capsys, "run", "shrink/ptq", *PTQ, "device=cpu", "run=cut")
    assert "out of host memory in block 0, in gptq" in line and "resume=cut goes on" in line
    assert run_cli(["run", "shrink/ptq", "resume=cut", "memory_gb=0.5"]) == 0
    assert (own_home / "cut/model/packed.safetensors").is_file()


def test_no_memory_for_a_finished_block_does_not_blame_its_file(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = torch.nn.Linear(4, 4)
    files = block_files.BlockFiles(own_home / "blocks")
    files.save(0, block, block_files.FinishedBlock())
    monkeypatch.setattr(block, "load_state_dict", full(0, print, torch.OutOfMemoryError(GPU)))
    with pytest.raises(torch.OutOfMemoryError):
        files.load(0, block)
    monkeypatch.setattr(block, "load_state_dict", full(0, print, RuntimeError("size mismatch")))
    refused("delete it and go on", files.load, 0, block)


# -- the clip search of the recipes that train ---------------------------------------------------------------

CLIPPING = {
    "shrink/bitdistiller": ["format=int2:g32", "calib_windows=4", "lr=1e-3"],
    "shrink/lowbit_best": ["format=nf3:s2:g32"],  # at 3 bits it starts from clipped weights
}


@pytest.mark.parametrize(
    ("recipe", "error"), zip(CLIPPING, (KeyboardInterrupt(), torch.OutOfMemoryError(GPU)), strict=True), ids=str
)
def test_a_stopped_clip_search_goes_on_at_the_next_block(
    recipe: str,
    error: BaseException,
    own_home: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    argv = ["run", recipe, *LOWBIT, *CLIPPING[recipe], "device=cpu"]
    with monkeypatch.context() as patch:
        patch.setattr(qat, "clip_block", full(2, qat.clip_block, error))
        if isinstance(error, KeyboardInterrupt):
            assert run_cli([*argv, "run=cut"]) != 0
        else:
            line = fails(capsys, *argv, "run=cut")
            assert "in block 2, in the clip search: " in line and "resume=cut goes on" in line
    assert block_files.BlockFiles(own_home / "cut/blocks").count() == 2
    with monkeypatch.context() as patch:
        again, calls = counted(qat.clip_block)
        patch.setattr(qat, "clip_block", again)
        assert run_cli(["run", recipe, "resume=cut"]) == 0
    assert len(calls) == 1  # of three blocks
    assert run_cli([*argv, "run=whole"]) == 0
    packed = "model/packed.safetensors"
    assert (own_home / "cut" / packed).read_bytes() == (own_home / "whole" / packed).read_bytes()
    losses = [[row["loss"] for row in read_jsonl(own_home / run / "metrics.jsonl")] for run in ("cut", "whole")]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    assert not (own_home / "cut/blocks").exists()


@pytest.mark.few(1)
@pytest.mark.parametrize("recipe", CLIPPING)
def test_no_memory_in_training_keeps_the_stages_before(
    recipe: str, own_home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["run", recipe, *LOWBIT, *CLIPPING[recipe], "device=cpu", "run=cut"]
    with monkeypatch.context() as patch:
        patch.setattr(cakld.Cakld, "__call__", full(5, cakld.Cakld.__call__, torch.OutOfMemoryError(GPU)))
        line = fails(capsys, *argv)
    assert "in training" in line and "micro (now 2)" in line and "resume=cut goes on" in line
    with monkeypatch.context() as patch:
        patch.setattr(qat, "clip_block", full(0, print, AssertionError("done already")))
        assert run_cli(["run", recipe, "resume=cut", "micro=1"]) == 0
    assert "resumed from" in capsys.readouterr().out
