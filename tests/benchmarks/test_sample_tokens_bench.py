from __future__ import annotations

import pytest

from benchmarks import sample_tokens


def test_the_table_compares_with_the_quicker_of_those_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def line(case: str, value: float, rows: int) -> dict[str, object]:
        return {
            "case": case, "value": value, "config": {"rows": rows, "vocab": 49152, "top_p": 0.95}, "device": "D",
            "versions": {"torch": "2"}, "commit": "c", "date": "d",
        }  # fmt: skip

    times = {"reference": 900.0, "usual": 400.0, "shoestring": 40.0}
    lines = [line(case, value, 8) for case, value in times.items()]
    lines += [line(case, value, 64) for case, value in {**times, "compiled": 120.0}.items()]
    monkeypatch.setattr(sample_tokens, "newest", lambda bench: lines)
    header, _, few, many = sample_tokens.table().splitlines()[:4]
    assert "compiled, us" in header
    assert few == "| top_p 0.95 | 49,152 | 8 | 900 | 400 |  | 40 | 10.0x |"
    assert many == "| top_p 0.95 | 49,152 | 64 | 900 | 400 | 120 | 40 | 3.0x |"
