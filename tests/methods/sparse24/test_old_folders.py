"""Folders that a version wrote before 2:4 was a method of its own: a packed model, and the settings of three runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shoestring.formats import formats_of
from shoestring.model import load_model
from shoestring.recipes.find import load_recipe, recipe_name, resolve_config

OLD = Path(__file__).with_name("old_folders")


def test_a_packed_model_loads_with_the_logits_it_had() -> None:
    """One layer each of Sparse24, Stacked, Slorb with a trained projection, and Slorb beside Stacked."""
    model = load_model(OLD / "packed").model
    labels = {name.rpartition(".")[2]: format.label for name, format in formats_of(model).items()}
    assert labels["gate"] == "sparse24" and labels["up"] == "sparse24+int4:g16"
    assert labels["down"] == "sparse24+slorb16:trained" and labels["o"] == "sparse24+int4:g8+slorb8"
    with torch.no_grad():
        logits = model(torch.arange(16)[None])[0, -1]
    torch.testing.assert_close(logits, torch.tensor(json.loads((OLD / "logits.json").read_text())), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "folder", "kept"),
    [
        ("train/sparse24_fst", "fst", {"steps": 8, "finish": 0.0, "weight_grad": "exact", "flip_every": 2}),
        ("train/sparse24_sste", "sste", {"steps": 4, "method": "sste", "precision": "full"}),
        ("shrink/prune24", "pruned", {"train": "none", "method": "sparsegpt", "calib_windows": 4}),
    ],
)
def test_the_settings_of_a_run_are_taken_up(name: str, folder: str, kept: dict[str, object]) -> None:
    recipe = load_recipe(name)
    assert recipe_name(recipe) == name
    config = resolve_config(recipe, [f"resume={OLD / folder}", "log_every=7"])
    assert {key: getattr(config, key) for key in kept} == kept and config.log_every == 7


def test_importing_the_method_imports_no_torch() -> None:
    code = "import sys, shoestring.methods.sparse24; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert ran.stdout.strip() == "[]"
