"""The table of measured products on a CPU, with fake products and a fake clock: what is kept, believed and said."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shoestring.formats import convert
from shoestring.hardware.plan_table import parse_plans
from shoestring.mesh import Mesh
from shoestring.methods.sparse24 import tune
from shoestring.methods.sparse24.format import Sparse24
from shoestring.methods.sparse24.kernels import cusparselt, cusparselt_table
from shoestring.methods.sparse24.kernels.cusparselt_table import LEAST_MS, WORTH, Measured
from shoestring.methods.sparse24.tune import advice, product_line, tune_products
from shoestring.model import Decoder, ModelSpec

BF16 = torch.bfloat16
NUM_ALGORITHMS = 6


def found(m: int = 64, algorithm: int = 5, sparse_ms: float = 1.0, dense_ms: float = 2.0) -> Measured:
    return Measured(m, 64, 8, str(BF16), (algorithm,) * 4, sparse_ms, dense_ms)


class Gpu:
    """Algorithms that take `ms` each, `cold_ms` at the first look; those of `wrong` compute something else."""

    def __init__(self, ms: list[float], dense_ms: float = 2.0) -> None:
        self.ms, self.cold_ms, self.dense_ms = ms, list(ms), dense_ms
        self.wrong: set[int] = set()
        self.took, self.warm = 0.0, False

    def take(self, result: Tensor, algorithm: int) -> Tensor:
        if algorithm >= len(self.ms):
            raise RuntimeError("no such algorithm")
        self.took = (self.ms if self.warm else self.cold_ms)[algorithm]
        return result + 1.0 if algorithm in self.wrong else result

    def dense(self) -> Tensor:
        self.took = self.dense_ms
        return torch.zeros(())

    def in_turns(self, calls: Sequence[Callable[[], Tensor]], turns: int) -> list[float]:
        self.warm, times = turns == cusparselt_table.TURNS, []
        for call in calls:
            call()
            times.append(self.took)
        return times


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu([1.0] * NUM_ALGORITHMS)
    monkeypatch.setattr(cusparselt_table, "_in_turns", gpu.in_turns)
    return gpu


@pytest.fixture(autouse=True)
def own_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SHOESTRING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU A/1")
    cusparselt_table.TABLE.forget()
    yield
    cusparselt_table.TABLE.forget()


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """The shapes that were measured, each by a fake that finds algorithm 5 twice as fast as dense."""
    shapes: list[tuple[int, int, int]] = []

    def measure(m: int, k: int, n: int, dtype: torch.dtype) -> Measured:
        shapes.append((m, k, n))
        return Measured(m, k, n, str(dtype), (5, 5, 5, 5), 1.0, 2.0)

    monkeypatch.setattr(cusparselt_table, "measure", measure)
    return shapes


def next_process() -> None:
    cusparselt_table.TABLE.forget()


# -- the best algorithm ------------------------------------------------------------------------------


def best(gpu: Gpu, transpose: bool = False) -> cusparselt_table.Timed:
    want = torch.arange(12.0).view(3, 4)
    whole = torch.cat([want, torch.full((2, 4), 7.0)])  # `want` is the first rows only

    def sparse(algorithm: int, transpose: bool) -> Tensor:
        return gpu.take(whole.t() if transpose else whole, algorithm)

    return cusparselt_table.best_algorithm(sparse, want, gpu.dense, transpose)


@pytest.mark.parametrize("transpose", [False, True])
def test_the_fastest_algorithm_that_is_right_wins(gpu: Gpu, transpose: bool) -> None:
    gpu.ms[:] = gpu.cold_ms[:] = [5.0, 1.0, 3.0, 2.0, 9.0, 9.0]
    assert best(gpu, transpose) == (1.0, 1, 2.0)
    gpu.wrong = {1, 3}
    assert best(gpu, transpose) == (3.0, 2, 2.0)


def test_a_result_that_is_not_a_number_is_wrong(gpu: Gpu) -> None:
    gpu.ms[0] = gpu.cold_ms[0] = 0.1
    whole = torch.ones(3, 4)

    def sparse(algorithm: int, transpose: bool) -> Tensor:
        return gpu.take(whole * float("nan") if algorithm == 0 else whole, algorithm)

    assert cusparselt_table.best_algorithm(sparse, whole, gpu.dense, False).algorithm == 1


def test_where_every_algorithm_is_wrong_the_product_stays_dense(gpu: Gpu) -> None:
    gpu.wrong = set(range(NUM_ALGORITHMS))
    timed = best(gpu)
    kept = cusparselt_table.measured(64, 64, 8, BF16, (0, 0, 0, 0), [timed] * 4)
    assert timed.ms == float("inf") and not kept.worth_it
    assert parse_plans(cusparselt_table.table_text([kept]), Measured) == ({kept.key: kept}, [])


def test_the_three_best_at_first_sight_are_timed_again_on_a_warm_gpu(gpu: Gpu) -> None:
    gpu.cold_ms[:] = [1.0, 1.1, 1.2, 1.3, 9.0, 9.0]
    gpu.ms[:] = [2.0, 1.5, 1.9, 0.1, 0.1, 0.1]
    assert best(gpu) == (1.5, 1, 2.0)


def test_algorithms_are_kept_in_the_order_in_which_products_look_for_them(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B by columns, by rows, then the same with a transposed result: `product` takes the fastest of each."""
    fastest = {(True, False): 1, (False, False): 2, (True, True): 3, (False, True): 4}
    dense: list[Tensor] = []

    def library(packed: Tensor, b_KN: Tensor, *, alg_id: int, transpose_result: bool) -> Tensor:
        wins = alg_id == fastest[b_KN.stride(0) == 1, transpose_result]
        gpu.ms[:] = gpu.cold_ms[:] = [0.5 if wins else 1.0] * NUM_ALGORITHMS
        result = dense[0] @ b_KN
        return gpu.take(result.t() if transpose_result else result, alg_id)

    def pack(a_MK: Tensor) -> Tensor:
        groups = (a_MK.view(a_MK.shape[0], -1, 4) != 0).sum(-1)
        assert int(groups.max()) == 2
        dense.append(a_MK)
        return a_MK

    monkeypatch.setattr(cusparselt, "pack", pack)
    monkeypatch.setattr(torch, "_cslt_sparse_mm", library)
    assert cusparselt_table.measure(64, 128, 8, torch.float32, device="cpu").algorithms == (1, 2, 3, 4)


