from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.errors import UserError
from shoestring.serve.engine.block_pool import BlockPool, BlockTable, chain_root

ROOT = chain_root("weights", "fp32", "")


def opened(pool: BlockPool, tokens: list[int], root: bytes = ROOT) -> BlockTable:
    table = pool.open(root, tokens)
    assert table is not None
    return table


def counts(pool: BlockPool) -> tuple[int, int, int]:
    return pool.num_free, pool.num_used, pool.num_cached


def test_a_sealed_prefix_is_found_again_and_shared_without_a_copy() -> None:
    pool, text = BlockPool(8, 4), list(range(10))
    first = opened(pool, text)
    assert counts(pool) == (5, 3, 0) and first.hashes == []
    pool.seal(first, text, 7)  # one whole block lies below 7
    second = opened(pool, text)
    assert second.blocks[0] == first.blocks[0] and len(second.hashes) == 1
    assert not set(second.blocks[1:]) & set(first.blocks)
    assert counts(pool) == (3, 5, 0)
    pool.close(first)
    assert counts(pool) == (5, 3, 0)  # the shared block is still used
    pool.close(second)
    assert counts(pool) == (7, 0, 1)
    assert len(opened(pool, [*text[:4], 99]).hashes) == 1
    with pytest.raises(KeyError):
        pool.close(BlockTable(ROOT, [7]))


def test_the_last_token_is_never_a_hit() -> None:
    pool, text = BlockPool(8, 4), [1, 2, 3, 4, 5, 6, 7, 8]
    table = opened(pool, text)
    pool.seal(table, text, 8)
    assert len(table.hashes) == 2
    assert len(opened(pool, text).hashes) == 1  # its last token must be computed, so must its block
    assert len(opened(pool, [*text, 9]).hashes) == 2


def test_other_weights_or_another_beginning_share_nothing() -> None:
    pool, text = BlockPool(16, 4), [1, 2, 3, 4, 5, 6, 7, 8, 9]
    pool.seal(opened(pool, text), text, 8)
    assert opened(pool, text, chain_root("other weights")).hashes == []
    assert opened(pool, [0, *text[1:]]).hashes == []  # equal second block, unequal first
    pool.forget()
    assert opened(pool, text).hashes == []


def test_the_longest_unused_goes_first_and_a_chain_from_its_end() -> None:
    pool = BlockPool(4, 2)
    for text in ([1, 1, 2, 2], [3, 3, 4, 4]):
        table = opened(pool, text)
        pool.seal(table, text, 4)
        pool.close(table)
    assert counts(pool) == (0, 0, 4)
    other = opened(pool, [9, 9, 9, 9])  # evicts both of the first text, its end first
    assert len(opened(pool, [3, 3, 4, 4, 5][:4]).hashes) == 1
    pool.close(other)
    assert opened(pool, [1, 1, 2, 2]).hashes == []


def test_too_few_blocks_change_nothing() -> None:
    pool, text = BlockPool(4, 2), [1, 1, 2, 2, 3]
    table = opened(pool, text)
    pool.seal(table, text, 4)
    pool.close(table)
    before = counts(pool)
    # Both cached blocks are hits, so they do not count as room for the rest.
    assert pool.open(ROOT, [1, 1, 2, 2, 3, 3, 4, 4, 5]) is None
    assert counts(pool) == before
    table = opened(pool, text)
    assert not pool.grow(table, 9) and len(table.blocks) == 3
    assert pool.grow(table, 8) and pool.capacity(table) == 8


def test_a_growing_pool_reuses_before_it_grows() -> None:
    pool = BlockPool(1000, 2, grows=True)
    for n in range(200):  # unrelated requests, one after the other
        text = [n, n, n, n, n]
        table = opened(pool, text)
        pool.seal(table, text, 4)
        pool.close(table)
    assert pool.num_touched <= 12
    with pytest.raises(UserError, match="num_blocks=0"):
        BlockPool(0)


def test_without_the_prefix_cache_nothing_is_kept() -> None:
    pool = BlockPool(4, 2, prefix_cache=False)
    table = opened(pool, [1, 1, 2])
    pool.seal(table, [1, 1, 2], 2)
    pool.close(table)
    assert counts(pool) == (4, 0, 0) and opened(pool, [1, 1, 2]).hashes == []


def check(pool: BlockPool, tables: list[tuple[BlockTable, list[int]]]) -> None:
    assert pool.num_free + pool.num_used + pool.num_cached == pool.num_blocks
    states = [set(pool._free), set(pool._refs), set(pool._cached)]
    assert set.union(*states) == set(range(pool.num_blocks)) and sum(map(len, states)) == pool.num_blocks
    held: dict[int, int] = {}
    for table, _ in tables:
        for block in table.blocks:
            held[block] = held.get(block, 0) + 1
    assert held == pool._refs
    assert {h: b for b, h in pool._hash_of.items()} == pool._block_of
    assert set(pool._cached) <= set(pool._hash_of)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 4), num=st.integers(2, 12), grows=st.booleans())
def test_accounting_after_random_operations(seed: int, size: int, num: int, grows: bool) -> None:
    random_operations(random.Random(seed), BlockPool(num, size, grows=grows), 400)


def test_accounting_after_ten_thousand_operations() -> None:
    random_operations(random.Random(7), BlockPool(40, 3), 10_000)


def random_operations(rng: random.Random, pool: BlockPool, num: int) -> None:
    """Open, extend, seal, close. A shadow copy of the blocks says what each should hold."""
    tables: list[tuple[BlockTable, list[int]]] = []
    content: dict[int, tuple[int, ...]] = {}
    for _ in range(num):
        action = rng.choice(["open", "open", "extend", "close"])
        if action == "open":
            text = [rng.randrange(2) for _ in range(rng.randrange(1, 4 * pool.block_size))]
            table = pool.open(ROOT, text)
            if table is not None:
                tables.append((table, text))
                num_hit = len(table.hashes)
                for i, block in enumerate(table.blocks):
                    mine = tuple(text[: (i + 1) * pool.block_size])
                    if i < num_hit:
                        assert content[block] == mine  # what is shared is what was asked for
                    else:
                        content[block] = mine
                pool.seal(table, text, len(text))
        elif tables and action == "extend":
            table, text = rng.choice(tables)
            if pool.grow(table, len(text) + 1):
                text.append(rng.randrange(2))
                last = (len(text) - 1) // pool.block_size
                content[table.blocks[last]] = tuple(text[: (last + 1) * pool.block_size])
                pool.seal(table, text, len(text))
        elif tables:
            table, _ = tables.pop(rng.randrange(len(tables)))
            pool.close(table)
        check(pool, tables)
    for table, _ in tables:
        pool.close(table)
    check(pool, [])
    assert pool.num_used == 0
