"""Tool calls: how models write them, found again in their text while it is written, and as grammars.

A chat template that takes tools also teaches a way to write calls. Three are known, by the families that document them:

    hermes    <tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>, repeated      (Hermes, Qwen2.5, Qwen3)
    llama3    {"name": ..., "parameters": {...}} as the whole answer                      (Llama 3.1 to 3.3)
    mistral   [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or, where the template has [ARGS],
              [TOOL_CALLS]name[ARGS]{...}, repeated                                       (Mistral)

`ToolCallParser` takes text in pieces and gives out text and parts of calls as early as they are certain. A whole answer
and a stream come from the same parser. What only looks like a call stays text. Arguments are passed on as the model
wrote them, so they may be bad JSON where no grammar constrains them.

Left out: calls in XML (Qwen3-Coder, GLM) or Python syntax; checking arguments against their schema.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shoestring.model.tokenizer import Tokenizer
from shoestring.serve.engine.request import held_back

FORMAT_NAMES = ("hermes", "llama3", "mistral")
MAX_PARALLEL = 16  # calls that a grammar allows in one answer
ALNUM = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ToolFormat:
    """How a family writes calls."""

    name: Literal["hermes", "llama3", "mistral"]
    begin: str = ""  # before a call, or before the list of calls; "": a call is the whole answer
    end: str = ""
    named: bool = False  # mistral: the name stands before the arguments, not in an object

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that may be special tokens and must not be hidden."""
        more = ("[ARGS]", "[CALL_ID]") if self.named else ()
        return tuple(mark for mark in (self.begin, self.end, *more) if mark)

    def call_id(self) -> str:
        if self.name == "mistral":  # its templates refuse ids of another form
            return "".join(secrets.choice(ALNUM) for _ in range(9))
        return "call_" + secrets.token_hex(12)


def format_named(name: str, template: str) -> ToolFormat:
    if name == "mistral":
        return ToolFormat("mistral", "[TOOL_CALLS]", named="[ARGS]" in template)
    if name == "llama3":
        return ToolFormat("llama3")
    return ToolFormat("hermes", "<tool_call>", "</tool_call>")


def detect_format(template: str) -> ToolFormat | None:
    """The format that a chat template asks for; None where it has no tools or writes calls in another way."""
    if not takes_tools(template):
        return None
    if "[TOOL_CALLS]" in template:
        return format_named("mistral", template)
    if "<tool_call>" in template:  # with one of these the calls inside are XML
        return None if "<function=" in template or "<arg_key>" in template else format_named("hermes", template)
    if '"parameters": ' in template and "<|start_header_id|>" in template:
        return format_named("llama3", template)
    return None


def takes_tools(template: str) -> bool:
    return "tools" in template


def shown_ids(form: ToolFormat, tokenizer: Tokenizer) -> frozenset[int]:
    """The special tokens that mark calls."""
    ids = (tokenizer.backend.token_to_id(mark) for mark in form.marks)
    return frozenset(i for i in ids if i is not None and i in tokenizer.special_ids)


# -- the text of an answer -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextPart:
    text: str


@dataclass(frozen=True)
class CallPart:
    """What is new of call `index`: its name comes once and first."""

    index: int
    name: str | None
    arguments: str


Part = TextPart | CallPart