# -- which products are worth it ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sparse_ms", "dense_ms", "worth_it"),
    [
        (1.0, WORTH + 0.001, True),
        (1.0, WORTH, False),  # a gain of 5% goes into packing
        (1.0, 0.5, False),
        (LEAST_MS, 2.0, True),
        (LEAST_MS - 0.001, 2.0, False),  # however much faster: the host is not
    ],
)
def test_a_product_must_gain_five_percent_and_last(sparse_ms: float, dense_ms: float, worth_it: bool) -> None:
    assert (WORTH, LEAST_MS) == (1.05, 0.4)  # what the docs say
    one = found(sparse_ms=sparse_ms, dense_ms=dense_ms)
    assert one.worth_it == worth_it
    cusparselt_table.adopt([one])
    assert cusparselt_table.chosen_algorithms(64, 64, 8, BF16) == ((5, 5, 5, 5) if worth_it else None)


def test_times_are_those_of_the_four_products() -> None:
    timed = [cusparselt_table.Timed(ms, 0, dense) for ms, dense in ((1.0, 3.0), (2.0, 4.0), (3.0, 4.0), (4.0, 90.0))]
    kept = cusparselt_table.measured(64, 64, 8, BF16, (1, 2, 3, 4), timed)
    assert (kept.sparse_ms, kept.dense_ms, kept.gain) == (2.5, 4.0, 1.6)


# -- the table ---------------------------------------------------------------------------------------


