"""What goes between the HTTP side and the engine's thread: requests in, reports out; also as bytes.

Both sides may share a process; then these objects are handed over as they are. Or HTTP has a process of its own
(http_process.py); then a message is a frame: a JSON part for what is small, and a binary part for token ids of prompts
and for vectors, which JSON would take milliseconds for. Nothing is pickled.

Times are those of time.monotonic, which all processes of a machine share.
"""

from __future__ import annotations

import json
import math
import struct
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from shoestring.serve.engine.embedding import Pooling
from shoestring.serve.engine.logit_rules import LogitRules, SamplingWithRules, TokenHistory, TokenLogprob
from shoestring.serve.engine.request import Request
from shoestring.serve.http.grammar import GrammarSource, MakeGrammar
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

    texts: list[list[int]]
    pooling: Pooling
    batches: list[list[int]] = field(default_factory=list)  # left to compute; which texts together
    vectors: dict[int, Tensor] = field(default_factory=dict)  # by number of the text

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.texts))


@dataclass(eq=False)
class PendingChoice:
    """One choice of one client's request, from its arrival to its last token."""

    prompt: list[int]  # checked against vocabulary and context (request_parsing.py)
    sampling: SamplingWithRules
    deadline: float = math.inf
    score_prompt: int | None = None  # log-probabilities of the prompt, with this many alternatives
    no_new_tokens: bool = False  # a Sampling cannot say max_tokens=0
    embedding: EmbeddingJob | None = None  # instead of a text
    client: str = ""  # with whom it shares its part of the engine
    # When its body had been read, when it was first scheduled, when its first and its latest tokens were handed out.
    arrived: float = field(default_factory=time.monotonic)
    id: int = -1  # given by the `EngineClient`; what follows is the engine thread's
    started: float | None = None
    first_token: float | None = None
    last_token: float = 0.0
    request: Request | None = field(default=None, repr=False)
    num_sent: int = 0
    done: bool = False

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

HEAD = struct.Struct(">II")  # bytes of the JSON part and of the binary part, which follow
ENCODE = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def frame(value: Any, binary: bytes = b"") -> bytes:
    content = ENCODE(value).encode()
    return HEAD.pack(len(content), len(binary)) + content + binary


class FrameReader:
    """Bytes as they come, frames as they are complete."""

    def __init__(self) -> None:
        self._unread = bytearray()

    def feed(self, data: bytes) -> list[tuple[Any, bytes]]:
        self._unread += data
        found, at = [], 0
        while len(self._unread) >= at + HEAD.size:
            size, num_binary = HEAD.unpack_from(self._unread, at)
            middle = at + HEAD.size + size
            end = middle + num_binary
            if len(self._unread) < end:
                break
            found.append((json.loads(self._unread[at + HEAD.size : middle]), bytes(self._unread[middle:end])))
            at = end
        del self._unread[:at]
        return found


def error_json(error: ApiError) -> list[Any]:
    return [error.status, error.message, error.param, error.code, error.headers]


def error_from(given: Sequence[Any]) -> ApiError:
    status, message, param, code, headers = given
    return ApiError(status, message, param=param, code=code, headers=headers)


def report_frame(report: Report) -> bytes:
    vectors = [part.vectors_ND for _, part in report.parts if part.vectors_ND is not None]
    binary = b"".join(v.detach().float().cpu().contiguous().numpy().tobytes() for v in vectors)
    parts = [(number, _delta_json(part)) for number, part in report.parts]
    version = report.snapshot.version
    snapshot = {**vars(report.snapshot), "version": None if version is None else asdict(version)}
    closed = None if report.closed is None else error_json(report.closed)
    return frame(["report", report.pieces, parts, report.ended, snapshot, closed, report.dead], binary)


def report_from(given: Sequence[Any], binary: bytes) -> Report:
    pieces, parts, ended, snapshot, closed, dead = given
    version = snapshot.pop("version")
    deltas, at = [], 0
    for number, fields in parts:
        if "vectors_ND" in fields:
            num = math.prod(fields["vectors_ND"])
            flat = torch.frombuffer(bytearray(binary[at : at + 4 * num]), dtype=torch.float32)
            fields["vectors_ND"], at = flat.view(fields["vectors_ND"]), at + 4 * num
        deltas.append((number, _delta_from(fields)))
    return Report(
        tuple(pieces),
        deltas,
        ended,
        EngineSnapshot(**snapshot, version=None if version is None else WeightsVersion(**version)),
        None if closed is None else error_from(closed),
        dead,
    )


