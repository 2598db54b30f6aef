"""Settings of checkpoints in levels, as training recipes have them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from shoestring.config import Retired, option, to_json
from shoestring.errors import UserError


@dataclass(frozen=True)
class LevelsConfig:
    """Of `checkpoint=auto`; the defaults need no change on one machine."""

    RETIRED: ClassVar[dict[str, Retired]] = {
        "peer=xor": Retired(None, "levels.peer=replica keeps the state in memory of another host"),
        "xor_set": Retired(4, "levels.peer=replica needs no sets of hosts"),
    }
    mttf_hours: float | None = option(None, "expected hours between failures; none: from the number of processes")
    budget: float = option(0.01, "largest share of the time that saving at one level may cost")
    agent_idle: float = option(1800.0, "seconds that copies in memory are kept after the trainer has ended", least=0)
    peer: Literal["off", "replica"] = option("off", "also keep each process's state in memory of another host")
    peer_gbps: float | None = option(None, "most Gbit/s for copies to peers; none: half of what is measured")
    remote: str | None = option(None, "fsspec URL for copies on remote storage, such as s3://bucket/run")
    remote_timeout_s: float = option(60.0, "seconds that one operation on remote storage may take")


@dataclass(frozen=True)
class CheckpointConfig:
    """How a training recipe saves, beside `save_every`."""

    checkpoint: Literal["fixed", "auto"] = option(
        "fixed", "fixed: to disk every save_every steps; auto: memory, disk, ... at measured intervals", advanced=True
    )
    keep_last: int = option(2, "number of newest checkpoints to keep on disk", least=1, advanced=True)
    keep_every: int = option(
        0, "also keep checkpoints whose step is a multiple of this; 0 is off", least=0, advanced=True
    )
    keep_best: int = option(0, "also keep this many with the lowest validation loss", least=0, advanced=True)
    rollback: Literal["off", "ask", "auto"] = option(
        "off",
        "after a NaN or a loss spike: stop; stop and name the version to use; or go back and skip the data",
        advanced=True,
    )
    preempt_s: float | None = option(
        None,
        "seconds from SIGTERM to the end of the machine; the agent finishes what does not fit",
        least=0,
        advanced=True,
    )
    levels: LevelsConfig = option(LevelsConfig(), "details of checkpoint=auto")


def check_checkpoints(cfg: CheckpointConfig, *, saved: Mapping[str, Any] | None = None) -> None:
    """`saved`: the settings that a resumed run has, of which those without effect are no reason to refuse it."""
    if not 0 < cfg.levels.budget <= 0.5:
        raise UserError(f"levels.budget={cfg.levels.budget} is not possible; give more than 0 and at most 0.5")
    if cfg.levels.mttf_hours is not None and not 0 < cfg.levels.mttf_hours < math.inf:
        raise UserError(f"levels.mttf_hours={cfg.levels.mttf_hours} is not possible; give more than 0, or leave it out")
    if cfg.levels.peer_gbps is not None and not cfg.levels.peer_gbps > 0:
        raise UserError(f"levels.peer_gbps={cfg.levels.peer_gbps} is not possible; give more than 0")
    if not cfg.levels.remote_timeout_s > 0:
        raise UserError(f"levels.remote_timeout_s={cfg.levels.remote_timeout_s} is not possible; give more than 0")
    given = _set_by_user(to_json(cfg), saved or {})
    if cfg.checkpoint == "fixed" and given:
        key, value = next(iter(given.items()))
        text = f"{value:g}" if isinstance(value, float) else value
        raise UserError(f"{key}={text} is a setting of checkpoint=auto: give that too, or leave {key} out")
    if "levels.peer_gbps" in given and cfg.levels.peer == "off":
        raise UserError(
            f"levels.peer_gbps={cfg.levels.peer_gbps:g} limits copies to peers, and levels.peer is off: give "
            "levels.peer=replica, or leave it out"
        )


def _set_by_user(settings: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """preempt_s and levels.* that are neither the usual ones nor those of the run that is resumed."""

    def flat(some: Mapping[str, Any]) -> dict[str, Any]:
        levels = {f"levels.{key}": value for key, value in (some.get("levels") or {}).items()}
        return {"preempt_s": some.get("preempt_s"), **levels}

    usual, before = flat(to_json(CheckpointConfig())), flat(saved)
    return {k: v for k, v in flat(settings).items() if v not in (usual[k], before.get(k, usual[k]))}
