"""Log-likelihoods of given tokens, a block of logits at a time.

`read_nll` is the readout that turns hidden rows into -log p(target) in blocks: 1,024 rows of a 50k vocabulary in fp32
would be 200 MB, and softmax needs that twice.

`score` takes prompts with several continuations each (the choices of a question). A prompt is computed once: its
continuations follow it in one sequence, each seeing only the prompt and itself, at the positions it would have alone.
Sequences of similar length share a padded batch. Some models rotate texts beyond their original context otherwise
(LongRope): continuations that end beyond it do not share sequences and batches with those that do not.

Shapes: B sequences, T rows, R rows with a target, D model width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoestring.errors import UserError
from shoestring.model import collectives
from shoestring.model.attention import Attend, attend_with
from shoestring.model.layer_plan import DecoderPlan
from shoestring.model.spec import ModelSpec
from shoestring.model.transformer import Decoder, Head

BLOCK_LOGITS = 1 << 23  # logits held at once: 32 MB in fp32
Progress = Callable[[int, int], None]  # (done, total)


def read_nll(hidden_RD: Tensor, head: Head, target_R: Tensor) -> tuple[Tensor, Tensor]:
    """-log p(target) [R] in fp32 (fp64 where given), and whether the target is the likeliest token [R]."""
    head = head.to(hidden_RD.dtype)
    num_shards = 1 if head.group is None else head.group.size()
    block = max(1, BLOCK_LOGITS // (head.weight_VD.shape[0] * num_shards))
    nll, greedy = [], []
    for rows_D, target in zip(hidden_RD.split(block), target_R.split(block), strict=True):
        logits = head.logits(rows_D)
        if head.group is not None:
            logits = collectives.gather_last(logits, head.group)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        picked = logits.gather(1, target[:, None])[:, 0]
        nll.append(logits.logsumexp(dim=-1) - picked)
        greedy.append(logits.max(dim=-1).indices == target)  # on a CPU a third of the time of argmax
    return torch.cat(nll), torch.cat(greedy)


class NanLikelihood(UserError):
    """No number comes of it: a NaN compares as neither better nor worse."""

    def __init__(self) -> None:
        super().__init__(
            "the model's log-probabilities are NaN: its weights are damaged, or numbers overflow in this dtype; check "
            "the model's files, or compute in bf16 or fp32"
        )


@dataclass(frozen=True)
class Score:
    """One continuation: log p(continuation | prompt), and whether greedy decoding would have written it."""

    log_prob: float
    greedy: bool


@dataclass(frozen=True)
class _Sequence:
    """A prompt and its continuations laid out as one row of a batch."""

    tokens: list[int]
    positions: list[int]
    branches: list[int]  # 0 = prompt, i + 1 = continuation i
    rows: list[list[int]]  # per continuation, the rows whose logits predict its tokens
    targets: list[list[int]]

    @property
    def context(self) -> int:
        """Tokens that are read of the prompt and its longest continuation."""
        return max(self.positions) + 1


# no_grad, not inference_mode: a sharded model caches tensors made here and trains with them later.
@torch.no_grad()
def score(
    model: Decoder,
    items: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]],
    *,
    batch_rows: int = 1024,
    progress: Progress | None = None,
) -> list[list[Score]]:
    """For each (prompt, continuations) the Score of each continuation.

    A prompt that does not fit before its longest continuation loses tokens at its beginning.
    `batch_rows` bounds the rows of one forward, padding included (one sequence always fits).
    """
    original = model.spec.default_context
    layouts: list[_Sequence] = []
    places: list[list[tuple[int, int]]] = []  # of a layout: (item, continuation) of each of its branches
    for i, (prompt, continuations) in enumerate(items):
        prompt = _cut(prompt, continuations, model.spec)
        for longer in (False, True):
            chosen = [j for j, c in enumerate(continuations) if (len(prompt) + len(c) - 1 > original) == longer]
            if chosen:
                layouts.append(_lay_out(prompt, [continuations[j] for j in chosen]))
                places.append([(i, j) for j in chosen])
    lengths = [len(s.tokens) for s in layouts]
    results: dict[tuple[int, int], Score] = {}
    done = 0
    for longer in (False, True):
        order = [n for n, s in enumerate(layouts) if (s.context > original) == longer]
        for batch in _batches(sorted(order, key=lambda n: lengths[n]), lengths, batch_rows):
            for n, scores in zip(batch, _score_batch(model, [layouts[n] for n in batch]), strict=True):
                results |= zip(places[n], scores, strict=True)
            done += len(batch)
            if progress is not None:
                progress(done, len(layouts))
    return [[results[i, j] for j in range(len(continuations))] for i, (_, continuations) in enumerate(items)]


def _cut(prompt: Sequence[int], continuations: Sequence[Sequence[int]], spec: ModelSpec) -> list[int]:
    """The end of the prompt that fits before the longest continuation."""
    if not prompt or not continuations or not all(continuations):
        raise UserError("scoring needs a prompt and continuations of at least one token each; one is empty")
    longest = max(map(len, continuations))
    # The last token of a continuation is only predicted, never read.
    room = spec.max_positions - (longest - 1)
    if room < 1:
        raise UserError(f"a continuation has {longest} tokens, but the model reads {spec.max_positions}; shorten it")
    return list(prompt)[-room:]


def _lay_out(prompt: list[int], continuations: Sequence[Sequence[int]]) -> _Sequence:
    seq = _Sequence(list(prompt), list(range(len(prompt))), [0] * len(prompt), [], [])
    for branch, continuation in enumerate(continuations, start=1):
        first = len(seq.tokens)
        read = list(continuation)[:-1]
        seq.tokens.extend(read)
        seq.positions.extend(range(len(prompt), len(prompt) + len(read)))
        seq.branches.extend([branch] * len(read))
        seq.rows.append([len(prompt) - 1, *range(first, first + len(read))])
        seq.targets.append(list(continuation))
    return seq


def _batches(order: Sequence[int], lengths: Sequence[int], batch_rows: int) -> list[list[int]]:
    """Consecutive items of `order` (ascending length) with at most batch_rows padded rows together."""
    batches: list[list[int]] = []
    for i in order:
        if batches and (len(batches[-1]) + 1) * lengths[i] <= batch_rows:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def _score_batch(model: Decoder, batch: Sequence[_Sequence]) -> list[list[Score]]:
    device = model.device
    width = max(len(s.tokens) for s in batch)

    def padded(rows: Sequence[list[int]]) -> Tensor:
        return torch.tensor([r + [0] * (width - len(r)) for r in rows], device=device)

    # Padding is behind the real rows, which do not see it.
    positions_BT = padded([s.positions for s in batch])
    attend = branch_attention(positions_BT, padded([s.branches for s in batch]), model.plan)
    rows = [b * width + r for b, s in enumerate(batch) for rows in s.rows for r in rows]
    targets = torch.tensor([t for s in batch for ts in s.targets for t in ts], device=device)
    greedy_R: list[bool] = []

    def readout(hidden_RD: Tensor, head: Head) -> Tensor:
        nll_R, is_greedy = read_nll(hidden_RD, head, targets)
        greedy_R.extend(is_greedy.tolist())
        return nll_R

    nll_R = model(
        padded([s.tokens for s in batch]),
        positions_BT,
        context=max(s.context for s in batch),
        attend=attend,
        rows=torch.tensor(rows, device=device),
        readout=readout,
    ).tolist()
    scores: list[list[Score]] = []
    at = 0
    if any(map(math.isnan, nll_R)):
        raise NanLikelihood()
    for s in batch:
        scores.append([])
        for ts in s.targets:
            span = slice(at, at + len(ts))
            scores[-1].append(Score(-sum(nll_R[span]), all(greedy_R[span])))
            at += len(ts)
    return scores


def branch_attention(positions_BT: Tensor, branches_BT: Tensor, plan: DecoderPlan) -> Attend:
    """Attention of rows to earlier rows of branch 0 and of their own branch."""
    num_rows = positions_BT.shape[1]
    earlier = torch.ones(num_rows, num_rows, dtype=torch.bool, device=positions_BT.device).tril()
    same = branches_BT[:, :, None] == branches_BT[:, None, :]
    seen_BTS = earlier & (same | (branches_BT == 0)[:, None, :])
    age_BTS = positions_BT[:, :, None] - positions_BT[:, None, :]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        window, softcap = plan.layers[layer].attn.window, plan.layers[layer].attn.softcap
        # A padding row may be younger than all it could see; with itself in view its softmax stays finite.
        mask = seen_BTS if window is None else seen_BTS & (age_BTS < window)
        return attend_with(q, k, v, mask, softcap=softcap)

    return attend
