"""The support matrix: the page is what the cells say, and the cells are what happens when they are tried."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.models import ARCHITECTURES, difference, forward_choice, forward_with, measure, tiny_peer
from shoestring.kernels.lowbit.w4a8 import unusable
from shoestring.model import load_model

DOCS = Path(__file__).parents[1] / "docs"


def support() -> Any:
    spec = importlib.util.spec_from_file_location("generate_support", DOCS / "generate_support.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for their module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def matrix() -> Any:
    return support()


@pytest.fixture(scope="module")
def cells() -> Any:
    return json.loads((DOCS / "support_cells.json").read_text())


def test_the_page_is_what_the_cells_say(matrix: Any, cells: Any) -> None:
    """`tables` refuses cells of another set of architectures or Formats: a new one must be tried."""
    page = (DOCS / "reference" / "support.md").read_text()
    assert page == matrix.page_with(cells), "run python docs/generate_support.py"
    assert all(cell.strip() for rows in cells.values() for row in rows.values() for cell in row.values())


@pytest.mark.parametrize(("name", "kind"), [("llama", "int4"), ("gemma2", "nf3"), ("mixtral", "dense")])
def test_some_cells(matrix: Any, cells: Any, name: str, kind: str) -> None:
    for path in matrix.PATHS:
        if path != "cpu" or unusable() is None:  # a machine without kernels for 8-bit inputs has another cell
            assert matrix.tried(path, name, kind) == cells[path][name][kind], path


def test_paths_that_are_wrong_are_seen(matrix: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell compares: an executor that computes something else is no `fused`."""
    texts = matrix._texts
    monkeypatch.setattr(matrix, "_texts", lambda model, graphs: [[0]] if graphs else texts(model, graphs))
    with pytest.raises(AssertionError):
        matrix.tried("gpu", "llama", "dense")


@pytest.mark.lab
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_cell(matrix: Any, cells: Any, name: str) -> None:
    for path, kind in ((path, kind) for path in matrix.PATHS for kind in matrix.FORMATS):
        assert matrix.tried(path, name, kind) == cells[path][name][kind], (path, kind)


@pytest.mark.parametrize("name", ["qwen3", "phi3"])
def test_the_benchmark_of_models_stays_below_its_bounds(name: str) -> None:
    found = {f.path: f for f in measure(name, torch.device("cpu"))}
    assert {"prefill", "decode", "packed int8"} <= set(found) and "fused" in found
    assert all(f.value <= f.bound for f in found.values()), found


def test_a_choice_of_experts_can_be_given(tmp_path: Path) -> None:
    """What the benchmark compares steps in bf16 with: the own choice changes nothing, another one does."""
    tiny_peer("qwen3_moe").save_pretrained(tmp_path)
    model, tokens = load_model(tmp_path).model, torch.arange(1, 13)[None]
    with torch.no_grad():
        logits, choice = forward_choice(model, tokens)
        assert difference(forward_with(model, tokens, choice), logits) < 1e-6
        other = choice.clone()
        other[1, 5] = (choice[1, 5] + 1) % 4
        changed = (forward_with(model, tokens, other) - logits).abs().amax(-1)
    assert (changed[:5] < 1e-5).all() and changed[5] > 1e-2
