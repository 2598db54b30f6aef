"""Encoders of `transformers` (the BERT family, ViT-like models) as folders: read, dense or packed, and written packed.

`transformers` computes them and is optional (pip install 'shoestring[encoders]'). A packed folder has the config.json
and the tokenizer files of its source, the packed weights in packed.safetensors by the names of `transformers`, and
shoestring.json, as a packed decoder has.

Weights are read from safetensors only, and no code from the model's folder runs. Left out: models with code of their
own (trust_remote_code), heads behind the encoder (a classifier): AutoModel leaves them away.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from shoestring.errors import UserError
from shoestring.formats import allocate_packed, keep_decoded, use_kernels
from shoestring.formats.convert import format_hosts
from shoestring.json_files import read_object
from shoestring.model.encoder_types import encoder_type
from shoestring.model.save import PACKED_VERSION, Entry, half_of, write_folder
from shoestring.state.files import POOLING, TensorInfo, write_json
from shoestring.state.tensor_files import TensorFiles

# What a packed folder takes over from its source, where it is there.
KEPT = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt", "vocab.json", "merges.txt"),
    *("preprocessor_config.json", "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"),
    f"{POOLING}/config.json",
)


def load_encoder_module(folder: Path, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
    try:
        from transformers import AutoConfig, AutoModel
    except ModuleNotFoundError:
        raise UserError(
            f"{folder} is an encoder ({encoder_type(folder)}), which is computed by the package transformers; "
            "pip install 'shoestring[encoders]'"
        ) from None
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"{folder} has no safetensors files; pickled weights are never read, so save it as safetensors")
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        if not (folder / "shoestring.json").is_file():
            with _without_progress_bars():
                model = AutoModel.from_pretrained(folder, use_safetensors=True, dtype=dtype, **local)
            return cast(nn.Module, model).eval().to(device)
        model = AutoModel.from_config(AutoConfig.from_pretrained(folder, **local), trust_remote_code=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"transformers cannot load {folder}: {str(error).strip().splitlines()[0][:300]}") from None
    module = cast(nn.Module, model).eval().to(dtype)
    _fill(module, folder, dtype)
    module.to(device)
    if torch.device(device).type == "cuda":
        use_kernels(module)
    else:
        keep_decoded(module, dtype=dtype)
    return module


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Of transformers, which shows one even for a model of a second."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _fill(model: nn.Module, folder: Path, dtype: torch.dtype) -> None:
    file = folder / "shoestring.json"
    packing = read_object(file)
    modules = packing.get("modules")
    if packing.get("version") != PACKED_VERSION or not isinstance(modules, dict):
        raise UserError(f"{file} is not of a version that this release reads ({PACKED_VERSION}); update shoestring")
    formats = {n: entry.get("format") for n, entry in modules.items() if isinstance(entry, dict)}
    if len(formats) != len(modules) or not all(isinstance(f, dict) for f in formats.values()):
        raise UserError(f"{file}: every module needs a 'format'; save the folder again")
    allocate_packed(model, cast(dict[str, dict[str, Any]], formats), dtype)
    files = TensorFiles(folder, "packed")
    own = model.state_dict()
    for name in [*own, *files.names]:
        if name not in own or name not in files.names:
            where = "config.json" if name in own else "packed.safetensors"
            raise UserError(f"{folder}: only {where} has {name!r}; download the folder again")
        if files.shape(name) != tuple(own[name].shape):
            raise UserError(
                f"{folder}: tensor {name!r} has shape {list(files.shape(name))}, config.json says "
                f"{list(own[name].shape)}; download the folder again"
            )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(files.read(name))


def save_packed_encoder(path: Path, model: nn.Module, source: Path) -> Path:
    """Write a packed encoder that was loaded from `source`; what no Format holds is stored in 16 bits."""
    from shoestring import __version__

    hosts = {name: host for name, host in format_hosts(model) if host.packed}
    parts = {f"{name}.weight_{part}" for name, host in hosts.items() for part in host.part_names}
    modules = {name: {"format": host.format.to_json(), "shape": list(host.shape)} for name, host in hosts.items()}
    packing = {"version": PACKED_VERSION, "written_by": f"shoestring {__version__}", "modules": modules}

    def write_rest(folder: Path) -> None:
        write_json(folder / "config.json", read_object(source / "config.json"))
        write_json(folder / "shoestring.json", packing)
        for name in KEPT:
            if (source / name).is_file():
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(source / name, folder / name)

    state = model.state_dict()
    return write_folder(path, [_entry(n, t, n in parts) for n, t in state.items()], write_rest, stem="packed")


def _entry(name: str, tensor: Tensor, part: bool) -> Entry:
    wide = not part and tensor.dtype in (torch.float32, torch.float64)
    dtype = half_of(tensor) if wide else tensor.dtype
    return Entry(TensorInfo(name, tuple(tensor.shape), dtype), lambda: tensor.detach().to("cpu", dtype).contiguous())


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """The longest list of blocks of one class: what an encoder runs one after the other."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len({type(block) for block in m}) == 1]
    if not lists:
        raise UserError(
            f"{type(model).__name__} has no list of blocks of one kind to shrink; use ModuleBlocks in Python"
        )
    return max(lists, key=len)
