"""Choosing a reducer: the performance model, settings that cannot work, and what one process says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from refusals import refused
from shoestring.mesh import MeshConfig, open_mesh
from shoestring.train.reducers.auto import CLOSE, estimate, fastest, num_rounds, work_seconds
from shoestring.train.reducers.build import ReducerConfig, build_optimizer, build_reducer, check_reducer
from shoestring.train.reducers.methods import parse_compressor
from shoestring.train.reducers.network import LinkSpeed
from shoestring.train.reducers.plain import SumReducer
from shoestring.train.reducers.rounds import Link

SHAPES = {"a": torch.Size([1000, 1000]), "b": torch.Size([1000])}
WORK_S = {"plain": 0.0, "bf16": 0.002, "int8": 0.01, "int4": 0.012}


@pytest.mark.parametrize(("mbit", "wanted"), [(10, "int4"), (100, "int4"), (5_000, "bf16"), (100_000, "plain")])
def test_the_model_takes_few_bytes_on_slow_links_and_none_of_the_work_on_fast_ones(mbit: float, wanted: str) -> None:
    speed = LinkSpeed(latency_s=1e-4, bytes_per_s=mbit * 1e6 / 8)
    found = [estimate(c, dict.fromkeys(SHAPES, c), SHAPES, 4, speed, WORK_S[c.name]) for c in CLOSE]
    assert fastest(found).compressor.name == wanted


def test_latency_counts_by_round() -> None:
    far = LinkSpeed(latency_s=0.5, bytes_per_s=1e12)
    found = {
        name: estimate(c, dict.fromkeys(SHAPES, c), SHAPES, 4, far, 0.0).seconds
        for name in ("int8", "powersgd:4")
        for c in [parse_compressor(name)]
    }
    assert found["powersgd:4"] - found["int8"] == pytest.approx(1.0, rel=1e-3)
    assert num_rounds(parse_compressor("topk")) == 3


def test_work_is_timed_on_the_real_shapes() -> None:
    c = parse_compressor("int8")
    assert 0 < work_seconds(dict.fromkeys(SHAPES, c), SHAPES, 4, torch.device("cpu")) < 60


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"reducer": "int8"}, "mesh.replica is 1: start several processes"),
        ({"reducer": "auto"}, "mesh.replica is 1: start several processes"),
        ({"reducer": "in8"}, "Did you mean 'int8'"),
        ({"reducer": "int8", "allow": "lossy"}, "allow=lossy is for reducer=auto"),
        ({"overlap": True}, "overlap=true is for compressed sums"),
        ({"reducer": "topk:0.1", "selector": "hyper", "overlap": True}, "plans all layers of a step at once"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], said: str) -> None:
    refused(said, check_reducer, ReducerConfig(**settings), MeshConfig())


def test_plain_is_for_one_process_too() -> None:
    model = torch.nn.Linear(4, 4)
    check_reducer(ReducerConfig(), MeshConfig())
    assert isinstance(
        build_reducer(ReducerConfig(), model, open_mesh(MeshConfig(), "cpu"), clip=1.0, seed=0), SumReducer
    )
    assert isinstance(build_optimizer(ReducerConfig(), model, lr=1e-3, weight_decay=0.1), torch.optim.AdamW)
    assert isinstance(build_optimizer(ReducerConfig("demo"), model, lr=1e-3, weight_decay=0.1), torch.optim.SGD)


def test_a_link_of_one_process_returns_what_it_got() -> None:
    x = torch.randn(5, 7)
    from shoestring.train.reducers.compressor import At

    summed = Link(None).run(parse_compressor("plain").exchange(x, At(0, 1, "x")))
    assert torch.equal(summed.total, x) and not summed.error.any()


def test_net_on_one_process_is_one_line(command: Callable[..., str]) -> None:
    assert "torchrun --nproc-per-node N" in command("net", fails=True)
