"""Writing a model folder that `transformers` reads, or a packed one.

Tensors are gathered one by one (every rank takes part), renamed to Hugging Face's names and streamed into a
temporary folder, which is renamed once complete: a folder is either the old one, the new one or absent.

A packed model (formats.pack) is small in every part: what is not packed is written in 16 bits wherever that loses
nothing (`round_rest` makes it so). It is written with `shoestring.json`: the Format of each packed module, bits per
weight, compute dtype. Its weights are in packed.safetensors, not model.safetensors: `transformers` only warns about an
unknown quantization method and would use random weights; without the file it stops.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoestring.errors import UserError
from shoestring.formats import Dense, Format
from shoestring.formats.convert import format_hosts
from shoestring.formats.linear import full, local
from shoestring.model import hf_names
from shoestring.model.hf import spec_to_hf
from shoestring.model.spec import ModelSpec
from shoestring.model.transformer import Decoder
from shoestring.paths import expand
from shoestring.state.agreement import everyone
from shoestring.state.files import (
    SHARD_BYTES,
    AtomicFolder,
    TensorInfo,
    model_bytes,
    plan_shards,
    write_index,
    write_json,
)

if TYPE_CHECKING:
    from shoestring.mesh import Mesh
    from shoestring.model.tokenizer import Tokenizer

PACKED_VERSION = 1
HALF_RANGE = 32768.0  # below float16's largest value


@dataclass(frozen=True)
class Entry:
    """One tensor to be written: what it will be, and how to get it (collective when sharded)."""

    info: TensorInfo
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

    `dtype`: of the unpacked weights; by default as they are, and in a packed model in 16 bits where that is exact.
    `weights`: a state dict with our names to write instead of the model's own (an average, or formats.packed_state). A
    module that trains with a Format but is not packed is written as the dense weight its forward multiplies with, so
    that `transformers` computes the same logits.
    """
    spec_to_hf(model.spec)  # raises for a spec that cannot be written, before a gather
    entries, packed = _plan(model, weights, dtype, mesh)

    def write_rest(folder: Path) -> None:
        about = _write_packing(folder, model, entries, packed) if packed else None
        # The norms are never packed, and of the dtype of the other weights.
        norm = hf_names.source_of(model.spec, "norm.weight", packed=bool(packed)).name
        stored = next(e.info.dtype for e in entries if e.info.name == norm)
        write_extras(folder, model.spec, tokenizer, stored, about)

    return write_folder(path, entries, write_rest, stem="packed" if packed else "model", mesh=mesh, limit=shard_bytes)


def saved_bytes(model: Decoder) -> int:
    """The bytes of the weight files that `pack` and `save_model` would write; every rank calls it."""
    return model_bytes(saved_files(model))


def saved_files(model: Decoder) -> dict[str, list[TensorInfo]]:
    """The weight files that `pack` and `save_model` would write, by name; every rank calls it."""
    state = model.state_dict()
    for name, host in format_hosts(model):
        if host.packed or isinstance(host.format, Dense):
            continue
        for old in ("weight", *(f"weight_{n}" for n in host.state_names)):
            del state[f"{name}.{old}"]
        with torch.device("meta"):
            parts = host.format.stored().empty_parts(host.shape, model.compute_dtype)
        state |= {f"{name}.weight_{n}": t for n, t in parts.items()}
    entries, packed = _plan(model, state, None)
    return plan_shards([e.info for e in entries], "packed" if packed else "model")


@torch.no_grad()
def round_rest(model: nn.Module) -> None:
    """Round what is not packed (norms, biases, dense layers) to 16 bits, in place: then `save_model` stores 16 bits,
    and what is evaluated now is what will be loaded."""
    hosts = [host for _, host in format_hosts(model) if not isinstance(host.format, Dense)]
    in_formats = {id(p) for host in hosts for n, p in host.named_parameters(recurse=False) if n != "bias"}
    for p in model.parameters():
        held = local(p)
        if id(p) not in in_formats and held.dtype in (torch.float32, torch.float64):
            held.copy_(held.to(half_of(full(p.detach()))))


