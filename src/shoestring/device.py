"""Device and dtype as users name them: device=cuda:1, dtype=bf16, or auto.

torch is imported inside functions: importing this module is free.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shoestring.errors import UserError

if TYPE_CHECKING:
    import torch

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # the user's name: torch's


def check_device(name: str) -> None:
    """UserError for what is no device's name; whether it is there, pick_device says."""
    if re.fullmatch(r"auto|(cpu|cuda)(:[0-9]{1,2})?", name) is None:
        raise UserError(f"device={name!r}: allowed are auto, cpu, cuda, cuda:0, ...")


def check_dtype(name: str) -> None:
    if name != "auto" and name not in DTYPES:
        raise UserError(f"dtype={name!r}: allowed are auto, {', '.join(DTYPES)}")


def pick_device(name: str) -> torch.device:
    """auto: the GPU where there is one."""
    import torch

    check_device(name)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device={name} was asked for but torch sees no CUDA GPU; use device=cpu or device=auto")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device={name}: the last GPU of this machine is cuda:{torch.cuda.device_count() - 1}")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # kernels and graphs go to the current device, not to that of their tensors
    return device


def pick_dtype(name: str, device: torch.device | str) -> torch.dtype:
    """auto: bf16 on a GPU; fp32 on a CPU, most of which are a hundred times slower in bf16."""
    import torch

    check_dtype(name)
    if name == "auto":
        return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    return getattr(torch, DTYPES[name])