def test_a_shape_is_measured_once_for_all_processes(
    measurements: list[tuple[int, int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cusparselt_table.chosen_algorithms(64, 64, 8, BF16) is None  # nobody has tuned it
    first = cusparselt_table.tune(64, 64, 8, BF16)
    assert cusparselt_table.tune(64, 64, 8, BF16) == first and measurements == [(64, 64, 8)]
    (file,) = (tmp_path / "cache").iterdir()
    assert file == cusparselt_table.table_file() and file.name.startswith("cusparselt-GPU_A_1-torch")
    next_process()
    assert cusparselt_table.chosen_algorithms(64, 64, 8, BF16) == (5, 5, 5, 5)
    assert (
        cusparselt_table.chosen_algorithms(64, 64, 8, torch.float16) is None
        and cusparselt_table.chosen_algorithms(64, 64, 16, BF16) is None
    )
    assert cusparselt_table.tune(64, 64, 8, BF16) == first and len(measurements) == 1
    cusparselt_table.tune(128, 64, 8, BF16)
    next_process()
    assert cusparselt_table.chosen_algorithms(64, 64, 8, BF16) and cusparselt_table.chosen_algorithms(
        128, 64, 8, BF16
    )  # the second did not replace the first
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU B")
    next_process()
    assert cusparselt_table.chosen_algorithms(64, 64, 8, BF16) is None


def test_a_shape_that_the_library_does_not_take_is_not_measured(measurements: list[tuple[int, int, int]]) -> None:
    for shape in ((60, 64, 8), (64, 60, 8), (64, 64, 4)):
        assert cusparselt_table.tune(*shape, BF16) is None
    assert cusparselt_table.tune(64, 64, 16, torch.float8_e4m3fn) is None  # eight bits want k by 128
    assert not measurements


@pytest.mark.parametrize(
    "text", ["", '{"64x64x8 bfloat16": 5}', json.dumps([{"m": 64, "k": 64, "n": 8, "algorithm": 5}])]
)
def test_a_damaged_or_older_table_is_ignored_with_a_line_and_replaced(
    text: str, measurements: list[tuple[int, int, int]]
) -> None:
    file = cusparselt_table.table_file()
    file.parent.mkdir()
    file.write_text(text)
    with pytest.warns(UserWarning) as said:
        assert cusparselt_table.chosen_algorithms(64, 64, 8, BF16) is None
    (line,) = (str(warning.message) for warning in said)  # tests/hardware/test_plan_table.py has every kind of damage
    assert line.startswith(f"{file}: measured plans are ignored: ")
    with pytest.warns(UserWarning, match="ignored"):
        cusparselt_table.tune(64, 64, 8, BF16)
    assert measurements == [(64, 64, 8)]
    next_process()
    assert cusparselt_table.chosen_algorithms(64, 64, 8, BF16) == (5, 5, 5, 5)


# -- the products of a model -------------------------------------------------------------------------


def model_with(format: Sparse24) -> Decoder:
    model = Decoder(
        ModelSpec(
            vocab_size=32, d_model=64, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=32, d_ff=128,
            max_positions=16,
        )
    )  # fmt: skip
    convert(model, [("*.mlp.*", format)])
    return model


@pytest.fixture
def sparse_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "has_sparse_products", lambda: True)


def test_without_sparse_tensor_cores_nothing_is_measured_or_said(
    measurements: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "has_sparse_products", lambda: False)
    lines: list[str] = []
    assert tune_products(model_with(Sparse24("soft", weight_grad="mvue")), 64, BF16, lines.append) == []
    assert not measurements and not lines


@pytest.mark.usefixtures("sparse_products")
def test_every_product_of_a_model_is_measured_and_said_once(measurements: list[tuple[int, int, int]]) -> None:
    lines: list[str] = []
    got = tune_products(model_with(Sparse24("soft")), 128, BF16, lines.append)
    assert measurements == [(256, 64, 128), (64, 128, 128)]  # gate and up as one, down; of both blocks
    assert [(m.m, m.k, m.n) for m in got] == measurements
    assert lines == [
        "2:4 product 256x64 by 128: 1.000 ms, dense 2.000 ms: 2.00x, algorithms (5, 5, 5, 5)",
        "2:4 product 64x128 by 128: 1.000 ms, dense 2.000 ms: 2.00x, algorithms (5, 5, 5, 5)",
    ]


def test_a_product_that_gains_nothing_is_said_to_stay_dense() -> None:
    assert product_line(found(dense_ms=1.01)).endswith("1.000 ms, dense 1.010 ms: stays dense")


def test_exact_gradients_are_advised_where_no_drawn_product_gains() -> None:
    slow, fast = found(sparse_ms=0.1), found(m=128)
    (line,) = advice([slow, fast], [(64, 64, 8)])  # what gains is another product
    assert "weight_grad=exact" in line and "\n" not in line
    assert advice([slow], [None]) == [line]  # the library does not take it: dense, too
    assert advice([slow, fast], [(64, 64, 8), (128, 64, 8)]) == []  # one does gain
    assert advice([slow], []) == []  # nothing is drawn


@pytest.mark.usefixtures("sparse_products")
@pytest.mark.parametrize(
    ("weight_grad", "gaining", "advised"), [("mvue", "all", False), ("mvue", "forward", True), ("exact", "none", False)]
)
def test_the_advice_is_for_models_that_draw(
    weight_grad: str, gaining: str, advised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(m: int, k: int, n: int, dtype: torch.dtype) -> Measured:
        gains = gaining == "all" or (gaining == "forward" and n == 192)  # the tokens
        return Measured(m, k, n, str(dtype), (5, 5, 5, 5), 1.0, 2.0 if gains else 1.0)

    monkeypatch.setattr(cusparselt_table, "measure", measure)
    lines: list[str] = []
    tune_products(model_with(Sparse24("soft", weight_grad=weight_grad)), 192, BF16, lines.append)
    assert any("weight_grad=exact" in line for line in lines) == advised


@pytest.mark.usefixtures("sparse_products")
def test_all_ranks_take_the_choices_of_the_first(
    measurements: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broadcast(mesh: Mesh, obj: object) -> list[Measured]:
        assert obj == []
        return [Measured(256, 64, 128, str(BF16), (9, 9, 9, 9), 1.0, 2.0)]

    monkeypatch.setattr(Mesh, "broadcast_object", broadcast)
    second = Mesh(rank=1, world_size=2, device=torch.device("cpu"), dp=2)
    tune_products(model_with(Sparse24("soft")), 128, BF16, lambda line: None, mesh=second)
    assert not measurements and cusparselt_table.chosen_algorithms(256, 64, 128, BF16) == (9, 9, 9, 9)
