"""Requests and what the engine reports about them: data shared by scheduler, drafters and engine.

`Request` is the state of one request and `Draft` the unverified tokens after it, which may still be on the device
(`PendingDrafts`). `TextStream` turns a request's tokens into text. `Output`, `Completion` and `Stats` are what callers
see. The last part checks what callers give. Nothing here computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from shoestring.errors import UserError, shown, suggest
from shoestring.model.skip import SkipSet
from shoestring.model.transformer import Decoder
from shoestring.serve.engine.adapters import ServedAdapter
from shoestring.serve.engine.block_pool import BlockTable
from shoestring.serve.engine.sampling import Sampling
from shoestring.serve.speculative.verify import COUPLED, RULES, VerifyRule
from shoestring.state.reshard.version import WeightsVersion

FinishReason = Literal["stop", "length", "abort", "deadline", "error"]


class NonFiniteLogits(UserError):
    """The model computed NaN or infinity for a request; the server answers 500."""

    def __init__(self, position: int) -> None:
        super().__init__(
            f"the model's logits are not finite (NaN or infinity) at position {position}: its weights are damaged, or "
            "numbers overflow in this dtype; check the model's files, or compute in bf16 or fp32"
        )


class PendingDrafts:
    """Drafts that the device is still computing, one request per row of tokens_NG. The step that verifies them can be
    launched behind them and reads them there, so the host waits once for both."""

    def __init__(self, num_rows: int, num_each: int, device: torch.device) -> None:
        self._shape = num_rows, num_each
        self.tokens_NG = torch.empty(0)
        self._read: Callable[[], list[list[int]]] | None = None
        self._drafts: list[tuple[int, list[int]]] = []
        self.on_resolved: list[Callable[[list[list[int]]], None]] = []  # called with all drafts once they are known
        self._events: tuple[torch.cuda.Event, ...] = ()
        if device.type == "cuda":
            self._events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._events[0].record()
        self._began = time.perf_counter()
        self.seconds = 0.0  # that drafting took; exact once the drafts are known

    def start(self, tokens_R: Tensor, read: Callable[[], list[list[int]]]) -> list[Draft]:
        """The drafts of all rows, launched just now; `read` waits for them."""
        self.tokens_NG, self._read = tokens_R.view(self._shape), read
        self.seconds = time.perf_counter() - self._began
        if self._events:
            self._events[1].record()
        num_rows, num_each = self._shape
        return [self.draft(row, num_each) for row in range(num_rows)]

    def draft(self, row: int, num: int) -> Draft:
        tokens = [-1] * num
        self._drafts.append((row, tokens))
        return Draft(tokens, pending=self, row=row)

    def resolve(self) -> None:
        """Wait for the drafts and fill in their tokens."""
        if self._read is None:
            return
        found, self._read = self._read(), None
        for row, tokens in self._drafts:
            tokens[:] = found[row][: len(tokens)]
        for callback in self.on_resolved:
            callback(found)
        if self._events:
            self._events[1].synchronize()
            self.seconds = 1e-3 * self._events[0].elapsed_time(self._events[1])


@dataclass(frozen=True)
class Draft:
    """Unverified tokens that may follow a request's `tokens`.

    probs_GV[i] is the distribution that draft i was *sampled* from; None when the drafts were not sampled (a lookup, an
    argmax, or noise shared with the target). With `pending` the tokens are -1 until it is resolved.
    """

    tokens: list[int]
    probs_GV: Tensor | None = None
    pending: PendingDrafts | None = None
    row: int = 0  # of `pending`

    def cut(self, num: int) -> Draft:
        if num >= len(self.tokens):
            return self
        if self.pending is not None:
            return self.pending.draft(self.row, max(0, num))
        return Draft(self.tokens[:num], None if self.probs_GV is None else self.probs_GV[:num])


NO_DRAFT = Draft([])


@dataclass(eq=False)
class Request:
    tokens: list[int]  # prompt and committed new tokens
    num_prompt: int
    sampling: Sampling  # the seed is always filled in
    id: int
    text_stream: TextStream | None = field(default=None, repr=False)
    rule: VerifyRule = COUPLED  # how its drafts are verified
    limit: int = 0  # tokens that it may have, at most; 0: as many as its sampling says
    deadline: float | None = None  # on the engine's clock
    draft: Draft = NO_DRAFT
    num_computed: int = 0
    table: BlockTable | None = field(default=None, repr=False)  # its blocks while it runs
    num_preempted: int = 0
    scheduled_at: float | None = None  # when it was first admitted, on the engine's clock
    num_cached: int = 0  # prompt tokens that the prefix cache held when it was first admitted
    text: str = ""  # released so far; never shrinks
    finish_reason: FinishReason | None = None
    error: UserError | None = None  # why the engine ended it, with the finish reason "error"
    # (weights, first new token that they wrote), where weights may change while the server runs; None: as loaded.
    versions: list[tuple[WeightsVersion | None, int]] = field(default_factory=list)
    adapter: ServedAdapter | None = None  # None: the base model
    # Sublayers to leave out (skip_policy.py): `skip` below position switch_at, `late_skip` from there on.
    skip: SkipSet | None = None
    late_skip: SkipSet | None = None
    switch_at: int | None = None
    num_watched: int = 0  # new tokens whose FFN similarity was measured
    similarity: Tensor | None = field(default=None, repr=False)  # per layer, summed over those

    def skip_at(self, position: int) -> SkipSet | None:
        return self.skip if self.switch_at is None or position < self.switch_at else self.late_skip

    def until_switch(self, position: int) -> int | None:
        """Rows from `position` on that have the same skip set; None: all of them."""
        if self.switch_at is None or position >= self.switch_at:
            return None
        return self.switch_at - position

    @property
    def drafts(self) -> list[int]:
        return self.draft.tokens

    @property
    def slot(self) -> int:
        """Of its adapter; -1: none."""
        return -1 if self.adapter is None else self.adapter.slot

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    def __post_init__(self) -> None:
        self.limit = self.limit or self.num_prompt + self.sampling.max_tokens

    @property
    def room(self) -> int:
        """How many tokens it may still gain."""
        return self.limit - len(self.tokens)

    @property
    def ready(self) -> bool:
        """Only the last committed token is left to compute: the next row gains a token."""
        return self.num_computed == len(self.tokens) - 1


class Output(NamedTuple):  # one per text and step: a frozen dataclass takes three times as long
    """What one step gave one request. The first `num_accepted` of the tokens were accepted drafts."""

    request: Request
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None
    num_accepted: int = 0

    @property
    def drafted(self) -> tuple[bool, ...]:
        """For each token, whether it was an accepted draft."""
        return (True,) * self.num_accepted + (False,) * (len(self.token_ids) - self.num_accepted)


@dataclass(frozen=True)
class Completion:
    text: str
    token_ids: list[int]  # every new token, the end-of-text or stop-completing one included
    finish_reason: FinishReason
    num_prompt: int


def completion_of(request: Request) -> Completion:
    assert request.finish_reason is not None
    return Completion(request.text, request.new_tokens, request.finish_reason, request.num_prompt)


@dataclass
class Stats:
    """Counters since the engine was built."""

    num_steps: int = 0
    num_rows: int = 0
    num_new_tokens: int = 0
    num_drafts: int = 0  # proposals of at least one token that were verified, one per request and step
    num_drafted: int = 0  # tokens of those
    num_accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)  # accepted drafts by place: first, second, ...
    num_prefix_asked: int = 0  # tokens of admitted requests
    num_prefix_hits: int = 0  # of those, tokens whose keys and values were in the prefix cache
    num_preemptions: int = 0

    @property
    def acceptance(self) -> float:
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    def count(self, num_drafted: int, num_accepted: int, num_new: int) -> None:
        """A request gained num_new tokens; of its drafts so many were accepted."""
        self.num_new_tokens += num_new
        self.num_drafts += num_drafted > 0
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        if num_accepted:
            self.accepted_at += [0] * (num_accepted - len(self.accepted_at))
            for place in range(num_accepted):
                self.accepted_at[place] += 1


# -- text ---------------------------------------------------------------------------------------------------


class IncrementalDetokenizer(Protocol):
    """`Tokenizer.stream()`: token ids in, text out, never half a UTF-8 character."""

    def step(self, token_id: int, /) -> str: ...
    def finish(self) -> str: ...


class TextStream:
    """Detokenizer of one request: whole characters only, and nothing that may still become part of a stop string.

    A stop string can span tokens, so text is held back as long as it could be the beginning of one. When a stop string
    is complete, the text ends before it. Of several, the one *completed* first wins, so the result does not depend on
    how the text was cut into tokens.
    """

    def __init__(self, stream: IncrementalDetokenizer, stop: Sequence[str] = ()) -> None:
        self._stream, self._stop = stream, tuple(stop)
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that this token makes certain; a completed stop string sets `stopped`."""
        assert not self.stopped
        if not self._stop:
            return self._stream.step(token)
        self._held += self._stream.step(token)
        return self._cut() or self._release(len(self._held) - held_back(self._held, self._stop))

    def flush(self) -> str:
        """What was held back, when a request ends otherwise. An unfinished character is dropped."""
        if self.stopped:
            return ""
        self._held += self._stream.finish().rstrip("\ufffd")
        return self._cut() or self._release(len(self._held))

    def _cut(self) -> str:
        """The text before a completed stop string; '' when there is none."""
        end = find_stop(self._held, self._stop)
        if end is None:
            return ""
        self.stopped = True
        piece, self._held = self._held[:end], ""
        return piece

    def _release(self, num: int) -> str:
        piece, self._held = self._held[:num], self._held[num:]
        return piece


def find_stop(text: str, stop: Sequence[str]) -> int | None:
    """Where the text ends: the start of the stop string that is complete first."""
    hits = [(at + len(s), at) for s in stop if (at := text.find(s)) >= 0]
    return min(hits)[1] if hits else None


def held_back(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of `text` with which some stop string begins."""
    longest = max((len(s) - 1 for s in stop), default=0)
    for num in range(min(longest, len(text)), 0, -1):
        if any(s.startswith(text[-num:]) for s in stop):
            return num
    return 0


# -- what callers give --------------------------------------------------------------------------------------

Prompt = str | Sequence[int]


class TextCodec(Protocol):
    """The part of `model.tokenizer.Tokenizer` that the engine uses."""

    eos_ids: set[int]

    def encode(self, text: str) -> list[int]: ...
    def stream(self, *, shown: frozenset[int], after: Sequence[int]) -> IncrementalDetokenizer: ...


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


def note_version(request: Request, version: WeightsVersion | None) -> None:
    """From its next token on, the request is written by these weights."""
    first = len(request.new_tokens)
    request.versions = [(v, n) for v, n in request.versions if n < first] + [(version, first)]
