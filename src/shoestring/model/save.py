"""Writing a model folder that `transformers` reads, or a packed one.

Tensors are gathered one by one (every rank takes part), renamed to Hugging Face's names and streamed into a
temporary folder, which is renamed once complete: a folder is either the old one, the new one or absent.

A packed model (formats.pack) is written with `shoestring.json`: the Format of each packed module, bits per
weight, compute dtype. Its weights lie in packed.safetensors, not model.safetensors: `transformers` only warns
about a quantization method it does not know and would go on with random weights; without the file it stops.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoestring.errors import UserError
from shoestring.formats import Dense, Format, FormatLinear
from shoestring.model import hf_names
from shoestring.model.atomic_folder import AtomicFolder
from shoestring.model.hf import spec_to_hf
from shoestring.model.spec import ModelSpec
from shoestring.model.tensor_files import SHARD_BYTES, TensorInfo, plan_shards, write_index, write_json
from shoestring.model.transformer import Decoder
from shoestring.places import expand

if TYPE_CHECKING:
    from shoestring.mesh import Mesh
    from shoestring.model.tokenizer import Tokenizer

PACKED_VERSION = 1


def linears(model: nn.Module) -> Iterator[tuple[str, FormatLinear]]:
    return ((name, m) for name, m in model.named_modules() if isinstance(m, FormatLinear))


@dataclass(frozen=True)
class _Entry:
    """One of our tensors on its way out: what it will be, and how to get it (collective when sharded)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    get: Callable[[], Tensor]


