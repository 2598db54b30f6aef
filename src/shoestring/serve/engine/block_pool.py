"""The accounting of paged keys and values: which block belongs to which request, and which may be shared.

A block holds `block_size` positions. A request's `BlockTable` lists its blocks in order: position p is in block
p // block_size. Every block is in exactly one of three states, so free + used + cached == total always:

    used    at least one table lists it (reference count)
    cached  no table lists it, but its content is known by a hash and may be needed again
    free    neither

Blocks are shared by content. The hash of a block is chained: hash(hash of the block before, its tokens), and the chain
starts from a root that names everything else the content depends on (weights, dtype, skip set). A block gets its hash
(`seal`) only when all its positions are computed from committed tokens. From then on it is not written to, so sharing
needs no copy. A released block keeps its hash until it is reused. The least recently used block is reused first, and of
one request the last block first, because a chain is found from its start.

Pure Python, no tensors. Left out: sharing of partly filled blocks, moving blocks to the host.
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from shoestring.errors import UserError


@dataclass(eq=False)
class BlockTable:
    """The blocks of one request; `hashes` are those of its leading, sealed blocks."""

    root: bytes
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)


@dataclass(frozen=True)
class RowSpan:
    """Rows of one request in one step: positions [start, start + num), whose keys and values belong in `blocks`.
    `adapter`: the slot of its adapter (adapters.py); -1: none."""

    blocks: Sequence[int]
    start: int
    num: int
    adapter: int = -1

    @property
    def stop(self) -> int:
        return self.start + self.num


def chain_root(*parts: object) -> bytes:
    return blake2b(repr(parts).encode(), digest_size=32).digest()


def chain(parent: bytes, tokens: Sequence[int]) -> bytes:
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=32).digest()


class BlockPool:
    def __init__(
        self, num_blocks: int, block_size: int = 16, *, grows: bool = False, prefix_cache: bool = True
    ) -> None:
        """`grows`: memory is taken as needed; the pool then reuses cached blocks rather than take new ones, as long as
        less than half of those taken so far are in use."""
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise UserError(f"{name}={value} is not allowed; give 1 or more")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.grows, self.prefix_cache = grows, prefix_cache
        self.num_touched = 0 if grows else num_blocks  # blocks 0..num_touched-1 need memory
        self._free = list(range(num_blocks))  # a heap: low blocks first keep a growing pool short
        self._refs: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # in order of release
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._refs)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that a table can get now."""
        return len(self._free) + len(self._cached)

    def blocks_for(self, num_positions: int) -> int:
        return -(-num_positions // self.block_size)

    # -- tables ---------------------------------------------------------------------------------------------
    def open(self, root: bytes, tokens: Sequence[int], *, shared: int | None = None) -> BlockTable | None:
        """A table for all of `tokens`, its leading blocks taken from the cache where it has them. None when
        there are not enough blocks now. The table's hashes tell how many blocks need no computing; the block
        of the last token never is among them, because that token must be computed to go on. `shared`: only
        blocks below this position may come from the cache."""
        hits = self._match(root, tokens if shared is None else tokens[: shared + 1])
        need = self.blocks_for(len(tokens)) - len(hits)
        idle = sum(self._block_of[h] in self._cached for h in hits)
        if self.num_available - idle < need:
            return None
        for found in hits:
            block = self._block_of[found]
            self._cached.pop(block, None)
            self._refs[block] = self._refs.get(block, 0) + 1
        table = BlockTable(root, [self._block_of[h] for h in hits], hits)
        table.blocks.extend(self._allocate() for _ in range(need))
        return table

    def grow(self, table: BlockTable, num_positions: int) -> bool:
        """Make the table hold this many positions; False, and nothing changed, where blocks are missing."""
        need = self.blocks_for(num_positions) - len(table.blocks)
        if need <= 0:
            return True
        if need > self.num_available:
            return False
        table.blocks.extend(self._allocate() for _ in range(need))
        return True

    def capacity(self, table: BlockTable) -> int:
        """Positions that the table could hold if it took every available block."""
        return (len(table.blocks) + self.num_available) * self.block_size

    def seal(self, table: BlockTable, tokens: Sequence[int], num_computed: int) -> None:
        """Hash the table's blocks that are wholly below num_computed, so that others can share them."""
        if not self.prefix_cache:
            return
        size = self.block_size
        for index in range(len(table.hashes), num_computed // size):
            parent = table.hashes[-1] if table.hashes else table.root
            found = chain(parent, tokens[index * size : (index + 1) * size])
            table.hashes.append(found)
            # Otherwise two requests computed the same block: keep the first.
            if found not in self._block_of:
                self._block_of[found] = table.blocks[index]
                self._hash_of[table.blocks[index]] = found

    def close(self, table: BlockTable) -> None:
        """Release the table's blocks. Sealed ones can be found until they are reused."""
        while table.blocks:
            block = table.blocks.pop()
            self._refs[block] -= 1  # KeyError on a double release: an accounting bug must not pass silently
            if self._refs[block] == 0:
                del self._refs[block]
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    heapq.heappush(self._free, block)
        table.hashes.clear()

    def forget(self) -> None:
        """Drop every hash: nothing computed so far is found again. Tables keep their blocks."""
        self._hash_of.clear()
        self._block_of.clear()
        while self._cached:
            heapq.heappush(self._free, self._cached.popitem()[0])

    # -- blocks ---------------------------------------------------------------------------------------------
    def _match(self, root: bytes, tokens: Sequence[int]) -> list[bytes]:
        """Hashes of the leading whole blocks that the cache holds, the last token's block left out."""
        hits: list[bytes] = []
        if not self.prefix_cache:
            return hits
        size = self.block_size
        for index in range((len(tokens) - 1) // size):
            found = chain(hits[-1] if hits else root, tokens[index * size : (index + 1) * size])
            if found not in self._block_of:
                break
            hits.append(found)
        return hits

    def _allocate(self) -> int:
        if self._free and not self._rather_reuse():
            block = heapq.heappop(self._free)
        else:
            block, _ = self._cached.popitem(last=False)
            del self._block_of[self._hash_of.pop(block)]
        self._refs[block] = 1
        self.num_touched = max(self.num_touched, block + 1)
        return block

    def _rather_reuse(self) -> bool:
        would_grow = self._free[0] >= self.num_touched
        return would_grow and bool(self._cached) and 2 * self.num_used < self.num_touched
