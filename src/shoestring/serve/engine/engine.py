"""The engine: many requests, one step rule.

A request has `tokens` (committed), `drafts` (proposed, not verified) and `num_computed <= len(tokens)`: the number of
positions whose keys and values are valid. A step computes rows of [num_computed, len(tokens) + len(drafts)), as many as
the row budget allows. Rows that stop short of the last committed token only move `num_computed`. Rows that reach it are
verified: the new tokens are appended, num_computed = len(tokens) - 1, drafts = []. Prefill, chunked prefill, prefix
hits, decoding, speculation, its roll-back and recomputation after a preemption are all this one rule; plain decoding
has no drafts.

`Engine.step` is four calls, each with a file:

    schedule    drafts are proposed (speculative/drafting.py) and rows given out (scheduler.py, block_pool.py)
    launch      the forward begins (pipeline.py, runner.py, graphs.py), and if possible the steps after it
    collect     its tokens arrive and drafts are verified (pipeline.py, speculative/verify.py)
    commit      each request gains its tokens (`Commit`)

No module-level state: several engines (a target and its drafter, say) live in one process.
Left out: a server loop. One thread owns the engine and calls add, abort and step; nothing here locks.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import replace
from typing import Literal

import torch

from shoestring.errors import UserError, shown
from shoestring.kernels.gemv.embed_argmax import NO_TOKEN
from shoestring.model.skip import SkipSet
from shoestring.model.transformer import Decoder
from shoestring.serve.engine.adapters import AdapterBank
from shoestring.serve.engine.block_pool import BlockPool
from shoestring.serve.engine.capacity import choose_requests, context_limit
from shoestring.serve.engine.pipeline import IDLE_WAIT_S, Collected, LaunchedStep, LogitsStep, Pipeline, seal
from shoestring.serve.engine.request import (
    NO_DRAFT,
    Completion,
    FinishReason,
    NonFiniteLogits,
    Output,
    Prompt,
    Request,
    Stats,
    TextCodec,
    TextStream,
    check_least,
    check_prompt,
    check_rule,
    completion_of,
    encode_prompt,
    eos_ids_of,
    note_version,
    samplings_for,
)
from shoestring.serve.engine.runner import Runner
from shoestring.serve.engine.sampling import Sampling
from shoestring.serve.engine.scheduler import ScheduledStep, Scheduler
from shoestring.serve.engine.skip_policy import SkipPolicy, SkipSets
from shoestring.serve.engine.tensor_parallel import LeadRunner, Ranks
from shoestring.serve.engine.warmup import KINDS, WarmUp
from shoestring.serve.engine.weight_update import PreparedWeights, Values, WeightTarget
from shoestring.serve.speculative.draft_length import DraftLengthController
from shoestring.serve.speculative.drafter import Drafter
from shoestring.serve.speculative.drafting import Drafting
from shoestring.serve.speculative.layer_skip_drafter import add_layer_skip
from shoestring.serve.speculative.verify import RuleName, Verifier, Verify, as_verifier, rule_for, verify
from shoestring.state.reshard.version import WeightsVersion

__all__ = ["Completion", "Drafter", "Engine", "Output", "Prompt", "Request", "Stats", "TextCodec"]


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
        most_blocks: int | None = None,
        prefix_cache: bool = True,
        drafter: Drafter | None = None,
        num_drafts: int | None = None,
        rule: RuleName | Literal["auto"] = "coupled",
        verify: Verify | Verifier = verify,
        skip: SkipPolicy | SkipSet | None = None,
        draft_skip: SkipSet | None = None,
        graphs: bool | None = None,
        ranks: Ranks | None = None,
        eos_ids: Iterable[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`chunk` is the budget of rows per step. `num_blocks` is the memory for keys and values, taken at
        once; without it there is room for max_requests of full length, taken as needed, up to `most_blocks`.
        `num_drafts` is the number of guesses per request and step; None chooses it by measured speed. `rule` is how
        guesses are verified; `verify` carries it out and can be wrapped to change logits. `skip` decides which
        sublayers requests leave out; `draft_skip` makes the model without those sublayers a drafter, after `drafter`.
        `graphs`: fused steps with fixed addresses, CUDA graphs on a GPU; None: where there are kernels.
        `ranks`: the processes that hold the other shares of the model and follow this one."""
        spec = model.spec
        check_least(max_requests=max_requests, chunk=chunk, block_size=block_size)
        check_least(least=0, num_drafts=num_drafts, max_waiting=max_waiting)
        check_rule(rule)
        context = context_limit(spec, max_context, block_size, num_blocks)
        model.context = context
        grows = num_blocks is None
        if num_blocks is None:
            num_blocks = max_requests * -(-context // block_size)
            if most_blocks is not None:  # one request of full length always fits
                num_blocks = min(num_blocks, max(most_blocks, -(-context // block_size)))
        self.model, self.tokenizer, self.max_context, self.chunk = model, tokenizer, context, chunk
        self.rule, self.clock = rule, clock
        self.eos_ids = eos_ids_of(model, tokenizer) if eos_ids is None else set(eos_ids)
        pool = BlockPool(num_blocks, block_size, grows=grows, prefix_cache=prefix_cache)
        if ranks is not None:
            self.runner: Runner = LeadRunner(model, pool, ranks)
        else:
            self.runner = Runner(model, pool, graphs=graphs)
        self.cache = self.runner.cache
        self.skip_sets = SkipSets(skip, spec)
        if draft_skip is not None:
            drafter = add_layer_skip(drafter, self.runner, draft_skip)
        self.scheduler = Scheduler(
            pool, self._cache_root, max_requests=max_requests, chunk=chunk, max_waiting=max_waiting
        )
        # Where every rank has an engine of its own they must draft alike, and their clocks differ.
        timed = model.embed.group is None or ranks is not None
        self.stats, self._ids = Stats(), itertools.count()
        self.drafting = Drafting(self.runner, self.scheduler, self.skip_sets, timed=timed)
        parts = self.runner, self.scheduler, self.skip_sets, self.drafting
        self.pipeline = Pipeline(*parts, self.stats, as_verifier(verify), context)
        self.commit = Commit(*parts, self.stats, self.eos_ids)
        self.warmup = WarmUp(*parts, context)
        self.use_drafter(drafter, num_drafts)

    # -- requests in and out --------------------------------------------------------------------------------
    def add(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        adapter: str | None = None,
        deadline: float | None = None,
        checked: bool = False,
        wants_text: bool = True,
    ) -> Request:
        """Queue a prompt (text or token ids). `adapter`: a name in `adapters`; None: the base model. `deadline`, on the
        engine's clock, ends it unfinished. `checked`: the caller has validated the token ids and their number. Without
        `wants_text` outputs have tokens only, unless stop strings must be found."""
        request = self._request(prompt, sampling, adapter, checked, wants_text)
        request.deadline = deadline
        self.scheduler.add(request)
        return request

    def abort(self, request: Request) -> None:
        """End a request now; its blocks are free at once. A finished request is left as it is."""
        if request.finish_reason is None:
            self.commit.finish(request, "abort")

    def pause(self, request: Request) -> None:
        """Take a request out of the engine, between two steps; its blocks are free at once. Its text does not depend on
        this: `resume` continues it, mostly from the prefix cache."""
        if request.table is not None:
            request.num_preempted += 1
            self.stats.num_preemptions += 1
        self.scheduler.remove(request)
        self.drafting.release(request)

    def resume(self, request: Request) -> None:
        """Queue a paused request again."""
        self.scheduler.add(request)

    @property
    def adapters(self) -> AdapterBank:
        """To load and unload them, between two steps."""
        return self.runner.adapters

    @property
    def vocab_size(self) -> int:
        return self.model.spec.vocab_size

    @property
    def d_model(self) -> int:
        return self.model.spec.d_model

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
        self, drafter: Drafter | None, num_drafts: int | None = None, controller: DraftLengthController | None = None
    ) -> None:
        """From now on, while no request runs: another drafter, with a controller that knows it already or a new one."""
        self.drafting.use(drafter, num_drafts, controller)
        self.warmup.done = False

    @property
    def drafter(self) -> Drafter | None:
        return self.drafting.drafter

    @property
    def draft_controller(self) -> DraftLengthController | None:
        return self.drafting.controller

    @torch.no_grad()
    def limit_requests(self) -> int:
        """Compute fewer requests at the same time, where more would not give more tokens per second; returns how many.
        Measures steps: before the first request, and where this process alone computes them."""
        assert not self.busy
        self.runner.refresh()
        most = self.scheduler.max_requests
        self.scheduler.max_requests = choose_requests(most, self.drafting.profile, self.runner.device.type)
        return self.scheduler.max_requests

    def warm_up(self) -> None:
        """Capture and compile what requests would otherwise wait for (warmup.py). An engine with a draft-length
        controller does this in its first step at the latest; one for a single request then makes what that request
        needs, and the rest when it is needed."""
        self.warmup.run(KINDS, prefills=True)

    @property
    def num_graphs(self) -> int:
        """Graphs made so far, the drafter's included. A step in which this changes is no measure of time."""
        return self.drafting.num_graphs

    def forget_prefixes(self) -> None:
        """Drop the prefix cache, after the model's weights changed where the engine cannot see it."""
        self.cache.pool.forget()

    # -- other weights ----------------------------------------------------------------------------------------
    @property
    def version(self) -> WeightsVersion | None:
        """Of weights that came with `update_weights`; None: those that the model was loaded with."""
        return self.runner.version

    @torch.no_grad()
    def update_weights(
        self, target: WeightTarget, values: Values | PreparedWeights, version: WeightsVersion
    ) -> list[Output]:
        """Replace the weights between two steps, in place. The step in flight is completed first, and its outputs are
        returned. Requests that run keep their tokens; their keys and values are computed again with the new weights.
        `target` may also be a draft model's: drafts change then, texts do not.

        UserError, and nothing changed, for values that do not fit."""
        prepared = values if isinstance(values, PreparedWeights) else target.prepare(values)
        outputs = [output for step in self.pipeline.drain() for output in self._commit(self.pipeline.collect(step))]
        if target.model is not self.model:
            (runner,) = [r for r in self.drafting.runners() if r.model is target.model]
            self.drafting.release(*self.running, *self.waiting)  # what is known of their texts is the old weights'
            prepared.write_()
            runner.weights_written(version)
            return outputs
        if not self.runner.agree_on_weights(version):
            raise UpdateRefused(f"another process could not get the weights of {version}; nothing was changed", outputs)
        for request in reversed(self.running):
            self.scheduler.set_back(request)
            self.drafting.release(request)
        prepared.write_()
        self.runner.weights_written(version)
        return outputs

    def _request(
        self,
        prompt: Prompt,
        sampling: Sampling | None,
        adapter: str | None = None,
        checked: bool = False,
        wants_text: bool = True,
    ) -> Request:
        sampling = Sampling() if sampling is None else sampling
        if not isinstance(sampling, Sampling):
            raise UserError(f"sampling is {shown(sampling)}; give a Sampling, like Sampling(max_tokens=32)")
        tokens = encode_prompt(prompt, self.tokenizer)
        if not checked:
            check_prompt(tokens, self.model.spec.vocab_size, self.max_context)
        if sampling.stop and self.tokenizer is None:
            raise UserError(f"stop strings {sampling.stop} need a tokenizer; give the engine one")
        rule = rule_for(self.rule, sampling)
        if sampling.seed is None:
            sampling = replace(sampling, seed=secrets.randbits(63))
        stream = None
        if self.tokenizer is not None and (wants_text or sampling.stop):
            detokenizer = self.tokenizer.stream(shown=sampling.shown_special, after=tokens)
            stream = TextStream(detokenizer, sampling.stop)
        limit = min(len(tokens) + sampling.max_tokens, self.max_context)
        request = Request(tokens, len(tokens), sampling, next(self._ids), stream, rule, limit)
        request.adapter = None if adapter is None else self.adapters.get(adapter)
        self.skip_sets.admit(request)
        return request

    # -- the step -------------------------------------------------------------------------------------------
    # no_grad, not inference_mode: a sharded model keeps tensors that it makes here and trains on with them.
    @torch.no_grad()
    def step(self) -> list[Output]:
        """Compute one batch of rows; the requests that gained tokens or ended, in no particular order."""
        if not self.warmup.done and self.busy:
            self.warmup.before_first_step()
        outputs = self._expire()
        if self.scheduler.late:
            self.pipeline.rejoin()
        # Launched ahead, while the step before it was computed.
        launched: LaunchedStep | LogitsStep | None = self.pipeline.take()
        if launched is None:
            scheduled = self._schedule()
            if not scheduled.work:
                if self.scheduler.late:
                    self.pipeline.rejoin(IDLE_WAIT_S)
                return outputs
            prefills = bool(scheduled.admitted) or not all(r.ready for r, _ in scheduled.work)
            launched = self.pipeline.launch(scheduled.work, prefills)
        self.pipeline.run_ahead(launched)
        return outputs + self._commit(self.pipeline.collect(launched))

    def _schedule(self) -> ScheduledStep:
        """Drafts, and who computes how many rows."""
        if self.waiting and not self.running:
            self.runner.refresh()  # weights may change while no request runs
        self.drafting.propose()
        scheduled = self.scheduler.schedule()
        self._record_schedule(scheduled)
        return scheduled

    def _commit(self, collected: Collected) -> list[Output]:
        commit = self.commit.commit
        outputs = [commit(request, gained) for request, gained in collected.gains]
        if collected.failed:
            outputs += [self.commit.fail(request, error) for request, error in collected.failed]
        return outputs

    def _expire(self) -> list[Output]:
        now, outputs = self.clock(), []
        for request in [r for r in (*self.running, *self.waiting) if r.deadline is not None and now >= r.deadline]:
            before = len(request.text)
            self.commit.finish(request, "deadline")
            outputs.append(Output(request, [], request.text[before:], "deadline"))
        return outputs

    def _record_schedule(self, scheduled: ScheduledStep) -> None:
        self.stats.num_preemptions += len(scheduled.preempted)
        self.drafting.release(*scheduled.preempted)
        if scheduled.admitted and self.draft_controller is not None:
            self.draft_controller.requests_joined()
        for request in scheduled.admitted:
            if not request.versions or request.versions[-1][0] != self.version:
                note_version(request, self.version)
            self.stats.num_prefix_asked += len(request.tokens)
            self.stats.num_prefix_hits += request.num_computed
            if request.scheduled_at is None:
                request.num_cached, request.scheduled_at = request.num_computed, self.clock()
        self.stats.num_steps += bool(scheduled.work)
        self.stats.num_rows += sum(num for _, num in scheduled.work)

    # -- whole texts ----------------------------------------------------------------------------------------
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        adapters: Sequence[str | None] | None = None,
    ) -> list[Completion]:
        """Complete all prompts (one Sampling for all, or one each; an adapter or None for each), as many at once as
        there is room for. Raises the error of the first request that the engine had to end."""
        # All are checked before the first runs: a bad prompt does not cost the time of the good ones.
        asked = zip(prompts, samplings_for(prompts, sampling), adapters or [None] * len(prompts), strict=True)
        requests = [self._request(*each) for each in asked]
        self.waiting.extend(requests)  # the caller waits for all of them: max_waiting is not for it
        try:
            while any(r.finish_reason is None for r in requests):
                self.step()
        finally:
            for request in requests:
                self.abort(request)
        for request in requests:
            if request.error is not None:
                raise request.error
        return [completion_of(r) for r in requests]

    def stream(self, prompt: Prompt, sampling: Sampling | None = None, adapter: str | None = None) -> Iterator[str]:
        """Text pieces as they become certain. Closing the iterator aborts the request."""
        if self.tokenizer is None:
            raise UserError("streaming text needs a tokenizer; build the engine with one, or use add() and step()")
        return self._stream(self._request(prompt, sampling, adapter))  # errors come now, not at the first piece

    def _stream(self, request: Request) -> Iterator[str]:
        self.scheduler.add(request)
        sent = 0
        try:
            while True:
                if len(request.text) > sent:
                    piece, sent = request.text[sent:], len(request.text)
                    yield piece
                elif request.error is not None:
                    raise request.error
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
        adapter = "" if request.adapter is None else request.adapter.digest
        return self.runner.cache_root("" if request.skip is None else request.skip.id, adapter)


class Commit:
    """The tokens that a request gained are appended, its text grows, and it may end. Afterwards num_computed =
    len(tokens) - 1 and there are no drafts; what was computed for wrong ones is overwritten."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        skip_sets: SkipSets,
        drafting: Drafting,
        stats: Stats,
        eos_ids: Set[int],
    ) -> None:
        self._runner, self._scheduler, self._skip_sets = runner, scheduler, skip_sets
        self._drafting, self._stats, self.eos_ids = drafting, stats, eos_ids
        self._pool = runner.cache.pool

    def commit(self, request: Request, gained: list[int]) -> Output:
        if len(gained) == 1 and gained[0] != NO_TOKEN and request.draft is NO_DRAFT and request.similarity is None:
            return self._commit_token(request, gained)
        num_drafted, num_accepted = len(request.drafts), len(gained) - 1
        before, num_before = len(request.text), len(request.tokens)
        reason: FinishReason | None = None
        for token in gained:
            if token == NO_TOKEN:
                request.error, reason = NonFiniteLogits(len(request.tokens)), "error"
                break
            request.tokens.append(token)
            reason = self._after_token(request, token)
            if reason is not None:
                break
        kept = request.tokens[num_before:]
        request.num_computed = len(request.tokens) - 1
        request.draft = NO_DRAFT
        if request.similarity is not None:
            self._skip_sets.observe(request)
        if reason == "error":
            self._discard_nonfinite(request)
        else:
            seal(self._pool, request)
        self._stats.count(num_drafted, num_accepted, len(kept))
        if num_drafted and self._drafting.controller is not None:
            self._drafting.controller.record_acceptance(num_drafted, num_accepted)
        if num_drafted and self._drafting.drafter is not None:
            self._drafting.drafter.observe(request, num_drafted, num_accepted)
        if reason is not None:
            self.finish(request, reason)
        return Output(request, kept, request.text[before:], reason, min(num_accepted, len(kept)))

    def _commit_token(self, request: Request, gained: list[int]) -> Output:
        """`commit` of one token without drafts: what most texts have in most steps, so every operation counts."""
        tokens, table, before = request.tokens, request.table, len(request.text)
        request.num_computed = len(tokens)
        tokens.append(gained[0])
        reason = self._after_token(request, gained[0])
        pool = self._pool
        if pool.prefix_cache and table is not None and request.num_computed // pool.block_size > len(table.hashes):
            seal(pool, request)
        self._stats.num_new_tokens += 1
        if reason is not None:
            self.finish(request, reason)
        return Output(request, gained, request.text[before:], reason)

    def _discard_nonfinite(self, request: Request) -> None:
        """Its keys and values may hold NaN, too. No request may begin with its prefix; and requests that get its blocks
        may multiply what they have not overwritten yet by 0, which NaN survives."""
        assert request.table is not None
        self._runner.discard_nonfinite(request.table.blocks)
        self._pool.forget()

    def _after_token(self, request: Request, token: int) -> FinishReason | None:
        """Append the token's text; why the request ends with this token, if it does."""
        if token in self.eos_ids and not request.sampling.ignore_eos:
            return "stop"
        if request.text_stream is not None:
            request.text += request.text_stream.push(token)
            if request.text_stream.stopped:
                return "stop"
        return "length" if request.room == 0 else None

    def fail(self, request: Request, error: UserError) -> Output:
        request.error, before = error, len(request.text)
        self.finish(request, "error")
        return Output(request, [], request.text[before:], "error")

    def finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        if request.text_stream is not None:
            request.text += request.text_stream.flush()
        self._scheduler.remove(request)
        if not self._scheduler.running:
            self._drafting.interrupt()
        self._drafting.release(request)


class UpdateRefused(UserError):
    """The weights stay as they are; `outputs` are of the step that was completed before that was known."""

    def __init__(self, message: str, outputs: list[Output]) -> None:
        super().__init__(message)
        self.outputs = outputs
