"""Shrink a model to 2, 3, 4 or 8 bits, guided by a calibration text: GPTQ, AWQ, clip search, block-wise training.

Run:     shoestring run shrink/ptq model=DIR format=nf3 method=gptq calib=some.txt text=other.txt
         shoestring run shrink/ptq model=RUN format=int2 method=gptq+clip
         shoestring run shrink/ptq model=DIR "rules=*.mlp.*=nf3;*=int4" method=awq calib=FOLDER memory_gb=8
         shoestring run shrink/ptq model=DIR format=int2 method=blockwise calib=some.txt calib_windows=128
         shoestring run shrink/ptq model=DIR bits_budget=3 candidates=int2,int3,int4 method=awq calib=some.txt
         shoestring run shrink/ptq model=PRUNED format=sparse24+int4:g32 calib=some.txt   what shrink/prune24 has kept
         shoestring run shrink/ptq resume=RUN        goes on at the next block after Ctrl-C or a crash
         shoestring run shrink/ptq model=DIR format=int4 calib=some.txt stream=true      model larger than the GPU
Needs:   memory for the model in fp32 (CPU) or bf16 (GPU) plus one block's activations (or disk: memory_gb);
         streamed, the device needs room for one block and for the embedding or the output head, and the host for
         the model as it is stored
Time:    SmolLM2-135M, nf3, 8 windows of 512 on one CPU core: gptq 4 minutes, clip and awq 1 to 2 and one for the
         statistics, blockwise 16; more windows cost gptq half a minute for every four. Evaluating comes on top
Expect:  SmolLM2-135M, nf3 in groups of 64, WikiText-2: perplexity 27.0 before; 60.2 rounded (rtn), 48.7 with
         gptq, 44.7 with clip, 40.4 with awq, 31.5 with blockwise on 4,096 calibration tokens (docs/methods/ptq.md,
         blockwise.md). For still less loss at 3 bits or fewer, train end to end after shrinking
Leaves:  a run folder with the packed model/ (or out=), errors per layer in model/quantization.json and
         report.html, perplexity before and after
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from shoestring.config import option, to_json
from shoestring.errors import UserError, during, in_run
from shoestring.formats import Format, pack, parse_format, unpack
from shoestring.formats.convert import Rule
from shoestring.measure import (
    check_apart,
    corpus_of_run,
    evaluate_row,
    fitting_context,
    need_tokenizer,
    pick_device,
    pick_dtype,
    read_tokens,
    text_tokens,
)
from shoestring.model import Decoder, save_model
from shoestring.model.folder import Loaded
from shoestring.recipes.shrink.rtn import finish, parse_rules
from shoestring.report import Curves, Section, Series, Table
from shoestring.runlog import (
    RunLog,
    check_outputs,
    check_run_folder,
    check_unfinished,
    open_run_folder,
    resumable,
    write_atomically,
)
from shoestring.shrink.blockwise import Blockwise, train_blocks
from shoestring.shrink.calibrate import BlockStep, Calibration, check_spill, walk, windows
from shoestring.shrink.clip import Clip
from shoestring.shrink.gptq import Gptq
from shoestring.shrink.mixed_bits import (
    Mix,
    check_candidates,
    check_different,
    choose_formats,
    measure_damage,
    units_of,
)
from shoestring.shrink.quantize import METHODS, Method, QuantizeReport, plan, quantize, usual_inputs
from shoestring.shrink.resume import BlockFiles
from shoestring.shrink.visit import load_where_it_fits

# Settings that finished blocks, and the perplexity before, depend on.
DECIDING = (
    *("model", "format", "rules", "method", "calib", "calib_windows", "calib_context", "inputs", "act_order"),
    *("damping", "objective", "dtype"),
    *("init", "train", "epochs", "train_batch", "lr_weight", "lr_scale", "lr_zero", "lr_norm", "loss"),
    *("held_out", "seed", "bits_budget", "candidates", "damage_windows", "damage_units"),
    *("text", "data", "context", "max_tokens"),
)
DAMAGE = "damage.jsonl"  # finished trials of bits_budget
MAX_TOKENS = 5_000_000  # of a calibration corpus: windows are spread over these


@dataclass(frozen=True)
class Config:
    model: str = option("", "a Hugging Face folder, a run folder or a .gguf file")
    format: str = option(
        "nf3", "for all linear layers: int2 int3 int4 int8 nf2 nf3 nf4 fp3 fp4, with :g128 :s1"
    )
    rules: str | None = option(
        None, "instead of format: glob=format;glob=format, the first that matches wins"
    )
    method: Literal["gptq", "gptq+clip", "awq", "clip", "rtn", "blockwise"] = option(
        "gptq", "how weights are chosen; blockwise trains them with their scales and zero points"
    )
    calib: str | None = option(
        None, "calibration text or corpus; a run is calibrated on its own training text by default"
    )
    calib_windows: int = option(32, "windows of calibration text", least=1)
    calib_context: int = option(512, "tokens in a window", least=1)
    inputs: Literal["auto", "quantized", "full"] = option(
        "auto", "what a block sees: outputs of quantized or of full blocks; auto: as published for the method"
    )
    act_order: bool = option(False, "gptq: columns with large inputs first")
    damping: float = option(0.01, "gptq: added to the Hessian's diagonal, as a part of its mean")
    objective: Literal["group", "row"] = option(
        "group", "clip: output error of each group or of the whole row"
    )
    init: Literal["awq", "clip", "gptq", "gptq+clip", "rtn"] = option(
        "awq", "blockwise: the method whose grids training starts from"
    )
    train: Literal["all", "grid"] = option(
        "all", "blockwise: everything, or scales and zero points only (a learned clip)"
    )
    epochs: int = option(4, "blockwise: passes over the calibration windows, for every block", least=1)
    train_batch: int = option(2, "blockwise: windows in a step", least=1)
    lr_weight: float = option(Blockwise.lr_weight, "blockwise: in parts of a layer's rounding error", least=0)
    lr_scale: float = option(Blockwise.lr_scale, "blockwise: in parts of a layer's mean scale", least=0)
    lr_zero: float = option(Blockwise.lr_zero, "blockwise: in codes", least=0)
    lr_norm: float = option(
        Blockwise.lr_norm, "blockwise: in parts of a norm's or bias' size; 0 leaves them", least=0
    )
    held_out: float = option(Blockwise.held_out, "blockwise: part of the windows that only judges")
    loss: Literal["token", "square"] = option("token", "blockwise: every token alike, or plain squares")
    seed: int = option(0, "blockwise: order of the windows")
    bits_budget: float | None = option(
        None, "instead of format: bits per weight over all layers, shared out by measured damage"
    )
    candidates: str = option("int2,int3,int4", "bits_budget: the formats to choose from")
    damage_windows: int = option(
        4, "bits_budget: calibration windows that the damage is measured on", least=1
    )
    damage_units: Literal["layer", "block"] = option("layer", "bits_budget: what gets a format of its own")
    stream: Literal["auto", "true", "false"] = option(
        "auto",
        "true: the model stays in the host's memory and one block at a time goes to the device; auto: where the "
        "whole model would take more than half of the device's free memory",
    )
    memory_gb: float = option(4.0, "activations beyond this go to a file", least=0)
    spill: str | None = option(None, "folder for that file; none: the system's temporary folder")
    out: str | None = option(None, "folder for the packed model; none puts it into the run folder")
    dense_out: str | None = option(None, "also write the rounded weights as a dense Hugging Face folder")
    text: str | None = option(None, "a text file: perplexity before and after")
    data: str | None = option(
        None, "or a corpus: its validation split. A run is evaluated on its own by default"
    )
    context: int = option(512, "tokens the model sees at once in the evaluation", least=2)
    max_tokens: int = option(16384, "tokens of the text to evaluate at most", least=2)
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = option("auto", "compute precision; auto: bf16 on a GPU")
    device: str = option("auto", "auto, cpu, cuda or cuda:1 ...")
    run: str | None = option(None, "folder for this run; none makes runs/shrink-ptq-DATE")
    resume: str | None = option(None, "a stopped run folder to go on with; its settings are taken over")


def main(cfg: Config) -> Path:
    check_settings(cfg)
    rules = parse_rules(cfg.rules) if cfg.rules else [("*", parse_format(cfg.format))]
    candidates, method = pick_candidates(cfg), pick_method(cfg)
    device = pick_device(cfg.device)
    loaded, visit = load_where_it_fits(cfg.model, device, pick_dtype(cfg.dtype, device), cfg.stream)
    if candidates:
        assert cfg.bits_budget is not None
        check_candidates(loaded.model, candidates, cfg.bits_budget)
    else:
        plan(loaded.model, rules)
    calib_NT = calibration_windows(cfg, loaded)
    calibration = pick_calibration(cfg, method, visit)
    tokens, text = text_tokens(loaded, cfg.model, text=cfg.text, data=cfg.data)

    folder = open_run_folder("shrink/ptq", to_json(cfg))
    files, num_blocks = BlockFiles(folder / "blocks"), len(loaded.model.blocks)
    with (
        in_run(folder),
        resumable("shrink/ptq", folder, lambda: f" after {files.count()} of {num_blocks} blocks"),
    ):
        log = RunLog(folder)
        log.save_config(
            {"recipe": "shrink/ptq", "config": to_json(replace(cfg, resume=None, run=str(folder)))}
        )
        log.truncate_after(0)

        def evaluate(label: str) -> None:
            """Once in a run's life: a resumed one has the row already."""
            if not any(row["model"] == label for row in log.evaluations()):
                stream = calibration if visit is not None else None
                sizes: dict[str, Any] = {"context": cfg.context, "max_tokens": cfg.max_tokens}
                log.evaluated(**evaluate_row(loaded, label, tokens, text, **sizes, stream=stream))

        evaluate("before")
        mix = None
        if candidates:
            assert calib_NT is not None
            mix = mixed_bits(cfg, loaded, candidates, calib_NT, calibration, log, folder)
            rules = mix.rules
        report = shrink_blocks(loaded.model, rules, method, calib_NT, calibration, files, log)
        pack(loaded.model, dtype=loaded.model.compute_dtype)
        log.say(f"{len(report.layers)} layers at {report.converted.bits_per_weight:.2f} bits per weight")
        evaluate("after")
        out = deliver(cfg, loaded, report, mix, calib_NT, folder)
        plots, tables = error_plots(log, report)
        finish("shrink/ptq", log, folder, out, plots=plots, tables=tables)
        shutil.rmtree(files.folder, ignore_errors=True)  # only now: no resume needs them
        (folder / DAMAGE).unlink(missing_ok=True)  # mixed_bits.json says the same
    return folder


