"""JSON by construction: `response_format` and enforced tool calls as a mask over the next token.

The grammar and its matcher are those of the `llguidance` library, which is optional
(pip install 'shoestring[grammar]'). A `JsonGrammar` follows one text. It gives the tokens that may follow
what was written, drafts included, and gets to that state by rolling its matcher back to the common prefix. So it does
not matter which drafts were accepted.

A schema can be made to cost seconds, so nothing of this runs on the engine thread or the event loop. Schemas are
compiled on a worker thread (request_workers.py). Masks are computed on a few threads of their own, the quickest first,
while the engine computes the logits; the library releases the GIL for both. A text whose mask is late sits out steps
(engine.py). The library cannot be interrupted, but its time is bounded by limits: those it has itself, and those of
`check_schema` for what it does not count. A request beyond them is refused, or ended midway, with an error.

Whitespace between values is bounded: a model could otherwise write line breaks for ever.

Left out: regular expressions and Lark grammars of clients, which the library could do as well.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from shoestring.model.tokenizer import Tokenizer
from shoestring.serve.engine.logit_rules import Grammar, GrammarLimitExceeded
from shoestring.serve.http.request_schema import ApiError, ToolRequest
from shoestring.serve.http.tool_calls import ToolFormat, call_grammar

ANY_OBJECT = {"type": "object"}
WHITESPACE = r"[ \n\t]{0,24}"

# A schema within these compiles in about a second at most (2 cores, 49k tokens), and its masks take less than 0.1 s.
MAX_SCHEMA_CHARACTERS = 1 << 16
MAX_SCHEMA_STRING = 1 << 13  # a mask takes 2 us for each character of a string that the text is within
MAX_PROPERTIES = 500  # of one object; compiling takes time with their square
MAX_MULTIPLE = 10_000  # of multipleOf; compiling takes 30 us and 0.3 kB for each number below it
LEAST_NUMBER = -(2**62)  # the library crashes, and the server with it, at the least 64-bit integer
COMPILE_LIMIT_S = 5.0  # a schema that took longer is refused, also when it comes again
LIBRARY_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 100_000,
    "max_grammar_size": 20_000,
    "max_items_in_row": 4_000,  # each property that may come next takes four
    "verbose_errors": False,
}
INSTEAD_OF_JSON = 'ask for JSON in the prompt and use {"type": "text"}'
INSTEAD_OF_TOOLS = (
    "leave tool_choice at auto where the model's chat template knows tools; where it does not, describe them in the "
    "prompt and send no tools, or tool_choice none"
)
NUM_COMPILED = 32  # schemas that are kept: most clients send the same one again
NUM_MASK_THREADS = max(1, min(4, (os.cpu_count() or 1) // 4))

Made = TypeVar("Made")
MakeGrammar = Callable[[], Grammar]


@dataclass(frozen=True)
class GrammarSource:
    """What is compiled: a JSON schema, or a grammar of ours in Lark's syntax with schemas inside."""

    text: str
    lark: bool = False

    @property
    def param(self) -> str:
        return "tools" if self.lark else "response_format"


class GrammarCache(ABC):
    """The grammars compiled last, and the errors of those that cannot be."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _compiled
        self._compiled: OrderedDict[GrammarSource, MakeGrammar | ApiError] = OrderedDict()  # least recently used first

    @abstractmethod
    def compile(self, source: GrammarSource) -> MakeGrammar | ApiError:
        """What makes a grammar per text, or why there is none."""

    def must_compile(self, source: GrammarSource | None) -> bool:
        """Whether `of` would take a while."""
        with self._lock:
            return source is not None and source not in self._compiled

    def of(self, source: GrammarSource | None) -> MakeGrammar | None:
        """What makes a grammar per text; None for plain text. Anything wrong is a 400."""
        if source is None:
            return None
        with self._lock:
            found = self._compiled.get(source)
        if found is None:
            found = self.compile(source)
        with self._lock:
            self._compiled[source] = found
            self._compiled.move_to_end(source)
            if len(self._compiled) > NUM_COMPILED:
                self._compiled.popitem(last=False)
        if isinstance(found, ApiError):
            raise found.with_traceback(None)
        return found


class Grammars(GrammarCache):
    """Makes grammars for one tokenizer; its table of the vocabulary is built when first needed (~1 s)."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        super().__init__()
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, list(eos_ids)
        self._table: Any = None
        self._mask_threads = PriorityThreads("shoestring-mask", NUM_MASK_THREADS)

    def compile(self, source: GrammarSource) -> MakeGrammar | ApiError:
        """The first mask, often the slowest, is computed here, for all texts of the schema."""
        refused = partial(_refused, param=source.param)
        try:
            import llguidance
        except ModuleNotFoundError:
            return refused(
                "JSON formats and enforced tool calls need the package llguidance on the server (pip install "
                f"'shoestring[grammar]'); without it {INSTEAD_OF_TOOLS if source.lark else INSTEAD_OF_JSON}"
            )
        if not self._eos_ids:
            return refused("this model has no end-of-text token, so an answer of this format could not end")
        table, began = self._vocabulary(llguidance), time.monotonic()
        try:
            if source.lark:
                grammar = llguidance.LLMatcher.grammar_from_lark(source.text)
            else:
                options: Any = {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE}
                grammar = llguidance.LLMatcher.grammar_from_json_schema(source.text, overrides=options)
        except ValueError as error:
            return refused(f"the JSON schema cannot be used: {_first_line(error)}")
        limits = llguidance.LLParserLimits(**LIBRARY_LIMITS)
        matcher = llguidance.LLMatcher(table, grammar, log_level=0, limits=limits)
        first = None if matcher.is_error() else matcher.deep_copy()
        mask = None if first is None else first.compute_bitmask()
        if first is None or mask is None or first.is_error():
            reason = _first_line((matcher if first is None else first).get_error())
            return refused(f"the JSON schema cannot be used: {reason}")
        if time.monotonic() - began > COMPILE_LIMIT_S:
            return refused("the JSON schema takes too long to compile; make it simpler", code="schema_too_complex")
        return lambda: JsonGrammar(matcher.deep_copy(), self._mask_threads, mask)

    def _vocabulary(self, llguidance: Any) -> Any:
        if self._table is None:
            size = max(self._vocab_size, self._tokenizer.vocab_size)
            text = self._tokenizer.backend.to_str()
            self._table = llguidance.LLTokenizer(text, n_vocab=size, eos_token=self._eos_ids)
        return self._table


