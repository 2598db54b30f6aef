"""Parts of experiments/lowbit_quality: several in one call, only what is missing; and the grids of tiny floats."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from chain_subject import chain_subject

from benchmarks import results
from experiments import lowbit_quality
from experiments.lowbit_methods import shrink, unformat
from shoestring.formats import parse_format
from tiny import taught


def test_several_parts_in_one_call_measure_what_is_missing_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str]] = []
    text = SimpleNamespace(fingerprint="aaaaaaaa" * 4)
    model = SimpleNamespace(name=lowbit_quality.SMOLLM2, blocks={}, text=text, told={})

    def measure(subject: object, method: str, label: str, seed: int, dense: float) -> None:
        seen.append((method, label))

    def line(method: str, label: str, items: int = 500, device: str = results.device_name(), **trained: object) -> str:
        config = {"model": model.name, "method": method, "format": label, "seed": 0, "context": 2048}
        config |= {"items": items, "tokens": 9, "training_tokens": 0, **trained}
        told = {"case": f"{method} {label}", "metric": "perplexity", "device": device, "baseline_value": 1.0}
        return json.dumps({**told, "config": config, "quality": {"perplexity": 2.0}}) + "\n"

    known = line("rtn", "fp3:s1:g64") + line("gptq+clip", "int2:g64")
    other = line("gptq", "fp4:s1:g64", items=10) + line("gptq", "fp4:s2:g64", device="another")
    for rate, tokens, told in (
        ("1e-4", 1 << 20, {"text_id": "aaaaaaaa"}),
        ("2e-4", 1 << 20, {"text_id": "bbbbbbbb"}),
        ("3e-4", 1 << 20, {}),
        ("4e-4", 1 << 19, {"text_id": "aaaaaaaa"}),
        ("5e-4", 1 << 20, {"text_id": "aaaaaaaa", "text": "a corpus"}),
    ):
        other += line(f"bitdistiller@{rate}", "int2:g64", training_tokens=tokens, **told)
    (tmp_path / "lowbit_quality.jsonl").write_text(known + other)
    monkeypatch.setattr(lowbit_quality, "measure", measure)
    monkeypatch.setattr(lowbit_quality, "smollm2", lambda args, folder: model)
    monkeypatch.setattr(lowbit_quality, "known_dense", lambda subject: 1.0)
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    argv = ["lowbit_quality", "--assets", str(tmp_path), "--missing", "--part", "clipped", "float", "clipped"]
    monkeypatch.setattr(sys, "argv", argv)
    lowbit_quality.main()
    formats = ("int4", "nf3:s2", "int2")
    clipped = [("gptq+clip", f"{f}:g{group}") for group in (64, 192) for f in formats]
    floats = [
        (method, f"fp{bits}:s{scales}:g{group}")
        for group in (64, 192)
        for bits in (3, 4)
        for scales in (1, 2)
        for method in ("rtn", "clip")
    ]
    wanted = [*clipped, *floats, ("gptq", "fp4:s1:g64"), ("gptq", "fp4:s2:g64")]
    assert seen == [cell for cell in wanted if cell not in (("rtn", "fp3:s1:g64"), ("gptq+clip", "int2:g64"))]
    seen.clear()  # of trained ones only that with as many tokens of this text
    monkeypatch.setattr(sys, "argv", [*argv[:4], "--only", *(f"bitdistiller@{i}e-4 int2:g64" for i in range(1, 6))])
    lowbit_quality.main()
    assert [method for method, _ in seen] == [f"bitdistiller@{i}e-4" for i in range(2, 6)]


def test_grids_of_tiny_floats_go_through_the_methods_of_their_part() -> None:
    model, text = taught(3)
    subject = chain_subject(model, text, 512, 8, steps=1, batch=1)
    name = "blocks.0.mlp.up.weight"
    errors: dict[tuple[str, str], float] = {}
    for method, label in (
        (method, f"fp{bits}:s{scales}:g32")
        for method in ("rtn", "clip", "gptq")
        for bits in (3, 4)
        for scales in (1, 2)
    ):
        got, told = shrink(subject, method, label, 0)
        assert told == {"training_tokens": 0}
        format = parse_format(label)
        # Of the smallest layers; the stored table is less in larger ones.
        assert format.bits < unformat(got) <= format.bits_per_weight((32, 32))  # type: ignore[attr-defined]
        weight, full = got.state_dict()[name], subject.original[name]
        levels = {len(row.unique()) for row in weight}  # a row is one group
        assert max(levels) <= (7 if format.bits == 3 else 15)  # type: ignore[attr-defined]
        errors[method, label] = float((weight - full).norm() / full.norm())
    for (method, label), error in errors.items():
        if label.startswith("fp4"):
            assert error < 0.7 * errors[method, label.replace("fp4", "fp3")], (method, label)
