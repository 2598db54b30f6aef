"""Drafters: objects that guess tokens ahead. Guesses cost time when wrong, never correctness.

`Ngram`       looks the end of the text up in the text itself (and, if wanted, in texts of earlier requests)
              and proposes what followed there the last time. No weights; good where text repeats itself:
              code edits, summaries, extraction.
`DraftModel`  a smaller decoder with the same vocabulary writes the guesses. It has keys and values of its own,
              in a pool of the same kind as the engine's. After a rejection it keeps what is still right and
              catches up on the rest in its next pass, so a drafter that paused for a while costs one pass. Its
              head may know the most frequent tokens only (`vocab_ids`); it reads all of them.
Sampling: under the `coupled` rule a draft model uses the target's noise, so both draw the same token when
their distributions agree. Under `token` and `block` it draws with noise of its own and reports the
distribution it drew from. Whether to draft may depend on the text, never on a token drawn just now: that
would change the distribution (docs/methods/speculation.md has an example).

A drafter made by `shoestring run shrink/drafter` is a model folder with a drafter.json, which names the tokens its
head was trained for.

Several drafters as one: stack.py. The model's own layers as a drafter: self_skip.py. Left out: trees, drafters with
another tokenizer.

Shapes: N requests, G drafts, V vocabulary.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoestring.errors import UserError, suggest
from shoestring.formats import FormatLinear
from shoestring.model.transformer import Decoder
from shoestring.places import expand
from shoestring.serve.blocks import BlockPool, Table
from shoestring.serve.chain_graph import most_new
from shoestring.serve.cuda_graphs import Kind
from shoestring.serve.kv_cache import Span
from shoestring.serve.request import NO_DRAFT, Awaited, Draft, Request
from shoestring.serve.runner import Batch, Runner
from shoestring.serve.sampling import sample
from shoestring.serve.stack import Stacked
from shoestring.serve.verify import draft_sampling, probabilities


class Drafter(Protocol):
    def propose(self, requests: Sequence[Request], n: int) -> list[Draft]:
        """At most n guesses for each request about what follows its `tokens`."""

    def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """How the guesses of the last step fared, where there were any."""

    def release(self, request: Request) -> None:
        """The request is over, or preempted and back later; drop whatever was kept for it."""


# -- lookup -------------------------------------------------------------------------------------------------

Gram = tuple[int, ...]


@dataclass(eq=False)
class _Indexed:
    """A text, and for every n-gram in it the place that follows its last occurrence."""

    tokens: list[int]
    at: dict[Gram, int] = field(default_factory=dict)
    num_indexed: int = 0


class Ngram:
    def __init__(self, *, longest: int = 4, shortest: int = 2, history: int = 0) -> None:
        """n-grams of `longest` down to `shortest` tokens; `history`: how many tokens of finished requests to
        remember for later ones (0: none, since one user's text could then show in another's speed)."""
        if not 1 <= shortest <= longest:
            raise UserError(f"n-grams of {shortest} to {longest} tokens: give 1 <= shortest <= longest")
        if history < 0:
            raise UserError(f"history={history} is not allowed; give 0 or more tokens")
        self.longest, self.shortest, self.history = longest, shortest, history
        self._live: dict[int, _Indexed] = {}
        self._past: deque[_Indexed] = deque()  # newest first
        self._num_past = 0

    def propose(self, requests: Sequence[Request], n: int) -> list[Draft]:
        return [Draft(self._continue(r, n)) for r in requests]

    def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        pass

    def release(self, request: Request) -> None:
        text = self._live.pop(request.id, None)
        if text is None or not self.history or request.finish_reason is None:
            return
        self._index(text)
        self._past.appendleft(text)
        self._num_past += len(text.tokens)
        while self._num_past > self.history:
            self._num_past -= len(self._past.pop().tokens)

    def _continue(self, request: Request, n: int) -> list[int]:
        text = self._live.setdefault(request.id, _Indexed(request.tokens))
        self._index(text)
        end = request.tokens[-self.longest :]
        # The longest match first; of equal ones this text before others, the newest of those first.
        for length in range(len(end), self.shortest - 1, -1):
            gram = tuple(end[-length:])
            for source in (text, *self._past):
                if gram in source.at:
                    return _run_on(source.tokens, source.at[gram], n, wrap=source is text)
        return []

    def _index(self, text: _Indexed) -> None:
        tokens = text.tokens
        # The n-gram that ends the text is not in the index: nothing follows it yet.
        for at in range(max(1, text.num_indexed), len(tokens)):
            for length in range(self.shortest, min(self.longest, at) + 1):
                text.at[tuple(tokens[at - length : at])] = at
        text.num_indexed = max(1, len(tokens))


def _run_on(tokens: list[int], at: int, n: int, *, wrap: bool) -> list[int]:
    """tokens[at:][:n]; a text that ends before that repeats from `at`, as the match says it does."""
    found = tokens[at : at + n]
    period = len(found)
    while wrap and len(found) < n:
        found.append(found[-period])
    return found


# -- a draft model ------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Kept:
    """What the draft model holds of one request: the tokens its keys and values belong to."""

    table: Table
    written: list[int]
    num_certain: int  # of `written`, those that were committed then and thus cannot change


class DraftModel:
    def __init__(
        self,
        model: Decoder,
        *,
        vocab_size: int | None = None,
        vocab_ids: Sequence[int] | None = None,
        block_size: int = 16,
        num_blocks: int | None = None,
        chunk: int = 2048,
        graphs: bool | None = None,
    ) -> None:
        """`vocab_size` is the target's, where padding makes it differ from the drafter's own. `vocab_ids`: the
        model's logits are for these tokens only, in this order (see `trim_head`). `num_blocks` bounds the
        drafter's memory (None: grows with need); a request it cannot hold gets no drafts. `chunk`: rows that it
        reads in one pass. `graphs` as in Engine."""
        self.model, self.chunk = model, chunk
        self.vocab_size = model.spec.vocab_size if vocab_size is None else vocab_size
        self.vocab_ids: Tensor | None = None
        if vocab_ids is not None:
            self.vocab_ids = torch.tensor(vocab_ids, device=model.embed.weight.device)
        most = 256 * -(-model.spec.max_positions // block_size)
        self.pool = BlockPool(num_blocks or most, block_size, grows=num_blocks is None)
        self.runner = Runner(model, self.pool, graphs=graphs, spread=self._spread)
        self.cache = self.runner.cache
        self._kept: dict[int, _Kept] = {}
        self.caught_up = False  # the last proposal had a long text to read first

    def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        pass  # what was accepted shows in the request's tokens

    def release(self, request: Request) -> None:
        kept = self._kept.pop(request.id, None)
        if kept is not None:
            self.pool.close(kept.table)

    @torch.no_grad()
    def prepare(
        self, max_requests: int, kinds: Sequence[Kind], lengths: Sequence[int], max_context: int
    ) -> None:
        """Make what proposals of these lengths may need (serve/prepare.py)."""
        context = min(max_context + max(lengths, default=0), self.model.spec.max_positions)
        need = 2 * max_requests * self.pool.blocks_for(context) + 1  # texts of before are kept beside
        self.pool.num_touched = max(self.pool.num_touched, min(self.pool.num_blocks, need))
        self.runner.prepare_chains(max_requests, kinds, lengths)
        self.runner.warm(self.chunk)

    @property
    def num_made(self) -> int:
        return self.runner.num_made

    def behind(self, requests: Sequence[Request]) -> bool:
        """Whether texts are to be read before the next drafts."""
        most = most_new(len(requests))
        written = (len(k.written) if (k := self._kept.get(r.id)) else 0 for r in requests)
        return any(len(r.tokens) - num > most for r, num in zip(requests, written, strict=True))

    @torch.no_grad()
    def propose(self, requests: Sequence[Request], n: int) -> list[Draft]:
        root = b""
        if any(r.id not in self._kept for r in requests):
            self.runner.refresh()
            root = self.runner.root() if self.pool.prefix_cache else b""
        able = [r for r in requests if self._make_room(r, n, root)]
        self.caught_up = False
        if not able:
            return [NO_DRAFT] * len(requests)

        def advance(tokens_N: Tensor, i: int) -> Tensor:
            spans = [Span(self._kept[r.id].table.blocks, len(r.tokens) + i, 1) for r in able]
            return self._forward(tokens_N, spans, list(range(len(able))))

        self._forget_wrong(able)
        self.caught_up = self.behind(able)
        drafts = self._chain(able, n)
        if drafts is None:
            drafts = write_drafts(able, n, self._catch_up(able), advance)
        found: dict[int, Draft] = {}
        awaited = drafts[0].awaited
        if awaited is not None:
            kept = [self._kept[r.id] for r in able]
            awaited.then.append(partial(_write, kept))
        for request, draft in zip(able, drafts, strict=True):
            if awaited is None:
                self._kept[request.id].written.extend(draft.tokens[:-1])
            found[request.id] = draft
        return [found.get(r.id, NO_DRAFT) for r in requests]

    def _make_room(self, request: Request, n: int, root: bytes) -> bool:
        """Blocks for the request and n drafts, the last of which is never computed. `root`: of a new one's table."""
        num = len(request.tokens) + n - 1
        if num > self.model.spec.max_positions:
            return False
        kept = self._kept.get(request.id)
        if kept is None:
            table = self.pool.open(root, request.tokens)
            if table is None:
                return False
            num_hit = len(table.hashes) * self.pool.block_size
            kept = self._kept[request.id] = _Kept(table, request.tokens[:num_hit], num_hit)
        return self.pool.grow(kept.table, num)

    def _chain(self, requests: list[Request], n: int) -> list[Draft] | None:
        """n drafts each, chosen on the device and read from there by the next pass and by the target, so that the
        host waits once, for the target's tokens; None where that is not possible: no kernels, drafts that are drawn."""
        if any(r.rule != "coupled" and not r.sampling.greedy for r in requests):
            return None
        if not self.runner.ready():
            return None
        self._read_long(requests)
        tables = [self._kept[r.id].table for r in requests]
        starts = [len(self._kept[r.id].written) for r in requests]
        ids = [t for r, start in zip(requests, starts, strict=True) for t in r.tokens[start:]]
        spans = [
            Span(table.blocks, start, len(r.tokens) - start)
            for r, table, start in zip(requests, tables, starts, strict=True)
        ]
        samplings = [r.sampling for r in requests]
        batch = Batch(spans, ids, range(len(ids)))
        awaited = Awaited(len(requests), n, self.runner.device)
        flight = self.runner.chain(batch, samplings, n)
        if flight is None:
            return None
        for request, start in zip(requests, starts, strict=True):
            self._kept[request.id].written += request.tokens[start:]
        self._note_read(requests)
        return awaited.launched(flight.chosen_R[: len(requests) * n], flight.tokens)

    def _forget_wrong(self, requests: list[Request]) -> None:
        """Keep of what was written what the requests' tokens say, without the last: it is computed in any case."""
        for request in requests:
            kept, tokens = self._kept[request.id], request.tokens
            right = kept.num_certain
            while right < min(len(kept.written), len(tokens) - 1) and kept.written[right] == tokens[right]:
                right += 1
            del kept.written[right:]
            del kept.written[len(tokens) - 1 :]

    def _catch_up(self, requests: list[Request]) -> Tensor:
        """Compute every committed token that is not; the logits after the last, [N, V]."""
        logits: dict[int, Tensor] = {}
        while len(logits) < len(requests):
            part, budget = [], self.chunk
            for request in requests:
                missing = len(request.tokens) - len(self._kept[request.id].written)
                if missing and budget:
                    part.append((request, min(missing, budget)))
                    budget -= part[-1][1]
            logits |= self._read(sorted(part, key=lambda item: item[1]))
        self._note_read(requests)
        return torch.stack([logits[r.id] for r in requests])

    def _read_long(self, requests: list[Request]) -> None:
        """Compute what is more than a chain's first pass holds, all but the last token."""
        most = most_new(len(requests))
        late = [r for r in requests if len(r.tokens) - len(self._kept[r.id].written) > most > 0]
        while late:
            part, budget = [], self.chunk
            for request in late:
                missing = len(request.tokens) - 1 - len(self._kept[request.id].written)
                if missing and budget:
                    part.append((request, min(missing, budget)))
                    budget -= part[-1][1]
            if not part:
                return
            self._read(sorted(part, key=lambda item: item[1]))

    def _note_read(self, requests: list[Request]) -> None:
        for request in requests:
            kept = self._kept[request.id]
            kept.num_certain = len(request.tokens)
            self.pool.seal(kept.table, request.tokens, len(request.tokens))

    def _read(self, part: list[tuple[Request, int]]) -> dict[int, Tensor]:
        """One pass over rows of several requests; the last logits of those that it finishes."""
        ids: list[int] = []
        spans, ends = [], {}
        for request, num in part:
            kept = self._kept[request.id]
            start = len(kept.written)
            new = request.tokens[start : start + num]
            ids += new
            spans.append(Span(kept.table.blocks, start, num))
            kept.written += new
            if len(kept.written) == len(request.tokens):
                ends[request.id] = len(ids) - 1
        rows = list(ends.values()) or [len(ids) - 1]  # of nobody's: a pass has at least one
        logits_RV = self.runner.forward(Batch(spans, ids, rows), once=True)
        return dict(zip(ends, logits_RV, strict=False))

    def _forward(self, tokens_T: Sequence[int] | Tensor, spans: list[Span], rows: list[int]) -> Tensor:
        return self.runner.forward(Batch(spans, tokens_T, rows))

    def _spread(self, logits_RV: Tensor) -> Tensor:
        """Logits by the target's token ids, by which noise shared with it is keyed."""
        if self.vocab_ids is not None:
            all_RV = logits_RV.new_full((logits_RV.shape[0], self.vocab_size), -torch.inf)
            return all_RV.index_copy_(1, self.vocab_ids, logits_RV)
        missing = self.vocab_size - logits_RV.shape[-1]
        return F.pad(logits_RV, (0, missing), value=-torch.inf) if missing else logits_RV


