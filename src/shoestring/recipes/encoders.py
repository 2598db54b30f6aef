"""shrink/ptq for encoders: the BERT family, and ViT-like models, through `ModuleBlocks`.

    shoestring run shrink/ptq model=BERT format=int4:g64 calib=some.txt
    shoestring run shrink/ptq model=VIT format=int4:g64 method=awq calib=images.safetensors

An encoder has no perplexity. What it gives is compared before and after. Of a text encoder, `similarity` is the mean
cosine of the vectors of SENTENCES, pooled as /v1/embeddings pools them, and `least_similarity` the smallest; of others,
that of the vectors on inputs that calibration has not seen, one in eight. `output_error` is the relative distance of
the outputs on these. A model whose similarity is below MIN_SIMILARITY is broken and not delivered.

Calibration: a text (windows of `calib_context` tokens), or a safetensors file with one tensor of inputs [N, ...].
Rounding (method=rtn) of a text encoder needs none.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoestring.config import to_json
from shoestring.device import pick_device, pick_dtype
from shoestring.errors import UserError
from shoestring.evals.model_row import read_tokens
from shoestring.formats import Format, convert, pack, parse_format, self_check
from shoestring.formats.convert import Rule
from shoestring.json_files import Fields, read_object
from shoestring.model.encoder import blocks_of, load_encoder_module, save_packed_encoder
from shoestring.model.encoder_types import IMAGE_TYPES, encoder_type
from shoestring.model.module_blocks import ModuleBlocks
from shoestring.model.save import round_rest
from shoestring.model.tokenizer import Tokenizer
from shoestring.recipes.shrink_run import blocks_done, check_targets_fit, error_sections, open_run, read_rules
from shoestring.report import Text, eval_table, run_sections, write_report
from shoestring.runlog import write_atomically
from shoestring.serve.engine.encoder import EncoderRunner, folder_pooling, text_encoder
from shoestring.shrink.block_files import BlockFiles
from shoestring.shrink.blockwise import Blockwise, quantize_blocks
from shoestring.shrink.calibrate import Calibration, windows
from shoestring.shrink.quality_gate import judge, outlier_table, outliers, refuse
from shoestring.shrink.quantize import Method, plan
from shoestring.state.tensor_files import TensorFiles

if TYPE_CHECKING:
    from shoestring.recipes.shrink.ptq import Config

MIN_SIMILARITY = 0.5
HELD_OUT = 8  # one input in so many judges
RECIPE = "shrink/ptq"
# What a text encoder is judged on.
SENTENCES = (
    "The library opens at half past nine and closes at six, except on Sundays.",
    "How do I reset the password of my account?",
    "Water boils at a lower temperature on a mountain than at sea level.",
    "The central bank left interest rates unchanged for the third month in a row.",
    "A small dog slept on the porch while the children played in the garden.",
    "def area(radius): return 3.14159 * radius ** 2",
    "The patient was given antibiotics and discharged after two days.",
    "Which train do I take from the airport to the old town?",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen.",
    "The contract ends if either side gives notice three months in advance.",
    "She finished the marathon in under four hours, her best time so far.",
    "Preheat the oven to 180 degrees and bake the bread for forty minutes.",
    "Scientists found traces of ice in a crater near the moon's south pole.",
    "The film is too long, but its last scene is worth the wait.",
    "My order arrived late, the box was damaged and one item was missing.",
    "In 1789 the Bastille was stormed by a crowd in search of gunpowder.",
    "Use a hash table when you need to look up values by key in constant time.",
    "The old bridge was closed to traffic after engineers found cracks in it.",
    "Wind and solar power produced half of the country's electricity last spring.",
    "Please send the signed form back to us by the end of the week.",
    "Der Zug nach Hamburg fährt heute von einem anderen Gleis ab.",
    "Le musée est gratuit le premier dimanche de chaque mois.",
    "No.",
    "Quarterly revenue rose by 12% to 4.3 billion dollars, while costs fell by 2%.",
)


def shrink_encoder(cfg: Config, source: Path, method: Method | Blockwise, calibration: Calibration) -> Path:
    """The whole recipe; `source` is the folder of the encoder."""
    check_settings(cfg, source)
    device = pick_device(cfg.device)
    inputs = read_inputs(cfg, source)
    model = load_encoder_module(source, device, pick_dtype(cfg.dtype, device))
    blocks = ModuleBlocks(model, blocks_of(model))
    rules = block_rules(read_rules(cfg.rules, cfg.format))
    check_targets_fit(to_json(cfg), sum(p.numel() for p in model.parameters()), plan(blocks, rules))
    held, calib = inputs[::HELD_OUT], inputs[torch.arange(len(inputs)) % HELD_OUT != 0]
    with open_run(RECIPE, cfg, source, device=device, done=partial(blocks_done, len(blocks.blocks))) as run:
        folder, log, files = run.folder, run.log, BlockFiles(run.folder / "blocks")
        log.truncate_after(0)
        before, spoken = outputs(model, held), sentence_vectors(model, source)
        log.evaluated(model="before", format="dense", megabytes=weight_megabytes(source))
        report = quantize_blocks(blocks, rules, method, calib, calibration, files, log)
        if name := embedding_name(model):
            convert(model, [(name, parse_format(cfg.embed))])
        pack(model, dtype=blocks.compute_dtype)
        round_rest(model)
        if cfg.verify != "false":
            self_check(model, held[:1].to(device))
        found = compare(before, outputs(model, held), spoken, sentence_vectors(model, source))
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
        what = "outputs" if spoken is None else "sentences' vectors"
        least = "" if spoken is None else f" ({found['least_similarity']:.4f} at least)"
        log.say(f"similarity of {what} {found['similarity']:.4f}{least}, relative error {found['output_error']:.4f}")
        eval_table(log.evaluations(), "Before and after").print()
        plots, tables = error_sections(log, report)
        next_text = f"shoestring inspect {out}" + ("" if is_image(source) else f"\nshoestring serve {out}")
        tables += [outlier_table(outliers(report.layers)), Text("Next", next_text, code=True)]
        page = write_report(folder, RECIPE, [*plots, *run_sections(folder), *tables], subtitle=str(folder))
        log.say(f"packed model in {out}, report in {page}. Next:\n{next_text}")
        log.close()
        shutil.rmtree(files.folder, ignore_errors=True)
    return folder


def check_settings(cfg: Config, source: Path) -> None:
    usual = type(cfg)()
    for key in ("text", "data", "bits_budget", "dense_out"):
        if getattr(cfg, key) != getattr(usual, key):
            raise UserError(f"{key}= is for models that predict tokens, and {source} is an encoder: leave it out")
    if cfg.stream == "true":
        raise UserError(f"stream=true moves the blocks of decoders, and {source} is an encoder: leave it out")
    if cfg.calib is None and (cfg.method != "rtn" or is_image(source)):
        rtn = "" if is_image(source) else "; or method=rtn, which needs none"
        raise UserError(
            f"{source} is an encoder: give calib=, a text or a safetensors file with one tensor of inputs{rtn}"
        )


def weight_megabytes(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6


def is_image(source: Path) -> bool:
    return encoder_type(source) in IMAGE_TYPES


def read_inputs(cfg: Config, source: Path) -> Tensor:
    """What the encoder reads, [N, ...], two or more."""
    fields = Fields(read_object(source / "config.json"), str(source / "config.json"))
    if cfg.calib is None:
        tokens = torch.tensor(Tokenizer.from_file(source).encode("\n".join(SENTENCES)))
        context = min(16, fields.whole("max_position_embeddings") - 2)
        return windows(tokens, min(cfg.calib_windows, len(tokens) // context), context)
    path = Path(cfg.calib)
    if path.suffix == ".safetensors" and path.is_file():
        files = TensorFiles(path.parent, path.stem)
        if len(files.names) != 1:
            raise UserError(f"calib={path} holds {len(files.names)} tensors; give one, the inputs [N, ...]")
        inputs = files.read(files.names[0])[: cfg.calib_windows + cfg.calib_windows // (HELD_OUT - 1) + 1]
    elif is_image(source) or not path.is_file():
        what = "images: one tensor [N, channels, height, width]" if is_image(source) else "a text, or one tensor [N, T]"
        raise UserError(f"calib={path} is not what this encoder reads; give {what} in a .safetensors file")
    else:
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


def sentence_vectors(model: nn.Module, source: Path) -> Tensor | None:
    """SENTENCES as a server embeds them, [N, D]; None for encoders of images."""
    if is_image(source):
        return None
    encoder = text_encoder(source, model)
    ids = [encoder.tokenizer.encode(text)[: encoder.max_positions] for text in SENTENCES]
    parts = [EncoderRunner(model).embedding_parts([one], folder_pooling(source) or "mean", len(one)) for one in ids]
    return torch.cat([vector for part in parts for vector in part if vector is not None])


def compare(before: Tensor, after: Tensor, spoken: Tensor | None, after_spoken: Tensor | None) -> dict[str, float]:
    found = {"output_error": round(float((after - before).norm() / before.norm()), 5)}
    if spoken is None or after_spoken is None:
        return {"similarity": round(float(F.cosine_similarity(before, after, dim=-1).mean()), 5), **found}
    cosine = F.cosine_similarity(spoken, after_spoken, dim=-1)
    return {"similarity": round(float(cosine.mean()), 5), "least_similarity": round(float(cosine.min()), 5), **found}
