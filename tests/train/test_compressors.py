"""The laws of every compressor, with four replicas in one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from refusals import refused
from shoestring.train.reducers.compressed import choose, trained_parameters
from shoestring.train.reducers.compressor import At, Compressor
from shoestring.train.reducers.demo import chunk_size, dct, from_chunks, from_frequencies, to_chunks, to_frequencies
from shoestring.train.reducers.feedback import Compression
from shoestring.train.reducers.header import FINE, exchange_headers
from shoestring.train.reducers.methods import FIXED, for_tensor, parse_compressor
from shoestring.train.reducers.quantizers import INT8, PLAIN
from shoestring.train.reducers.rounds import ToAll, ToOwners, emulate
from shoestring.train.rollback import BadStepError

METHODS = (*FIXED, "topk:0.05", "topk:1", "arc-topk:0.05", "powersgd:2", "demo")
SHAPES = {"matrix": (96, 130), "vector": (7,), "odd": (33, 65), "one": (1,), "long": (70_001,)}
REPLICAS = 4


def gradients(step: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(step)
    return [{n: torch.randn(s, generator=g) for n, s in shapes.items()} for _ in range(REPLICAS)]


def replicas(method: Compressor, shapes: dict[str, tuple[int, ...]] = SHAPES, seed: int = 0) -> list[Compression]:
    return [Compression(dict.fromkeys(shapes, method), rank=r, size=REPLICAS, seed=seed) for r in range(REPLICAS)]


def step_all(replicas: list[Compression], grads: list[dict[str, Tensor]], step: int) -> list[dict[str, Tensor]]:
    return emulate([r.exchange(g, step) for r, g in zip(replicas, grads, strict=True)])


@pytest.mark.parametrize("name", METHODS)
def test_replicas_agree_bit_for_bit_and_nothing_is_lost(name: str) -> None:
    method = parse_compressor(name)
    first, second = replicas(method), replicas(method)
    given = {n: torch.zeros(s, dtype=torch.float64) for n, s in SHAPES.items()}
    got = {n: torch.zeros(s, dtype=torch.float64) for n, s in SHAPES.items()}
    for step in range(3):
        grads = gradients(step)
        sums = step_all(first, grads, step)
        again = step_all(second, grads, step)
        for n in SHAPES:
            assert all(torch.equal(sums[0][n], s[n]) for s in sums + again), n
            given[n] += sum(g[n].double() for g in grads)
            got[n] += sums[0][n].double()
    if name == "demo":  # its sums are signs
        assert all(set(s.unique().tolist()) <= {-1.0, 0.0, 1.0} for s in sums[0].values())
        return
    for n in SHAPES:
        kept = sum((r.residuals[n].double() for r in first if n in r.residuals), torch.zeros(()))
        away = float((given[n] - got[n] - kept).norm() / given[n].norm())
        exact = {"plain": 1e-6, "bf16": 0.01, "qsgd": 10.0, "terngrad": 10.0}.get(name, 1e-6)
        assert away < exact, (n, away)
        assert method.feedback == bool(first[0].residuals)


@pytest.mark.parametrize("name", METHODS)
def test_bytes_are_those_that_are_announced(name: str) -> None:
    method = parse_compressor(name)
    for shape in (*SHAPES.values(), (256, 512)):
        exchange = method.exchange(torch.ones(shape), At(1, REPLICAS, "x"))
        sent, answer = 0, None
        try:
            while True:
                asked = exchange.send(answer)  # type: ignore[arg-type]
                rows = asked.payload if isinstance(asked, ToOwners) else asked.payload[None].expand(REPLICAS, -1)
                assert isinstance(asked, ToOwners | ToAll) and asked.payload.dtype == torch.uint8
                sent += (REPLICAS - 1) * rows.shape[1]
                answer = rows.contiguous()
        except StopIteration:
            pass
        assert sent == method.sent_bytes(torch.Size(shape), REPLICAS), shape


@pytest.mark.parametrize("name", ["int8", "int4", "topk:0.05", "arc-topk:0.05", "powersgd:2", "demo"])
def test_what_is_left_over_is_smaller_than_what_was_given(name: str) -> None:
    method = parse_compressor(name)
    x = torch.randn(128, 256, generator=torch.Generator().manual_seed(3))
    left = [(x - method.decoded(x, At(0, REPLICAS, "x", seed=s))).square().sum() / x.square().sum() for s in range(8)]
    ratio = getattr(method, "ratio", 0.0)
    assert torch.stack(left).mean() < (1 - ratio if ratio else 1.0)
    zero = torch.zeros(64, 64)
    assert torch.equal(method.decoded(zero, At(0, REPLICAS, "x")), zero)


@pytest.mark.parametrize("name", ["qsgd", "terngrad"])
def test_random_rounding_is_unbiased_over_the_whole_exchange(name: str) -> None:
    """Of values below TernGrad's clip, which is biased by design."""
    shapes = {"x": (2048,)}
    grads = [{"x": g["x"].clamp(-1.5, 1.5)} for g in gradients(0, shapes)]
    members = replicas(parse_compressor(name), shapes)
    many = torch.stack([step_all(members, grads, step)[0]["x"] for step in range(150)])
    away = (many.mean(0) - sum(g["x"] for g in grads)) / (many.std(0) / 150**0.5)
    assert away.abs().mean() < 1.0  # 0.8 of a normal variable
    assert away.mean().abs() < 0.1
    other = replicas(parse_compressor(name), shapes, seed=1)
    assert not torch.equal(step_all(other, grads, 0)[0]["x"], many[0])


