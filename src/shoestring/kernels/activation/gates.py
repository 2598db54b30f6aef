"""The gates of gated feed-forward layers: their numbers in kernels, and their definitions. Used by glu.py and its
Triton source. The activations of layers without a gate: `ungated`.

    swiglu       silu(g)
    geglu        gelu(g) = g Phi(g)
    geglu_tanh   gelu(g) by the approximation with tanh
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

GATES = {"swiglu": 0, "geglu": 1, "geglu_tanh": 2}


def activated(gate: Tensor, act: str) -> Tensor:
    """The activation of a gate, in plain torch."""
    if act == "swiglu":
        return F.silu(gate)
    return F.gelu(gate, approximate={"geglu": "none", "geglu_tanh": "tanh"}[act])


def ungated(up: Tensor, act: str) -> Tensor:
    """gelu, gelu_tanh, or relu2: the square of max(up, 0)."""
    return F.relu(up).square() if act == "relu2" else F.gelu(up, approximate="tanh" if act == "gelu_tanh" else "none")
