"""A draft model: a smaller decoder with the target's vocabulary writes the drafts.

It has a KV cache of its own, in a block pool of the same kind as the engine's. After a rejection it keeps the positions
that are still right and computes the rest in its next pass, so a pause costs one pass. Its head may be trimmed to the
most frequent tokens (`vocab_ids`); its embedding has all of them. A drafter made by `shoestring run shrink/drafter` is
a model folder with a drafter.json, which names those tokens and the acceptance on held-out prompts.

Sampling: under a rule that shares noise (`coupled`) the draft model uses the target's noise, so both choose the same
token when their distributions agree. Under the others it samples with noise of its own and reports the distribution.

Shapes: N requests, G drafts, V vocabulary, M tokens of a trimmed head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoestring.errors import UserError
from shoestring.formats import FormatLinear
from shoestring.json_files import read_object
from shoestring.model.transformer import Decoder
from shoestring.serve.engine.block_pool import BlockPool, BlockTable, RowSpan
from shoestring.serve.engine.draft_chain_graph import max_chain_rows
from shoestring.serve.engine.graphs import SamplingKind
from shoestring.serve.engine.prefill_graph import PREFILL_ROWS
from shoestring.serve.engine.request import NO_DRAFT, Draft, PendingDrafts, Request
from shoestring.serve.engine.runner import Batch, Runner
from shoestring.serve.engine.sampling import RowSettings
from shoestring.serve.engine.step_kinds import StepLimits
from shoestring.serve.speculative.drafter import Drafter

DRAFTER_FILE = "drafter.json"


@dataclass(eq=False)
class _CachedText:
    """What the draft model's KV cache holds of one request."""

    table: BlockTable
    written: list[int]  # tokens whose keys and values are computed
    num_committed: int  # of `written`, those that were committed when they were computed and cannot change


