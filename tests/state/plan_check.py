"""Whether a plan brings everything: an independent look at its copies and transfers."""

from __future__ import annotations

from shoestring.state.boxes import Box
from shoestring.state.reshard.plan import ReshardPlan


def check_complete(plan: ReshardPlan) -> None:
    """AssertionError unless every element that a rank wants arrives there exactly once, from a rank that has it."""
    arrived: dict[tuple[int, int], list[Box]] = {}
    for rank, pieces in plan.copies:
        for p in pieces:
            arrived.setdefault((p.number, rank), []).append(p.box)
    held = [{rank for _, ranks in k.info.src.tiles(k.info.shape) for rank in ranks} for k in plan.classes]
    for t in plan.transfers:
        have = {t.sender}
        for a, b in t.hops:
            if a not in have or b in have:
                raise AssertionError(f"rank {a} forwards to {b} what it does not hold, or {b} already has")
            have.add(b)
        for p in t.pieces:
            if t.sender not in held[p.number]:
                raise AssertionError(f"rank {t.sender} sends {plan.classes[p.number].names[0]!r} and holds none of it")
            for rank in t.receivers:
                arrived.setdefault((p.number, rank), []).append(p.box)
    for index, kind in enumerate(plan.classes):
        for box, ranks in kind.info.dst.tiles(kind.info.shape):
            for rank in ranks:
                parts = [c for b in arrived.get((index, rank), []) if (c := b.intersect(box)) is not None]
                if sum(c.size for c in parts) != box.size:
                    raise AssertionError(f"rank {rank} does not get {kind.names[0]!r} exactly once")
