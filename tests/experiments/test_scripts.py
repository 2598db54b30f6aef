"""Every script of benchmarks/ and experiments/ can be imported; whole runs of the larger ones are campaigns (lab)."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from benchmarks.tables import REPO

SCRIPTS = sorted(path for folder in ("benchmarks", "experiments") for path in (REPO / folder).glob("*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_scripts_can_be_imported(path: Path) -> None:
    assert importlib.import_module(f"{path.parent.name}.{path.stem}").__doc__ or path.stem == "__init__"