class ToolCallParser:
    """Text in, parts out. `names` are the tools there are; only the first `max_calls` calls are given out."""

    def __init__(self, form: ToolFormat, names: Sequence[str], max_calls: int | None = None) -> None:
        self._form, self._names, self._max_calls = form, frozenset(names), max_calls
        self._state: Literal["text", "begun", "call", "after", "plain"] = "text"
        self._held = ""  # not looked at yet, or not certain
        self._raw = ""  # of the call that is read: its text, if it turns out to be none
        self._call = CallScanner()
        self._num_calls = 0
        self._parts: list[Part] = []

    def feed(self, text: str) -> list[Part]:
        self._held += text
        while self._advance():
            pass
        return self._taken()

    def finish(self) -> list[Part]:
        """What was held back, when the text has ended. A call that was cut off stays as far as it got."""
        if self._state == "call" and not self._call.announced:
            self._give_text(self._raw)
        elif self._state == "begun":
            self._give_text(self._raw + self._held)
        elif self._state in ("text", "plain") and (self._held.strip() or not self._num_calls):
            self._give_text(self._held)
        self._held = ""
        return self._taken()

    def _taken(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def _give_text(self, text: str) -> None:
        if text:
            self._parts.append(TextPart(text))

    def _advance(self) -> bool:
        """Take one step through what is held; False: more text is needed."""
        if self._state == "plain":
            self._give_text(self._held)
            self._held = ""
            return False
        if self._state == "text":
            return self._find_begin() if self._form.begin else self._find_object()
        if self._state == "begun":
            return self._enter_call()
        if self._state == "call":
            return self._read_call()
        return self._leave_call()

    def _find_begin(self) -> bool:
        before, mark, rest = self._held.partition(self._form.begin)
        if mark:
            self._give_text(before.rstrip() if self._num_calls == 0 else before.strip())
            self._held, self._state, self._raw = rest, "begun", mark
            return True
        # White space is held as well: before a call it does not belong to the answer.
        certain = self._held[: len(self._held) - held_back(self._held, (self._form.begin,))].rstrip()
        self._give_text(certain)
        self._held = self._held[len(certain) :]
        return False

    def _find_object(self) -> bool:
        """Without a mark, a call is an answer that begins with an object; anything else is text to its end."""
        rest = self._held.lstrip()
        if not rest:
            return False
        if rest.startswith("{"):
            self._raw = ""
            self._begin_call(rest)
        else:
            self._state = "plain"
        return True

    def _begin_call(self, rest: str, name: str | None = None) -> None:
        self._raw += self._held.removesuffix(rest)
        self._held, self._state = rest, "call"
        self._call = CallScanner(name)

    def _enter_call(self) -> bool:
        rest = self._held.lstrip()
        if not rest:
            return False
        if rest[0] == "[" and self._form.name == "mistral":
            rest = rest[1:].lstrip()
            if not rest:
                return False
        if rest[0] == "{":
            self._begin_call(rest)
            return True
        if self._form.named:
            head, mark, arguments = rest.partition("[ARGS]")
            if not mark:
                return False
            self._begin_call(arguments, head.partition("[CALL_ID]")[0].strip())
            return True
        self._give_text(self._raw)
        self._state = "text"
        return True

    def _read_call(self) -> bool:
        num = self._call.feed(self._held)
        self._raw, self._held = self._raw + self._held[:num], self._held[num:]
        call = self._call
        unknown = not self._form.begin and call.name is not None and call.name not in self._names
        if unknown or ((call.broken or call.done) and call.name is None):
            self._give_text(self._raw)
            self._state = "text" if self._form.begin else "plain"
            return True
        if call.name is not None:
            self._give_call(call)
        if not (call.done or call.broken):
            return False
        self._state = "after"
        return True

    def _give_call(self, call: CallScanner) -> None:
        first = not call.announced
        if first:
            self._num_calls += 1
        call.announced = True
        arguments = call.take_arguments()
        if (first or arguments) and (self._max_calls is None or self._num_calls <= self._max_calls):
            self._parts.append(CallPart(self._num_calls - 1, call.name if first else None, arguments))

    def _leave_call(self) -> bool:
        rest, form = self._held.lstrip(), self._form
        if not rest or (form.end.startswith(rest) and rest != form.end):
            return False
        if form.end and rest.startswith(form.end):
            self._held, self._state = rest[len(form.end) :].lstrip(), "text"
            return True
        separator = {"mistral": ",", "llama3": ";"}.get(form.name)
        if rest[0] == separator:
            self._held, self._raw, self._state = rest[1:], rest[0], "begun"
        elif rest[0] == "]" and form.name == "mistral":
            self._held, self._state = rest[1:], "text"
        else:
            self._held, self._state = rest, "text" if form.begin else "plain"
        return True


class CallScanner:
    """One call, a character at a time: an object with a name and arguments, or arguments alone where `name` is given.
    It follows strings and brackets; it does not check JSON."""

    def __init__(self, name: str | None = None) -> None:
        self.name, self.done, self.broken, self.announced = name, False, False, False
        self._expects: Literal["object", "key", "colon", "value", "inside", "comma"] = (
            "object" if name is None else "value"
        )
        self._alone = name is not None
        self._key = "arguments" if self._alone else ""
        self._reads_key = False
        self._value = ""  # the key or value that is read
        self._depth, self._in_string, self._escaped = 0, False, False
        self._arguments, self._num_taken, self._has_arguments = "", 0, False

    def feed(self, text: str) -> int:
        """How many characters belong to the call."""
        for i, letter in enumerate(text):
            if not self._step(letter):
                self.broken = True
                return i
            if self.done:
                return i + 1
        return len(text)

    def take_arguments(self) -> str:
        """What is new of them and certain."""
        if self.done and not self._has_arguments:
            self._arguments, self._has_arguments = "{}", True
        fresh = self._arguments[self._num_taken :]
        self._num_taken += len(fresh)
        return fresh

    def _step(self, letter: str) -> bool:
        """Whether the letter fits."""
        if self._expects == "inside":
            return self._continue(letter)
        if letter.isspace():
            return True
        if self._expects == "object":
            self._expects = "key"
            return letter == "{"
        if self._expects == "key":
            if letter == "}":
                self.done = True
            elif letter == '"':
                self._begin(letter, key=True)
            return letter in '}"'
        if self._expects == "colon":
            self._expects = "value"
            return letter == ":"
        if self._expects == "value":
            self._begin(letter, key=False)
            return letter not in ",:]}"
        self._expects = "key"
        self.done = letter == "}"
        return letter in ",}"

    def _begin(self, letter: str, *, key: bool) -> None:
        self._value, self._reads_key, self._expects = letter, key, "inside"
        self._in_string, self._escaped, self._depth = letter == '"', False, int(letter in "[{")
        self._note_arguments(letter)

    def _continue(self, letter: str) -> bool:
        if self._in_string:
            self._value += letter
            self._note_arguments(letter)
            if self._escaped:
                self._escaped = False
            elif letter == "\\":
                self._escaped = True
            elif letter == '"':
                self._in_string = False
                if self._depth == 0:
                    self._end_value()
            return True
        if self._depth == 0:  # a number or a word ends with what follows it
            if letter in ",}" or letter.isspace():
                self._end_value()
                return self.done or self._step(letter)
            self._value += letter
            return True
        self._value += letter
        self._note_arguments(letter)
        self._in_string = letter == '"'
        self._depth += (letter in "[{") - (letter in "]}")
        if self._depth == 0:
            self._end_value()
        return True

    @property
    def _in_arguments(self) -> bool:
        return not self._reads_key and self._key in ("arguments", "parameters")

    def _note_arguments(self, letter: str) -> None:
        """An object is given out while it is read; what else stands for arguments when it is whole."""
        if self._in_arguments and self._value.startswith("{"):
            self._arguments += letter
            self._has_arguments = True

    def _end_value(self) -> None:
        value, self._expects = self._value, "comma"
        if self._reads_key:
            self._key, self._expects = _string(value) or "", "colon"
        elif self._in_arguments:
            if not value.startswith("{"):
                text = _string(value)
                self._arguments, self._has_arguments = (
                    "{}" if value == "null" else value if text is None else text,
                    True,
                )
            self.done = self._alone
        elif self._key == "name":
            self.name = _string(value)


def _string(text: str) -> str | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


# -- grammars ------------------------------------------------------------------------------------------------


def call_grammar(
    form: ToolFormat,
    parameters: Mapping[str, dict[str, Any]],
    tokenizer: Tokenizer,
    *,
    parallel: bool,
    spaces: str,
    or_text: bool = False,
) -> str:
    """A Lark grammar of llguidance for one or more calls of these functions, given by name with their JSON schemas.
    `spaces` is a regular expression of what may stand between values. `or_text`: or a text that begins with no brace,
    for the format without marks."""

    def mark(text: str) -> str:
        """A token where the tokenizer has one: a special token is no text to the library."""
        token = tokenizer.backend.token_to_id(text)
        return json.dumps(text) if token is None else f"<[{token}]>"

    rules = []
    for i, (name, schema) in enumerate(parameters.items()):
        embedded = json.dumps({**_object_schema(schema), "x-guidance": _spacing(spaces)})
        rules.append(f"arguments_{i}: %json {embedded}")
        if form.named:
            rules.append(f"call_{i}: {json.dumps(name)} {mark('[ARGS]')} arguments_{i}")
        else:
            key = "parameters" if form.name == "llama3" else "arguments"
            before = json.dumps(f'{{"name": "{name}", "{key}": ')
            rules.append(f'call_{i}: {before} arguments_{i} "}}"')
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(parameters))))
    more = f"{{0,{MAX_PARALLEL - 1}}}"
    if form.name == "hermes":
        rules.append(f'marked: {mark(form.begin)} "\\n" call "\\n" {mark(form.end)}')
        start = f'marked ("\\n" marked){more}' if parallel else "marked"
    elif form.named:
        rules.append(f"marked: {mark(form.begin)} call")
        start = f"marked{{1,{MAX_PARALLEL}}}" if parallel else "marked"
    elif form.name == "mistral":
        start = f'{mark(form.begin)} " "? "[" call' + (f' (", " call){more}' if parallel else "") + ' "]"'
    else:
        start = "call"
    if or_text:
        start += " | TEXT"
        rules.append(r"TEXT: /([^{ \t\r\n](.|\n)*)?/")
    return "\n".join([f"start: {start}", *rules]) + "\n"


def _object_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Arguments are an object, whether or not their schema says so."""
    says = {"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"} & schema.keys()
    return schema if says else {**schema, "type": "object"}


def _spacing(pattern: str) -> dict[str, Any]:
    return {"whitespace_flexible": True, "whitespace_pattern": pattern}
