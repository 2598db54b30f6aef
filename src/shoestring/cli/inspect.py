"""What is in a path: tables for `shoestring inspect`.

`summarize` reads headers and JSON only, never the weights, so it is quick for a model of any size. Layer numbers
are folded: one row stands for all layers whose tensors have the same shape and format ('layers.*' x30), and a layer
that differs gets its own row; each_layer=True folds nothing. The errors of the layers are those that quantization
measured and wrote beside the weights (quantization.json).

`errors_table` (--against) does read the weights, and compares them with those of the model they were made from.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from shoestring import format_names
from shoestring.errors import UserError, shown
from shoestring.json_files import Fields, read_object
from shoestring.model.encoder_types import IMAGE_TYPES, encoder_type
from shoestring.model.families import MODEL_TYPES
from shoestring.model.hf import spec_of_folder
from shoestring.model.hf_names import hf_module, our_module
from shoestring.model.spec import ModelSpec
from shoestring.report import Table, eval_table, flatten, in_words
from shoestring.runlog import read_config, read_evals, read_metrics
from shoestring.state.checkpoint_files import is_part
from shoestring.state.tensor_files import PICKLED, TensorFiles, open_tensors

if TYPE_CHECKING:
    from shoestring.model.gguf_write import WrittenTensor

ERRORS = ("output_error", "weight_error")
FOLDERS = "the folder of a run, a model or a checkpoint"
KINDS = f"{FOLDERS}, a .safetensors file or a .gguf file"


@dataclass(frozen=True)
class Stored:
    """One weight as it lies in a file."""

    name: str
    shape: tuple[int, ...]
    kind: str  # dtype or format
    bits: float  # stored bits in all
    output_error: float | None = None  # relative mean square on the calibration text, where it was written down
    weight_error: float | None = None  # relative mean square

    @property
    def weights(self) -> int:
        return math.prod(self.shape)


def summarize(path: Path, *, each_layer: bool = False) -> list[Table]:
    """The tables of whatever lies at `path`; each_layer: one row per weight instead of one per kind."""
    if not path.exists():
        raise UserError(f"{path} does not exist; give {KINDS}")
    if path.is_file():
        return _file(path, each_layer)
    is_model = (path / "config.json").is_file()
    if (path / "manifest.json").is_file() and not is_model:
        return _checkpoint(path, each_layer)
    if (path / "metrics.jsonl").is_file() or (path / "checkpoints").is_dir():
        return _run(path, each_layer)
    if is_model:
        return _model_folder(path, each_layer)
    if any(path.glob("*.safetensors")):
        return _any_folder(path, {}, each_layer)
    raise UserError(
        f"{path} holds no config.json, manifest.json, metrics.jsonl or safetensors: not a run, model or checkpoint"
    )


# -- kinds of paths ----------------------------------------------------------------------------------


def _file(path: Path, each_layer: bool) -> list[Table]:
    match path.suffix:
        case ".gguf":
            return _gguf(path, each_layer)
        case ".safetensors":
            return _tensors_file(path, each_layer)
        case suffix if suffix in PICKLED:
            raise UserError(
                f"{path} is a pickle, which can run code when it is opened, and is never read; "
                "convert it to safetensors first (transformers: from_pretrained, then save_pretrained)"
            )
    raise UserError(f"{path} is neither a .safetensors nor a .gguf file; give one of these, or {FOLDERS}")


def _tensors_file(path: Path, each_layer: bool) -> list[Table]:
    opened = open_tensors(path, header=True)
    stored = _tensors_of(opened)
    facts = {"tensors": len(stored), **{f"metadata {shown(k)}": shown(v) for k, v in (opened.metadata() or {}).items()}}
    weights = weights_table(stored, each_layer)
    if (path.parent / "config.json").is_file() or is_part(path):
        note = f"A part of {path.parent}: `shoestring inspect {path.parent}` shows what it belongs to."
        weights = replace(weights, note=note)
    return [_facts(f"File {path}", facts, stored, {"MB of the file": path.stat().st_size / 1e6}), weights]


def _tensors_of(opened: Any) -> list[Stored]:
    """What an opened safetensors file holds."""
    stored = []
    for name in opened.keys():  # noqa: SIM118 (no dict)
        kind, shape = str(opened.get_slice(name).get_dtype()), tuple(opened.get_slice(name).get_shape())
        stored.append(Stored(name, shape, kind.lower(), stored_bits(kind) * math.prod(shape)))
    return stored


def stored_bits(kind: str) -> float:
    """Of one element, by safetensors' name of its dtype: BF16, F8_E4M3, F4, BOOL."""
    digits = re.search(r"[0-9]+", kind)
    return 8.0 if digits is None else float(digits[0])


