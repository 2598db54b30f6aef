"""Chat templates: the Jinja programs that come with chat models, run in a sandbox with limits.

A template is a stranger's program. It runs in Jinja's immutable sandbox, and the sandbox in a process of its own
(chat_process.py) with a limit of memory, output and time: a template that never ends costs its request an error and the
process, nothing else. One process serves all templates and threads; it is started for the first chat.

The filters and globals are those that `transformers` offers, so that the same template gives the same text. Left out:
documents (passed as none).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import secrets
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoestring.errors import UserError, shortened, shown

SECONDS = 5.0  # for one chat; templates in use take a millisecond
MOST_CHARACTERS = 1 << 24  # of a rendered chat
MOST_BYTES = 1 << 30  # of the process's memory
START_SECONDS = 60.0


def fault(template: str) -> str | None:
    """Why a template cannot be read ("line 3: ..."), or None. Which chats it accepts, only rendering shows."""
    try:
        found: str | None = _process.ask({"template": template, "chat": None})["fault"]
        return found
    except _NoAnswer as error:
        return str(error)


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    special: Mapping[str, str],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """The chat as text. Anything that goes wrong inside the template is a UserError with the template's own words."""
    found = _rendered(template, messages, add_generation_prompt, special, tools)
    text: str = found["text"]
    return text


def marks_generation(template: str) -> bool:
    """Whether the template says which of its text the assistant writes."""
    return re.search(r"\{%[-+]?\s*generation\b", template) is not None


def render_spans(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    special: Mapping[str, str],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[str, list[tuple[int, int]]]:
    """The chat as text, and the characters that the assistant writes, of a template that marks them."""
    word = secrets.token_hex(8)  # unknown to the texts of the chat
    found = _rendered(template, messages, False, special, tools, [f"\ue000{word}<", f"\ue000{word}>"])
    return found["text"], [(start, end) for start, end in found["spans"]]


def _rendered(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    special: Mapping[str, str],
    tools: Sequence[Mapping[str, Any]] | None,
    marks: list[str] | None = None,
) -> dict[str, Any]:
    for position, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise UserError(f"message {position} of the chat is {shown(message)}; each needs a 'role' and a 'content'")
    chat = {
        "messages": [dict(message) for message in messages],
        "tools": [dict(tool) for tool in tools] if tools else None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        **special,
    }
    try:
        found = _process.ask({"template": template, "chat": chat, "marks": marks})
    except _NoAnswer as error:
        raise UserError(f"the model's chat template does not end well with this chat: {error}") from None
    if "fault" in found:
        raise UserError(f"the model's chat template is broken, {found['fault']}")
    if "error" in found:
        raise UserError(f"the model's chat template does not accept this chat: {shortened(found['error'], 500)}")
    return found


class _NoAnswer(Exception):
    """The process was ended, by us or by its limits."""


class _TemplateProcess:
    """chat_process.py behind a pipe; one question at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # the process id that started it: a fork must not use its parent's pipe

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        try:
            line = json.dumps(question).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f"the chat is not plain JSON ({error}); give texts, numbers, lists and objects") from None
        with self._lock:
            process = self._started()
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
                return json.loads(self._line(process, SECONDS))
            except BrokenPipeError:
                self.close()
                raise _NoAnswer("it needs too much memory or time") from None
            except BaseException:
                self.close()  # half an answer must not become the next one's beginning
                raise

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return self._process
        script = Path(__file__).with_name("chat_process.py")
        limits = [str(MOST_BYTES), str(MOST_CHARACTERS), str(SECONDS + 1)]
        self._process = subprocess.Popen(
            # -P: the folder of the script is no place to import from. Own session: Ctrl-C is not for it.
            [sys.executable, "-P", str(script), *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._owner = os.getpid()
        try:
            self._line(self._process, START_SECONDS)
        except BaseException:
            self.close()
            raise
        return self._process

    def _line(self, process: subprocess.Popen[bytes], seconds: float) -> bytes:
        assert process.stdout is not None
        ends, found = time.monotonic() + seconds, bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not found.endswith(b"\n"):
                if not selector.select(max(0.0, ends - time.monotonic())):
                    raise _NoAnswer(f"it takes more than {seconds:g} seconds")
                piece = os.read(process.stdout.fileno(), 1 << 20)
                if not piece:
                    raise _NoAnswer("it needs too much memory or time")
                found += piece
        return bytes(found)

    def close(self) -> None:
        """End the process; the next question starts another."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


_process = _TemplateProcess()
atexit.register(_process.close)
