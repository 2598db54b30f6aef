"""The process that runs chat templates: a script of its own, started by chat.py, which imports nothing of the package.

A line of JSON in, a line of JSON out:

    {"template": ..., "chat": null}                      -> {"fault": null} or {"fault": "line 3: ..."}
    {"template": ..., "chat": {"messages": ..., ...}}    -> {"text": ...} or {"error": ...}
    {..., "marks": [OPEN, CLOSE]}                        -> {"text": ..., "spans": [[start, end], ...]}: the assistant's
                                                            words, where the template marks them

Jinja's immutable sandbox keeps a template away from Python's internals, but not from `10 ** 10 ** 10`, from a string
that doubles forty times or from loops in loops. Memory, output and time are therefore limits of this process, which
the other side can end at any moment without losing anything.
"""

from __future__ import annotations

import datetime
import json
import re
import resource
import signal
import sys
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MARKS = ("generation_opens__", "generation_closes__")  # variables: undefined, which prints nothing, or the marks


class _GenerationBlock(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %} marks assistant text for training; rendered as what is inside."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        opens, closes = (jinja2.nodes.Output([jinja2.nodes.Name(name, "load")]) for name in MARKS)
        return [opens, *parser.parse_statements(("name:endgeneration",), drop_needle=True), closes]


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes <, > and & for HTML; models were tuned on text without that.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment.from_string(template)


def fault(template: str) -> str | None:
    if not template.strip():
        return "it is empty"
    try:
        _compile(template)
    except jinja2.TemplateSyntaxError as error:
        return f"line {error.lineno}: {(error.message or '').rstrip('.')}"
    except SyntaxError as error:
        return error.msg  # of the Python that Jinja makes ('break' outside loop); its lines say nothing
    except RecursionError:
        return "it is nested too deeply"
    except MemoryError:
        return "it needs too much memory"
    except Exception as error:  # constants are computed while compiling: {{ 1 // 0 }}
        return f"{type(error).__name__}: {error}"
    return None


def render(template: str, chat: dict[str, Any], most_characters: int) -> dict[str, str]:
    pieces, length = [], 0
    try:
        for piece in _compile(template).generate(**chat):
            pieces.append(piece)
            length += len(piece)
            if length > most_characters:
                return {"error": f"it writes more than {most_characters:,} characters"}
        return {"text": "".join(pieces)}
    except MemoryError:
        return {"error": "it needs too much memory"}
    except Exception as error:  # a template can raise whatever Python raises
        return {"error": f"{error}" or type(error).__name__}


def spans_of(marked: str, opens: str, closes: str) -> dict[str, Any]:
    """The text without its marks, and where they stood."""
    text, spans, start = "", [], 0
    for piece in re.split(f"({re.escape(opens)}|{re.escape(closes)})", marked):
        if piece == opens:
            start = len(text)
        elif piece == closes:
            spans.append([start, len(text)])
        else:
            text += piece
    return {"text": text, "spans": spans}


def answer(request: dict[str, Any], most_characters: int) -> dict[str, Any]:
    broken = fault(request["template"])
    if request["chat"] is None or broken is not None:
        return {"fault": broken}
    marks = request.get("marks")
    chat = request["chat"] if marks is None else {**request["chat"], **dict(zip(MARKS, marks, strict=True))}
    found = render(request["template"], chat, most_characters)
    return {**found} if marks is None or "error" in found else spans_of(found["text"], *marks)


def main(most_bytes: int, most_characters: int, seconds: float) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print("ready", flush=True)
    for line in sys.stdin:
        # Its default action ends the process, also inside of one long multiplication, and after the parent has died.
        signal.setitimer(signal.ITIMER_REAL, seconds)
        found = answer(json.loads(line), most_characters)
        text = json.dumps(found)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(text, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