def _delta_json(delta: ChoiceDelta) -> dict[str, Any]:
    """What is not as usual."""
    fields: dict[str, Any] = {
        name: value
        for name, value in zip(ChoiceDelta._fields, delta, strict=True)
        if name not in ("error", "vectors_ND") and value != ChoiceDelta._field_defaults[name]
    }
    if delta.logprobs:
        fields["logprobs"] = [_logprob_json(entry) for entry in delta.logprobs]
    if delta.prompt_logprobs is not None:
        fields["prompt_logprobs"] = [_logprob_json(entry) for entry in delta.prompt_logprobs]
    if delta.error is not None:
        fields["error"] = error_json(delta.error)
    if delta.vectors_ND is not None:
        fields["vectors_ND"] = list(delta.vectors_ND.shape)
    return fields


_FROM_JSON: dict[str, Callable[[Any], Any]] = {
    "token_ids": tuple,
    "logprobs": lambda given: tuple(map(_logprob_from, given)),
    "prompt_logprobs": lambda given: tuple(map(_logprob_from, given)),
    "error": error_from,
    "drafted": tuple,
    "versions": lambda given: tuple(map(tuple, given)),
}


def _delta_from(fields: dict[str, Any]) -> ChoiceDelta:
    return ChoiceDelta(**{n: _FROM_JSON[n](value) if n in _FROM_JSON else value for n, value in fields.items()})


def _logprob_json(entry: TokenLogprob | None) -> Any:
    return None if entry is None else (entry.token, entry.logprob, entry.top)


def _logprob_from(given: Any) -> TokenLogprob | None:
    return None if given is None else TokenLogprob(given[0], given[1], tuple(map(tuple, given[2])))


def add_frame(choices: Sequence[PendingChoice]) -> bytes:
    """Choices of one request share their prompts, which are sent once."""
    lists: dict[int, list[int]] = {}  # by identity
    told = []
    for choice in choices:
        texts = [choice.prompt] if choice.embedding is None else choice.embedding.texts
        for text in texts:
            lists.setdefault(id(text), text)
        fields = {name: getattr(choice, name) for name in _SENT}
        if choice.embedding is None:
            fields["sampling"] = _sampling_json(choice.sampling)
        else:
            fields["pooling"] = choice.embedding.pooling
        told.append((fields, [id(text) for text in texts]))
    places = {key: place for place, key in enumerate(lists)}
    named = [(fields, [places[key] for key in keys]) for fields, keys in told]
    binary = b"".join(array("I", ids).tobytes() for ids in lists.values())
    return frame(["add", named, [len(ids) for ids in lists.values()]], binary)


_NO_RULES = LogitRules()
_SENT = ("id", "deadline", "score_prompt", "no_new_tokens", "client", "arrived")
_PLAIN = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "stop", "ignore_eos", "num_logprobs")


def add_from(
    given: Sequence[Any], binary: bytes, grammar_of: Callable[[GrammarSource], MakeGrammar | None]
) -> list[PendingChoice]:
    named, lengths = given
    flat, lists, at = array("I"), list[list[int]](), 0
    flat.frombytes(binary)
    for num in lengths:
        lists.append(flat[at : at + num].tolist())
        at += num
    choices = []
    for fields, places in named:
        texts = [lists[place] for place in places]
        if (pooling := fields.pop("pooling", None)) is not None:
            choice = PendingChoice([], SamplingWithRules(), embedding=EmbeddingJob(texts, pooling), **fields)
        else:
            sampling = _sampling_from(fields.pop("sampling"), texts[0], grammar_of)
            choice = PendingChoice(texts[0], sampling, **fields)
        choices.append(choice)
    return choices


def grammar_sources(given: Sequence[Any]) -> list[GrammarSource]:
    """What `add_from` will ask grammars for."""
    sources = [fields.get("sampling", {}).get("grammar") for fields, _ in given[0]]
    return [GrammarSource(**source) for source in sources if source is not None]


def _sampling_json(sampling: SamplingWithRules) -> dict[str, Any]:
    fields = {name: getattr(sampling, name) for name in _PLAIN}
    fields["shown_special"] = sorted(sampling.shown_special)
    if sampling.rules != _NO_RULES:
        fields["rules"] = asdict(sampling.rules)
    if sampling.grammar is not None:
        assert isinstance(sampling.grammar, GrammarSource), "the engine's process has the grammars"
        fields["grammar"] = asdict(sampling.grammar)
    return fields


def _sampling_from(
    fields: dict[str, Any], prompt: list[int], grammar_of: Callable[[GrammarSource], MakeGrammar | None]
) -> SamplingWithRules:
    rules, source = fields.pop("rules", None), fields.pop("grammar", None)
    fields["shown_special"] = frozenset(fields["shown_special"])
    sampling = SamplingWithRules(**fields, history=TokenHistory(tuple(prompt)))
    if rules is not None:
        rules |= {"bias": tuple(map(tuple, rules["bias"])), "eos_ids": tuple(rules["eos_ids"])}
        sampling = replace(sampling, rules=LogitRules(**rules))
    make = None if source is None else grammar_of(GrammarSource(**source))
    return sampling if make is None else replace(sampling, grammar=make())
