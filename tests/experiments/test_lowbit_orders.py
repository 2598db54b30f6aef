"""The quality table of experiments/lowbit_quality in small: a model trained here, from 4 bits to 2, by every method."""

from __future__ import annotations

from math import log
from pathlib import Path

import pytest
import torch
from chain_subject import chain_subject
from torch import Tensor

from experiments.lowbit_methods import evaluate, shrink, unformat
from shoestring.formats import parse_format
from shoestring.shrink.blockwise import Blockwise
from shoestring.shrink.chosen_grid import round_to_nearest, state_of
from shoestring.shrink.qat import Rates
from tiny import taught

INTS = [f"int{bits}:{group}" for bits in (4, 3, 2) for group in ("g32", "g64")]
FLOATS = [f"nf{bits}:s{scales}:g32" for bits in (4, 3, 2) for scales in (1, 2)]
PLAIN = ("rtn", "clip", "awq", "gptq", "gptq+clip")
UNTRAINED = [(method, label) for label in INTS for method in PLAIN]
UNTRAINED += [(method, label) for label in FLOATS for method in ("rtn", "clip", "gptq")]
MIX = "ours@mix=int2:g64+int4:g64"
# Trained results whose order the seed or the processor's order of sums can turn round: compared as means over seeds.
CLOSE = [(method, label) for label in ("int2:g32", "int2:g64") for method in ("bitdistiller", "ours")]
CLOSE += [("bitdistiller", "int3:g64"), (MIX, "int3:g64")]


def losses(seed: int, folder: Path, cells: list[tuple[str, str]]) -> dict[tuple[str, str], float]:
    """{(method, format): nats a token above full precision} of the cells"""
    model, text = taught(300, width=64, lr=5e-3, seed=seed)  # layers with groups of 32 and of 64
    subject = chain_subject(
        model, text, 8192, 32, steps=60, batch=16, top=16, blockwise_part=0.125,
        blockwise=Blockwise(epochs=2, batch=16),
        rates=Rates(weight=1e-2, scale=3e-3, zero=1e-2, norm=1e-2, rest=2e-2), cache_folder=folder,
    )  # fmt: skip
    full = evaluate(subject)["perplexity"]
    assert full < 2.3  # 24 by chance, 1.65 at best
    found = {}
    for method, label in cells:
        got, told = shrink(subject, method, label, 0)
        bits = unformat(got)
        want = parse_format(label).bits_per_weight((64, 64))
        assert bits <= want + 1e-6 if method == MIX else bits == pytest.approx(want, rel=0.02)
        assert told["training_tokens"] == (0 if method in PLAIN else subject.training_tokens)
        found[method, label] = log(evaluate(subject)["perplexity"] / full)
    return found


