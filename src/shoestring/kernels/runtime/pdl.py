"""Programmatic dependent launch (PDL): a kernel that starts while the previous one still runs.

On Hopper and later a kernel may be launched early and wait inside for the results of the one before (griddepcontrol).
Loads that do not depend on those results (a weight's first tile, say) overlap with the wait, and the gap between two
kernels disappears. The kernels of a decoding step take a constexpr PDL and call

    gdc_launch_dependents()   the next kernel may start
    ...                       loads of what no kernel of this step writes
    gdc_wait()                everything launched before has finished and is visible

Every kernel launched this way waits, so the guarantee is transitive.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from torch import Tensor


def pdl_options(t: Tensor) -> dict[str, Any]:
    """Arguments of a launch on t's device: PDL, and what Triton needs for it."""
    if t.is_cuda and _overlaps(t.device.index or 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@functools.cache
def _overlaps(device: int) -> bool:
    import torch
    import triton.language as tl
    from triton.backends.nvidia.compiler import CUDAOptions

    if os.environ.get("SHOESTRING_OVERLAP") == "0" or torch.version.hip:
        return False
    known = hasattr(CUDAOptions, "launch_pdl") and hasattr(tl.extra.cuda, "gdc_wait")
    return known and torch.cuda.get_device_capability(device) >= (9, 0)
