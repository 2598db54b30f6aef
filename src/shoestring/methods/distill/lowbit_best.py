"""Shrink a model to 4, 3 or 2 bits by training, with the settings that lost least on SmolLM2-135M.

BitDistiller trains weights only, at a constant rate, with scales derived from them. Here
  - the full model runs beside the student and is matched over the whole vocabulary by the forward divergence alone
    (gamma=0): a cached top-k lacks words that other texts need;
  - learning rates are relative to what they move, with warm-up and decay; few rows a step, many steps;
  - at 2 bits scales and zero points are trained with the weights, first in every block against that block's own
    outputs (the largest gain for the least text). At 3 bits that stage overfits to its text: training starts from
    clipped weights, and scales are derived;
  - with bits_budget= every layer gets the format with the least damage for its bits: the largest gain at 3.5 bits per
    weight.

Run:     shoestring run shrink/lowbit_best model=DIR format=int2:g64 prompts=some.txt text=other.txt
         shoestring run shrink/lowbit_best model=DIR bits_budget=3.501 candidates=nf3:s1:g64,nf3:s2:g64,nf4:s1:g64 ...
         shoestring run shrink/lowbit_best model=DIR format=nf3:s2:g64 data=my/texts steps=1600
         shoestring run shrink/lowbit_best model=DIR "rules=*.mlp.down=int4:g64;*=int2:g64" data=my/texts
         shoestring run shrink/lowbit_best resume=RUN       continues after Ctrl-C or a crash
         torchrun --nproc-per-node 4 -m shoestring run shrink/lowbit_best mesh.dp=4 model=DIR ...
Needs:   a GPU for anything but tiny models: fp32 masters, gradients and Adam's moments (16 bytes a weight) and the full
         model beside them (2; teacher=cached: 261 bytes of disk a training token instead). Block-wise training runs on
         the first process: the whole model in 16 bits, fp32 weights, gradients, moments and activations of one block,
         and on the host the fp32 masters of all blocks (4 bytes a weight)
Time:    stories260K (260k parameters), 81,920 training tokens: 30 s on one CPU core. SmolLM2-135M, 1.05M training
         tokens, on an H200: 35 s for the mix, of which measuring damage takes 17 beside another process
Expect:  SmolLM2-135M on WikiText-2, 18.5 before, from 1.05M training tokens in rows of 512
         (experiments/lowbit_quality): 30.8 to 32.2 at int2:g64 (16 rows a step; three seeds), where BitDistiller gets
         39.7 and 40.7 from as many tokens of the same text (two seeds, its best checkpoint) and AWQ 776 (16,384
         calibration tokens). At the same bits 28.3 to 28.9 as a mix (bits_budget=2.376
         candidates=int2:g64,int2:g192,int3:g192; three seeds), where BitDistiller gets 33.0 and 34.6 with that mix (two
         seeds). With part=1 34.5 to 35.6 in one format and 32.0 to 32.5 as a mix (on another text). At 3.50 bits 20.4
         to 20.6 as a mix (16 rows, part=0.3) and 20.9 to 21.2 in nf3:s2:g64 (32 rows, part=0.6 gamma=0.5), where
         BitDistiller gets 20.5 to 20.9 with the same mix and 21.0 to 21.7 without (other batches and parts at 3 bits,
         the usual ones among them, were not measured there); 19.2 at int4:g64 (16 rows; with 32 rows and teacher=cached
         gamma=none 19.1), where shrink/bitdistiller gets 19.2. stories260K, 5.0 before (81,920 tokens, 8 rows of 128 a
         step; three seeds): 10.6 to 10.8 at int2:g64, 9.8 to 10.1 with part=1, against 11.7 to 12.2; 5.7 to 5.8 in
         nf3:s2:g64 against 5.8 to 5.9; as a mix at 3.5 bits, at other rates and with the block-wise stage, 5.5 against
         5.5 to 5.6.
         Where little is lost there is little to win: on a model of GPT-2's small shape it is level with GPTQ and
         shrink/bitdistiller at 4 and 3 bits, and with part=1 below both at 2 (docs/methods/bitdistiller.md)
Leaves:  a run folder with the packed model/ (or out=), errors by block in model/quantization.json, evals.jsonl,
         report.html
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoestring.errors import during
from shoestring.formats.convert import Rule, store_states
from shoestring.json_files import read_object
from shoestring.methods.distill import stages
from shoestring.model import load_model, save_model
from shoestring.recipes.shrink_run import ShrinkRun, run_once
from shoestring.runlog import write_atomically
from shoestring.shrink.clip import Clip
from shoestring.shrink.mixed_bits import choose_by_damage
from shoestring.shrink.qat import FallingRates, Rates, build_student, load_grids, relative_adamw
from shoestring.train.batched_formats import BatchedFormats
from shoestring.train.step import Run
from shoestring.train.trainer import train


@dataclass(frozen=True)
class Config(stages.BestSettings):
    """methods/distill/stages.py has the settings."""


def main(cfg: Config) -> Path:
    rules = stages.check(cfg)
    stages.check_grids(cfg)
    rates = Rates(cfg.lr_weight, cfg.lr_scale, cfg.lr_zero, cfg.lr_norm, cfg.lr_rest)
    rates.softer(stages.part_of(cfg, rules))  # raises for impossible rates
    stages.block_settings(cfg, rules)
    stages.trained_rules(cfg, [("*", f) for f in stages.pick_candidates(cfg)] or rules)
    num = max(cfg.windows or 0, 0 if cfg.bits_budget is None else cfg.damage_windows)
    with stages.checked_run(cfg, "shrink/lowbit_best", lambda model: stages.check_model(cfg, rules, model), num) as run:
        shrink(cfg, rules, rates, run)
    return run.folder


def shrink(cfg: Config, rules: list[Rule], rates: Rates, run: ShrinkRun) -> None:
    run_once(run.mesh, run.folder, "prepared", lambda: make_start(cfg, rules, run))
    notes = read_object(run.folder / "blockwise.json")
    if cfg.bits_budget is not None:
        rules = stages.rules_of(notes["mixed_bits"])
    rates = rates.softer(stages.part_of(cfg, rules))
    corpus = stages.load_corpus(cfg, run.folder, run.log)
    data = stages.token_data(cfg, corpus, run.mesh)
    objective = stages.make_objective(cfg, run, data, cfg.teacher)
    model = build_student(
        run.folder / "blockwise", stages.trained_rules(cfg, rules), run.mesh, stages.parallel_of(cfg, run)
    )
    if not stages.is_derived(cfg, rules):
        store_states(model, load_grids(run.folder / "grids.safetensors"))
    run.log.say(
        f"{data.tokens_per_step * cfg.steps / 1e6:.2f}M training tokens end to end, gamma {objective.gamma:.3f}"
    )
    with during("training end to end"):
        train(
            Run(model, relative_adamw(model, rates), run.mesh, run.log),
            data,
            BatchedFormats(objective),
            hooks=[FallingRates(cfg.steps, warmup=max(1, cfg.steps // 20))],
            **stages.training_options(cfg, run),
        )
    stages.finish(cfg, run, model, corpus, {"gamma": objective.gamma, **notes})


def make_start(cfg: Config, rules: list[Rule], run: ShrinkRun) -> None:
    """On the first rank: evaluate before, write the text, and train the blocks."""
    folder, log = run.folder, run.log
    loaded = load_model(cfg.model, device=run.mesh.device, dtype=run.compute)
    stages.write_text(cfg, loaded, run)
    if (folder / "blockwise").exists():
        return
    corpus = stages.load_corpus(cfg, folder, log)
    stages.token_data(cfg, corpus, run.mesh)  # raises if the text is too short for a step
    notes: dict[str, Any] = {}
    if cfg.bits_budget is not None:
        seen = stages.some_rows(cfg, corpus, cfg.damage_windows, log)
        title, file = "damage of each format by layer", folder / "damage.jsonl"
        mix = choose_by_damage(loaded.model, stages.pick_candidates(cfg), cfg.bits_budget, seen, log, title, file)
        log.say(f"{mix.bits_per_weight:.3f} of {cfg.bits_budget} bits per weight")
        rules, notes = mix.rules, {"mixed_bits": mix.to_json()}
    if stages.is_derived(cfg, rules):
        seen = stages.some_rows(cfg, corpus, stages.NUM_SEEN, log)
        stages.clip_start(loaded, rules, seen, Clip(), cfg.memory_gb, run)
        write_atomically(folder / "blockwise.json", json.dumps({"grids": "derived", **notes}) + "\n")
        save_model(folder / "blockwise", loaded.model, loaded.tokenizer)
        return
    settings, num = stages.block_settings(cfg, rules)
    seen = stages.some_rows(cfg, corpus, num, log)
    stages.blockwise_start(loaded, rules, seen, settings, cfg.memory_gb, run, notes)
