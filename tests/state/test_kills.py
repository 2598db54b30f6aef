"""kill -9 at the file operations of an export, of a replaced model and of a checkpoint: old or new, never half.
And, as a campaign, a training run that is killed again and again.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from shoestring.runlog import read_jsonl


@pytest.mark.parametrize("stride", [6, pytest.param(1, marks=pytest.mark.lab)])
def test_killed_at_file_operations(run_ranks: Callable[..., str], tmp_path: Path, stride: int) -> None:
    out = run_ranks(1, Path(__file__).with_name("kill_points.py"), str(tmp_path), str(stride))
    counts = dict(re.findall(r"(exports|replacements|checkpoints) (\d+)", out))
    assert len(counts) == 3 and all(int(num) >= 12 for num in counts.values()), counts


def steps_done(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.is_file() else 0


@pytest.mark.lab
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_weights(tmp_path: Path) -> None:
    draw = random.Random(1)
    words = [bytes(draw.choices(b"abcdefghij", k=4)).decode() for _ in range(200)]
    texts = [json.dumps({"text": " ".join(draw.choices(words, k=60))}) for _ in range(300)]
    (tmp_path / "texts.jsonl").write_text("\n".join(texts))
    shape = ["size=tiny", "d_model=64", "num_layers=2", "d_ff=128", "vocab_size=320", "context=32", "batch=4"]
    settings = [f"data={tmp_path}/texts.jsonl", "steps=60", "save_every=3", "log_every=1", "eval_every=0", *shape]

    def start(*argv: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "shoestring", "run", "train/dense", "device=cpu", *argv]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    assert start(*settings, f"run={tmp_path}/whole").wait() == 0
    run, kills = tmp_path / "killed", 0
    process = start(*settings, f"run={run}")
    while True:
        goal = steps_done(run) + draw.randint(2, 9)
        while process.poll() is None and steps_done(run) < goal:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.5))
        if process.poll() is not None:
            assert process.returncode == 0, process.communicate()[0]
            break
        process.kill()
        process.communicate()
        kills += 1
        process = start(*([f"resume={run}"] if (run / "config.json").is_file() else [*settings, f"run={run}"]))
    one, other = (load_file(folder / "model" / "model.safetensors") for folder in (tmp_path / "whole", run))
    assert kills > 0 and all(bool((one[name] == other[name]).all()) for name in one)
    assert [row["step"] for row in read_jsonl(run / "metrics.jsonl") if "loss" in row] == [*range(1, 61)]
