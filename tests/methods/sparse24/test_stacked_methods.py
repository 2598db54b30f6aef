"""Methods that choose grids, on weights that are 2:4 already: zeros stay, and the kept values get the best grids."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from refusals import refused
from shoestring.formats import GridFormat, parse_format
from shoestring.formats.groups import extremes
from shoestring.methods.sparse24.kernels.masks import is_24, mask24
from shoestring.methods.sparse24.prune import SparseGpt, prune, take_branches
from shoestring.methods.sparse24.stacked import Stacked
from shoestring.model import load_model
from shoestring.runlog import read_jsonl
from shoestring.shrink.awq import Awq
from shoestring.shrink.calibrate import walk, windows
from shoestring.shrink.chosen_grid import round_to_nearest, snap_to_grid, state_of
from shoestring.shrink.clip import Clip
from shoestring.shrink.gptq import Gptq, gptq, inverse_factor
from shoestring.shrink.quantize import METHODS, quantize
from tiny import correlated, output_error, random_weight

SECOND = ["int4:g32", "int3:g16", "int4:sym:g32", "int2:g32", "nf3:s2:g32", "nf4:s1:g32", "nf2:s2:g0", "fp4:s2:g32"]
every_second = pytest.mark.parametrize("second", SECOND)
SETTINGS = [Gptq(), Gptq(act_order=True), Gptq(static_groups=True), Gptq(clip=Clip())]


def pruned_weight() -> Tensor:
    w = random_weight()
    return torch.where(mask24(w), w, 0.0)


def setup(second: str, w: Tensor) -> tuple[Stacked, dict[str, Tensor]]:
    format = parse_format(f"sparse24+{second}")
    assert isinstance(format, Stacked) and isinstance(format, GridFormat)
    return format, state_of(format, w)


def hessian() -> Tensor:
    x = correlated()
    return x.T @ x / len(x)


@every_second
def test_zero_is_a_level_of_every_grid(second: str) -> None:
    w = random_weight()
    format, state = setup(second, pruned_weight())
    for values in (w, w.abs(), -w.abs(), w * 1e-6, w * 0):
        grid = format.find_grid(*extremes(values))
        assert (format.snap(torch.zeros(len(w), 3), grid, state) == 0).all()


@every_second
def test_nearest_is_what_the_format_stores(second: str) -> None:
    w = pruned_weight()
    format, state = setup(second, w)
    assert torch.equal(round_to_nearest(w, format, state).weight, format.fake(w, format_state(format, w)))


def format_state(format: Stacked, w: Tensor) -> dict[str, Tensor]:
    return {name: aux.tensor for name, aux in format.state(w).items()}


@every_second
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.few(12)
def test_gptq_keeps_the_zeros_and_beats_rounding(second: str, settings: Gptq) -> None:
    w, h = pruned_weight(), hessian()
    format, state = setup(second, w)
    choice = gptq(w, h, format, state, settings)
    assert (choice.weight[w == 0] == 0).all() and not choice.weight[w == 0].signbit().any()
    assert torch.equal(snap_to_grid(choice.weight, choice.grid, format, state).weight, choice.weight)
    plain = output_error(w, round_to_nearest(w, format, state).weight, h)
    assert output_error(w, choice.weight, h) < 0.85 * plain


@pytest.mark.parametrize("settings", SETTINGS[:3])
def test_gptq_against_a_solver(settings: Gptq) -> None:
    """Each column is fixed where the best of what is still free has it, which is found by solving, in fp64."""
    torch.manual_seed(0)
    w = pruned_weight()[:6]
    w[:, 64:] *= 0.01  # so that what is put on pruned ones would be seen in the grid
    h = hessian()
    format, state = setup("int3:g32", w)
    choice = gptq(w, h, format, state, settings)
    h64 = h.double() + torch.eye(len(h)).double() * (settings.damping * h.double().diagonal().mean())
    start, fixed, width = w.double(), torch.zeros_like(w).double(), format.group
    order = torch.arange(len(h))
    if settings.act_order:
        order = h.diagonal().argsort(descending=True, stable=True)
    for i, j in enumerate(order.tolist()):
        done, free = order[:i], order[i:]
        pushed = (fixed - start)[:, done] @ h64[done][:, free]
        best = start[:, free] - torch.linalg.solve(h64[free][:, free], pushed.T).T
        own = {n: t[:, j // width] for n, t in choice.grid.items()}
        if settings == Gptq() and i % width == 0:  # the grid spans what is kept of the group, compensated so far
            ahead = torch.where(w[:, j : j + width] != 0, best[:, :width].float(), 0.0)
            torch.testing.assert_close(format.find_grid(*extremes(ahead))["scale"], own["scale"], rtol=1e-2, atol=0)
        level = format.snap(best[:, :1].float(), own, state).double()
        fixed[:, j : j + 1] = torch.where(w[:, j : j + 1] != 0, level, 0.0)
    # A value in the middle of two levels may fall to either side, and what comes behind it with it.
    assert (choice.weight.double() - fixed).abs().gt(1e-6).double().mean() < 0.02
    assert inverse_factor(h, settings.damping).shape == h.shape


def pruned_model(here: Path) -> tuple[object, Tensor]:
    loaded = load_model(here / "model")
    assert loaded.tokenizer is not None
    tokens = torch.tensor(loaded.tokenizer.encode((here / "calib.txt").read_text()))
    seen = windows(tokens, 6, 32)
    prune(loaded.model, [("*", parse_format("sparse24"))], walk(loaded.model, seen), SparseGpt())
    take_branches(loaded.model)  # dense layers that hold zeros
    return loaded.model, seen


@pytest.mark.parametrize("name", [*METHODS])
@pytest.mark.few(4)
def test_whole_models_store_what_was_chosen(name: str, here: Path) -> None:
    model, seen = pruned_model(here)
    rules = [("*", parse_format("sparse24+int3:g16"))]
    method = METHODS[name]
    report = quantize(model, rules, walk(model, seen), method)  # type: ignore[arg-type]
    assert len(report.layers) == 21 and all(e.bits_per_weight == 1 + (3 + 24 / 16) / 2 for e in report.layers)
    for layer in (m for m in model.modules() if hasattr(m, "pack")):  # type: ignore[attr-defined]
        if not isinstance(layer.format, Stacked):
            continue
        chosen = layer.weight.detach().clone()
        layer.pack(torch.float32)
        assert is_24(chosen) and torch.equal(layer.effective_weight(torch.float32), chosen)
    assert isinstance(method, Awq) or report.method == name


def test_outputs_are_nearer_than_those_of_rounding(here: Path) -> None:
    lost = {}
    for name in ("rtn", "gptq", "gptq+clip"):
        model, seen = pruned_model(here)
        report = quantize(model, [("*", parse_format("sparse24+int2:g16"))], walk(model, seen), METHODS[name])  # type: ignore[arg-type]
        lost[name] = sum(e.output_error or 0 for e in report.layers)
    assert lost["gptq"] < 0.8 * lost["rtn"] and lost["gptq+clip"] < 0.8 * lost["rtn"]


def test_weights_that_are_not_pruned_are_refused(here: Path) -> None:
    model = load_model(here / "model").model
    for label, said in {
        "sparse24+int4:g16": "keeps two of every four weights, and this layer has more",
        "sparse24:soft+int4:g16": "use sparse24\\+int4:g16",
        "sparse24": "has no grid to choose",
    }.items():
        refused(said, quantize, model, [("*", parse_format(label))], [], Gptq())


def test_pruned_then_quantized_by_recipes(cli: Callable[..., str], here: Path) -> None:
    texts = ["calib=calib.txt", "calib_windows=6", "calib_context=32", "device=cpu"]
    half = ["run", "shrink/prune24", "model=model", *texts, "train=none", "max_tokens=512"]
    cli(*half, "run=half")
    made = ["run", "shrink/ptq", *texts, "format=sparse24+int3:g16"]
    cli(*made, "model=half", "text=test.txt", "context=32", "max_tokens=512", "run=coded")
    labels = [row["format"] for row in read_jsonl(here / "coded/evals.jsonl")]
    assert labels == ["dense", "sparse24+int3:g16 + int8:sym:g0"]
    layer = load_model(here / "coded").model.blocks[0].mlp.up
    assert layer.packed and is_24(layer.effective_weight(torch.float32))  # type: ignore[union-attr, operator]
    assert "prune the model first" in cli(*made, "model=model", fails=True)
    cli(*half, "slorb=16", "run=boosted")  # whose branch fills the zeros
    assert "prune the model first" in cli(*made, "model=boosted", fails=True)
