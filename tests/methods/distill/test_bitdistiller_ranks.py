"""Quantization-aware training on two processes delivers the model of one, whichever way its weights are cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_bitdistiller_recipe import SMALL
from test_lowbit_best_recipe import BEST

from shoestring.cli.app import run_cli
from shoestring.formats.convert import format_linears
from shoestring.model import load_model
from shoestring.runlog import read_jsonl


def losses(run: Path) -> list[float]:
    rows = read_jsonl(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 7)), rows  # every step once, from the first rank
    return [row["loss"] for row in rows]


def assert_same_run(one: Path, two: Path) -> None:
    # Seen: 2e-7. Sums over two processes are added in another order.
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    assert {p.name for p in (two / "model").iterdir()} == {p.name for p in (one / "model").iterdir()}
    told, same = (json.loads((run / "model/quantization.json").read_text()) for run in (one, two))
    assert same["gamma"] == pytest.approx(told["gamma"]) and same["method"] == told["method"]
    before, after = read_jsonl(two / "evals.jsonl")
    assert (before["model"], after["model"]) == ("before", "after")
    assert after["perplexity"] == pytest.approx(read_jsonl(one / "evals.jsonl")[1]["perplexity"], rel=1e-3)

    want, got = (load_file(run / "model/packed.safetensors") for run in (one, two))
    assert got.keys() == want.keys()
    for name, value in want.items():
        if value.is_floating_point():
            torch.testing.assert_close(got[name], value, rtol=2e-3, atol=1e-4, msg=name)
        else:  # a weight that stands between two codes may fall the other way
            assert (got[name] == value).float().mean() > 0.995, name


def assert_shares_make_up_the_grids(left: str, run: Path) -> None:
    """What the ranks trained, put together, is what was packed; rows of q, k, v, gate and up, columns of o and down."""
    first, second = (load_file(f"{left}-{rank}.safetensors") for rank in (0, 1))
    layers = dict(format_linears(load_model(run).model))
    assert len(first) == 2 * len(layers) == 42  # scale and zero of 7 layers in 3 blocks
    for key, share in first.items():
        name, part = key.split(":")
        packed = layers[name].state_dict()[f"weight_{part}"]
        dim = 1 if name.endswith((".o", ".down")) else 0
        assert 2 * share.shape[dim] == packed.shape[dim], key
        whole = torch.cat([share, second[key]], dim)
        torch.testing.assert_close((whole.round() if part == "zero" else whole).to(packed.dtype), packed)


@pytest.fixture
def two_ranks(run_ranks: Callable[..., str], here: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.chdir(here)
    monkeypatch.setenv("SHOESTRING_CACHE", str(here / "cache"))
    return partial(run_ranks, 2, Path(__file__).with_name("ranks_lowbit.py"))


@pytest.mark.ranks
@pytest.mark.lab
def test_two_ranks_deliver_the_model_of_one(two_ranks: Callable[..., str], here: Path) -> None:
    """The stages of shrink/lowbit_best below, which also learns its grids."""
    # Not clipped: clamped weights are equal, and rounding alone decides which of them is the end of its group after
    # the first step and gets the scale's gradient. Losses then differ by 1% after six steps.
    plain = [*(a for a in SMALL if not a.startswith("calib_windows")), "calib_windows=0"]
    plain += ["data=corpus.jsonl", "device=cpu"]
    assert run_cli(["run", "shrink/bitdistiller", *plain, "run=one"]) == 0
    two_ranks("shrink/bitdistiller", "0", "left", *plain, "run=two", "mesh.dp=2")
    assert_same_run(here / "one", here / "two")
    assert [Path(f"left-{rank}.txt").read_text() for rank in (0, 1)] == ["model", ""]


@pytest.mark.ranks
@pytest.mark.slow
def test_learned_grids_on_two_ranks_are_those_of_one(
    two_ranks: Callable[..., str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped while rows are cut over FSDP2, and taken up again with tensor parallelism."""
    best = [*BEST, "device=cpu"]
    assert run_cli(["run", "shrink/lowbit_best", *best, "run=best"]) == 0
    two_ranks("shrink/lowbit_best", "5", "cut", *best, "run=cut", "mesh.dp=2")
    assert not (here / "cut/model").exists()
    out = two_ranks("shrink/lowbit_best", "0", "left", "resume=cut", "mesh.dp=1", "mesh.tp=2")
    assert "resumed from" in out and "at step 4" in out and "block by block" not in out
    assert_same_run(here / "best", here / "cut")
    assert_shares_make_up_the_grids("left", here / "cut")
    assert [Path(f"left-{rank}.txt").read_text() for rank in (0, 1)] == ["model", ""]
    assert not (here / "cut/checkpoints").exists()

    capsys.readouterr()
    assert run_cli(["inspect", "cut/model"]) == 0
    assert "measured before training end to end" in capsys.readouterr().out
