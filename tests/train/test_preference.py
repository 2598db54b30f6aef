"""DPO: loss and gradients equal trl's (golden files made once with trl), and the reference is computed once."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from shoestring.errors import UserError
from shoestring.mesh import Mesh
from shoestring.model import Decoder
from shoestring.train.preference import Preference, build_reference
from shoestring.train.samples import SampleData, Samples
from tiny import LLAMA, tiny_llama

GOLDEN = json.loads(Path(__file__).with_name("trl_dpo.json").read_text())
SPEC = dataclasses.replace(LLAMA, vocab_size=304)
ALONE = Mesh(0, 1, torch.device("cpu"))


def moved() -> Decoder:
    """The model that trl trained: the reference model plus noise."""
    model, draw = tiny_llama(SPEC), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, p in sorted(model.named_parameters()):
            p.add_(0.1 * torch.randn(p.shape, generator=draw))
    return model


def pairs() -> Samples:
    """trl's rows: all chosen answers, then all rejected ones."""
    half = len(GOLDEN["ids"]) // 2
    order = [i for pair in range(half) for i in (pair, pair + half)]
    ids, learned = ([GOLDEN[key][i] for i in order] for key in ("ids", "completion"))
    starts = np.cumsum([0, *map(len, ids)])
    return Samples(np.concatenate(ids).astype(np.int32), np.concatenate(learned).astype(bool), starts, 2)


@pytest.mark.parametrize("pack", [True, False])
def test_loss_and_gradients_equal_trls(tmp_path: Path, pack: bool) -> None:
    samples = pairs()
    data = SampleData(samples, context=64, batch=1 if pack else 3, pack=pack)
    options = {"num_targets": len(samples.tokens), "identity": {}, "mesh": ALONE}
    reference = build_reference(tmp_path / "reference", tiny_llama(SPEC), data.once(), **options)  # type: ignore[arg-type]
    model, objective = moved(), Preference(reference, GOLDEN["beta"])
    total = 0.0
    for micro in data.step(0):
        loss = objective(model, micro) / samples.num_units
        loss.backward()
        total += float(loss.detach())
    assert total == pytest.approx(GOLDEN["loss"], abs=1e-6)
    for name, (norm, *first) in GOLDEN["grads"].items():
        grad = dict(model.named_parameters())[name].grad
        assert grad is not None
        assert float(grad.norm()) == pytest.approx(norm, rel=1e-5), name
        assert grad.flatten()[:3].tolist() == pytest.approx(first, abs=1e-5 * norm), name

    again = build_reference(tmp_path / "reference", torch.nn.Identity(), data.once(), **options)  # type: ignore[arg-type]
    assert again.num_filled == reference.num_filled


def test_a_model_that_has_not_moved_has_a_loss_of_log_2(tmp_path: Path) -> None:
    samples, model = pairs(), tiny_llama(SPEC)
    data = SampleData(samples, context=64, batch=3)
    reference = build_reference(tmp_path, model, data.once(), num_targets=len(samples.tokens), identity={}, mesh=ALONE)
    (micro,) = data.once()
    with torch.no_grad():
        loss = Preference(reference)(model, micro) / samples.num_units
    assert float(loss) == pytest.approx(np.log(2), abs=1e-6)
    with pytest.raises(UserError, match="beta=0 must be positive"):
        Preference(reference, 0.0)
