"""Triton's kernels on a CPU: code in a process where Triton interprets them.

One such process serves all tests of a pytest process: importing torch and triton takes longer than most of the tests.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Without the check a kernel that is never chosen would be compared with its own reference.
SERVER = """
import json, os, sys, traceback
import torch
from shoestring.kernels.runtime.triton_backend import triton_usable
assert all(triton_usable(torch.zeros(1, dtype=d)) for d in (torch.float32, torch.float16)), "no kernel would run"
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the code prints is no answer
for line in sys.stdin:
    torch.manual_seed(0)
    try:
        exec(json.loads(line), {"__name__": "interpreted"})
        answer = ""
    except BaseException:
        answer = traceback.format_exc()
    print(json.dumps(answer), file=answers, flush=True)
"""


HERE = Path(__file__).parent
# The tests of every family of kernels, the core's and those of methods, and whatever this process was told to look at.
FAMILIES = (HERE, HERE.parent, *(d for d in HERE.iterdir() if d.is_dir()), *HERE.parent.glob("methods/*/kernels"))
PATHS = [*map(str, FAMILIES), os.environ.get("PYTHONPATH", "")]


@functools.cache
def interpreter() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(PATHS)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.kill)
    return process


def run_interpreted(code: str) -> None:
    """The code may import the tests of the kernels; it fails by raising."""
    pytest.importorskip("triton", reason="the kernels are Triton's; install the gpu extra")
    process = interpreter()
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(code) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except OSError:
        line = ""
    if not line:
        interpreter.cache_clear()
        pytest.fail(f"the interpreting process ended with {process.wait()}")
    told = json.loads(line)
    assert not told, told[-3000:]
