"""The levels in a foreign loop: the program of docs/guides/crashes.md, run again after its end; settings."""

from __future__ import annotations

import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shoestring.config import apply_overrides, from_json, to_json
from shoestring.errors import UserError
from shoestring.state.levels.cache import CheckpointCache
from shoestring.state.levels.host_folder import host_folder
from shoestring.state.levels.place import HostPlace
from shoestring.state.levels.settings import CheckpointConfig, LevelsConfig, check_checkpoints

PAGE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "crashes.md"
SETTINGS = CheckpointConfig(checkpoint="auto", levels=LevelsConfig(mttf_hours=1e-9, budget=0.5))


@pytest.fixture(autouse=True)
def in_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "memory").mkdir()
    monkeypatch.setenv("SHOESTRING_MEMORY_DIR", str(tmp_path / "memory"))
    monkeypatch.setattr(HostPlace, "start_agent", lambda self: None)


def test_the_program_of_the_page_runs_twice(capsys: pytest.CaptureFixture[str]) -> None:
    program = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), flags=re.DOTALL)[0]
    exec(compile(program, str(PAGE), "exec"), {"__name__": "__main__"})
    exec(compile(program, str(PAGE), "exec"), {"__name__": "__main__"})
    assert "resumed from disk at step 20" in capsys.readouterr().out


class Loader:
    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def start() -> tuple[torch.nn.Module, torch.optim.Optimizer, Loader, CheckpointCache]:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loader = Loader()
    cache = CheckpointCache("mine", model, optimizer, parts={"loader": loader}, settings=SETTINGS, quiet=True)
    return model, optimizer, loader, cache


def test_a_loop_goes_on_where_it_was() -> None:
    model, optimizer, loader, cache = start()
    assert cache.load() == 0
    for step in range(5):
        model(torch.ones(2, 8) * step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        loader.at = 10 * (step + 1)
        cache._saver.save_next()
        cache.step(step + 1)
        if cache._saver.memory is not None:
            cache._saver.memory.touch_now()
            cache._saver.memory.wait()
    with pytest.raises(UserError, match="is in use by process"):
        start()
    cache.close()
    other, _, loader, cache = start()
    assert cache.load() == 5 and loader.at == 50
    assert torch.equal(other.weight, model.weight)
    shutil.rmtree(host_folder(Path("mine")))  # as the agent of a run that has ended does
    cache.close(finished=True)
    assert (Path("mine") / "checkpoints" / "step-00000005" / "manifest.json").is_file()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"levels": LevelsConfig(budget=0.0)}, r"levels\.budget=0\.0 is not possible"),
        ({"levels": LevelsConfig(mttf_hours=-1.0)}, r"levels\.mttf_hours"),
        ({"levels": LevelsConfig(peer_gbps=0.0)}, r"levels\.peer_gbps"),
        ({"levels": LevelsConfig(remote_timeout_s=0.0)}, r"levels\.remote_timeout_s"),
        ({"levels": LevelsConfig(mttf_hours=math.inf)}, r"levels\.mttf_hours=inf is not possible"),
        (
            {"levels": LevelsConfig(peer_gbps=1.0)},
            r"levels\.peer_gbps=1 limits copies to peers, and levels\.peer is off",
        ),
        (
            {"checkpoint": "fixed", "levels": LevelsConfig(peer="replica")},
            r"levels\.peer=replica is a setting of checkpoint=auto",
        ),
        ({"checkpoint": "fixed", "preempt_s": 30.0}, r"preempt_s=30 is a setting of checkpoint=auto"),
    ],
)
def test_settings_that_cannot_work(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_checkpoints(CheckpointConfig(**{"checkpoint": "auto", **change}))


def test_runs_of_xor_sets_are_told_what_to_give_instead() -> None:
    with pytest.raises(UserError, match=r"levels\.peer=xor is retired: levels\.peer=replica keeps"):
        apply_overrides(CheckpointConfig, ["levels.peer=xor"])
    with pytest.raises(UserError, match=r"levels\.xor_set is retired: levels\.peer=replica needs no sets"):
        apply_overrides(CheckpointConfig, ["levels.xor_set=3"])
    saved = to_json(CheckpointConfig(checkpoint="auto"))
    levels = {**saved["levels"], "xor_set": 4}
    assert from_json(CheckpointConfig, {**saved, "levels": levels}) == CheckpointConfig(checkpoint="auto")
    with pytest.raises(UserError, match=r"peer=xor in the saved config\.json is retired"):
        from_json(CheckpointConfig, {**saved, "levels": {**levels, "peer": "xor"}})


@pytest.mark.parametrize(
    "saved",
    [
        CheckpointConfig(preempt_s=30.0),
        CheckpointConfig(levels=LevelsConfig(remote="s3://bucket/run", budget=0.02)),
        CheckpointConfig(checkpoint="auto", levels=LevelsConfig(peer_gbps=1.0)),
    ],
)
def test_settings_without_effect_are_refused_only_where_a_resumed_run_does_not_have_them(
    saved: CheckpointConfig,
) -> None:
    with pytest.raises(UserError):
        check_checkpoints(saved)
    check_checkpoints(saved, saved=to_json(saved))
    check_checkpoints(replace(saved, checkpoint="fixed"), saved=to_json(saved))
    check_checkpoints(replace(saved, checkpoint="fixed", levels=LevelsConfig()), saved=to_json(saved))
    new = replace(saved, checkpoint="fixed", levels=replace(saved.levels, agent_idle=7.0))
    with pytest.raises(UserError, match=r"levels\.agent_idle=7 is a setting of checkpoint=auto: give that too"):
        check_checkpoints(new, saved=to_json(saved))
    with pytest.raises(UserError, match="is not possible"):
        check_checkpoints(replace(saved, checkpoint="auto", levels=LevelsConfig(budget=0.0)), saved=to_json(saved))
