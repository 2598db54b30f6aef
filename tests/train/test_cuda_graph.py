"""A step's passes as a CUDA graph: the same training; without a GPU the switch changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sparse24_runs import fit, new_run
from torch import Tensor

from shoestring.formats import convert, parse_format
from shoestring.mesh import Mesh, open_mesh
from shoestring.methods.sparse24.prune import sparsegpt
from shoestring.methods.sparse24.training import NoiseClock
from shoestring.model import Decoder, ModelSpec
from shoestring.model.parallel import init_weights
from shoestring.runlog import RunLog
from shoestring.shrink.blockwise import Blockwise, train_blocks
from shoestring.shrink.clip import Clip
from shoestring.shrink.gptq import Gptq, gptq
from shoestring.train.cuda_graph import GraphedForwardBackward, pass_counters, why_plain
from shoestring.train.data import TokenData
from shoestring.train.objectives import CrossEntropy, Distill
from shoestring.train.optim import adamw
from shoestring.train.shards import TokenShards
from shoestring.train.step import Hook, Run
from shoestring.train.trainer import train

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


CPU, GPU = Mesh(0, 1, torch.device("cpu")), Mesh(0, 1, torch.device("cuda"))


def losses(device: str, graph: bool, *, micro: int = 2) -> list[float]:
    model = Decoder(ModelSpec(96, 64, 2, 4, 2, 16, 128, 64)).to(device)
    teacher = Decoder(model.spec).to(device)
    init_weights(model, 0)
    init_weights(teacher, 1)
    convert(model, [("*", parse_format("int4:g32:learned"))])
    tokens = np.random.default_rng(0).integers(0, 96, 3000).astype("<u2")
    mask = (np.random.default_rng(1).random(3000) < 0.8).astype(np.uint8)  # another count at every step
    data = TokenData(TokenShards(tokens, mask, "noise"), context=32, batch=4, micro=micro)
    run = Run(model, adamw(model, lr=3e-3), open_mesh(device=device), RunLog(None, quiet=True))
    train(
        run, data, Distill(teacher, kl=0.5, ce=0.5), steps=6, log_every=1,
        forward_backward=GraphedForwardBackward() if graph else None,
    )  # fmt: skip
    return [row["loss"] for row in run.log.history]


def test_on_a_cpu_nothing_is_captured() -> None:
    assert why_plain(torch.nn.Linear(2, 2), CPU)
    assert losses("cpu", True) == losses("cpu", False)


def test_models_with_forward_hooks_are_left_alone() -> None:
    model = torch.nn.Linear(2, 2)
    assert not why_plain(model, GPU)
    assert why_plain(model, Mesh(0, 2, torch.device("cuda"), dp=2))
    model.register_forward_pre_hook(lambda module, args: None)
    assert "forward hooks" in why_plain(model, GPU)


def test_steps_that_go_without_a_graph_say_so_once(capsys: pytest.CaptureFixture[str]) -> None:
    def said(device: str) -> str:
        run = Run(model, adamw(model, lr=1e-3), Mesh(0, 1, torch.device(device)), RunLog(None))
        train(run, data, CrossEntropy(), steps=0, forward_backward=GraphedForwardBackward())
        return capsys.readouterr().out

    model = Decoder(ModelSpec(96, 64, 1, 4, 2, 16, 128, 64))
    data = TokenData(TokenShards(np.zeros(99, "<u2"), None, "zeros"), context=32, batch=1)
    assert said("cuda") == ""
    model.register_forward_pre_hook(lambda module, args: None)
    assert said("cuda") == "steps run without a CUDA graph: the model has forward hooks that cannot be captured\n"
    assert said("cpu") == ""  # where nobody expects one


class Tried:
    """A GraphedPasses without a GPU: runs the passes as often as a capture does."""

    count = 0

    def __init__(self, passes: Callable[[], Tensor], params: list[torch.nn.Parameter]) -> None:
        self.passes = passes
        for _ in range(3):
            passes()
        for param in params:
            param.grad = None
        Tried.count += 1

    def __call__(self) -> Tensor:
        return self.passes()


@pytest.mark.parametrize(("method", "captures"), [("controlled", 3), ("sste", 1)])
def test_clocks_and_formats_of_2_4_training_are_followed(
    method: str, captures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise is that of a plain run although a capture runs passes more than once; layers that end or start a
    dense phase are captured anew."""
    plain = fit(*sparse_run(method))
    monkeypatch.setattr("shoestring.train.cuda_graph.GraphedPasses", Tried)
    monkeypatch.setattr("shoestring.train.cuda_graph.why_plain", lambda model, mesh: "")
    monkeypatch.setattr(Tried, "count", 0)
    assert fit(*sparse_run(method), forward_backward=GraphedForwardBackward()) == plain
    assert Tried.count == captures


