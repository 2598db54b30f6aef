"""Pipelines: orders against their bounds, stages of a model, and gradients against one process on four ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks_pipeline import stretch

from shoestring.errors import UserError
from shoestring.mesh import MeshConfig
from shoestring.model import load_model
from shoestring.model.stages import plan_stages
from shoestring.train.pipeline import check_pipeline, stages_of
from shoestring.train.pipeline_order import SCHEDULES, Costs, StagePass, choose, make_order, simulate, warm_up
from tiny import LLAMA

SCRIPT = Path(__file__).parent / "ranks_pipeline.py"
ONE_STAGE = [s for s in SCHEDULES if s != "interleaved"]


@pytest.mark.parametrize(
    "stages, micros, hop, one_by_one, eager",
    [
        (4, 16, 0.25, 65.75, 58.5),
        (4, 16, 0.5, 74.5, 60),
        (4, 16, 1.0, 92, 63),
        (8, 32, 0.5, 154.5, 124),
        (8, 32, 1.0, 192, 131),
    ],
)
def test_simulated_steps_are_those_worked_out_by_hand(
    stages: int, micros: int, hop: float, one_by_one: float, eager: float
) -> None:
    costs = Costs(1, 2, hop)
    assert simulate(make_order("1f1b", stages, micros), costs, blocking=True).makespan == one_by_one
    assert simulate(make_order("eager1f1b", stages, micros), costs).makespan == eager
    # Sends that hold nobody are between the two.
    assert eager < simulate(make_order("1f1b", stages, micros), costs).makespan < one_by_one


@given(st.sampled_from(SCHEDULES), st.integers(2, 6), st.integers(1, 4), st.floats(0, 3))
@settings(max_examples=60, deadline=None)
def test_every_order_does_all_work_once_and_ends(schedule: str, stages: int, rounds: int, hop: float) -> None:
    micros, chunks = rounds * stages, 2 if schedule == "interleaved" else 1
    order = make_order(schedule, stages * chunks, micros, chunks=chunks)
    kinds = "FIW" if schedule == "zero-bubble" else "FB"
    assert sorted(t for tasks in order for t in tasks) == sorted(
        StagePass(s, k, m) for s in range(stages * chunks) for k in kinds for m in range(micros)
    )
    timeline = simulate(order, Costs(1, 2, hop))
    assert timeline.makespan >= micros * chunks * 3  # no rank is faster than its work
    assert 0 <= timeline.bubble < 1
    if schedule in ("gpipe", "1f1b", "eager1f1b"):
        assert timeline.live == [warm_up(schedule, stages, micros, i) for i in range(stages)]


def test_auto_takes_the_faster_order_where_it_fits() -> None:
    for hop in (0.02, 0.1, 0.3, 1.0):
        name, why = choose(1.0, hop, lambda live: True, 4, 16)
        times = {s: simulate(make_order(s, 4, 16), Costs(1, 2, hop)).makespan for s in ("1f1b", "eager1f1b")}
        assert times[name] <= 1.06 * min(times.values()), (hop, times)
        assert "hop" in why
    seen: list[int] = []
    assert choose(1.0, 0.5, lambda live: bool(seen.append(live)), 4, 16)[0] == "1f1b"
    assert seen == [7]


def test_stages_share_layers_evenly_and_refuse_what_does_not_add_up() -> None:
    spec = LLAMA
    for num in range(1, spec.num_layers + 1):
        layers = plan_stages(spec, num).layers
        assert sum(layers) == spec.num_layers and min(layers) >= 1
    bad = {
        (spec.num_layers + 1, None): "more than the model's",
        (2, "1"): "for 1 stages",
        (2, "1,x"): "layers of each stage",
        (2, f"{spec.num_layers},1"): "adds up to",
        (2, f"0,{spec.num_layers}"): "layers of each stage",
    }
    for (num, layers), words in bad.items():
        with pytest.raises(UserError, match=words):
            plan_stages(spec, num, layers)


def test_settings_that_cannot_work_are_refused_before_work() -> None:
    good: dict[str, Any] = {"whole_graph": None, "rows": 8, "micro": 1}
    check_pipeline(MeshConfig(pp=4), "eager1f1b", **good)
    bad: list[tuple[MeshConfig, str, dict[str, Any], str]] = [
        (MeshConfig(), "1f1b", good, "mesh.pp is 1"),
        (MeshConfig(layers="1,1"), "auto", good, "mesh.pp is 1"),
        (MeshConfig(pp=2), "auto", good | {"whole_graph": "graph=true"}, "graph=true"),
        (MeshConfig(pp=4), "auto", good | {"micro": 4}, "micro-batches a step"),
        (MeshConfig(pp=2), "auto", good | {"micro": 3}, "no multiple of 3"),
        (MeshConfig(pp=2, dp=2), "zero-bubble", good, "FSDP2"),
        (MeshConfig(pp=3), "interleaved", good, "multiples of mesh.pp=3"),
    ]
    for mesh, schedule, given_, words in bad:
        with pytest.raises(UserError, match=words):
            check_pipeline(mesh, schedule, **given_)
    assert stages_of(LLAMA, MeshConfig(), "auto") is None


def found(out: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("FOUND ")) for line in out.splitlines() if line.startswith("FOUND ")]


@pytest.mark.ranks
@pytest.mark.slow
def test_gradients_equal_one_process(run_ranks: Callable[..., str]) -> None:
    cases = [
        {"mesh": {"pp": 4}, "schedules": ["eager1f1b", "zero-bubble"], "tied": True},
        {"mesh": {"pp": 4, "layers": "1,1,2,1"}, "schedules": ["gpipe", "auto"]},
        {"mesh": {"pp": 2, "dp": 2}, "schedules": ["1f1b"], "tied": True, "recompute": True},
        {"mesh": {"pp": 2, "tp": 2}, "schedules": ["eager1f1b", "interleaved"], "format": "int4:g8"},
        {"mesh": {"pp": 2, "replica": 2}, "schedules": ["interleaved"], "tied": True},
    ]
    results = found(run_ranks(4, SCRIPT, json.dumps(cases)))
    assert len(results) == sum(len(case["schedules"]) for case in cases)
    for result in results:
        # A replica has its own share until the reducer sums: its gradients are compared in the trainer's test.
        bound = 1e-5 if "replica" not in result["case"]["mesh"] else float("inf")
        assert result["missing"] == [], result
        assert result["gradient"] < bound and result["norm"] < bound, result
        assert result["loss"] < 1e-5 and result["evaluated"] < 1e-5, result
        if result["case"]["mesh"] == {"pp": 4, "layers": "1,1,2,1"}:
            assert result["gradient"] == 0.0  # nothing is added in another order


@pytest.mark.ranks
@pytest.mark.slow
def test_a_run_goes_on_with_other_numbers_of_stages(run_ranks: Callable[..., str], tmp_path: Path) -> None:
    meshes = [{"pp": 4}, {"pp": 2, "dp": 2}, {"pp": 2, "tp": 2}, {"replica": 2, "pp": 2}]
    cases = [{"mesh": mesh, "steps": i + 1} for i, mesh in enumerate(meshes)]
    out = run_ranks(4, SCRIPT, json.dumps(cases), str(tmp_path / "cut"))
    assert len(found(out)) == len(cases)
    last = {"mesh": {}, "steps": 6}
    resumed = stretch(last, tmp_path / "cut")
    whole = stretch(last, tmp_path / "whole")
    assert len(resumed) == 12 and resumed == pytest.approx(whole, rel=2e-5)
    # Saved from two stages or from one process, the last model is the same.
    logits = [load_model(tmp_path / name / "model").model(torch.arange(16)[None]) for name in ("cut", "whole")]
    assert torch.allclose(*logits, atol=1e-4)


def test_a_stage_alone_names_its_parameters_as_the_whole_model_does() -> None:
    from shoestring.model import Decoder
    from shoestring.model.stages import cut_stages_

    stages = plan_stages(LLAMA, 2)
    with torch.device("meta"):
        whole = set(dict(Decoder(LLAMA).named_parameters()))
        parts = [Decoder(LLAMA) for _ in range(2)]
    for i, part in enumerate(parts):
        cut_stages_(part, stages, [i])
    names = [set(dict(part.named_parameters())) for part in parts]
    assert names[0] | names[1] == whole
    assert names[0] & names[1] == ({"embed.weight"} if LLAMA.tied else set())
