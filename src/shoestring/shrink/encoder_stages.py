"""shrink/ptq for encoders: the BERT family, and ViT-like models, through `ModuleBlocks`.

    shoestring run shrink/ptq model=BERT format=int4:g64 calib=some.txt
    shoestring run shrink/ptq model=VIT format=int4:g64 method=awq calib=images.safetensors

An encoder has no perplexity. What it gives on inputs that calibration has not seen, one in eight, is compared before
and after: `similarity` is the mean cosine of the vectors that it puts out, `output_error` their relative distance. A
model whose similarity is below MIN_SIMILARITY is broken and not delivered.

Calibration: a text (windows of `calib_context` tokens), or a safetensors file with one tensor of inputs [N, ...].
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoestring.config import to_json
from shoestring.device import pick_device, pick_dtype
from shoestring.errors import UserError, in_run
from shoestring.evals.model_row import read_tokens
from shoestring.formats import Format, convert, pack, parse_format, self_check
from shoestring.formats.convert import Rule
from shoestring.json_files import Fields, read_object
from shoestring.model.encoder import blocks_of, load_encoder_module, save_packed_encoder
from shoestring.model.encoder_types import IMAGE_TYPES, encoder_type
from shoestring.model.module_blocks import ModuleBlocks
from shoestring.model.save import round_rest
from shoestring.model.tokenizer import Tokenizer
from shoestring.report import Text, eval_table, run_sections, write_report
from shoestring.runlog import RunLog, open_run_folder, resumable, write_atomically
from shoestring.shrink import ptq_stages
from shoestring.shrink.block_files import BlockFiles
from shoestring.shrink.blockwise import quantize_blocks
from shoestring.shrink.calibrate import windows
from shoestring.shrink.quality_gate import judge, outlier_table, outliers, refuse
from shoestring.shrink.quantize import plan
from shoestring.shrink.shrink_run import error_sections, keep_source, read_rules
from shoestring.state.run_lock import hold_run
from shoestring.state.tensor_files import TensorFiles

MIN_SIMILARITY = 0.5
HELD_OUT = 8  # one input in so many judges
RECIPE = "shrink/ptq"


def shrink_encoder(cfg: ptq_stages.PtqSettings, source: Path) -> Path:
    """The whole recipe; `source` is the folder of the encoder."""
    check_settings(cfg, source)
    method, device = ptq_stages.pick_method(cfg), pick_device(cfg.device)
    inputs = read_inputs(cfg, source)
    model = load_encoder_module(source, device, pick_dtype(cfg.dtype, device))
    blocks = ModuleBlocks(model, blocks_of(model))
    rules = block_rules(read_rules(cfg.rules, cfg.format))
    plan(blocks, rules)
    held, calib = inputs[::HELD_OUT], inputs[torch.arange(len(inputs)) % HELD_OUT != 0]
    calibration = ptq_stages.pick_calibration(cfg, method, None)
    folder = open_run_folder(RECIPE, to_json(cfg))
    keep_source(folder, source)
    files = BlockFiles(folder / "blocks")
    with (
        in_run(folder),
        resumable(RECIPE, folder, lambda: f" after {files.count()} of {len(blocks.blocks)} blocks"),
        hold_run(folder),
    ):
        log = RunLog(folder)
        log.save_config({"recipe": RECIPE, "config": {**to_json(cfg), "resume": None, "run": str(folder)}})
        log.truncate_after(0)
        before = outputs(model, held)
        log.evaluated(model="before", format="dense", megabytes=weight_megabytes(source))
        report = quantize_blocks(blocks, rules, method, calib, calibration, files, log)
        if name := embedding_name(model):
            convert(model, [(name, parse_format(cfg.embed))])
        pack(model, dtype=blocks.compute_dtype)
        round_rest(model)
        if cfg.verify != "false":
            self_check(model, held[:1].to(device))
        found = compare(before, outputs(model, held))
        problems = []
        if not found["similarity"] >= MIN_SIMILARITY:  # NaN, too
            problems.append(f"its outputs have a similarity of {found['similarity']:.3f} (allowed: {MIN_SIMILARITY})")
        limits: dict[str, Any] = {"max_perplexity": cfg.max_perplexity, "force": cfg.force, "problems": problems}
        refuse(judge(model, log, layers=report.layers, **limits), f"resume={folder}")
        out = Path(cfg.out) if cfg.out else folder / "model"
        save_packed_encoder(out, model, source)
        about = {**report.to_json(), **found, "calibration": cfg.calib}
        write_atomically(out / "quantization.json", json.dumps(about, indent=1) + "\n")
        label = cfg.rules or cfg.format
        log.evaluated(model="after", format=label, megabytes=weight_megabytes(out), **found)
        log.say(f"similarity of outputs {found['similarity']:.4f}, relative error {found['output_error']:.4f}")
        eval_table(log.evaluations(), "Before and after").print()
        plots, tables = error_sections(log, report)
        next_text = f"shoestring inspect {out}" + ("" if is_image(source) else f"\nshoestring serve {out}")
        tables += [outlier_table(outliers(report.layers)), Text("Next", next_text, code=True)]
        page = write_report(folder, RECIPE, [*plots, *run_sections(folder), *tables], subtitle=str(folder))
        log.say(f"packed model in {out}, report in {page}. Next:\n{next_text}")
        log.close()
        shutil.rmtree(files.folder, ignore_errors=True)
    return folder


def check_settings(cfg: ptq_stages.PtqSettings, source: Path) -> None:
    usual = ptq_stages.PtqSettings()
    for key in ("text", "data", "bits_budget", "dense_out"):
        if getattr(cfg, key) != getattr(usual, key):
            raise UserError(f"{key}= is for models that predict tokens, and {source} is an encoder: leave it out")
    if cfg.stream == "true":
        raise UserError(f"stream=true moves the blocks of decoders, and {source} is an encoder: leave it out")
    if cfg.calib is None:
        raise UserError(f"{source} is an encoder: give calib=, a text or a safetensors file with one tensor of inputs")


def weight_megabytes(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6


def is_image(source: Path) -> bool:
    return encoder_type(source) in IMAGE_TYPES


def read_inputs(cfg: ptq_stages.PtqSettings, source: Path) -> Tensor:
    """What the encoder reads, [N, ...], two or more."""
    path = Path(str(cfg.calib))
    if path.suffix == ".safetensors" and path.is_file():
        files = TensorFiles(path.parent, path.stem)
        if len(files.names) != 1:
            raise UserError(f"calib={path} holds {len(files.names)} tensors; give one, the inputs [N, ...]")
        inputs = files.read(files.names[0])[: cfg.calib_windows + cfg.calib_windows // (HELD_OUT - 1) + 1]
    elif is_image(source) or not path.is_file():
        what = "images: one tensor [N, channels, height, width]" if is_image(source) else "a text, or one tensor [N, T]"
        raise UserError(f"calib={path} is not what this encoder reads; give {what} in a .safetensors file")
    else:
        fields = Fields(read_object(source / "config.json"), str(source / "config.json"))
        context = min(cfg.calib_context, fields.whole("max_position_embeddings") - 2)
        tokens = read_tokens(path, Tokenizer.from_file(source))
        inputs = windows(tokens.long(), cfg.calib_windows, context)
    if len(inputs) < 2:
        raise UserError(f"calib={path} has {len(inputs)} inputs; give 2 or more: one of them judges")
    return inputs


def block_rules(rules: list[tuple[str, Format]]) -> list[Rule]:
    """Rules for the linear layers of the blocks: what else an encoder has stays as it is."""
    return [(glob if glob.startswith("blocks.") else f"blocks.{glob}", format) for glob, format in rules]


def embedding_name(model: nn.Module) -> str | None:
    """The largest table of tokens, which `embed` is for."""
    tables = {n: m for n, m in model.named_modules() if isinstance(m, nn.Embedding)}
    return max(tables, key=lambda n: tables[n].weight.numel()) if tables else None


@torch.no_grad()
def outputs(model: nn.Module, inputs: Tensor) -> Tensor:
    """[N, T, D], fp32 on the CPU."""
    device = next(model.parameters()).device
    return torch.cat([model(one[None].to(device)).last_hidden_state.float().cpu() for one in inputs])


def compare(before: Tensor, after: Tensor) -> dict[str, float]:
    error = (after - before).norm() / before.norm()
    similarity = F.cosine_similarity(before, after, dim=-1).mean()
    return {"similarity": round(float(similarity), 5), "output_error": round(float(error), 5)}