def check_settings(cfg: Config) -> None:
    """What can be said without a look at the model."""
    if not cfg.model:
        raise UserError("model= is missing: give a Hugging Face folder, a run folder or a .gguf file")
    settings = to_json(cfg)
    check_run_folder(settings, DECIDING)
    check_unfinished(cfg.resume)
    check_outputs(settings, "out", "dense_out")
    check_spill(cfg.spill)
    check_apart(settings, "calib")


def pick_calibration(cfg: Config, method: Method | Blockwise, visit: torch.device | None) -> Calibration:
    found = Calibration(memory_gb=cfg.memory_gb, folder=cfg.spill, visit=visit)
    if cfg.inputs != "auto":
        return replace(found, inputs=cfg.inputs)
    return found if isinstance(method, Blockwise) else replace(found, inputs=usual_inputs(method))


def shrink_blocks(
    model: Decoder,
    rules: Sequence[Rule],
    method: Method | Blockwise,
    calib_NT: Tensor | None,
    calibration: Calibration,
    files: BlockFiles,
    log: RunLog,
) -> QuantizeReport:
    """Block after block by the method; finished ones are in `files`."""
    with during(method.name), log.progress(len(model.blocks), f"{method.name} by block") as bar:

        def progress(done: int, total: int, error: float) -> None:
            log.log(done, output_error=error)
            bar.advance(1, error=error)

        if isinstance(method, Blockwise):
            assert calib_NT is not None
            return train_blocks(model, rules, calib_NT, method, calibration, progress=progress, files=files)
        steps: Iterable[BlockStep] = ()
        if calib_NT is not None:
            steps = walk(model, calib_NT, calibration, start=files.count())
        return quantize(model, rules, steps, method, progress=progress, files=files, visit=calibration.visit)


