"""What a wheel holds: the package with its data files, nothing else; and it works where there is no checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import tiny
from shoestring import save_model

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
    assert {".py", ".cu", ".cpp", ".json", ".js", ".html", ".css", ".typed", ".pyi"} <= {Path(n).suffix for n in names}


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bin/ of a fresh environment with nothing but the wheel; what it depends on is seen where it is installed now."""
    place = tmp_path_factory.mktemp("fresh")
    venv.create(place / "env", with_pip=False, symlinks=True)
    python = place / "env" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--no-index", "--no-compile", str(wheel)], check=True, env=_outside())
    # A line of a .pth file is one more folder of packages. Files of that kind in it are not read: no checkout appears.
    at = Path(sysconfig.get_path("purelib", "venv", {"base": str(place / "env"), "platbase": str(place / "env")}))
    (at / "beside.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python.parent


def _outside() -> dict[str, str]:
    """The environment without the checkout in it."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def test_an_installed_wheel_generates_and_serves(installed: Path, tmp_path: Path) -> None:
    tokenizer = tiny.chat_tokenizer()
    save_model(tmp_path / "model", tiny.served_model(tokenizer.vocab_size, 256), tokenizer)

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=_outside(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = run(str(installed / "python"), "-c", "import shoestring; print(shoestring.__file__)")
    assert Path(where.strip()).is_relative_to(installed.parent)
    shoestring = str(installed / "shoestring")
    assert "bench" in run(shoestring, "--help")
    assert run(shoestring, "generate", "model", "The quick", "--max-tokens", "4").startswith("The quick")
    load = ["--rate", "20", "--seconds", "0.5", "--prompt-tokens", "8", "--new-tokens", "4"]
    load += ["--serve-options", "--max-requests 4"]
    assert "goodput" in run(shoestring, "bench", "serve", "model", *load)
    [folder] = (tmp_path / "runs").iterdir()
    lines = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    assert lines and all(line["status"] == 200 and line["num_tokens"] == 4 for line in lines)
    assert "Time to first token" in (folder / "report.html").read_text()
