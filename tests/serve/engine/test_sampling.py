from __future__ import annotations

import math
import random

import pytest
import torch

from shoestring.errors import UserError
from shoestring.kernels.sampling import noise
from shoestring.kernels.sampling.sample_tokens import sample_tokens_
from shoestring.serve.engine.sampling import RowSettings, Sampling, keep_likely, parameters, sample

BITS = 2**64 - 1


def splitmix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & BITS
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & BITS
    return x ^ (x >> 31)


def by_definition(logits: list[float], s: Sampling, position: int) -> int:
    """What one row draws, in plain Python: nothing here is shared with what is tested."""
    if s.temperature == 0:
        return logits.index(max(logits))
    assert s.seed is not None
    scaled = [(x - max(logits)) / s.temperature for x in logits]
    kept = sorted(range(len(scaled)), key=lambda i: -scaled[i])
    if s.top_k:
        last = scaled[kept[: s.top_k][-1]]
        kept = [i for i in kept if scaled[i] >= last]
    total, above, floor = sum(math.exp(scaled[i]) for i in kept), 0.0, -math.inf
    for i in kept:
        if above >= s.top_p * total:
            break
        above, floor = above + math.exp(scaled[i]), scaled[i]
    kept = [i for i in kept if scaled[i] >= floor and math.exp(scaled[i]) >= s.min_p]
    golden = 0x9E3779B97F4A7C15
    state = splitmix(splitmix(s.seed + golden & BITS) ^ (position * 0xBF58476D1CE4E5B9 & BITS))

    def value(i: int) -> float:
        uniform = ((splitmix(state + (i + 1) * golden & BITS) >> 12) + 0.5) * 2.0**-52
        return scaled[i] - math.log(-math.log(uniform))

    return max(sorted(kept), key=value)