@dataclass(frozen=True)
class MaskJob:
    """The masks after a text and after each draft that follows it. A text only grows, so its length names it."""

    written: list[int]
    drafts: tuple[int, ...]
    masks: list[Future[bytes | None]]  # one more than drafts; None: the text is not of the grammar

    def num_shared(self, num_written: int, drafts: Sequence[int]) -> int:
        """Masks of this job that are also those of another, from the first."""
        if num_written != len(self.written):
            return 0
        pairs = zip(self.drafts, drafts, strict=False)
        return 1 + len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


class JsonGrammar:
    """The `Grammar` of one text. The engine thread asks; a mask thread, one at a time, has the matcher."""

    def __init__(self, matcher: Any, threads: PriorityThreads, first_mask: bytes) -> None:
        self._matcher, self._threads = matcher, threads
        self._consumed: list[int] = []
        self._seconds = 0.0  # that the latest mask took
        self._lock = threading.Lock()  # guards _job and _at_work
        self._at_work = False
        first: Future[bytes | None] = Future()
        first.set_result(first_mask)
        self._job = MaskJob([], (), [first])

    def begin(self, written: Sequence[int], drafts: Sequence[int]) -> None:
        with self._lock:
            num = self._job.num_shared(len(written), drafts)
            if num == len(drafts) + 1:
                return
            masks = self._job.masks[:num] + [Future() for _ in range(len(drafts) + 1 - num)]
            self._job = MaskJob(list(written), tuple(drafts), masks)
            if self._at_work:
                return  # the thread takes this job next
            self._at_work = True
        self._threads.submit(self._seconds, self._work)

    def num_ready(self, written: Sequence[int], drafts: Sequence[int], until: float) -> int:
        self.begin(written, drafts)
        for num, mask in enumerate(self._job.masks[: len(drafts) + 1]):
            try:
                mask.result(max(0.0, until - time.monotonic()))
            except TimeoutError:
                return num
        return len(drafts) + 1

    def allowed(self, written: Sequence[int], drafts: Sequence[int], vocab: int) -> Tensor | None:
        self.begin(written, drafts)
        mask = self._job.masks[len(drafts)].result()
        if mask is None:
            return None  # after a draft that the row before does not allow: this row is not used
        flags = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
        return torch.from_numpy(flags)[:vocab].bool()

    def _work(self) -> None:
        """On a mask thread: compute what the latest job lacks."""
        while True:
            with self._lock:
                job = self._job
                row = next((i for i, mask in enumerate(job.masks) if not mask.done()), None)
                if row is None:
                    self._at_work = False
                    return
            began = time.monotonic()
            try:
                job.masks[row].set_result(self._mask([*job.written, *job.drafts[:row]]))
            except Exception as error:
                job.masks[row].set_exception(error)
            self._seconds = time.monotonic() - began

    def _mask(self, written: list[int]) -> bytes | None:
        mask = self._matcher.compute_bitmask() if self._go_to(written) else None
        if self._matcher.is_error():
            raise GrammarLimitExceeded(
                "the JSON schema is too complex to go on with: "
                f"{_first_line(self._matcher.get_error())}; make it simpler, with fewer optional properties or shorter "
                "strings"
            )
        return mask

    def _go_to(self, written: list[int]) -> bool:
        """Bring the matcher to the state after `written`; False where the grammar has no such text."""
        same = 0
        while same < min(len(written), len(self._consumed)) and written[same] == self._consumed[same]:
            same += 1
        if same < len(self._consumed):
            self._matcher.rollback(len(self._consumed) - same)
            del self._consumed[same:]
        rest = written[same:]
        num = self._matcher.try_consume_tokens(rest) if rest else 0
        self._consumed.extend(rest[:num])
        return num == len(rest)


