"""Shrink a model to 4, 3 or 2 bits with the least loss we know of.

BitDistiller trains weights only, at a constant rate, and its scales follow them. Here
  - the full model stays beside the student and is matched over the whole vocabulary, by the forward divergence alone
    (gamma=0): other texts have words that the training text lacks, and a cached top-k says nothing of them;
  - rates are parts of what they move, smaller at more bits, rise and fall; few rows a step, and so many steps;
  - at 2 bits scales and zero points are trained with the weights, first in every block against that block's own
    outputs (the largest gain for the least text). At 3 bits that stage fits its text and loses elsewhere: training
    starts from clipped weights, and scales follow them;
  - with bits_budget= every layer gets the format that does the least damage for its bits. At 3.5 bits per weight this
    gains most of all.

Run:     shoestring run shrink/lowbit_best model=DIR format=int2:g64 prompts=some.txt text=other.txt
         shoestring run shrink/lowbit_best model=DIR bits_budget=3.501 candidates=nf3:s1:g64,nf3:s2:g64,nf4:s1:g64 ...
         shoestring run shrink/lowbit_best model=DIR format=nf3:s2:g64 data=my/texts steps=1600
         shoestring run shrink/lowbit_best model=DIR "rules=*.mlp.down=int4:g64;*=int2:g64" data=my/texts
         shoestring run shrink/lowbit_best resume=RUN       goes on in the stage it was in, after Ctrl-C or a crash
         torchrun --nproc-per-node 4 -m shoestring run shrink/lowbit_best mesh.dp=4 model=DIR ...
Needs:   a GPU for anything but tiny models: fp32 masters, gradients and Adam's moments (16 bytes a weight) and the full
         model beside them (2; teacher=cached: 261 bytes of disk a training token instead). Block-wise training runs on
         the first process: the whole model in 16 bits, fp32 weights, gradients, moments and activations of one block,
         and on the host the fp32 masters of all blocks (4 bytes a weight)
Time:    stories260K (260k parameters), 81,920 training tokens: 30 s on one CPU core. SmolLM2-135M, 1.05M training
         tokens, on an H200: 35 s for the mix, of which measuring damage takes 17 beside another process
Expect:  SmolLM2-135M on WikiText-2, 18.5 before, from 1.05M training tokens in rows of 512 (bench/lowbit_quality):
         34.8 at int2:g64 (16 rows a step), where shrink/bitdistiller gets 42.0 from as many and AWQ 776; at 3.50 bits
         20.6 as a mix (16 rows, part=0.3) and 20.9 in nf3:s2:g64 (32 rows, part=0.6 gamma=0.5), where
         shrink/bitdistiller gets 21.0 (other batches and parts at 3 bits, the usual ones among them, were not
         measured there); 19.2 at int4:g64 (16 rows; with 32 rows and teacher=cached gamma=none 19.1), where
         shrink/bitdistiller gets 19.2. stories260K, 5.0 before, at other rates and with the block-wise stage at 3 bits
         too: 9.5 to 9.7 at int2:g64 against 11.6 to 12.2; 5.5 as a mix and 5.6 to 5.7 in nf3:s2:g64 against 5.8 to 5.9.
         Where little is lost there is little to win: on a model of GPT-2's small shape it is level with GPTQ and
         shrink/bitdistiller at 4 and 3 bits, and the best at 2 (docs/methods/bitdistiller.md)
Leaves:  a run folder with the packed model/ (or out=), errors by block in model/quantization.json, evals.jsonl,
         report.html
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shoestring.config import option
from shoestring.errors import UserError, during, in_run
from shoestring.formats import Dense, FormatLinear, Parts, parse_format
from shoestring.formats.convert import Rule
from shoestring.model import Decoder, load_model, save_model
from shoestring.recipes.shrink.lowbit_run import (
    LowbitRun,
    Settings,
    check,
    check_rules,
    clip_start,
    finish,
    load_corpus,
    make_objective,
    open_run,
    parallel_of,
    range_rules,
    some_rows,
    token_data,
    training_options,
    write_text,
)
from shoestring.recipes.shrink.ptq import pick_candidates
from shoestring.runlog import RunLog, resumable, write_atomically
from shoestring.shrink.blockwise import Blockwise, train_blocks
from shoestring.shrink.calibrate import Calibration
from shoestring.shrink.clip import Clip
from shoestring.shrink.mixed_bits import Mix, check_candidates, choose_formats, measure_damage, units_of
from shoestring.shrink.qat import (
    FallingRates,
    Rates,
    build_student,
    coarsest,
    hold_grids,
    learned_rules,
    once,
    part_for,
    read_grids,
    relative_adamw,
)
from shoestring.shrink.resume import BlockFiles
from shoestring.train.together import Together
from shoestring.train.trainer import Run, train


@dataclass(frozen=True)
class Config(Settings):
    bits_budget: float | None = option(
        None, "bits per weight at most, metadata included: each layer gets one of the candidates, by damage"
    )
    candidates: str = option("int2:g64,int3:g64,int4:g64", "bits_budget: the formats to choose from")
    damage_windows: int = option(
        4, "bits_budget: rows of the training text that damage is measured on", least=1
    )
    windows: int | None = option(
        None, "rows of the training text for the block-wise stage, 0: none; none: by the bits", least=0
    )
    init: str | None = option(
        None, "the method whose grids it starts from: rtn clip awq gptq gptq+clip; none: by the bits"
    )
    grids: Literal["learned", "derived"] | None = option(
        None,
        "trained, or following their weights from clipped ones on; none: derived at 3 bits without a budget",
    )
    epochs: int = option(4, "passes over those rows", least=1)
    block_batch: int = option(4, "rows in a step of the block-wise stage", least=1)
    memory_gb: float = option(8.0, "activations beyond this go to a file", least=0)
    teacher: Literal["live", "cached"] = option(
        "live", "the full model beside the student, or only its top-k on disk"
    )
    gamma: float | None = option(
        0.0, "weight of the reverse divergence; none: the full model's confidence, as BitDistiller's"
    )
    batch: int = option(8, "rows per step over all ranks", least=1)
    steps: int = option(800, "optimizer steps end to end", least=1)
    lr_weight: float = option(5e-3, "of the root mean square of a layer's weights; 0 freezes them", least=0)
    lr_scale: float = option(3e-4, "of the mean of a layer's scales", least=0)
    lr_zero: float = option(5e-3, "codes", least=0)
    lr_norm: float = option(2e-3, "of the root mean square of a norm or bias", least=0)
    lr_rest: float = option(5e-3, "of the root mean square of embeddings and head; 0 freezes them", least=0)
    part: float | None = option(
        None, "of all these rates; none: by the bits, 1 at 2, 0.25 at 3 and 4 (derived: twice that)", least=0
    )


def main(cfg: Config) -> Path:
    rules = check(cfg)
    check_grids(cfg)
    rates = Rates(cfg.lr_weight, cfg.lr_scale, cfg.lr_zero, cfg.lr_norm, cfg.lr_rest)
    rates.softer(part_of(cfg, rules))  # what is not possible is said now
    block_settings(cfg, rules)
    trained_rules(cfg, [("*", f) for f in pick_candidates(cfg)] or rules)
    num = max(cfg.windows or 0, 0 if cfg.bits_budget is None else cfg.damage_windows)
    run = open_run(cfg, "shrink/lowbit_best", lambda model: check_model(cfg, rules, model), num)
    with in_run(run.folder), resumable(run.recipe, run.folder):
        shrink(cfg, rules, rates, run)
    return run.folder


def shrink(cfg: Config, rules: list[Rule], rates: Rates, run: LowbitRun) -> None:
    once(run.mesh, run.folder, "prepared", lambda: make_start(cfg, rules, run))
    told = json.loads((run.folder / "blockwise.json").read_text())
    if cfg.bits_budget is not None:
        rules = rules_of(told["mixed_bits"])
    rates = rates.softer(part_of(cfg, rules))
    corpus = load_corpus(cfg, run.folder, run.log)
    data = token_data(cfg, corpus, run.mesh)
    objective = make_objective(cfg, run, data, cfg.teacher)
    model = build_student(
        run.folder / "blockwise", trained_rules(cfg, rules), run.mesh, parallel_of(cfg, run)
    )
    if not is_derived(cfg, rules):
        hold_grids(model, load_grids(run.folder / "grids.safetensors"))
    run.log.say(
        f"{data.tokens_per_step * cfg.steps / 1e6:.2f}M training tokens end to end, gamma {objective.gamma:.3f}"
    )
    with during("training end to end"):
        train(
            Run(model, relative_adamw(model, rates), run.mesh, run.log),
            data,
            Together(objective),
            hooks=[FallingRates(cfg.steps, warmup=max(1, cfg.steps // 20))],
            **training_options(cfg, run),
        )
    finish(cfg, run, model, corpus, {"gamma": objective.gamma, **told})


def part_of(cfg: Config, rules: list[Rule]) -> float:
    if cfg.part is not None:
        return cfg.part
    return min(1.0, part_for(format for _, format in rules) * (2 if is_derived(cfg, rules) else 1))


def is_derived(cfg: Config, rules: list[Rule]) -> bool:
    """Whether scales follow their weights, as BitDistiller's, instead of being trained."""
    if cfg.grids is not None:
        return cfg.grids == "derived"
    usual = cfg.windows is None and cfg.init is None and cfg.bits_budget is None
    return usual and coarsest(format for _, format in rules) == 3