def _run(folder: Path, each_layer: bool) -> list[Table]:
    config = read_config(folder)
    head = {k: config[k] for k in ("recipe", "command", "started") if k in config}
    rows = [["folder", str(folder)], *([k, v] for k, v in head.items())]
    checkpoints = sorted(p.name for p in folder.glob("checkpoints/step-*"))
    rows.append(["checkpoints", ", ".join(checkpoints) or "none"])
    settings = [[k, str(v)] for k, v in flatten(config.get("config", {})).items()]
    tables = [Table(f"Run {folder.name}", ["", ""], rows), Table("Config", ["key", "value"], settings)]
    metrics = read_metrics(folder / "metrics.jsonl")
    if metrics:
        last = {k: v for row in metrics for k, v in row.items() if k != "time"}
        tables.append(Table("Last metrics", list(last), [list(last.values())]))
    evals = read_evals(folder / "evals.jsonl")
    if evals:
        tables.append(eval_table(evals))
    models = [p.parent for p in sorted(folder.glob("*/config.json"))]
    return [*tables, *(table for model in models for table in _model_folder(model, each_layer))]


def _model_folder(folder: Path, each_layer: bool) -> list[Table]:
    config = read_object(folder / "config.json")
    if config.get("model_type") not in MODEL_TYPES:
        return _any_folder(folder, config, each_layer)
    spec = spec_of_folder(folder)
    shape = {k: getattr(spec, k) for k in ("d_model", "num_layers", "num_heads", "num_kv_heads", "head_dim", "d_ff")}
    facts = {"type": spec.model_type, **shape, "vocab_size": spec.vocab_size, "max_positions": spec.max_positions}
    stored, note = with_errors(folder_weights(folder), folder, spec)
    weights = replace(weights_table(stored, each_layer), note=note)
    tables = [_facts(f"Model {folder}", facts, stored, _on_disk(folder, _weight_files(folder).paths)), weights]
    if (folder / "pruning.json").is_file():  # what a pruning recipe counted on the weights it wrote
        counted = read_object(folder / "pruning.json")
        tables.append(Table("Pruned to 2:4", ["", ""], [[in_words(k), v] for k, v in counted.items()]))
    return tables


def _any_folder(folder: Path, config: dict[str, Any], each_layer: bool) -> list[Table]:
    """The tensors of a model that Shoestring does not run: an encoder, a vision model, parts of a pipeline."""
    files = sorted(folder.glob("*.safetensors"))
    packed = (folder / "shoestring.json").is_file()
    stored = folder_weights(folder) if packed else [s for f in files for s in _tensors_of(open_tensors(f, header=True))]
    facts: dict[str, Any] = {k: config[k] for k in ("model_type", "architectures") if k in config}
    facts |= {k: v for k, v in config.items() if type(v) is int}
    note = "Shoestring does not run this model; convert, pack and shrink work on its modules from Python."
    if (encoder := encoder_type(folder)) is not None:
        served = "" if encoder in IMAGE_TYPES else ", `serve` embeds"
        note = f"An encoder: `shoestring run shrink/ptq` shrinks it{served}."
    weights = replace(weights_table(stored, each_layer), note=note)
    return [_facts(f"Model {folder}", facts, stored, _on_disk(folder, files)), weights]


