"""XOR sets: any one lost member of a set comes back bit for bit, whatever the sizes; two do not."""

from __future__ import annotations

import queue
import random
import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from shoestring.cli.ckpt_tables import verified_versions, versions_table
from shoestring.errors import UserError
from shoestring.host.arena import Arena, own_folder
from shoestring.host.checksums import checksums
from shoestring.state.boxes import Box
from shoestring.state.levels import peers, xor_sets
from shoestring.state.levels.host_folder import (
    ArenaCopy,
    arena_files,
    arena_path,
    host_folder,
    kind_of,
    list_copies,
    make_host_folder,
)
from shoestring.state.levels.restore import Offer, choose, offers_here
from shoestring.state.levels.version import HeldBox, HeldCopy, dump_index, sum_of_names
from shoestring.state.levels.xor_sets import Parity, RebuildStep, XorRound, list_parities, plan_rebuilds


class Wires:
    """Every rank's link, between threads."""

    def __init__(self) -> None:
        self.queues: dict[tuple[int, int], queue.SimpleQueue[Tensor]] = defaultdict(queue.SimpleQueue)

    def of(self, rank: int) -> Any:
        def transfer(outgoing: Sequence[tuple[Tensor, int]], incoming: Sequence[tuple[Tensor, int]]) -> None:
            for t, to in outgoing:
                self.queues[rank, to].put(t.clone())
            for t, source in incoming:
                t.copy_(self.queues[source, rank].get(timeout=20))

        return type("Link", (), {"transfer": staticmethod(transfer)})()


def committed(folder: Path, rank: int, sizes: Sequence[int], step: int) -> ArenaCopy:
    """A rank's arena with random bytes of its size."""
    names = {f"t{r}": ("U8", (n,)) for r, n in enumerate(sizes)}
    box = HeldBox(f"t{rank}", "U8", (sizes[rank],), Box.full((sizes[rank],)))
    copy = HeldCopy(step, "0a", rank, len(sizes), folder.name, sum_of_names(names), (box,), {"step": step})
    path = arena_path(folder, rank, len(sizes))
    arena = Arena.open(path) if path.exists() else Arena.create(path, 4000, sizes[rank])
    slot = step % 2
    view = arena.slot_view(slot)[: sizes[rank]]
    view[:] = random.Random(f"{rank} {step}").randbytes(sizes[rank])
    with ThreadPoolExecutor(1) as pool:
        sums = checksums(view, pool, copy.chunk_bytes, arena.algorithm)
    view.release()
    copy = replace(copy, chunks=tuple(sums), algorithm=arena.algorithm)
    arena.commit(slot, step, step, dump_index(copy))
    arena.close()
    return next(c for c in list_copies(folder)[0] if c.copy.step == step)


