"""Shrink a model to 2 or 3 bits by training it against itself: BitDistiller, as published.

Clip every group's range, let the full model write a text, and train the quantized copy on it with CAKLD against the
full model.

Run:     shoestring run shrink/bitdistiller model=DIR format=int2:g64 prompts=some.txt text=other.txt
         shoestring run shrink/bitdistiller model=DIR format=nf3:g64 data=my/texts teacher=cached steps=400
         shoestring run shrink/bitdistiller resume=RUN       continues after Ctrl-C or a crash
         torchrun --nproc-per-node 4 -m shoestring run shrink/bitdistiller mesh.dp=4 model=DIR ...
Needs:   a GPU for anything but tiny models: fp32 masters, gradients and Adam's moments (16 bytes a weight) and the
         teacher in 16 bits; teacher=cached keeps 261 bytes of disk a token instead
Time:    stories260K (260k parameters), 81,920 training tokens: 20 to 40 s on one CPU core. Generating 270k tokens
         of text with SmolLM2-135M took 33 s on a shared H200
Expect:  stories260K at int2:g64, perplexity 4.97 before: 12.9 with lr=1e-3, where AWQ gets 65 and GPTQ 108
         from 8,192 calibration tokens (docs/methods/bitdistiller.md). SmolLM2-135M on WikiText-2, 18.5 before, from
         1.05M training tokens (AWQ: 16,384 calibration tokens): 42.0 to 44.1 at int2:g64 (lr=1e-3; AWQ 776; 38.1 to
         40.8 at lr=5e-4 with the best of eight checkpoints, which this recipe does not keep), 21.0 to 21.7 at
         nf3:s2:g64 (lr=4e-4; AWQ 28.3), 19.2 at int4:g64 (lr=1e-4; AWQ 21.2). The published settings (8e-6, 200 steps
         of 128 rows) were made for models from 3B parameters
Leaves:  a run folder with the packed model/ (or out=), self_text.jsonl, checkpoints/, evals.jsonl, report.html
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from shoestring.config import option
from shoestring.errors import during
from shoestring.formats.convert import Rule
from shoestring.methods.distill import stages
from shoestring.model import load_model, save_model
from shoestring.recipes.shrink_run import ShrinkRun, run_once
from shoestring.shrink.clip import Clip
from shoestring.shrink.qat import build_student
from shoestring.train.batched_formats import BatchedFormats
from shoestring.train.optim import adamw, constant
from shoestring.train.step import Run
from shoestring.train.trainer import train


@dataclass(frozen=True)
class Config(stages.LowbitSettings):
    batch: int = option(128)
    calib_windows: int = option(128, "windows of the training text for the clip search; 0 does not clip", least=0)
    search: Literal["full", "alternate"] = option("full", "clip: 100 pairs as published, or 19 trials", advanced=True)
    range_gradient: bool = option(
        True, "as published: the ends of a group also get the scale's gradient", advanced=True
    )
    lr: float = option(8e-6, "learning rate of AdamW, constant, without decay", least=0)


def main(cfg: Config) -> Path:
    rules = stages.check(cfg)
    trained_rules = stages.range_rules(rules) if cfg.range_gradient else rules
    check = partial(stages.check_rules, rules=rules)
    with stages.checked_run(cfg, "shrink/bitdistiller", check, cfg.calib_windows) as run:
        shrink(cfg, rules, trained_rules, run)
    return run.folder


def shrink(cfg: Config, rules: list[Rule], trained_rules: list[Rule], run: ShrinkRun) -> None:
    run_once(run.mesh, run.folder, "prepared", lambda: make_start(cfg, rules, run))
    corpus = stages.load_corpus(cfg, run.folder, run.log)
    data = stages.token_data(cfg, corpus, run.mesh)
    objective = stages.make_objective(cfg, run, data, cfg.teacher)
    start = run.folder / "clipped" if cfg.calib_windows else cfg.model
    model = build_student(start, trained_rules, run.mesh, stages.parallel_of(cfg, run))
    run.log.say(f"{data.tokens_per_step * cfg.steps / 1e6:.2f}M training tokens, gamma {objective.gamma:.3f}")
    with during("training"):
        train(
            Run(model, adamw(model, lr=cfg.lr, weight_decay=0.0), run.mesh, run.log),
            data,
            BatchedFormats(objective),
            schedule=constant(cfg.lr),
            **stages.training_options(cfg, run),
        )
    stages.finish(cfg, run, model, corpus, {"gamma": objective.gamma})


def make_start(cfg: Config, rules: list[Rule], run: ShrinkRun) -> None:
    """On the first rank: evaluate before, write the text, clip the weights."""
    loaded = load_model(cfg.model, device=run.mesh.device, dtype=run.compute)
    stages.write_text(cfg, loaded, run)
    if cfg.calib_windows and not (run.folder / "clipped").exists():
        corpus = stages.load_corpus(cfg, run.folder, run.log)
        stages.token_data(cfg, corpus, run.mesh)  # raises if the text is too short for a step
        seen_NT = stages.some_rows(cfg, corpus, cfg.calib_windows, run.log)
        stages.clip_start(loaded, rules, seen_NT, Clip(search=cfg.search), 8.0, run)
        save_model(run.folder / "clipped", loaded.model, loaded.tokenizer)
