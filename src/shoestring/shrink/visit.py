"""One block at a time away from home: the model stays where it lies, and a block computes somewhere else.

    with visiting(block, torch.device("cuda"), torch.bfloat16):
        block(x, rope, None)      # on the GPU, in bf16
    ...                           # at home again, as it was

So the compute device holds one block, and a CPU the fp32 numbers of one block, however large the model is: home is
the host's memory, in the dtype of the checkpoint. What a visit changed stays changed only with keep=True and
without an error; it then goes home in the dtype of the visit, because to round it to that of the checkpoint would
lose what was chosen.

Left out on purpose: fetching the next block while this one computes, and several devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from torch import nn

from shoestring.model import Loaded, load_model
from shoestring.model.folder import find_model_folder, read_spec
from shoestring.model.tensor_files import TensorFiles
from shoestring.places import expand

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@contextmanager
def visiting(
    module: nn.Module, device: torch.device | None, dtype: torch.dtype, *, keep: bool = False
) -> Iterator[None]:
    """Inside, the module computes on `device` in `dtype`; None: where it lies, and nothing is moved.

    keep: what changes inside (weights, Formats, packed parts) goes home. Otherwise, and after an error, the module is
    as it was before.
    """
    if device is None:
        yield
        return
    before = [(m, _attributes(m)) for m in module.modules()]
    at_home = [(p, p.data, p.requires_grad) for p in module.parameters()]
    # A module without tensors has nothing to move, and is at home wherever it computes.
    home = next((t.device for t in chain(module.parameters(), module.buffers())), device)
    went_well = False
    try:
        module.to(device=device, dtype=dtype)
        if keep:
            for p, data, _ in at_home:
                if p.data_ptr() == data.data_ptr():  # nothing to move: changes still need a copy of their own
                    p.data = data.clone()
        yield
        if keep:
            module.to(home)
            went_well = True
    finally:
        if not went_well:
            for m, attributes in before:
                vars(m).clear()
                vars(m).update(attributes)
            for p, data, requires_grad in at_home:
                p.grad = None
                p.data = data
                p.requires_grad_(requires_grad)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What a module itself has, its tensors included, such that a change of its Format can be undone. Which
    submodules and hooks it has is not kept: who changes those in a visit changes them back.
    """
    found = dict(vars(module))
    for name in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
        found[name] = found[name].copy()
    return found


# -- where home is -------------------------------------------------------------------------------------------
def home_dtype(path: str | Path, compute: torch.dtype) -> torch.dtype:
    """What to keep a model's weights in while its blocks compute in `compute`: the dtype they are stored in where
    `compute` holds all its numbers, else `compute`, to which they are rounded in any case.
    """
    if Path(path).suffix == ".gguf":  # de-quantized when it is read
        return compute
    folder = find_model_folder(expand(path))
    if not any((folder / f"model.safetensors{end}").is_file() for end in ("", ".index.json")):
        return compute  # packed already, or no weights: those who load it say so
    files = TensorFiles(folder)
    stored: torch.dtype | None = None
    for name in files.names:
        found = DTYPES.get(files.dtype(name))
        if found is not None:
            stored = found if stored is None else torch.promote_types(stored, found)
    return stored if stored is not None and torch.promote_types(stored, compute) == compute else compute


def load_where_it_fits(
    model: str, device: torch.device, compute: torch.dtype, stream: Literal["auto", "true", "false"]
) -> tuple[Loaded, torch.device | None]:
    """The model, and the device that its blocks visit one at a time; None where it lies on the device itself."""
    if stream == "false":
        return load_model(model, device=device, dtype=compute), None
    if Path(model).suffix == ".gguf":  # comes into the host's memory whole, wherever it goes then
        loaded = load_model(model, dtype=compute)
        if stream == "true" or not fits(loaded.spec.num_params(), device, compute):
            return loaded, device
        loaded.model.to(device)
        return loaded, None
    # Decided before a weight is read: what fits on the device never takes the host's memory.
    if stream == "auto" and fits(read_spec(model)[0].num_params(), device, compute):
        return load_model(model, device=device, dtype=compute), None
    loaded = load_model(model, dtype=home_dtype(model, compute))
    loaded.model.compute_dtype = compute
    return loaded, device


def fits(num_params: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a model of this size in `dtype`, which is not there yet, takes at most half of the device's free memory:
    that leaves the other half for activations and for the work on them.
    """
    return num_params * dtype.itemsize <= free_bytes(device) / 2


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