class DraftModel(Drafter):
    def __init__(
        self,
        model: Decoder,
        *,
        vocab_size: int | None = None,
        vocab_ids: Sequence[int] | None = None,
        known_acceptance: Sequence[float] = (),
        block_size: int = 16,
        num_blocks: int | None = None,
        chunk: int = 2048,
        graphs: bool | None = None,
    ) -> None:
        """`vocab_size` is the target's, where padding makes it differ from the drafter's own; a text with a token that
        the drafter does not have gets no drafts. `vocab_ids`: the logits
        are for these tokens only, in this order (`trim_head`). `num_blocks` bounds the memory of the KV cache (None: it
        grows as needed); a request that does not fit gets no drafts. `chunk`: rows of a prefill pass, at most. `graphs`
        as in Engine."""
        self.model, self.chunk, self.known_acceptance = model, chunk, tuple(known_acceptance)
        self.vocab_size = model.spec.vocab_size if vocab_size is None else vocab_size
        self.vocab_ids: Tensor | None = None
        if vocab_ids is not None:
            self.vocab_ids = torch.tensor(vocab_ids, device=model.device)
        most = 256 * -(-model.spec.max_positions // block_size)
        self.pool = BlockPool(num_blocks or most, block_size, grows=num_blocks is None)
        self.runner = Runner(model, self.pool, graphs=graphs, map_logits=self._spread)
        self.cache = self.runner.cache
        self._cached: dict[int, _CachedText] = {}  # by request id
        self.caught_up = False
        # Once their graphs are made: made on the way they would need larger tables, for which all others are dropped.
        self._reads_in_graphs = False

    def check(self, target: Decoder) -> None:
        check_vocabulary("the draft model", self.vocab_size, target)

    def release(self, request: Request) -> None:
        cached = self._cached.pop(request.id, None)
        if cached is not None:
            self.pool.close(cached.table)

    @torch.no_grad()
    def warm_up(
        self,
        max_requests: int,
        kinds: Sequence[SamplingKind],
        lengths: Sequence[int],
        max_context: int,
        *,
        prefills: bool = True,
    ) -> None:
        context = min(max_context + max(lengths, default=0), self.model.spec.max_positions)
        need = 2 * max_requests * self.pool.blocks_for(context) + 1  # twice: finished texts stay in the prefix cache
        self.pool.num_touched = max(self.pool.num_touched, min(self.pool.num_blocks, need))
        if prefills:
            # Of what a prefill chooses nothing is used: any kind of choice will do.
            self.runner.prepare(["prefill"], StepLimits(max_requests, max_rows=self.chunk))
            self._reads_in_graphs = True
        limits = StepLimits(max_requests, kinds, max_rows=self.chunk, lengths=lengths)
        self.runner.prepare(["chain", "eager"], limits)

    def runners(self) -> list[Runner]:
        return [self.runner]

    @property
    def num_graphs(self) -> int:
        return self.runner.num_graphs

    def is_behind(self, requests: Sequence[Request]) -> bool:
        most = max_chain_rows(len(requests))
        written = (len(k.written) if (k := self._cached.get(r.id)) else 0 for r in requests)
        return any(len(r.tokens) - num > most for r, num in zip(requests, written, strict=True))

    @torch.no_grad()
    def propose(self, requests: Sequence[Request], n: int) -> list[Draft]:
        root = b""
        if any(r.id not in self._cached for r in requests):
            self.runner.refresh()
            root = self.runner.cache_root() if self.pool.prefix_cache else b""
        able = [r for r in requests if self._make_room(r, n, root)]
        self.caught_up = False
        if not able:
            return [NO_DRAFT] * len(requests)

        def advance(tokens_N: Tensor, i: int) -> Tensor:
            spans = [RowSpan(self._cached[r.id].table.blocks, len(r.tokens) + i, 1) for r in able]
            return self.runner.forward(Batch(spans, tokens_N, range(len(able))))

        self._forget_wrong(able)
        self.caught_up = self.is_behind(able)
        drafts = self._chain(able, n)
        if drafts is None:
            drafts = decode_drafts(able, n, self._catch_up(able), advance)
        texts = [self._cached[r.id] for r in able]
        if drafts[0].pending is not None:
            drafts[0].pending.on_resolved.append(partial(_append_drafts, texts))
        else:
            _append_drafts(texts, [d.tokens for d in drafts])
        found = {r.id: draft for r, draft in zip(able, drafts, strict=True)}
        return [found.get(r.id, NO_DRAFT) for r in requests]

    def _make_room(self, request: Request, n: int, root: bytes) -> bool:
        """Blocks for the request and n drafts, the last of which is never computed. `root`: hash of a new table."""
        num = len(request.tokens) + n - 1
        spec = self.model.spec
        if num > spec.max_positions or (spec.vocab_size < self.vocab_size and max(request.tokens) >= spec.vocab_size):
            return False
        cached = self._cached.get(request.id)
        if cached is None:
            table = self.pool.open(root, request.tokens)
            if table is None:
                return False
            num_hit = len(table.hashes) * self.pool.block_size
            cached = self._cached[request.id] = _CachedText(table, request.tokens[:num_hit], num_hit)
        return self.pool.grow(cached.table, num)

    def _chain(self, requests: list[Request], n: int) -> list[Draft] | None:
        """n drafts each, chosen on the device, where the next pass and the target read them: the host waits once, for
        the target's tokens. None where that is not possible: no kernels, or the rule needs draft probabilities."""
        if any(r.rule.needs_draft_probabilities(r.sampling) for r in requests):
            return None
        if not self.runner.ready():
            return None
        self._read_long(requests)
        tables = [self._cached[r.id].table for r in requests]
        starts = [len(self._cached[r.id].written) for r in requests]
        ids = [t for r, start in zip(requests, starts, strict=True) for t in r.tokens[start:]]
        spans = [
            RowSpan(table.blocks, start, len(r.tokens) - start)
            for r, table, start in zip(requests, tables, starts, strict=True)
        ]
        samplings = [r.sampling for r in requests]
        batch = Batch(spans, ids, range(len(ids)))
        pending = PendingDrafts(len(requests), n, self.runner.device)
        flight = self.runner.launch_chain(batch, samplings, n)
        if flight is None:
            return None
        for request, start in zip(requests, starts, strict=True):
            self._cached[request.id].written += request.tokens[start:]
        self._note_read(requests)
        return pending.start(flight.chosen_R[: len(requests) * n], flight.tokens)

    def _forget_wrong(self, requests: list[Request]) -> None:
        """Keep the written tokens that the request committed, without the last: that one is computed in any case."""
        for request in requests:
            cached, tokens = self._cached[request.id], request.tokens
            right, written = cached.num_committed, cached.written
            most = min(len(written), len(tokens) - 1)
            while right < most and written[right] == tokens[right]:
                right += 1
            del written[right:]
            del written[len(tokens) - 1 :]

    def _catch_up(self, requests: list[Request]) -> Tensor:
        """Compute every committed token that is not in the cache; the logits after the last, [N, V]."""
        logits: dict[int, Tensor] = {}
        while len(logits) < len(requests):
            logits |= self._read(self._next_rows(requests, self.chunk))
        self._note_read(requests)
        return torch.stack([logits[r.id] for r in requests])

    def _read_long(self, requests: list[Request]) -> None:
        """Compute texts that are too long for the first pass of a chain, all but their last token."""
        most = max_chain_rows(len(requests))
        late = [r for r in requests if len(r.tokens) - len(self._cached[r.id].written) > most > 0]
        # A small drafter's pass takes the host longer than the device, so several graphs are read sooner than one pass.
        budget = min(self.chunk, PREFILL_ROWS[-1]) if self._reads_in_graphs else self.chunk
        while part := self._next_rows(late, budget, num_spared=1):
            batch, _ = self._take(part)
            if not self._reads_in_graphs or self.runner.launch_prefill(batch, []) is None:
                self.runner.forward(batch, once=True)

    def _next_rows(self, requests: list[Request], budget: int, num_spared: int = 0) -> list[tuple[Request, int]]:
        """(request, rows) of the next prefill pass, shortest first: missing tokens, without the last `num_spared`; at
        most `budget` rows."""
        part = []
        for request in requests:
            missing = len(request.tokens) - num_spared - len(self._cached[request.id].written)
            if missing and budget:
                part.append((request, min(missing, budget)))
                budget -= part[-1][1]
        return sorted(part, key=lambda item: item[1])

    def _note_read(self, requests: list[Request]) -> None:
        for request in requests:
            cached = self._cached[request.id]
            cached.num_committed = len(request.tokens)
            self.pool.seal(cached.table, request.tokens, len(request.tokens))

    def _read(self, part: list[tuple[Request, int]]) -> dict[int, Tensor]:
        """One pass over rows of several requests; the last logits of each request that it completes, by id."""
        batch, ends = self._take(part)
        return dict(zip(ends, self.runner.forward(batch, once=True), strict=False))

    def _take(self, part: list[tuple[Request, int]]) -> tuple[Batch, list[int]]:
        """These rows as written, and the requests (their ids) that they complete: the batch has their last rows."""
        ids: list[int] = []
        spans, ends = [], {}
        for request, num in part:
            cached = self._cached[request.id]
            start = len(cached.written)
            new = request.tokens[start : start + num]
            ids += new
            spans.append(RowSpan(cached.table.blocks, start, num))
            cached.written += new
            if len(cached.written) == len(request.tokens):
                ends[request.id] = len(ids) - 1
        rows = list(ends.values()) or [len(ids) - 1]  # a pass needs at least one row with logits
        return Batch(spans, ids, rows), list(ends)

    def _spread(self, logits_RV: Tensor) -> Tensor:
        """Logits indexed by the target's token ids: shared noise is keyed by them."""
        if self.vocab_ids is not None:
            all_RV = logits_RV.new_full((logits_RV.shape[0], self.vocab_size), -torch.inf)
            return all_RV.index_copy_(1, self.vocab_ids, logits_RV)
        missing = self.vocab_size - logits_RV.shape[-1]
        return F.pad(logits_RV, (0, missing), value=-torch.inf) if missing else logits_RV


def _append_drafts(texts: list[_CachedText], drafts: list[list[int]]) -> None:
    for text, tokens in zip(texts, drafts, strict=True):
        text.written.extend(tokens[:-1])  # the last draft is never computed


def decode_drafts(
    requests: Sequence[Request], n: int, logits_NV: Tensor, advance: Callable[[Tensor, int], Tensor]
) -> list[Draft]:
    """n draft tokens for each request, one position after the other: the first from `logits_NV`, the next from
    advance(draft i of all requests, i), the logits after it."""
    tokens: list[Tensor] = []
    probs: list[Tensor] = []
    reports = [r.rule.needs_draft_probabilities(r.sampling) for r in requests]
    samplings = [r.rule.draft_sampling(r.sampling, len(r.tokens)) for r in requests]
    rows, _ = RowSettings.of(samplings, [len(r.tokens) for r in requests]).to(logits_NV.device)
    for i in range(n):
        chosen_N = rows.sample(logits_NV, ahead=i)
        tokens.append(chosen_N.clamp(min=0))  # NO_TOKEN of a broken drafter: any token, which the target rejects
        if any(reports):
            probs.append(rows.probabilities(logits_NV))
        if i + 1 < n:
            logits_NV = advance(tokens[-1], i)
    tokens_NG = torch.stack(tokens, dim=1).tolist()  # the one host sync of a proposal
    probs_N = torch.stack(probs, dim=1).unbind() if probs else ()
    return [Draft(ids, probs_N[row] if reports[row] else None) for row, ids in enumerate(tokens_NG)]


def trim_head(model: Decoder, vocab_ids: Sequence[int]) -> None:
    """Replace the head by one with the rows of these tokens only. The embedding keeps all tokens."""
    weight_VD = model.read_head(model.compute_dtype).weight_VD.detach()
    rows_MD = weight_VD[torch.tensor(vocab_ids, device=weight_VD.device)]
    head = FormatLinear(rows_MD.shape[1], rows_MD.shape[0], bias=False, device="meta")
    head.weight = nn.Parameter(rows_MD, requires_grad=False)
    model.head = head


def check_vocabulary(name: str, size: int, target: Decoder) -> None:
    if size != target.spec.vocab_size:
        raise UserError(
            f"{name} has a vocabulary of {size} tokens, the model one of {target.spec.vocab_size}; "
            "a drafter must use the model's tokenizer"
        )


class DrafterFile(NamedTuple):
    vocab_ids: list[int] | None = None  # the tokens that the drafter was trained for; None: all
    acceptance: tuple[float, ...] = ()  # by place of the draft, on held-out prompts; empty: not measured


def read_drafter_file(folder: Path, vocab_size: int) -> DrafterFile:
    """What a drafter folder says beside its model; an ordinary model folder says nothing."""
    path = folder / DRAFTER_FILE
    if not path.is_file():
        return DrafterFile()
    saved = read_object(path, remedy="write the drafter again")
    if "vocab_ids" not in saved:
        raise UserError(f"{path} has no 'vocab_ids'; write the drafter again")
    return DrafterFile(_vocab_ids(saved["vocab_ids"], vocab_size, path), _acceptance(saved.get("acceptance"), path))


def _vocab_ids(ids: Any, vocab_size: int, path: Path) -> list[int] | None:
    if ids is None:
        return None
    whole = isinstance(ids, list) and all(type(i) is int and 0 <= i < vocab_size for i in ids)
    if not whole or not ids or len(set(ids)) != len(ids):
        raise UserError(
            f"{path}: vocab_ids must be different token ids from 0 to {vocab_size - 1}; write the drafter again"
        )
    return list(ids)


def _acceptance(chances: Any, path: Path) -> tuple[float, ...]:
    chances = [] if chances is None else chances
    if not isinstance(chances, list) or not all(type(c) in (int, float) and 0 <= c <= 1 for c in chances):
        raise UserError(f"{path}: acceptance must be a list of numbers from 0 to 1; write the drafter again")
    return tuple(map(float, chances))
