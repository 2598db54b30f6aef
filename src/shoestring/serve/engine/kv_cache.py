"""Keys and values in blocks, and the attention that reads them.

Per layer one tensor [blocks, block_size, G, D] for keys and one for values. `BlockPool` decides which blocks hold a
request; this file only stores and reads. Nothing is cleared on release or roll-back: rows at and above a request's
`num_computed` are overwritten before they are read. With a pool that grows, the tensors double when a block beyond them
is used, so a long context costs nothing until it is needed.

`plan(spans)` returns the `attend` callable of one forward, whose rows are those of all requests in a row (B=1, T=all
rows). It works everywhere: it gathers the blocks of a request into a contiguous copy (a request whose blocks are
neighbours is read in place) and calls the plain attention; requests with equally many rows attend together, padded to
the longest. `reserve` and `stored` are for kernels that read blocks in place.

Shapes: T rows of the step, H query heads, G key/value heads, D head dim, S keys, N requests in a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor, nn

from shoestring.formats.linear import local
from shoestring.model.attention import Attend, attend_with, mask_at
from shoestring.model.layer_plan import DecoderPlan
from shoestring.model.transformer import Decoder
from shoestring.serve.engine.block_pool import BlockPool, RowSpan, chain_root
from shoestring.serve.engine.prompt_attention import prompt_attention

MIN_POSITIONS = 64  # what a growing cache begins with; below this, growing costs more than the memory
MIN_GPU_POSITIONS = 4096  # on a GPU, growing also means capturing all graphs again


class KVCache:
    def __init__(self, plan: DecoderPlan, pool: BlockPool) -> None:
        self.pool = pool
        self._windows = [layer.attn.window for layer in plan.layers]
        self._softcaps = [layer.attn.softcap for layer in plan.layers]
        # Width, dtype and device come from the first keys written: a tensor-parallel rank holds fewer heads.
        self._keys: list[Tensor | None] = [None] * len(plan.layers)
        self._values: list[Tensor | None] = [None] * len(plan.layers)
        self._num_reserved = -1  # blocks that every layer has had memory for
        self.num_moves = 0  # how often a tensor was replaced by a larger one: addresses of before are then void

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in (*self._keys, *self._values) if t is not None)

    # -- blocks read in place -------------------------------------------------------------------------------
    def reserve(self, num_groups: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        """Memory in every layer for every block that is in use, before a forward that takes `stored`."""
        if self.pool.num_touched <= self._num_reserved:
            return
        self._num_reserved = self.pool.num_touched
        like_BTGD = torch.empty(0, 0, num_groups, head_dim, dtype=dtype, device=device)
        for layer in range(len(self._keys)):
            self._keys[layer] = self._grown(self._keys[layer], like_BTGD)
            self._values[layer] = self._grown(self._values[layer], like_BTGD)

    def stored(self, layer: int) -> tuple[Tensor, Tensor]:
        """The layer's keys and values, [blocks, block_size, G, D] each."""
        keys, values = self._keys[layer], self._values[layer]
        assert keys is not None and values is not None
        return keys, values

    def discard_nonfinite(self, blocks: Sequence[int]) -> None:
        """Zeros instead of NaN and infinity in these blocks."""
        for stored in (*self._keys, *self._values):
            if stored is not None:
                index = torch.tensor(list(blocks), device=stored.device)
                stored.index_copy_(0, index, stored[index].nan_to_num(0.0, 0.0, 0.0))

    # -- one forward ----------------------------------------------------------------------------------------
    def plan(self, spans: Sequence[RowSpan], device: torch.device | str) -> Attend:
        """The `attend` for a forward whose rows are those of `spans`, in that order."""
        size = self.pool.block_size
        assert all(s.num > 0 and s.stop <= len(s.blocks) * size for s in spans)
        rows = [(s.blocks[p // size] * size + p % size, p) for s in spans for p in range(s.start, s.stop)]
        place_T, position_T = torch.tensor(rows, device=device).T.contiguous()
        groups = [list(group) for _, group in groupby(spans, key=lambda s: s.num)]
        index_of = [self._index(group, device) for group in groups]
        # By (first row of the group, window), for all layers.
        masks: dict[tuple[int, int | None], Tensor] = {}

        def attend(layer: int, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor) -> Tensor:
            keys = self._keys[layer] = self._grown(self._keys[layer], k_BTGD)
            values = self._values[layer] = self._grown(self._values[layer], v_BTGD)
            keys.flatten(0, 1).index_copy_(0, place_T, k_BTGD[0])
            values.flatten(0, 1).index_copy_(0, place_T, v_BTGD[0])
            outs, row, window, softcap = [], 0, self._windows[layer], self._softcaps[layer]
            for group, index in zip(groups, index_of, strict=True):
                num_rows = len(group) * group[0].num
                shape = (len(group), group[0].num)
                q_NTHD = q_BTHD[0, row : row + num_rows].unflatten(0, shape)
                if index is None:
                    # Whole prompts at once: their keys are this step's rows, and the causal kernel needs no
                    # mask.
                    k_NTGD = k_BTGD[0, row : row + num_rows].unflatten(0, shape)
                    v_NTGD = v_BTGD[0, row : row + num_rows].unflatten(0, shape)
                    out_NTHD = prompt_attention(q_NTHD, k_NTGD, v_NTGD, window=window, softcap=softcap)
                else:
                    length = max(s.stop for s in group)
                    k_NSGD, v_NSGD = _read(keys, index)[:, :length], _read(values, index)[:, :length]
                    if (row, window) not in masks:
                        at_NT = position_T[row : row + num_rows].unflatten(0, shape)
                        masks[row, window] = mask_at(at_NT, length, window=window)
                    out_NTHD = attend_with(q_NTHD, k_NSGD, v_NSGD, masks[row, window], softcap=softcap)
                outs.append(out_NTHD.flatten(0, 1))
                row += num_rows
            return (outs[0] if len(outs) == 1 else torch.cat(outs))[None]

        return attend

    def _index(self, group: list[RowSpan], device: torch.device | str) -> slice | Tensor | None:
        """The blocks that a group reads, [N, blocks]; a slice where they are neighbours, None where nothing
        but this step's own rows is read."""
        if all(s.start == 0 for s in group):
            return None
        num = self.pool.blocks_for(max(s.stop for s in group))
        first = group[0].blocks[0]
        if len(group) == 1 and list(group[0].blocks[:num]) == list(range(first, first + num)):
            return slice(first, first + num)
        # A shorter request repeats its last block; those keys lie beyond its rows and are masked.
        rows = [[s.blocks[min(i, len(s.blocks) - 1)] for i in range(num)] for s in group]
        return torch.tensor(rows, device=device)

    def _grown(self, old: Tensor | None, like_BTGD: Tensor) -> Tensor:
        """`old`, or a larger copy of it with room for every block that is in use."""
        have = 0 if old is None else old.shape[0]
        if old is not None and have >= self.pool.num_touched:
            return old
        least = self.pool.blocks_for(MIN_POSITIONS if like_BTGD.device.type == "cpu" else MIN_GPU_POSITIONS)
        num = min(self.pool.num_blocks, max(self.pool.num_touched, 2 * have, least))
        # Zeros: a batch padded to its longest request multiplies unwritten values by 0, and 0 * nan is nan.
        new = like_BTGD.new_zeros(num, self.pool.block_size, *like_BTGD.shape[2:])
        if old is not None:
            new[:have] = old
        self.num_moves += 1
        return new


def _read(stored: Tensor, index: slice | Tensor) -> Tensor:
    """[N, S, G, D] of the blocks that `index` names; a view where they are neighbours."""
    if isinstance(index, slice):
        return stored[index].flatten(0, 1)[None]
    # index_select copies whole blocks; stored[index] goes element by element and takes 2.5 times as long.
    return stored.index_select(0, index.flatten()).unflatten(0, index.shape).flatten(1, 2)


def weights_id(model: Decoder) -> list[tuple[int, int]]:
    """Addresses and version counters of all tensors: another list after an optimizer step or a load into the same
    model. FSDP2 changes values behind the counters."""
    tensors = [
        local(t)
        for m in modules_of(model)
        for held in (m._parameters, m._buffers)
        if held
        for t in held.values()
        if t is not None
    ]
    return [(t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors]


def modules_of(model: nn.Module) -> list[nn.Module]:
    """`model.modules()`, with modules used twice listed twice, in a seventh of the time: called in steps with
    prefills."""
    found = [model]
    for module in found:  # grows meanwhile
        if module._modules:
            found += [m for m in module._modules.values() if m is not None]
    return found


def cache_root(model: Decoder, skip_set: str = "", weights: object = None, adapter: str = "") -> bytes:
    """Where the hash chain of a model's blocks starts: (weights id, dtype of keys and values, skip set, digest of the
    adapter). `weights`: the id where it is known.

    Under FSDP2 call `Engine.forget_prefixes` after every change of the weights.
    """
    return chain_root(weights or weights_id(model), model.compute_dtype, skip_set, adapter)