def save_model(
    path: str | Path,
    model: Decoder,
    tokenizer: Tokenizer | None = None,
    *,
    dtype: torch.dtype | None = None,
    weights: dict[str, Tensor] | None = None,
    mesh: Mesh | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write a Hugging Face folder, whole or not at all. Every rank calls it; rank 0 writes.

    `dtype`: of the unpacked weights; by default as they are. `weights`: a state dict with our names to write
    instead of the model's own (an average, or formats.packed_state). A module that trains with a Format but
    is not packed is written as the dense weight its forward multiplies with, so that `transformers` computes
    the same logits.
    """
    target = expand(path).resolve()
    spec, state = model.spec, model.state_dict() if weights is None else weights
    packed = {name: m.format for name, m in linears(model) if f"{name}.weight" not in state}
    spec_to_hf(spec)  # a spec that cannot be written should not cost a gather first
    entries = _entries(model, state, dtype)
    plan = hf_names.merge_plan(spec, entries, packed=bool(packed))
    infos = [_merged_info(spec, hf, ours, entries, bool(packed)) for hf, ours in plan.items()]
    stem = "packed" if packed else "model"
    shards = plan_shards(infos, stem, shard_bytes)

    is_main = mesh.is_main if mesh is not None else _is_main_rank()
    out = AtomicFolder(target, sum(i.num_bytes for i in infos)) if is_main else None
    try:
        _raise_together(out, mesh)
        for file, shard in shards.items():
            with out.tensors(file, shard) if out else contextlib.nullcontext() as write:
                for info in shard:
                    # Collective: a rank 0 that can no longer write goes on gathering with the others.
                    parts = [entries[n].get() for n in plan[info.name]]
                    if write is not None:
                        write(hf_names.merge(spec, plan[info.name], parts, packed=bool(packed)))
        if out is not None and out.error is None:
            with out.guard():
                write_index(out.temp, stem, shards)
                about = _write_packing(out.temp, model, infos, packed) if packed else None
                write_extras(out.temp, spec, tokenizer, entries["embed.weight"].dtype, about)
                out.finish()
        _raise_together(out, mesh)
    finally:
        if out is not None:
            out.clean()
    return target


def _raise_together(out: AtomicFolder | None, mesh: Mesh | None) -> None:
    """Rank 0's error on every rank, or none: a rank that went on alone would hang in the next collective."""
    error = out.error if out is not None else None
    if mesh is not None:
        error = mesh.broadcast_object(error)
    if error is not None:
        raise UserError(error)


def _entries(model: Decoder, state: dict[str, Tensor], dtype: torch.dtype | None) -> dict[str, _Entry]:
    """Our tensors to be written, by name; a Format's training state is folded into its weight."""
    by_name = dict(linears(model))
    entries: dict[str, _Entry] = {}
    for name, t in state.items():
        module, _, leaf = name.rpartition(".")
        linear, is_extra = by_name.get(module), leaf.startswith("weight_")
        if is_extra and f"{module}.weight" in state:
            continue  # what a Format keeps beside a weight in training
        want = t.dtype if dtype is None or is_extra else dtype
        get = _gather(t, want)
        if linear is not None and leaf == "weight" and not isinstance(linear.format, Dense):
            aux = {s: state[f"{module}.weight_{s}"] for s in linear.state_names}
            get = _gather_fake(t, aux, linear.format, model.compute_dtype, want)
        entries[name] = _Entry(tuple(t.shape), want, get)
    held = set(entries) | {n.rpartition(".")[0] + ".weight" for n in entries if ".weight_" in n}
    if missing := sorted(n for n in model.state_dict() if ".weight_" not in n and n not in held):
        raise UserError(
            f"the weights to save lack {missing[0]!r} ({len(missing)} missing); give a whole state dict"
        )
    return entries


def _gather(t: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
    return lambda: _full(t).to(device="cpu", dtype=dtype)


def _gather_fake(
    t: Tensor, aux: dict[str, Tensor], format: Format, compute: torch.dtype, dtype: torch.dtype
) -> Callable[[], Tensor]:
    def get() -> Tensor:
        whole, state = _full(t), {n: _full(a) for n, a in aux.items()}
        with torch.no_grad():
            return format.fake(whole.to(compute), state).to(device="cpu", dtype=dtype)

    return get


def _full(t: Tensor) -> Tensor:
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach()


def _is_main_rank() -> bool:
    import torch.distributed as dist

    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def _merged_info(
    spec: ModelSpec, hf: str, ours: list[str], entries: dict[str, _Entry], packed: bool
) -> TensorInfo:
    first = entries[ours[0]]
    shape = first.shape if len(ours) == 1 else (sum(entries[n].shape[0] for n in ours), *first.shape[1:])
    if hf_names.source_of(spec, ours[0], packed=packed).transpose:
        shape = shape[::-1]
    return TensorInfo(hf, shape, first.dtype)


def _write_packing(
    folder: Path, model: Decoder, infos: list[TensorInfo], packed: dict[str, Format]
) -> dict[str, Any]:
    """shoestring.json; returns what config.json says about it."""
    packing = _packing(model, infos, packed)
    write_json(folder / "shoestring.json", packing)
    return {
        "quant_method": "shoestring",
        "bits_per_weight": packing["bits_per_weight"],
        "note": "packed weights: read with shoestring.load_model; `shoestring export` writes other layouts",
    }


def write_extras(
    folder: Path,
    spec: ModelSpec,
    tokenizer: Tokenizer | None,
    dtype: torch.dtype,
    quantization: dict[str, Any] | None = None,
) -> None:
    """What a model folder has besides its tensors: config.json, generation_config.json, the tokenizer."""
    config = spec_to_hf(spec)
    config["dtype"] = config["torch_dtype"] = str(dtype).removeprefix("torch.")
    if quantization is not None:
        config["quantization_config"] = quantization
    write_json(folder / "config.json", config)
    generation: dict[str, Any] = {"bos_token_id": spec.bos_id}
    ends = [*spec.eos_ids, *sorted(getattr(tokenizer, "eos_ids", set()) - set(spec.eos_ids))]
    generation["eos_token_id"] = ends if len(ends) > 1 else next(iter(ends), None)
    write_json(folder / "generation_config.json", {k: v for k, v in generation.items() if v is not None})
    if tokenizer is not None:
        tokenizer.save(folder)


def _packing(model: Decoder, infos: list[TensorInfo], packed: dict[str, Format]) -> dict[str, Any]:
    from shoestring import __version__

    shapes = {name: (m.out_features, m.in_features) for name, m in linears(model)}
    return {
        "version": PACKED_VERSION,
        "written_by": f"shoestring {__version__}",
        "compute_dtype": str(model.compute_dtype).removeprefix("torch."),
        "bits_per_weight": round(8 * sum(i.num_bytes for i in infos) / model.spec.num_params(), 4),
        "modules": {
            hf_names.hf_module(model.spec, name): {
                "format": format.to_json(),
                "shape": list(shapes[name]),
                "bits_per_weight": round(format.bits_per_weight(shapes[name]), 4),
            }
            for name, format in packed.items()
        },
    }
