"""What a wheel holds: the package with its data files, nothing else, and it works where there is no checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="hatchling is not installed")
from hatchling.builders.wheel import WheelBuilder

REPO = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    return Path(next(WheelBuilder(str(REPO)).build(directory=str(folder), versions=["standard"])))


def test_the_wheel_is_the_package_with_its_sources_plans_and_pages(wheel: Path) -> None:
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    files = {p for p in (REPO / "src" / "shoestring").rglob("*") if p.is_file()}
    assert names == {str(p.relative_to(REPO / "src")) for p in files if "__pycache__" not in p.parts}
    assert {".py", ".cu", ".cpp", ".json", ".js", ".html", ".css"} <= {Path(n).suffix for n in names}


def test_a_wheel_needs_no_checkout(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import shoestring, sys; from shoestring.cli.app import run_cli; print(shoestring.__file__); "
        "sys.exit(run_cli(['recipes']) or run_cli(['bench', 'serve', '--help']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path / "site"))
    assert "prune24" in done.stdout and "--save" in done.stdout
