"""The Python snippets of docs/explain/formats.md and docs/reference/formats.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shoestring.formats import FORMATS

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "explain/formats.md").read_text() + (DOCS / "reference/formats.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


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
