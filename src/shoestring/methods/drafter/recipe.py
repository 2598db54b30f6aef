"""Make a drafter for a model, for faster decoding of the same text: distilled from the model's own text.

Run:     shoestring run shrink/drafter model=RUN                             prompts from the run's own corpus
         shoestring run shrink/drafter model=DIR prompts=my.jsonl layers=4   prompts of your task
         shoestring run shrink/drafter model=DIR prompts=FOLDER text=corpus  the corpus itself, without generated text
         shoestring run shrink/drafter model=DIR prompts=P start=SMALL       from a small model of the same tokens
         shoestring run shrink/drafter model=DIR prompts=P d_model=256 vocab=8192 method=adaspec
         shoestring run shrink/drafter resume=RUN        continues after Ctrl-C or a crash
         shoestring generate MODEL "def main(" --drafter RUN --stats
Needs:   memory for the model and its drafter; 261 bytes of disk per token of text for the model's top 64
Time:    the demo's model (2.3M parameters), 160 prompts, layers=1, 120 steps of 16 x 128 tokens: 2 minutes of a CPU
Expect:  a model of that size after 60 steps: 0.70 of sampled drafts accepted (0.60 before training), of greedy ones
         0.56 to 0.78 (0.62 before). A model of 2.4B parameters that saw only 2.8M tokens, on an H200, a drafter of 400
         steps on its own text (one seed), greedy: 2.0 times plain speed for one to four requests, 1.7 for 16, 1.0 for
         64. One that saw 51M tokens, sampled text at temperature 1, a drafter of start=: 1.7 times for one request
         (plain steps kernel by kernel; against plain steps in one kernel 1.1), 1.5 for four, 1.3 for 16, 1.0 for 64.
         docs/methods/drafter.md compares targets and methods
Leaves:  a run folder with the drafter in model/ (drafter.json names its tokens and its acceptance), text.jsonl, the
         acceptance on held-out prompts in acceptance.json and report.html, beside an untrained drafter and n-gram
         lookup
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shoestring.device import pick_device, pick_dtype
from shoestring.evals.model_row import need_tokenizer, ready
from shoestring.methods.drafter import stages
from shoestring.methods.drafter.stages import RECIPE
from shoestring.model import load_model
from shoestring.recipes.shrink_run import open_run
from shoestring.runlog import RunLog
from shoestring.shrink.self_text import check_room


@dataclass(frozen=True)
class Config(stages.DrafterSettings):
    """methods/drafter/stages.py has the settings."""


def main(cfg: Config) -> Path:
    stages.check(cfg)
    device = pick_device(cfg.device)
    loaded = ready(load_model(cfg.model, device=device, dtype=pick_dtype(cfg.dtype, device)))
    need_tokenizer(loaded)
    stages.check_shape(cfg, loaded)
    prompts, held_out, whole = stages.make_prompts(cfg, loaded, *stages.prompt_source(cfg), RunLog(None))
    if cfg.text == "corpus" and whole is not None:
        cfg.train_data(whole)
    else:
        check_room(prompts, need_tokenizer(loaded), cfg.new_tokens, cfg.batch * cfg.context + 1)
    with open_run(RECIPE, cfg, cfg.model, *filter(None, [cfg.start]), device=device) as run:
        folder, log = run.folder, run.log
        corpus = stages.make_text(cfg, loaded, prompts, whole, folder, log)
        stages.train_drafter(cfg, loaded, corpus, folder, log)
        rows = stages.measure_stage(cfg, loaded, held_out, folder, log)
        stages.finish(cfg, log, folder, rows)
    return folder
