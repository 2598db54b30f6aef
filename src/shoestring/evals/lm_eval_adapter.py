"""Our models inside lm-eval (EleutherAI's evaluation harness), an optional extra: pip install 'shoestring[eval]'.

    lm = lm_eval_model(model, tokenizer)
    results = lm_eval.simple_evaluate(model=lm, tasks=["lambada_openai"])

The class is made inside the function, so that importing this file does not need lm-eval. As in lm-eval's own Hugging
Face model, contexts and continuations are tokenised together and cut where the context ends, white space at the end of
a context belongs to the continuation, an empty context is the BOS (else EOS) token, and prompts that are too long lose
their beginning. Requests with the same context (the choices of a question) share its computation.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

from shoestring.errors import UserError
from shoestring.evals.scoring import Score, score
from shoestring.model.tokenizer import Tokenizer
from shoestring.model.transformer import Decoder
from shoestring.serve.engine.engine import Engine
from shoestring.serve.engine.sampling import Sampling

MAX_NEW_TOKENS = 256  # lm-eval's own default where a task does not say


def lm_eval_model(model: Decoder, tokenizer: Tokenizer, *, batch_rows: int = 1024, max_requests: int = 8) -> Any:
    """An `lm_eval.api.model.LM` that evaluates `model`."""
    try:
        from lm_eval.api.model import LM
    except ImportError:
        raise UserError("lm-eval is not installed; install the extra: pip install 'shoestring[eval]'") from None

    scorer = Scorer(model, tokenizer, batch_rows=batch_rows, max_requests=max_requests)

    class ShoestringLM(LM):
        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            return scorer.loglikelihood([r.args for r in requests])

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            return [scorer.loglikelihood_rolling(r.args[0]) for r in requests]

        def generate_until(self, requests: list[Any]) -> list[str]:
            return scorer.generate_until([r.args for r in requests])

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return tokenizer.render_chat(chat_history, add_generation_prompt)

        def chat_template(self, chat_template: bool | str = False) -> str | None:
            return tokenizer.chat_template or ""

        @property
        def tokenizer_name(self) -> str:
            return tokenizer.fingerprint

    return ShoestringLM()


class Scorer:
    """The three requests of lm-eval, on plain strings and numbers."""

    def __init__(self, model: Decoder, tokenizer: Tokenizer, *, batch_rows: int = 1024, max_requests: int = 8) -> None:
        self.model, self.tokenizer, self.batch_rows = model, tokenizer, batch_rows
        self.engine = Engine(model, tokenizer, max_requests=max_requests)
        self.context = model.spec.max_positions

    @property
    def prefix_id(self) -> int:
        """The token that stands for an empty context."""
        for token in (self.tokenizer.bos_id, self.tokenizer.eos_id):
            if token is not None:
                return token
        raise UserError("scoring text without a context needs a BOS or EOS token; this tokenizer has neither")

    def loglikelihood(self, pairs: list[tuple[str, str]]) -> list[tuple[float, bool]]:
        """(log p(continuation | context), is it what greedy decoding writes) per (context, continuation)."""
        encoded = [self.encode_pair(context, continuation) for context, continuation in pairs]
        items = [
            (list(prompt), [continuation for _, continuation in group])
            for prompt, group in groupby((e for e in encoded if e[1]), key=lambda pair: pair[0])
        ]
        scores = iter(s for row in score(self.model, items, batch_rows=self.batch_rows) for s in row)
        nothing = Score(0.0, True)  # a continuation without tokens is certain
        found = [next(scores) if continuation else nothing for _, continuation in encoded]
        return [(s.log_prob, s.greedy) for s in found]

    def loglikelihood_rolling(self, text: str) -> float:
        """log p(text), every token predicted once with as much context as fits, the first from the prefix token."""
        items = [(prompt, [target]) for prompt, target in self.rolling(self.tokenizer.encode(text))]
        return sum(row[0].log_prob for row in score(self.model, items, batch_rows=self.batch_rows))

    def rolling(self, tokens: list[int]) -> list[tuple[list[int], list[int]]]:
        """(prompt, targets) per window of at most `context` tokens."""
        if not tokens:
            return []
        found = [([self.prefix_id], tokens[: self.context])]
        for start in range(self.context, len(tokens), self.context):
            stop = min(start + self.context, len(tokens))
            found.append((tokens[stop - self.context - 1 : start], tokens[start:stop]))
        return found

    def generate_until(self, requests: list[tuple[str, dict[str, Any]]]) -> list[str]:
        prompts, samplings = [], []
        for context, settings in requests:
            sampling = read_settings(settings)
            # The prompt is cut to make room for new tokens, as in lm-eval.
            room = max(1, self.engine.max_context - sampling.max_tokens)
            prompts.append((self.tokenizer.encode(context) or [self.prefix_id])[-room:])
            samplings.append(sampling)
        return [c.text for c in self.engine.generate(prompts, samplings)]

    def encode_pair(self, context: str, continuation: str) -> tuple[tuple[int, ...], list[int]]:
        stripped = context.rstrip()
        continuation = context[len(stripped) :] + continuation
        if not stripped:
            return (self.prefix_id,), self.tokenizer.encode(continuation, special=False)
        prompt = self.tokenizer.encode(stripped)
        whole = self.tokenizer.encode(stripped + continuation)
        return tuple(whole[: len(prompt)]), whole[len(prompt) :]


def read_settings(settings: dict[str, Any]) -> Sampling:
    """lm-eval's generation settings as a Sampling; UserError for unknown ones."""
    known = dict(settings)

    def take(name: str, default: Any = None) -> Any:
        value = known.pop(name, None)
        return default if value is None else value

    until = take("until", ())
    stop = (until,) if isinstance(until, str) else tuple(s for s in until if s)
    draws, temperature = take("do_sample"), float(take("temperature", 0.0))
    if draws is False:
        temperature = 0.0
    elif draws and temperature == 0:
        temperature = 1.0
    sampling = Sampling(
        temperature=temperature,
        top_k=int(take("top_k", 0)),
        top_p=float(take("top_p", 1.0)),
        min_p=float(take("min_p", 0.0)),
        seed=take("seed"),
        max_tokens=int(take("max_gen_toks", MAX_NEW_TOKENS)),
        stop=stop,
    )
    if known:
        raise UserError(f"generation settings {sorted(known)} are not supported; remove them from the task")
    return sampling
