"""Parts of experiments/lowbit_quality: several in one call, only what is missing; and the grids of tiny floats."""

from __future__ import annotations

from chain_subject import chain_subject

from experiments.lowbit_methods import shrink, unformat
from shoestring.formats import parse_format
from tiny import taught


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