def half_of(t: Tensor) -> torch.dtype:
    """The 16-bit dtype that rounds `t` least: bfloat16 where it is exact, as most models were trained in it; float16,
    which has three bits more, where its range is enough."""
    if bool((t.to(torch.bfloat16).to(t.dtype) == t).all()):
        return torch.bfloat16
    return torch.float16 if bool((t.abs() < HALF_RANGE).all()) else torch.bfloat16


def _exact_dtype(t: Tensor) -> torch.dtype:
    """16 bits where no value changes, else the dtype of `t`. Collective when sharded."""
    if t.dtype not in (torch.float32, torch.float64):
        return t.dtype
    whole = full(t.detach())
    half = half_of(whole)
    return half if bool((whole.to(half).to(whole.dtype) == whole).all()) else t.dtype


def _plan(
    model: Decoder, weights: dict[str, Tensor] | None, dtype: torch.dtype | None, mesh: Mesh | None = None
) -> tuple[list[Entry], dict[str, Format]]:
    """What is written, by Hugging Face's names, and the Formats of the packed modules."""
    spec, state = model.spec, model.state_dict() if weights is None else weights
    packed = {name: m.format for name, m in format_hosts(model) if f"{name}.weight" not in state}
    ours = _entries(model, state, dtype, narrow=bool(packed))
    if mesh is not None and mesh.pp > 1:
        ours = _of_all_stages(ours, mesh)
    plan = hf_names.merge_plan(spec, ours, packed=bool(packed))
    return [_merge(spec, name, [ours[n] for n in parts], bool(packed)) for name, parts in plan.items()], packed


def write_folder(
    path: str | Path,
    entries: Sequence[Entry],
    write_rest: Callable[[Path], None],
    *,
    stem: str = "model",
    mesh: Mesh | None = None,
    limit: int = SHARD_BYTES,
) -> Path:
    """Write the tensors, then what `write_rest` adds, whole or not at all. Every rank calls it; rank 0 writes."""
    given = expand(path)
    if given.is_symlink() and not given.exists():
        raise UserError(f"{given} is a link that leads nowhere; choose another folder to save the model in")
    target, get = given.resolve(), {e.info.name: e.get for e in entries}
    shards = plan_shards([e.info for e in entries], stem, limit)
    is_main = mesh.is_main if mesh is not None else _is_main_rank()
    out = AtomicFolder(target, sum(e.info.num_bytes for e in entries)) if is_main else None
    try:
        _raise_together(out, mesh)
        for file, shard in shards.items():
            with out.tensors(file, shard) if out else contextlib.nullcontext() as write:
                for info in shard:
                    # Collective: rank 0 takes part even after a write error.
                    tensor = get[info.name]()
                    if write is not None:
                        write(tensor)
        if out is not None and out.error is None:
            with out.guard():
                write_index(out.temp, stem, shards)
                write_rest(out.temp)
                out.finish()
        _raise_together(out, mesh)
    finally:
        if out is not None:
            out.clean()
    return target


def _raise_together(out: AtomicFolder | None, mesh: Mesh | None) -> None:
    """Raise rank 0's error on every rank: a rank that continued alone would hang in the next collective."""
    error = out.error if out is not None else None
    if mesh is not None:
        error = mesh.broadcast_object(error)
    if error is not None:
        raise UserError(error)


def _entries(model: Decoder, state: dict[str, Tensor], dtype: torch.dtype | None, *, narrow: bool) -> dict[str, Entry]:
    """Our tensors to be written, by name; a Format's training state is folded into its weight. `narrow`: 16 bits where
    that is exact."""
    by_name = dict(format_hosts(model))
    entries: dict[str, Entry] = {}
    for name, t in state.items():
        module, _, leaf = name.rpartition(".")
        linear, is_extra = by_name.get(module), leaf.startswith("weight_")
        if is_extra and f"{module}.weight" in state:
            continue  # training state of a Format
        want = t.dtype if dtype is None or is_extra else dtype
        if narrow and dtype is None and not is_extra:
            want = _exact_dtype(t)
        get = gather(t, want)
        if linear is not None and leaf == "weight" and not isinstance(linear.format, Dense):
            aux = {s: state[f"{module}.weight_{s}"] for s in linear.state_names}
            get = _gather_fake(t, aux, linear.format, model.compute_dtype, want)
        entries[name] = Entry(TensorInfo(name, tuple(t.shape), want), get)
    held = set(entries) | {n.rpartition(".")[0] + ".weight" for n in entries if ".weight_" in n}
    if missing := sorted(n for n in model.state_dict() if ".weight_" not in n and n not in held):
        raise UserError(f"the weights to save lack {missing[0]!r} ({len(missing)} missing); give a whole state dict")
    return entries