def deliver(
    cfg: Config,
    loaded: Loaded,
    report: QuantizeReport,
    mix: Mix | None,
    calib_NT: Tensor | None,
    folder: Path,
) -> Path:
    """Write the packed model with its errors, and the dense one where it was asked for."""
    model = loaded.model
    # What never left home is in the checkpoint's dtype: streamed or not, the files are the same.
    model.to(model.compute_dtype)
    out = Path(cfg.out) if cfg.out else folder / "model"
    save_model(out, model, loaded.tokenizer)
    told = {
        **report.to_json(),
        "calibration": cfg.calib,
        "calibration_tokens": 0 if calib_NT is None else calib_NT.numel(),
        **({"mixed_bits": mix.to_json()} if mix is not None else {}),
    }
    write_atomically(out / "quantization.json", json.dumps(told, indent=1) + "\n")
    if cfg.dense_out is not None:
        unpack(model)
        save_model(cfg.dense_out, model, loaded.tokenizer)
    return out


def pick_candidates(cfg: Any) -> list[Format]:
    """The formats that bits_budget chooses from; none without a budget. shrink/lowbit_best has the same settings."""
    if cfg.bits_budget is None:
        return []
    if not cfg.bits_budget > 0 or cfg.damage_windows < 1:
        raise UserError(
            f"bits_budget={cfg.bits_budget}, damage_windows={cfg.damage_windows}: give more than 0 bits per weight "
            "and 1 window or more"
        )
    if cfg.rules:
        raise UserError("rules and bits_budget both say which layer gets what: give one of them")
    formats = [parse_format(part) for part in cfg.candidates.split(",") if part.strip()]
    if not formats:
        raise UserError("candidates= is empty: bits_budget needs formats to choose from, say int2,int3,int4")
    check_different(formats)
    return formats


