"""The rows of `shoestring env` about 2:4 kernels (entry point in shoestring.environment)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shoestring.kernels.lowbit.lowbit_linear import chip_refusal, library_refusal
from shoestring.kernels.runtime.triton_backend import triton_refusal
from shoestring.methods.sparse24.kernels import cusparselt


def kernel_rows() -> list[tuple[str, str, Callable[[], str | None]]]:
    """What it computes, by what, and what says why not on the current GPU."""
    return [
        ("2:4 masks on a GPU", "Triton", triton_refusal),
        ("packed 2:4 products", "CUDA C++ through NVRTC", _no_packed_products),
        ("2:4 products in training", "cuSPARSELt", cusparselt.refusal),
    ]


def _no_packed_products() -> str | None:
    return chip_refusal(torch.cuda.current_device()) or library_refusal()
