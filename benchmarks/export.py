"""Exported models in the programs they were exported for: is it the same model there, and how large is the file?

    python -m benchmarks.export             about 12 minutes on one CPU core; needs llama-cpp-python and transformers

Every case is an export with `--certify`: SmolLM2-135M-Instruct, and a small model that the recipe train/dense trains
first, as GGUF in llama.cpp, as folders in transformers. A line is the largest difference of a logit between the target
and Shoestring on the same file. In `quality`: that with the values of a GGUF file in F32, where llama.cpp does not
round activations (`in_f32`); the mean KL of the export against its source, which is what rounding costs (`export_kl`);
file size. Targets that are not installed are left out and named.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import markdown, newest, provenance, record
from benchmarks.smollm2 import need_smollm2
from shoestring.errors import UserError, as_command
from shoestring.evals.certificate import certify, check_target
from shoestring.formats import convert, pack, parse_format
from shoestring.model import load_model, save_model
from shoestring.model.export import export_model
from shoestring.recipes.train import dense

SMOLLM2, SMALL = "SmolLM2-135M-Instruct", "2M model of train/dense"
# (model, our format or "" for the weights as they are, layout, GGUF type)
CASES = (
    *((SMOLLM2, "", "gguf", kind) for kind in ("auto", "F16", "Q8_0", "Q5_1", "Q5_0", "Q4_0", "MXFP4", "Q4_K_M")),
    *((SMOLLM2, "int4:g64", "gguf", kind) for kind in ("auto", "Q4_1")),
    (SMOLLM2, "int4:sym:g32", "gguf", "auto"),
    (SMOLLM2, "int3:g64", "gguf", "auto"),
    (SMOLLM2, "", "dense", ""),
    (SMOLLM2, "int4:g64", "compressed-tensors", ""),
    (SMOLLM2, "int3:sym:g64", "compressed-tensors", ""),
    *((SMALL, "", "gguf", kind) for kind in ("auto", "Q8_0")),
    (SMALL, "int4:g32", "gguf", "auto"),
    (SMALL, "", "dense", ""),
)


def table() -> str:
    rows = []
    lines = newest("export")
    for n in lines:
        q, c = n["quality"], n["config"]
        rows.append(
            [
                f"{c['model']}, {c['format'] or 'as it is'}",
                f"{c['layout']} {c['type']}".strip(),
                f"{q['megabytes']:.1f}",
                n["config"]["target"],
                f"{n['value']:.2g}",
                f"{q['in_f32']:.2g}" if "in_f32" in q else "",
                f"{q['greedy']} of {q['greedy_tokens']}",
                "0" if q["export_kl"] == 0 else f"{q['export_kl']:.2g}",
            ]
        )
    header = ["model", "exported as", "MB", "loaded in", "largest difference of a logit", "... in F32"]
    header += ["greedy tokens equal", "KL to the source, nats"]
    return markdown(header, rows) + provenance(lines) if rows else ""


def train_small(place: Path) -> Path:
    settings: dict[str, Any] = {"data": "python", "max_mb": 2.0, "vocab_size": 2048, "context": 128, "d_model": 192}
    dense.main(dense.Config(**settings, steps=100, warmup=20, lr=2e-3, batch=8, device="cpu", run=str(place / "train")))
    return place / "train"


def quantized(source: Path, format: str, place: Path) -> Path:
    """The source, or a folder of it with its layers rounded to `format`."""
    target = place / format.replace(":", "-")
    if not format:
        return source
    if not target.exists():
        loaded = load_model(source)
        convert(loaded.model, [("*", parse_format(format))])
        pack(loaded.model)
        save_model(target, loaded.model, loaded.tokenizer)
    return target


def measure(model: str, source: Path, format: str, layout: str, kind: str, place: Path) -> None:
    out = place / ("out.gguf" if layout == "gguf" else f"out-{layout}-{format.replace(':', '-')}")
    exported = export_model(quantized(source, format, place), out, layout, kind=kind or "auto")
    certificate = certify(exported)
    logits, greedy = certificate["logits"], certificate["greedy"]
    quality = {
        "megabytes": certificate["megabytes"],
        "relative": logits["relative"],
        "same_choice": logits["same_choice"],
        "mean_kl": logits["mean_kl"],
        "greedy": greedy["equal"],
        "greedy_tokens": greedy["tokens"],
        "export_kl": certificate["export"]["mean_kl"],
    }
    if "logits_in_f32" in certificate:
        quality["in_f32"] = certificate["logits_in_f32"]["largest_difference"]
    case = ", ".join(filter(None, (model, format, f"{layout} {kind}".strip())))
    config = {"model": model, "format": format, "layout": layout, "type": kind, "target": certificate["target"]}
    line = record(
        bench="export",
        case=case,
        metric="logits_difference",
        unit="logit",
        samples=[logits["largest_difference"]],
        quality=quality,
        config={**config, "tokens": certificate["tokens"]},
        note=f"{certificate['target']}: {certificate['versions']}",
    )
    print(f"{case:60} {line['value']:.3g} {quality}", flush=True)
    if out.is_file():
        out.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        sources: dict[str, Path] = {}
        for model, format, layout, kind in CASES:
            if only not in f"{model}, {format}, {layout} {kind}":
                continue
            place = Path(folder) / model.replace(" ", "-").replace("/", "-")
            place.mkdir(exist_ok=True)
            try:
                check_target(layout)
            except UserError as missing:
                print(f"{model} {layout}: left out; {missing}")
                continue
            if model not in sources:
                sources[model] = need_smollm2() if model == SMOLLM2 else train_small(place)
            measure(model, sources[model], format, layout, kind, place)


if __name__ == "__main__":
    as_command(main)
