"""The settings and stages of shrink/ptq: checks, the method, mixed bits under a budget."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from shoestring.config import option, to_json
from shoestring.evals.model_row import check_apart
from shoestring.formats import Format
from shoestring.host.block_offload import check_spill
from shoestring.model.blocks import BlocksModel
from shoestring.runlog import RunLog, check_outputs, write_atomically
from shoestring.shrink.blockwise import Blockwise
from shoestring.shrink.calibrate import Calibration
from shoestring.shrink.clip import Clip
from shoestring.shrink.gptq import Gptq
from shoestring.shrink.mixed_bits import MixedBits, choose_by_damage
from shoestring.shrink.quality_gate import FORCE_HELP, MAX_HELP, MAX_PERPLEXITY, VERIFY_HELP
from shoestring.shrink.quantize import METHODS, Method, usual_inputs
from shoestring.shrink.shrink_run import check_start
from shoestring.shrink.whole_model import EMBED, EMBED_HELP

# PtqSettings that finished blocks, and the perplexity before, depend on.
DECIDING = (
    *("model", "format", "rules", "embed", "method", "calib", "calib_windows", "calib_context", "inputs", "weigh"),
    *("act_order", "damping", "objective", "dtype"),
    *("init", "train", "epochs", "train_batch", "lr_weight", "lr_scale", "lr_zero", "lr_norm", "loss"),
    *("held_out", "seed", "bits_budget", "candidates", "damage_windows", "damage_units"),
    *("text", "data", "context", "max_tokens"),
)
DAMAGE = "damage.jsonl"  # finished trials of bits_budget


@dataclass(frozen=True)
class PtqSettings:
    model: str = option("", "a Hugging Face folder, a run folder or a .gguf file; required without resume=")
    format: str = option("nf3", "for all linear layers: int2 int3 int4 int8 nf2 nf3 nf4 fp3 fp4, with :g128 :s1")
    rules: str | None = option(None, "instead of format: glob=format;glob=format, the first that matches wins")
    embed: str = option(EMBED, EMBED_HELP)
    method: Literal["gptq", "gptq+clip", "gptq+cd", "gptq+clip+cd", "awq", "clip", "rtn", "blockwise"] = option(
        "gptq+clip", "how weights are chosen; blockwise trains them with their scales and zero points"
    )
    calib: str | None = option(
        None,
        "calibration text or corpus, several with commas between, or own: what the model writes itself; none: a run's "
        "own training text, else own; not for rtn",
    )
    calib_windows: int = option(32, "windows of calibration text", least=1)
    calib_context: int = option(512, "tokens in a window", least=1)
    inputs: Literal["auto", "quantized", "full"] = option(
        "auto",
        "what a block sees: outputs of quantized or of full blocks; auto: as published for the method",
        advanced=True,
    )
    weigh: Literal["auto", "token", "square"] = option(
        "auto",
        "what a token counts in the statistics: token, all alike; square, by the squares of its inputs, as published; "
        "auto: token for gptq",
        advanced=True,
    )
    act_order: bool = option(True, "gptq: columns with large inputs first", advanced=True)
    damping: float = option(0.01, "gptq: added to the Hessian's diagonal, as a part of its mean", advanced=True)
    objective: Literal["group", "row"] = option(
        "group", "clip: output error of each group or of the whole row", advanced=True
    )
    init: Literal["awq", "clip", "gptq", "gptq+clip", "rtn"] = option(
        "awq", "blockwise: the method whose grids training starts from", advanced=True
    )
    train: Literal["all", "grid"] = option(
        "all", "blockwise: everything, or scales and zero points only (a learned clip)", advanced=True
    )
    epochs: int = option(4, "blockwise: passes over the calibration windows, for every block", least=1, advanced=True)
    train_batch: int = option(2, "blockwise: windows in a step", least=1, advanced=True)
    lr_weight: float = option(
        Blockwise.lr_weight,
        "blockwise: learning rate of weights, relative to a layer's rounding error",
        least=0,
        advanced=True,
    )
    lr_scale: float = option(
        Blockwise.lr_scale,
        "blockwise: learning rate of scales, relative to a layer's mean scale",
        least=0,
        advanced=True,
    )
    lr_zero: float = option(
        Blockwise.lr_zero, "blockwise: learning rate of zero points, in codes", least=0, advanced=True
    )
    lr_norm: float = option(
        Blockwise.lr_norm,
        "blockwise: learning rate of norms and biases, relative to their size; 0 freezes them",
        least=0,
        advanced=True,
    )
    held_out: float = option(
        Blockwise.held_out, "blockwise: share of the windows held out to judge the result", advanced=True
    )
    loss: Literal["token", "square"] = option(
        "token", "blockwise: weigh every token alike, or take plain squares", advanced=True
    )
    seed: int = option(0, "blockwise: random seed of the order of the windows", least=0, advanced=True)
    bits_budget: float | None = option(
        None, "instead of format: average bits per weight, distributed over the layers by measured damage"
    )
    candidates: str = option("int2,int3,int4", "bits_budget: the formats to choose from", advanced=True)
    damage_windows: int = option(
        4, "bits_budget: calibration windows that the damage is measured on", least=1, advanced=True
    )
    damage_units: Literal["layer", "block"] = option(
        "layer", "bits_budget: what gets a format of its own", advanced=True
    )
    stream: Literal["auto", "true", "false"] = option(
        "auto",
        "true: the model stays in the host's memory and one block at a time goes to the device; auto: where the "
        "whole model would take more than half of the device's free memory",
        advanced=True,
    )
    memory_gb: float = option(4.0, "activations beyond this go to a file", least=0, advanced=True)
    spill: str | None = option(None, "folder for that file; none: the system's temporary folder", advanced=True)
    out: str | None = option(None, "folder for the packed model; none puts it into the run folder")
    dense_out: str | None = option(None, "also write the rounded weights as a dense Hugging Face folder", advanced=True)
    text: str | None = option(None, "a text file: perplexity before and after; default: the last tenth of calib")
    data: str | None = option(None, "or a corpus: its validation split. A run is evaluated on its own by default")
    context: int = option(512, "tokens the model sees at once in the evaluation", least=2, advanced=True)
    max_tokens: int = option(16384, "tokens of the text to evaluate at most", least=2, advanced=True)
    verify: Literal["auto", "true", "false"] = option("auto", VERIFY_HELP, advanced=True)
    max_perplexity: float = option(MAX_PERPLEXITY, MAX_HELP, least=1, advanced=True)
    force: bool = option(False, FORCE_HELP)
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = option("auto", "compute precision; auto: bf16 on a GPU")
    device: str = option("auto", "auto, cpu, cuda or cuda:1 ...")
    run: str | None = option(None, "folder for this run; none makes runs/shrink-ptq-DATE")
    resume: str | None = option(None, "a stopped run folder to continue; its settings are used")


def check_settings(cfg: PtqSettings) -> None:
    """The checks that need no model."""
    settings = to_json(cfg)
    check_start(settings, DECIDING)
    check_outputs(settings, "out", "dense_out")
    check_spill(cfg.spill)
    check_apart(settings, "calib")


def pick_calibration(cfg: PtqSettings, method: Method | Blockwise, onload_device: torch.device | None) -> Calibration:
    weigh = cfg.weigh if cfg.weigh != "auto" else "token" if isinstance(method, Gptq) else "square"
    found = Calibration(memory_gb=cfg.memory_gb, folder=cfg.spill, onload_device=onload_device, weigh=weigh)
    if cfg.inputs != "auto":
        return replace(found, inputs=cfg.inputs)
    return found if isinstance(method, Blockwise) else replace(found, inputs=usual_inputs(method))


def pick_method(cfg: PtqSettings) -> Method | Blockwise:
    if cfg.method == "blockwise":
        return Blockwise(
            init=cfg.init, train=cfg.train, epochs=cfg.epochs, batch=cfg.train_batch, lr_weight=cfg.lr_weight,
            lr_scale=cfg.lr_scale, lr_zero=cfg.lr_zero, lr_norm=cfg.lr_norm, held_out=cfg.held_out, loss=cfg.loss,
            seed=cfg.seed,
        )  # fmt: skip
    clip = Clip(objective=cfg.objective)
    method = METHODS[cfg.method]
    if isinstance(method, Gptq):
        with_clip = None if method.clip is None else clip
        return replace(method, damping=cfg.damping, act_order=cfg.act_order, clip=with_clip)
    return clip if cfg.method == "clip" else method


def choose_mix(
    cfg: PtqSettings,
    model: BlocksModel,
    candidates: list[Format],
    calib_NT: Tensor,
    calibration: Calibration,
    folder: Path,
    log: RunLog,
) -> MixedBits:
    """Choose the formats of bits_budget, and write mixed_bits.json."""
    assert cfg.bits_budget is not None
    some = calib_NT[:: max(1, len(calib_NT) // cfg.damage_windows)][: cfg.damage_windows]
    options: dict[str, Any] = {"units": cfg.damage_units, "calibration": calibration}
    title = f"damage by {cfg.damage_units}"
    mix = choose_by_damage(model, candidates, cfg.bits_budget, some, log, title, folder / DAMAGE, **options)
    counts = Counter(o.format.label for o in mix.chosen)
    said = ", ".join(f"{n} x {label}" for label, n in counts.items())
    log.say(f"{mix.bits_per_weight:.3f} of {cfg.bits_budget} bits per weight: {said}")
    write_atomically(folder / "mixed_bits.json", json.dumps(mix.to_json(), indent=1) + "\n")
    return mix
