"""ModuleBlocks: any torch model with a chain of blocks as a BlocksModel, without a class of its own.

    blocks = ModuleBlocks(bert, bert.encoder.layer)
    quantize(blocks, [("*", parse_format("int4:g64"))], walk(blocks, token_ids), Gptq())
    pack(blocks)  # bert itself: its layers were changed in place

For encoders and vision models of transformers, timm and others. The model runs once to see what each block is called
with; from then on blocks run by themselves, with the same arguments. Linear layers become FormatLinear.

Which scales can move between layers (for AWQ) is found by trying: a norm or a linear layer is a source of others where
scaling its outputs up and their inputs down leaves the block's output as it was.

Not supported: blocks that are no chain, arguments that differ between the inputs of a batch (padding), methods that
need an output head (mixed bits).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.errors import UserError
from shoestring.formats import FormatLinear
from shoestring.formats.convert import is_conv1d, to_format_linear
from shoestring.model.blocks import BlocksModel, InputSource

SAME = 1e-4  # relative difference of two outputs that counts as rounding


class CalledBlock(nn.Module):
    """A block that takes x and the arguments it is called with in its model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, args: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
        out = self.inner(x, *args, **named)
        return out[0] if isinstance(out, tuple | list) else out


class _FirstBlock(Exception):
    """Ends a forward pass at the first block."""


