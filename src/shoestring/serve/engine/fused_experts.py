"""A layer's experts for serving: the same function as `MixtureOfExperts.forward`, without waiting for the choice.

Few rows (decoding) run over slots (kernels/experts/route.py): router, choice, gate and up with SwiGLU, down, and the
sum with the residual are five kernels, whichever experts are chosen, so a CUDA graph can hold them. With packed weights
the norm before is part of them, and one row takes three: its products choose by the router's logits, and the second
one sums. More rows (prefill) are sorted by expert and go through torch's grouped product; packed weights are decoded
for it.

The weights of all experts are stacked in one tensor, of which the layers' own weights become views
(fused_decoder.merge_linears).

Shapes: T rows, D model width, F inner width of an expert, E experts, K chosen by each row, P = T K choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoestring.formats import Dense, FloatAsym, FormatLinear, IntAsym
from shoestring.formats.linear import local
from shoestring.kernels.activation.glu import glu
from shoestring.kernels.experts.expert_linear import (
    expert_linear,
    kernel_usable,
    lowbit_expert_linear,
    row_experts,
    row_experts_usable,
)
from shoestring.kernels.experts.route import MOST_ROWS, choose_experts, combine, route, router_logits
from shoestring.kernels.lowbit.few_rows import SLOT_ROWS
from shoestring.kernels.lowbit.lowbit_linear import decode_chunks
from shoestring.model.transformer import MixtureOfExperts, Mlp
from shoestring.serve.engine.merged_linear import MergedLinear, copy_over, merge_linears

FEW_TILES = 4  # tiles of MOST_ROWS rows that are still faster than decoding or sorting
GROUPED_DTYPES = (torch.bfloat16,)  # of torch's grouped product on a GPU


def experts_unusable(mlp: MixtureOfExperts, dtype: torch.dtype) -> str | None:
    """Why these experts cannot be stacked, or their products not be grouped."""
    for linears in zip(*(_linears(e) for e in mlp.experts), strict=True):
        if any((x.format, x.packed) != (linears[0].format, linears[0].packed) for x in linears):
            return "the experts have weights of several Formats"
    if len({x.packed for x in _linears(mlp.experts[0])}) > 1:
        return "the experts have packed and dense weights"
    for x in _linears(mlp.experts[0]):
        grouped = isinstance(x.format, IntAsym | FloatAsym)  # pruned ones have chunks, too, of the values that are kept
        if x.packed and (not grouped or x.decoded is not None or "chunks" not in x.operands()):
            return f"no grouped kernel reads weights of {x.format} on this device"
        if not x.packed and not isinstance(x.format, Dense):
            return f"the experts train in {x.format}"
    if mlp.router.weight.is_cuda and dtype not in GROUPED_DTYPES:
        return f"grouped products on a GPU compute in bf16, not {dtype}"
    return None


@dataclass(frozen=True)
class FusedExperts:
    top_k: int
    renormalize: bool
    d_ff: int  # inner width of an expert
    router_ED: Tensor
    up: MergedLinear  # of expert 0 the gate, then up; then of expert 1; ...
    down: MergedLinear
    shared: tuple[Tensor, MergedLinear, MergedLinear] | None  # its gate, up and down

    @staticmethod
    def of(mlp: MixtureOfExperts, dtype: torch.dtype) -> FusedExperts:
        experts = [_linears(e) for e in mlp.experts]
        shared = None
        if mlp.shared is not None and mlp.shared_gate is not None:
            gate, up, down = _linears(mlp.shared)
            weight = local(mlp.shared_gate.weight).detach().to(dtype)
            shared = weight, merge_linears([gate, up], dtype), merge_linears([down], dtype)
        return FusedExperts(
            mlp.top_k,
            mlp.renormalize,
            experts[0][2].shape[1],
            local(mlp.router.weight).detach().to(dtype),
            merge_linears(list(chain.from_iterable((gate, up) for gate, up, _ in experts)), dtype),
            merge_linears([down for _, _, down in experts], dtype),
            shared,
        )

    def overwrite(self, other: FusedExperts) -> None:
        """As MergedLinear.overwrite."""
        copy_over(self.router_ED, other.router_ED)
        self.up.overwrite(other.up)
        self.down.overwrite(other.down)
        if self.shared is not None and other.shared is not None:
            copy_over(self.shared[0], other.shared[0])
            self.shared[1].overwrite(other.shared[1])
            self.shared[2].overwrite(other.shared[2])

    @property
    def num(self) -> int:
        return len(self.router_ED)

    def __call__(self, x_TD: Tensor, normed_TD: Tensor) -> Tensor:
        """x + experts(normed)."""
        if self.shared is not None:
            gate_1D, up, down = self.shared
            x_TD = x_TD + F.linear(normed_TD, gate_1D).sigmoid() * down(glu(up(normed_TD)))
        num_rows = len(normed_TD)
        if num_rows <= MOST_ROWS:
            return self._few(x_TD, normed_TD)
        if num_rows <= FEW_TILES * MOST_ROWS:
            pairs = zip(x_TD.split(MOST_ROWS), normed_TD.split(MOST_ROWS), strict=True)
            return torch.cat([self._few(x, normed) for x, normed in pairs])
        return self._many(x_TD, normed_TD)

    def fuses_norm(self, x_TD: Tensor) -> bool:
        """Whether `with_norm` computes this."""
        packed = self.up.weight is None and self.down.weight is None
        return packed and self.shared is None and len(x_TD) <= MOST_ROWS and kernel_usable(x_TD)

    def with_norm(self, x_TD: Tensor, norm_D: Tensor, eps: float) -> Tensor:
        """x + experts(norm(x))."""
        return self._few(x_TD, x_TD, norm_D, eps)

    def logits(self, x_TD: Tensor, norm_D: Tensor | None = None, eps: float = 0.0) -> Tensor:
        """What the choice is made of, [T, E]; of few rows in fp32, and behind a norm where one is given."""
        if len(x_TD) > MOST_ROWS:
            return F.linear(x_TD, self.router_ED)
        return router_logits(x_TD, self.router_ED, norm_D, eps)

    def _few(self, x_TD: Tensor, read_TD: Tensor, norm_D: Tensor | None = None, eps: float = 0.0) -> Tensor:
        """x + experts([norm] read)."""
        logits = self.logits(read_TD, norm_D, eps)
        if self.up.weight is not None and self.down.weight is not None:
            assert norm_D is None
            routing = route(logits, self.top_k, self.renormalize)
            products = [w.unflatten(0, (self.num, -1)) for w in (self.up.weight, self.down.weight)]
            inner_STF = expert_linear(read_TD, products[0], routing.experts_S, swiglu=True)
            return combine(x_TD, expert_linear(inner_STF, products[1], routing.experts_S), routing)
        up, down = self.up.chunked(read_TD.shape[1]), self.down.chunked(self.d_ff)
        if row_experts_usable(read_TD, up, down, self.num, self.top_k, self.d_ff):
            return row_experts(read_TD, logits, up, down, self.top_k, self.renormalize, norm_D, eps, x_TD)
        routing = route(logits, self.top_k, self.renormalize, SLOT_ROWS)
        inner_SCF = lowbit_expert_linear(read_TD, *up, self.num, routing, True, norm_D, eps)
        return combine(x_TD, lowbit_expert_linear(inner_SCF, *down, self.num, routing), routing)

    def _many(self, x_TD: Tensor, normed_TD: Tensor) -> Tensor:
        weight_TK, chosen_TK = choose_experts(self.logits(normed_TD), self.top_k, self.renormalize)
        chosen_P = chosen_TK.flatten()
        order_P = chosen_P.argsort(stable=True)
        counts_E = (chosen_P[:, None] == torch.arange(self.num, device=x_TD.device)).sum(0)
        ends_E = counts_E.cumsum(0).int()
        inner_PF = glu(self._grouped(self.up, normed_TD[order_P // self.top_k], ends_E))
        part_PD = normed_TD.new_empty(len(chosen_P), normed_TD.shape[1])
        part_PD[order_P] = self._grouped(self.down, inner_PF, ends_E)
        part_TKD = part_PD.unflatten(0, (-1, self.top_k)).float()
        return (x_TD.float() + (part_TKD * weight_TK[..., None]).sum(1)).to(x_TD.dtype)

    def _grouped(self, linear: MergedLinear, x_PI: Tensor, ends_E: Tensor) -> Tensor:
        """Rows ends[e - 1] to ends[e] times the weight of expert e."""
        weight = linear.weight
        if weight is None:
            chunks, table, layout = linear.chunked(x_PI.shape[-1])
            weight = decode_chunks(chunks, table, layout, x_PI.shape[-1], x_PI.dtype)
        weight_ENI = weight.unflatten(0, (self.num, -1))
        if x_PI.is_cuda:
            return torch._grouped_mm(x_PI, weight_ENI.mT, offs=ends_E)
        ends = ends_E.tolist()
        parts = [F.linear(x_PI[a:b], w) for a, b, w in zip([0, *ends], ends, weight_ENI, strict=False)]
        return torch.cat(parts)


def _linears(mlp: nn.Module) -> tuple[FormatLinear, FormatLinear, FormatLinear]:
    assert isinstance(mlp, Mlp)
    return mlp.gate, mlp.up, mlp.down
