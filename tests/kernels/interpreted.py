"""Triton's kernels on a CPU: code in a fresh process where Triton interprets them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Without this a kernel that is never chosen would be compared with its own reference.
CHOSEN = """
import torch
from shoestring.kernels.runtime.triton_backend import triton_usable
assert all(triton_usable(torch.zeros(1, dtype=d)) for d in (torch.float32, torch.float16)), "no kernel would run"
"""


HERE = Path(__file__).parent
# The tests of every family of kernels, and whatever this process was told to look at.
PATHS = [str(p) for p in (HERE, *(d for d in HERE.iterdir() if d.is_dir()))] + [os.environ.get("PYTHONPATH", "")]


def run_interpreted(code: str) -> None:
    """The code may import the tests of the kernels; it fails by raising."""
    pytest.importorskip("triton", reason="the kernels are Triton's; install the gpu extra")
    done = subprocess.run(
        [sys.executable, "-c", CHOSEN + code],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(PATHS)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
