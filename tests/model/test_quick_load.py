"""Every command loads a model: what that imports is waited for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from shoestring.model import Decoder, ModelSpec, save_model

SCRIPT = """
import sys
from shoestring.model import load_model
print(load_model(sys.argv[1]).spec.num_layers)
slow = {"torch._dynamo", "sympy", "transformers", "triton"} & set(sys.modules)
assert not slow, f"loading a model imports {slow}"
"""


def test_loading_imports_no_compiler(tmp_path: Path) -> None:
    torch.manual_seed(0)
    save_model(tmp_path / "model", Decoder(ModelSpec(96, 64, 2, 4, 2, 16, 128, 64)))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "model")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "2\n"
