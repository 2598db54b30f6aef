"""Text that a model writes itself: prompts completed by our engine, stored as a corpus of prompts and completions.

Data-free distillation (LLM-QAT, BitDistiller) trains a student on the teacher's own samples: it needs no corpus that
matches the teacher's training data, and every token comes with the distribution it was sampled from.

    prompts = read_prompts("some.txt", 3000)
    generate_text(model, tokenizer, prompts, Path("self.jsonl"), sampling=PAPER)

The file has one {"prompt", "completion"} per line, in the order of the prompts; the corpus reader does not count
prompts as targets. Sample i is a function of the model, prompt i and (seed, i) alone: a killed run continues at the
first missing line and ends with the same file as one that never stopped.

`own_windows` is the same for calibration, where a few thousand tokens of several kinds are enough: no file, no prompts.

Not supported: chat templates (render the prompts first: Tokenizer.render_chat), filtering, several processes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

import torch

from shoestring.errors import UserError
from shoestring.json_files import MOST_TEXT, Fields, json_lines, parse_json, read_json, read_object
from shoestring.model.tokenizer import Tokenizer
from shoestring.model.transformer import Decoder
from shoestring.paths import expand
from shoestring.runlog import OpenProgressBar, RunLog, read_jsonl
from shoestring.serve.engine.engine import Engine, Request
from shoestring.serve.engine.request import eos_ids_of
from shoestring.serve.engine.sampling import Sampling
from shoestring.train.corpus import documents

PAPER = Sampling(temperature=0.7, top_p=1.0, max_tokens=1024, seed=0)  # BitDistiller's settings
# BitDistiller's prompts from running text: the first 128 characters of paragraphs longer than 512. Paragraphs of
# wrapped text are shorter: longer than 256.
PREFIX, LONG, WRAPPED = 128, 512, 256
GROUPS = 8  # new prompts are added when 1/8 of the requests are free
# Beginnings of several kinds of text, from which a model writes a mix to calibrate on.
BEGINNINGS = (
    *("The history of the town begins in", "She was born in", "The species is found in", "The battle took place"),
    *("It was late when he", '"I do not know," she said,', "Once upon a time", "The old house stood"),
    *("import os\nimport sys\n\n\ndef ", "class ", "#include <stdio.h>\n\nint main", '{"name": "'),
    *("Officials said on Monday that", "Abstract. We study", "Dear ", "1. First,"),
)
QUESTIONS = ("How do I", "Write a short story about", "Explain why", "Write a Python function that")
PROMPT_KEYS = ("prompt", "instruction", "question", "text", "turns")


def generate_text(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: list[str],
    out: Path,
    *,
    sampling: Sampling = PAPER,
    max_requests: int | None = None,
    progress: OpenProgressBar | None = None,
) -> Path:
    """Complete every prompt and write `out`; `max_requests` of them at a time (None: 16 on a CPU, 256 on a GPU).

    A finished `out` of the same prompts and settings is kept; one of others is an error.
    """
    out = Path(out)
    if out.suffix != ".jsonl":
        raise UserError(f"out={out} must end in .jsonl, so that the corpus reader knows what it is")
    prompts = [p for p in prompts if p.strip()]
    if not prompts:
        raise UserError("there are no prompts to complete: all of them are empty")
    if sampling.seed is None:
        sampling = replace(sampling, seed=0)
    key = _key(prompts, sampling, model)
    if out.exists():
        if _read_key(out) == key:
            return out
        raise UserError(f"{out} exists already, with other prompts or settings; give another name or delete it")
    partial = out.with_name(f"{out.name}.{key}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        done = _whole_lines(partial)
        with partial.open("a", encoding="utf-8") as file:
            _complete(model, tokenizer, prompts, done, file, sampling, max_requests, progress)
        _check_not_empty(partial, sampling)
        _key_path(out).write_text(json.dumps({"key": key, "sampling": _settings(sampling)}) + "\n")
        partial.replace(out)
    except OSError as error:
        raise UserError(
            f"cannot write the generated text to {out}: {error.strerror or error}; make room and start again, what is "
            "there is kept"
        ) from error
    return out


@torch.no_grad()
def own_windows(model: Decoder, tokenizer: Tokenizer, num_windows: int, context: int, seed: int = 0) -> torch.Tensor:
    """[num_windows, context] tokens that the model writes from beginnings of several kinds, drawn at temperature 1.

    A fifth of them are turns of a chat where the model has a template."""
    prompts = [tokenizer.encode(text) for text in BEGINNINGS]
    if tokenizer.chat_template is not None:
        prompts += [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in QUESTIONS]
    starts = [prompts[i % len(prompts)][: context - 1] for i in range(num_windows)]
    at_once = min(num_windows, 8 if model.device.type == "cpu" else 64)
    engine = Engine(model, None, max_requests=at_once, max_context=context, prefix_cache=False)
    drawn = [
        Sampling(temperature=1.0, seed=seed + i, max_tokens=context - len(start), ignore_eos=True)
        for i, start in enumerate(starts)
    ]
    done = engine.generate(starts, drawn)
    rows = [[*start, *out.token_ids] for start, out in zip(starts, done, strict=True)]
    return torch.tensor(rows)


def _complete(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: list[str],
    done: int,
    file: TextIO,
    sampling: Sampling,
    max_requests: int | None,
    progress: OpenProgressBar | None,
) -> None:
    """Append the completions of prompts[done:], in order."""
    open_bar = progress or RunLog(None, quiet=True).progress
    with open_bar(len(prompts), "self-generated text") as bar:
        bar.advance(done)
        for number, prompt, text in _completions(model, tokenizer, prompts, done, sampling, max_requests):
            # The prompt without trailing space, as the model read it: the completion begins with the space.
            file.write(json.dumps({"prompt": prompt, "completion": text}, ensure_ascii=False) + "\n")
            if number % 16 == 15:
                file.flush()
            bar.advance(1)
        file.flush()
        os.fsync(file.fileno())


def _completions(
    model: Decoder, tokenizer: Tokenizer, prompts: list[str], done: int, sampling: Sampling, max_requests: int | None
) -> Iterator[tuple[int, str, str]]:
    """(number, prompt, completion) in order. At most 4 * max_requests finished ones wait for a slow one."""
    if done >= len(prompts):
        return
    on_cpu = model.device.type == "cpu"
    max_requests = max_requests or (16 if on_cpu else 256)
    positions = model.spec.max_positions
    # A prompt that would leave no room for a completion is cut to its end.
    longest = max(1, positions - min(sampling.max_tokens, positions // 2))
    encoded = [tokenizer.encode(p.rstrip())[-longest:] for p in prompts[done:]]
    context = min(positions, max(map(len, encoded)) + sampling.max_tokens)
    # The engine detokenises only for stop strings: token by token, that is a large part of the host's work for hundreds
    # of requests.
    engine = Engine(
        model,
        tokenizer if sampling.stop else None,
        eos_ids=eos_ids_of(model, tokenizer),
        max_requests=max_requests,
        max_context=context,
        chunk=max(512, 2 * max_requests),
        prefix_cache=False,
    )
    waiting: list[Request] = []  # in the order of the prompts
    added = 0
    assert sampling.seed is not None
    while added < len(encoded) or waiting:
        # Prompts are added in groups: a step with a prefill costs as much as several decode steps and cannot be
        # launched ahead. One by one, nearly every step would have a prefill.
        room = max_requests - len(engine.running) - len(engine.waiting)
        if room < -(-max_requests // GROUPS):
            room = 0
        while room > 0 and added < len(encoded) and len(waiting) < 4 * max_requests:
            room -= 1
            seed = (sampling.seed + done + added) % 2**63
            waiting.append(engine.add(encoded[added], replace(sampling, seed=seed)))
            added += 1
        if waiting[0].finish_reason is None:
            engine.step()
            continue
        number = done + added - len(waiting)
        yield number, prompts[number].rstrip(), _text(waiting.pop(0), tokenizer)


def _text(request: Request, tokenizer: Tokenizer) -> str:
    """The text that the engine's stream would give: without the end token and without an incomplete character."""
    if request.text_stream is not None:
        return request.text
    ids = request.new_tokens
    return tokenizer.decode(ids[:-1] if request.finish_reason == "stop" else ids).rstrip("\ufffd")


