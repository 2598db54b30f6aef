"""The engine: many requests, one step rule.

A request has `tokens` (committed), `drafts` (proposed, not verified) and `num_computed <= len(tokens)`: the
number of positions whose keys and values are valid. A step computes rows of [num_computed, len(tokens) +
len(drafts)), as many as the row budget allows. Rows that stop short of the last committed token only move
`num_computed`; rows that reach it are verified: the new tokens are appended, num_computed = len(tokens) - 1,
drafts = []. Prefill, chunked prefill, prefix hits, decoding, speculation, its roll-back and recomputing after
a preemption are all this one rule; plain decoding has no drafts.

Who computes how much is decided in scheduler.py, the forward runs in runner.py over the keys and values of
blocks.py and kv_cache.py, what a request gains is decided in verify.py, how much is drafted in goodput.py.
This file joins them.

No module-level state: several engines (a target and its drafter, say) live in one process.
Left out: a server loop. A thread that owns the engine calls add, abort and step; nothing here locks.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from shoestring.errors import UserError
from shoestring.model.skip import SkipSet
from shoestring.model.transformer import Decoder
from shoestring.serve.admission import (
    Prompt,
    TextCodec,
    check_least,
    check_rule,
    context_limit,
    eos_ids_of,
    prompt_tokens,
    samplings_for,
)
from shoestring.serve.blocks import BlockPool
from shoestring.serve.drafters import Drafter
from shoestring.serve.goodput import Goodput, Prospects
from shoestring.serve.kv_cache import Span
from shoestring.serve.prepare import caught_up, num_made, prepare_drafting, prepare_steps, prospects
from shoestring.serve.request import NO_DRAFT, Completion, FinishReason, Output, Request, Stats, completion_of
from shoestring.serve.runner import Runner
from shoestring.serve.sampling import Sampling
from shoestring.serve.scheduler import Plan, Scheduler
from shoestring.serve.self_skip import stack_self_skip
from shoestring.serve.skipping import Skipping, SkipPolicy, Watched, Work
from shoestring.serve.step_work import Launched, Proposal, batch_of, by_end, check_of
from shoestring.serve.tensor_parallel import LeadRunner, Ranks
from shoestring.serve.text import TextStream
from shoestring.serve.verify import Rule, Verify, accept, needs_logits, note_gained, verify

__all__ = ["Completion", "Drafter", "Engine", "Output", "Prompt", "Request", "Stats", "TextCodec"]

FIXED_DRAFTS = 4  # where lengths cannot be chosen by measured time


class Engine:
    def __init__(
        self,
        model: Decoder,
        tokenizer: TextCodec | None = None,
        *,
        max_requests: int = 8,
        max_context: int | None = None,
        chunk: int = 512,
        max_waiting: int | None = None,
        block_size: int = 16,
        num_blocks: int | None = None,
        prefix_cache: bool = True,
        drafter: Drafter | None = None,
        num_drafts: int | None = None,
        rule: Rule | Literal["auto"] = "coupled",
        verify: Verify = verify,
        skip: SkipPolicy | SkipSet | None = None,
        draft_skip: SkipSet | None = None,
        graphs: bool | None = None,
        ranks: Ranks | None = None,
        eos_ids: Iterable[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`chunk` is the budget of rows per step. `num_blocks` is the memory for keys and values, taken at
        once; without it there is room for max_requests of full length, taken as needed. `num_drafts` is the
        number of guesses per request and step; None chooses it by measured speed. `rule` is how guesses are
        verified; `verify` carries it out and can be wrapped to change logits. `skip` decides which sublayers
        requests leave out; `draft_skip` makes the model without those sublayers a drafter, after `drafter`.
        `graphs`: fused steps with fixed addresses, CUDA graphs on a GPU; None: where there are kernels.
        `ranks`: the processes that hold the other shares of the model and follow this one."""
        spec = model.spec
        check_least(max_requests=max_requests, chunk=chunk, block_size=block_size)
        check_least(least=0, num_drafts=num_drafts, max_waiting=max_waiting)
        check_rule(rule)
        context = context_limit(spec.max_positions, max_context, block_size, num_blocks)
        grows = num_blocks is None
        if num_blocks is None:
            num_blocks = max_requests * -(-context // block_size)
        self.model, self.tokenizer, self.max_context, self.chunk = model, tokenizer, context, chunk
        self.rule, self.verify, self.clock = rule, verify, clock
        self.eos_ids = eos_ids_of(model, tokenizer) if eos_ids is None else set(eos_ids)
        pool = BlockPool(num_blocks, block_size, grows=grows, prefix_cache=prefix_cache)
        if ranks is not None:
            self.runner: Runner = LeadRunner(model, pool, ranks)
        else:
            self.runner = Runner(model, pool, graphs=graphs)
        self.cache = self.runner.cache
        self.skipping = Skipping(skip, spec)
        if draft_skip is not None:
            drafter = stack_self_skip(drafter, self.runner, draft_skip)
        self.scheduler = Scheduler(
            pool, self._cache_root, max_requests=max_requests, chunk=chunk, max_waiting=max_waiting
        )
        # Where every rank has an engine of its own they must draft alike, and their clocks differ.
        self._timed = model.embed.group is None or ranks is not None
        self.use_drafter(drafter, num_drafts)
        self.stats, self._ids = Stats(), itertools.count()
        self._flight: Launched | None = None  # a step that runs ahead of what is known
        self._proposal = Proposal()  # guesses of the next step
        self._made = 0  # graphs when the last step ended
        self._ended: float | None = None  # when the last step did, while steps of the same requests follow

    # -- requests in and out --------------------------------------------------------------------------------
    def add(
        self, prompt: Prompt, sampling: Sampling | None = None, *, deadline: float | None = None
    ) -> Request:
        """Queue a prompt (text or token ids). `deadline`, on the engine's clock, ends it unfinished."""
        request = self._request(prompt, sampling)
        request.deadline = deadline
        self.scheduler.add(request)
        return request

    def abort(self, request: Request) -> None:
        """End a request now; its blocks are free at once. A finished request is left as it is."""
        if request.finish_reason is None:
            self._finish(request, "abort")

    @property
    def waiting(self) -> deque[Request]:
        return self.scheduler.waiting

    @property
    def running(self) -> list[Request]:
        return self.scheduler.running

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def use_drafter(
        self, drafter: Drafter | None, num_drafts: int | None = None, goodput: Goodput | None = None
    ) -> None:
        """From now on, while no request runs: another drafter, with a controller that knows it already or a new one."""
        assert not self.scheduler.running, "requests are running with the drafter they began with"
        self.drafter, self.goodput, self._prepared = drafter, None, False
        self.num_drafts = FIXED_DRAFTS if num_drafts is None else num_drafts
        if num_drafts is None and drafter is not None and self._timed:
            self.goodput = goodput or Goodput(self._profile)

    @torch.no_grad()
    def prepare(self) -> None:
        """Make what requests would wait for (prepare.py). With a controller the first step does it otherwise."""
        sizes = self.scheduler.max_requests, self.max_context, self.chunk
        lengths = self.goodput.lengths if self.goodput else ()
        prepare_steps(self.runner, *sizes, lengths, self.skipping.usual)
        if self.goodput is not None:
            prepare_drafting(self.runner, self.drafter, self.goodput, *sizes)
        self._made, self._prepared = num_made(self.runner, self.drafter), True

    def forget_prefixes(self) -> None:
        """Drop the prefix cache, after the model's weights changed where the engine cannot see it."""
        self.cache.pool.forget()

    def _request(self, prompt: Prompt, sampling: Sampling | None) -> Request:
        sampling = sampling or Sampling()
        tokens = prompt_tokens(prompt, self.tokenizer, self.model.spec.vocab_size, self.max_context)
        if sampling.stop and self.tokenizer is None:
            raise UserError(f"stop strings {sampling.stop} need a tokenizer; give the engine one")
        rule = self.rule
        if rule == "auto":
            rule = "coupled" if sampling.greedy or sampling.seed is not None else "block"
        if sampling.seed is None:
            sampling = replace(sampling, seed=secrets.randbits(63))
        stream = None if self.tokenizer is None else TextStream(self.tokenizer.stream(), sampling.stop)
        request = Request(tokens, len(tokens), sampling, next(self._ids), stream, rule)
        self.skipping.admit(request)
        return request

    # -- the step -------------------------------------------------------------------------------------------
    # no_grad, not inference_mode: a sharded model keeps tensors that it makes here and trains on with them.
    @torch.no_grad()
    def step(self) -> list[Output]:
        """Compute one batch of rows; the requests that gained tokens or ended, in no particular order."""
        if self.goodput is not None and not self._prepared and self.busy:
            self.prepare()
        outputs = self._expire()
        flight, self._flight = self._flight, None
        if flight is None or not any(flight.alive):
            if self.waiting and not self.running:
                self.runner.refresh()  # weights may change while no request runs
            self._propose()
            plan = self.scheduler.schedule()
            self._note(plan)
            if not plan.work:
                return outputs
            reads = bool(plan.admitted) or not all(r.ready for r, _ in plan.work)
            if reads:
                self._ended = None  # not the time of a decoding step
            began = time.perf_counter()
            flight = self._launch(plan.work, began, reads)
            if flight is None:
                self._proposal.settle(self.goodput)
                return outputs + self._compute(plan.work, began, reads)
        self._flight = self._run_ahead(flight)
        return outputs + self._land(flight)

    def _compute(self, work: Work, began: float, reads: bool) -> list[Output]:
        """A step whose logits are wanted, or that verifies nothing."""
        logits_RV, checked, watched = self._forward(work)
        gained: list[list[int]] = []
        if checked:
            gained = self.verify(logits_RV, [check_of(r) for r in checked])
        if self.goodput is not None and checked:
            num_rows = sum(num for _, num in work)
            self._clocked(num_rows, began, sum(map(len, gained)), reads=reads)
        for watch in watched:
            watch.count({r.id: len(new) for r, new in zip(checked, gained, strict=True)})
        return [self._commit(r, new) for r, new in zip(checked, gained, strict=True)]

    # -- steps whose tokens are chosen on the device --------------------------------------------------------
    def _launch(self, work: Work, began: float, reads: bool) -> Launched | None:
        """Start a step whose tokens are chosen by the coupled rule, behind all texts that are read by then, or None."""
        if not all(r.rule == "coupled" or not r.drafts for r, _ in work):
            return None
        ends, others = by_end(work)
        requests = [r for r, _ in ends]
        checks = [check_of(r) for r in requests]
        groups = self.skipping.groups([*ends, *others])
        if needs_logits(self.verify, checks) or self.skipping.watching(work) is not None or len(groups) > 1:
            return None
        ((skip, ordered),) = groups
        batch, samplings = batch_of(ordered)[0], [r.sampling for r in requests]
        handle = self.runner.choose(batch, samplings, skip)
        if handle is None and not any(r.drafts for r in requests):
            handle = self.runner.read(batch, samplings, skip)
        if handle is None:
            return None
        self._read_on(others)
        return Launched(requests, [r.table for r in requests], checks, skip, handle, began, reads=reads)

    def _run_ahead(self, flight: Launched) -> Launched | None:
        """Start the step after `flight` before its tokens are known on the host, where nothing but those tokens
        could change that step: it takes them from the device. A request that turns out to have ended had its
        row computed for nothing."""
        requests = flight.requests
        if self.scheduler.admits or not all(flight.alive) or len(requests) != len(self.running):
            return None
        if any(r.drafts or self._room(r) < 2 for r in requests) or self._drafts_next():
            return None
        spans, checks = [], []
        for request in requests:
            assert request.table is not None
            position = len(request.tokens)  # of the token on its way
            if request.until_switch(position - 1) is not None:
                return None  # its set may be about to change
            if not self.cache.pool.grow(request.table, position + 1):
                return None
            spans.append(Span(request.table.blocks, position, 1))
            checks.append(check_of(request, num_coming=1))
        handle = self.runner.choose_next(spans, [r.sampling for r in requests], flight.skip)
        self.stats.num_steps += 1
        self.stats.num_rows += len(requests)
        return Launched(requests, flight.tables, checks, flight.skip, handle, time.perf_counter(), ahead=True)

    def _drafts_next(self) -> bool:
        """Whether the next step of the running requests would have drafts."""
        if self.drafter is None or not self.num_drafts:
            return False
        return self.goodput is None or not self.goodput.abstains(len(self.running), self._prospects)

    def _land(self, flight: Launched) -> list[Output]:
        """Wait for the tokens of a flight and give them to the requests that are still there."""
        if not flight.requests:
            return []  # a piece of a prompt: nothing to wait for
        targets = flight.handle.tokens()
        alive, checks = flight.alive, flight.checks
        if self._proposal.awaited:
            self._proposal.settle(self.goodput)  # only now are the guesses known
            checks = [check_of(r) if a else c for r, a, c in zip(flight.requests, alive, checks, strict=True)]
        landed = [
            (request, check, accept(check.drafts, found))
            for request, check, found, lives in zip(flight.requests, checks, targets, alive, strict=True)
            if lives
        ]
        if self.goodput is not None and landed:
            num_gained = sum(len(new) for _, _, new in landed)
            num_rows = sum(map(len, targets))
            self._clocked(num_rows, flight.began, num_gained, ahead=flight.ahead, reads=flight.reads)
        note_gained(self.verify, [check for _, check, _ in landed], [new for _, _, new in landed])
        return [self._commit(request, new) for request, _, new in landed]

    def _clocked(
        self, num_rows: int, began: float, num_gained: int, *, ahead: bool = False, reads: bool = False
    ) -> None:
        """Tell the controller what a step took: from the end of the one before to its own, drafting apart."""
        assert self.goodput is not None
        now, made = time.perf_counter(), num_made(self.runner, self.drafter)
        if self._ended is not None:  # also where it was launched before that end
            began = self._ended + self.goodput.draft_seconds
        usual = made == self._made and not reads
        self._ended, self._made = now, made  # before the controller may want to measure (`_profile`)
        if usual:
            self.goodput.stepped(num_rows, max(now - began, 1e-9), num_gained, ahead=ahead)
        else:
            self.goodput.spoiled()

    def _expire(self) -> list[Output]:
        late = [r for r in (*self.running, *self.waiting) if r.deadline is not None]
        now = self.clock() if late else 0.0
        outputs = []
        for request in late:
            if request.deadline is not None and now >= request.deadline:
                before = len(request.text)
                self._finish(request, "deadline")
                outputs.append(Output(request, [], request.text[before:], "deadline"))
        return outputs

    def _propose(self) -> None:
        if self.drafter is None or not self.num_drafts or not self.running:
            return
        n = self.num_drafts
        if self.goodput is not None:
            calm = not self.scheduler.admits and all(r.ready for r in self.running)
            n = self.goodput.choose(len(self.running), self._prospects) if calm else 0
        ready = [r for r in self.running if r.ready and self._room(r) > 1] if n else []
        if not ready:
            return
        asked = ready if self.goodput is None else self.goodput.ask(ready)
        began = time.perf_counter()
        drafts = self.drafter.propose(asked, n)
        usual = num_made(self.runner, self.drafter) == self._made and not caught_up(self.drafter)
        self._proposal = Proposal(drafts, n, time.perf_counter() - began, usual)
        if not self._proposal.awaited:
            self._proposal.settle(self.goodput)
        for request, draft in zip(asked, drafts, strict=True):
            # Of the tokens that still fit, the last is always the target's own.
            request.draft = draft.cut(min(n, self._room(request) - 1))
            vocab = self.model.spec.vocab_size
            known = draft.awaited is None  # those of a device come later
            assert not known or all(0 <= t < vocab for t in request.drafts), "draft outside the vocabulary"
            if self.goodput is not None:
                self.goodput.offer(min(n, self._room(request) - 1), len(request.drafts))

    def _prospects(self) -> Prospects:
        return prospects(self.drafter, self.running, self._room, self.chunk // len(self.running))

    def _room(self, request: Request) -> int:
        """How many tokens the request may still gain."""
        return min(request.num_prompt + request.sampling.max_tokens, self.max_context) - len(request.tokens)

    def _note(self, plan: Plan) -> None:
        for request in plan.preempted:
            self.stats.num_preemptions += 1
            if self.drafter is not None:
                self.drafter.release(request)
        if plan.admitted and self.goodput is not None:
            self.goodput.joined()
        for request in plan.admitted:
            self.stats.num_prefix_asked += len(request.tokens)
            self.stats.num_prefix_hits += request.num_computed
            if request.num_preempted == 0:
                request.num_cached = request.num_computed
        self.stats.num_steps += bool(plan.work)
        self.stats.num_rows += sum(num for _, num in plan.work)

    def _forward(self, work: Work) -> tuple[Tensor, list[Request], list[Watched]]:
        """Logits of the rows to verify, the requests they belong to and what was seen on the way; one pass for
        each skip set. Moves num_computed of the others."""
        parts = [self._forward_alike(part, skip) for skip, part in self.skipping.groups(work)]
        logits_RV = parts[0][0] if len(parts) == 1 else torch.cat([logits for logits, _, _ in parts])
        self._read_on(work)
        return logits_RV, [r for _, checked, _ in parts for r in checked], [w for *_, w in parts if w]

    def _read_on(self, work: Work) -> None:
        for request, num in work:
            if not request.ready:  # else its commit does both
                request.num_computed = min(request.num_computed + num, len(request.tokens) - 1)
                self._seal(request)

    def _forward_alike(
        self, work: Work, skip: SkipSet | None
    ) -> tuple[Tensor, list[Request], Watched | None]:
        batch, checked = batch_of(work)
        watched = self.skipping.watching(work)
        watch = None if watched is None else watched.watch
        return self.runner.forward(batch, skip, watch), checked, watched

    def _commit(self, request: Request, gained: list[int]) -> Output:
        num_drafted, num_accepted = len(request.drafts), len(gained) - 1
        before, num_before = len(request.text), len(request.tokens)
        reason: FinishReason | None = None
        for token in gained:
            request.tokens.append(token)
            reason = self._after_token(request, token)
            if reason is not None:
                break
        kept = request.tokens[num_before:]
        request.num_computed = len(request.tokens) - 1
        request.draft = NO_DRAFT
        self.skipping.committed(request)
        self._seal(request)
        self.stats.count(num_drafted, num_accepted, len(kept))
        if num_drafted and self.goodput is not None:
            self.goodput.accept(num_drafted, num_accepted)
        if num_drafted and self.drafter is not None:
            self.drafter.observe(request, num_drafted, num_accepted)
        if reason is not None:
            self._finish(request, reason)
        return Output(request, kept, request.text[before:], reason, min(num_accepted, len(kept)))

    def _seal(self, request: Request) -> None:
        if request.table is not None:
            alike = request.num_computed if request.switch_at is None else request.switch_at
            self.cache.pool.seal(request.table, request.tokens, min(request.num_computed, alike))

    def _after_token(self, request: Request, token: int) -> FinishReason | None:
        """Append the token's text; why the request ends with this token, if it does."""
        if token in self.eos_ids and not request.sampling.ignore_eos:
            return "stop"
        if request.text_stream is not None:
            request.text += request.text_stream.push(token)
            if request.text_stream.stopped:
                return "stop"
        return "length" if self._room(request) == 0 else None

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        if request.text_stream is not None:
            request.text += request.text_stream.flush()
        self.scheduler.remove(request)
        if not self.running:
            self._ended = None
        if self.drafter is not None:
            self.drafter.release(request)

    # -- whole texts ----------------------------------------------------------------------------------------
    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling | Sequence[Sampling] | None = None
    ) -> list[Completion]:
        """Complete all prompts (one Sampling for all, or one each), as many at once as there is room for."""
        # All are checked before the first runs: a bad prompt does not cost the time of the good ones.
        asked = zip(prompts, samplings_for(prompts, sampling), strict=True)
        requests = [self._request(p, s) for p, s in asked]
        self.waiting.extend(requests)  # the caller waits for all of them: max_waiting is not for it
        try:
            while any(r.finish_reason is None for r in requests):
                self.step()
        finally:
            for request in requests:
                self.abort(request)
        return [completion_of(r) for r in requests]

    def stream(self, prompt: Prompt, sampling: Sampling | None = None) -> Iterator[str]:
        """Text pieces as they become certain. Closing the iterator aborts the request."""
        if self.tokenizer is None:
            raise UserError(
                "streaming text needs a tokenizer; build the engine with one, or use add() and step()"
            )
        return self._stream(self._request(prompt, sampling))  # errors come now, not at the first piece

    def _stream(self, request: Request) -> Iterator[str]:
        self.scheduler.add(request)
        sent = 0
        try:
            while True:
                if len(request.text) > sent:
                    piece, sent = request.text[sent:], len(request.text)
                    yield piece
                elif request.finish_reason is not None:
                    return
                else:
                    self.step()
        finally:
            self.abort(request)

    # -- what the parts ask for -----------------------------------------------------------------------------
    def _cache_root(self, request: Request) -> bytes:
        if not self.cache.pool.prefix_cache:
            return b""
        return self.runner.root("" if request.skip is None else request.skip.id)

    def _profile(self, rows: int) -> float:
        """Seconds of a target pass over this many rows; the requests' cache is not touched."""
        self._ended = None  # measuring is not part of a step
        return self.runner.seconds(rows, self.skipping.usual)
