"""Selectors: the budget holds, layers are not forgotten, nothing is lost, and the network learns."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from refusals import refused
from shoestring.mesh import MeshConfig
from shoestring.methods.gradient_selection.hyper import LESSONS, Hyper
from shoestring.methods.gradient_selection.plan_log import PlanLog, heat_map
from shoestring.methods.gradient_selection.selected import SelectedCompression, make_selector
from shoestring.methods.gradient_selection.selectors import MAX_STALENESS, Facts, least_error, option_grid
from shoestring.train.reducers.build import ReducerConfig, check_reducer
from shoestring.train.reducers.rounds import emulate
from shoestring.train.reducers.sparsifiers import TopKSparsifier

WANTED = TopKSparsifier(0.02)
SHAPES = {f"blocks.{i}.{k}.weight": torch.Size(s) for i in range(3) for k, s in (("q", (48, 64)), ("up", (96, 64)))}
NAMES: Any = ("round-robin", "random", "l-greco", "hyper")


def members(selector: Any, **options: Any) -> list[SelectedCompression]:
    given = {"wanted": WANTED, "shapes": SHAPES, "selector": selector, "size": 2, **options}
    return [SelectedCompression(dict.fromkeys(SHAPES, WANTED), rank=r, **given) for r in range(2)]


def gradients(step: int, replica: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(2 * step + replica)
    return {n: torch.randn(s, generator=g) * (1 + 5 * (i == 1)) for i, (n, s) in enumerate(SHAPES.items())}


@pytest.mark.parametrize("selector", NAMES)
def test_budget_staleness_and_telescoping(selector: Any) -> None:
    replicas = members(selector)
    budget = replicas[0].budget
    uniform = sum(WANTED.sent_bytes(s, 2) for s in SHAPES.values())
    assert budget + replicas[0].message_bytes() == uniform
    given = {n: torch.zeros(s) for n, s in SHAPES.items()}
    got = {n: torch.zeros(s) for n, s in SHAPES.items()}
    spent, age = 0.0, dict.fromkeys(SHAPES, 0)
    num_steps = 70
    for step in range(num_steps):
        grads = [gradients(step, r) for r in range(2)]
        for r in replicas:
            r.loss = 1 / (1 + step)
        sums = emulate([c.exchange(g, step) for c, g in zip(replicas, grads, strict=True)])
        plan = replicas[0].compressors
        assert plan == replicas[1].compressors
        spent += sum(plan[n].sent_bytes(s, 2) for n, s in SHAPES.items())
        assert spent <= budget * (step + 1) + 1e-6
        for n in SHAPES:
            age[n] = 0 if plan[n].name != "skip" else age[n] + 1
            assert age[n] < 2 * MAX_STALENESS
            given[n] += grads[0][n] + grads[1][n]
            got[n] += sums[0][n]
    assert spent > 0.6 * budget * num_steps
    for n in SHAPES:
        left = given[n] - got[n] - sum(r.residuals[n] for r in replicas)
        assert left.norm() < 1e-5 * given[n].norm()


def test_the_programme_finds_the_best_of_all_plans() -> None:
    rng = np.random.default_rng(0)
    error, size = rng.random((4, 3)), rng.integers(1, 60, (4, 3)).astype(float)
    size[:, 0] = 0
    nobody = np.zeros(4, dtype=bool)

    def cost(plan: Any, table: np.ndarray) -> float:
        return float(sum(table[i, c] for i, c in enumerate(plan)))

    fits = [p for p in itertools.product(range(3), repeat=4) if cost(p, size) <= 80]
    best = min(cost(p, error) for p in fits)
    found = least_error(error, size, 80.0, nobody)
    assert cost(found, size) <= 80
    assert cost(found, error) == pytest.approx(best, rel=0.02)
    assert (least_error(error, size, 200.0, ~nobody) > 0).all()


def make_hyper(seed: int = 0) -> Hyper:
    chosen = members("hyper", seed=seed)[0].selector
    assert isinstance(chosen, Hyper)
    return chosen


def facts(step: int, loss: float = 1.0) -> Facts:
    size = np.array([1.0, 30, 1, 1, 1, 1])
    return Facts(step, 4 * size, size, loss)


def test_a_seed_may_have_more_than_64_bits() -> None:
    one, same = (make_hyper(seed).net.parameters["0.weight"] for seed in (7, 2**64 + 7))
    assert (one == same).all()


def test_the_network_learns_the_errors_of_the_options() -> None:
    selector = make_hyper()
    rng, left = np.random.default_rng(0), np.array([1.0, 0.9, 0.8, 0.7, 0.1, 0.01])
    for step in range(3 * LESSONS):
        energy = np.exp(rng.normal(size=6))
        selector.see(np.stack([energy, 4 * energy, energy], axis=1))
        layers = selector.layers_to_measure(step)
        assert len(layers) == (step <= LESSONS or step % 10 == 0)
        selector.errors(layers, energy[layers, None] * left)
    # One layer has all the energy: it is sent by the option that removes most of it per byte, the others are not.
    energy = np.where(np.arange(6) == 3, 1.0, 1e-6)
    selector.see(np.stack([energy, 4 * energy, energy], axis=1))
    shares = selector.answers()[0]
    assert np.abs(shares - left).max() < 0.15
    plan = selector.plan(LESSONS)
    assert plan[3] > 0 and set(plan[np.arange(6) != 3]) <= {0, 1}
    # The same layers one step later, when another one has it: the plan follows at once.
    energy = np.where(np.arange(6) == 1, 1.0, 1e-6)
    selector.see(np.stack([energy, 4 * energy, energy], axis=1))
    assert selector.plan(LESSONS + 1)[1] > 0


def test_weights_move_towards_what_made_the_loss_fall() -> None:
    selector = make_hyper()
    selector.see(np.stack([np.exp([1.0, -1, 1, -1, 1, -1])] * 3, axis=1))
    better = np.array([1.0, -1, 1, -1, 1, -1]) * 0.3
    before = selector.answers()[1]
    for step in range(1, 60):
        selector.noise = better if step % 2 else -better
        selector.observe(facts(step, loss=2.0 - 0.02 * step - 0.5 * (step % 2)))
    moved = selector.answers()[1] - before
    assert float((moved * better).sum()) > 0


def test_a_loss_outside_its_band_sends_everything_once_and_is_paid_for() -> None:
    selector = make_hyper()
    for step in range(LESSONS + 30):
        selector.observe(facts(step, loss=2.0 + 0.01 * (step % 2)))
    carry = selector.carry
    selector.observe(facts(LESSONS + 31, loss=50.0))
    everything = selector.plan(LESSONS + 32)
    assert {selector.options[c].name for c in everything} == {"int8"}
    assert selector.carry < carry and selector.carry < 0
    assert {selector.options[c].name for c in selector.plan(LESSONS + 33)} == {"skip"}


@pytest.mark.parametrize("name", NAMES)
def test_a_selector_goes_on_where_it_was(name: Any) -> None:
    first, second = (members(name)[0].selector for _ in range(2))
    assert first is not None and second is not None
    for step in range(LESSONS + 5):
        first.plan(step)
        first.observe(facts(step, loss=3.0 / (step + 1)))
    second.load_state_dict({k: v.clone() for k, v in first.state_dict().items()})
    for step in range(LESSONS + 5, LESSONS + 40):
        assert (first.plan(step) == second.plan(step)).all()
        first.observe(facts(step, loss=1.0))
        second.observe(facts(step, loss=1.0))


@pytest.mark.parametrize("selector", ["round-robin", "random"])
@pytest.mark.parametrize(("ratio", "head"), [(0.01, 2048), (0.001, 64)])
def test_layers_that_are_too_large_to_go_whole_do_not_stop_the_others(selector: Any, ratio: float, head: int) -> None:
    wanted = TopKSparsifier(ratio)
    shapes = {n: torch.Size((s[0] * 4, s[1] * 4)) for n, s in SHAPES.items()} | {"head": torch.Size((head, 256))}
    options = option_grid(wanted)
    bytes_LC = np.array([[c.sent_bytes(s, 2) for c in options] for s in shapes.values()], dtype=np.float64)
    budget = float(sum(wanted.sent_bytes(s, 2) for s in shapes.values()))
    chooser = make_selector(selector, options, bytes_LC, budget, 0, list(shapes))
    plans = np.array([chooser.plan(step) for step in range(300)])
    sent = bytes_LC[np.arange(len(shapes)), plans].sum(axis=1)
    assert (sent <= 3 * budget).all() and 0.9 * 300 * budget < sent.sum() <= 300 * budget
    assert ((plans > 0).sum(axis=0) > 300 / MAX_STALENESS).all()  # all layers have turns, beside being overdue


def test_budgets_and_settings_that_cannot_work() -> None:
    refused("cannot be met", members, "l-greco", budget=90.0)
    # Enough for all layers in 32 steps, but never for the one large layer: it would not be sent at all.
    shapes = {**SHAPES, "head": torch.Size((4096, 64))}
    compressors: Any = dict.fromkeys(shapes, WANTED)
    given: Any = {"wanted": WANTED, "shapes": shapes, "selector": "l-greco", "rank": 0, "size": 2}
    cheapest = [min(c.sent_bytes(s, 2) for c in option_grid(WANTED)[1:]) for s in shapes.values()]
    message = SelectedCompression(compressors, **given).message_bytes()
    refused(
        "the largest one in a single step", SelectedCompression, compressors, **given,
        budget=message + 1.1 * sum(cheapest) / MAX_STALENESS,
    )  # fmt: skip
    selector = SelectedCompression(compressors, **given, budget=message + max(cheapest) / 3).selector
    assert selector is not None
    plans = np.array([selector.plan(step) for step in range(3 * MAX_STALENESS)])
    assert (plans > 0).any(axis=0).all()
    bad: list[tuple[dict[str, Any], str]] = [
        ({"reducer": "int8", "selector": "hyper"}, "give reducer=topk"),
        ({"reducer": "topk:0.01", "budget_mb": 1.0}, "is for a selector"),
    ]
    for settings, said in bad:
        refused(said, check_reducer, ReducerConfig(**settings), MeshConfig(replica=2))


def test_the_heat_map_shows_the_plans(tmp_path: Any) -> None:
    log = PlanLog(tmp_path)
    log.begin(["a", "b"], ["skip", "int8"])
    for step in range(0, 40, 10):
        log.add(step, [step % 20 // 10, 1])
    (found,) = heat_map(tmp_path)
    assert found.values == [[0.0, 1.0, 0.0, 1.0], [1.0] * 4]
    assert "step 10: int8" in found.html()
    assert heat_map(tmp_path / "nothing") == []


@pytest.mark.parametrize("cut", ["layers", "plan"])
def test_plans_after_a_crash_in_the_middle_of_a_line(tmp_path: Any, cut: str) -> None:
    log, path = PlanLog(tmp_path), tmp_path / "plans.jsonl"
    log.begin(["a", "b"], ["skip", "int8"])
    if cut == "plan":
        log.add(0, [0, 1])
        log.add(10, [1, 1])
    path.write_bytes(path.read_bytes()[:-9])
    assert [found.columns for found in heat_map(tmp_path)] == ([["0"]] if cut == "plan" else [])
    log = PlanLog(tmp_path)
    log.begin(["a", "b"], ["skip", "int8"])
    log.add(10, [0, 1])
    log.add(20, [1, 0])
    (found,) = heat_map(tmp_path)
    assert found.columns == (["0", "10", "20"] if cut == "plan" else ["10", "20"])
    assert [row[-2:] for row in found.values] == [[0.0, 1.0], [1.0, 0.0]]


def test_lines_that_are_no_plans_do_not_keep_a_run_from_its_report(tmp_path: Any) -> None:
    log = PlanLog(tmp_path)
    log.begin(["a", "b"], ["skip", "int8"])
    with (tmp_path / "plans.jsonl").open("a") as file:
        file.write('{"step": 0, "pl{"step": 10, "plan": [1, 1]}\n{"step": 20, "plan": [1, 7]}\n{"plan": [0, 0]}\n[3]\n')
    log.add(30, [0, 1])
    (found,) = heat_map(tmp_path)
    assert found.columns == ["30"]