def check_grids(cfg: Config) -> None:
    given = [f"{name}={value}" for name, value in (("windows", cfg.windows), ("init", cfg.init)) if value]
    if cfg.grids == "derived" and given:
        raise UserError(
            f"{' '.join(given)} is for the block-wise stage, which grids=derived does not have: training starts from "
            "clipped weights. Leave it out, or give grids=learned"
        )


def check_model(cfg: Config, rules: list[Rule], model: Decoder) -> None:
    """Whether its weights can get these formats, or with a budget each of the candidates."""
    if cfg.bits_budget is None:
        check_rules(model, rules)
    else:
        check_candidates(model, pick_candidates(cfg), cfg.bits_budget)


def trained_rules(cfg: Config, rules: list[Rule]) -> list[Rule]:
    if not is_derived(cfg, rules):
        return learned_rules(rules)
    return range_rules(rules)


def make_start(cfg: Config, rules: list[Rule], run: LowbitRun) -> None:
    """On the first rank: the evaluation before, the text, and the blocks one after the other."""
    folder, log = run.folder, run.log
    loaded = load_model(cfg.model, device=run.mesh.device, dtype=run.compute)
    write_text(cfg, loaded, run)
    if (folder / "blockwise").exists():
        return
    corpus = load_corpus(cfg, folder, log)
    token_data(cfg, corpus, run.mesh)  # too short for a step: said before the blocks
    told: dict[str, Any] = {}
    if cfg.bits_budget is not None:
        seen = some_rows(cfg, corpus, cfg.damage_windows, log)
        mix = choose_mix(cfg, loaded.model, seen, folder, log)
        rules, told = mix.rules, {"mixed_bits": mix.to_json()}
    if is_derived(cfg, rules):
        seen = some_rows(cfg, corpus, NUM_SEEN, log)
        clip_start(loaded, rules, seen, Clip(), cfg.memory_gb, run)
        write_atomically(folder / "blockwise.json", json.dumps({"grids": "derived", **told}) + "\n")
        save_model(folder / "blockwise", loaded.model, loaded.tokenizer)
        return
    settings, num = block_settings(cfg, rules)
    seen = some_rows(cfg, corpus, num, log)
    with during("training block by block"), log.progress(len(loaded.model.blocks), "block by block") as bar:
        report = train_blocks(
            loaded.model,
            rules,
            seen,
            settings,
            Calibration(memory_gb=cfg.memory_gb),
            progress=lambda done, total, error: bar.advance(1, error=error),
            files=BlockFiles(folder / "blocks"),
        )
    save_grids(folder / "grids.safetensors", read_grids(loaded.model))
    write_atomically(folder / "blockwise.json", json.dumps({**report.to_json(), **told}, indent=1) + "\n")
    # The weights before rounding: training goes on with them, on the grids beside.
    with torch.no_grad():
        for name, w in report.masters.items():
            layer = loaded.model.get_submodule(name)
            assert isinstance(layer, FormatLinear)
            layer.set_format(Dense())
            layer.weight.copy_(w)
    save_model(folder / "blockwise", loaded.model, loaded.tokenizer)


