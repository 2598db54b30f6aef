"""Shrink a model to 2, 3, 4 or 8 bits, guided by a calibration text: GPTQ, AWQ, clip search, block-wise training.

Run:     shoestring run shrink/ptq model=DIR format=int4:g64 text=some.txt    calibrated on text that the model writes
         shoestring run shrink/ptq model=DIR format=nf3 calib=wiki.txt,novel.txt,code.py text=other.txt
         shoestring run shrink/ptq model=RUN format=int2
         shoestring run shrink/ptq model=DIR "rules=*.mlp.*=nf3;*=int4" method=awq calib=FOLDER memory_gb=8
         shoestring run shrink/ptq model=DIR format=int2 method=blockwise calib=some.txt calib_windows=128
         shoestring run shrink/ptq model=DIR bits_budget=3 candidates=int2,int3,int4 method=awq calib=some.txt
         shoestring run shrink/ptq model=PRUNED format=sparse24+int4:g32 calib=some.txt   what shrink/prune24 has kept
         shoestring run shrink/ptq resume=RUN        continues at the next block after Ctrl-C or a crash
         shoestring run shrink/ptq model=DIR format=int4 calib=some.txt stream=true      model larger than the GPU
         shoestring run shrink/ptq model=BERT format=int4:g64 calib=some.txt     an encoder (shrink/encoder_stages.py)
Needs:   memory for the model in fp32 (CPU) or bf16 (GPU) plus one block's activations (or disk: memory_gb);
         streamed, the device needs room for one block and for the embedding or the output head, and the host for
         the model as it is stored
Time:    SmolLM2-135M, nf3, 8 windows of 512 on one CPU core: gptq 4 minutes, clip and awq 1 to 2 and one for the
         statistics, blockwise 16; more windows cost gptq half a minute for every four. Evaluating comes on top
Expect:  SmolLM2-135M, int4 in groups of 64, six kinds of text: perplexity 25% higher rounded (rtn), 14% with awq
         on a mix of texts, 8.7% with gptq+clip on 16,384 tokens that the model wrote; nf3 on WikiText-2: 27.0 before,
         31.5 with blockwise on 4,096 tokens (docs/methods/ptq.md, blockwise.md). For still less loss at 3 bits or
         fewer, train end to end after shrinking
Leaves:  a run folder with the packed model/ (or out=), errors per layer in model/quantization.json and
         report.html, perplexity before and after
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoestring.config import config_record, to_json
from shoestring.device import pick_device, pick_dtype
from shoestring.errors import in_run
from shoestring.evals.model_row import evaluate_row, text_tokens
from shoestring.formats import pack
from shoestring.model.encoder_types import encoder_type
from shoestring.model.folder import described
from shoestring.model.save import round_rest
from shoestring.paths import find_model
from shoestring.runlog import RunLog, open_run_folder, resumable
from shoestring.shrink import ptq_stages as stages
from shoestring.shrink.block_files import BlockFiles
from shoestring.shrink.blockwise import quantize_blocks
from shoestring.shrink.encoder_stages import shrink_encoder
from shoestring.shrink.mixed_bits import check_candidates, read_candidates
from shoestring.shrink.quality_gate import judge, mean_kl, outlier_table, outliers, predictions, refuse, verify_model
from shoestring.shrink.quantize import ENDS, plan
from shoestring.shrink.shrink_run import (
    calibration_windows,
    error_sections,
    held_out_text,
    keep_source,
    load_where_it_fits,
    read_rules,
    report_before_after,
    save_quantized,
)
from shoestring.shrink.whole_model import with_embedding
from shoestring.state.run_lock import hold_run


@dataclass(frozen=True)
class Config(stages.PtqSettings):
    """shrink/ptq_stages.py has the settings."""


def main(cfg: Config) -> Path:
    stages.check_settings(cfg)
    if encoder_type(source := find_model(cfg.model)) is not None:
        return shrink_encoder(cfg, source)
    rules = read_rules(cfg.rules, cfg.format)
    method = stages.pick_method(cfg)
    candidates = read_candidates(cfg.bits_budget, cfg.candidates, cfg.damage_windows, cfg.rules)
    device = pick_device(cfg.device)
    if (shape := described(cfg.model)) is not None and not candidates:
        plan(shape, with_embedding(rules, cfg.embed, shape))
    loaded, onload_device = load_where_it_fits(cfg.model, device, pick_dtype(cfg.dtype, device), cfg.stream)
    if candidates:
        assert cfg.bits_budget is not None
        check_candidates(loaded.model, candidates, cfg.bits_budget)
    else:
        rules = with_embedding(rules, cfg.embed, loaded.model)
        plan(loaded.model, rules)
    tokens, text = text_tokens(loaded, cfg.model, text=cfg.text, data=cfg.data)
    calib_NT = None
    if cfg.method != "rtn" or candidates or cfg.calib is not None:
        calib = (cfg.calib, cfg.calib_windows, cfg.calib_context, cfg.method)
        calib_NT = calibration_windows(loaded, cfg.model, *calib, hold_out=tokens is None)
        if tokens is None and cfg.calib is not None:
            tokens, text = held_out_text(loaded, cfg.calib, cfg.calib_windows, cfg.calib_context)
    calibration = stages.pick_calibration(cfg, method, onload_device)

    folder = open_run_folder("shrink/ptq", to_json(cfg))
    keep_source(folder, cfg.model)
    files, num_blocks = BlockFiles(folder / "blocks"), len(loaded.model.blocks)
    with (
        in_run(folder),
        resumable("shrink/ptq", folder, lambda: f" after {files.count()} of {num_blocks} blocks"),
        hold_run(folder),
    ):
        log = RunLog(folder)
        log.save_config(config_record("shrink/ptq", cfg, resume=None, run=str(folder)))
        log.truncate_after(0)
        if tokens is None:
            log.say("perplexity is not measured; give text=FILE, or a longer calibration text")

        def evaluate(label: str, changed: bool = False) -> None:
            """Once per run: a resumed one has the row."""
            if not any(row["model"] == label for row in log.evaluations()):
                offload = calibration if onload_device is not None else None
                sizes: dict[str, Any] = {"context": cfg.context, "max_tokens": cfg.max_tokens}
                log.evaluated(**evaluate_row(loaded, label, tokens, text, **sizes, offload=offload, changed=changed))

        evaluate("before")
        compared = tokens if tokens is not None or calib_NT is None else calib_NT[0]
        compared = compared if onload_device is None else None  # a streamed model has no whole forward
        predicted = predictions(loaded.model, compared)
        notes: dict[str, Any] = {
            "calibration": cfg.calib,
            "calibration_tokens": 0 if calib_NT is None else calib_NT.numel(),
        }
        if candidates:
            assert calib_NT is not None
            mix = stages.choose_mix(cfg, loaded.model, candidates, calib_NT, calibration, folder, log)
            rules = with_embedding(mix.rules, cfg.embed, loaded.model)
            notes["mixed_bits"] = mix.to_json()
        report = quantize_blocks(loaded.model, rules, method, calib_NT, calibration, files, log)
        pack(loaded.model, dtype=loaded.model.compute_dtype)
        ends = {c.name: c.format.stored().label for c in report.converted.changed if c.name in ENDS}
        said = "".join(f", {name} as {label}" for name, label in ends.items())
        log.say(f"{len(report.layers) - len(ends)} layers at {report.bits_per_weight:.2f} bits per weight{said}")
        round_rest(loaded.model)
        if onload_device is None:
            verify_model(loaded.model, cfg.verify)
        evaluate("after", changed=True)
        limits: dict[str, Any] = {"max_perplexity": cfg.max_perplexity, "force": cfg.force}
        limits["kl"] = mean_kl(predicted, predictions(loaded.model, compared))
        refuse(judge(loaded.model, log, layers=report.layers, **limits), f"resume={folder}")
        out = Path(cfg.out) if cfg.out else folder / "model"
        save_quantized(loaded, report, out, cfg.dense_out, **notes)
        plots, tables = error_sections(log, report)
        tables.append(outlier_table(outliers(report.layers)))
        report_before_after("shrink/ptq", log, folder, out, plots=plots, tables=tables)
        shutil.rmtree(files.folder, ignore_errors=True)
        (folder / stages.DAMAGE).unlink(missing_ok=True)  # mixed_bits.json holds the result
    return folder
