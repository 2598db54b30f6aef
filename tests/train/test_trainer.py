"""The loop on one process: golden losses, resume, hooks, interruption and the optimizer's parts."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from refusals import refused
from shoestring.errors import Interrupted
from shoestring.mesh import Mesh, MeshConfig, open_mesh
from shoestring.model import Decoder, ModelSpec
from shoestring.model.parallel import ParallelConfig, init_weights, materialize, parallelize
from shoestring.runlog import RunLog, read_metrics
from shoestring.state.checkpointer import Checkpointer
from shoestring.train.gradients import clip_gradients
from shoestring.train.objectives import CrossEntropy
from shoestring.train.optim import adamw, constant, warmup_cosine, warmup_stable_decay
from shoestring.train.reducers.plain import SumReducer
from shoestring.train.step import IGNORED, Hook, Micro, Objective, Run
from shoestring.train.trainer import train

SPEC = ModelSpec(64, 32, 2, 4, 2, 8, 48, 32)


class Rows:
    """Four fresh rows a step, with masked prompts, in micro-batches of `micro`."""

    def __init__(self, micro: int = 2) -> None:
        self.micro = micro

    def step(self, step: int) -> list[Micro]:
        stream = torch.randint(0, 64, (4, 17), generator=torch.Generator().manual_seed(step))
        targets = stream[:, 1:].clone()
        for row in range(4):
            targets[row, : 3 * row] = IGNORED
        index = torch.arange(64).view(4, 16)
        return [
            Micro(stream[i : i + self.micro, :-1].contiguous(), targets[i : i + self.micro], index[i : i + self.micro])
            for i in range(0, 4, self.micro)
        ]

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "rows"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {"kind": "rows"}


def new_run(folder: Path | None = None, **parallel: Any) -> Run:
    mesh = open_mesh(MeshConfig(), "cpu")
    with torch.device("meta"):
        model = Decoder(SPEC)
    parallelize(model, mesh, ParallelConfig(**parallel))
    materialize(model, "cpu")
    init_weights(model, seed=0)
    return Run(model, adamw(model, lr=1e-2), mesh, RunLog(folder, quiet=True))


def fit(run: Run, steps: int, **options: Any) -> list[float]:
    options.setdefault("schedule", warmup_cosine(1e-2, warmup=3, steps=20))
    train(run, options.pop("data", Rows()), CrossEntropy(), steps=steps, log_every=1, **options)
    return [row["loss"] for row in run.log.history]


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in run.model.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_twenty_steps_are_bit_identical_and_learn() -> None:
    first, second = new_run(), new_run()
    losses = fit(first, 20)
    assert losses == fit(second, 20)
    assert same(weights(first), weights(second))
    assert losses[-1] < losses[0] + 0.1 and len(losses) == 20


def test_gradients_may_come_from_another_forward_backward() -> None:
    class AllAtOnce:
        """One backward pass over the sum of all micro-batches: the same gradients by another way."""

        begun = 0

        def begin(self, run: Run) -> None:
            self.begun += 1

        def __call__(
            self, model: nn.Module, objective: Objective, micros: list[Micro], total: Tensor | float
        ) -> Tensor:
            loss = torch.stack([objective(model, m) for m in micros]).sum()
            (loss / total).backward()
            return loss.detach()

    other, run = AllAtOnce(), new_run()
    assert fit(run, 5, forward_backward=other) == pytest.approx(fit(new_run(), 5), rel=1e-5)
    fit(run, 6, forward_backward=other)
    assert other.begun == 2


def test_a_reducer_that_clips_is_not_clipped_again() -> None:
    class Halves(SumReducer):
        clips = True

        def __call__(self, model: nn.Module) -> None:
            for p in model.parameters():
                p.grad = None if p.grad is None else p.grad / 2

    class Norms(Hook):
        def before_step(self, run: Run) -> None:
            self.norm = float(clip_gradients(run.model.parameters(), 0.0))

    run, unclipped, clipped = new_run(), Norms(), Norms()
    fit(run, 1, clip=0.0, hooks=[unclipped])
    run = new_run()
    fit(run, 1, clip=unclipped.norm / 100, hooks=[clipped], reducer=Halves(run.mesh))
    assert clipped.norm == pytest.approx(unclipped.norm / 2, rel=1e-5)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Twenty steps without a stop."""
    run = new_run(tmp_path_factory.mktemp("whole"))
    fit(run, 20)
    return run


