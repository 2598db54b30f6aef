"""What is in a path: tables for `shoestring inspect`.

Reads headers and JSON only, never the weights, so it is quick for a model of any size. Layer numbers are
folded: one row stands for all layers whose tensors have the same shape and format ('layers.*' x30), and a
layer that differs gets its own row.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoestring.errors import UserError
from shoestring.formats.registry import from_json
from shoestring.model.compressed_tensors import METHOD, CompressedFiles
from shoestring.model.hf import spec_from_hf
from shoestring.model.tensor_files import TensorFiles, read_json
from shoestring.report import Table, eval_table, flatten
from shoestring.runlog import read_config, read_jsonl

DTYPE_BITS = {
    "F64": 64,
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "I64": 64,
    "I32": 32,
    "I16": 16,
    "I8": 8,
    "U8": 8,
    "BOOL": 8,
}


@dataclass(frozen=True)
class Stored:
    """One weight as it lies in a file."""

    name: str
    shape: tuple[int, ...]
    kind: str  # dtype or format
    bits: float  # stored bits in all

    @property
    def weights(self) -> int:
        return math.prod(self.shape)


def summarize(path: Path) -> list[Table]:
    """The tables of whatever lies at `path`."""
    if not path.exists():
        raise UserError(
            f"{path} does not exist; give a run, a model folder, a checkpoint folder or a .gguf file"
        )
    if path.is_file():
        if path.suffix != ".gguf":
            raise UserError(f"{path} is a file but no .gguf; give a run, a model or a checkpoint folder")
        return _gguf(path)
    if (path / "manifest.json").is_file():
        return _checkpoint(path)
    if (path / "metrics.jsonl").is_file() or (path / "checkpoints").is_dir():
        return _run(path)
    if (path / "config.json").is_file():
        return _model_folder(path)
    raise UserError(
        f"{path} holds no config.json, manifest.json or metrics.jsonl: not a run, model or checkpoint"
    )


# -- kinds of paths ----------------------------------------------------------------------------------


def _run(folder: Path) -> list[Table]:
    config = read_config(folder)
    head = {k: config[k] for k in ("recipe", "command", "started") if k in config}
    rows = [["folder", str(folder)], *([k, v] for k, v in head.items())]
    checkpoints = sorted(p.name for p in folder.glob("checkpoints/step-*"))
    rows.append(["checkpoints", ", ".join(checkpoints) or "none"])
    tables = [Table(f"Run {folder.name}", ["", ""], rows), settings_table(config.get("config", {}))]
    metrics = read_jsonl(folder / "metrics.jsonl")
    if metrics:
        last = {k: v for row in metrics for k, v in row.items() if k != "time"}
        tables.append(Table("Last metrics", list(last), [list(last.values())]))
    evals = read_jsonl(folder / "evals.jsonl")
    if evals:
        tables.append(eval_table(evals))
    models = [p.parent for p in sorted(folder.glob("*/config.json"))]
    return [*tables, *(table for model in models for table in _model_folder(model))]


def _model_folder(folder: Path) -> list[Table]:
    spec = spec_from_hf(read_json(folder / "config.json"))
    shape = {
        k: getattr(spec, k)
        for k in ("d_model", "num_layers", "num_heads", "num_kv_heads", "head_dim", "d_ff")
    }
    facts = {
        "type": spec.model_type,
        **shape,
        "vocab_size": spec.vocab_size,
        "max_positions": spec.max_positions,
    }
    stored = folder_weights(folder)
    return [_facts(f"Model {folder}", facts, stored), weights_table(stored), *_pruning(folder)]


def _pruning(folder: Path) -> list[Table]:
    """What a pruning recipe counted on the weights it wrote."""
    if not (folder / "pruning.json").is_file():
        return []
    counted = read_json(folder / "pruning.json")
    return [Table("Pruned to 2:4", ["", ""], [[k.replace("_", " "), v] for k, v in counted.items()])]


def _gguf(path: Path) -> list[Table]:
    from shoestring.model.gguf import read_metadata

    fields = read_metadata(path)  # first: it explains what is wrong with a bad file
    from gguf import GGUFReader

    stored = [
        Stored(t.name, tuple(int(n) for n in reversed(t.shape)), t.tensor_type.name, 8.0 * int(t.n_bytes))
        for t in GGUFReader(path).tensors
    ]
    skipped = ("tokenizer.ggml.", "tokenizer.chat_template", "GGUF.")
    facts = {k: v for k, v in fields.items() if not k.startswith(skipped) and not isinstance(v, list)}
    return [_facts(f"GGUF {path.name}", facts, stored), weights_table(stored)]


def _checkpoint(folder: Path) -> list[Table]:
    from shoestring.state.manifest import read_manifest

    manifest = read_manifest(folder)
    stored = [
        Stored(
            name, t.shape, str(t.dtype).removeprefix("torch."), 8.0 * t.dtype.itemsize * math.prod(t.shape)
        )
        for name, t in manifest.tensors.items()
    ]
    facts: dict[str, Any] = {
        "step": manifest.step,
        "written by ranks": manifest.world_size,
        "parts": len(manifest.parts),
    }
    facts |= {name: value for name, value in manifest.values.items() if isinstance(value, int | float | str)}
    return [_facts(f"Checkpoint {folder}", facts, stored), weights_table(stored)]


# -- weights -----------------------------------------------------------------------------------------


def folder_weights(folder: Path) -> list[Stored]:
    """Every weight of a Hugging Face folder; the parts of a packed module are one weight."""
    shapes, labels = _packed_modules(folder)
    files = TensorFiles(folder, "packed" if (folder / "shoestring.json").is_file() else "model")
    stored: dict[str, Stored] = {}
    for name in files.names:
        module, _, leaf = name.rpartition(".")
        bits = math.prod(files.shape(name)) * float(DTYPE_BITS.get(files.dtype(name), 16))
        if module in labels and leaf.startswith("weight_"):
            known = stored.get(f"{module}.weight")
            total = bits + (known.bits if known else 0.0)
            stored[f"{module}.weight"] = Stored(f"{module}.weight", shapes[module], labels[module], total)
        else:
            stored[name] = Stored(name, files.shape(name), files.dtype(name).lower(), bits)
    return list(stored.values())


def _packed_modules(folder: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Shape and Format of each packed module, by Hugging Face's names."""
    if (folder / "shoestring.json").is_file():
        modules: dict[str, Any] = read_json(folder / "shoestring.json").get("modules", {})
        labels = {name: from_json(m["format"]).label for name, m in modules.items()}
        return {name: tuple(m["shape"]) for name, m in modules.items()}, labels
    quantization = read_json(folder / "config.json").get("quantization_config")
    if isinstance(quantization, dict) and quantization.get("quant_method") == METHOD:
        files = CompressedFiles(folder, quantization)
        return dict(files.shapes), {name: f.label for name, f in files.formats.items()}
    return {}, {}