class ModuleBlocks(BlocksModel):
    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module] | nn.ModuleList) -> None:
        """`blocks`: those of `model`, in the order in which it calls them with [N, T, D]."""
        super().__init__()
        for block in blocks:
            for module in block.modules():
                if type(module) is nn.Linear or is_conv1d(module):
                    to_format_linear(module)
        # First, so that the layers of blocks are named blocks.N.inner.*
        self.blocks = nn.ModuleList(CalledBlock(block) for block in blocks)
        self.model = model.eval()
        self.compute_dtype = next(model.parameters()).dtype
        self._args: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._sample: Tensor | None = None

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.model(*inputs, **named)

    @torch.no_grad()
    def embed_inputs(self, inputs: Tensor) -> Tensor:
        inputs = inputs.to(self.device)
        if not self._args:
            self._see_arguments(inputs)
        reached: list[Tensor] = []

        def stop(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            reached.append(_split(args, named)[0])
            raise _FirstBlock

        handle = self._inner(0).register_forward_pre_hook(stop, with_kwargs=True)
        try:
            self.model(inputs)
        except _FirstBlock:
            pass
        finally:
            handle.remove()
        return reached[0]

    def block_args(self, length: int, device: torch.device) -> list[tuple[Any, ...]]:
        assert self._args, "embed_inputs sees the arguments"
        return list(self._args)

    def input_sources(self, block: nn.Module) -> list[InputSource]:
        if self._sample is None:
            return []
        index = list(self.blocks).index(block)
        return find_sources(block, self._sample, *self._args[index])

    def _inner(self, index: int) -> nn.Module:
        block = self.blocks[index]
        assert isinstance(block, CalledBlock)
        return block.inner

    def _see_arguments(self, inputs: Tensor) -> None:
        seen: dict[int, tuple[Tensor, tuple[Any, ...], dict[str, Any]]] = {}
        outs: dict[int, Tensor] = {}
        handles = []
        for index in range(len(self.blocks)):

            def before(_: Any, args: tuple[Any, ...], named: dict[str, Any], index: int = index) -> None:
                x, rest, others = _split(args, named)
                seen[index] = (x, rest, others)

            def after(_: Any, args: Any, out: Any, index: int = index) -> None:
                outs[index] = out[0] if isinstance(out, tuple | list) else out

            inner = self._inner(index)
            handles += [inner.register_forward_pre_hook(before, with_kwargs=True), inner.register_forward_hook(after)]
        try:
            self.model(inputs)
        finally:
            for handle in handles:
                handle.remove()
        for index in range(len(self.blocks)):
            if index not in seen or (index and not torch.equal(seen[index][0], outs[index - 1])):
                raise UserError(
                    f"block {index} does not read what block {index - 1} writes: the blocks form no chain in the order "
                    "given; give the list of blocks that the model runs one after the other"
                )
            _, rest, others = seen[index]
            shared = tuple(_shared(v, len(inputs)) for v in rest)
            self._args.append((shared, {k: _shared(v, len(inputs)) for k, v in others.items()}))
        self._sample = seen[0][0][:1].detach().clone()


def _split(args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """x, and the other arguments of a block."""
    if args:
        return args[0], args[1:], named
    name = next(iter(named), "")
    if not isinstance(named.get(name), Tensor):
        raise UserError("a block is called without a tensor as its first argument; wrap it in a module that takes one")
    return named[name], (), {k: v for k, v in named.items() if k != name}


def _shared(value: Any, num: int) -> Any:
    """An argument that serves any number of inputs; UserError where it differs between them."""
    if not isinstance(value, Tensor) or value.ndim == 0 or num == 1 or value.shape[0] != num:
        return value
    if not all(torch.equal(row, value[0]) for row in value[1:]):
        raise UserError("the blocks are called with masks that differ between inputs; give inputs of equal length")
    return value[:1]


# -- sources of inputs ---------------------------------------------------------------------------------------


@torch.no_grad()
def find_sources(block: nn.Module, x: Tensor, *extra: Any) -> list[InputSource]:
    """Norms and linear layers whose output channels can be scaled against the inputs of other layers."""
    norms = {n: m for n, m in block.named_modules() if _is_norm(m)}
    linears = {n: m for n, m in block.named_modules() if isinstance(m, FormatLinear) and not m.packed}
    outs: dict[str, Tensor] = {}
    ins: dict[str, Tensor] = {}
    handles = [
        m.register_forward_hook(lambda _m, _i, out, n=n: outs.__setitem__(n, out))  # type: ignore[misc]
        for n, m in norms.items()
    ]
    handles += [
        m.register_forward_pre_hook(lambda _m, i, n=n: ins.__setitem__(n, i[0]))  # type: ignore[misc]
        for n, m in linears.items()
    ]
    try:
        want = block(x, *extra)
    finally:
        for handle in handles:
            handle.remove()
    found = []
    for name, norm in norms.items():
        readers = tuple(n for n, t in ins.items() if name in outs and t.data_ptr() == outs[name].data_ptr())
        if readers and _moves(block, norm, [linears[n] for n in readers], x, extra, want):
            found.append(InputSource(norm, readers))
    for name, source in linears.items():
        for reader, layer in linears.items():
            fits = reader != name and layer.in_features == source.out_features
            if fits and _moves(block, source, [layer], x, extra, want):
                found.append(InputSource(source, (reader,)))
    return found


def _is_norm(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return "norm" in type(module).__name__.lower() and weight is not None and weight.ndim == 1


def _moves(
    block: nn.Module,
    source: nn.Module,
    readers: Sequence[FormatLinear],
    x: Tensor,
    extra: tuple[Any, ...],
    want: Tensor,
) -> bool:
    """Whether the block computes the same with the source's channels scaled up and the readers' inputs down."""
    weight, bias = source._parameters["weight"], source._parameters.get("bias")
    assert weight is not None
    generator = torch.Generator().manual_seed(0)
    scale = (torch.rand(weight.shape[0], generator=generator) + 0.5).to(weight.device, weight.dtype)
    held = [weight, *([] if bias is None else [bias]), *(r.weight for r in readers)]
    kept = [t.clone() for t in held]
    try:
        weight.mul_(scale if weight.ndim == 1 else scale[:, None])
        if bias is not None:
            bias.mul_(scale)
        for reader in readers:
            reader.weight.div_(scale)
        got = block(x, *extra)
    finally:
        for t, old in zip(held, kept, strict=True):
            t.copy_(old)
    change, noise = (got - want).norm(), (want - x).norm() * SAME
    return bool(change <= noise)