def _of_all_stages(entries: dict[str, Entry], mesh: Mesh) -> dict[str, Entry]:
    """The tensors of every stage of a pipeline, in one order on all processes; the stage that has one sends it."""
    group = mesh.group("pp")
    assert group is not None
    owners: dict[str, tuple[int, TensorInfo]] = {}
    for stage, name, info in everyone(mesh, [(mesh.stage, name, e.info) for name, e in entries.items()]):
        owners.setdefault(name, (stage, info))

    def get(name: str, stage: int, info: TensorInfo) -> Tensor:
        mine = stage == mesh.stage
        t = entries[name].get() if mine else torch.empty(info.shape, dtype=info.dtype)
        t = t.to(mesh.device).contiguous()
        torch.distributed.broadcast(t, group=group, group_src=stage)
        return t.cpu()

    return {name: Entry(info, partial(get, name, stage, info)) for name, (stage, info) in owners.items()}


def gather(t: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
    return lambda: full(t).detach().to(device="cpu", dtype=dtype)


def _gather_fake(
    t: Tensor, aux: dict[str, Tensor], format: Format, compute: torch.dtype, dtype: torch.dtype
) -> Callable[[], Tensor]:
    def get() -> Tensor:
        whole, state = full(t).detach(), {n: full(a).detach() for n, a in aux.items()}
        with torch.no_grad():
            return format.fake(whole.to(compute), state).to(device="cpu", dtype=dtype)

    return get


def _is_main_rank() -> bool:
    import torch.distributed as dist

    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def _merge(spec: ModelSpec, name: str, ours: list[Entry], packed: bool) -> Entry:
    """The Hugging Face tensor `name`, made of our tensors."""
    first, names = ours[0].info, [e.info.name for e in ours]
    shape = first.shape if len(ours) == 1 else (sum(e.info.shape[0] for e in ours), *first.shape[1:])
    if hf_names.source_of(spec, first.name, packed=packed).transpose:
        shape = shape[::-1]
    return Entry(
        TensorInfo(name, shape, first.dtype),
        lambda: hf_names.merge(spec, names, [e.get() for e in ours], packed=packed),
    )


def _write_packing(folder: Path, model: Decoder, entries: list[Entry], packed: dict[str, Format]) -> dict[str, Any]:
    """shoestring.json; returns what config.json says about it."""
    from shoestring import __version__

    shapes = {name: m.shape for name, m in format_hosts(model)}
    bits = round(8 * sum(e.info.num_bytes for e in entries) / model.spec.num_params(), 4)
    packing = {
        "version": PACKED_VERSION,
        "written_by": f"shoestring {__version__}",
        "compute_dtype": str(model.compute_dtype).removeprefix("torch."),
        "bits_per_parameter": bits,
        "modules": {
            hf_names.hf_module(model.spec, name): {
                "format": format.to_json(),
                "shape": list(shapes[name]),
                "bits_per_weight": round(format.bits_per_weight(shapes[name]), 4),
            }
            for name, format in packed.items()
        },
    }
    write_json(folder / "shoestring.json", packing)
    return {
        "quant_method": "shoestring",
        "bits_per_parameter": bits,
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
    ends = [*spec.eos_ids, *sorted((tokenizer.eos_ids if tokenizer else set()) - set(spec.eos_ids))]
    generation["eos_token_id"] = ends if len(ends) > 1 else next(iter(ends), None)
    write_json(folder / "generation_config.json", {k: v for k, v in generation.items() if v is not None})
    if tokenizer is not None:
        tokenizer.save(folder)