@pytest.mark.parametrize("stop", [1, 7, 13, 19])
def test_killed_at_any_step_resumes_bit_for_bit(tmp_path: Path, stop: int, whole: Run) -> None:

    class Die(Hook):
        def after_step(self, run: Run) -> None:
            if run.step == stop + 1:
                raise RuntimeError("killed")

    part = new_run(tmp_path / "part")
    with pytest.raises(RuntimeError, match="killed"):
        fit(part, 20, hooks=[Die()], checkpointer=Checkpointer(tmp_path / "part/checkpoints", every=1))
    again = new_run(tmp_path / "part")
    got = fit(again, 20, hooks=[Hook()], checkpointer=Checkpointer(tmp_path / "part/checkpoints", every=5))
    assert got == [row["loss"] for row in whole.log.history]
    assert same(weights(whole), weights(again))
    for a, b in zip(whole.optimizer.state.values(), again.optimizer.state.values(), strict=True):
        assert all(torch.equal(torch.as_tensor(a[k]), torch.as_tensor(b[k])) for k in a)


def test_killed_before_the_first_checkpoint_leaves_no_lines(tmp_path: Path) -> None:
    class Die(Hook):
        def after_step(self, run: Run) -> None:
            if run.step == 4:
                raise RuntimeError("killed")

    def saver() -> Checkpointer:
        return Checkpointer(tmp_path / "checkpoints", every=5)

    with pytest.raises(RuntimeError, match="killed"):
        fit(new_run(tmp_path), 6, hooks=[Die()], checkpointer=saver())
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    fit(new_run(tmp_path), 6, hooks=[Hook()], checkpointer=saver())
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_accumulation_changes_nothing_but_rounding() -> None:
    one, four = fit(new_run(), 6, data=Rows(micro=4)), fit(new_run(), 6, data=Rows(micro=1))
    assert max(abs(a - b) for a, b in zip(one, four, strict=True)) < 1e-5


def test_recompute_changes_nothing() -> None:
    assert fit(new_run(), 4) == fit(new_run(recompute=True), 4)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["blocks", "whole"])
@pytest.mark.few(1)
def test_compiled_training_agrees_with_eager(mode: str) -> None:
    plain, compiled = fit(new_run(), 4), fit(new_run(compile=mode), 4)
    assert max(abs(a - b) for a, b in zip(plain, compiled, strict=True)) < 1e-5


def test_hooks_run_in_order_around_the_optimizer() -> None:
    seen: list[str] = []

    class Watch(Hook):
        def __init__(self, name: str) -> None:
            self.name = name

        def before_step(self, run: Run) -> None:
            norm = clip_gradients(run.model.parameters(), 0)
            assert float(norm) <= 0.1 * 1.001  # hooks see clipped gradients
            seen.append(f"{self.name} before {run.step}")

        def after_step(self, run: Run) -> None:
            assert all(p.grad is None for p in run.model.parameters())
            seen.append(f"{self.name} after {run.step}")

    fit(new_run(), 2, hooks=[Watch("a"), Watch("b")], clip=0.1)
    assert seen == [f"{n} {w}" for s in (0, 1) for w in (f"before {s}", f"after {s + 1}") for n in "ab"]


def test_a_step_without_counted_tokens_moves_nothing_but_decay() -> None:
    class Nothing(Rows):
        def step(self, step: int) -> list[Micro]:
            return [Micro(m.tokens_BT, torch.full_like(m.targets_BT, IGNORED), m.index_BT) for m in super().step(step)]

    run = new_run()
    before = weights(run)
    losses = fit(run, 1, data=Nothing(), schedule=constant(0.0))
    assert losses == [0.0]
    assert same(before, weights(run))


def test_interrupt_saves_and_says_how_to_resume(tmp_path: Path) -> None:
    class PressCtrlC(Hook):
        def after_step(self, run: Run) -> None:
            if run.step == 5:
                os.kill(os.getpid(), signal.SIGINT)

    run = new_run(tmp_path / "run")
    run.log.save_config({"recipe": "train/dense", "config": {}})
    before = signal.getsignal(signal.SIGINT)
    checkpointer = Checkpointer(tmp_path / "run/checkpoints", every=100)
    with pytest.raises(Interrupted, match=r"step 5 of 20 and saved.*`shoestring run train/dense resume=.*run`"):
        fit(run, 20, hooks=[PressCtrlC()], checkpointer=checkpointer)
    assert signal.getsignal(signal.SIGINT) is before
    again = new_run(tmp_path / "run")
    got = fit(again, 20, hooks=[Hook()], checkpointer=Checkpointer(tmp_path / "run/checkpoints", every=100))
    assert got == fit(new_run(), 20)


@pytest.mark.parametrize("stop", [4, 5, 7])
def test_every_line_averages_the_steps_since_the_one_before_it(tmp_path: Path, stop: int) -> None:
    """Also the first one after a resume, wherever the run was saved and stopped."""

    class Stop(Hook):
        def after_step(self, run: Run) -> None:
            if run.step == stop:
                os.kill(os.getpid(), signal.SIGINT)

    each = fit(new_run(), 8)
    run, options = new_run(tmp_path), {"schedule": warmup_cosine(1e-2, warmup=3, steps=20), "log_every": 3}
    for hook in (Stop(), Hook()):
        checkpointer = Checkpointer(tmp_path / "checkpoints", every=5)
        with contextlib.suppress(Interrupted):
            train(run, Rows(), CrossEntropy(), steps=8, hooks=[hook], checkpointer=checkpointer, **options)
        run = new_run(tmp_path)
    rows, last = run.log.history, 0
    assert [row["step"] for row in rows] == sorted({3, 5, 6, 8, stop})
    for row in rows:  # every step of Rows counts as many tokens
        assert row["loss"] == pytest.approx(statistics.fmean(each[last : row["step"]]))
        last = row["step"]


