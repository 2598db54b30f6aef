"""What goes between the HTTP side and the engine's thread: requests in, reports out; also as bytes.

Both sides may share a process; then these objects are handed over as they are. Or HTTP has a process of its own
(http_process.py); then a message is a frame of `CODEC` (message_codec.py).

Times are those of time.monotonic, which all processes of a machine share.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from torch import Tensor

from shoestring.serve.engine.embedding import Pooling
from shoestring.serve.engine.logit_rules import Grammar, SamplingWithRules, TokenHistory, TokenLogprob
from shoestring.serve.engine.request import Request
from shoestring.serve.http.grammar import GrammarSource, MakeGrammar
from shoestring.serve.http.message_codec import LOCAL, Codec, TokenIds
from shoestring.serve.http.request_schema import ApiError
from shoestring.state.reshard.version import WeightsVersion


class ChoiceDelta(NamedTuple):  # made for every token: a frozen dataclass takes three times as long
    """What is new for one choice since it was last read."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # of the next tokens of the prompt
    finish_reason: str | None = None
    num_cached: int = 0
    error: ApiError | None = None
    drafted: tuple[bool, ...] = ()  # for each token, whether it was an accepted draft
    vectors_ND: Tensor | None = None  # the embeddings of a request
    # At the end, where weights may change: (weights, the first token that they wrote).
    versions: tuple[tuple[str, int], ...] = ()

    @property
    def size(self) -> int:
        """Entries to write: tokens, and their log-probabilities with alternatives."""
        if not self.logprobs and self.prompt_logprobs is None:
            return 1 + len(self.token_ids)
        scored = [entry for entry in (*self.logprobs, *(self.prompt_logprobs or ())) if entry is not None]
        return 1 + len(self.token_ids) + sum(1 + len(entry.top) for entry in scored)


@dataclass(eq=False)
class EmbeddingJob:
    """The texts of one request for embeddings, and the vectors that are there already."""

    texts: list[TokenIds]
    pooling: Pooling
    batches: list[list[int]] = field(default_factory=list, metadata=LOCAL)  # left to compute; which texts together
    vectors: dict[int, Tensor] = field(default_factory=dict, metadata=LOCAL)  # by number of the text

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.texts))


@dataclass(eq=False)
class PendingChoice:
    """One choice of one client's request, from its arrival to its last token."""

    prompt: TokenIds  # checked against vocabulary and context (request_parsing.py)
    sampling: SamplingWithRules
    deadline: float = math.inf
    score_prompt: int | None = None  # log-probabilities of the prompt, with this many alternatives
    no_new_tokens: bool = False  # a Sampling cannot say max_tokens=0
    embedding: EmbeddingJob | None = None  # instead of a text
    adapter: str | None = None
    client: str = ""  # with whom it shares its part of the engine
    # When its body had been read, when it was first scheduled, when its first and its latest tokens were handed out.
    arrived: float = field(default_factory=time.monotonic)
    id: int = -1  # given by the `EngineClient`; what follows is the engine thread's
    started: float | None = field(default=None, metadata=LOCAL)
    first_token: float | None = field(default=None, metadata=LOCAL)
    last_token: float = field(default=0.0, metadata=LOCAL)
    request: Request | None = field(default=None, repr=False, metadata=LOCAL)
    num_sent: int = field(default=0, metadata=LOCAL)
    done: bool = field(default=False, metadata=LOCAL)

    @property
    def num_prompt(self) -> int:
        return len(self.prompt) if self.embedding is None else self.embedding.num_tokens


@dataclass(frozen=True)
class EngineFacts:
    """What the HTTP side has to know of the engine before the first request."""

    vocab_size: int
    max_context: int
    d_model: int
    eos_ids: tuple[int, ...]
    writes: bool  # False: an encoder
    max_running: int
    max_queue: int


@dataclass(frozen=True)
class EngineSnapshot:
    """Load and counters after the latest step."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    num_prompt_tokens: int = 0
    num_new_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    tokens_per_s: float = 0.0
    seconds_per_choice: float = 1.0  # moving average
    drafts: bool = False  # there is a drafter
    version: WeightsVersion | None = None  # of the weights, where they came from a training run
    adapters: tuple[str, ...] = ()  # their names


@dataclass
class Report:
    """What one turn of the engine's thread gave. A text is in `pieces` or in `parts`, or in `pieces` and then in
    `parts`."""

    # Texts that gained one token and nothing else: the numbers of the choices, the texts, the tokens. Text is there
    # where the engine looks for stop strings; otherwise the client makes it of the tokens.
    pieces: tuple[list[int], list[str], list[int]] = field(default_factory=lambda: ([], [], []))
    parts: list[tuple[int, ChoiceDelta]] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    snapshot: EngineSnapshot = EngineSnapshot()
    closed: ApiError | None = None  # nothing is accepted any more: every open text ends with this error
    dead: bool = False  # the thread has ended


# To the engine's thread. "update" only wakes it.
Message = (
    tuple[Literal["add"], Sequence[PendingChoice]]
    | tuple[Literal["cancel"], Sequence[int]]
    | tuple[Literal["abort"], ApiError]
    | tuple[Literal["stop", "update"], None]
)


def deadline_error(choice: PendingChoice) -> ApiError:
    return ApiError(
        408,
        f"the request was not finished within {choice.deadline - choice.arrived:.0f} seconds",
        code="deadline_exceeded",
        headers={"x-should-retry": "false"},
    )


# -- as bytes -----------------------------------------------------------------------------------------------


def _error(status: int, message: str, param: str | None, code: str | None, headers: dict[str, str]) -> ApiError:
    return ApiError(status, message, param=param, code=code, headers=headers)


CODEC = Codec(
    {
        # from the engine's process; at first the model's name, the pooling, the tokenizer and the facts
        "about": (str, str, dict[str, Any], EngineFacts),
        "report": (Report,),
        "answer": (int, ApiError | None, bytes),
        "beat": (float,),
        # from the HTTP process
        "started": (),
        "add": (list[PendingChoice],),
        "cancel": (list[int],),
        "abort": (ApiError,),
        "rejected": (),
        "metrics": (int,),
        "compile": (int, GrammarSource),
        "adapter": (int, str, str),
    },
    instead={Grammar: GrammarSource, TokenHistory: None},  # the engine's process has the grammars
    own={ApiError: (("status", "message", "param", "code", "headers"), _error)},
)
frame = CODEC.frame


def grammar_sources(choices: Sequence[PendingChoice]) -> list[GrammarSource]:
    """What `received` will ask grammars for."""
    given: list[object] = [choice.sampling.grammar for choice in choices]
    return [source for source in given if isinstance(source, GrammarSource)]


def received(
    choices: Sequence[PendingChoice], grammar_of: Callable[[GrammarSource], MakeGrammar | None]
) -> Sequence[PendingChoice]:
    """Choices that came from another process, with the histories and grammars of this one."""
    for choice in choices:
        source: object = choice.sampling.grammar
        history = TokenHistory(tuple(choice.prompt))
        make = grammar_of(source) if isinstance(source, GrammarSource) else None
        choice.sampling = replace(choice.sampling, history=history, grammar=None if make is None else make())
    return choices