def everywhere(num: int, action: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(num) as pool:
        return list(pool.map(action, range(num)))


def recover(folders: Sequence[Path], alive: Sequence[int]) -> int | None:
    """Compute what the hosts that are alive can; the step that is complete then."""
    offers: list[Offer] = []
    parities = []
    for n in alive:
        offers += offers_here(folders[n], [], folders[n].name)[0]
        parities += list_parities(folders[n], folders[n].name)[0]
    wires = Wires()
    for plan in plan_rebuilds(offers, parities):

        def one(i: int, plan: Any = plan) -> None:
            step = RebuildStep(plan, folders[alive[i]].name, {folders[n].name: n for n in alive})
            try:
                step.open()
                step.move(wires.of(alive[i]))
                step.finish()
            finally:
                step.close()

        everywhere(len(alive), one)
    found = choose([o for n in alive for o in offers_here(folders[n], [], folders[n].name)[0]])
    return None if found is None else found.step


def test_any_lost_member_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PIECE_BYTES", 1000)
    monkeypatch.setattr(xor_sets, "PIECE_BYTES", 1000)
    draw = random.Random(0)
    for case in range(12):
        num, size = draw.choice([2, 3, 4, 5, 6]), draw.choice([2, 3, 4])
        sizes = [draw.choice([1, 7, 999, 1000, draw.randrange(1, 5000)]) for _ in range(num)]
        poor, lost = draw.randrange(num), draw.randrange(num)
        lose_members(tmp_path / str(case), size, sizes, poor, lost, draw.choice([n for n in range(num) if n != lost]))


def lose_members(place: Path, size: int, sizes: list[int], poor: int, lost: int, other: int) -> None:
    num = len(sizes)
    hosts = [f"h{n}" for n in range(num)]
    folders = [own_folder(place / host) for host in hosts]
    wires, rounds = Wires(), [XorRound(folders[n], n, hosts, size) for n in range(num)]

    def take_round(step: int, kept: Any, without: int | None = None) -> list[bool]:
        copies = [committed(folders[n], n, sizes, step) for n in range(num)]
        return everywhere(num, lambda n: rounds[n](wires.of(n), None if n == without else copies[n], kept))

    assert all(take_round(4, None)) and all(take_round(5, (4, "0a")))
    # A round that one member does not take part in leaves the last one whole.
    assert [n for n, ok in enumerate(take_round(6, (5, "0a"), poor)) if not ok] == sorted(rounds[poor].members)
    shutil.rmtree(folders[lost])
    alive = [n for n in range(num) if n != lost]
    expected = 5 if lost in rounds[poor].members else 6
    assert recover(folders, alive) == expected, (sizes, size, lost)
    rebuilt = [p for n in alive for p in arena_files(folders[n]) if kind_of(p) == "replica"]
    assert rebuilt and not any(Arena.open(p).has_pages(1) for p in rebuilt)  # room for one copy is asked for
    shutil.rmtree(folders[other])
    left = [n for n in alive if n != other]
    if left and other in rounds[lost].members:
        assert recover(folders, left) is None, (sizes, size, lost, other)


def test_sets_and_what_a_damaged_copy_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert xor_sets.xor_sets(list("abcdefg"), 3) == [(0, 1, 2), (3, 4, 5, 6)]
    assert xor_sets.xor_sets(list("aabb"), 4) == [(0, 2), (1, 3)]
    with pytest.raises(UserError, match=r"as many processes on every host.*a: 2, b: 1.*levels\.peer=replica"):
        xor_sets.xor_sets(list("aab"), 4)
    monkeypatch.setenv("SHOESTRING_MEMORY_DIR", str(tmp_path / "memory"))
    hosts, sizes = ["x", "y", "z"], [300, 200, 100]
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    folders = []
    for host in hosts:
        monkeypatch.setenv("SHOESTRING_HOST", host)
        folders.append(make_host_folder(host_folder(run)))
    wires = Wires()
    copies = [committed(folders[n], n, sizes, 3) for n in range(3)]
    rounds = [XorRound(folders[n], n, hosts, 3) for n in range(3)]
    assert all(everywhere(3, lambda n: rounds[n](wires.of(n), copies[n], None)))
    table = versions_table(run / "checkpoints")  # of host z
    assert table.rows[0][:2] == [3, "memory, XOR of 2 other hosts"]
    assert verified_versions(run / "checkpoints")[1] == []
    # Ranks 0 to 3 are of a host that is lost: each of the three others makes one or two of them.
    makers = [Parity(f"h{n}", "", 0, 1, 3, "0a", n, (0, 4, 5, 6), 7, 100) for n in (1, 2, 3)]
    made = []
    for lost in range(4):
        parities = [replace(p, members=(lost, 4, 5, 6)) for p in makers]
        held = {c.rank: Offer("memory", "", "", c) for c in (replace(copies[0].copy, rank=r) for r in (4, 5, 6))}
        plan = xor_sets._rebuild(lost, held, parities)
        assert plan is not None
        made.append(plan.maker.host)
    assert set(made) == {"h1", "h2", "h3"} and made[0] == made[3]
    parity = arena_path(folders[2], 2, 3, "parity")
    assert Arena.open(parity).slot_bytes < 2 << 22
    shutil.rmtree(folders[0])
    arena = Arena.open(parity)
    arena.slot_view(arena.versions()[0].slot)[5] ^= 1
    arena.close()
    assert "1 damaged chunks" in verified_versions(run / "checkpoints")[1][0]
    with pytest.raises(UserError, match="rank 0 of step 3 cannot be computed: a copy is damaged"):
        recover(folders, [1, 2])
    # Fields of the index that a writer would not have written.
    arena = Arena.open(parity)
    good = arena.versions()[0].index
    arena.close()
    changes: list[dict[str, Any]] = [
        {"members": [0, 0, 2]}, {"members": [0, 1, 9]}, {"position": 3}, {"segment_bytes": 2**50}, {"chunks": []},
        {"indexes": good["indexes"][:2]}, {"indexes": good["indexes"][::-1]}, {"version": 2}, {"life": "0b"}, {"x": 1},
        {"chunk_bytes": 0}, {"members": [[], 1, 2]}, {"indexes": [None, None, None]},
    ]  # fmt: skip
    for change in changes:
        with pytest.raises(UserError, match="here"):
            xor_sets.parse_parity({**good, **change}, 4 << 20, "here")