def test_low_rank_matrices_are_exact_and_the_estimate_improves() -> None:
    g = torch.Generator().manual_seed(0)
    shapes = {"x": (64, 96)}
    low = [{"x": torch.randn(64, 2, generator=g) @ torch.ones(2, 96)} for _ in range(REPLICAS)]
    total = sum(m["x"] for m in low)
    members = replicas(parse_compressor("powersgd:2"), shapes)
    assert (step_all(members, low, 0)[0]["x"] - total).norm() < 4e-3 * total.norm()  # as exact as bf16

    def left(num_steps: int) -> float:
        full = torch.randn(64, 96, generator=torch.Generator().manual_seed(1)) @ torch.diag(torch.logspace(0, -3, 96))
        fresh = replicas(parse_compressor("powersgd:4"), shapes)
        for step in range(num_steps):
            for r in fresh:
                r.residuals.clear()
            out = step_all(fresh, [{"x": full}] * REPLICAS, step)[0]["x"]
        return float((out - REPLICAS * full).norm())

    assert left(6) < 0.95 * left(1)


def test_dct_is_orthonormal_and_goes_back() -> None:
    assert torch.allclose(dct(64, torch.device("cpu")) @ dct(64, torch.device("cpu")).T, torch.eye(64), atol=1e-5)
    for shape in ((128, 192), (100, 7), (64,), (13,)):
        x = torch.randn(shape)
        back = from_frequencies(to_frequencies(to_chunks(x)), *chunk_size(x.shape))
        assert torch.allclose(from_chunks(back, x.shape), x, atol=1e-5)


def test_one_dim_stays_exact_and_embeddings_get_int8() -> None:
    matrix, vector = torch.zeros(8, 8), torch.zeros(8)
    wanted = parse_compressor("topk")
    assert for_tensor(wanted, matrix, embedding=False) == wanted
    assert for_tensor(wanted, vector, embedding=False) == PLAIN
    assert for_tensor(wanted, matrix, embedding=True) == INT8
    for name in ("bf16", "plain", "int8"):
        assert for_tensor(FIXED[name], matrix, embedding=True) == FIXED[name]


@pytest.mark.parametrize("name", ["topk", "arc-topk", "powersgd", "demo", "int8"])
def test_a_rank_without_rows_of_a_matrix_takes_part(name: str) -> None:
    model = torch.nn.ModuleDict({"whole": torch.nn.Linear(8, 8), "none": torch.nn.Linear(8, 8)})
    model["none"].weight = torch.nn.Parameter(torch.zeros(0, 8))  # this rank's share over dp
    wanted, params = parse_compressor(name), trained_parameters(model)
    given = {n: torch.randn(p.shape) for n, p in params.items()}
    two = [Compression(choose(wanted, model, params), rank=r, size=2) for r in range(2)]
    assert two[0].sent_bytes({n: p.shape for n, p in params.items()}) > 0
    totals, others = emulate([one.exchange(given, 0) for one in two])
    assert totals["none.weight"].shape == (0, 8) and torch.equal(totals["whole.weight"], others["whole.weight"])


def test_a_bad_gradient_is_a_step_to_go_back_from() -> None:
    common = {"what": 1, "step": 6, "weights": 0, "names": ["a", "b"], "num_places": 1, "device": torch.device("cpu")}
    with pytest.raises(BadStepError, match="step 7: the gradient of b on rank 1 is NaN") as caught:
        emulate([exchange_headers(bad=bad, **common) for bad in (FINE, 1)])
    assert caught.value.step == 7


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("topk:0", "above 0"), ("topk:2", "at most 1"), ("topk:nan", "is not a share"), ("topk:x", "is not a share"),
        ("top", "Did you mean 'topk'"), ("int8:4", "takes no number"), ("powersgd:1.5", "whole number"),
        ("powersgd:-1", "whole number"), ("", "allowed are"),
    ],
)  # fmt: skip
def test_bad_names_say_what_is_possible(text: str, said: str) -> None:
    refused(said, parse_compressor, text)


def test_defaults_of_names() -> None:
    parse: Callable[[str], Compressor] = parse_compressor
    assert [parse(n).name for n in ("topk", "arc-topk", "powersgd", "demo")] == [
        "topk:0.01", "arc-topk:0.01", "powersgd:4", "demo",
    ]  # fmt: skip
