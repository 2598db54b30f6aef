"""Error feedback, and the exchange of a whole set of gradients.

    p = g + decay * e,   (total, e) <- exchange(p)

One fp32 residual e per tensor and replica. `Compression` knows no model and no process group: it takes gradients by
name and makes one exchange of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shoestring.train.reducers.compressor import At, Compressor, Sum
from shoestring.train.reducers.quantizers import PLAIN
from shoestring.train.reducers.rounds import Exchange, together


class Compression:
    """Residuals and memories of one replica, for tensors with these compressors."""

    def __init__(self, compressors: Mapping[str, Compressor], *, rank: int, size: int, seed: int = 0) -> None:
        self.compressors = dict(compressors)
        self.rank, self.size, self.seed = rank, size, seed
        self.residuals: dict[str, Tensor] = {}
        self.memories: dict[str, dict[str, Tensor]] = {name: {} for name in compressors}

    def at(self, name: str, step: int) -> At:
        return At(self.rank, self.size, name, step, self.seed, self.memories.setdefault(name, {}))

    def with_residual(self, name: str, gradient: Tensor) -> Tensor:
        """The gradient in fp32 and what earlier steps left out of it."""
        compressor, value = self.compressors[name], gradient.float()
        if name not in self.residuals:
            return value
        return torch.add(value, self.residuals[name], alpha=compressor.decay)

    def exchange(self, gradients: Mapping[str, Tensor], step: int) -> Exchange[dict[str, Tensor]]:
        """The sum over replicas of each gradient; residuals are updated."""
        groups: dict[Compressor, list[str]] = {}
        for name in gradients:
            groups.setdefault(self.compressors[name], []).append(name)
        exchanges = [
            compressor.exchange_all(
                [self.with_residual(name, gradients[name]) for name in names], [self.at(name, step) for name in names]
            )
            for compressor, names in groups.items()
        ]
        sums = yield from together(exchanges)
        found: dict[str, Sum] = {}
        for names, group in zip(groups.values(), sums, strict=True):
            found |= zip(names, group, strict=True)
        self._keep(found)
        return {name: found[name].total for name in gradients}

    def _keep(self, sums: Mapping[str, Sum]) -> None:
        fed_back = [name for name in sums if self.compressors[name].feedback]
        known = [name for name in fed_back if name in self.residuals]
        self.residuals |= {name: sums[name].error.clone() for name in fed_back if name not in self.residuals}
        if known:  # in place: a checkpoint may hold views of them
            torch._foreach_copy_([self.residuals[name] for name in known], [sums[name].error for name in known])

    def sent_bytes(self, shapes: Mapping[str, torch.Size]) -> int:
        coded = {n: s for n, s in shapes.items() if self.compressors[n] != PLAIN}
        exact = sum(s.numel() for n, s in shapes.items() if n not in coded)
        return sum(self.compressors[n].sent_bytes(s, self.size) for n, s in coded.items()) + PLAIN.sent_bytes(
            torch.Size([exact]), self.size
        )