@pytest.mark.slow
@pytest.mark.lab
def test_the_order_of_methods_and_bits(tmp_path: Path) -> None:
    """Parts of one loss that another leaves; the comments have what seeds 0, 1 and 2 gave.

    Two orders of large models are not here. The weights of a model like this are symmetric (skewness below 0.02), so
    that INT3 and NF3 are level under rounding: the test below has weights where they are not. And ours without a mix
    leaves 0.49, 1.21 and 0.51 of BitDistiller's loss at 3 bits: where so little is lost, the seed decides.
    """
    trained = [("bitdistiller", "int2:g64"), ("ours", "int2:g64"), ("ours", "int3:g64"), ("ours", "int4:g64")]
    loss = losses(0, tmp_path, [*UNTRAINED, *trained])
    for label in (*INTS, *FLOATS):
        assert loss["gptq", label] < 0.85 * loss["rtn", label], label  # 0.69 at most
        if parse_format(label).bits < 4:  # type: ignore[attr-defined]  # at 4 a clipped range wins or loses a little
            assert loss["clip", label] < 0.93 * loss["rtn", label], label  # 0.84 at most
    for group in ("g32", "g64"):
        for method in PLAIN:
            four, three, two = (loss[method, f"int{bits}:{group}"] for bits in (4, 3, 2))
            assert four < 0.6 * three and three < 0.3 * two, (method, group)  # 0.39 and 0.18 at most
        assert loss["awq", f"int2:{group}"] < 0.9 * loss["rtn", f"int2:{group}"]  # 0.74 at most
    for method in ("rtn", "gptq"):
        assert loss[method, "int2:g32"] < 0.98 * loss[method, "int2:g64"], method  # 0.69 to 0.85
    for method in ("rtn", "clip", "gptq"):
        assert loss[method, "nf2:s2:g32"] < 0.92 * loss[method, "nf2:s1:g32"], method  # 0.69 to 0.83

    best = {bits: min(loss[method, f"int{bits}:g64"] for method in PLAIN) for bits in (2, 3)}
    assert loss["bitdistiller", "int2:g64"] < 0.6 * best[2]  # 0.33 to 0.41
    assert loss["ours", "int2:g64"] < 0.6 * best[2]
    assert loss["ours", "int3:g64"] < 0.7 * best[3]  # 0.34, 0.48, 0.32
    assert loss["ours", "int4:g64"] < 0.4 * loss["rtn", "int4:g64"]  # 0.15, 0.23, 0.14
    assert loss["ours", "int4:g64"] < log(1.005)  # 0.0015 to 0.0021; 5% is what it may lose


@pytest.mark.lab
def test_the_order_of_trained_methods(tmp_path: Path) -> None:
    """Means over three seeds. A single seed is not enough: on another processor its losses moved by up to 15%."""
    runs = []
    for seed in range(3):
        (tmp_path / str(seed)).mkdir()
        runs.append(losses(seed, tmp_path / str(seed), CLOSE))
    loss = {cell: sum(run[cell] for run in runs) / len(runs) for cell in CLOSE}
    for group in ("g32", "g64"):
        assert loss["ours", f"int2:{group}"] < 0.95 * loss["bitdistiller", f"int2:{group}"]  # seeds: 0.59 to 0.93
    for method in ("bitdistiller", "ours"):
        assert loss[method, "int2:g32"] < loss[method, "int2:g64"], method  # seeds: 0.69 to 0.99
    assert loss[MIX, "int3:g64"] < 0.97 * loss["bitdistiller", "int3:g64"]  # seeds: 0.38, 0.91, 0.87


def rounding_error(w: Tensor, label: str) -> float:
    format = parse_format(label)
    got = round_to_nearest(w, format, state_of(format, w)).weight  # type: ignore[arg-type]
    return float((got - w).square().sum() / w.square().sum())


@pytest.mark.parametrize("group", ["g32", "g64"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_two_scales_are_for_tails_of_different_length(seed: int, group: str) -> None:
    """Squared errors of rounding to nearest at 3 bits, as parts of the weights; groups of 32 / of 64, any seed."""
    bell = torch.randn(256, 256, generator=torch.Generator().manual_seed(seed))

    def errors(w: Tensor) -> tuple[float, ...]:
        return tuple(rounding_error(w, f"{kind}:{group}") for kind in ("nf3:s2", "nf3:s1", "int3"))

    two, one, ints = errors(bell)  # 0.027, 0.033, 0.030 / 0.033, 0.039, 0.038
    assert two < 0.9 * one and two < 0.95 * ints
    long_tail = torch.where(bell > 0, bell * (1 + 0.3 * bell.square()), bell)
    two, one, ints = errors(long_tail)  # 0.027, 0.053, 0.039 / 0.039, 0.078, 0.057
    assert two < 0.6 * one and two < 0.8 * ints
    # Where a whole side is narrow, and not just its tail, two scales spend half of their codes on it. An even grid with
    # a zero point gives each side codes by its width.
    narrow_side = torch.where(bell > 0, bell * 0.35, bell)
    two, one, ints = errors(narrow_side)  # 0.033, 0.043, 0.024 / 0.041, 0.053, 0.031
    assert ints < 0.85 * two and two < 0.85 * one
