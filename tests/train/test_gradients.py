"""A NaN gradient stops the run before it moves a weight, with the layer's name and the last good checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sparse24_runs import fit, new_run
from torch import Tensor

from refusals import refused
from shoestring.errors import UserError
from shoestring.formats import FormatLinear
from shoestring.state.checkpointer import Checkpointer
from shoestring.train.gradients import GradientWatch


def spoil(layer: FormatLinear, after: int, value: float) -> None:
    """From the given backward pass on the layer's output gradient is `value`."""
    seen = 0

    def bad(grad: Tensor) -> Tensor:
        nonlocal seen
        seen += 1
        return torch.full_like(grad, value) if seen > after else grad

    def hook(module: torch.nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(bad)

    layer.register_forward_hook(hook)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_gradient_names_its_layer_and_the_last_good_checkpoint(tmp_path: Path, value: float) -> None:
    run, hooks = new_run("ast", tmp_path)
    spoil(run.model.get_submodule("blocks.0.mlp.down"), after=2 * 6, value=value)  # type: ignore[arg-type]
    checkpointer = Checkpointer(tmp_path / "checkpoints", every=2)
    with pytest.raises(UserError) as caught:  # two micro-batches a step: the seventh is bad
        fit(run, 20, hooks, checkpointer=checkpointer)
    said = str(caught.value)
    # Which of a block's layers is reached first is the block's order; the block after it is untouched.
    assert "step 7: the gradient of blocks.0." in said and "before it" in said
    assert str(tmp_path / "checkpoints/step-00000006") in said
    assert run.step == 6 and all(p.isfinite().all() for p in run.model.parameters())


def test_a_bad_loss_is_called_one(tmp_path: Path) -> None:
    run, hooks = new_run("ast")
    with torch.no_grad():
        run.model.get_parameter("norm.weight").fill_(float("nan"))
    refused(r"step 1: the loss and with it every gradient .*no checkpoint yet", fit, run, 3, hooks)


def test_on_a_device_the_first_bad_step_is_remembered() -> None:
    """The path that waits for nobody, on the CPU: tensors of another device type take it."""
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2, bias=False) for _ in range(3)))
    params = list(model.parameters())
    watch = GradientWatch(model)
    nan = float("nan")

    class Elsewhere(torch.Tensor):
        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device("cuda")

    for step, norms in enumerate(([1.0, 1.0, 1.0], [1.0, nan, 1.0], [nan, nan, nan]), start=1):
        total = torch.tensor(norms).square().sum().sqrt().as_subclass(Elsewhere)
        watch.see(step, total, params, torch.tensor(norms))
        if step == 1:
            watch.check(lambda: None)
    refused(r"step 2: the gradient of 1\.weight is NaN", watch.check, lambda: None)


def test_a_hook_that_stumbles_over_spoilt_weights_does_not_speak_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU steps go on until numbers are read back, and masks are chosen from NaN before that."""
    see = GradientWatch.see

    def unseen(watch: GradientWatch, step: int, norm: Tensor, *rest: Any) -> None:
        if not norm.isfinite() and watch._step is None:
            see(watch, step, norm, *rest)

    monkeypatch.setattr(GradientWatch, "see", unseen)
    late = GradientWatch.check
    monkeypatch.setattr(GradientWatch, "check", lambda watch, last: late(watch, last) if run.step >= 8 else None)
    run, hooks = new_run("ast", tmp_path)  # new masks every fourth step
    spoil(run.model.get_submodule("blocks.1.mlp.down"), after=2 * 6, value=float("nan"))  # type: ignore[arg-type]
    refused(
        r"step 7: the gradient of blocks.1.mlp.down.weight .*step-00000004", fit, run, 20, hooks,
        checkpointer=Checkpointer(tmp_path / "checkpoints", every=4),
    )  # fmt: skip
    assert run.step == 8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu() -> None:
    model = torch.nn.Linear(2, 2, bias=False).cuda()
    watch = GradientWatch(model)
    watch.see(1, torch.tensor(float("nan"), device="cuda"), [model.weight], torch.tensor([float("nan")], device="cuda"))
    refused("step 1", watch.check, lambda: None)
