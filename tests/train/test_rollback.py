"""Going back after a NaN or a loss spike: to the version before it, without the data that led there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from refusals import refused
from shoestring.mesh import Mesh
from shoestring.runlog import RunLog
from shoestring.state.checkpointer import Checkpointer
from shoestring.state.levels.host_folder import host_folder, list_copies
from shoestring.state.levels.place import HostPlace
from shoestring.state.levels.settings import CheckpointConfig, LevelsConfig
from shoestring.train.rollback import BadStepError, LossWatch, SkippedSteps
from shoestring.train.step import Micro, Run
from shoestring.train.trainer import train


class Rows:
    """Row `step` is full of its number."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def step(self, step: int) -> list[Micro]:
        self.seen.append(step)
        tokens = torch.full((1, 4), step, dtype=torch.int64)
        return [Micro(tokens, tokens, tokens)]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class NanAt:
    """The loss of these rows is NaN."""

    def __init__(self, *rows: int) -> None:
        self.rows = rows

    def count(self, micro: Micro) -> int:
        return micro.num_counted

    def __call__(self, model: nn.Module, micro: Micro) -> Tensor:
        loss = model(micro.tokens_BT.float() / 100).square().sum()
        return loss * float("nan") if int(micro.tokens_BT[0, 0]) in self.rows else loss

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def make_run() -> Run:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Run(model, optimizer, Mesh(0, 1, torch.device("cpu")), RunLog(None, quiet=True))


def test_auto_goes_back_and_leaves_the_data_out(tmp_path: Path) -> None:
    run, rows = make_run(), Rows()
    saver = Checkpointer(tmp_path / "checkpoints", every=4)
    train(run, rows, NanAt(6), steps=10, checkpointer=saver, log_every=1, rollback="auto")
    assert run.step == 10 and bool(torch.isfinite(run.model.weight).all())
    assert rows.seen == [0, 1, 2, 3, 4, 5, 6, *range(7, 13)]  # back to 4 steps, with the rows from 7 on
    # A run that is resumed later sees the same rows.
    again, rows = make_run(), Rows()
    train(again, rows, NanAt(6), steps=12, checkpointer=Checkpointer(tmp_path / "checkpoints", every=4))
    assert rows.seen == [11, 12, 13, 14]  # from step 8


def test_two_bad_rows_after_one_version_are_both_left_out(tmp_path: Path) -> None:
    # The version of step 4 does not know that row 6 was left out when row 8 is found.
    run, rows = make_run(), Rows()
    saver = Checkpointer(tmp_path / "checkpoints", every=4)
    train(run, rows, NanAt(6, 8), steps=10, checkpointer=saver, log_every=1, rollback="auto")
    assert rows.seen == [*range(7), 7, 8, *range(9, 15)]


def test_off_and_ask_stop_and_the_bad_state_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOESTRING_MEMORY_DIR", str(tmp_path))
    monkeypatch.setattr(HostPlace, "start_agent", lambda self: None)
    settings = CheckpointConfig(checkpoint="auto", levels=LevelsConfig(mttf_hours=1e-9, budget=0.5))
    run = make_run()
    saver = Checkpointer(tmp_path / "run" / "checkpoints", settings)
    refused(
        r"step 7: .*NaN.*goes on from the newest version before step 7", train, run, Rows(), NanAt(6), steps=10,
        checkpointer=saver, log_every=1, rollback="ask",
    )  # fmt: skip
    saver.let_go()
    # As if a GPU had noticed late: versions from step 4 on are discarded.
    saver = Checkpointer(tmp_path / "run" / "checkpoints", settings)
    run = make_run()
    saver.discard(run, 4)
    assert all(c.copy.step < 4 for c in list_copies(host_folder(tmp_path / "run"))[0])
    saver.let_go()
    run = make_run()
    saver = Checkpointer(tmp_path / "run" / "checkpoints", settings)
    with pytest.raises(BadStepError, match="step 7"):
        train(run, Rows(), NanAt(6), steps=10, checkpointer=saver, log_every=1)
    saver.let_go()


def test_the_same_version_is_used_three_times_at_most() -> None:
    skipped = SkippedSteps()
    for count in range(3):
        skipped.go_back(BadStepError("", 10 + count))
        skipped.begin(8)
    assert skipped.windows == [(8, 2), (8, 3), (8, 4)] and skipped.data_step(8) == 17 and skipped.data_step(7) == 7
    skipped.go_back(BadStepError("", 11))
    refused("the data is not the reason", skipped.begin, 8)
    other = SkippedSteps()
    other.load_state_dict(skipped.state_dict())
    assert other.windows == skipped.windows


def test_a_spike_is_far_above_the_recent_losses() -> None:
    watch = LossWatch()
    for step in range(1, 31):
        watch.see(10 * step, 3.0 + 0.05 * (step % 3))
    with pytest.raises(BadStepError, match="the loss is 9") as caught:
        watch.see(310, 9.0)
    assert (caught.value.step, caught.value.until) == (301, 310)  # the steps since the last good line
    # The data of all of them is left out: any may be the reason.
    skipped = SkippedSteps()
    skipped.go_back(caught.value)
    skipped.begin(300)
    assert skipped.data_step(300) == 310
