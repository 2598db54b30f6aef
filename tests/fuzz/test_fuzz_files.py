"""Damaged and forged files of every kind: the right result or one clean error, never a traceback, a hang or a crash.

A few hundred cases here; `make lab` runs thousands and records the table (results/fuzz.jsonl).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from file_cases import Kind, run_case
from file_kinds import KINDS, make_llama
from outcomes import Outcome, Tally, lab_seeds, outcome_of_process

from shoestring.model import chat

FEW, MANY = 6, 300
FOUND = {"skip sets and drafters": [41224]}  # seeds of the campaigns that showed a defect


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One good folder of each kind; those that are made alike are one folder."""
    made: dict[object, Path] = {}
    for kind in KINDS:
        if kind.make not in made:
            made[kind.make] = tmp_path_factory.mktemp("good") / "files"
            kind.make(made[kind.make])
    return {kind.name: made[kind.make] for kind in KINDS}


@pytest.fixture(autouse=True)
def quick_templates() -> Iterator[None]:
    """A second for a chat template: those that never end are some of the cases."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat, "SECONDS", 1.0)
        yield
    chat._process.close()


def campaign(kind: Kind, good: Path, place: Path, seeds: Iterable[int]) -> Tally:
    tally = Tally(f"file: {kind.name}")
    for seed in seeds:
        outcome, case, told = run_case(kind, good, place, seed)
        tally.add(outcome, case, told)
    return tally


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_good_files_are_read_and_damaged_ones_are_said(kind: Kind, good: dict[str, Path], tmp_path: Path) -> None:
    kind.read(good[kind.name])  # before anything is damaged it works
    campaign(kind, good[kind.name], tmp_path, [*range(FEW), *FOUND.get(kind.name, [])]).check()


@pytest.mark.lab
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_many_damaged_files(kind: Kind, good: dict[str, Path], tmp_path: Path) -> None:
    tally = campaign(kind, good[kind.name], tmp_path, lab_seeds(MANY))
    tally.save()
    tally.check()


# -- as commands -----------------------------------------------------------------------------------


def command(*argv: str | Path, seconds: float = 60.0) -> tuple[Outcome, str]:
    called = [sys.executable, "-m", "shoestring", *map(str, argv)]
    try:
        done = subprocess.run(called, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired as late:
        return outcome_of_process(None, str(late)), str(late)
    return outcome_of_process(done.returncode, done.stderr), done.stderr


@pytest.mark.lab
@pytest.mark.parametrize("verb", ["generate", "inspect", "eval", "export"])
def test_a_pipe_in_the_place_of_a_file_is_no_hang(verb: str, tmp_path: Path) -> None:
    more = {"generate": ["the cat"], "export": [tmp_path / "out"]}.get(verb, [])
    name = "checksums.json" if verb == "inspect" else "tokenizer_config.json"
    make_llama(tmp_path / "m")
    (tmp_path / "m" / name).unlink()
    os.mkfifo(tmp_path / "m" / name)
    outcome, told = command(verb, tmp_path / "m", *more, *(["--verify"] if verb == "inspect" else []))
    assert outcome == "clean" and "is a pipe" in told, told


@pytest.mark.parametrize("verb", ["generate", "inspect", "eval", "export", "chat", "serve"])
def test_paths_that_cannot_be(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    from shoestring.cli.app import run_cli

    more = {"generate": ["hi"], "export": ["out"]}.get(verb, [])
    for path in ("nowhere", "x" * 300, "a/" * 3000, "a\0b", "\udcff"):
        assert run_cli([verb, path, *more]) == 2
        assert capsys.readouterr().err.startswith("error: ")
