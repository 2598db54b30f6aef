"""Limits of a GPU for a kernel's plan: streaming multiprocessors (SMs), shared memory and registers.

`device_limits` reads them from the driver through torch. Functions that choose plans take a `DeviceLimits`, so that
they can be tested without a GPU; the default is the H200 for which the shipped plans were measured. Time estimates are
fitted to timings, so clock rates and bandwidths are not needed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

BLOCK_RESERVED = 1024  # bytes of shared memory that CUDA itself takes for every block of an SM


@dataclass(frozen=True)
class DeviceLimits:
    name: str  # torch.cuda.get_device_name: the key of measured plans
    num_sms: int
    shared_per_block: int  # bytes that one block may ask for
    shared_per_sm: int  # bytes for all blocks of an SM, BLOCK_RESERVED of each included
    registers_per_sm: int  # of 32 bits


H200 = DeviceLimits("NVIDIA H200", 132, 227 * 1024, 228 * 1024, 65536)


def device_limits(device: int | None = None) -> DeviceLimits:
    """The limits of a GPU; None: of the current one, or of an H200 on a machine without any."""
    if device is None:
        if not torch.cuda.is_available():
            return H200
        device = torch.cuda.current_device()
    return _read_limits(device)  # the fast path of a launch


@functools.cache
def _read_limits(device: int) -> DeviceLimits:
    found = torch.cuda.get_device_properties(device)
    return DeviceLimits(
        found.name,
        found.multi_processor_count,
        found.shared_memory_per_block_optin,  # type: ignore[attr-defined]  # missing in torch's type stubs
        found.shared_memory_per_multiprocessor,
        found.regs_per_multiprocessor,  # type: ignore[attr-defined]
    )
