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
        exact = [name for name in gradients if self.compressors[name] == PLAIN]
        coded = [name for name in gradients if self.compressors[name] != PLAIN]
        exchanges = [
            self.compressors[name].exchange(self.with_residual(name, gradients[name]), self.at(name, step))
            for name in coded
        ]
        if exact:  # as one tensor: many are as short as a norm
            joined = torch.cat([gradients[name].float().flatten() for name in exact])
            exchanges.append(PLAIN.exchange(joined, self.at(exact[0], step)))
        sums = yield from together(exchanges)
        totals = {name: self._keep(name, s) for name, s in zip(coded, sums, strict=False)}
        if exact:
            parts = sums[-1].total.split([gradients[name].numel() for name in exact])
            totals |= {n: part.view(gradients[n].shape) for n, part in zip(exact, parts, strict=True)}
        return {name: totals[name] for name in gradients}

    def _keep(self, name: str, summed: Sum) -> Tensor:
        if self.compressors[name].feedback:
            if name in self.residuals:
                self.residuals[name].copy_(summed.error)  # in place: a checkpoint may hold views of it
            else:
                self.residuals[name] = summed.error.clone()
        return summed.total

    def sent_bytes(self, shapes: Mapping[str, torch.Size]) -> int:
        coded = {n: s for n, s in shapes.items() if self.compressors[n] != PLAIN}
        exact = sum(s.numel() for n, s in shapes.items() if n not in coded)
        return sum(self.compressors[n].sent_bytes(s, self.size) for n, s in coded.items()) + PLAIN.sent_bytes(
            torch.Size([exact]), self.size
        )
