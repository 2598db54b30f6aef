"""From a validated request body to what the engine needs: token ids and samplings, within the limits.

Encoding a long prompt takes a while, so these functions run on a worker thread (request_workers.py); they use nothing
but the tokenizer, which is safe to share. What cannot fit the context is refused as early as possible: by its bytes
alone, then by the tokens of its beginning, and for several prompts at the first that is too long.
Prompts are checked here, so the engine thread adds them without another check.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoestring.errors import UserError
from shoestring.model.tokenizer import Spelling, Tokenizer
from shoestring.serve.engine.embedding import Pooling
from shoestring.serve.engine.logit_rules import Grammar, LogitRules, SamplingWithRules, TokenHistory
from shoestring.serve.engine.request import check_prompt
from shoestring.serve.http.generic_tools import GENERIC, HEADER, plain_chat
from shoestring.serve.http.grammar import GrammarCache, GrammarSource, tool_grammar, wanted_schema
from shoestring.serve.http.request_schema import (
    ApiError,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    TokenizeBody,
    ToolRequest,
    are_ids,
)
from shoestring.serve.http.tool_calls import FORMAT_NAMES, ToolCallParser, ToolFormat, shown_ids, takes_tools

DEFAULT_NEW_TOKENS = 16  # of a completion, as in OpenAI's API; a chat answer may fill the context
MAX_TOKENIZE_BYTES = 1 << 20  # of a text for /tokenize, which no context bounds; a second or two of work
MIN_DETOKENIZE = 1 << 16  # ids that /detokenize takes, or the context where that is longer
MAX_EMBEDDINGS = 2048  # texts of one request for embeddings, as in OpenAI's API
MAX_EMBEDDING_TOKENS = 1 << 18
MAX_EMBEDDING_NUMBERS = 1 << 22  # over all vectors of one request
MAX_LOGPROB_ENTRIES = 1 << 22  # over all tokens of one request: some hundred MB of memory
# A text is encoded from its beginning in growing parts. Ordinary text has 3 to 5 characters per token, so the first
# part of a text that is too long is enough to refuse it.
FIRST_PART = 16  # characters per token of the context
_NEXT_SEED = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Limits:
    """What the model and the server allow."""

    vocab_size: int
    max_context: int
    max_texts: int  # choices of one request, over all its prompts
    eos_ids: tuple[int, ...] = ()
    spelling: Spelling | None = None  # None: a token may stand for any length of text
    causal: bool = True  # a decoder


@dataclass(frozen=True)
class ParsedRequest:
    """One client's request: n texts for each prompt."""

    prompts: list[list[int]]
    samplings: list[SamplingWithRules]  # choice i of prompt p at p * n + i
    n: int
    chat: bool
    num_logprobs: int | None
    echo: list[str] | None = None  # the prompts as text, where they are to be repeated
    no_new_tokens: bool = False
    stream: bool = False
    include_usage: bool = False
    mark_drafts: bool = False
    tools: ToolUse | None = None
    headers: dict[str, str] = field(default_factory=dict)  # of the answer


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request and how its answers call them."""

    asked: ToolRequest
    form: ToolFormat
    generic: bool = False  # the template has no place for them (generic_tools.py)

    def parser(self) -> ToolCallParser:
        names = [tool.name for tool in self.asked.tools]
        return ToolCallParser(self.form, names, None if self.asked.parallel else 1)


def parse_completion(body: CompletionBody, tokenizer: Tokenizer, limits: Limits) -> ParsedRequest:
    if body.best_of not in (None, 1, body.n or 1):
        raise ApiError(400, "best_of is not supported; leave it out or give n", param="best_of")
    given = body.prompts
    _check_texts(len(given), body.n or 1, limits)
    max_tokens = DEFAULT_NEW_TOKENS if body.max_tokens is None else body.max_tokens
    num_new = min(1, max_tokens)
    for prompt in given:
        if isinstance(prompt, str):
            _check_size(prompt, num_new, limits)
        else:
            _check_length(len(prompt) + num_new, limits)
    prompts = [_prompt_ids(p, tokenizer, num_new, limits) for p in given]
    echo = [p if isinstance(p, str) else tokenizer.decode(p) for p in given] if body.echo else None
    samplings = _samplings(body, prompts, max_tokens, body.logprobs, limits)
    return ParsedRequest(
        prompts,
        samplings,
        body.n or 1,
        False,
        body.logprobs,
        echo,
        max_tokens == 0,
        bool(body.stream),
        _wants_usage(body),
        bool(body.mark_drafts),
        headers=body.headers,
    )


def tools_of(body: ChatBody, tokenizer: Tokenizer, form: ToolFormat | None) -> ToolUse | None:
    """What the answers may call; a model that cannot be asked for calls is a 400."""
    asked = body.tool_request
    if asked is None:
        return None
    template = tokenizer.tool_template
    if template is not None and not takes_tools(template):
        return ToolUse(asked, GENERIC, generic=True)
    if form is None:
        raise ApiError(
            400,
            "this server does not know how the model writes tool calls; start it with --tool-format, one of "
            + ", ".join(FORMAT_NAMES),
            param="tools",
        )
    return ToolUse(asked, form)


def grammar_of(body: ChatBody, tools: ToolUse | None, tokenizer: Tokenizer) -> GrammarSource | None:
    """What constrains the answers; None: nothing does."""
    source = wanted_schema(body.response_format)
    if source is not None and tools is not None:
        raise ApiError(
            400, "a JSON response_format does not go with tools; leave out one, or give tool_choice none", param="tools"
        )
    if tools is None or not (tools.asked.required or tools.generic):
        return source
    return tool_grammar(tools.asked, tools.form, tokenizer)


def parse_chat(
    body: ChatBody,
    tokenizer: Tokenizer,
    limits: Limits,
    grammars: GrammarCache,
    tools: ToolUse | None = None,
    source: GrammarSource | None = None,
) -> ParsedRequest:
    """`tools` of `tools_of` and `source` of `grammar_of`."""
    _check_texts(1, body.n or 1, limits)
    grammar = grammars.of(source)
    if grammar is not None and (body.min_tokens or body.ignore_eos):
        raise ApiError(400, "min_tokens and ignore_eos do not go with a JSON response_format or enforced tool calls")
    if tools is None or not tools.generic:
        text = chat_text(body.chat, tokenizer, None if tools is None else [tool.given for tool in tools.asked.tools])
    else:
        text = chat_text(plain_chat(body.chat, tools.asked.tools), tokenizer)
    _check_size(text, 1, limits)
    prompt = encode_within(text, tokenizer, 1, limits, special=False)
    try:
        check_prompt(prompt, limits.vocab_size, limits.max_context)
    except UserError as error:
        raise ApiError(400, str(error)) from None
    max_tokens = body.max_completion_tokens or body.max_tokens or limits.max_context - len(prompt)
    shown = frozenset[int]() if tools is None else shown_ids(tools.form, tokenizer)
    samplings = _samplings(body, [prompt], max_tokens, body.num_logprobs, limits, grammar, shown)
    return ParsedRequest(
        [prompt],
        samplings,
        body.n or 1,
        True,
        body.num_logprobs,
        stream=bool(body.stream),
        include_usage=_wants_usage(body),
        mark_drafts=bool(body.mark_drafts),
        tools=tools,
        headers={**body.headers, **(HEADER if tools is not None and tools.generic else {})},
    )


@dataclass(frozen=True)
class ParsedEmbedding:
    texts: list[list[int]]
    pooling: Pooling
    dimensions: int
    as_base64: bool


def parse_embedding(
    body: EmbeddingBody, tokenizer: Tokenizer, limits: Limits, pooling: Pooling, d_model: int
) -> ParsedEmbedding:
    """`pooling` is the server's, `d_model` the length of its vectors."""
    given = body.inputs
    if len(given) > MAX_EMBEDDINGS or len(given) * d_model > MAX_EMBEDDING_NUMBERS:
        most = min(MAX_EMBEDDINGS, max(1, MAX_EMBEDDING_NUMBERS // d_model))
        raise ApiError(400, f"input has {len(given)} texts; at most {most} in one request", param="input")
    if (body.dimensions or 1) > d_model:
        raise ApiError(
            400, f"dimensions={body.dimensions} is more than this model's vectors have: {d_model}", param="dimensions"
        )
    if body.pooling == "cls" != pooling and limits.causal:
        raise ApiError(400, "pooling cls is for encoders: the first token of this model sees no other", param="pooling")
    for text in given:
        if isinstance(text, str):
            _check_size(text, 0, limits)
        else:
            _check_length(len(text), limits)
    texts, num = [], 0
    for text in given:
        ids = encode_within(text, tokenizer, 0, limits) if isinstance(text, str) else text
        if not ids:
            raise ApiError(400, f"input has {text[:20]!r}, which has no tokens", param="input")
        check_ids(ids, limits, "input")
        texts.append(ids)
        num += len(ids)
        if num > MAX_EMBEDDING_TOKENS:
            raise ApiError(
                400, f"input has more than {MAX_EMBEDDING_TOKENS} tokens; send it in several requests", param="input"
            )
    size = body.dimensions or d_model
    return ParsedEmbedding(texts, body.pooling or pooling, size, body.encoding_format == "base64")


def chat_text(
    messages: Sequence[dict[str, Any]], tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] | None = None
) -> str:
    """The prompt of a chat. The template writes the BOS."""
    if tokenizer.chat_template is None:
        raise ApiError(400, "this model has no chat template; use /v1/completions, or start with --chat-template")
    try:
        return tokenizer.render_chat(messages, tools=tools)
    except UserError as error:
        raise ApiError(400, str(error), param="messages") from None


def encode_within(text: str, tokenizer: Tokenizer, num_new: int, limits: Limits, *, special: bool = True) -> list[int]:
    """Token ids of a text that fits the context with `num_new` more; a longer one is refused, mostly before all of it
    is encoded.

    The tokens of a beginning can differ from those of the whole text around the cut, and a merge there can shorten
    what follows. Twice the context in the beginning alone is too much for any such effect.
    """
    part = FIRST_PART * limits.max_context
    while part < len(text):
        _check_length(len(tokenizer.encode(text[:part], special=special)) // 2, limits)
        part *= 4
    ids = tokenizer.encode(text, special=special)
    _check_length(len(ids) + num_new, limits)
    return ids


def tokenize(body: TokenizeBody, tokenizer: Tokenizer) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages")
    if body.messages is None:
        text, special = str(body.prompt), body.add_special_tokens
    else:
        text, special = chat_text(ChatBody.parse({"messages": body.messages}).chat, tokenizer), False
    size = len(text.encode())
    if size > MAX_TOKENIZE_BYTES:
        raise ApiError(
            400,
            f"the text has {size} bytes; /tokenize takes at most {MAX_TOKENIZE_BYTES} at a time",
            param="prompt" if body.messages is None else "messages",
            code="too_large",
        )
    return tokenizer.encode(text, special=special)


def detokenize(body: DetokenizeBody, tokenizer: Tokenizer, limits: Limits) -> str:
    if not isinstance(body.tokens, list):
        raise ApiError(400, "tokens must be a list of token ids", param="tokens")
    most = max(MIN_DETOKENIZE, limits.max_context)
    if len(body.tokens) > most:
        raise ApiError(
            400,
            f"tokens has {len(body.tokens)} ids; /detokenize takes at most {most} at a time",
            param="tokens",
            code="too_large",
        )
    if not are_ids(body.tokens):
        raise ApiError(400, "tokens must be a list of token ids", param="tokens")
    check_ids(body.tokens, limits, "tokens")
    return tokenizer.decode(body.tokens, body.skip_special_tokens)


def _prompt_ids(prompt: str | list[int], tokenizer: Tokenizer, num_new: int, limits: Limits) -> list[int]:
    """Token ids of a prompt; an empty one begins a new text."""
    if isinstance(prompt, str):
        ids = encode_within(prompt, tokenizer, num_new, limits) or tokenizer.beginning
    else:
        ids = prompt
    if not ids:
        raise ApiError(400, "the prompt is empty, and this model has no token to begin with", param="prompt")
    check_ids(ids, limits, "prompt")
    return ids


def check_ids(ids: Sequence[int], limits: Limits, param: str) -> None:
    if ids and (min(ids) < 0 or max(ids) >= limits.vocab_size):
        bad = next(t for t in ids if not 0 <= t < limits.vocab_size)
        shown = str(bad) if abs(bad) < 10**18 else "a huge number"
        raise ApiError(400, f"{param} has token id {shown}; this model's are 0 to {limits.vocab_size - 1}", param=param)


def _check_size(text: str, num_new: int, limits: Limits) -> None:
    """Refuse by its bytes what cannot fit: encoding megabytes first would take seconds."""
    if limits.spelling is not None:
        _check_length(limits.spelling.fewest_tokens(text) + num_new, limits)


def _check_length(num: int, limits: Limits) -> None:
    if num > limits.max_context:
        raise ApiError(
            400,
            f"this model's context holds {limits.max_context} tokens, but prompt and answer need at least {num}",
            code="context_length_exceeded",
        )


def _check_texts(num_prompts: int, n: int, limits: Limits) -> None:
    if num_prompts * n > limits.max_texts:
        raise ApiError(
            400,
            f"{num_prompts} prompts with n={n} ask for {num_prompts * n} texts; "
            f"this server takes at most {limits.max_texts} in one request",
            param="n" if n > 1 else "prompt",
        )


def _check_logprobs(num_tokens: int, num_top: int) -> None:
    num = num_tokens * (num_top + 1)
    if num > MAX_LOGPROB_ENTRIES:
        raise ApiError(
            400,
            f"{num_tokens} tokens with {num_top} alternatives are {num} log-probabilities; "
            f"at most {MAX_LOGPROB_ENTRIES} in one request: ask for fewer texts, tokens or alternatives",
            param="logprobs",
        )


def _samplings(
    body: Body,
    prompts: list[list[int]],
    max_tokens: int,
    num_logprobs: int | None,
    limits: Limits,
    grammar: Callable[[], Grammar] | None = None,
    shown_special: frozenset[int] = frozenset(),
) -> list[SamplingWithRules]:
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise ApiError(400, f"min_tokens={min_tokens} is more than the {max_tokens} allowed", param="min_tokens")
    if num_logprobs is not None:
        echoes = isinstance(body, CompletionBody) and bool(body.echo)
        rooms = [min(max_tokens, limits.max_context - len(p)) + echoes * len(p) for p in prompts]
        _check_logprobs(sum(rooms) * (body.n or 1), num_logprobs)
    rules = LogitRules(
        body.biases(limits.vocab_size),
        body.presence_penalty or 0.0,
        body.frequency_penalty or 0.0,
        body.repetition_penalty or 1.0,
        min_tokens,
        limits.eos_ids,
    )
    stop = body.stop_strings
    made = []
    for prompt in prompts:
        for i in range(body.n or 1):
            # The first choice is what n=1 would give; the others have seeds of their own.
            seed = secrets.randbits(63) if body.seed is None else (body.seed + i * _NEXT_SEED) % 2**64
            made.append(
                SamplingWithRules(
                    temperature=1.0 if body.temperature is None else body.temperature,
                    top_k=body.top_k or 0,
                    top_p=1.0 if body.top_p is None else body.top_p,
                    min_p=body.min_p or 0.0,
                    seed=seed,
                    max_tokens=max(1, max_tokens),
                    stop=stop,
                    ignore_eos=bool(body.ignore_eos),
                    shown_special=shown_special,
                    rules=rules,
                    num_logprobs=num_logprobs,
                    grammar=None if grammar is None else grammar(),
                    history=TokenHistory(tuple(prompt)),
                )
            )
    return made


def _wants_usage(body: Body) -> bool:
    if body.stream_options is None:
        return False
    if not body.stream:
        raise ApiError(400, "stream_options needs stream to be true", param="stream_options")
    return bool(body.stream_options.include_usage)
