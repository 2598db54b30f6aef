"""Mixed bits: the knapsack against brute force, damages against their definition, rules that convert takes."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from refusals import refused
from shoestring.formats import Dense, convert, formats_of, pack, parse_format
from shoestring.formats.convert import format_linears
from shoestring.shrink.mixed_bits import FormatOption, LayerGroup, choose_formats, knapsack, measure_damage
from tiny import loud_model, tokens

FORMATS = [parse_format(x) for x in ("int2:g32", "nf3:s2:g32", "int4:g32")]
CALIB = tokens(3, 24)


# -- choosing ------------------------------------------------------------------------------------------------
def brute_force(bits: list[list[float]], damage: list[list[float]], room: float) -> float:
    best = float("inf")
    for picks in itertools.product(*(range(len(b)) for b in bits)):
        if sum(b[i] for b, i in zip(bits, picks, strict=True)) <= room * (1 + 1e-12):
            best = min(best, sum(d[i] for d, i in zip(damage, picks, strict=True)))
    return best


numbers = st.integers(1, 40).map(float) | st.floats(0.01, 50)
options = st.lists(st.tuples(numbers, st.integers(0, 30).map(float) | st.floats(-1, 30)), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None)
@given(units=st.lists(options, min_size=1, max_size=5), part=st.floats(0, 1))
def test_the_knapsack_is_solved_exactly(units: list[list[tuple[float, float]]], part: float) -> None:
    bits, damage = [[b for b, _ in u] for u in units], [[d for _, d in u] for u in units]
    least, most = sum(map(min, bits)), sum(map(max, bits))
    room = least + part * (most - least)
    picks, exact = knapsack(bits, damage, room)
    assert exact
    assert sum(b[i] for b, i in zip(bits, picks, strict=True)) <= room * (1 + 1e-9)
    found = sum(d[i] for d, i in zip(damage, picks, strict=True))
    assert found == pytest.approx(brute_force(bits, damage, room), abs=1e-7)


def test_many_layers_are_quick_and_a_capped_search_says_so() -> None:
    gen = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 9, (200,), generator=gen).tolist()
    bits = [[n * b for b in (2.375, 3.375, 4.375)] for n in sizes]
    damage = [sorted(torch.rand(3, generator=gen).mul(n).tolist(), reverse=True) for n in sizes]
    room = 3.1 * sum(sizes)
    picks, exact = knapsack(bits, damage, room)
    assert exact
    capped, said = knapsack(bits, damage, room, max_states=2)
    total = [sum(d[i] for d, i in zip(damage, p, strict=True)) for p in (picks, capped)]
    assert not said and total[0] <= total[1] < 1.01 * total[0]
    assert sum(b[i] for b, i in zip(bits, capped, strict=True)) <= room


def unit(name: str, size: int, *damages: float) -> LayerGroup:
    formats = [parse_format(x) for x in ("int2:g32", "int3:g32", "int4:g32")]
    found = [
        FormatOption(f, f.bits_per_weight((size, 64)) * size * 64, d) for f, d in zip(formats, damages, strict=True)
    ]
    return LayerGroup(name, (f"{name}.a", f"{name}.b"), size * 64, tuple(found))


def test_bits_go_where_the_damage_is() -> None:
    units = [unit("x", 8, 1.0, 0.9, 0.8), unit("y", 8, 9.0, 2.0, 0.1), unit("z", 8, 1.0, 0.5, 0.4)]
    mix = choose_formats(units, 3.75)
    assert [o.format.label for o in mix.chosen] == ["int2:g32", "int4:g32", "int3:g32"]
    assert mix.bits_per_weight == pytest.approx((2.75 + 4.75 + 3.75) / 3) and mix.damage == pytest.approx(1.6)
    assert [name for name, _ in mix.rules] == ["x.a", "x.b", "y.a", "y.b", "z.a", "z.b"]
    told = mix.to_json()
    assert told["exact"] and told["units"][1]["options"] == {"int2:g32": 9.0, "int3:g32": 2.0, "int4:g32": 0.1}
    assert {o.format.label for o in choose_formats(units, 16).chosen} == {"int4:g32"}
    refused(r"too small: the smallest candidates need 2\.750", choose_formats, units, 2.7)
    refused("there are none", choose_formats, [], 3.0)


# -- measuring -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("measure", ["kl", "loss"])
def test_damage_is_what_the_whole_model_loses(measure: str) -> None:
    model = loud_model()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    units = measure_damage(model, FORMATS, CALIB, measure=measure)  # type: ignore[arg-type]
    assert len(units) == 21 and all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert sum(u.num_weights for u in units) == sum(
        m.weight.numel() for n, m in model.named_modules() if n.startswith("blocks.") and hasattr(m, "format")
    )
    with torch.no_grad():
        full = F.log_softmax(model(CALIB), -1)
    for u, o in ((units[i], units[i].options[j]) for i, j in ((0, 0), (10, 1), (20, 0))):
        changed = loud_model()
        convert(changed, [(u.name, o.format)])
        with torch.no_grad():
            got = F.log_softmax(changed(CALIB), -1)
        if measure == "kl":
            expected = F.kl_div(got, full, log_target=True, reduction="none").sum(-1).mean()
        else:
            targets = CALIB[:, 1:].flatten()
            expected = F.nll_loss(got[:, :-1].flatten(0, 1), targets) - F.nll_loss(full[:, :-1].flatten(0, 1), targets)
        assert o.damage == pytest.approx(float(expected), rel=1e-3, abs=1e-6)
    if measure == "kl":
        assert all(u.options[0].damage > u.options[2].damage > 0 for u in units)


def test_a_mix_is_within_its_budget_and_better_than_chance() -> None:
    units = measure_damage(loud_model(), FORMATS, CALIB)
    mix = choose_formats(units, 3.6)
    model = loud_model()
    report = convert(model, mix.rules)
    assert report.bits_per_weight == pytest.approx(mix.bits_per_weight) and report.bits_per_weight <= 3.6
    pack(model)
    layers = [m for _, m in format_linears(model) if not isinstance(m.format, Dense)]
    stored = sum(m.format.bits_per_weight(m.shape) * m.shape[0] * m.shape[1] for m in layers)
    assert stored / sum(m.shape[0] * m.shape[1] for m in layers) == pytest.approx(mix.bits_per_weight)
    assert len(set(formats_of(model).values())) > 1
    # The same number of layers of each format, given to the wrong layers.
    worst = choose_formats(
        [
            LayerGroup(
                u.name, u.layers, u.num_weights, tuple(FormatOption(o.format, o.bits, -o.damage) for o in u.options)
            )
            for u in units
        ],
        3.6,
    )
    assert mix.damage < 0.8 * -worst.damage


def test_blocks_as_units_dense_as_a_candidate_and_stopped_runs(tmp_path: Path) -> None:
    file, model = tmp_path / "damage.jsonl", loud_model()
    formats = [parse_format("int2:g32"), Dense()]

    def stop(done: int, total: int, damage: float) -> None:
        assert total == 6
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_damage(model, formats, CALIB, units="block", file=file, progress=stop)
    with file.open("a") as f:
        f.write('\n{"trial": "blocks.1 int2')  # killed while it wrote
    first = file.read_text().splitlines()[0]
    units = measure_damage(model, formats, CALIB, units="block", file=file)
    assert [u.name for u in units] == ["blocks.0", "blocks.1", "blocks.2"] and len(units[0].layers) == 7
    assert file.read_text().splitlines()[0] == first and len(file.read_text().splitlines()) == 4
    assert [u.options for u in units] == [u.options for u in measure_damage(model, formats, CALIB, units="block")]
    assert all(u.options[1].damage == 0 and u.options[0].damage > 0 for u in units)
    refused("another text", measure_damage, model, formats, CALIB[:1], units="block", file=file)


def test_bad_input_is_named() -> None:
    refused("two or more different", measure_damage, loud_model(), [FORMATS[0], FORMATS[0]], CALIB)
    refused(
        r"blocks\.0\.attn\.q: Group 48 does not divide", measure_damage, loud_model(),
        [*FORMATS, parse_format("int8:g48")], CALIB,
    )  # fmt: skip
    bad = loud_model()
    with torch.no_grad():
        bad.blocks[2].attn.o.weight[0, 0] = float("inf")  # type: ignore[union-attr]
    refused(r"blocks\.2\.attn\.o\.weight holds NaN", measure_damage, bad, FORMATS, CALIB)
