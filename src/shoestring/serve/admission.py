"""What an engine is asked for, checked before anything runs: prompts, limits, the tokens that end a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, get_args

from shoestring.errors import UserError, suggest
from shoestring.model.transformer import Decoder
from shoestring.serve.sampling import Sampling
from shoestring.serve.text import TokenStream
from shoestring.serve.verify import Rule

Prompt = str | Sequence[int]


class TextCodec(Protocol):
    """The part of `model.tokenizer.Tokenizer` that the engine uses."""

    eos_ids: set[int]

    def encode(self, text: str) -> list[int]: ...
    def stream(self) -> TokenStream: ...


def prompt_tokens(prompt: Prompt, tokenizer: TextCodec | None, vocab: int, max_context: int) -> list[int]:
    """The token ids of a prompt that the engine can continue."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise UserError(
                "a text prompt needs a tokenizer, and this model came without one; give token ids"
            )
        tokens = tokenizer.encode(prompt)
    else:
        tokens = [int(t) for t in prompt]
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
    return tokens


def eos_ids_of(model: Decoder, tokenizer: TextCodec | None) -> set[int]:
    ids = set() if tokenizer is None else set(tokenizer.eos_ids)
    return ids | set(model.spec.eos_ids)


def check_least(*, least: int = 1, **values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < least:
            raise UserError(f"{name}={value} is not allowed; give {least} or more")


def check_rule(rule: str) -> None:
    if rule not in ("auto", *get_args(Rule)):
        raise UserError(
            f"rule={rule!r} is not known; give coupled, token, block or auto."
            + suggest(rule, ["auto", *get_args(Rule)])
        )


def context_limit(positions: int, max_context: int | None, block_size: int, num_blocks: int | None) -> int:
    """Tokens of one request at most: a request alone always fits the blocks there are."""
    context = positions if max_context is None else max_context
    if not 1 <= context <= positions:
        raise UserError(
            f"max_context={context} does not fit this model, which has {positions} positions; "
            f"give 1 to {positions}"
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


def samplings_for(
    prompts: Sequence[Prompt], sampling: Sampling | Sequence[Sampling] | None
) -> list[Sampling | None]:
    """One for each prompt."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        raise UserError("generate() takes a list of prompts; put the single prompt into a list")
    if sampling is None or isinstance(sampling, Sampling):
        return [sampling] * len(prompts)
    samplings: list[Sampling | None] = list(sampling)
    if len(samplings) != len(prompts):
        raise UserError(
            f"{len(prompts)} prompts but {len(samplings)} samplings; give one for all or one each"
        )
    return samplings