def _whole_lines(path: Path) -> int:
    """The number of lines of an unfinished file; an incomplete last line is removed."""
    if not path.is_file():
        return 0
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        path.write_bytes(whole)
    return whole.count(b"\n")


def _check_not_empty(path: Path, sampling: Sampling) -> None:
    if not any(str(row.get("completion", "")).strip() for row in read_jsonl(path)):
        path.unlink()
        raise UserError(
            f"the model ended every text at once (temperature {sampling.temperature}): there is nothing to train "
            "on. Give prompts that it would go on with"
        )


def _key(prompts: list[str], sampling: Sampling, model: Decoder) -> str:
    """A hash of everything that decides the text. A sample of the embedding stands for the weights."""
    weight = model.embed.effective_weight(model.compute_dtype).detach()
    drawn = weight.flatten()[:: max(1, weight.numel() // 4096)].to("cpu", torch.float32)
    decided_by = json.dumps([prompts, _settings(sampling), repr(model.spec)])
    return hashlib.blake2b(decided_by.encode() + drawn.numpy().tobytes(), digest_size=8).hexdigest()


def _settings(sampling: Sampling) -> dict[str, Any]:
    return {k: sorted(v) if isinstance(v, frozenset) else v for k, v in asdict(sampling).items()}


def _key_path(out: Path) -> Path:
    return out.with_name(out.name + ".settings")


def _read_key(out: Path) -> str | None:
    path = _key_path(out)
    return Fields(read_object(path), str(path)).text("key", None) if path.is_file() else None


# -- prompts -------------------------------------------------------------------------------------------------


def read_prompts(source: str, limit: int | None = None) -> list[str]:
    """Prompts from a file: the prompt (instruction, question, ...) of each line of a .jsonl or .json list;
    beginnings of long paragraphs for any other corpus. Where there are more than `limit`, evenly spaced ones.
    """
    path = expand(source)
    found = _listed_prompts(path) if path.suffix in (".jsonl", ".json") else _beginnings(source)
    if not found:
        raise UserError(
            f"prompts={source} gives no prompt: a text needs paragraphs longer than {WRAPPED} characters, a list "
            f"objects with one of {', '.join(PROMPT_KEYS)}"
        )
    if limit is None or limit >= len(found):
        return found
    if limit < 1:
        raise UserError(f"{limit} prompts are not enough; give 1 or more")
    return [found[i * len(found) // limit] for i in range(limit)]


def check_room(prompts: list[str], tokenizer: Tokenizer, max_new: int, least: int) -> None:
    """UserError, before hours of generation, if the completions cannot have the needed number of tokens."""
    most = sum(len(ids) + max_new + 1 for ids in tokenizer.encode_batch(prompts))
    if most < least:
        raise UserError(
            f"{len(prompts)} prompts with up to {max_new} tokens written after each are a text of {most:,} tokens at "
            f"most, and {least:,} are needed: give more prompts, longer completions, or fewer or shorter rows"
        )


def _beginnings(source: str) -> list[str]:
    """A line is a paragraph; where no line is long, the lines are wrapped, and paragraphs end at blank lines."""
    texts = [document.text for document in documents(source, key="prompts")]
    lines = [line.strip() for text in texts for line in text.split("\n")]
    if whole := [line[:PREFIX] for line in lines if len(line) > LONG]:
        return whole
    paragraphs = [" ".join(part.split()) for text in texts for part in re.split(r"\n\s*\n", text)]
    return [paragraph[:PREFIX] for paragraph in paragraphs if len(paragraph) > WRAPPED]


def _listed_prompts(path: Path) -> list[str]:
    remedy = "repair it or give other prompts"
    if path.suffix == ".json":
        rows = read_json(path, MOST_TEXT, remedy)
    else:
        rows = [parse_json(line, f"prompts={path}:{number}", remedy) for number, line in json_lines(path)]
    if not isinstance(rows, list):
        raise UserError(f"prompts={path} holds a {type(rows).__name__}; give a list of objects or strings")
    return [p for p in map(_prompt_of, rows) if p]


def _prompt_of(row: Any) -> str:
    if isinstance(row, str):
        return row.strip()
    if not isinstance(row, dict):
        return ""
    value = next((row[key] for key in PROMPT_KEYS if row.get(key)), "")
    if isinstance(value, list):  # turns of a conversation: the first
        value = value[0] if value else ""
    text = value.strip() if isinstance(value, str) else ""
    # Alpaca's instructions come with an input of their own.
    extra = row.get("input")
    return f"{text}\n{extra.strip()}" if text and isinstance(extra, str) and extra.strip() else text