def _on_disk(folder: Path, files: list[Path]) -> dict[str, float]:
    """As `ls -l` says it."""
    return {
        "MB": sum(f.stat().st_size for f in files) / 1e6,
        "MB with tokenizer and settings": sum(f.stat().st_size for f in folder.iterdir() if f.is_file()) / 1e6,
    }


def _gguf(path: Path, each_layer: bool) -> list[Table]:
    from shoestring.model.gguf_file import open_gguf

    file = open_gguf(path)
    stored = [Stored(t.name, t.shape, t.kind, 8.0 * t.num_bytes) for t in file.tensors.values()]
    skipped = ("tokenizer.ggml.", "tokenizer.chat_template")
    facts = {k: v for k, v in file.metadata(lists=False).items() if not k.startswith(skipped)}
    return [
        _facts(f"GGUF {path.name}", facts, stored, {"MB": path.stat().st_size / 1e6}),
        weights_table(stored, each_layer),
    ]


def _checkpoint(folder: Path, each_layer: bool) -> list[Table]:
    from shoestring.state.manifest import read_manifest

    manifest = read_manifest(folder)
    stored = [
        Stored(name, t.shape, str(t.dtype).removeprefix("torch."), 8.0 * t.dtype.itemsize * math.prod(t.shape))
        for name, t in manifest.tensors.items()
    ]
    facts: dict[str, Any] = {
        "step": manifest.step,
        "written by ranks": manifest.world_size,
        "parts": len(manifest.parts),
    }
    facts |= {name: value for name, value in manifest.values.items() if isinstance(value, int | float | str)}
    return [_facts(f"Checkpoint {folder}", facts, stored), weights_table(stored, each_layer)]


# -- weights -----------------------------------------------------------------------------------------


def folder_weights(folder: Path) -> list[Stored]:
    """Every weight of a Hugging Face folder; the parts of a packed module are one weight."""
    shapes, labels = _packed_modules(folder)
    files = _weight_files(folder)
    stored: dict[str, Stored] = {}
    for name in files.names:
        module, _, leaf = name.rpartition(".")
        bits = math.prod(files.shape(name)) * stored_bits(files.dtype(name))
        if module in labels and leaf.startswith("weight"):
            known = stored.get(f"{module}.weight")
            total = bits + (known.bits if known else 0.0)
            stored[f"{module}.weight"] = Stored(f"{module}.weight", shapes[module], labels[module], total)
        else:
            stored[name] = Stored(name, files.shape(name), files.dtype(name).lower(), bits)
    return list(stored.values())


def _weight_files(folder: Path) -> TensorFiles:
    return TensorFiles(folder, "packed" if (folder / "shoestring.json").is_file() else "model")


