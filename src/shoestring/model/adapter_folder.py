"""LoRA adapters in PEFT's layout, read and written without peft.

A folder holds adapter_config.json and adapter_model.safetensors, whose tensors are called `base_model.model.`, the
layer's name in Hugging Face's words, and `lora_A.weight` [r, in], `lora_B.weight` [out, r] or, with DoRA,
`lora_magnitude_vector` [out]. Here an adapter is one `LoraWeights` for each of our layers. Where a family stores
several of our layers as one (GPT-2's c_attn, say), they share A on reading; on writing the stored layer has the rows
of every A, and B is block-diagonal.

`KEYS` has every key of adapter_config.json that peft 0.21 writes. Those that change what a trained adapter computes,
and are not computed here, are refused by name unless they have their default.

Left out on purpose: pickled weights (never read), adapters of embeddings, weights saved beside the adapter
(`modules_to_save`).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoestring.errors import UserError, shown, suggest
from shoestring.formats import FormatLinear
from shoestring.formats.adapter import LoraWeights
from shoestring.formats.convert import format_hosts
from shoestring.formats.merge import merge_
from shoestring.json_files import Fields, check_path, read_object
from shoestring.model import hf_names
from shoestring.model.transformer import Decoder
from shoestring.paths import expand
from shoestring.state.files import AtomicFolder, TensorInfo, write_json
from shoestring.state.tensor_files import TensorFiles

CONFIG, STEM, PREFIX = "adapter_config.json", "adapter_model", "base_model.model."
A, B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
MOST_RANK = 512
MOST_PATTERNS, MOST_PATTERN, MOST_STARS = 4096, 200, 3  # of rank_pattern and alpha_pattern; characters and * + of one
_FLOATS = ("F64", "F32", "F16", "BF16")
_PATTERN = re.compile(r"[\w.\\^$*+|\[\]-]+")  # no groups: nested repetitions can take forever
# How weights were initialised; the others change the base model's weights as well.
_INITIALS = (True, False, "gaussian", "orthogonal", "eva")

# The keys that are read here, or that say nothing about what a trained adapter computes.
_READ = frozenset(
    [
        *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        *("inference_mode", "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out"),
        *("use_rslora", "init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern"),
        *("megatron_core", "use_dora"),
    ]
)
_DEFAULTS: dict[str, Any] = {
    "bias": "none", "modules_to_save": None, "megatron_config": None, "trainable_token_indices": None,
    "loftq_config": {}, "eva_config": None, "corda_config": None, "lora_ga_config": None, "velora_config": None,
    "alora_invocation_tokens": None, "use_qalora": False, "qalora_group_size": 16, "monteclora_config": None,
    "layer_replication": None, "lora_bias": False, "target_parameters": None, "use_bdlora": None,
    "arrow_config": None, "kasa_config": None, "ensure_weight_tying": False,
}  # fmt: skip
KEYS = _READ | _DEFAULTS.keys()


@dataclass(frozen=True)
class AdapterFile:
    weights: dict[str, LoraWeights]  # by our names of layers
    digest: str  # of all that it computes

    @property
    def rank(self) -> int:
        return max(len(w.a) for w in self.weights.values())


# -- reading ------------------------------------------------------------------------------------------------


def read_adapter(path: str | Path, model: Decoder) -> AdapterFile:
    """The adapter in a folder, for this model, of which only shapes are read (it may be on the meta device)."""
    check_path(path)
    folder = expand(path)
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; give the folder of an adapter, with {CONFIG}")
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder} has no {CONFIG}; give the folder of an adapter in PEFT's layout")
    config = _Config(folder / CONFIG)
    if not any((folder / f"{STEM}.safetensors{end}").is_file() for end in ("", ".index.json")):
        if (folder / f"{STEM}.bin").is_file():
            raise UserError(
                f"{folder} has pickled weights ({STEM}.bin); pickle can run code and is never read: load the adapter "
                "with peft and save it again with save_pretrained"
            )
        raise UserError(f"{folder} has no {STEM}.safetensors; copy the whole folder")
    files = TensorFiles(folder, STEM)
    shapes = linear_shapes(model)
    weights: dict[str, LoraWeights] = {}
    for module, parts in _by_module(folder, files.names).items():
        weights |= _module_weights(folder, files, config, model, shapes, module, parts)
    if not weights:
        raise UserError(f"{folder} holds an adapter of no layer; train it again")
    for name, w in weights.items():
        if not all(t.isfinite().all() for t in (w.a, w.b, w.magnitude) if t is not None):
            raise UserError(f"{folder}: the adapter of {name} holds NaN or infinite values; check its training")
    return AdapterFile(weights, digest_of(weights))


def linear_shapes(model: Decoder) -> dict[str, tuple[int, int]]:
    """[out, in] of the layers that an adapter can have weights for."""
    return {name: host.shape for name, host in format_hosts(model) if isinstance(host, FormatLinear)}


def digest_of(weights: Mapping[str, LoraWeights]) -> str:
    made = hashlib.blake2b(digest_size=16)
    for name, w in sorted(weights.items()):
        made.update(repr((name, tuple(w.a.shape), tuple(w.b.shape), w.scale)).encode())
        for t in (w.a, w.b, w.magnitude):
            made.update(b"none" if t is None else t.contiguous().numpy().tobytes())
    return made.hexdigest()


class _Config:
    """adapter_config.json, checked."""

    def __init__(self, path: Path) -> None:
        values = read_object(path)
        fields = Fields(values, str(path))
        if (kind := fields.text("peft_type", "")) != "LORA":
            raise UserError(f"{path}: peft_type is {shown(kind)}; only LORA is read")
        if (task := fields.text("task_type", "CAUSAL_LM")) != "CAUSAL_LM":
            raise UserError(
                f"{path}: task_type is {shown(task)}; only adapters of language models (CAUSAL_LM) are read"
            )
        initial = values.get("init_lora_weights", True)
        if initial not in _INITIALS:
            raise UserError(
                f"{path}: init_lora_weights is {shown(initial)}, which also changes the base model's weights; merge "
                "the adapter with peft and give the merged model"
            )
        for key, value in values.items():
            if key in _READ:
                continue
            if key not in _DEFAULTS and value not in (None, False, {}, []):
                raise UserError(f"{path}: the key {shown(key)} is not known here.{suggest(key, sorted(KEYS))}")
            if key in _DEFAULTS and value not in (_DEFAULTS[key], None):
                raise UserError(
                    f"{path}: {key} is {shown(value)}, which is not computed here; only {_DEFAULTS[key]!r} is"
                )
        self.path, self.dora = path, bool(fields.flag("use_dora", False))
        self._root = bool(fields.flag("use_rslora", False))
        self._rank = fields.whole("r", 8, most=MOST_RANK)
        self._alpha = fields.number("lora_alpha", 8.0)
        self._ranks = self._patterns(fields, "rank_pattern")
        self._alphas = self._patterns(fields, "alpha_pattern")

    def _patterns(self, fields: Fields, key: str) -> list[tuple[re.Pattern[str], float]]:
        """As in peft: an expression that the end of a module's name must match, from a dot on."""
        given = fields.object(key, {})
        if len(given) > MOST_PATTERNS:
            raise UserError(f"{self.path}: {key} has {len(given)} entries, at most {MOST_PATTERNS} are read")
        values, made = Fields(given, f"{self.path}: {key}"), []
        for text in given:
            simple = len(text) <= MOST_PATTERN and sum(map(text.count, "*+")) <= MOST_STARS
            try:
                if not simple or not _PATTERN.fullmatch(text):
                    raise re.error("too complex")
                pattern = re.compile(rf"(.*\.)?({text})$")
            except re.error as error:
                raise UserError(f"{self.path}: {key} has {shown(text)}, which is not read: {error}") from None
            whole = key == "rank_pattern"
            made.append((pattern, values.whole(text, most=MOST_RANK) if whole else values.number(text)))
        return made

    def rank(self, module: str) -> int:
        return int(next((value for pattern, value in self._ranks if pattern.match(module)), self._rank))

    def scale(self, module: str) -> float:
        alpha = next((value for pattern, value in self._alphas if pattern.match(module)), self._alpha)
        rank = self.rank(module)
        return alpha / (math.sqrt(rank) if self._root else rank)


