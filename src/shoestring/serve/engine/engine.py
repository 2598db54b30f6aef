"""The engine: many requests, one step rule.

A request has `tokens` (committed), `drafts` (proposed, not verified) and `num_computed <= len(tokens)`: the number of
positions whose keys and values are valid. A step computes rows of [num_computed, len(tokens) + len(drafts)), as many as
the row budget allows. Rows that stop short of the last committed token only move `num_computed`. Rows that reach it are
verified: the new tokens are appended, num_computed = len(tokens) - 1, drafts = []. Prefill, chunked prefill, prefix
hits, decoding, speculation, its roll-back and recomputation after a preemption are all this one rule; plain decoding
has no drafts.

One decode step, by file: scheduler.py decides who computes how many rows (block_pool.py has the blocks), runner.py
launches the forward (graphs.py replays it), speculative/verify.py decides what each request gains, and `_commit` here
appends it. A step whose tokens are chosen on the device is launched before the tokens of the step before it are known
on the host (`_run_ahead`). speculative/draft_length.py decides how much is drafted.

No module-level state: several engines (a target and its drafter, say) live in one process.
Left out: a server loop. One thread owns the engine and calls add, abort and step; nothing here locks.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from shoestring.errors import UserError, shown, suggest
from shoestring.kernels.gemv.embed_argmax import NO_TOKEN
from shoestring.model.skip import SkipSet
from shoestring.model.spec import ModelSpec
from shoestring.model.transformer import Decoder
from shoestring.serve.engine.block_pool import BlockPool, BlockTable, RowSpan
from shoestring.serve.engine.capacity import choose_requests
from shoestring.serve.engine.graphs import GROUPED_REQUESTS, DeviceDraft, PendingTokens, SamplingKind, sampling_kind
from shoestring.serve.engine.request import (
    NO_DRAFT,
    Completion,
    Draft,
    FinishReason,
    IncrementalDetokenizer,
    NonFiniteLogits,
    Output,
    PendingDrafts,
    Request,
    Stats,
    TextStream,
    completion_of,
)
from shoestring.serve.engine.runner import Batch, Runner
from shoestring.serve.engine.sampling import Sampling
from shoestring.serve.engine.scheduler import ScheduledStep, Scheduler
from shoestring.serve.engine.skip_policy import FfnSimilarity, SkipPolicy, SkipSets, Work
from shoestring.serve.engine.tensor_parallel import LeadRunner, Ranks
from shoestring.serve.engine.warmup import KINDS, compile_ahead, warm_up_drafting, warm_up_steps
from shoestring.serve.engine.weight_update import PreparedWeights, Values, WeightTarget
from shoestring.serve.speculative.draft_length import DraftLengthController, Prospects
from shoestring.serve.speculative.drafter import Drafter
from shoestring.serve.speculative.layer_skip_drafter import add_layer_skip
from shoestring.serve.speculative.verify import (
    RULES,
    Check,
    RuleName,
    Verifier,
    Verify,
    accept,
    as_verifier,
    rule_for,
    verify,
)
from shoestring.state.reshard.version import WeightsVersion

__all__ = ["Completion", "Drafter", "Engine", "Output", "Prompt", "Request", "Stats", "TextCodec"]

LATE_WAIT_S = 0.005  # that a step waits for what its verification lacks before it leaves a request out
IDLE_WAIT_S = 0.02  # that a step waits where every request lacks something
HOLD_FROM, HOLD_STEPS = 64, 4  # texts that run; steps for which others are held back, to read their prompts together
ENDING_SHARE = 16  # texts of a step launched ahead of which one may be known to end before it
FIXED_DRAFTS = 4  # per request and step, where lengths cannot be chosen by measured time

Prompt = str | Sequence[int]


class TextCodec(Protocol):
    """The part of `model.tokenizer.Tokenizer` that the engine uses."""

    eos_ids: set[int]

    def encode(self, text: str) -> list[int]: ...
    def stream(self, *, shown: frozenset[int], after: Sequence[int]) -> IncrementalDetokenizer: ...


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
        self.rule, self.verify, self.clock = rule, as_verifier(verify), clock
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
        self._timed = model.embed.group is None or ranks is not None
        self.use_drafter(drafter, num_drafts)
        self.stats, self._ids = Stats(), itertools.count()
        self._ahead: deque[LaunchedStep] = deque()  # the next steps, launched before the last one was completed
        self._num_held = 0  # steps launched ahead although requests wait, since the last admission
        self._proposal = Proposal()  # drafts of the next step
        self._num_graphs = 0  # when the last step ended
        self._ended: float | None = None  # when the last step ended; None: no decode step follows it at once

    # -- requests in and out --------------------------------------------------------------------------------
    def add(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        deadline: float | None = None,
        checked: bool = False,
        wants_text: bool = True,
    ) -> Request:
        """Queue a prompt (text or token ids). `deadline`, on the engine's clock, ends it unfinished. `checked`: the
        caller has validated the token ids and their number. Without `wants_text` outputs have tokens only, unless stop
        strings must be found."""
        request = self._request(prompt, sampling, checked, wants_text)
        request.deadline = deadline
        self.scheduler.add(request)
        return request

    def abort(self, request: Request) -> None:
        """End a request now; its blocks are free at once. A finished request is left as it is."""
        if request.finish_reason is None:
            self._finish(request, "abort")

    def pause(self, request: Request) -> None:
        """Take a request out of the engine, between two steps; its blocks are free at once. Its text does not depend on
        this: `resume` continues it, mostly from the prefix cache."""
        if request.table is not None:
            request.num_preempted += 1
            self.stats.num_preemptions += 1
        self.scheduler.remove(request)
        if self.drafter is not None:
            self.drafter.release(request)

    def resume(self, request: Request) -> None:
        """Queue a paused request again."""
        self.scheduler.add(request)

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
    def _stepping(self) -> list[Request]:
        """The running requests that do not sit out."""
        late = self.scheduler.late
        return [r for r in self.running if r not in late] if late else self.running

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def use_drafter(
        self, drafter: Drafter | None, num_drafts: int | None = None, controller: DraftLengthController | None = None
    ) -> None:
        """From now on, while no request runs: another drafter, with a controller that knows it already or a new one."""
        assert not self.scheduler.running, "requests are running with the drafter they began with"
        if drafter is not None:
            drafter.check(self.model)
        self.drafter, self.draft_controller, self._prepared = drafter, None, False
        self.num_drafts = FIXED_DRAFTS if num_drafts is None else num_drafts
        if num_drafts is None and drafter is not None and self._timed:
            self.draft_controller = controller or DraftLengthController(
                self._profile, known_acceptance=drafter.known_acceptance
            )

    @torch.no_grad()
    def limit_requests(self) -> int:
        """Compute fewer requests at the same time, where more would not give more tokens per second; returns how many.
        Measures steps: before the first request, and where this process alone computes them."""
        assert not self.busy
        self.runner.refresh()
        most = self.scheduler.max_requests
        self.scheduler.max_requests = choose_requests(most, self._profile, self.runner.device.type)
        return self.scheduler.max_requests

    def warm_up(self) -> None:
        """Capture and compile what requests would otherwise wait for (warmup.py). An engine with a draft-length
        controller does this in its first step at the latest; one for a single request then makes what that request
        needs, and the rest when it is needed."""
        self._warm_up(KINDS, prefills=True)

    @torch.no_grad()
    def _warm_up(self, kinds: Sequence[SamplingKind], *, prefills: bool) -> None:
        sizes = self.scheduler.max_requests, self.max_context, self.chunk
        lengths = self.draft_controller.lengths if self.draft_controller else ()
        self._compile_ahead(kinds, lengths, prefills)
        warm_up_steps(self.runner, *sizes, lengths, self.skip_sets.usual, kinds, prefills, self.drafter is None)
        if self.draft_controller is not None:
            warm_up_drafting(self.runner, self.drafter, self.draft_controller, *sizes, kinds, prefills)
        self._num_graphs, self._prepared = self.num_graphs, True

    def _compile_ahead(self, kinds: Sequence[SamplingKind], lengths: Sequence[int] | None, prefills: bool) -> None:
        drafters = () if self.drafter is None else self.drafter.runners()
        most = self.scheduler.max_requests
        compile_ahead(
            self.runner, drafters, most, kinds, lengths, self.skip_sets.usual, prefills, grouped=self.drafter is None
        )

    def _prepare(self) -> None:
        """Before the first step, where nobody has warmed up."""
        kind = sampling_kind([r.sampling for r in (*self.waiting, *self.running)])
        if self.draft_controller is None:
            self._compile_ahead([kind], None, prefills=False)
            self._prepared = True
        else:
            alone = self.scheduler.max_requests == 1
            self._warm_up([kind] if alone else KINDS, prefills=not alone)

    @property
    def num_graphs(self) -> int:
        """Graphs made so far, the drafter's included. A step in which this changes is no measure of time."""
        return self.runner.num_graphs + (0 if self.drafter is None else self.drafter.num_graphs)

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
        outputs = self._land()
        if target.model is not self.model:
            self._update_drafter(target, prepared, version)
            return outputs
        if not self.runner.agree_on_weights(version):
            raise UpdateRefused(f"another process could not get the weights of {version}; nothing was changed", outputs)
        for request in reversed(self.running):
            self.scheduler.set_back(request)
            if self.drafter is not None:
                self.drafter.release(request)
        prepared.write_()
        self.runner.weights_written(version)
        return outputs

    def _update_drafter(self, target: WeightTarget, prepared: PreparedWeights, version: WeightsVersion) -> None:
        assert self.drafter is not None
        (runner,) = [r for r in self.drafter.runners() if r.model is target.model]
        for request in (*self.running, *self.waiting):
            self.drafter.release(request)  # what it has computed of their texts is the old weights'
        prepared.write_()
        runner.weights_written(version)

    def _land(self) -> list[Output]:
        """Complete the steps that were launched ahead: nothing is in flight afterwards."""
        outputs: list[Output] = []
        while self._ahead:
            outputs += self._complete(self._ahead.popleft())
        return outputs

    def _request(
        self, prompt: Prompt, sampling: Sampling | None, checked: bool = False, wants_text: bool = True
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
        request = Request(tokens, len(tokens), sampling, next(self._ids), stream, rule)
        self.skip_sets.admit(request)
        return request

    # -- the step -------------------------------------------------------------------------------------------
    # no_grad, not inference_mode: a sharded model keeps tensors that it makes here and trains on with them.
    @torch.no_grad()
    def step(self) -> list[Output]:
        """Compute one batch of rows; the requests that gained tokens or ended, in no particular order."""
        if not self._prepared and self.busy:
            self._prepare()
        outputs = self._expire()
        if self.scheduler.late:
            self._rejoin()
        launched = self._ahead.popleft() if self._ahead else None
        if launched is None or not any(launched.alive):
            self._ahead.clear()  # all of the same requests
            if self.waiting and not self.running:
                self.runner.refresh()  # weights may change while no request runs
            self._propose()
            scheduled = self.scheduler.schedule()
            self._record_schedule(scheduled)
            if not scheduled.work:
                if self.scheduler.late:
                    self._rejoin(IDLE_WAIT_S)
                return outputs
            prefills = bool(scheduled.admitted) or not all(r.ready for r, _ in scheduled.work)
            if prefills:
                self._ended = None  # not the time of a decode step
            began = time.perf_counter()
            launched = self._launch(scheduled.work, began, prefills)
            if launched is None:
                self._proposal.settle(self.draft_controller)
                return outputs + self._compute(scheduled.work, began, prefills)
        self._run_ahead(launched)
        return outputs + self._complete(launched)

    def _compute(self, work: Work, began: float, prefills: bool) -> list[Output]:
        """A step that needs logits on the host, or that verifies nothing."""
        self.verify.prepare([check_for(r) for r, _ in split_by_completion(work)[0]])
        logits_RV, reached, similarities = self._forward(work)
        logits_RV, checked, failed = self._leave_out_late(logits_RV, reached)
        gained: list[list[int]] = []
        if checked:
            gained = self.verify(logits_RV, [check_for(r) for r in checked])
        if self.draft_controller is not None and checked:
            num_rows = sum(num for _, num in work)
            self._record_time(num_rows, began, sum(map(len, gained)), prefills=prefills)
        for similarity in similarities:
            num_gained = {r.id: len(new) for r, new in zip(checked, gained, strict=True)}
            similarity.count({r.id: num_gained.get(r.id, 0) for r in reached})
        committed = [self._commit(r, new) for r, new in zip(checked, gained, strict=True)]
        return committed + [self._fail(r, error) for r, error in failed]

    def _leave_out_late(
        self, logits_RV: Tensor, reached: list[Request]
    ) -> tuple[Tensor, list[Request], list[tuple[Request, UserError]]]:
        """The rows that can be verified now, their requests, and the requests that cannot go on. Of the others, drafts
        are cut, or the request sits out: its last row will be computed again. Nothing of that changes a text."""
        ready = self.verify.ready_rows([check_for(r) for r in reached], LATE_WAIT_S)
        if ready == [1 + len(r.drafts) for r in reached]:
            return logits_RV, reached, []
        rows: list[int] = []
        checked: list[Request] = []
        failed: list[tuple[Request, UserError]] = []
        first = 0
        for request, num in zip(reached, ready, strict=True):
            num_rows, draft = 1 + len(request.drafts), request.draft
            if isinstance(num, UserError):
                failed.append((request, num))
            elif num == 0:
                self.scheduler.late.add(request)
                request.draft, request.num_computed = NO_DRAFT, len(request.tokens) - 1
            else:
                checked.append(request)
                rows += range(first, first + num)
                if num < num_rows:
                    probs_GV = None if draft.probs_GV is None else draft.probs_GV[: num - 1]
                    request.draft = Draft(draft.tokens[: num - 1], probs_GV)
            first += num_rows
        return logits_RV[torch.tensor(rows, device=logits_RV.device, dtype=torch.int64)], checked, failed

    def _rejoin(self, wait_s: float = 0.0) -> None:
        """Let those late requests compute again whose next token can be chosen, or that cannot go on."""
        late = [r for r in self.running if r in self.scheduler.late]
        ready = self.verify.ready_rows([check_for(r) for r in late], wait_s)
        self.scheduler.late = {r for r, num in zip(late, ready, strict=True) if num == 0}

    # -- steps whose tokens are chosen on the device --------------------------------------------------------
    def _launch(self, work: Work, began: float, prefills: bool) -> LaunchedStep | None:
        """Launch a step that needs no logits on the host: the device chooses a token after every text that is complete
        by then. None where that is not possible."""
        complete, others = split_by_completion(work)
        requests = [r for r, _ in complete]
        checks = [check_for(r) for r in requests]
        groups = self.skip_sets.groups([*complete, *others])
        if self.verify.needs_logits(checks) or self.skip_sets.similarity_for(work) or len(groups) > 1:
            return None
        ((skip, ordered),) = groups
        batch, samplings = build_batch(ordered)[0], [r.sampling for r in requests]
        pending = self.runner.launch_decode(batch, samplings, skip)
        if pending is None and not any(r.drafts for r in requests):
            pending = self.runner.launch_prefill(batch, samplings, skip)
        if pending is None:
            return None
        self._advance_prefills(others)
        return LaunchedStep(requests, [r.table for r in requests], checks, skip, pending, began, prefills=prefills)

    def _run_ahead(self, launched: LaunchedStep) -> None:
        """Launch the next steps before the tokens of `launched` are known on the host, if only those tokens could
        change them: they read them on the device. A row of a request that turns out to have ended is wasted. Where few
        do, so is that of one that is known to end with a pending token, and the place of one that has ended stays
        empty. Short steps are launched several at a time, as soon as those before them have begun."""
        if len(self._ahead) >= launched.num_together:
            return
        requests, alive = launched.requests, launched.alive
        num_alive = sum(alive)
        if num_alive != len(self._stepping) or not self._may_hold(num_alive):
            return
        if any(r.draft is not NO_DRAFT for r in requests) or self._drafts_next():
            return
        num_coming = 1 + len(self._ahead)  # tokens that a request gains before the first of the new steps
        places = list(zip(requests, launched.tables, alive, strict=True))
        rooms = [self._room(r) - num_coming for r, _, lives in places if lives]
        spans, samplings = next_spans(places, num_coming), [r.sampling for r in requests]
        num_steps = 1
        if self.draft_controller is None and len(requests) <= GROUPED_REQUESTS:
            num_steps = self.runner.steps_per_launch(spans, samplings, launched.skip)
        for num in sorted({num_steps, 1}, reverse=True):
            num_wasted = len(requests) - num_alive + sum(room < num for room in rooms)
            if num_wasted <= len(requests) // ENDING_SHARE and self._make_room(places, num_coming + num):
                began = time.perf_counter()
                for pending in self.runner.launch_next(spans, samplings, launched.skip, num):
                    step = LaunchedStep(
                        requests, launched.tables, None, launched.skip, pending, began, num_together=num
                    )
                    self._ahead.append(step)
                self.stats.num_steps += num
                self.stats.num_rows += num * num_alive
                return

    def _make_room(self, places: Sequence[tuple[Request, BlockTable | None, bool]], num: int) -> bool:
        """Blocks for so many more tokens of each request but the last; False also where its skip set may change."""
        for request, table, lives in places:
            if lives:
                assert table is not None
                known = len(request.tokens)
                if known + num - 1 > self.max_context or request.until_switch(known - 1) is not None:
                    return False
                if not self.cache.pool.grow(table, known + num - 1):
                    return False
        return True

    def _may_hold(self, num_running: int) -> bool:
        """Whether nobody waits to be admitted, or may wait for a few steps more. A step that reads prompts is not
        launched ahead: the device idles meanwhile. Among many texts one ends and another comes in almost every step,
        so prompts are read together, as many as fill a step, at least every HOLD_STEPS (counted here)."""
        if not self.scheduler.admits:
            return True
        self._num_held += 1
        if num_running < HOLD_FROM or self._num_held > HOLD_STEPS:
            return False
        room, rows = self.chunk - num_running, 0
        for request in itertools.islice(self.waiting, room):
            rows += len(request.tokens)
            if rows >= room:
                return False
        return True

    def _drafts_next(self) -> bool:
        """Whether the next step of the running requests would have drafts."""
        if self.drafter is None or not self.num_drafts:
            return False
        return self.draft_controller is None or self.draft_controller.would_draft(len(self._stepping), self.prospects)

    def _complete(self, launched: LaunchedStep) -> list[Output]:
        """Wait for the tokens of a launched step and commit them to the requests that still run."""
        if not launched.requests:
            return []  # a chunk of a prompt: nothing to wait for
        targets, alive, checks = launched.pending.tokens(), launched.alive, launched.checks
        if checks is None:
            return self._complete_ahead(launched, targets, alive)
        if self._proposal.pending:
            self._proposal.settle(self.draft_controller)  # the drafts are known only now
            pairs = zip(launched.requests, alive, checks, strict=True)
            checks = [check_for(r) if lives else check for r, lives, check in pairs]
        gains = [
            (request, check, accept(check.drafts, found) if check.drafts else found)
            for request, check, found, lives in zip(launched.requests, checks, targets, alive, strict=True)
            if lives
        ]
        if self.draft_controller is not None and gains:
            num_gained = sum(len(new) for _, _, new in gains)
            self._record_time(sum(map(len, targets)), launched.began, num_gained, prefills=launched.prefills)
        self.verify.note_gained([check for _, check, _ in gains], [new for _, _, new in gains])
        return [self._commit(request, new) for request, _, new in gains]

    def _complete_ahead(self, launched: LaunchedStep, targets: list[list[int]], alive: list[bool]) -> list[Output]:
        """`_complete` of a step that was launched ahead, thus without drafts."""
        gains = [(r, new) for r, new, lives in zip(launched.requests, targets, alive, strict=True) if lives]
        if self.draft_controller is not None and gains:
            self._record_time(sum(map(len, targets)), launched.began, len(gains), ahead=True)
        if self.verify.notes_gains:
            self.verify.note_gained([check_for(r) for r, _ in gains], [new for _, new in gains])
        return [self._commit(request, new) for request, new in gains]

    def _record_time(
        self, num_rows: int, began: float, num_gained: int, *, ahead: bool = False, prefills: bool = False
    ) -> None:
        """Report the time of a step to the controller: from the end of the step before to its own, without drafting."""
        assert self.draft_controller is not None
        now, num_graphs = time.perf_counter(), self.num_graphs
        if self._ended is not None:  # also if the step was launched before that end
            began = self._ended + self.draft_controller.step.draft_seconds
        usual = num_graphs == self._num_graphs and not prefills
        # Before the controller may measure a pass, which resets `_ended` (`_profile`).
        self._ended, self._num_graphs = now, num_graphs
        if usual:
            self.draft_controller.record_step(num_rows, max(now - began, 1e-9), num_gained, ahead=ahead)
        else:
            self.draft_controller.discard_step()

    def _expire(self) -> list[Output]:
        now, outputs = self.clock(), []
        for request in [r for r in (*self.running, *self.waiting) if r.deadline is not None and now >= r.deadline]:
            before = len(request.text)
            self._finish(request, "deadline")
            outputs.append(Output(request, [], request.text[before:], "deadline"))
        return outputs

    def _propose(self) -> None:
        if self.drafter is None or not self.num_drafts or not self.running:
            return
        n = self.num_drafts
        if self.draft_controller is not None:
            calm = not self.scheduler.admits and all(r.ready for r in self.running)
            n = self.draft_controller.choose(len(self._stepping), self.prospects) if calm else 0
        ready = [r for r in self._stepping if r.ready and self._room(r) > 1] if n else []
        if not ready:
            return
        asked = ready if self.draft_controller is None else self.draft_controller.drafted_requests(ready)
        began = time.perf_counter()
        drafts = self.drafter.propose(asked, n)
        usual = self.num_graphs == self._num_graphs and not self.drafter.caught_up
        self._proposal = Proposal(drafts, n, time.perf_counter() - began, usual)
        if not self._proposal.pending:
            self._proposal.settle(self.draft_controller)
        for request, draft in zip(asked, drafts, strict=True):
            # Of the tokens that still fit, the last is always the target's own.
            request.draft = draft.cut(min(n, self._room(request) - 1))
            vocab = self.model.spec.vocab_size
            known = draft.pending is None  # those of a device come later
            assert not known or all(0 <= t < vocab for t in request.drafts), "draft outside the vocabulary"
            if self.draft_controller is not None:
                self.draft_controller.record_offer(min(n, self._room(request) - 1), len(request.drafts))

    def prospects(self) -> Prospects:
        """For the draft-length controller, about the running requests that may gain more than one token: drafts that
        the row budget and a text have room for, tokens that a text may still gain on average, and whether the drafter
        has to read texts first."""
        rooms = {r: num for r in self._stepping if (num := self._room(r)) > 1}
        if not rooms:
            return Prospects(0, 0.0)
        limit = max(0, min(self.chunk // len(self._stepping), max(rooms.values())) - 1)
        found = Prospects(limit, sum(rooms.values()) / len(rooms))
        if self.drafter is None:
            return found
        return found._replace(is_behind=partial(self.drafter.is_behind, list(rooms)))

    def _room(self, request: Request) -> int:
        """How many tokens the request may still gain."""
        return min(request.num_prompt + request.sampling.max_tokens, self.max_context) - len(request.tokens)

    def _record_schedule(self, scheduled: ScheduledStep) -> None:
        for request in scheduled.preempted:
            self.stats.num_preemptions += 1
            if self.drafter is not None:
                self.drafter.release(request)
        if scheduled.admitted and self.draft_controller is not None:
            self.draft_controller.requests_joined()
        self._num_held = 0
        for request in scheduled.admitted:
            if not request.versions or request.versions[-1][0] != self.version:
                note_version(request, self.version)
            self.stats.num_prefix_asked += len(request.tokens)
            self.stats.num_prefix_hits += request.num_computed
            if request.scheduled_at is None:
                request.num_cached, request.scheduled_at = request.num_computed, self.clock()
        self.stats.num_steps += bool(scheduled.work)
        self.stats.num_rows += sum(num for _, num in scheduled.work)

    def _forward(self, work: Work) -> tuple[Tensor, list[Request], list[FfnSimilarity]]:
        """Logits of the rows to verify, the requests they belong to, and similarities that a skip policy wants; one
        pass for each skip set. Moves num_computed of the other requests."""
        logits, checked, similarities = [], [], []
        for skip, part in self.skip_sets.groups(work):
            batch, requests = build_batch(part)
            similarity = self.skip_sets.similarity_for(part)
            watch = None if similarity is None else similarity.watch
            logits.append(self.runner.forward(batch, skip, watch))
            checked += requests
            similarities += [] if similarity is None else [similarity]
        self._advance_prefills(work)
        return logits[0] if len(logits) == 1 else torch.cat(logits), checked, similarities

    def _advance_prefills(self, work: Work) -> None:
        for request, num in work:
            if not request.ready:  # for the others `_commit` does both
                request.num_computed = min(request.num_computed + num, len(request.tokens) - 1)
                self._seal(request)

    def _commit(self, request: Request, gained: list[int]) -> Output:
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
            self.skip_sets.observe(request)
        if reason == "error":
            self._discard_nonfinite(request)
        else:
            self._seal(request)
        self.stats.count(num_drafted, num_accepted, len(kept))
        if num_drafted and self.draft_controller is not None:
            self.draft_controller.record_acceptance(num_drafted, num_accepted)
        if num_drafted and self.drafter is not None:
            self.drafter.observe(request, num_drafted, num_accepted)
        if reason is not None:
            self._finish(request, reason)
        return Output(request, kept, request.text[before:], reason, min(num_accepted, len(kept)))

    def _commit_token(self, request: Request, gained: list[int]) -> Output:
        """`_commit` of one token without drafts: what most texts have in most steps, so every operation counts."""
        tokens, table, before = request.tokens, request.table, len(request.text)
        request.num_computed = len(tokens)
        tokens.append(gained[0])
        reason = self._after_token(request, gained[0])
        pool = self.cache.pool
        if pool.prefix_cache and table is not None and request.num_computed // pool.block_size > len(table.hashes):
            self._seal(request)
        self.stats.num_new_tokens += 1
        if reason is not None:
            self._finish(request, reason)
        return Output(request, gained, request.text[before:], reason)

    def _discard_nonfinite(self, request: Request) -> None:
        """Its keys and values may hold NaN, too. No request may begin with its prefix; and requests that get its blocks
        may multiply what they have not overwritten yet by 0, which NaN survives."""
        assert request.table is not None
        self.runner.discard_nonfinite(request.table.blocks)
        self.forget_prefixes()

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

    def _fail(self, request: Request, error: UserError) -> Output:
        request.error, before = error, len(request.text)
        self._finish(request, "error")
        return Output(request, [], request.text[before:], "error")

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
        """Complete all prompts (one Sampling for all, or one each), as many at once as there is room for. Raises the
        error of the first request that the engine had to end."""
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
        for request in requests:
            if request.error is not None:
                raise request.error
        return [completion_of(r) for r in requests]

    def stream(self, prompt: Prompt, sampling: Sampling | None = None) -> Iterator[str]:
        """Text pieces as they become certain. Closing the iterator aborts the request."""
        if self.tokenizer is None:
            raise UserError("streaming text needs a tokenizer; build the engine with one, or use add() and step()")
        return self._stream(self._request(prompt, sampling))  # errors come now, not at the first piece

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
        return self.runner.cache_root("" if request.skip is None else request.skip.id)

    def _profile(self, rows: int) -> float:
        """Seconds of a target pass over this many rows; the requests' cache is not touched."""
        self._ended = None  # measuring is not part of a step
        return self.runner.measure_seconds(rows, self.skip_sets.usual)


# -- one step's work ----------------------------------------------------------------------------------------


def build_batch(work: Work) -> tuple[Batch, list[Request]]:
    """The rows of a step, and the requests that it verifies."""
    tokens: list[int] = []
    rows: list[int] = []
    spans: list[RowSpan] = []
    checked: list[Request] = []
    device_drafts: list[DeviceDraft] = []
    for request, num in work:
        assert request.table is not None
        drafts, pending = request.draft.tokens, request.draft.pending
        start, stop, last = request.num_computed, request.num_computed + num, len(request.tokens) - 1
        if stop > last:
            checked.append(request)
            first_row = len(tokens) + last - start
            rows.extend(range(first_row, first_row + 1 + len(drafts)))
        tokens += request.tokens[start:stop]
        tokens += drafts[: max(0, stop - last - 1)]
        if pending is not None and drafts and drafts[0] < 0:
            device_drafts.append((len(spans), pending.tokens_NG, request.draft.row, len(drafts)))
        spans.append(RowSpan(request.table.blocks, start, num))
    return Batch(spans, tokens, rows, device_drafts), checked


def split_by_completion(work: Work) -> tuple[Work, Work]:
    """Requests whose rows reach the end of their text and thus gain a token, and the others."""
    parts: tuple[Work, Work] = [], []
    for request, num in work:
        parts[request.num_computed + num < len(request.tokens)].append((request, num))
    return parts


def check_for(request: Request) -> Check:
    draft, position = request.draft, len(request.tokens)
    return Check(tuple(draft.tokens), position, request.sampling, draft.probs_GV, request.rule)


def next_spans(places: Sequence[tuple[Request, BlockTable | None, bool]], num_coming: int) -> list[RowSpan]:
    """A row behind so many pending tokens of each request, with its table; none for those that have ended."""
    spans = []
    for request, table, lives in places:
        assert table is not None
        start = len(request.tokens) + num_coming - 1
        spans.append(RowSpan(table.blocks, start, 1) if lives else RowSpan(table.blocks, 0, 0))
    return spans


class UpdateRefused(UserError):
    """The weights stay as they are; `outputs` are of the step that was completed before that was known."""

    def __init__(self, message: str, outputs: list[Output]) -> None:
        super().__init__(message)
        self.outputs = outputs


def note_version(request: Request, version: WeightsVersion | None) -> None:
    """From its next token on, the request is written by these weights."""
    first = len(request.new_tokens)
    request.versions = [(v, n) for v, n in request.versions if n < first] + [(version, first)]


class Proposal:
    """The drafts of a step, and which of them are still on the device."""

    def __init__(
        self, drafts: Sequence[Draft] = (), num_each: int = 0, seconds: float = 0.0, usual: bool = True
    ) -> None:
        """`seconds` that `propose` took; not `usual`: they say nothing about the next time."""
        self._usual = usual
        self._num, self._each, self._seconds = len(drafts), num_each, seconds
        found = {id(d.pending): d.pending for d in drafts if d.pending is not None}
        self.pending: list[PendingDrafts] = list(found.values())

    def settle(self, controller: DraftLengthController | None) -> None:
        """Wait for the drafts, and report once to the controller how long they took."""
        pending, self.pending = self.pending, []
        for drafts in pending:
            drafts.resolve()
        if controller is not None and self._each:
            took = max(self._seconds, sum(d.seconds for d in pending))
            controller.record_drafting(self._num, self._each, took, caught_up=not self._usual)
        self._each = 0


@dataclass(frozen=True)
class LaunchedStep:
    """A step that the device is computing: its requests as they were, and where their tokens will be."""

    requests: list[Request]
    tables: list[BlockTable | None]
    checks: list[Check] | None  # None: launched ahead, before the tokens of the step before it were known; no drafts
    skip: SkipSet | None
    pending: PendingTokens
    began: float
    prefills: bool = False  # its time says nothing about a decode step
    num_together: int = 1  # steps of the same launch

    @property
    def alive(self) -> list[bool]:
        """Which of the requests still run and have not been preempted since."""
        return [r.finish_reason is None and r.table is t for r, t in zip(self.requests, self.tables, strict=True)]


# -- checks of what the engine is given -----------------------------------------------------------------------


def encode_prompt(prompt: Prompt, tokenizer: TextCodec | None) -> list[int]:
    if not isinstance(prompt, str):
        try:
            return [int(t) for t in prompt]
        except (TypeError, ValueError):
            raise UserError(f"a prompt is one text or a list of token ids, not {shown(prompt)}") from None
    if tokenizer is None:
        raise UserError("a text prompt needs a tokenizer, and this model came without one; give token ids")
    return tokenizer.encode(prompt)


def check_prompt(tokens: Sequence[int], vocab: int, max_context: int) -> None:
    """Raise UserError unless the engine can continue these tokens."""
    if not tokens:
        raise UserError("the prompt is empty; give at least one token to continue from")
    if len(tokens) >= max_context:
        raise UserError(
            f"the prompt has {len(tokens)} tokens, but the context holds {max_context}, the first "
            f"new one included; shorten it to {max_context - 1} tokens, or give more context (max_context, "
            "num_blocks) where the model reads more"
        )
    bad = next((t for t in tokens if not 0 <= t < vocab), None)
    if bad is not None:
        raise UserError(
            f"token id {bad} is outside the vocabulary of {vocab} (0 to {vocab - 1}); "
            "encode the prompt with this model's own tokenizer"
        )


def eos_ids_of(model: Decoder, tokenizer: TextCodec | None) -> set[int]:
    ids = set() if tokenizer is None else set(tokenizer.eos_ids)
    return ids | set(model.spec.eos_ids)


def check_least(*, least: int = 1, **values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < least:
            raise UserError(f"{name}={value} is not allowed; give {least} or more")


def check_rule(rule: str) -> None:
    if rule not in ("auto", *RULES):
        raise UserError(
            f"rule={rule!r} is not known; give coupled, token, block or auto." + suggest(rule, ["auto", *RULES])
        )


def context_limit(spec: ModelSpec, max_context: int | None, block_size: int, num_blocks: int | None) -> int:
    """Tokens of one request at most: a request alone always fits the blocks there are."""
    positions, context = spec.max_positions, spec.default_context if max_context is None else max_context
    if not 1 <= context <= positions:
        raise UserError(
            f"max_context={context} does not fit this model, which has {positions} positions; give 1 to {positions}"
        )
    if num_blocks is None:
        return context
    check_least(num_blocks=num_blocks)
    room = num_blocks * block_size
    if max_context is not None and max_context > room:
        raise UserError(
            f"max_context={max_context} needs {-(-max_context // block_size)} blocks of {block_size} positions, "
            f"but num_blocks={num_blocks}; raise one or lower the other"
        )
    return min(context, room)


def samplings_for(prompts: Sequence[Prompt], sampling: Sampling | Sequence[Sampling] | None) -> list[Sampling | None]:
    """One for each prompt."""
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int)):  # an array has no truth value
        raise UserError("generate() takes a list of prompts; put the single prompt into a list")
    if sampling is None or isinstance(sampling, Sampling):
        return [sampling] * len(prompts)
    samplings: list[Sampling | None] = list(sampling)
    if len(samplings) != len(prompts):
        raise UserError(f"{len(prompts)} prompts but {len(samplings)} samplings; give one for all or one each")
    return samplings
