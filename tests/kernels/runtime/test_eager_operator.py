"""Packed products that are called outside of compilation do not import torch's compiler, and are operators inside."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from layers import packed_layer

from shoestring.formats import kernel_layout
from shoestring.kernels.runtime.eager_operator import call_operator

FIRST_CALLS = """
import sys, torch
from layers import packed_layer
from shoestring.formats import kernel_layout

kernel_layout.chunks_usable = lambda t: True
for label in ("int4:g64", "sparse24+int4:g64"):
    layer = packed_layer(label, 48, 768)
    assert layer.use_kernels(), label
    x = torch.randn(2, 768)
    with torch.no_grad():
        quick = layer(x)
    assert "torch._dynamo" not in sys.modules, label
assert torch.equal(layer(x), quick)
assert "torch._dynamo" in sys.modules, "then the test says nothing"
"""


def test_a_first_call_does_not_import_torchs_compiler() -> None:
    paths = [str(Path(packed_layer.__code__.co_filename).parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALLS], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_operator_is_called_where_it_is_needed() -> None:
    called: list[str] = []
    told = (lambda x: called.append("operator") or x, lambda x: called.append("function") or x)
    x = torch.ones(1)
    call_operator(*told, x)
    with torch.no_grad():
        call_operator(*told, x)
        call_operator(*told, torch.nn.Parameter(x))
    with torch.inference_mode():
        call_operator(*told, x)
    assert called == ["operator", "function", "operator", "function"]


def test_a_compiled_program_holds_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_layout, "chunks_usable", lambda t: True)
    layer = packed_layer("int4:g64", 32, 128)
    layer.use_kernels()
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    x = torch.randn(3, 128)
    with torch.no_grad():
        compiled = torch.compile(layer, fullgraph=True, backend=backend)(x)
        assert torch.equal(compiled, layer(x))
    assert any("shoestring.lowbit_linear" in target for target in seen)