def _write(kept: list[_Kept], guesses: list[list[int]]) -> None:
    for one, tokens in zip(kept, guesses, strict=True):
        one.written.extend(tokens[:-1])


def write_drafts(
    requests: Sequence[Request], n: int, logits_NV: Tensor, advance: Callable[[Tensor, int], Tensor]
) -> list[Draft]:
    """n tokens for each request, one after the other: the first from `logits_NV`, the next from
    advance(draft i of all, i), the logits after it."""
    tokens: list[Tensor] = []
    probs: list[Tensor] = []
    drawn = [r.rule != "coupled" and not r.sampling.greedy for r in requests]
    samplings = [draft_sampling(r.sampling, r.rule, len(r.tokens)) for r in requests]
    for i in range(n):
        tokens.append(sample(logits_NV, samplings, [len(r.tokens) + i for r in requests]))
        if any(drawn):
            probs.append(probabilities(logits_NV, samplings))
        if i + 1 < n:
            logits_NV = advance(tokens[-1], i)
    tokens_NG = torch.stack(tokens, dim=1).tolist()  # the one host sync of a proposal
    return [
        Draft(ids, torch.stack([p[row] for p in probs]) if drawn[row] else None)
        for row, ids in enumerate(tokens_NG)
    ]


# -- by name -------------------------------------------------------------------------------------------------


