"""How fast a model prefills and decodes on this machine, and how much memory that takes.

One greedy request through the engine: `prompt` tokens in, `new` tokens out. Prefill is the step that computes the whole
prompt and gives the first token; decode is the steps after it, one token each. Each is the median over `repeats`, after
one run that is not counted.

Memory: `weight_bytes` sums the tensors (packed weights at their packed size, tied ones once). `peak_memory_bytes` is,
on a GPU, the most that the allocator held during the measurement, weights included; on a CPU, the peak resident size of
the process, Python and libraries included, of which `growth_bytes` came with the measurement.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from shoestring.errors import UserError
from shoestring.formats.linear import local
from shoestring.model.transformer import Decoder
from shoestring.serve.engine.engine import Engine
from shoestring.serve.engine.sampling import Sampling


@dataclass(frozen=True)
class Speed:
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    weight_bytes: int
    peak_memory_bytes: int
    growth_bytes: int
    prompt: int
    new: int
    device: str


def measure_speed(model: Decoder, *, prompt: int = 128, new: int = 32, repeats: int = 3) -> Speed:
    positions = model.spec.max_positions
    if prompt < 1 or new < 2 or repeats < 1:
        raise UserError(f"prompt={prompt}, new={new}, repeats={repeats}: give at least 1, 2 and 1")
    if prompt + new > positions:
        raise UserError(
            f"prompt={prompt} and new={new} do not fit the model's {positions} positions; lower one of them"
        )
    device = model.device
    memory = _Memory(device)
    runs = [_run_once(model, prompt, new, device) for _ in range(repeats + 1)][1:]
    peak, growth = memory.peak()
    return Speed(
        prefill_tokens_per_s=prompt / statistics.median(read for read, _ in runs),
        decode_tokens_per_s=(new - 1) / statistics.median(write for _, write in runs),
        weight_bytes=weight_bytes(model),
        peak_memory_bytes=peak,
        growth_bytes=growth,
        prompt=prompt,
        new=new,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    )


def _run_once(model: Decoder, prompt: int, new: int, device: torch.device) -> tuple[float, float]:
    """Seconds of the prefill, and of decoding new - 1 further tokens."""
    engine = Engine(model, max_requests=1, max_context=prompt + new, chunk=prompt)
    ids = torch.randint(model.spec.vocab_size, (prompt,), generator=torch.Generator().manual_seed(0)).tolist()
    engine.add(ids, Sampling(max_tokens=new, ignore_eos=True))
    read = _seconds(engine.step, device)
    write = sum(_seconds(engine.step, device) for _ in range(new - 1))
    assert not engine.busy
    return read, write


def _seconds(step: Callable[[], object], device: torch.device) -> float:
    # A step ends with its tokens on the host, but the device may have more work queued.
    _synchronize(device)
    start = time.perf_counter()
    step()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, shared storage counted once."""
    tensors = [local(t) for t in (*model.parameters(), *model.buffers())]
    return sum({(t.data_ptr(), t.nbytes): t.nbytes for t in tensors if t.numel()}.values())


class _Memory:
    """Peak memory since it was built."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)
        else:
            self.exact = _reset_peak_rss()
            self.before = _rss("VmRSS")

    def peak(self) -> tuple[int, int]:
        """(peak bytes, bytes above those before)."""
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
        else:
            # A peak that cannot be reset may be an older one: take the present size.
            peak = _rss("VmHWM" if self.exact else "VmRSS")
        return peak, max(0, peak - self.before)


def _reset_peak_rss() -> bool:
    """Writing 5 resets a process's peak resident size on Linux."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _rss(field: str) -> int:
    """VmRSS (now) or VmHWM (peak) in bytes; psutil's figure where /proc is absent."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import psutil

    return int(psutil.Process().memory_info().rss)
