"""Page-locked host memory for many tensors, in one piece: torch's own pinned memory is rounded up to powers of two."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Hashable, Mapping
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

ALIGNED = 64  # bytes
Key = TypeVar("Key", bound=Hashable)
log = logging.getLogger("shoestring.host")


class HostBuffers(Generic[Key]):
    """Room for tensors `like` these (meta tensors will do); page-locked where they go to or come from a GPU."""

    def __init__(self, like: Mapping[Key, Tensor], device: torch.device) -> None:
        sizes = {key: -(-t.nbytes // ALIGNED) * ALIGNED for key, t in like.items()}
        memory = np.empty(sum(sizes.values()), np.uint8)  # every tensor below keeps it alive
        if device.type == "cuda" and memory.size:
            cudart, address = torch.cuda.cudart(), memory.ctypes.data
            error = int(cudart.cudaHostRegister(address, memory.size, 0))
            if error:
                log.warning("host memory for weights is not page-locked (CUDA error %d): copies take longer", error)
            else:  # before the memory is given back; at the end of the process the driver does it
                weakref.finalize(memory, cudart.cudaHostUnregister, address).atexit = False
        whole = torch.from_numpy(memory)
        self.tensors: dict[Key, Tensor] = {}
        at = 0
        for key, t in like.items():
            self.tensors[key] = whole[at : at + t.nbytes].view(t.dtype).view(t.shape)
            at += sizes[key]
        self.used_by: weakref.ref[Any] | None = None

    @property
    def free(self) -> bool:
        return self.used_by is None or self.used_by() is None