def _by_module(folder: Path, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """{module in Hugging Face's words: {part: tensor}}."""
    found: dict[str, dict[str, str]] = {}
    for name in sorted(names):
        part = next((part for part in (A, B, MAGNITUDE, f"{MAGNITUDE}.weight") if name.endswith(f".{part}")), None)
        if part is None or not name.startswith(PREFIX):
            raise UserError(
                f"{folder}: tensor {shown(name)} is not known; an adapter has {PREFIX}LAYER.{A}, .{B} and .{MAGNITUDE}"
            )
        module = name[len(PREFIX) : -len(part) - 1]
        found.setdefault(module, {})[part.removesuffix(".weight") if MAGNITUDE in part else part] = name
    return found


def _module_weights(
    folder: Path,
    files: TensorFiles,
    config: _Config,
    model: Decoder,
    shapes: Mapping[str, tuple[int, int]],
    module: str,
    parts: Mapping[str, str],
) -> dict[str, LoraWeights]:
    """Of one stored layer, which may be several of ours."""
    ours = [name.removesuffix(".weight") for name in hf_names.targets_of(model.spec, f"{module}.weight")]
    if not ours or any(name not in shapes for name in ours):
        raise UserError(f"{folder} has weights for {shown(module)}, which this model has not; it is of another model")
    wanted = {A, B, MAGNITUDE} if config.dora else {A, B}
    if parts.keys() != wanted:
        odd = sorted(parts.keys() ^ wanted)[0]
        raise UserError(f"{folder}: {module} has {'a' if odd in parts else 'no'} {odd} (use_dora is {config.dora})")
    rank, width, height = config.rank(module), shapes[ours[0]][1], sum(shapes[name][0] for name in ours)
    for part, shape in ((A, (rank, width)), (B, (height, rank)), (MAGNITUDE, (height,))):
        if part in parts and files.shape(parts[part]) != shape:
            have = list(files.shape(parts[part]))
            raise UserError(
                f"{folder}: {module}.{part} is {have}, this model and {CONFIG} ask for {list(shape)}; it is of another "
                "model, or of another rank"
            )
        if part in parts and (dtype := files.dtype(parts[part])) not in _FLOATS:
            raise UserError(f"{folder}: {module}.{part} is stored as {dtype}; adapters are {', '.join(_FLOATS)}")
    read = {part: files.read(name).float() for part, name in parts.items()}
    made = {}
    for name in ours:
        source = replace(hf_names.source_of(model.spec, f"{name}.weight"), transpose=False)
        magnitude = source.take(read[MAGNITUDE]) if config.dora else None
        made[name] = LoraWeights(read[A], source.take(read[B]), config.scale(module), magnitude)
    return made


# -- writing ------------------------------------------------------------------------------------------------


def write_adapter(
    path: str | Path, model: Decoder, weights: Mapping[str, LoraWeights], base: str | None = None
) -> Path:
    """Write a folder that peft and vLLM read, whole or not at all. `base`: the model it belongs to."""
    stored = _stored(model, weights)
    config: dict[str, Any] = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "bias": "none", "lora_dropout": 0.0, "init_lora_weights": True, "use_rslora": False,
        "use_dora": any(w.magnitude is not None for w in stored.values()),
        # GPT-2's Conv1D keeps its weight transposed.
        "fan_in_fan_out": any(hf_names.source_of(model.spec, f"{n}.weight").transpose for n in weights),
        "target_modules": _targets(model, stored),
    }  # fmt: skip
    ranks = {module: len(w.a) for module, w in stored.items()}
    alphas = {module: w.scale * ranks[module] for module, w in stored.items()}
    config["r"], config["rank_pattern"] = _most_common(ranks)
    config["lora_alpha"], config["alpha_pattern"] = _most_common(alphas)
    tensors: dict[str, Tensor] = {}
    for module, w in stored.items():
        tensors |= {f"{PREFIX}{module}.{A}": w.a, f"{PREFIX}{module}.{B}": w.b}
        if w.magnitude is not None:
            tensors[f"{PREFIX}{module}.{MAGNITUDE}"] = w.magnitude
    infos = [TensorInfo(name, tuple(t.shape), torch.float32) for name, t in tensors.items()]
    target = expand(path).resolve()
    out = AtomicFolder(target, sum(info.num_bytes for info in infos))
    try:
        with out.tensors(f"{STEM}.safetensors", infos) as write:
            for t in tensors.values():
                write(t.detach().float().cpu().contiguous())
        if out.error is None:
            with out.guard():
                write_json(out.temp / CONFIG, config)
                out.finish()
        if out.error is not None:
            raise UserError(out.error)
    finally:
        out.clean()
    return target


