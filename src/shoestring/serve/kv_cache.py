"""Keys and values of the running requests, one contiguous slot per request.

Per layer one tensor [slots, length, G, D] for keys and one for values. A slot holds one request; position p
of a request lies at index p. Both the number of slots and the length grow by doubling when a request needs
more, so a model with an 8k context costs nothing until somebody uses it. Nothing is cleared on release or
roll-back: rows at and above a request's `num_computed` are overwritten before anyone reads them.

`plan(spans)` returns the `attend` callable of one forward, in which the rows of all requests lie behind each
other (B=1, T=all rows). Requests with equally many rows attend together, padded to the longest, so decoding a
batch is one attention call.

Left out: paging, sharing of prefixes, eviction.

Shapes: T rows of the step, H query heads, G key/value heads, D head dim, S keys, N requests in a group.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from shoestring.errors import UserError
from shoestring.model.attention import Attend, attend_at, causal_attention
from shoestring.model.spec import ModelSpec

MIN_LENGTH = 64  # positions of a fresh cache; below this, growing costs more than the memory


@dataclass(frozen=True)
class Span:
    """Rows [start, start + num) of the request in `slot`, computed in this step."""

    slot: int
    start: int
    num: int

    @property
    def stop(self) -> int:
        return self.start + self.num


class KVCache:
    def __init__(self, spec: ModelSpec, *, slots: int, max_context: int) -> None:
        if slots < 1 or max_context < 1:
            raise UserError(
                f"a cache of {slots} slots x {max_context} positions holds nothing; give at least 1 x 1"
            )
        self.num_slots, self.max_context = slots, max_context
        self._windows = [spec.window(layer) for layer in range(spec.num_layers)]
        self._free = list(range(slots))  # a heap: the lowest slot first keeps the tensors short
        self._used: set[int] = set()
        # Width, dtype and device come from the first keys written: a tensor-parallel rank holds fewer heads.
        self._keys: list[Tensor | None] = [None] * spec.num_layers
        self._values: list[Tensor | None] = [None] * spec.num_layers

    # -- slots ----------------------------------------------------------------------------------------------
    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._used)

    def allocate(self) -> int:
        slot = heapq.heappop(self._free)
        self._used.add(slot)
        return slot

    def release(self, slot: int) -> None:
        self._used.remove(slot)  # KeyError on a double release: an accounting bug must not pass silently
        heapq.heappush(self._free, slot)

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in (*self._keys, *self._values) if t is not None)

    # -- one forward ----------------------------------------------------------------------------------------
    def plan(self, spans: list[Span], device: torch.device | str) -> Attend:
        """The `attend` for a forward whose rows are those of `spans`, in that order."""
        assert all(s.slot in self._used and s.num > 0 and s.stop <= self.max_context for s in spans)
        slot_T = torch.tensor([s.slot for s in spans for _ in range(s.num)], device=device)
        position_T = torch.tensor([p for s in spans for p in range(s.start, s.stop)], device=device)
        groups = [list(group) for _, group in groupby(spans, key=lambda s: s.num)]
        index_of = [_slot_index([s.slot for s in group], device) for group in groups]
        need = (max(s.slot for s in spans) + 1, max(s.stop for s in spans))

        def attend(layer: int, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor) -> Tensor:
            keys = self._keys[layer] = self._grown(self._keys[layer], need, k_BTGD)
            values = self._values[layer] = self._grown(self._values[layer], need, v_BTGD)
            keys[slot_T, position_T] = k_BTGD[0]
            values[slot_T, position_T] = v_BTGD[0]
            outs, row, window = [], 0, self._windows[layer]
            for group, index in zip(groups, index_of, strict=True):
                num_rows = len(group) * group[0].num
                shape = (len(group), group[0].num)
                q_NTHD = q_BTHD[0, row : row + num_rows].unflatten(0, shape)
                if all(s.start == 0 for s in group):
                    # A whole prompt at once: its keys are this step's rows, and the causal kernel needs no
                    # mask.
                    k_NTGD = k_BTGD[0, row : row + num_rows].unflatten(0, shape)
                    v_NTGD = v_BTGD[0, row : row + num_rows].unflatten(0, shape)
                    out_NTHD = causal_attention(q_NTHD, k_NTGD, v_NTGD, window=window)
                else:
                    length = max(s.stop for s in group)
                    at_NT = position_T[row : row + num_rows].unflatten(0, shape)
                    k_NSGD, v_NSGD = keys[index, :length], values[index, :length]
                    out_NTHD = attend_at(q_NTHD, k_NSGD, v_NSGD, at_NT, window=window)
                outs.append(out_NTHD.flatten(0, 1))
                row += num_rows
            return (outs[0] if len(outs) == 1 else torch.cat(outs))[None]

        return attend

    def _grown(self, old: Tensor | None, need: tuple[int, int], like_BTGD: Tensor) -> Tensor:
        """`old`, or a larger copy of it with room for need = (slots, length)."""
        have = (0, 0) if old is None else (old.shape[0], old.shape[1])
        if old is not None and have[0] >= need[0] and have[1] >= need[1]:
            return old
        slots = have[0] if have[0] >= need[0] else min(self.num_slots, max(need[0], 2 * have[0]))
        length = have[1]
        if length < need[1]:
            length = min(self.max_context, max(need[1], 2 * have[1], MIN_LENGTH))
        # Zeros: a batch padded to its longest request multiplies unwritten values by 0, and 0 * nan is nan.
        new = like_BTGD.new_zeros(slots, length, *like_BTGD.shape[2:])
        if old is not None:
            new[: have[0], : have[1]] = old
        return new


def _slot_index(slots: list[int], device: torch.device | str) -> slice | Tensor:
    """Consecutive slots as a slice, which reads the cache in place instead of copying it."""
    if slots == list(range(slots[0], slots[0] + len(slots))):
        return slice(slots[0], slots[0] + len(slots))
    return torch.tensor(slots, device=device)
