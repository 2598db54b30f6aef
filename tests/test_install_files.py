"""What pins and packs: the lock agrees with the constraints and names no place."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from shoestring import __version__

REPO = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def pins(name: str) -> dict[str, str]:
    lines = [line for line in (REPO / name).read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]
    found = dict(line.split("==") for line in lines)
    assert len(found) == len(lines)
    return {normal(package): version for package, version in found.items()}


def normal(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def test_the_lock_holds_what_the_constraints_pin() -> None:
    lock = pins("requirements.lock")
    assert pins("constraints.txt").items() <= lock.items()
    assert lock["torch"] == "2.13.0"  # another version would bring another accelerator stack


def test_the_lock_holds_every_package_that_is_asked_for() -> None:
    extras = PROJECT["optional-dependencies"]
    ours = [
        name for name in extras if name not in ("eval", "wandb", "trackio", "lab")
    ]  # those are not installed by set-up
    asked = [*PROJECT["dependencies"], *(line for name in ours for line in extras[name])]
    names = {normal(re.split(r"[<>=!;\[ ]", line)[0]) for line in asked} - {"shoestring"}
    assert names <= pins("requirements.lock").keys()


@pytest.mark.parametrize("name", ["requirements.lock", "constraints.txt", "pyproject.toml"])
def test_no_file_names_a_place_to_install_from(name: str) -> None:
    text = (REPO / name).read_text(encoding="utf-8")
    assert not re.search(r"https?://|file:|--(extra-)?index-url|git\+| @ ", text)


def test_versions_agree() -> None:
    cited = re.search(r"^version: (.+)$", (REPO / "CITATION.cff").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert cited and cited[1] == __version__ == PROJECT["version"]


def test_the_project_has_what_contributors_look_for() -> None:
    for name in ("CITATION.cff", "SECURITY.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", ".pre-commit-config.yaml"):
        assert (REPO / name).stat().st_size > 100
    assert "docs/reference/security.md" in (REPO / "SECURITY.md").read_text(encoding="utf-8")
    assert len(list((REPO / ".github/ISSUE_TEMPLATE").glob("*.md"))) >= 2
    assert (REPO / "src/shoestring/py.typed").is_file()
    # Versions that tests have run on, and no address before there is one (pyproject.toml says so, too).
    tested = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if "Python :: 3." in c]
    assert tested == ["3.11", "3.12"] and "urls" not in PROJECT
