"""Checkpoints of a run on one process: exact resume, names, pruning, and what does not fit."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from shoestring.errors import UserError
from shoestring.mesh import Mesh
from shoestring.state.checkpoint import latest, load_checkpoint, prune, save_checkpoint, step_folder
from shoestring.state.checkpoint_files import OLD, hidden
from shoestring.state.checkpointer import Checkpointer
from shoestring.state.manifest import read_manifest
from shoestring.state.optimizer import optimizer_state
from shoestring.state.run_state import flatten, seed_rng, unflatten


class Net(nn.Module):
    """Dropout (needs the generator), a frozen weight, an integer parameter, a buffer, a compiled block."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.Parameter(torch.randn(8, 8), requires_grad=False)
        self.mask = nn.Parameter(torch.randint(0, 2, (8,), dtype=torch.int8), requires_grad=False)
        self.unused = nn.Linear(3, 3)
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.block(self.first(x)), 0.3, self.training)
        return self.last(self.norm(x) @ self.frozen * self.mask)


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


class Log:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


class Data:
    """A part with a cursor, a growing list and a tensor."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"cursor": 0, "seen": [], "sums": torch.zeros(2), "private": {"lag": None}}

    def batch(self) -> torch.Tensor:
        x = torch.randn(16, 6)
        self.state["cursor"] += 16
        self.state["seen"].append(float(x.sum()))
        self.state["sums"] += x.sum()
        self.state["private"]["lag"] = ("lag", float(x[0, 0]))
        return x

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@dataclass
class Run:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: int = 0
    mesh: None = None
    log: Log = field(default_factory=Log)
    trained_only: bool = False


def new_run(seed: int = 0, lr: float = 0.01) -> tuple[Run, Data]:
    torch.manual_seed(seed)
    model = Net()
    groups = [
        {"params": list(model.first.parameters()), "lr": lr * 2},
        {"params": [p for n, p in model.named_parameters() if not n.startswith("first")]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.8, 0.9))
    return Run(model, optimizer), Data()


def train(run: Run, data: Data, steps: int, checkpointer: Checkpointer | None = None) -> list[float]:
    losses = []
    while run.step < steps:
        loss = run.model(data.batch()).square().mean()
        loss.backward()
        for group in run.optimizer.param_groups:
            group["lr"] *= 0.9
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.step += 1
        losses.append(loss.item())
        if checkpointer:
            checkpointer.after_step(run, {"data": data})
    return losses


def everything(run: Run, data: Data) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    state = {
        "model": run.model.state_dict(),
        "optimizer": optimizer_state(run.model, run.optimizer),
        "data": data.state_dict(),
        "rng": torch.get_rng_state(),
    }
    tensors, values = flatten(state)
    return {k: v.clone() for k, v in tensors.items()}, values


@pytest.mark.parametrize("at", [0, 3])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(at: int, tmp_path: Path) -> None:
    run, data = new_run()
    whole = train(run, data, 6)
    tensors, values = everything(run, data)

    run, data = new_run()
    checkpointer = Checkpointer(tmp_path, every=0)
    first = train(run, data, at)
    checkpointer.save(run, {"data": data})
    # Saving must not disturb the run that goes on (an optimizer that has not stepped, the generators).
    assert first + train(run, data, 6) == whole

    run, data = new_run(seed=99, lr=0.5)
    torch.manual_seed(1234)
    if at:
        run.model.block.compile(backend="eager")
    assert Checkpointer(tmp_path, every=0).resume(run, {"data": data})
    assert run.step == at and run.log.lines == [f"resumed from {step_folder(tmp_path, at)} at step {at}"]
    assert first + train(run, data, 6) == whole
    again_tensors, again_values = everything(run, data)
    assert again_values == values and again_tensors.keys() == tensors.keys()
    for name, t in tensors.items():
        assert again_tensors[name].dtype == t.dtype and torch.equal(again_tensors[name], t), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_resumed_run_on_a_gpu_goes_on_with_its_generator(tmp_path: Path) -> None:
    def start(seed: int) -> Run:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)).cuda()
        return Run(model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True))

    def steps(run: Run, number: int) -> list[float]:
        losses = []
        for _ in range(number):
            loss = run.model(torch.randn(4, 8, device="cuda")).square().mean()
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.step += 1
            losses.append(loss.item())
        return losses

    run = start(0)
    steps(run, 2)
    Checkpointer(tmp_path, every=0).save(run, {})
    rest = steps(run, 3)
    again = start(1)
    assert Checkpointer(tmp_path, every=0).resume(again, {}) and again.step == 2
    assert steps(again, 3) == rest
    assert all(p.is_cuda for state in again.optimizer.state.values() for p in state.values())


def test_what_a_checkpoint_holds(tmp_path: Path) -> None:
    run, data = new_run()
    train(run, data, 2, Checkpointer(tmp_path, every=2))
    saved = read_manifest(step_folder(tmp_path, 2))
    assert saved.step == 2 and saved.values["step"] == 2
    assert saved.tensors["model.mask"].dtype == torch.int8 and "model.frozen" in saved.tensors
    assert "model.norm.running_mean" in saved.tensors
    assert saved.tensors["optimizer.state.block.0.weight.exp_avg"].shape == (8, 8)
    assert saved.tensors["optimizer.state.block.0.weight.step"].shape == ()
    assert not any("frozen" in n or "unused" in n for n in saved.tensors if n.startswith("optimizer"))
    groups = saved.values["optimizer.param_groups"]
    assert groups[0]["lr"] == 0.02 * 0.9 * 0.9 and groups[0]["betas"] == {"__tuple__": [0.8, 0.9]}
    assert groups[0]["params"] == ["first.weight", "first.bias"]
    assert saved.values["parts.data.seen"] == data.state["seen"] and "rng.private@dp0-tp0.cpu" in saved.tensors
    assert saved.values["parts.data.private@dp0-tp0"] == {
        "lag": {"__tuple__": ["lag", data.state["private"]["lag"][1]]}
    }


def test_which_kernels_step_is_not_taken_from_a_checkpoint(tmp_path: Path) -> None:
    run, data = new_run()  # not fused, as runs on a CPU were
    train(run, data, 2, Checkpointer(tmp_path, every=1))
    resumed, data = new_run()
    for group in resumed.optimizer.param_groups:
        group["fused"] = True
    Checkpointer(tmp_path, every=1).resume(resumed, {"data": data})
    assert resumed.step == 2 and [g["fused"] for g in resumed.optimizer.param_groups] == [True, True]
    assert resumed.optimizer.param_groups[0]["lr"] == run.optimizer.param_groups[0]["lr"]
    train(resumed, data, 3)


@pytest.mark.parametrize("wrapped_saves", [True, False])
def test_names_do_not_depend_on_compile_and_recompute_wrappers(wrapped_saves: bool, tmp_path: Path) -> None:
    def wrapped(run: Run) -> None:
        run.model.first = checkpoint_wrapper(run.model.first)
        run.model.block = torch.compile(run.model.block, backend="eager")

    (saver, data), (loader, _) = new_run(), new_run(1)
    train(saver, data, 2)
    wrapped(saver if wrapped_saves else loader)
    Checkpointer(tmp_path, every=0).save(saver, {})
    assert Checkpointer(tmp_path, every=0).resume(loader, {})
    for a, b in zip(saver.model.parameters(), loader.model.parameters(), strict=True):
        assert torch.equal(a, b)
        assert saver.optimizer.state.get(a, {}).keys() == loader.optimizer.state.get(b, {}).keys()
        for key, value in saver.optimizer.state.get(a, {}).items():
            assert torch.equal(value, loader.optimizer.state[b][key])


def test_state_in_another_dtype_than_its_parameter_stays_exact(tmp_path: Path) -> None:
    def make() -> tuple[nn.Linear, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 3).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(1, 3).bfloat16()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for state in optimizer.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].float() + 1e-4
        return model, optimizer

    model, optimizer = make()
    Checkpointer(tmp_path, every=0).save(Run(model, optimizer), {})
    want = optimizer.state[model.weight]["momentum_buffer"].clone()
    other, other_optimizer = make()
    other_optimizer.state[other.weight]["momentum_buffer"].zero_()
    Checkpointer(tmp_path, every=0).resume(Run(other, other_optimizer), {})
    got = other_optimizer.state[other.weight]["momentum_buffer"]
    assert got.dtype == torch.float32 and torch.equal(got, want)


def test_nothing_to_resume(tmp_path: Path) -> None:
    run, data = new_run()
    assert Checkpointer(tmp_path / "none", every=1).resume(run, {"data": data}) is False
    assert latest(tmp_path / "none") is None and run.step == 0


def test_saves_on_time_keeps_the_newest_and_saves_a_step_once(tmp_path: Path) -> None:
    run, data = new_run()
    checkpointer = Checkpointer(tmp_path, every=2, keep=2)
    train(run, data, 7, checkpointer)
    assert names(tmp_path) == ["step-00000004", "step-00000006"]
    checkpointer.save(run, {"data": data})
    before = (tmp_path / "step-00000007").stat().st_ino
    checkpointer.save(run, {"data": data})
    assert (tmp_path / "step-00000007").stat().st_ino == before
    with pytest.raises(UserError, match="keep >= 1"):
        Checkpointer(tmp_path, every=1, keep=0)


def test_prune_and_latest_look_at_complete_checkpoints_only(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        save_checkpoint(step_folder(tmp_path, step), {"a": torch.zeros(1)}, step=step)
    (tmp_path / "step-00000099").mkdir()
    (tmp_path / ".shoestring-new-step-00000098").mkdir()
    (tmp_path / "notes").mkdir()
    assert latest(tmp_path) == step_folder(tmp_path, 10)
    assert prune(tmp_path, 2) == [step_folder(tmp_path, 1)]
    assert prune(tmp_path, 0) == [step_folder(tmp_path, 2)]
    assert prune(tmp_path, 1) == []
    left = [".shoestring-new-step-00000098", "notes", "step-00000010", "step-00000099"]
    assert names(tmp_path) == left


def test_a_crash_while_replacing_puts_the_old_one_back(tmp_path: Path) -> None:
    run, data = new_run()
    train(run, data, 2, Checkpointer(tmp_path, every=2))
    path = step_folder(tmp_path, 2)
    path.rename(hidden(path, OLD))
    hidden(path, ".shoestring-new-").mkdir()
    run, data = new_run(1)
    assert Checkpointer(tmp_path, every=2).resume(run, {"data": data}) and run.step == 2
    assert names(tmp_path) == ["step-00000002"]


@pytest.mark.parametrize("damage", ["flipped", "cut", "no manifest", "no part"])
def test_a_damaged_newest_checkpoint_is_said_and_the_one_before_it_used_when_told(damage: str, tmp_path: Path) -> None:
    run, data = new_run()
    train(run, data, 4, Checkpointer(tmp_path, every=2))
    newest = step_folder(tmp_path, 4)
    part = newest / "part-00000.safetensors"
    if damage == "flipped":
        part.write_bytes(part.read_bytes()[:-1] + bytes([part.read_bytes()[-1] ^ 1]))
    elif damage == "cut":
        os.truncate(part, 100)
    else:
        (part if damage == "no part" else newest / "manifest.json").unlink()
    held = {p.name: p.read_bytes() for p in newest.iterdir()}

    run, data = new_run(1)
    with pytest.raises(UserError) as refused:
        Checkpointer(tmp_path, every=2).resume(run, {"data": data})
    said = str(refused.value)
    assert said.startswith("the checkpoint step-00000004 cannot be used: ") and "delete" not in said
    assert said.endswith("; resume_from=previous goes on from step-00000002 and sets this one aside")
    assert run.step == 0 and names(tmp_path) == ["step-00000002", "step-00000004"]

    run, data = new_run(1)
    previous = Checkpointer(tmp_path, every=2, resume_from="previous")
    assert previous.resume(run, {"data": data}) and run.step == 2
    assert names(tmp_path) == ["step-00000002", "step-00000004.set-aside"]
    assert {p.name: p.read_bytes() for p in (tmp_path / "step-00000004.set-aside").iterdir()} == held
    assert run.log.lines[-1] == (
        f"the newer checkpoint step-00000004 is set aside as {tmp_path / 'step-00000004.set-aside'}"
    )
    train(run, data, 4, previous)
    assert names(tmp_path) == ["step-00000002", "step-00000004", "step-00000004.set-aside"]

    shutil.rmtree(step_folder(tmp_path, 2))
    (newest / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"no other one is there: start a new run, or get this one from a backup"):
        Checkpointer(tmp_path, every=2).resume(*new_run_with_parts())
    with pytest.raises(UserError, match=r"resume_from=previous: .*step-00000004 is the only checkpoint"):
        Checkpointer(tmp_path, every=2, resume_from="previous").resume(*new_run_with_parts())


def new_run_with_parts() -> tuple[Run, dict[str, Any]]:
    run, data = new_run()
    return run, {"data": data}


def test_a_seed_covers_the_generators_that_are_saved(tmp_path: Path) -> None:
    def losses(seed: int, before: int) -> list[float]:
        run, data = new_run()
        torch.manual_seed(before)  # what the process has drawn until then
        checkpointer = Checkpointer(tmp_path / str(seed), every=0, seed=seed)
        assert not checkpointer.resume(run, {"data": data})
        return train(run, data, 3)

    assert losses(5, before=1) == losses(5, before=2) != losses(6, before=1)
    shares = []
    for dp_rank in range(2):
        seed_rng(5, Mesh(dp_rank, 2, torch.device("cpu"), dp=2))
        shares.append(float(torch.rand(())))
    assert shares[0] != shares[1]


def test_a_checkpoint_that_does_not_fit_is_explained(tmp_path: Path) -> None:
    run, data = new_run()
    Checkpointer(tmp_path, every=0).save(run, {"data": data})

    def resume(model: nn.Module, parts: dict[str, Any]) -> None:
        optimizer = torch.optim.AdamW(model.parameters())
        Checkpointer(tmp_path, every=0).resume(Run(model, optimizer), parts)

    wide = Net()
    wide.last = nn.Linear(8, 2)
    with pytest.raises(UserError, match=r"last.bias \(saved torch.float32 \[1\], here torch.float32 \[2\]\)"):
        resume(wide, {"data": data})
    more = Net()
    more.extra = nn.Linear(2, 2)
    with pytest.raises(UserError, match=r"2 missing in the checkpoint: model.extra.bias, model.extra.weight"):
        resume(more, {"data": data})
    less = Net()
    del less.norm
    with pytest.raises(UserError, match=r"5 not expected here: model.norm.bias, .*, \.\.\.; resume with"):
        resume(less, {"data": data})
    with pytest.raises(UserError, match=r"saved torch\.float32 \[8\], here torch\.float64"):
        resume(Net().double(), {"data": data})
    with pytest.raises(UserError, match=r"not expected here: parts.data.cursor"):
        resume(Net(), {})
    with pytest.raises(UserError, match="parameter groups"):
        resume(Net(), {"data": data})


def test_an_optimizer_over_other_parameters_is_refused(tmp_path: Path) -> None:
    run = Run(Net(), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0))
    with pytest.raises(UserError, match="not the model's"):
        Checkpointer(tmp_path, every=0).save(run, {})


def test_flatten_and_unflatten_nested_state() -> None:
    t = torch.arange(3)
    state = {"a": [1, {"b": t, "c": (1, None)}], "private": {"x": t, "y": 2}, "e": {}, "t": (t, "s")}
    tensors, values = flatten(state, "dp1-tp0")
    assert set(tensors) == {"a.1.b", "private@dp1-tp0.x", "t.0"}
    assert values == {"a.0": 1, "a.1.c": {"__tuple__": [1, None]}, "private@dp1-tp0.y": 2, "e": {}, "t.1": "s"}
    values = {"a.0": 5, "a.1.c": [7], "e": {"k": 1}, "t.1": "u"}
    assert unflatten(state, values, "dp1-tp0") == ["private@dp1-tp0.y"]
    assert state["a"][0] == 5 and state["a"][1]["c"] == [7] and state["a"][1]["b"] is t
    assert state["e"] == {"k": 1} and state["t"] == (t, "u") and state["private"] == {"x": t, "y": 2}


def test_private_entries_of_another_place_are_reported(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", {"w": torch.ones(2), "private": {"a": torch.ones(1), "n": 1}})
    state = {"w": torch.zeros(2), "private": {"a": torch.zeros(1), "n": 2, "late": torch.zeros(1)}}
    assert load_checkpoint(tmp_path / "c", state) == ["private@dp0-tp0.late"]
    assert state["private"]["a"].item() == 1 and state["private"]["n"] == 1


def test_a_branch_may_gain_and_lose_private_tensors(tmp_path: Path) -> None:
    """A reducer has residuals or not, by the method that is chosen at a start; the rest of the branch is one value or
    several then."""

    def state(step: int, residual: bool, **more: Any) -> dict[str, Any]:
        private = {"residual": {"private@replica0": {"w": torch.full((3,), float(step))}}} if residual else {}
        reducer = {"steps": step, "note": None, **private}
        return {
            "parts": {
                "data": {"seed": step},
                "hooks.0": {},
                "private@skipped": {"at": step},
                "reducer": reducer,
                **more,
            }
        }

    for residual in (False, True):
        path = tmp_path / str(residual)
        save_checkpoint(path, state(5, residual))
        other = state(0, not residual)
        absent = load_checkpoint(path, other)
        assert absent == ([] if residual else ["parts.reducer.residual.private@replica0.w"])
        parts = other["parts"]
        assert parts["data"] == {"seed": 5} and parts["private@skipped"] == {"at": 5} and parts["hooks.0"] == {}
        assert (parts["reducer"]["steps"], parts["reducer"]["note"]) == (5, None)
        # What is shared must still be there, and nothing else.
        with pytest.raises(UserError, match=r"does not fit this run: .*missing in the checkpoint: parts"):
            load_checkpoint(path, state(0, not residual, more={"a": 1}))
        save_checkpoint(tmp_path / f"more-{residual}", state(5, residual, more={"a": 1}))
        with pytest.raises(UserError, match=r"1 not expected here: parts\.more"):
            load_checkpoint(tmp_path / f"more-{residual}", state(0, not residual))
