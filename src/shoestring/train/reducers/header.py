"""The header of a round: what all ranks check before a compressed gradient is trusted.

A code of 8 bits cannot hold NaN, and a replica that trains another model or is at another step would be added without a
word. So every rank first sends 32 bytes: what it trains, its step, the first of its gradients that is not finite, and
every so often a hash of its weights. All ranks read the same table and raise the same error; no weight has moved then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from shoestring.errors import UserError
from shoestring.train.reducers.rounds import Exchange, ToAll, as_bytes, from_bytes
from shoestring.train.rollback import BadStepError

FINE = -1
HASH_CHUNK = 1 << 24  # values hashed at a time, to bound the memory


def fingerprint(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "little")


def tensor_hash(t: Tensor) -> Tensor:
    """An int64 that depends on every bit and its place; the same on every device."""
    bits = t.detach().contiguous().view(torch.uint8).view(-1)
    words = torch.nn.functional.pad(bits, (0, -bits.numel() % 4)).view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=t.device)
    for start in range(0, words.numel(), HASH_CHUNK):
        part = words[start : start + HASH_CHUNK].long()
        place = torch.arange(start, start + part.numel(), device=t.device)
        total += ((part ^ (place * 0x9E3779B1)) * (2 * place + 1)).sum()
    return total


def first_bad(gradients: Sequence[Tensor]) -> int:
    """The place of the first gradient with NaN or infinity, or FINE. Waits for the device once."""
    if not gradients:
        return FINE
    # A norm is finite where all values are, but for overflow, which is as bad.
    sizes = torch.stack([n.float() for n in torch._foreach_norm(list(gradients))])
    bad = (~sizes.isfinite()).nonzero()
    return int(bad[0]) if len(bad) else FINE


def exchange_headers(
    *, what: int, step: int, bad: int, weights: int, names: Sequence[str], num_places: int, device: torch.device
) -> Exchange[bool]:
    """Whether weights are equal among the ranks at the same place of their replica (rank modulo `num_places`).

    Raises on all ranks where one differs in anything else.
    """
    mine = torch.tensor([what, step, bad, weights], dtype=torch.int64, device=device)
    table = from_bytes((yield ToAll(as_bytes(mine))), torch.int64).tolist()
    for rank, (its_what, its_step, _, _) in enumerate(table):
        if its_step != table[0][1]:
            raise UserError(
                f"rank {rank} is at step {its_step} and rank 0 at step {table[0][1]}: start all replicas from the same "
                "checkpoint"
            )
        if its_what != table[0][0]:
            raise UserError(
                f"rank {rank} has another model, reducer or set of gradients than rank 0: start all replicas with the "
                "same settings and the same version"
            )
    for rank, (_, _, its_bad, _) in enumerate(table):
        if its_bad != FINE:
            raise BadStepError(
                f"step {step + 1}: the gradient of {names[its_bad]} on rank {rank} is NaN or infinite, so the run "
                "stops here; no weight has moved in this step; go on from the last checkpoint with a lower lr or other "
                "data",
                step + 1,
            )
    return all(row[3] == table[rank % num_places][3] for rank, row in enumerate(table))


def first_difference(hashes: Tensor, names: Sequence[str]) -> Exchange[str]:
    """The name of the first tensor whose hash is not the same on all replicas, and on which replica."""
    table = from_bytes((yield ToAll(as_bytes(hashes))), torch.int64)
    different = (table != table[:1]).nonzero()
    if not len(different):
        return ""
    column = int(different[:, 1].min())
    replica = int(different[different[:, 1] == column, 0].min())
    return f"{names[column]} differs between replica 0 and replica {replica}"
