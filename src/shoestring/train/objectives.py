"""Objectives: what a training step minimises, as sums over counted tokens.

`objective(model, micro)` returns a SUM and `objective.count(micro)` how many tokens it counted; the trainer divides by
the count of the whole step over all micro-batches and ranks, which is exact for masked prompts and ragged batches.

The head runs in chunks of rows inside one autograd function, which computes each chunk's loss and gradient together and
keeps only the gradients of the hidden states and of the head: the same three matrix products as the plain loss, without
its [tokens, vocabulary] tensors.

Under tensor parallelism the head holds a range of the vocabulary; maxima, sums and hidden gradients are reduced over
its group.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoestring.errors import UserError
from shoestring.kernels.loss.cross_entropy import cross_entropy_
from shoestring.kernels.loss.distill import distill_
from shoestring.model.attention import soft_cap
from shoestring.model.collectives import all_sum, max_over
from shoestring.model.segments import segment_attend, segment_positions
from shoestring.model.transformer import Head
from shoestring.train.step import IGNORED, Micro, Objective

# (logits of rows lo..hi, lo, hi) -> (summed loss, gradient of that sum; may overwrite the logits)
ChunkLoss = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]

# Bytes of the logits of one chunk. Each chunk reads and writes the head's fp32 gradient, so small chunks cost
# bandwidth: at a 128k vocabulary and width 4096, a step with 2k rows a chunk was 1.3% slower than with 4k (H200).
CHUNK_BYTES = 2**30


class CrossEntropy(Objective):
    """Next-token cross entropy. `chunk` rows of logits at a time; 0 picks a size, None computes all logits at once."""

    def __init__(self, chunk: int | None = 0) -> None:
        self.chunk = chunk

    def __call__(self, model: nn.Module, micro: Micro) -> Tensor:
        targets = micro.targets_BT
        if self.chunk is None:
            logits = read_rows(model, micro)
            return F.cross_entropy(
                logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
            )
        weights = micro.weights_BT
        return read_rows(model, micro, readout=lambda hidden, head: self.readout(hidden, head, targets, weights))

    def readout(self, hidden_BTD: Tensor, head: Head, targets_BT: Tensor, weights_BT: Tensor | None = None) -> Tensor:
        """`weights_BT`: what each target's loss counts; 1 without."""
        target_N = targets_BT.flatten()
        weight_N = None if weights_BT is None else weights_BT.flatten()

        def chunk_loss(logits: Tensor, lo: int, hi: int) -> tuple[Tensor, Tensor]:
            if head.group is None:
                loss_N, grad = cross_entropy_(logits, target_N[lo:hi].contiguous())
            else:
                loss_N, grad = vocab_parallel_cross_entropy(logits, target_N[lo:hi], head)
            if weight_N is None:
                return loss_N.sum(), grad
            return (loss_N * weight_N[lo:hi]).sum(), grad.mul_(weight_N[lo:hi, None].to(grad.dtype))

        return chunked_head(hidden_BTD, head, chunk_loss, self.chunk or 0)


def read_rows(model: nn.Module, micro: Micro, **options: Any) -> Tensor:
    """The model over the rows of a micro-batch, each sample by itself where rows hold several."""
    if micro.bounds_S is None:
        return model(micro.tokens_BT, **options)
    decoder: Any = model
    positions_BT = segment_positions(micro.bounds_S, micro.tokens_BT.shape)
    attend = segment_attend(decoder.plan, micro.bounds_S, micro.longest)
    return model(micro.tokens_BT, positions_BT, attend=attend, context=micro.longest, **options)