def sparse_run(method: str, device: str = "cpu") -> tuple[Run, int, list[Hook]]:
    run, hooks = new_run(method, mesh=open_mesh(device=device))
    return run, 20, hooks


def test_a_graph_that_the_caller_holds_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoestring.train.cuda_graph.GraphedPasses", Tried)
    monkeypatch.setattr(Tried, "count", 0)
    run, _, hooks = sparse_run("sste")
    monkeypatch.setattr("shoestring.train.cuda_graph.why_plain", lambda model, mesh: "")
    once: dict[str, Any] = {"forward_backward": GraphedForwardBackward(), "objective": CrossEntropy()}
    in_parts = fit(run, 4, hooks, **once) and fit(run, 9, hooks, **once)
    assert Tried.count == 1
    fit(run, 10, hooks, **{**once, "objective": CrossEntropy()})
    assert Tried.count == 2  # another objective is another graph
    run, _, hooks = sparse_run("sste")
    assert in_parts == fit(run, 9, hooks)


def test_a_clock_of_random_numbers_fits() -> None:
    run, _, hooks = sparse_run("fst")
    assert pass_counters(run.model) == [h for h in hooks if isinstance(h, NoiseClock)]
    assert not why_plain(run.model, GPU)
    run.model.register_forward_hook(lambda module, args, out: None)
    assert pass_counters(run.model) is None and "forward hooks" in why_plain(run.model, GPU)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.filterwarnings("error:steps run without")
@pytest.mark.parametrize("method", ["fst", "controlled", "sste"])
def test_captured_2_4_training_is_the_plain_one(method: str) -> None:
    graphed = GraphedForwardBackward()
    captured, plain = (fit(*sparse_run(method, "cuda"), forward_backward=f) for f in (graphed, None))
    assert not graphed.reason
    assert captured == pytest.approx(plain, rel=1e-5)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("micro", [2, 4])
@pytest.mark.filterwarnings("error:steps run without")
def test_a_captured_step_trains_as_a_plain_one(micro: int) -> None:
    assert losses("cuda", True, micro=micro) == pytest.approx(losses("cuda", False, micro=micro), rel=1e-5)


def block_wise(device: str) -> list[dict[str, float]]:
    model = Decoder(ModelSpec(96, 64, 2, 4, 2, 16, 128, 64)).to(device)
    init_weights(model, 0)
    tokens = torch.randint(0, 96, (16, 32), generator=torch.Generator().manual_seed(1))
    report = train_blocks(model, [("*", parse_format("int2:g32"))], tokens, Blockwise(batch=4, epochs=4))
    assert all(note["after"] <= note["before"] for note in report.blocks)
    return [{key: note[key] for key in ("before", "after")} for note in report.blocks]


def test_block_wise_training_learns() -> None:
    notes = block_wise("cpu")
    assert sum(note["after"] for note in notes) < 0.95 * sum(note["before"] for note in notes)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.filterwarnings("error:steps run without")
def test_captured_block_wise_training_is_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = block_wise("cuda")
    monkeypatch.setattr("shoestring.shrink.blockwise.GraphedPasses", lambda passes, params: passes)
    for got, plain in zip(captured, block_wise("cuda"), strict=True):
        assert got == pytest.approx(plain, rel=0.02)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.filterwarnings("error:column sweeps run without")
@pytest.mark.parametrize("label", ["int3:g32", "nf3:s2:g32"])
@pytest.mark.parametrize("settings", [Gptq(), Gptq(clip=Clip())], ids=["gptq", "gptq+clip"])
def test_captured_sweeps_are_those_of_every_layer(label: str, settings: Gptq) -> None:
    format = parse_format(label)
    for seed in range(3):
        gen = torch.Generator().manual_seed(seed)
        w, x = torch.randn(48, 64, generator=gen), torch.randn(200, 64, generator=gen)
        h = (x.T @ x / 200).cuda()
        state = {n: aux.tensor.cuda() for n, aux in format.state(w).items()}
        found = gptq(w.cuda(), h, format, state, settings).weight.cpu()  # type: ignore[arg-type]
        wanted = gptq(w, h.cpu(), format, {n: t.cpu() for n, t in state.items()}, settings).weight  # type: ignore[arg-type]
        assert (found - wanted).square().mean() < 0.02 * (wanted - w).square().mean()
        torch.testing.assert_close(sparsegpt(w.cuda(), h).cpu(), sparsegpt(w, h.cpu()), rtol=1e-3, atol=1e-3)
