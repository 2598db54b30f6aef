"""Find sublayers that a model can leave out when it decodes, for a wanted speed-up at a context length.

Run:     shoestring run shrink/skip_set model=DIR calib=some.txt context=2048 speedup=1.3
         shoestring run shrink/skip_set model=RUN method=adaskip text=other.txt
         shoestring run shrink/skip_set model=DIR method=lossless speedup=2
Needs:   the model in fp32 (CPU) or bf16 (GPU), and its activations on the calibration windows
Time:    SmolLM2-135M on one CPU core, 1,024 calibration tokens: adaskip half a minute, measured 10 minutes;
         the search runs the model about 60 + 6 n times for n sublayers. A GPU needs seconds
Expect:  quality falls quickly for small models: docs/methods/skipping.md has the table. method=lossless does not
         change the text: the set only drafts
Leaves:  a run folder with skip.json for --skip FILE (or --skip lossless:FILE), the choices in order with their damage,
         perplexity before and after where text or data is given, report.html
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from shoestring.config import config_record, option, to_json
from shoestring.device import pick_device, pick_dtype
from shoestring.errors import UserError
from shoestring.evals.model_row import (
    check_apart,
    corpus_of_run,
    evaluate_row,
    fitting_context,
    need_tokenizer,
    ready,
    text_tokens,
)
from shoestring.methods.skipping.sets import SEARCHED, FoundSet, SkipGoal, calibration, find_set, left_out
from shoestring.model import load_model
from shoestring.recipes.settings import CalibSettings, EvalSettings, RunSettings
from shoestring.report import Curves, Section, Series, Table, Text, eval_table, run_sections, write_report
from shoestring.runlog import RunLog, check_run_folder, open_run_folder, write_atomically

CONTEXT = 2048


@dataclass(frozen=True, kw_only=True)
class Config(EvalSettings, RunSettings, CalibSettings):
    model: str = option(help="a Hugging Face folder, a run folder or a .gguf file")
    method: Literal["measured", "adaskip", "lossless", "early_exit", "unified"] = option(
        "measured", "how sublayers are chosen; lossless: the best set for drafting"
    )
    context: int | None = option(
        None,
        f"context length at which seconds are measured; none: {CONTEXT}, or all positions of a model with fewer",
        least=2,
    )
    speedup: float = option(1.3, "target speedup of a decode step; lossless: where the search ends")
    calib: str | None = option(
        None, "calibration text or corpus; none: a run's own training text, else the Python standard library"
    )
    calib_windows: int = option(2)
    rows: int = option(256, "predictions compared per trial", least=1, advanced=True)
    lookahead: int = option(6, "candidates measured again before each choice", least=1, advanced=True)
    out: str | None = option(None, "file for the set; none puts skip.json into the run folder")


def main(cfg: Config) -> Path:
    wanted = SkipGoal(cfg.method, cfg.context or CONTEXT, cfg.speedup, cfg.rows, cfg.lookahead)
    if cfg.out is not None and Path(cfg.out).exists():
        raise UserError(f"out={cfg.out} exists already; give another name or remove it")
    if cfg.out is not None and cfg.out == cfg.run:
        raise UserError(f"out and run are both {cfg.out}: out is a file, run a folder; give two names")
    if cfg.out is not None and not Path(cfg.out).parent.is_dir():
        raise UserError(f"out={cfg.out}: there is no folder {Path(cfg.out).parent}; make it or give another name")
    settings = to_json(cfg)
    check_run_folder(settings)
    check_apart(settings, "calib")
    device = pick_device(cfg.device)
    loaded = ready(load_model(cfg.model, device=device, dtype=pick_dtype(cfg.dtype, device)))
    positions = loaded.spec.max_positions
    if cfg.context is None:
        wanted = replace(wanted, context=min(CONTEXT, positions))
    if wanted.context > positions:
        raise UserError(
            f"context={cfg.context} is more than the {positions} positions of {cfg.model}; give context={positions} or "
            "less"
        )
    source = cfg.calib or corpus_of_run(Path(cfg.model))[0] or "python"
    context = fitting_context("calib_context", cfg.calib_context, loaded)
    progress = RunLog(None).progress
    calib_NT = calibration(source, need_tokenizer(loaded), cfg.calib_windows, context, progress)
    tokens, text = text_tokens(loaded, cfg.model, text=cfg.text, data=cfg.data)

    folder = open_run_folder("shrink/skip_set", settings)
    log = RunLog(folder)
    log.save_config(config_record("shrink/skip_set", cfg))
    num_all = 2 * loaded.spec.num_layers
    searches = cfg.method in SEARCHED
    expected = num_all + cfg.lookahead * round(num_all * (1 - 1 / cfg.speedup)) if searches else 0
    with log.progress(expected, f"{cfg.method}: trials") as bar:

        def tick(done: int, num_skipped: int) -> None:
            bar.advance(1, skipped=num_skipped)

        found = find_set(loaded.model, calib_NT, wanted, progress=tick)
        bar.expect(bar.done)  # how many sublayers must go for the speedup was an estimate
    for step, choice in enumerate(found.choices, start=1):
        log.log(step, kl=choice.damage.kl, agreement=choice.damage.agreement, speedup=choice.speedup)
    out = Path(cfg.out) if cfg.out else folder / "skip.json"
    write_atomically(out, json.dumps(found.to_json()) + "\n")
    if tokens is not None:
        options: dict[str, Any] = {"context": wanted.context, "max_tokens": cfg.max_tokens}
        log.evaluated(**evaluate_row(loaded, "before", tokens, text, **options))
        with left_out(loaded.model, found.skip):
            log.evaluated(**evaluate_row(loaded, "after", tokens, text, **options))
    finish(log, folder, out, cfg, found)
    return folder


def finish(log: RunLog, folder: Path, out: Path, cfg: Config, found: FoundSet) -> None:
    rows = log.evaluations()
    if rows:
        eval_table(rows, "Before and after").print()
    steps = [c.speedup for c in found.choices]
    curve = Series("KL", steps, [c.damage.kl for c in found.choices])
    skip = "lossless:" if cfg.method == "lossless" else ""
    commands = f'shoestring generate {cfg.model} "Once upon a time" --skip {skip}{out} --stats'
    named = [[s.layer, s.kind] for s in found.skip.skipped]
    sections: list[Section] = [
        Curves("Damage on the calibration text", [curve], "speed-up of a decode step", "KL, nats per token"),
        *run_sections(folder),
        Table("Skipped", ["layer", "sublayer"], named, f"Expected: {found.notes['speedup']:.2f}x"),
        Text("Next", commands, code=True),
    ]
    page = write_report(folder, "shrink/skip_set", sections, subtitle=str(folder))
    skipped = f"{len(found.skip.attn)} attention and {len(found.skip.mlp)} FFN sublayers skipped"
    speed = f"{found.notes['speedup']:.2f}x by the seconds measured at {found.notes['context']} positions"
    log.say(f"{skipped}: {speed}; set in {out}, report in {page}. Next:\n{commands}")
    log.close()