class TeacherObjective(Objective):
    """Compares the student with a teacher that runs beside it, a chunk of logits at a time. Both have one
    vocabulary."""

    def __init__(self, teacher: nn.Module, chunk: int = 0) -> None:
        self.teacher, self.chunk = teacher.eval().requires_grad_(False), chunk

    def __call__(self, model: nn.Module, micro: Micro) -> Tensor:
        teacher_BTD, teacher_head = read_teacher(self.teacher, micro.tokens_BT)
        teacher_ND, target_N = teacher_BTD.flatten(0, 1), micro.targets_BT.flatten()
        teacher_head = teacher_head.to(teacher_ND.dtype)

        def readout(hidden_BTD: Tensor, head: Head) -> Tensor:
            check_vocabulary(head.weight_VD.shape[0], teacher_head.weight_VD.shape[0])
            whole = head.group is None and teacher_head.group is None

            def chunk_loss(logits: Tensor, lo: int, hi: int) -> tuple[Tensor, Tensor]:
                z_teacher, target = teacher_head.logits(teacher_ND[lo:hi]), target_N[lo:hi]
                if whole:
                    loss_N, grad = self.compare(logits, z_teacher, target.contiguous())
                    return loss_N.sum(), grad
                loss, grad = self.compare_shards(logits, z_teacher, target, head, teacher_head)
                return loss, grad.to(logits.dtype)

            return chunked_head(hidden_BTD, head, chunk_loss, self.chunk or self.pick_chunk(hidden_BTD, head))

        return model(micro.tokens_BT, readout=readout)

    def pick_chunk(self, hidden_BTD: Tensor, head: Head) -> int:
        """Rows at a time; 0 is the usual size."""
        return 0

    @abstractmethod
    def compare(self, z_NV: Tensor, z_teacher_NV: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
        """Loss per row [N] and its gradient with respect to the student's logits z, which it may overwrite."""

    @abstractmethod
    def compare_shards(
        self, z_NV: Tensor, z_teacher_NV: Tensor, target_N: Tensor, head: Head, teacher_head: Head
    ) -> tuple[Tensor, Tensor]:
        """The same where each rank holds a range of the vocabulary: the summed loss, and the gradient."""


class Distill(TeacherObjective):
    """Knowledge distillation: `kl` * T^2 * KL(teacher || student) at temperature T, plus `ce` * cross entropy."""

    def __init__(
        self, teacher: nn.Module, *, temperature: float = 1.0, kl: float = 1.0, ce: float = 0.0, chunk: int = 0
    ) -> None:
        if temperature <= 0:
            raise UserError(f"temperature={temperature} must be positive")
        super().__init__(teacher, chunk)
        self.temperature, self.kl, self.ce = temperature, kl, ce

    def compare(self, z_NV: Tensor, z_teacher_NV: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
        forward, temperature = self.kl * self.temperature**2, self.temperature
        return distill_(z_NV, z_teacher_NV, target_N, forward=forward, ce=self.ce, temperature=temperature)

    def compare_shards(
        self, z_NV: Tensor, z_teacher_NV: Tensor, target_N: Tensor, head: Head, teacher_head: Head
    ) -> tuple[Tensor, Tensor]:
        counted, temperature = (target_N != IGNORED)[:, None], self.temperature
        logp = vocab_log_softmax(z_teacher_NV.float() / temperature, teacher_head)
        logq = vocab_log_softmax(z_NV.float() / temperature, head)
        p, q = logp.exp(), logq.exp()
        loss = self.kl * temperature**2 * (p * (logp - logq) * counted).sum()
        loss = loss if head.group is None else all_sum(loss, head.group)
        grad = self.kl * temperature * (q - p) * counted
        if self.ce:
            ce_loss_N, ce_grad = vocab_parallel_cross_entropy(z_NV, target_N, head)
            loss, grad = loss + self.ce * ce_loss_N.sum(), grad + self.ce * ce_grad.float()
        return loss, grad


def read_teacher(teacher: nn.Module, tokens_BT: Tensor) -> tuple[Tensor, Head]:
    """The teacher's last hidden states and its head."""
    box: list[tuple[Tensor, Head]] = []

    def keep(hidden: Tensor, head: Head) -> Tensor:
        box.append((hidden, head))
        return hidden

    with torch.no_grad():
        teacher(tokens_BT, readout=keep)
    return box[0]


def check_vocabulary(student: int, teacher: int) -> None:
    if student != teacher:
        raise UserError(
            f"the student's vocabulary ({student}) differs from the teacher's ({teacher}); distillation needs the "
            "same tokenizer on both sides"
        )


# -- vocabulary-parallel pieces ------------------------------------------------------------------------------


def vocab_log_softmax(z_NV: Tensor, head: Head) -> Tensor:
    """log softmax over the whole vocabulary, of which z may be this rank's range."""
    if head.group is None:
        return torch.log_softmax(z_NV, dim=-1)
    peak = max_over(z_NV.amax(-1, keepdim=True), head.group)
    total = all_sum((z_NV - peak).exp().sum(-1, keepdim=True), head.group)
    return z_NV - peak - total.log()


def vocab_logsumexp(z_NV: Tensor, head: Head) -> Tensor:
    """logsumexp over the whole vocabulary, [N, 1]; -inf where nothing is left."""
    if head.group is None:
        return torch.logsumexp(z_NV, dim=-1, keepdim=True)
    peak = max_over(z_NV.amax(-1, keepdim=True), head.group).clamp(min=torch.finfo(z_NV.dtype).min)
    return peak + all_sum((z_NV - peak).exp().sum(-1, keepdim=True), head.group).log()


def vocab_start(head: Head) -> int:
    """The first token of this rank's range."""
    return 0 if head.group is None else head.group.rank() * head.weight_VD.shape[0]


def vocab_columns(ids: Tensor, z_NV: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """Columns of z for tokens of the whole vocabulary, and which of them this rank holds; others are clamped to its
    range."""
    mine = ids - vocab_start(head)
    return mine.clamp(0, z_NV.shape[1] - 1), (mine >= 0) & (mine < z_NV.shape[1])


def vocab_take(z_NV: Tensor, ids_Nk: Tensor, head: Head) -> Tensor:
    """z at the given tokens of the whole vocabulary, on every rank."""
    if head.group is None:
        return z_NV.gather(1, ids_Nk)
    column, held = vocab_columns(ids_Nk, z_NV, head)
    return all_sum(z_NV.gather(1, column).masked_fill(~held, 0.0), head.group)


def vocab_remove_(z_NV: Tensor, ids_Nk: Tensor, head: Head) -> Tensor:
    """Put the given tokens of the whole vocabulary at -inf, in place."""
    if head.group is None:
        return z_NV.scatter_(1, ids_Nk, -torch.inf)
    column, held = vocab_columns(ids_Nk, z_NV, head)
    # +inf for tokens of other ranks: the minimum leaves the columns that they were clamped to.
    lowest = torch.full_like(column, torch.inf, dtype=z_NV.dtype).masked_fill(held, -torch.inf)
    return z_NV.scatter_reduce_(1, column, lowest, "amin")


def vocab_parallel_cross_entropy(logits_NV: Tensor, target_N: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """Of each row, on every rank, and the gradient of the sum with respect to this rank's logits."""
    logp, counted_N = vocab_log_softmax(logits_NV.float(), head), target_N != IGNORED
    column, held = vocab_columns(target_N, logits_NV, head)
    held = held & counted_N
    loss_N = -logp.gather(1, column[:, None])[:, 0] * held
    grad = logp.exp() * counted_N[:, None]
    grad.scatter_add_(1, column[:, None], -held[:, None].to(grad.dtype))
    return (loss_N if head.group is None else all_sum(loss_N, head.group)), grad.to(logits_NV.dtype)


# -- the chunked head ----------------------------------------------------------------------------------------


def chunked_head(hidden_BTD: Tensor, head: Head, chunk_loss: ChunkLoss, chunk: int = 0) -> Tensor:
    """Sum of chunk_loss over chunks of rows of `hidden @ head.T`, with gradients to hidden and head."""
    hidden_ND = hidden_BTD.flatten(0, 1)
    chunk = chunk or default_chunk(hidden_ND.shape[0], head.weight_VD.shape[0], hidden_ND.element_size())
    return _ChunkedHead.apply(hidden_ND, head.weight_VD, head, chunk_loss, chunk)


def default_chunk(num_rows: int, vocab: int, element_size: int) -> int:
    """Equal chunks of about CHUNK_BYTES of logits, a multiple of 128 rows."""
    limit = max(128, CHUNK_BYTES // (vocab * element_size))
    num_chunks = -(-num_rows // limit)
    return -(-num_rows // num_chunks // 128) * 128


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, head: Head, chunk_loss: ChunkLoss, chunk: int
    ) -> Tensor:
        num_rows, vocab = hidden_ND.shape[0], weight_VD.shape[0]
        weight = weight_VD.to(hidden_ND.dtype)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden_ND) if wants_hidden else None
        grad_weight = weight_VD.new_zeros(weight_VD.shape, dtype=torch.float32) if wants_weight else None
        total = hidden_ND.new_zeros((), dtype=torch.float32)
        # Rows start 16-byte aligned for any vocabulary; tensor cores are much slower otherwise.
        pitch = -(-vocab // 16) * 16
        buffer = hidden_ND.new_empty(min(chunk, num_rows), pitch)
        # Products in 16 bits on a CPU with AMX read an odd last column with its neighbour, whose weight is 0: 0 x NaN.
        buffer[:, vocab:] = 0
        for lo in range(0, num_rows, chunk):
            hi = min(lo + chunk, num_rows)
            logits = torch.mm(hidden_ND[lo:hi], weight.t(), out=buffer[: hi - lo, :vocab])
            slope = None
            if head.softcap is not None:
                # d softcap(z) / dz = 1 - (softcap(z) / cap)^2. Taken now: chunk_loss may overwrite the logits.
                logits.copy_(soft_cap(logits, head.softcap))
                slope = 1 - (logits / head.softcap).square()
            loss, grad = chunk_loss(logits, lo, hi)
            grad = grad if slope is None else grad * slope
            total += loss
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[lo:hi])
            if grad_weight is not None:
                _add_product_(grad_weight, grad, hidden_ND[lo:hi])
        if grad_hidden is not None and head.group is not None:
            grad_hidden = all_sum(grad_hidden, head.group)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight_VD.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        scale = grads[0]
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * scale.to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * scale).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None


def _add_product_(total_VD: Tensor, grad_NV: Tensor, hidden_ND: Tensor) -> None:
    """total += grad.T @ hidden, accumulated in fp32 over all chunks."""
    if grad_NV.dtype == torch.float32:
        total_VD.addmm_(grad_NV.t(), hidden_ND)
    elif grad_NV.is_cuda:
        # Accumulates in fp32 in the kernel's epilogue, without a 16-bit product in between.
        torch.addmm(total_VD, grad_NV.t(), hidden_ND, out_dtype=torch.float32, out=total_VD)
    else:
        total_VD += torch.mm(grad_NV.t(), hidden_ND)