class PriorityThreads:
    """A few threads for jobs of very different length: of those that wait, the one of least cost is next. They start
    with the first job and end with the process."""

    def __init__(self, name: str, num: int) -> None:
        self._name, self._num = name, num
        self._jobs: queue.PriorityQueue[tuple[float, int, Callable[[], None]]] = queue.PriorityQueue()
        self._order = itertools.count()  # of jobs of equal cost
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def submit(self, cost: float, function: Callable[[], Made]) -> Future[Made]:
        future: Future[Made] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)

        with self._lock:
            if not self._threads:
                names = [f"{self._name}-{i}" for i in range(self._num)]
                self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for name in names]
                for thread in self._threads:
                    thread.start()
        self._jobs.put((cost, next(self._order), run))
        return future

    def _run(self) -> None:
        while True:
            self._jobs.get()[2]()


def wanted_schema(response_format: dict[str, Any] | None) -> GrammarSource | None:
    """The JSON schema that a response_format asks for; None for plain text. Anything wrong that can be seen at once is
    a 400."""
    if response_format is None or response_format.get("type") == "text":
        return None
    kind = response_format.get("type")
    if kind == "json_object":
        return GrammarSource(json.dumps(ANY_OBJECT))
    if kind != "json_schema":
        raise _refused('response_format needs a type: "text", "json_object" or "json_schema"')
    given = response_format.get("json_schema")
    schema = given.get("schema") if isinstance(given, dict) else None
    if not isinstance(schema, dict):
        raise _refused("response_format json_schema needs json_schema.schema, an object")
    check_schema(schema)
    return GrammarSource(json.dumps(schema))


def tool_grammar(asked: ToolRequest, form: ToolFormat, tokenizer: Tokenizer) -> GrammarSource:
    """Calls of the required functions and nothing else; where none is, calls of all or a text. The limits of a schema
    hold for all of them together."""
    parameters = {tool.name: tool.parameters for tool in asked.required or asked.tools}
    check_schema(parameters, "tools")
    how = {"parallel": asked.parallel, "spaces": WHITESPACE, "or_text": not asked.required}
    return GrammarSource(call_grammar(form, parameters, tokenizer, **how), lark=True)  # type: ignore[arg-type]


def check_schema(schema: dict[str, Any], param: str = "response_format") -> None:
    """Refuse what the library would take too long for, in a pass that stops early."""
    try:
        _check_schema(schema)
    except ApiError as error:
        error.param = param
        raise


def _check_schema(schema: dict[str, Any]) -> None:
    size, rest = 0, list[Any]([schema])
    while rest:
        node = rest.pop()
        size += len(node) + 2 if isinstance(node, str | dict | list) else 4
        if size > MAX_SCHEMA_CHARACTERS:
            raise _too_large(f"it has more than {MAX_SCHEMA_CHARACTERS} characters")
        if isinstance(node, str) and len(node) > MAX_SCHEMA_STRING:
            raise _too_large(f"it has a string of {len(node)} characters; {MAX_SCHEMA_STRING} are allowed")
        if isinstance(node, int | float) and node < LEAST_NUMBER:
            raise _refused(f"the JSON schema has a number below {LEAST_NUMBER}, which cannot be used")
        if isinstance(node, list):
            rest += node
        elif isinstance(node, dict):
            _check_keywords(node)
            rest += [*node, *node.values()]


def _check_keywords(node: dict[str, Any]) -> None:
    properties, multiple = node.get("properties"), node.get("multipleOf")
    if isinstance(properties, dict) and len(properties) > MAX_PROPERTIES:
        raise _too_large(f"it has an object of {len(properties)} properties; {MAX_PROPERTIES} are allowed")
    if isinstance(multiple, int | float) and abs(multiple) > MAX_MULTIPLE:
        raise _too_large(f"it has a multipleOf above {MAX_MULTIPLE}")


def _too_large(reason: str) -> ApiError:
    return _refused(f"the JSON schema is too large: {reason}", code="schema_too_complex")


def _refused(message: str, code: str | None = None, param: str = "response_format") -> ApiError:
    return ApiError(400, message, param=param, code=code)


def _first_line(error: object) -> str:
    return (str(error).strip().splitlines() or ["unknown"])[0][:300]