@pytest.mark.parametrize("least_vocab", [1, 10**9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sampling_is_what_its_definition_says(
    dtype: torch.dtype, least_vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways of a CPU: row by row, and all rows by a sort."""
    monkeypatch.setattr("shoestring.kernels.sampling.sample_tokens.LEAST_VOCAB", least_vocab)
    logits = torch.randn(80, 200, generator=torch.Generator().manual_seed(0)) * 3
    logits[:, 50:60] = logits[:, :1]  # ties
    logits = logits.to(dtype)
    rng = random.Random(0)
    samplings = [
        Sampling(
            temperature=rng.choice([0.0, 0.5, 1.3]),
            top_k=rng.choice([0, 1, 7, 200, 500]),
            top_p=rng.choice([1.0, 0.9, 0.3]),
            min_p=rng.choice([0.0, 0.05]),
            seed=rng.choice([2**63 + 5, 17, -3]),
        )
        for _ in range(80)
    ]
    positions = [rng.randrange(10000) for _ in range(80)]
    rows = zip(logits.double().tolist(), samplings, positions, strict=True)
    want = [by_definition(*row) for row in rows]
    assert sample(logits, samplings, positions).tolist() == want
    assert len({*want}) > 20


def draws(logits_V: torch.Tensor, sampling: Sampling, num: int) -> torch.Tensor:
    """Counts per token over positions 0..num-1."""
    tokens = sample(logits_V.expand(num, -1), [sampling] * num, range(num))
    return torch.bincount(tokens, minlength=len(logits_V))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_greedy_is_argmax(dtype: torch.dtype) -> None:
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(sample(logits, [Sampling()] * 7, range(7)), logits.argmax(-1))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(1))
    num = 20_000
    counts = draws(logits, Sampling(temperature=temperature, seed=3), num).double()
    expected = num * (logits.double() / temperature).softmax(-1)
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < 31.3  # 99.9% quantile at 11 degrees of freedom


def gumbel_noise(seeds: list[int], positions: list[int], vocab: int) -> torch.Tensor:
    seed_R = torch.tensor([noise.signed(seed) for seed in seeds])
    return noise.gumbel_noise(seed_R, torch.tensor(positions), torch.arange(vocab))


def test_noise_is_gumbel_and_uncorrelated_between_neighbours() -> None:
    drawn = gumbel_noise([0] * 200 + [1] * 200, [*range(200), *range(200)], 500)
    assert abs(drawn.mean().item() - 0.5772) < 0.01
    assert abs(drawn.var().item() - math.pi**2 / 6) < 0.03
    flat = drawn - drawn.mean()
    for other in (flat.roll(1, 0), flat.roll(1, 1), flat.roll(200, 0)):  # position, vocabulary, seed
        assert abs((flat * other).mean().item()) < 0.02


def test_noise_is_a_function_of_seed_position_and_index_only() -> None:
    alone = gumbel_noise([7], [3], 40)
    together = gumbel_noise([-1, 7, 2**64 - 2], [9, 3, 0], 64)
    assert torch.equal(together[1, :40], alone[0])
    assert not torch.equal(together[0], together[2])
    assert torch.equal(gumbel_noise([-1], [5], 9), gumbel_noise([2**64 - 1], [5], 9))


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits = torch.randn(4, 33, generator=torch.Generator().manual_seed(2))
    samplings = [
        Sampling(),
        Sampling(temperature=0.7, seed=1, top_k=5),
        Sampling(temperature=1.3, seed=1, top_p=0.8),
        Sampling(temperature=1.0, seed=9, min_p=0.1, top_k=20, top_p=0.95),
    ]
    for position in range(50):
        together = sample(logits, samplings, [position] * 4).tolist()
        alone = [sample(logits[r : r + 1], [samplings[r]], [position]).item() for r in range(4)]
        assert together == alone


def kept(logits: list[float], **settings: float) -> list[int]:
    numbers, _ = parameters([Sampling(temperature=1.0, seed=0, **settings)])  # type: ignore[arg-type]
    row = keep_likely(torch.tensor([logits]), torch.tensor(numbers, dtype=torch.float64))[0]
    return [i for i, x in enumerate(row.tolist()) if x > -math.inf]


def test_filters_keep_what_they_say() -> None:
    logits = [math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]
    assert kept(logits) == [0, 1, 2, 3]
    assert kept(logits, top_k=1) == [1]
    assert kept(logits, top_k=3) == [1, 2, 3]
    assert kept(logits, top_k=99) == [0, 1, 2, 3]
    assert kept(logits, top_p=0.39) == [1]
    assert kept(logits, top_p=0.41) == [1, 3]
    assert kept(logits, top_p=0.95) == [0, 1, 2, 3]
    assert kept(logits, min_p=0.6) == [1, 3]
    assert kept(logits, min_p=1.0) == [1]
    # top_p sees what top_k left: 0.4/0.7 = 0.571 of it is the first token.
    assert kept(logits, top_k=2, top_p=0.57) == [1]
    assert kept(logits, top_k=2, top_p=0.58) == [1, 3]
    assert kept([1.0, 1.0, 0.0], top_k=1) == [0, 1]  # ties stay
    assert kept([-math.inf, 0.0, 0.0], top_p=0.999) == [1, 2]


def test_filtered_draws_follow_the_renormalised_softmax() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    counts = draws(logits, Sampling(temperature=1.0, seed=5, top_k=2), 10_000)
    assert counts[[0, 2]].tolist() == [0, 0]
    assert abs(counts[1].item() / 10_000 - 4 / 7) < 0.02


def test_tiny_temperature_is_greedy_and_finite() -> None:
    logits = torch.tensor([[300.0, 299.9, -300.0]])
    assert sample(logits, [Sampling(temperature=1e-6, seed=0)], [0]).tolist() == [0]


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 1e7},
        {"temperature": "hot"},
        {"temperature": True},
        {"top_k": -2},
        {"top_k": 2**31 + 1},
        {"top_k": 10**400},
        {"top_k": 1.5},
        {"top_p": -1e-9},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"min_p": -0.1},
        {"min_p": 2.0},
        {"seed": "x"},
        {"seed": 2**64},
        {"max_tokens": 0},
        {"stop": ("",)},
        {"stop": (3,)},
        {"stop": None},
        {"stop": 3},
    ],
)
def test_bad_settings_say_what_is_allowed(bad: dict[str, object]) -> None:
    with pytest.raises(UserError, match=next(iter(bad))) as error:
        Sampling(**bad)  # type: ignore[arg-type]
    assert "must be" in str(error.value) and len(str(error.value)) < 200


def test_edge_values_mean_what_they_come_close_to() -> None:
    assert Sampling(temperature=1e-300) == Sampling(temperature=0.0) and Sampling(temperature=5e-324).greedy
    assert Sampling(top_k=-1) == Sampling(top_k=0)
    assert Sampling(top_p=0.0) == Sampling(top_p=1e-300)
    row_V = torch.tensor([0.0, 2.0, 1.0])
    hot = [Sampling(temperature=1e6, seed=i, top_p=0.0) for i in range(50)]
    positions = list(range(50))
    assert sample(row_V.expand(50, 3), hot, positions).tolist() == [1] * 50
    numbers, seeds = parameters(hot)
    on_device = torch.empty(50, dtype=torch.int64)
    sample_tokens_(
        row_V.expand(50, 3),
        torch.tensor(numbers, dtype=torch.float64),
        torch.tensor(seeds),
        torch.tensor(positions),
        on_device,
        cuts=True,
    )
    assert on_device.tolist() == [1] * 50


def test_stop_may_be_one_string() -> None:
    assert Sampling(stop="ab").stop == ("ab",)  # type: ignore[arg-type]
    assert Sampling(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]


def test_drawing_without_a_seed_is_refused() -> None:
    with pytest.raises(UserError, match="seed"):
        sample(torch.zeros(1, 3), [Sampling(temperature=1.0)], [0])


def test_settings_on_a_device_choose_as_those_of_each_token_do() -> None:
    """Greedy and drawn rows mixed, and positions further on; others travel along unchanged."""
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(3))
    greedy, drawn = Sampling(), Sampling(temperature=0.8, seed=4, top_k=9)
    other = torch.arange(6, dtype=torch.int32).view(2, 3)
    for samplings in ([greedy, drawn, drawn, greedy, drawn], [greedy] * 5, [drawn] * 5):
        rows, (sent,) = RowSettings.of(samplings, range(5)).to(torch.device("cpu"), other)
        assert sent.equal(other) and sent.data_ptr() != other.data_ptr()
        for ahead in (0, 3):
            want = sample(logits, samplings, [r + ahead for r in range(5)])
            assert rows.sample(logits, ahead=ahead).equal(want)
        probs = rows.probabilities(logits)
        assert probs.dtype == torch.float64 and torch.allclose(probs.sum(-1), torch.ones(5, dtype=torch.float64))
        assert (probs > 0).sum(-1).tolist() == [1 if s.greedy else 9 for s in samplings]
        assert probs.argmax(-1).equal(logits.argmax(-1))
