from __future__ import annotations

import pytest

from shoestring.bench import draw


def test_the_table_compares_with_the_quicker_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def line(case: str, value: float, rows: int) -> dict[str, object]:
        return {
            "case": case, "value": value, "config": {"rows": rows, "vocab": 49152, "top_p": 0.95}, "device": "D",
            "versions": {"torch": "2"}, "commit": "c", "date": "d",
        }  # fmt: skip

    lines = [line(*x) for x in (("torch", 900.0, 8), ("compiled", 400.0, 8), ("shoestring", 40.0, 8))]
    monkeypatch.setattr(draw, "newest", lambda bench: lines)
    header, _, row = draw.table().splitlines()[:3]
    assert "torch.compile, us" in header
    assert row == "| top_p 0.95 | 49,152 | 8 | 900 | 400 | 40 | 10.0x |"
