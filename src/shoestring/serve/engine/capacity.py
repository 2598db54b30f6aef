"""How many requests an engine should compute at the same time on this machine.

Two limits. Memory: every request holds keys and values for its text, and a usual text must fit for each of them. Time:
one more request makes every step longer. Decoding reads all weights whatever the number of rows, so at first more
requests cost next to nothing; from some number on the products take as long as they have rows, tokens per second stop
growing, and requests only wait for each other. The times are measured (`Runner.measure_seconds`), sizes doubling until
the gain is small or a step is slow.

A number that the user gives is taken as it is. `context_limit` checks the length of a request.
"""

from __future__ import annotations

from collections.abc import Callable

import psutil
import torch

from shoestring.errors import UserError
from shoestring.model.spec import ModelSpec
from shoestring.serve.engine.request import check_least

USUAL_POSITIONS = 2048  # of a text, where the context is longer
MEMORY_SHARE = 0.5  # of what is free now, for keys and values of texts of usual length
MOST_SHARE = 0.85  # of it, for all blocks there may ever be
SIZES = {"cuda": (8, 16, 32, 64, 128, 256), "cpu": (4, 8, 16, 32)}
SLOWEST_STEP_S = {"cuda": 0.1, "cpu": 0.25}  # a reader should not wait longer for a token
LEAST_GAIN = 1.15  # in tokens per second, of twice as many requests


def bytes_per_position(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Keys and values of one token in all layers."""
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * dtype.itemsize


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def requests_by_memory(spec: ModelSpec, context: int, dtype: torch.dtype, device: torch.device) -> int:
    """Requests of usual length whose keys and values fit into the memory that is free now; one at least."""
    each = bytes_per_position(spec, dtype) * min(context, USUAL_POSITIONS)
    fits = int(MEMORY_SHARE * free_bytes(device) // each)
    return max(1, min(fits, SIZES[device.type][-1]))


def blocks_by_memory(
    spec: ModelSpec, context: int, dtype: torch.dtype, device: torch.device, block_size: int = 16
) -> int:
    """Blocks that the free memory holds; those of one text at least, which fails by itself where it does not fit."""
    most = int(MOST_SHARE * free_bytes(device) // (bytes_per_position(spec, dtype) * block_size))
    return max(most, -(-context // block_size))


def choose_requests(most: int, seconds_of: Callable[[int], float], device_type: str) -> int:
    """The number of requests at which doubling them stops paying; `seconds_of(rows)` measures a step."""
    sizes = [size for size in SIZES[device_type] if size <= most] or [most]
    best, seconds = sizes[0], seconds_of(sizes[0])
    for size in sizes[1:]:
        slower = seconds_of(size)
        if slower > SLOWEST_STEP_S[device_type] or size / slower < LEAST_GAIN * best / seconds:
            break
        best, seconds = size, slower
    return best


def context_limit(spec: ModelSpec, max_context: int | None, block_size: int, num_blocks: int | None) -> int:
    """Tokens of one request at most: a request alone always fits the blocks there are."""
    positions, context = spec.max_positions, spec.default_context if max_context is None else max_context
    if not 1 <= context <= positions:
        raise UserError(
            f"max_context={context} does not fit this model, which has {positions} positions; give 1 to {positions}"
        )
    if num_blocks is None:
        return context
    check_least(num_blocks=num_blocks)
    room = num_blocks * block_size
    if max_context is not None and max_context > room:
        raise UserError(
            f"max_context={max_context} needs {-(-max_context // block_size)} blocks of {block_size} positions, "
            f"but num_blocks={num_blocks}; raise one or lower the other"
        )
    return min(context, room)
