"""Hostile settings of every recipe: read, or refused in one line; nothing of the user's is touched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from outcomes import Tally, lab_seeds
from settings_cases import RECIPES, RUNS, file_case, make_home, read_case, run_case

FEW, MANY, MANY_RUNS = 12, 150, 20


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_home(tmp_path_factory.mktemp("settings") / "home")


def read_all(recipe: str, seeds: range) -> Tally:
    tally = Tally(f"settings: {recipe}")
    for seed in seeds:
        tally.add(*read_case(recipe, seed))
    return tally


def run_all(recipe: str, home: Path, seeds: range, monkeypatch: pytest.MonkeyPatch) -> Tally:
    monkeypatch.setenv("SHOESTRING_CACHE", str(home.parent / "cache"))
    before = Path.cwd()
    tally = Tally(f"run: {recipe}")
    try:
        for seed in seeds:
            tally.add(*run_case(recipe, home, seed, os.chdir))
    finally:
        os.chdir(before)
    return tally


@pytest.mark.parametrize("recipe", RECIPES)
def test_settings_are_read_or_refused(recipe: str) -> None:
    read_all(recipe, range(FEW)).check()


def files_all(seeds: range, folder: Path) -> Tally:
    tally = Tally("settings file")
    for seed in seeds:
        tally.add(*file_case(RECIPES[seed % len(RECIPES)], seed, folder))
    return tally


def test_a_file_of_settings_is_read_or_refused(tmp_path: Path) -> None:
    files_all(range(60), tmp_path).check()


def test_a_run_whose_name_is_too_long_is_refused(tmp_path: Path) -> None:
    """The campaign with seed 4 found it: the file system refuses to look."""
    outcome, _, told = file_case("shrink/lowbit_best", 43585, tmp_path)
    assert outcome == "clean" and "cannot be read" in told and len(told) < 500


@pytest.mark.lab
def test_many_files_of_settings(tmp_path: Path) -> None:
    tally = files_all(lab_seeds(20 * MANY), tmp_path)
    tally.save()
    tally.check()


def test_a_run_with_a_hostile_setting(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_all("shrink/rtn", home, range(5), monkeypatch).check()


@pytest.mark.lab
@pytest.mark.parametrize("recipe", RECIPES)
def test_many_settings(recipe: str) -> None:
    tally = read_all(recipe, lab_seeds(MANY))
    tally.save()
    tally.check()


@pytest.mark.lab
@pytest.mark.parametrize("recipe", RUNS)
def test_many_runs(recipe: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tally = run_all(recipe, home, lab_seeds(MANY_RUNS), monkeypatch)
    tally.save()
    tally.check()
