"""Does a converted or packed model compute with its Formats? One input through it says so.

    convert(model, rules)
    self_check(model, inputs)  # UserError with the names of layers that other code reads past their forward
    pack(model)
    self_check(model, inputs)

Some modules read the weights of their layers instead of calling them: torch's nn.TransformerEncoderLayer in eval mode,
hand-written attention. Such a model evaluates as if it had not been quantized, and fails once it is packed. The check:

    converted   a layer whose forward does not run must not matter for the output; the output must not be exactly that
                of the dense weights, unless the Formats change no weight
    packed      the model runs, and computes what the decoded weights give
    always      the output is finite
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.errors import UserError
from shoestring.formats.convert import bypassed, format_hosts
from shoestring.formats.dense import Dense
from shoestring.formats.linear import FormatHost, local

# Of outputs whose products are summed in another order, relative to the largest output.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
# What modules raise that read the weight of a packed layer, which is None.
READ_PAST = (AttributeError, TypeError, RuntimeError, ValueError)


@torch.no_grad()
def self_check(model: nn.Module, *inputs: Any, **named_inputs: Any) -> None:
    """Run the model on the inputs in eval mode; UserError where it does not compute with the Formats of its layers."""
    hosts = {name: h for name, h in format_hosts(model) if not isinstance(h.format, Dense)}
    if not hosts:
        return

    def run() -> list[Tensor]:
        return _tensors(model(*inputs, **named_inputs))

    packed = [name for name, h in hosts.items() if h.packed]
    with _eval_mode(model):
        try:
            missed = bypassed(model, *inputs, **named_inputs)
            out = run()
        except UserError:
            raise
        except READ_PAST as error:
            said = f"{type(error).__name__}: {error}"
            if packed:
                raise UserError(
                    f"the model fails now that {packed[0]} is packed ({said}): other code reads its weight past its "
                    "forward. Leave such layers dense"
                ) from error
            raise
        if not all(bool(t.isfinite().all()) for t in out):
            raise UserError("the output of the converted model holds NaN or infinite values; check weights and input")
        if read := [name for name in missed if not hosts[name].packed and _matters(hosts[name], run, out)]:
            raise UserError(
                f"{read[0]} ({len(read)} in all) is converted to {hosts[read[0]].format.label}, but other code reads "
                "its weight past its forward, and would compute without the Format. Leave it dense"
            )
        if packed:
            _check_decoded(hosts, run, out)
        elif _changes_weights(hosts) and all(map(torch.equal, out, _dense(hosts, run))):
            raise UserError(
                "the output is exactly that of the dense weights, although the Formats change them: other code reads "
                "the weights past the layers. Leave these layers dense"
            )


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _tensors(value: Any) -> list[Tensor]:
    """The floating-point tensors of an output."""
    if isinstance(value, Tensor):
        return [value.detach()] if value.is_floating_point() else []
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return [t for item in items for t in _tensors(item)]


def _matters(host: FormatHost, run: Any, out: list[Tensor]) -> bool:
    """Whether the output depends on the weight of a layer whose forward does not run (an unused expert's does not)."""
    weight = local(host.weight)
    kept = weight.clone()
    try:
        weight.mul_(2).add_(1)
        return not all(map(torch.equal, out, run()))
    finally:
        weight.copy_(kept)


def _changes_weights(hosts: dict[str, FormatHost]) -> bool:
    return any(not torch.equal(h.effective_weight(h.weight.dtype), local(h.weight)) for h in hosts.values())


def _dense(hosts: dict[str, FormatHost], run: Any) -> list[Tensor]:
    for host in hosts.values():
        host.start_dense_phase()
    try:
        return run()
    finally:
        for host in hosts.values():
            host.end_dense_phase()


def _check_decoded(hosts: dict[str, FormatHost], run: Any, out: list[Tensor]) -> None:
    """Against the decoded weights, one at a time: a kernel that computes something else shows here."""
    dtype = next((t.dtype for t in out), torch.float32)
    for host in hosts.values():
        host.__dict__["multiply"] = partial(_multiply_decoded, host, dtype)
    try:
        wanted = run()
    finally:
        for host in hosts.values():
            del host.__dict__["multiply"]
    for got, want in zip(out, wanted, strict=True):
        error = (got.double() - want.double()).abs().max() if got.numel() else torch.zeros(())
        largest = want.double().abs().max() if want.numel() else torch.ones(())
        if error > TOLERANCE.get(dtype, 1e-1) * largest:
            raise UserError(
                f"the packed model computes something else than its decoded weights (largest difference "
                f"{float(error):.3g}, largest output {float(largest):.3g}): a kernel does not fit; report it"
            )


def _multiply_decoded(host: FormatHost, dtype: torch.dtype, x: Tensor, bias: Tensor | None = None) -> Tensor:
    kept = host.decoded
    host.keep_decoded(dtype)
    try:
        return type(host).multiply(host, x, bias)
    finally:
        host.decoded = kept
