from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import house
from benchmarks.results import recorded

BENCH = """
import os, sys, json
from pathlib import Path
line = {"bench": "toy", "metric": "rate", "unit": "tokens/s", "commit": "%(commit)s", "quality": {}, "config": {"k": 1}}
lines = [{**line, "case": "ours", "value": %(value)d}, {**line, "case": "transformers", "value": 1}]
lines += [{**line, "case": "%(commit)s", "value": 1}, {**line, "case": "start", "unit": "seconds", "value": %(value)d}]
assert sys.argv[1:] == ["--quick"]
text = "".join(json.dumps(one) + chr(10) for one in lines)
(Path(os.environ["SHOESTRING_RESULTS"]) / "toy.jsonl").write_text(text)
"""


def test_headlines_of_two_trees_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ours only, and what both trees have; of seconds fewer are better."""
    for name, value in (("old", 100), ("new", 110)):
        (tmp_path / name / "benchmarks").mkdir(parents=True)
        (tmp_path / name / "benchmarks/__init__.py").touch()
        (tmp_path / name / "benchmarks/toy.py").write_text(BENCH % {"commit": name, "value": value})
    monkeypatch.setattr(house, "REPO", tmp_path / "new")
    monkeypatch.setattr("benchmarks.results.RESULTS", tmp_path / "results")
    house.measure_headlines(tmp_path / "old", {"toy": ["--quick"]})
    found = {line["case"]: line for line in recorded("house")}
    assert {case: round(line["ratio"], 4) for case, line in found.items()} == {"toy: ours": 1.1, "toy: start": 0.9091}
    assert found["toy: ours"]["baseline_value"] == 100 and found["toy: ours"]["baseline"] == "old, before"
    assert "100 -> 110, 1.100" in capsys.readouterr().out and "toy: ours" in house.headlines()
