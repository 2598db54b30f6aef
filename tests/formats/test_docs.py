"""The Python snippets of docs/formats.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shoestring.formats import FORMATS

DOC = Path(__file__).parents[2] / "docs" / "formats.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", DOC.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("index", range(len(SNIPPETS)))
def test_snippet(index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(SNIPPETS) == 3
    monkeypatch.chdir(tmp_path)
    known = dict(FORMATS)
    try:
        exec(compile(SNIPPETS[index], f"formats.md[{index}]", "exec", dont_inherit=True), {"__name__": "snippet"})
    finally:
        FORMATS.clear()
        FORMATS.update(known)