def open_drafter(
    text: str, target: Decoder, *, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Drafter:
    """'ngram', the path of a draft model, or several joined by '+', the cheapest first (stack.py)."""
    from shoestring.model.folder import load_model

    drafters: list[Drafter] = []
    for name in text.split("+"):
        if name == "ngram":
            drafters.append(Ngram())
            continue
        if not expand(name).exists():
            raise UserError(
                f"there is no drafter {name}: give ngram, the path of a draft model, or several joined by +."
                f"{suggest(name, ['ngram'])}"
            )
        loaded = load_model(name, device=device, dtype=dtype)
        loaded.model.eval()
        ours, theirs = target.spec.vocab_size, loaded.spec.vocab_size
        if ours != theirs:
            raise UserError(
                f"{name} has a vocabulary of {theirs} tokens, the model one of {ours}; "
                "a drafter must use the model's tokenizer"
            )
        vocab_ids = _read_vocab_ids(loaded.path, ours)
        if vocab_ids is not None:
            trim_head(loaded.model, vocab_ids)
        drafters.append(DraftModel(loaded.model, vocab_ids=vocab_ids))
    return drafters[0] if len(drafters) == 1 else Stacked(drafters)


# -- a trimmed vocabulary -----------------------------------------------------------------------------------

DRAFTER_FILE = "drafter.json"


def trim_head(model: Decoder, vocab_ids: Sequence[int]) -> None:
    """Give the model a head of its own with the rows of these tokens; the embedding keeps all of them."""
    weight_VD = model.read_head(model.compute_dtype).weight_VD.detach()
    rows_MD = weight_VD[torch.tensor(vocab_ids, device=weight_VD.device)]
    head = FormatLinear(rows_MD.shape[1], rows_MD.shape[0], bias=False, device="meta")
    head.weight = nn.Parameter(rows_MD, requires_grad=False)
    model.head = head


def _read_vocab_ids(folder: Path, vocab_size: int) -> list[int] | None:
    """The tokens a drafter folder was trained for; None: all."""
    path = folder / DRAFTER_FILE
    if not path.is_file():
        return None
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))["vocab_ids"]
        if ids is None:
            return None
        good = len(set(ids)) == len(ids) > 0 and all(type(i) is int and 0 <= i < vocab_size for i in ids)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}); write the drafter again") from error
    if not good:
        raise UserError(
            f"{path}: vocab_ids must be different token ids from 0 to {vocab_size - 1}; write the drafter again"
        )
    return list(ids)
