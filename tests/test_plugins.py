"""Methods by name: a package that the project does not know brings a Format, a recipe and a reducer."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata

import pytest

from shoestring import plugins
from shoestring.errors import UserError

PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "outside-method"
version = "0.1"
[project.entry-points."shoestring.formats"]
halves = "outside_method:Halves"
[project.entry-points."shoestring.recipes"]
"outside/hello" = "outside_method.hello"
[project.entry-points."shoestring.reducers"]
every = "outside_method:every"
"""
PACKAGE = '''
from dataclasses import dataclass
from typing import ClassVar
import torch
from shoestring.formats import Dense
from shoestring.train.reducers.quantizers import INT8

@dataclass(frozen=True)
class Halves(Dense):
    """Weights rounded to multiples of a half."""
    step: float = 0.5
    name: ClassVar[str] = "halves"

    def encode(self, w, state):
        return super().encode(torch.round(w / self.step) * self.step, state)

    def error_bound(self, w, state):
        return torch.full_like(w, self.step / 2)

def every(value):
    assert value == "3", value
    return INT8
'''
RECIPE = '''"""Says hello by a Format of its own package.

Run: shoestring run outside/hello
"""
from dataclasses import dataclass
from shoestring.config import option

@dataclass(frozen=True)
class Config:
    name: str = option("you", "whom to greet")

def main(config):
    print("hello", config.name)
'''
USE = """
import torch
from shoestring import parse_format
from shoestring.formats import from_json
from shoestring.train.reducers.methods import parse_compressor
halves = parse_format("halves")
assert from_json(halves.to_json()) == halves and halves.to_json()["name"] == "halves"
w = torch.tensor([[0.3, 1.6], [-0.9, 0.1]])
print(halves.decode(halves.encode(w, {}), w.dtype).tolist(), parse_compressor("every:3").name)
from shoestring.cli.app import run_cli
run_cli(["recipes"])
run_cli(["run", "outside/hello", "name=world"])
"""


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that has the package installed."""
    project, site = tmp_path_factory.mktemp("project"), tmp_path_factory.mktemp("site")
    (project / "pyproject.toml").write_text(PYPROJECT)
    (project / "src" / "outside_method").mkdir(parents=True)
    (project / "src" / "outside_method" / "__init__.py").write_text(PACKAGE)
    (project / "src" / "outside_method" / "hello.py").write_text(RECIPE)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "--target", str(site), str(project)], check=True)
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{before}" if before else str(site)}


def run(environment: dict[str, str], *command: str) -> str:
    return subprocess.run(
        [sys.executable, *command], env=environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()


def test_an_outside_package_brings_a_format_a_reducer_and_a_recipe_by_name(outside: dict[str, str]) -> None:
    first, *recipes, last = run(outside, "-c", USE).splitlines()
    assert first == "[[0.5, 1.5], [-1.0, 0.0]] int8" and last == "hello world"
    assert "Says hello by a Format" in "".join(recipes)


def test_names_of_packages_that_are_not_installed_are_unknown() -> None:
    assert "halves" not in plugins.names("formats")
    assert "outside/hello" not in plugins.names("recipes")


def test_a_package_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    points = (metadata.EntryPoint("gone", "no_such_package_here:Thing", "shoestring.formats"),)
    monkeypatch.setattr(plugins, "_points", lambda group: points)
    with pytest.raises(UserError, match=r"'gone' of this source tree cannot be loaded \(no_such_package_here:Thing\)"):
        plugins.load("formats", "gone")


def test_one_name_of_two_packages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    points = tuple(metadata.EntryPoint("both", f"{where}:Thing", "shoestring.formats") for where in ("json", "os"))
    monkeypatch.setattr(plugins, "_points", lambda group: points)
    with pytest.raises(UserError, match="uninstall one of them"):
        plugins.load("formats", "both")


def test_listing_names_imports_no_method() -> None:
    code = (
        "import sys; from shoestring import plugins; [plugins.names(g) for g in ('formats', 'recipes', 'reducers')]; "
        "print([m for m in sys.modules if m.startswith('shoestring.methods.') or m == 'torch'])"
    )
    assert run(dict(os.environ), "-c", code) == "[]"


def test_every_entry_point_of_the_project_loads() -> None:
    for group in ("formats", "stored_formats", "recipes", "reducers", "environment"):
        for name in plugins.names(group):
            assert plugins.load(group, name) is not None