def test_the_speed_is_that_of_the_steps_it_is_said_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes a second, an evaluation a hundred, which is no time of training."""
    clock = [0.0]
    monkeypatch.setattr("shoestring.train.trainer.time.perf_counter", lambda: clock[0])

    class Tick(Hook):
        def after_step(self, run: Run) -> None:
            clock[0] += 1

    def evaluate(run: Run) -> dict[str, float]:
        clock[0] += 100
        return {"val_loss": 1.0}

    run = new_run()
    train(run, Rows(), CrossEntropy(), steps=8, hooks=[Tick()], log_every=4, evaluate=evaluate, eval_every=3)
    speeds = [row["tokens_per_s"] for row in run.log.history if "tokens_per_s" in row]
    assert len(speeds) == 4 and speeds == [46.0] * 4  # 3, 4, 6 and 8


def test_norms_and_biases_do_not_decay() -> None:
    run = new_run()
    decays = {id(p): group["weight_decay"] for group in run.optimizer.param_groups for p in group["params"]}
    for name, param in run.model.named_parameters():
        assert (decays[id(param)] > 0) == (param.dim() >= 2), name


@pytest.mark.parametrize("turned", [False, True])
def test_a_fused_step_on_a_cpu_is_right_for_every_stride(turned: bool) -> None:
    """torch's fused kernel for CPUs goes through memory without strides."""
    linear = nn.Linear(6, 4)
    twin = nn.Linear(6, 4)
    twin.load_state_dict(linear.state_dict())
    if turned:  # a view into a larger tensor
        linear.weight = nn.Parameter(torch.cat([linear.weight.detach(), torch.ones(4, 3)], dim=1)[:, :6])
    ours = adamw(linear, lr=0.1)
    groups = [{"params": [twin.weight], "weight_decay": 0.1}, {"params": [twin.bias], "weight_decay": 0.0}]
    plain = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95), fused=False)
    for model, optimizer in ((linear, ours), (twin, plain)):
        for seed in range(2):
            optimizer.zero_grad()
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
            model(x).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(linear.weight, twin.weight)
    assert bool(ours.defaults["fused"]) != turned


def test_clipping_matches_torch() -> None:
    run, other = new_run(), new_run()
    for r in (run, other):
        CrossEntropy()(r.model, Rows().step(0)[0]).backward()
    got = clip_gradients(run.model.parameters(), 0.3)
    want = torch.nn.utils.clip_grad_norm_(other.model.parameters(), 0.3)
    torch.testing.assert_close(got, want)
    for a, b in zip(run.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_schedules() -> None:
    cosine = warmup_cosine(1.0, warmup=4, steps=11, floor=0.1)
    assert [cosine(s) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert cosine(4) == 1.0 and abs(cosine(7) - 0.55) < 1e-9 and abs(cosine(10) - 0.1) < 1e-9
    stable = warmup_stable_decay(1.0, warmup=2, steps=10, decay=0.2)
    assert [stable(s) for s in (0, 1, 2, 7, 8, 9)] == [0.5, 1.0, 1.0, 1.0, 1.0, 0.5]


def test_a_mesh_that_does_not_fit_says_how_to_start_it() -> None:
    refused(
        r"needs 4 processes but 1 is running.*torchrun --nproc-per-node 4", open_mesh, MeshConfig(dp=2, tp=2), "cpu"
    )
    refused(r"mesh\.timeout_s=0 is not possible", open_mesh, MeshConfig(timeout_s=0), "cpu")


def test_init_is_keyed_by_name_and_seed() -> None:
    a, b = new_run().model, new_run().model
    assert same(a.state_dict(), b.state_dict())
    init_weights(b, seed=1)  # type: ignore[arg-type]
    assert not torch.equal(a.blocks[0].attn.q.weight, b.blocks[0].attn.q.weight)  # type: ignore[union-attr,index]
    assert not torch.equal(a.blocks[0].attn.q.weight, a.blocks[1].attn.q.weight)  # type: ignore[union-attr,index]


def test_one_process_needs_no_process_group() -> None:
    mesh = Mesh(0, 1, torch.device("cpu"))
    assert mesh.sum(torch.ones(())).item() == 1 and not mesh.any(False) and mesh.broadcast_object("x") == "x"
    assert mesh.axis("dp") is None and not torch.distributed.is_initialized()
