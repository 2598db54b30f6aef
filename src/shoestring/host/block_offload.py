"""Run a model block by block on a device that does not hold it: blocks move there in turn, activations may spill.

    with on_device(block, torch.device("cuda"), torch.bfloat16):
        block(x)                  # on the GPU, in bf16
    ...                           # back in host memory, unchanged

The model stays in host memory in the dtype of its checkpoint, so that the device holds one block (and a CPU the fp32
values of one block). Activations of all inputs are in one store, which is a file beyond `memory_gb`. The functions take
modules and tensors and know no model. Blocks are not prefetched.
"""

from __future__ import annotations

import errno
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.errors import UserError
from shoestring.host.arena import available_memory


@dataclass(frozen=True)
class BlockOffload:
    onload_device: torch.device | None = None  # where one block at a time computes; None: where the model is
    memory_gb: float = 4.0  # activations beyond this go to a file
    folder: str | None = None  # for that file; None: the system's temporary folder


@contextmanager
def on_device(
    module: nn.Module, device: torch.device | None, dtype: torch.dtype, *, keep: bool = False
) -> Iterator[None]:
    """Within the context the module is on `device` in `dtype`; with None nothing moves.

    With `keep`, changes made inside (weights, Formats, packed parts) stay, in `dtype`, since the dtype of the
    checkpoint might round them. Otherwise, and after an error, the module is restored.
    """
    if device is None:
        yield
        return
    before = [(m, _attributes(m)) for m in module.modules()]
    offloaded = [(p, p.data, p.requires_grad) for p in module.parameters()]
    # A module without tensors has nothing to move.
    source = next((t.device for t in chain(module.parameters(), module.buffers())), device)
    succeeded = False
    try:
        module.to(device=device, dtype=dtype)
        if keep:
            for p, data, _ in offloaded:
                if p.data_ptr() == data.data_ptr():  # nothing was moved: changes need their own copy
                    p.data = data.clone()
        yield
        if keep:
            module.to(source)
            succeeded = True
    finally:
        if not succeeded:
            for m, attributes in before:
                vars(m).clear()
                vars(m).update(attributes)
            for p, data, requires_grad in offloaded:
                p.grad = None
                p.data = data
                p.requires_grad_(requires_grad)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """A module's own attributes and tensors, to undo a change of its Format. Submodules and hooks are not copied: code
    that changes them on the device must change them back.
    """
    found = dict(vars(module))
    for name in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
        found[name] = found[name].copy()
    return found


def activation_store(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, offload: BlockOffload, stack: ExitStack
) -> Tensor:
    """An empty tensor for activations: on the device when it fits memory_gb, else a file that `stack` removes."""
    count = math.prod(shape)
    num_bytes = count * dtype.itemsize
    if num_bytes <= offload.memory_gb * 1e9:
        return torch.empty(shape, dtype=dtype, device=device)
    try:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="shoestring-", dir=offload.folder))
        path = Path(folder) / "activations"
        with path.open("wb") as f:
            # Allocated in full: a full disk under a mapped file would kill the process later, without a message.
            os.posix_fallocate(f.fileno(), 0, num_bytes)
    except OSError as error:
        hint = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
        raise UserError(
            f"cannot keep {num_bytes / 1e9:.1f} GB of activations in {offload.folder or tempfile.gettempdir()}: "
            f"{hint}; give another folder (spill), more memory_gb, or fewer calibration windows"
        ) from error
    return torch.from_file(str(path), shared=True, size=count, dtype=dtype).view(shape)


def check_spill(folder: str | None) -> None:
    """UserError for a missing folder, before the run starts: the store is made only after minutes."""
    if folder is not None and not Path(folder).is_dir():
        raise UserError(f"spill={folder} is not a folder; give an existing folder with room for activations")


def fits_on_device(num_params: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a model of this size in `dtype`, not loaded yet, takes at most half of the device's free memory; the rest
    is for activations.
    """
    return num_params * dtype.itemsize <= free_bytes(device) / 2


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory()
