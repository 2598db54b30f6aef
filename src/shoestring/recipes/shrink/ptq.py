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
         shoestring run shrink/ptq model=BERT format=int4:g64 calib=some.txt     an encoder (recipes/encoders.py)
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

import json
import shutil
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from shoestring.config import deciding, option, to_json
from shoestring.device import pick_device, pick_dtype
from shoestring.evals.model_row import check_apart, evaluate_row, text_tokens
from shoestring.formats import Format, pack
from shoestring.formats.convert import ENDS
from shoestring.host.block_offload import check_spill
from shoestring.model.blocks import BlocksModel
from shoestring.model.encoder_types import encoder_type
from shoestring.model.folder import described
from shoestring.model.save import round_rest
from shoestring.paths import find_model
from shoestring.recipes.encoders import shrink_encoder
from shoestring.recipes.settings import (
    CalibSettings,
    FormatSettings,
    GateSettings,
    MixSettings,
    OffloadSettings,
    ResumeSettings,
    RoundSettings,
    SourceSettings,
)
from shoestring.recipes.shrink_run import (
    blocks_done,
    calibration_windows,
    check_results_fit,
    check_start,
    error_sections,
    held_out_text,
    load_where_it_fits,
    open_run,
    read_rules,
    report_before_after,
    save_quantized,
)
from shoestring.runlog import RunLog, check_outputs, write_atomically
from shoestring.shrink.block_files import BlockFiles
from shoestring.shrink.blockwise import Blockwise, quantize_blocks
from shoestring.shrink.calibrate import Calibration
from shoestring.shrink.clip import Clip
from shoestring.shrink.gptq import Gptq
from shoestring.shrink.mixed_bits import MixedBits, cheapest, check_candidates, choose_by_damage, read_candidates
from shoestring.shrink.quality_gate import judge, mean_kl, outlier_table, outliers, predictions, refuse, verify_model
from shoestring.shrink.quantize import METHODS, Method, plan, usual_inputs
from shoestring.shrink.whole_model import with_embedding

DAMAGE = "damage.jsonl"  # finished trials of bits_budget


@dataclass(frozen=True)
class Config(
    GateSettings,
    RoundSettings,
    ResumeSettings,
    OffloadSettings,
    MixSettings,
    CalibSettings,
    FormatSettings,
    SourceSettings,
):
    method: Literal["gptq", "gptq+clip", "gptq+cd", "gptq+clip+cd", "awq", "clip", "rtn", "blockwise"] = option(
        "gptq+clip", "how weights are chosen; blockwise trains them with their scales and zero points"
    )
    calib: str | None = option(
        None,
        "calibration text or corpus, several with commas between, or own: what the model writes itself; none: a run's "
        "own training text, else own; not for rtn",
    )
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
    damage_units: Literal["layer", "block"] = option(
        "layer", "bits_budget: what gets a format of its own", advanced=True
    )
    text: str | None = option(None, "a text file: perplexity before and after; default: the last tenth of calib")


def main(cfg: Config) -> Path:
    check_settings(cfg)
    method = pick_method(cfg)
    if encoder_type(source := find_model(cfg.model)) is not None:
        return shrink_encoder(cfg, source, method, pick_calibration(cfg, method, None))
    rules = read_rules(cfg.rules, cfg.format)
    candidates = read_candidates(cfg.bits_budget, cfg.candidates, cfg.damage_windows, cfg.rules)
    device = pick_device(cfg.device)
    if (shape := described(cfg.model)) is not None:
        if not candidates:
            plan(shape, with_embedding(rules, cfg.embed, shape))
        check_results_fit(to_json(cfg), shape, with_embedding(cheapest(candidates) or rules, cfg.embed, shape))
    loaded, onload_device = load_where_it_fits(cfg.model, device, pick_dtype(cfg.dtype, device), cfg.stream)
    if candidates:
        assert cfg.bits_budget is not None
        check_candidates(loaded.model, candidates, cfg.bits_budget)
        check_results_fit(to_json(cfg), loaded.model, with_embedding(cheapest(candidates), cfg.embed, loaded.model))
    else:
        rules = with_embedding(rules, cfg.embed, loaded.model)
        plan(loaded.model, rules)
        check_results_fit(to_json(cfg), loaded.model, rules)  # of a GGUF file, whose model is known only now
    tokens, text = text_tokens(loaded, cfg.model, text=cfg.text, data=cfg.data)
    calib_NT = None
    if cfg.method != "rtn" or candidates or cfg.calib is not None:
        calib = (cfg.calib, cfg.calib_windows, cfg.calib_context, cfg.method)
        calib_NT = calibration_windows(loaded, cfg.model, *calib, hold_out=tokens is None)
        if tokens is None and cfg.calib is not None:
            tokens, text = held_out_text(loaded, cfg.calib, cfg.calib_windows, cfg.calib_context)
    calibration = pick_calibration(cfg, method, onload_device)

    done = partial(blocks_done, len(loaded.model.blocks))
    with open_run("shrink/ptq", cfg, cfg.model, device=device, done=done) as run:
        folder, log, files = run.folder, run.log, BlockFiles(run.folder / "blocks")
        log.truncate_after(0)
        if tokens is None:
            log.say("perplexity is not measured, and loss where it was calibrated; give text=FILE, or a longer calib=")

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
            mix = choose_mix(cfg, loaded.model, candidates, calib_NT, calibration, folder, log)
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
        (folder / DAMAGE).unlink(missing_ok=True)  # mixed_bits.json holds the result
    return folder


# -- stages -------------------------------------------------------------------------------------------------


def check_settings(cfg: Config) -> None:
    """The checks that need no model."""
    settings = to_json(cfg)
    check_start(settings, deciding(Config))
    check_outputs(settings, "out", "dense_out")
    check_spill(cfg.spill)
    check_apart(settings, "calib")


def pick_calibration(cfg: Config, method: Method | Blockwise, onload_device: torch.device | None) -> Calibration:
    weigh = cfg.weigh if cfg.weigh != "auto" else "token" if isinstance(method, Gptq) else "square"
    found = Calibration(memory_gb=cfg.memory_gb, folder=cfg.spill, onload_device=onload_device, weigh=weigh)
    if cfg.inputs != "auto":
        return replace(found, inputs=cfg.inputs)
    return found if isinstance(method, Blockwise) else replace(found, inputs=usual_inputs(method))


def pick_method(cfg: Config) -> Method | Blockwise:
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
    cfg: Config,
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