def choose_mix(cfg: Config, model: Decoder, seen: Tensor, folder: Path, log: RunLog) -> Mix:
    assert cfg.bits_budget is not None
    formats = pick_candidates(cfg)
    num_trials = len(formats) * len(units_of(model, formats))
    with during("measuring damage"), log.progress(num_trials, "damage of each format by layer") as bar:
        units = measure_damage(
            model,
            formats,
            seen,
            progress=lambda done, total, damage: bar.advance(1, damage=damage),
            file=folder / "damage.jsonl",
        )
    mix = choose_formats(units, cfg.bits_budget)
    log.say(f"{mix.bits_per_weight:.3f} of {cfg.bits_budget} bits per weight")
    return mix


def rules_of(mix: dict[str, Any]) -> list[Rule]:
    return [(layer, parse_format(unit["format"])) for unit in mix["units"] for layer in unit["layers"]]


# By bits: the method whose grids training starts from, and the rows of the block-wise stage. At 3 bits that stage
# is good for the text it is trained on and bad for others (docs/methods/bitdistiller.md).
STARTS = {2: ("awq", 512), 3: ("clip", 0), 4: ("awq", 512)}
NUM_SEEN = 32  # rows that the grids are chosen on where nothing is trained block by block


def block_settings(cfg: Config, rules: list[Rule]) -> tuple[Blockwise, int]:
    """Of the block-wise stage, and the rows it sees."""
    init, num = STARTS[min(4, max(2, coarsest(format for _, format in rules)))]
    init, num = init if cfg.init is None else cfg.init, num if cfg.windows is None else cfg.windows
    settings = Blockwise(
        init=init, epochs=cfg.epochs, batch=cfg.block_batch, seed=cfg.seed, keep_masters=True
    )
    if num:
        return settings, num
    return replace(settings, lr_weight=0.0, lr_scale=0.0, lr_zero=0.0, lr_norm=0.0), NUM_SEEN


def save_grids(path: Path, grids: dict[str, Parts]) -> None:
    flat = {
        f"{name}:{part}": t.contiguous().cpu() for name, grid in grids.items() for part, t in grid.items()
    }
    save_file(flat, path)


def load_grids(path: Path) -> dict[str, Parts]:
    grids: dict[str, Parts] = {}
    for key, t in load_file(path).items():
        name, part = key.split(":")
        grids.setdefault(name, {})[part] = t
    return grids
