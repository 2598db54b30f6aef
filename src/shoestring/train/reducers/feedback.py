"""Error feedback, and the exchange of a whole set of gradients.

    p = g + decay * e,   (total, e) <- exchange(p)

One fp32 residual e per tensor and replica. `Compression` knows no model and no process group: it takes gradients by
name and makes one exchange of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shoestring.train.reducers.compressor import At, Compressor, Sum
from shoestring.train.reducers.quantizers import PLAIN
from shoestring.train.reducers.rounds import Exchange, together


class Compression:
    """Residuals and memories of one replica, for tensors with these compressors.

    What a package adds under `shoestring.selectors` opens a subclass that changes `compressors` from step to step."""

    wants_loss = False
    loss = math.nan  # of this replica in this step, where it is wanted

    def scalars(self, num_steps: int) -> dict[str, float]:
        """Means over the steps, for the metrics."""
        return {}

    def decisions(self) -> dict[str, Any]:
        """What a checkpoint keeps of the rank that decides; others have none."""
        return {}

    def load_decisions(self, state: dict[str, Any]) -> None:
        return

    def __init__(self, compressors: Mapping[str, Compressor], *, rank: int, size: int, seed: int = 0) -> None:
        self.compressors = dict(compressors)
        self.rank, self.size, self.seed = rank, size, seed
        self.residuals: dict[str, Tensor] = {}
        self.memories: dict[str, dict[str, Tensor]] = {name: {} for name in compressors}

    def at(self, name: str, step: int) -> At:
        return At(self.rank, self.size, name, step, self.seed, self.memories.setdefault(name, {}))

    def residual(self, name: str, like: Tensor) -> Tensor:
        """As much as counts in this step; zeros in the first one."""
        if name not in self.residuals:
            self.residuals[name] = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
        decay = self.compressors[name].decay
        return self.residuals[name] if decay == 1 else self.residuals[name].mul_(decay)

    def given(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Each gradient in fp32 and what earlier steps left out of it.

        With error feedback it is the residual itself, added to in place: memory that is touched twice costs more time
        than what is computed. The exchange leaves the new residual there."""
        fed_back = [name for name in gradients if self.compressors[name].feedback]
        if fed_back:
            residuals = [self.residual(name, gradients[name]) for name in fed_back]
            torch._foreach_add_(residuals, [gradients[name] for name in fed_back])
        return {name: self.residuals[name] if name in fed_back else g.float() for name, g in gradients.items()}

    def exchange(self, gradients: Mapping[str, Tensor], step: int) -> Exchange[dict[str, Tensor]]:
        """The sum over replicas of each gradient; residuals are updated."""
        return (yield from self.exchange_given(self.given(gradients), step))

    def exchange_given(self, given: Mapping[str, Tensor], step: int) -> Exchange[dict[str, Tensor]]:
        groups: dict[Compressor, list[str]] = {}
        for name in given:
            groups.setdefault(self.compressors[name], []).append(name)
        exchanges = [
            compressor.exchange_all([given[name] for name in names], [self.at(name, step) for name in names])
            for compressor, names in groups.items()
        ]
        sums = yield from together(exchanges)
        found: dict[str, Sum] = {}
        for names, group in zip(groups.values(), sums, strict=True):
            found |= zip(names, group, strict=True)
        self._keep(found)
        return {name: found[name].total for name in given}

    def _keep(self, sums: Mapping[str, Sum]) -> None:
        """In place: a checkpoint may hold views of residuals."""
        pairs = [(self.residuals[name], one.error) for name, one in sums.items() if self.compressors[name].feedback]
        moved = [(residual, error) for residual, error in pairs if residual.data_ptr() != error.data_ptr()]
        if moved:
            torch._foreach_copy_([residual for residual, _ in moved], [error for _, error in moved])

    def sent_bytes(self, shapes: Mapping[str, torch.Size]) -> int:
        coded = {n: s for n, s in shapes.items() if self.compressors[n] != PLAIN}
        exact = sum(s.numel() for n, s in shapes.items() if n not in coded)
        return sum(self.compressors[n].sent_bytes(s, self.size) for n, s in coded.items()) + PLAIN.sent_bytes(
            torch.Size([exact]), self.size
        )