def _stored(model: Decoder, weights: Mapping[str, LoraWeights]) -> dict[str, LoraWeights]:
    """By Hugging Face's names of layers."""
    shapes, made = linear_shapes(model), dict[str, LoraWeights]()
    for name in weights:
        source = hf_names.source_of(model.spec, f"{name}.weight")
        module = source.name.removesuffix(".weight")
        if module in made:
            continue
        ours = [n.removesuffix(".weight") for n in hf_names.targets_of(model.spec, source.name)]
        made[module] = weights[name] if len(ours) == 1 else _fused(model, shapes, ours, weights)
    return made


def _fused(
    model: Decoder, shapes: Mapping[str, tuple[int, int]], ours: list[str], weights: Mapping[str, LoraWeights]
) -> LoraWeights:
    """The adapters of layers that are stored as one: A has the rows of each, B is block-diagonal. Equal ones share."""
    given = [weights[name] for name in ours if name in weights]
    if any(w.magnitude is not None for w in given) and len(given) < len(ours):
        raise UserError(f"{ours[0]} is stored together with {ours[1]}: with DoRA both need an adapter")
    shared = all(w.scale == given[0].scale and torch.equal(w.a, given[0].a) for w in given)
    parts = [given[0].a] if shared else [w.a for w in given]
    scale = given[0].scale if shared else 1.0
    rank, width = sum(map(len, parts)), 0
    blocks, magnitudes = [], []
    for name in ours:
        block = torch.zeros(shapes[name][0], rank)
        if (w := weights.get(name)) is not None:
            block[:, width : width + len(w.a)] = w.b if shared else w.scale * w.b
            width += 0 if shared else len(w.a)
            magnitudes += [] if w.magnitude is None else [w.magnitude]
        blocks.append(block)
    names = [f"{name}.weight" for name in ours]
    heads = hf_names.source_of(model.spec, names[0]).heads

    def joined(tensors: list[Tensor]) -> Tensor:
        return torch.cat([t.unflatten(0, (heads, -1)) for t in tensors], dim=1).flatten(0, 1)

    return LoraWeights(torch.cat(parts), joined(blocks), scale, joined(magnitudes) if magnitudes else None)