def mixed_bits(
    cfg: Config,
    loaded: Loaded,
    candidates: list[Format],
    calib_NT: Tensor,
    calibration: Calibration,
    log: RunLog,
    folder: Path,
) -> Mix:
    """Measure every layer's damage (or take up where a stopped run was), and choose."""
    assert cfg.bits_budget is not None
    some = calib_NT[:: max(1, len(calib_NT) // cfg.damage_windows)][: cfg.damage_windows]
    num_trials = len(candidates) * len(units_of(loaded.model, candidates, cfg.damage_units))
    with during("measuring damage"), log.progress(num_trials, f"damage by {cfg.damage_units}") as bar:
        units = measure_damage(
            loaded.model,
            candidates,
            some,
            units=cfg.damage_units,
            calibration=calibration,
            progress=lambda done, total, damage: bar.advance(1, damage=damage),
            file=folder / DAMAGE,
        )
    mix = choose_formats(units, cfg.bits_budget)
    counts = Counter(o.format.label for o in mix.chosen)
    said = ", ".join(f"{n} x {label}" for label, n in counts.items())
    log.say(f"{mix.bits_per_weight:.3f} of {cfg.bits_budget} bits per weight: {said}")
    write_atomically(folder / "mixed_bits.json", json.dumps(mix.to_json(), indent=1) + "\n")
    return mix


def pick_method(cfg: Config) -> Method | Blockwise:
    if cfg.method == "blockwise":
        same = [f.name for f in dataclasses.fields(Blockwise) if hasattr(cfg, f.name)]
        return Blockwise(batch=cfg.train_batch, **{name: getattr(cfg, name) for name in same})
    clip = Clip(objective=cfg.objective)
    if cfg.method in ("gptq", "gptq+clip"):
        with_clip = clip if cfg.method == "gptq+clip" else None
        return Gptq(damping=cfg.damping, act_order=cfg.act_order, clip=with_clip)
    return clip if cfg.method == "clip" else METHODS[cfg.method]


def calibration_windows(cfg: Config, loaded: Loaded) -> Tensor | None:
    """[windows, context] token ids; None only for rtn without a text, which needs none."""
    source, max_mb = (cfg.calib, None) if cfg.calib is not None else corpus_of_run(Path(cfg.model))
    if source is None:
        if cfg.method == "rtn" and cfg.bits_budget is None:
            return None
        raise UserError(
            f"method={cfg.method} needs a calibration text: give calib=FILE or a corpus; not the text that is "
            "evaluated"
        )
    tokenizer = need_tokenizer(loaded)
    path = Path(source)
    if path.is_file() and path.suffix in (".txt", ".md", ""):
        tokens = read_tokens(path, tokenizer)
    else:
        from shoestring.train.shards import prepare

        options: dict[str, Any] = {"max_bytes": None if max_mb is None else int(max_mb * 1e6)}
        options |= {"key": "data" if cfg.calib is None else "calib", "progress": RunLog(None).progress}
        tokens = prepare(source, tokenizer=tokenizer, **options).train.head(MAX_TOKENS)
    context = fitting_context("calib_context", cfg.calib_context, loaded)
    return windows(tokens.to(torch.int64), cfg.calib_windows, context)


def error_plots(log: RunLog, report: QuantizeReport) -> tuple[list[Section], list[Section]]:
    """The curve of errors by block; the tables of blocks and layers."""
    blocks = [row for row in log.history if "output_error" in row]
    curve = Series("output error", [row["step"] for row in blocks], [row["output_error"] for row in blocks])
    fields = [f.name for f in dataclasses.fields(report.layers[0])] if report.layers else []
    layers = [[getattr(layer, f) for f in fields] for layer in report.layers]
    trained = [[i, b["before"], b["after"]] for i, b in enumerate(report.blocks)]
    tables: list[Section] = [
        Table("Layers", [f.replace("_", " ") for f in fields], layers, "Errors are relative mean squares.")
    ]
    if trained:
        head = ["block", "error before", "error after"]
        tables.insert(0, Table("Blocks", head, trained, "On windows held out."))
    return [
        Curves("Error by block", [curve], "block", "mean square of the outputs' change, relative")
    ], tables
