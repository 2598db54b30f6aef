"""Chat templates: the Jinja programs that come with chat models, run in a sandbox.

A template is a stranger's program, so it runs in Jinja's immutable sandbox: it can neither reach Python's internals nor
change what it is given. The filters and globals are those that `transformers` offers, so that the same template gives
the same text. Left out: tools and documents (passed as none), and the mask of assistant tokens.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shoestring.errors import UserError


class _GenerationBlock(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %} marks assistant text for training; rendered as what is inside."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


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
    """Why a template cannot be read ("line 3: ..."), or None. Which chats it accepts, only rendering shows."""
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
    return None


def render(
    template: str, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, special: Mapping[str, str]
) -> str:
    """The chat as text. Anything that goes wrong inside the template is a UserError with the template's own words."""
    for position, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise UserError(f"message {position} of the chat is {message!r}; each needs a 'role' and a 'content'")
    broken = fault(template)
    if broken is not None:
        raise UserError(f"the model's chat template is broken, {broken}")
    try:
        return _compile(template).render(
            messages=messages, tools=None, documents=None, add_generation_prompt=add_generation_prompt, **special
        )
    except Exception as error:  # a template can raise whatever Python raises
        reason = f"{error}" or type(error).__name__
        raise UserError(f"the model's chat template does not accept this chat: {reason}") from error
