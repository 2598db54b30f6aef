"""Examples of fine-tuning: what a row of a data file means, and which characters of its text are learned.

    messages: [{role, content}, ...]              a chat, in the model's chat template
    conversations: [{from, value}, ...]           the same in ShareGPT's words
    prompt, completion                            texts as they are, or lists of messages
    instruction, input (optional), output         a question and its answer, in the chat template where there is one
    text                                          all of it is learned
    prompt, chosen, rejected                      a preference pair, of texts or messages; the prompt may be left out of
                                                  lists that begin with the same messages

The assistant's text is found by the template's own {% generation %} marks. Without them the chat up to a turn, rendered
with the generation prompt, must be how the chat with that turn begins; its rest is the turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shoestring.errors import UserError, shown
from shoestring.json_files import kind_of
from shoestring.model.tokenizer import Tokenizer
from shoestring.train.corpus import list_files, read_rows

Turn = dict[str, Any]
Words = str | tuple[Turn, ...]
Span = tuple[int, int]
TrainOn = Literal["assistant", "last", "all"]

SUFFIXES = (".jsonl", ".json", ".parquet")
ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
SHAREGPT |= {"observation": "tool", "function_response": "tool", **{role: role for role in ROLES}}
FIELDS = "messages, conversations, prompt and completion, instruction and output, text, or prompt, chosen and rejected"


@dataclass(frozen=True)
class Example:
    """A prompt and its answer; of a preference pair two answers, the better one first. Turns are a chat. `loose`: a
    model without a chat template may read the turns as plain text."""

    where: str  # for errors
    prompt: Words
    answers: tuple[Words, ...]
    tools: tuple[Any, ...] = ()
    loose: bool = False

    @property
    def is_pair(self) -> bool:
        return len(self.answers) == 2


def read_examples(source: str, key: str = "data") -> Iterator[Example]:
    """Every example of a file, a folder or a glob, in a fixed order."""
    for file in list_files(source, key, SUFFIXES):
        for where, row in read_rows(file.path):
            yield example_of(row, where)


def example_of(row: Any, where: str) -> Example:
    if not isinstance(row, dict):
        raise UserError(f"{where} is {kind_of(row)}; expected an object with {FIELDS}")
    given = {key: value for key, value in row.items() if value is not None}
    tools = given.get("tools", [])
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(f"{where}: tools is {kind_of(tools)}; give a list of JSON schemas")
    if "chosen" in given and "rejected" in given:
        return _pair(given, where, tuple(tools))
    if "messages" in given or "conversations" in given:
        turns = _turns(given.get("messages", given.get("conversations")), where)
        _check_answers(turns, where)
        return Example(where, (), (turns,), tuple(tools))
    if "prompt" in given and "completion" in given:
        prompt, completion = _words(given["prompt"], where), _words(given["completion"], where)
        if isinstance(prompt, str) != isinstance(completion, str):
            raise UserError(f"{where}: prompt and completion must both be texts or both be lists of messages")
        _check_filled(completion, where, "completion")
        return Example(where, prompt, (completion,), tuple(tools))
    if "instruction" in given and "output" in given:
        texts = [given["instruction"], given.get("input", ""), given["output"]]
        if not all(isinstance(text, str) for text in texts):
            raise UserError(f"{where}: instruction, input and output must be texts")
        _check_filled(texts[2], where, "output")
        question = "\n\n".join(text for text in texts[:2] if text)
        answer: Turn = {"role": "assistant", "content": texts[2]}
        return Example(where, ({"role": "user", "content": question},), ((answer,),), loose=True)
    if isinstance(given.get("text"), str):
        _check_filled(given["text"], where, "text")
        return Example(where, "", (given["text"],))
    raise UserError(f"{where} has the fields {shown(sorted(row))}; expected {FIELDS}")


def _pair(given: dict[str, Any], where: str, tools: tuple[Any, ...]) -> Example:
    prompt = _words(given["prompt"], where) if "prompt" in given else ""
    answers = [_words(given[key], where) for key in ("chosen", "rejected")]
    if not any(isinstance(answer, str) for answer in answers) and not prompt:
        common = 0
        for a, b in zip(*answers, strict=False):
            if a != b:
                break
            common += 1
        prompt, answers = answers[0][:common], [answer[common:] for answer in answers]
    if len({isinstance(words, str) for words in (prompt, *answers)}) > 1:
        raise UserError(f"{where}: prompt, chosen and rejected must all be texts or all be lists of messages")
    if answers[0] == answers[1]:
        raise UserError(f"{where}: chosen and rejected are equal, which says nothing; leave the pair out")
    for key, answer in zip(("chosen", "rejected"), answers, strict=True):
        _check_filled(answer, where, key)
    return Example(where, prompt, tuple(answers), tools)


def _words(value: Any, where: str) -> Words:
    return value if isinstance(value, str) else _turns(value, where)


def _turns(value: Any, where: str) -> tuple[Turn, ...]:
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        raise UserError(f"{where}: a chat is a list of messages with role and content, not {kind_of(value)}")
    turns = []
    for number, turn in enumerate(value, start=1):
        if "from" in turn and "role" not in turn:
            turn = {"role": SHAREGPT.get(str(turn["from"]), turn["from"]), "content": turn.get("value")}
        turn = {key: held for key, held in turn.items() if held is not None}  # parquet has all keys in every row
        if turn.get("role") not in ROLES:
            raise UserError(f"{where}: turn {number} has the role {shown(turn.get('role'))}; give {', '.join(ROLES)}")
        if not isinstance(turn.get("content", ""), str):
            raise UserError(f"{where}: the content of turn {number} is {kind_of(turn['content'])}; only text is read")
        turns.append({"content": "", **turn})
    return tuple(turns)


def _check_answers(turns: tuple[Turn, ...], where: str) -> None:
    answers = [(number, turn) for number, turn in enumerate(turns, start=1) if turn["role"] == "assistant"]
    if not answers:
        raise UserError(f"{where} has no assistant turn, so there is nothing to learn; add one, or leave the chat out")
    for number, turn in answers:
        if not turn["content"].strip() and not turn.get("tool_calls"):
            raise UserError(f"{where}: turn {number}, the assistant's, is empty; fill it, or leave the chat out")


def _check_filled(words: Words, where: str, key: str) -> None:
    if not isinstance(words, str):
        _check_answers(words, f"{where}: {key}")
    elif not words.strip():
        raise UserError(f"{where}: {key} is empty; fill it, or leave the row out")


# -- text and what of it is learned --------------------------------------------------------------------------


@dataclass(frozen=True)
class Rendered:
    """The text of an example with one of its answers. `ends`: the end-of-text token follows, and is learned; chats
    have their own ends."""

    text: str
    spans: list[Span]
    ends: bool


def render(example: Example, answer: Words, tokenizer: Tokenizer, train_on: TrainOn) -> Rendered:
    """UserError where the template cannot tell the assistant's words from the others."""
    prompt = example.prompt
    if example.loose and tokenizer.chat_template is None and not (isinstance(prompt, str) or isinstance(answer, str)):
        prompt, answer = prompt[0]["content"] + "\n\n", answer[0]["content"]
    if isinstance(prompt, str) or isinstance(answer, str):
        assert isinstance(prompt, str) and isinstance(answer, str)
        start = 0 if train_on == "all" else len(prompt)
        return Rendered(prompt + answer, [(start, len(prompt) + len(answer))], True)
    if tokenizer.chat_template is None:
        raise UserError(f"{example.where} is a chat, and this model has no chat template; give prompt and completion")
    turns, tools = [*prompt, *answer], list(example.tools) or None
    if train_on == "all":
        text = tokenizer.render_chat(turns, False, tools)
        return Rendered(text, [(0, len(text))], False)
    learned = [i for i in range(len(prompt), len(turns)) if turns[i]["role"] == "assistant"]
    learned = learned[-1:] if train_on == "last" else learned
    if (marked := tokenizer.render_spans(turns, tools)) is not None:
        text, spans = marked
        own = spans if train_on == "assistant" and not prompt else spans[-len(learned) :]
        return Rendered(text, own, False)
    text = tokenizer.render_chat(turns, False, tools)
    found = [_turn_span(example.where, turns, i, text, tokenizer, tools) for i in learned]
    return Rendered(text, [_without_rest(text, span, tokenizer) for span in found], False)


def _turn_span(
    where: str, turns: Sequence[Turn], i: int, text: str, tokenizer: Tokenizer, tools: list[Any] | None
) -> Span:
    before = tokenizer.render_chat(turns[:i], True, tools)
    after = text if i == len(turns) - 1 else tokenizer.render_chat(turns[: i + 1], False, tools)
    if after.startswith(before) and text.startswith(after):
        return len(before), len(after)
    remedy = "train_on=last" if i < len(turns) - 1 else "train_on=all"
    raise UserError(
        f"{where}: turn {i + 1} cannot be told from the rest of the chat, because this chat template has no generation "
        f"marks and writes earlier turns otherwise once others follow; give {remedy}, or a template with marks"
    )


def _without_rest(text: str, span: Span, tokenizer: Tokenizer) -> Span:
    """Without the line end that many templates write behind the token that ends a turn: the model stops before it."""
    start, end = span
    kept = text[start:end].rstrip()
    return (start, start + len(kept)) if kept.endswith(tokenizer.end_texts) else span