def _packed_modules(folder: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Shape and Format of each packed module, by Hugging Face's names."""
    if (folder / "shoestring.json").is_file():
        path = folder / "shoestring.json"
        modules = Fields(read_object(path), str(path)).object("modules")
        shapes: dict[str, tuple[int, ...]] = {}
        labels: dict[str, str] = {}
        for name, module in modules.items():
            match module:
                case {"format": dict(format), "shape": [int(rows), int(width)]} if rows > 0 and width > 0:
                    shapes[name], labels[name] = (rows, width), format_names.label(format) or _label(format)
                case _:
                    raise UserError(f"{path}: {shown(name)} needs a 'format' and a 'shape' of two sizes; save it again")
        return shapes, labels
    quantization = read_object(folder / "config.json").get("quantization_config")
    if not isinstance(quantization, dict):
        return {}, {}
    from shoestring.model.folder import foreign_files, is_foreign

    if is_foreign(quantization):
        files = foreign_files(folder, quantization)
        return dict(files.shapes), {name: f.label for name, f in files.formats.items()}
    return {}, {}


def _label(format: dict[str, Any]) -> str:
    from shoestring.formats.registry import from_json

    return from_json(format).label


def with_errors(stored: list[Stored], folder: Path, spec: ModelSpec) -> tuple[list[Stored], str]:
    """The weights with what quantization wrote about them, and a sentence on what that is; or as they are."""
    path = folder / "quantization.json"
    written = Fields(read_object(path) if path.is_file() else {}, str(path))
    known: dict[Any, dict[str, Any]] = {}
    for layer in written.list("layers", []):
        match layer:
            case {"name": str(name)} if all(type(layer.get(e)) in (float, int, type(None)) for e in ERRORS):
                known[name] = layer
            case _:
                raise UserError(f"{path}: {shown(layer)} is not a layer with a name and its errors; delete the file")
    if not known:
        return stored, ""
    found = []
    for s in stored:
        error = known.get(our_module(spec, s.name.removesuffix(".weight")), {})
        found.append(replace(s, output_error=error.get("output_error"), weight_error=error.get("weight_error")))
    # A recipe that trains the whole model wrote down the errors of the grids it started from.
    method = written.text("method")
    when = "before training end to end" if method.startswith("shrink/") else f"by {method}"
    return found, f"Errors are relative mean squares, of outputs on the calibration text; measured {when}."


def weights_table(stored: list[Stored], each_layer: bool = False) -> Table:
    """One row per kind of weight, layer numbers folded, or one per weight."""
    headers, rows = _each_weight(stored) if each_layer else _kinds(stored)
    return Table("Weights", headers, rows, empty="none, no tensors are stored here")


def _kinds(stored: list[Stored]) -> tuple[list[str], list[list[Any]]]:
    groups: dict[tuple[str, tuple[int, ...], str], list[Stored]] = {}
    for s in stored:
        groups.setdefault((fold(s.name), s.shape, s.kind), []).append(s)
    headers = ["weight", "count", "shape", "stored as", "bits per weight", "MB"]
    has_errors = any(s.output_error is not None for s in stored)
    rows = []
    for (name, shape, kind), members in groups.items():
        bits, weights = sum(m.bits for m in members), sum(m.weights for m in members)
        which = _layers(members) if len(members) < max(map(len, groups.values())) else name
        errors = _typical_and_worst(members) if has_errors else []
        rows.append([which, len(members), _sizes(shape), kind, bits / max(weights, 1), bits / 8e6, *errors])
    return [*headers, *(["output error, median", "worst"] if has_errors else [])], rows


def _each_weight(stored: list[Stored]) -> tuple[list[str], list[list[Any]]]:
    columns: dict[str, list[Any]] = {
        "weight": [s.name for s in stored],
        "shape": [_sizes(s.shape) for s in stored],
        "stored as": [s.kind for s in stored],
        "bits per weight": [s.bits / max(s.weights, 1) for s in stored],
        "MB": [s.bits / 8e6 for s in stored],
    }
    errors = {"weight error": [s.weight_error for s in stored], "output error": [s.output_error for s in stored]}
    columns |= {k: v for k, v in errors.items() if any(e is not None for e in v)}
    return list(columns), [list(row) for row in zip(*columns.values(), strict=True)]


def _typical_and_worst(members: list[Stored]) -> list[Any]:
    known = [(s.output_error, s.name) for s in members if s.output_error is not None]
    if not known:
        return [None, ""]
    error, name = max(known)
    where = re.search(r"[^.]+\.\d+(?=\.)", name)  # the rest of its name is the row's
    return [median(e for e, _ in known), f"{error:.4g} in {where[0] if where else name}"]


def _sizes(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


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


def _facts(title: str, facts: dict[str, Any], stored: list[Stored], on_disk: dict[str, float] | None = None) -> Table:
    weights, bits = sum(s.weights for s in stored), sum(s.bits for s in stored)
    total = {"parameters": weights, "bits per parameter": bits / max(weights, 1), "MB": bits / 8e6}
    return Table(title, ["", ""], [[k, v] for k, v in {**facts, **total, **(on_disk or {})}.items()])


def written_table(tensors: Sequence[WrittenTensor]) -> Table:
    """What the matrices of an exported GGUF file became, and what that cost; `tensors` by the order of the model."""
    rows: list[list[Any]] = []
    for kind in sorted({t.kind for t in tensors}):
        members = [t for t in tensors if t.kind == kind]
        worst = max(members, key=lambda t: t.relative_error)
        exact = sum(t.exact for t in members)
        error = "exact" if exact == len(members) else f"{worst.relative_error:.2g} in {worst.name}"
        rows.append([kind, len(members), exact, error, sum(t.num_bytes for t in members) / 1e6])
    return Table("Written", ["stored as", "tensors", "exact", "largest relative error", "MB"], rows)


# -- whether it is what was written ------------------------------------------------------------------


def verified_table(path: Path) -> tuple[Table, list[str]]:
    """What --verify has read, and the problems that it found; of a run: its model and all its checkpoints."""
    from shoestring.model.verify import verify

    is_run = (path / "metrics.jsonl").is_file() or (path / "checkpoints").is_dir()
    places = [p.parent for p in sorted(path.glob("*/config.json"))] if is_run else [path]
    places += [p.parent for p in sorted(path.glob("checkpoints/*/manifest.json"))] if is_run else []
    rows: list[list[Any]] = []
    problems: list[str] = []
    for place in places:
        found = verify(place)
        checksums = f"{len(found.checked)} fit"
        if found.unknown:
            checksums += f", {len(found.unknown)} weight {'files have' if found.unknown[1:] else 'file has'} none"
        rows.append([str(place), checksums, found.num_tensors, "; ".join(found.problems) or "none"])
        problems += found.problems
    headers, empty = ["path", "checksums", "tensors read", "problems"], f"nothing, {path} holds no model or checkpoint"
    return Table("Verified", headers, rows, empty=empty), problems


# -- against the model it was made from --------------------------------------------------------------


def errors_table(path: str | Path, reference: str | Path) -> Table:
    """The relative error ||W' - W|| / ||W|| (Frobenius) of every linear layer and packed embedding: W' is what the
    layer multiplies with, W the reference's weight.

    A method that folds scales into norms (AWQ) or trains on moves weights without harm, so this is a check of
    rounding, not of quality; quality is `shoestring eval`.
    """
    import torch

    from shoestring.formats import FormatEmbedding
    from shoestring.formats.convert import format_hosts
    from shoestring.model import load_model

    source, model = load_model(reference).model, load_model(path).model
    theirs = dict(format_hosts(source))
    rows: list[list[Any]] = []
    for name, layer in format_hosts(model):
        if isinstance(layer, FormatEmbedding) and not layer.packed:
            continue
        other = theirs.get(name)
        if other is None and name == "head":  # a tied head was given a copy of its own
            want = source.embed.effective_weight(torch.float32).detach()
        elif other is None:
            raise UserError(f"{reference} has no layer {name}: it is not the model that {path} was made from")
        else:
            want = other.effective_weight(torch.float32).detach()
        got = layer.effective_weight(torch.float32).detach()
        if got.shape != want.shape:
            raise UserError(
                f"{name} is {list(got.shape)} in {path} and {list(want.shape)} in {reference}: another model"
            )
        dtype = torch.bfloat16 if layer.weight is None else layer.weight.dtype
        bits = layer.format.bits_per_weight(layer.shape, dtype)
        size, error = float(want.norm()), float((got - want).norm())
        relative = error / size if size else error
        rows.append([hf_module(model.spec, name), layer.format.label, round(bits, 4), relative])
    headers = ["layer", "format", "bits per weight", "relative error"]
    return Table(f"{path} against {reference}", headers, rows)
