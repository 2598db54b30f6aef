"""Tasks in jsonl files: one question per line, two kinds.

cloze   {"context": "...", "continuation": "..."}: correct when greedy decoding of the context would write the
        continuation, token for token. With one-word continuations (LAMBADA) this is last-word accuracy.
choice  {"query": "...", "choices": ["...", ...], "gold": 0}: correct when the gold choice has the largest
        log p(choice | query) / number of characters of the choice.

Question and answer are joined by one space unless either side has white space there. They are tokenised as one text and
cut where the question's own tokens end, so that an answer's first token includes its leading space, as in running text.

For few-shot prompts, chat templates and generated answers use lm-eval (lm_eval_adapter.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from shoestring.errors import UserError, shown
from shoestring.evals.scoring import Progress, score
from shoestring.json_files import json_lines, kind_of, parse_json
from shoestring.model.transformer import Decoder

Kind = Literal["cloze", "choice"]


class Encoder(Protocol):
    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class Question:
    prompt: str
    answers: tuple[str, ...]
    gold: int  # always 0 in a cloze


@dataclass(frozen=True)
class Task:
    name: str
    kind: Kind
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class TaskResult:
    name: str
    kind: Kind
    accuracy: float
    num: int
    correct: int


def read_task(path: str | Path, *, limit: int | None = None) -> Task:
    """Read a task file, or its first `limit` questions. Empty lines are skipped."""
    path = Path(path)
    if limit is not None and limit < 1:
        raise UserError(f"limit={limit} is not allowed; give 1 or more questions")
    questions: list[Question] = []
    kind: Kind | None = None
    for number, line in json_lines(path):
        if limit is not None and len(questions) == limit:
            break
        this_kind, question = _parse(line, f"{path}:{number}")
        if kind is not None and this_kind != kind:
            raise UserError(f"{path}:{number}: a {this_kind} question in a {kind} task; split them into two files")
        kind = this_kind
        questions.append(question)
    if kind is None:
        raise UserError(f"{path} holds no questions; give one JSON object per line")
    return Task(path.stem, kind, tuple(questions))


def _parse(line: str, where: str) -> tuple[Kind, Question]:
    record = parse_json(line, where, "each line must be a JSON object")
    if not isinstance(record, dict):
        raise UserError(f"{where} is {kind_of(record)}; each line must be a JSON object")
    if "continuation" in record or "context" in record:
        context, continuation = _text(record, "context", where), _text(record, "continuation", where)
        return "cloze", Question(context, (continuation,), 0)
    if "query" not in record and "choices" not in record:
        raise UserError(
            f"{where}: neither {{context, continuation}} nor {{query, choices, gold}}; it has {shown(sorted(record))}"
        )
    choices, gold = record.get("choices"), record.get("gold")
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c for c in choices):
        raise UserError(f"{where}: choices must be a list of at least two non-empty strings")
    if not isinstance(gold, int) or isinstance(gold, bool) or not 0 <= gold < len(choices):
        raise UserError(f"{where}: gold={shown(gold)} must be the number of the right choice, 0 to {len(choices) - 1}")
    return "choice", Question(_text(record, "query", where), tuple(choices), gold)


def _text(record: dict[str, Any], key: str, where: str) -> str:
    value = record.get(key)
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where}: {key} must be a non-empty string, not {shown(value)}")
    return value


def run_task(
    model: Decoder,
    tokenizer: Encoder,
    path: str | Path,
    *,
    limit: int | None = None,
    batch_rows: int = 1024,
    progress: Progress | None = None,
) -> TaskResult:
    """Accuracy on a task file. progress(questions scored, questions)."""
    task = read_task(path, limit=limit)
    correct = answer(model, tokenizer, task, batch_rows=batch_rows, progress=progress)
    num = len(task.questions)
    return TaskResult(task.name, task.kind, sum(correct) / num, num, sum(correct))


def answer(
    model: Decoder, tokenizer: Encoder, task: Task, *, batch_rows: int = 1024, progress: Progress | None = None
) -> list[bool]:
    """For each question, whether the model is right."""
    items = [_encode(tokenizer, q) for q in task.questions]
    scores = score(model, items, batch_rows=batch_rows, progress=progress)
    if task.kind == "cloze":
        return [s[0].greedy for s in scores]
    return [
        _best([s.log_prob / len(a) for s, a in zip(row, q.answers, strict=True)]) == q.gold
        for row, q in zip(scores, task.questions, strict=True)
    ]


def _best(values: Sequence[float]) -> int:
    """The first of the largest, so that a tie does not depend on the gold answer."""
    return max(range(len(values)), key=lambda i: values[i])


def _encode(tokenizer: Encoder, question: Question) -> tuple[list[int], list[list[int]]]:
    """(prompt, continuations) in tokens. Where an answer changes the tokens at the end of the question, these belong to
    the answers, for all choices alike."""
    alone = tokenizer.encode(question.prompt)
    wholes = [tokenizer.encode(join(question.prompt, a)) for a in question.answers]
    # The prompt keeps at least one token and every continuation gets at least one.
    cut = min(len(alone), *(len(w) - 1 for w in wholes))
    cut = max(1, min([cut, *(_common(alone, w) for w in wholes)]))
    return wholes[0][:cut], [w[cut:] for w in wholes]


def join(question: str, answer: str) -> str:
    gap = "" if question[-1:].isspace() or answer[:1].isspace() else " "
    return question + gap + answer


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    num = 0
    while num < min(len(a), len(b)) and a[num] == b[num]:
        num += 1
    return num
