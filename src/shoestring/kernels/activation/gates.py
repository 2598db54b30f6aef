"""The gates of gated feed-forward layers: the numbers by which kernels know them, and what each computes.

    swiglu       silu(g)
    geglu        gelu(g) = g Phi(g)
    geglu_tanh   gelu(g) by the approximation with tanh

A module of its own, because both glu.py and its Triton source need the numbers.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

GATES = {"swiglu": 0, "geglu": 1, "geglu_tanh": 2}


def activated(gate: Tensor, act: str) -> Tensor:
    """What a gate multiplies with, in plain torch."""
    if act == "swiglu":
        return F.silu(gate)
    return F.gelu(gate, approximate={"geglu": "none", "geglu_tanh": "tanh"}[act])