def _targets(model: Decoder, stored: Mapping[str, LoraWeights]) -> list[str]:
    """Last words of the layers' names, where they name these layers and no others; else whole names."""
    every = {
        hf_names.source_of(model.spec, f"{name}.weight").name.removesuffix(".weight") for name in linear_shapes(model)
    }
    last = {module.rpartition(".")[2] for module in stored}
    alike = {module for module in every if module.rpartition(".")[2] in last}
    return sorted(last) if alike == stored.keys() else sorted(stored)


def _most_common(values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The usual value, and those of the modules with another."""
    given = list(values.values())
    usual = max(dict.fromkeys(given), key=given.count)
    return usual, {re.escape(module): value for module, value in values.items() if value != usual}


# -- merging ------------------------------------------------------------------------------------------------


def merge_adapter_(model: Decoder, weights: Mapping[str, LoraWeights], *, requantize: bool) -> None:
    """Add an adapter to the weights of its model, in place. `requantize`: packed layers stay packed, in their Format;
    otherwise those with an adapter become dense."""
    hosts = {name: host for name, host in format_hosts(model) if isinstance(host, FormatLinear)}
    if requantize and not any(hosts[name].packed for name in weights):
        raise UserError("no layer with an adapter is packed, so there is nothing to quantize again; merge it dense")
    for name, w in weights.items():
        merge_(hosts[name], *w, requantize=requantize, dtype=model.compute_dtype)
