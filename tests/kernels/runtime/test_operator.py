"""Packed products that are called outside of compilation do not import torch's compiler, and are operators inside."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from layers import packed_layer

from shoestring.formats import kernel_layout
from shoestring.kernels.runtime.operator import operator, registered

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


def test_the_registered_operator_is_called_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def custom_op(name: str, function: Any, mutates_args: object) -> Any:
        made = lambda x: called.append(name) or function(x)  # noqa: E731
        made.register_fake = lambda fake: None  # type: ignore[attr-defined]
        return made

    monkeypatch.setattr(torch.library, "custom_op", custom_op)
    call = registered("op", torch.empty_like)(lambda x: called.append("function") or x)
    x = torch.ones(1)
    call(x)
    with torch.no_grad():
        call(x)
        call(torch.nn.Parameter(x))
    with torch.inference_mode():
        call(x)
    assert called == ["shoestring::op", "function", "function", "shoestring::op", "function", "function"]


def test_a_kernel_has_the_defaults_of_its_reference_and_is_called_where_it_is_usable() -> None:
    def reference(x: torch.Tensor, n: int = 2, *, scale: float = 3.0) -> tuple[str, int, float]:
        return "reference", n, scale

    @operator(reference, usable=lambda x: x.numel() > 1)
    def kernel(x: torch.Tensor, n: int, *, scale: float) -> tuple[str, int, float]:
        return "kernel", n, scale

    assert kernel(torch.ones(1)) == ("reference", 2, 3.0) and kernel(torch.ones(2)) == ("kernel", 2, 3.0)
    assert kernel(torch.ones(2), 5, scale=1.0) == ("kernel", 5, 1.0)


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
