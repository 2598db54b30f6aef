"""Checkpoints that an earlier version wrote: old_checkpoints/ has step 2 of checkpoint=fixed and step 5 of auto."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from toy_run import SETTINGS, make_run, step

from shoestring.state.checkpointer import Checkpointer
from shoestring.state.levels.place import HostPlace

OLD = Path(__file__).with_name("old_checkpoints")


@pytest.mark.parametrize("number", [2, 5])
@pytest.mark.parametrize("settings", [None, SETTINGS], ids=["fixed", "auto"])
def test_they_load_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Any, number: int) -> None:
    monkeypatch.setenv("SHOESTRING_MEMORY_DIR", str(tmp_path))
    monkeypatch.setattr(HostPlace, "start_agent", lambda self: None)
    name = f"step-{number:08d}"
    shutil.copytree(OLD / name, tmp_path / "run" / "checkpoints" / name)
    run, parts = make_run(width=4)
    saver = Checkpointer(tmp_path / "run" / "checkpoints", settings)
    assert saver.resume(run, parts) and run.step == number
    stored = load_file(OLD / name / "part-00000.safetensors")
    for key, value in run.model.state_dict().items():
        start = ",".join("0" for _ in value.shape)
        assert torch.equal(value, stored[f"model.{key}@{start}"]), key
    moments = run.optimizer.state[run.model[0].weight]
    assert torch.equal(moments["exp_avg"], stored["optimizer.state.0.weight.exp_avg@0,0"])
    assert parts["counter"].seen.tolist() == [number * (number + 1) // 2] * 3
    assert parts["counter"].note["text"] == f"after {number}"
    assert torch.equal(torch.get_rng_state(), stored["rng.private@dp0-tp0.cpu@0"])
    step(run, parts)
    assert saver.save(run, parts).is_dir()
    saver.let_go()