def weights_table(stored: list[Stored]) -> Table:
    """One row per kind of weight, layer numbers folded."""
    groups: dict[tuple[str, tuple[int, ...], str], list[Stored]] = {}
    for s in stored:
        groups.setdefault((fold(s.name), s.shape, s.kind), []).append(s)
    rows = []
    for (name, shape, kind), members in groups.items():
        bits, weights = sum(m.bits for m in members), sum(m.weights for m in members)
        sizes = " x ".join(map(str, shape)) or "scalar"
        which = _layers(members) if len(members) < max(map(len, groups.values())) else name
        rows.append([which, len(members), sizes, kind, bits / max(weights, 1), bits / 8e6])
    headers = ["weight", "count", "shape", "stored as", "bits per weight", "MB"]
    return Table("Weights", headers, rows)


def fold(name: str) -> str:
    """model.layers.12.mlp.up -> model.layers.*.mlp.up"""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _layers(members: list[Stored]) -> str:
    """'layers.0,3-5.mlp.up': which layers a group has, when it does not have all of them."""
    numbers = sorted(int(m[0]) for s in members if (m := re.search(r"(?<=\.)\d+(?=\.)", s.name)))
    if not numbers:
        return members[0].name
    ranges: list[list[int]] = []
    for n in numbers:
        if ranges and n == ranges[-1][1] + 1:
            ranges[-1][1] = n
        else:
            ranges.append([n, n])
    spans = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
    return fold(members[0].name).replace("*", spans, 1)


def _facts(title: str, facts: dict[str, Any], stored: list[Stored]) -> Table:
    weights, bits = sum(s.weights for s in stored), sum(s.bits for s in stored)
    total = {"parameters": weights, "MB": bits / 8e6, "bits per parameter": bits / max(weights, 1)}
    return Table(title, ["", ""], [[k, v] for k, v in {**facts, **total}.items()])


def settings_table(config: dict[str, Any]) -> Table:
    return Table("Config", ["key", "value"], [[k, str(v)] for k, v in flatten(config).items()])
