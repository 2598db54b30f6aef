"""Chat templates are strangers' programs: whatever they do ends as an error, in time, and the next chat works."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from refusals import refused
from shoestring.model import chat
from shoestring.model.chat import fault, render
from shoestring.model.tokenizer import Tokenizer
from tiny import chat_tokenizer

GOOD = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
HELLO = [{"role": "user", "content": "hé \u2028 😀"}]


def text(template: str) -> str:
    return render(template, HELLO, add_generation_prompt=True, special={"bos_token": "<s>"})


@pytest.fixture
def short() -> Iterator[None]:
    """Half a second for a template, so that the tests of endless ones are quick."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat, "SECONDS", 0.5)
        yield
    chat._process.close()


def test_a_template_gives_its_text() -> None:
    assert text(GOOD) == "<user>hé \u2028 😀<a>"
    assert text("{{ bos_token }}{{ messages | tojson }}") == '<s>[{"role": "user", "content": "hé \u2028 😀"}]'
    assert text("{% generation %}a{% endgeneration %}{{ strftime_now('%Y') | length }}") == "a4"


@pytest.mark.parametrize(
    ("template", "why"), [("", "empty"), ("{% for %}", "line 1"), ("{{ ((" + "(" * 5000, "nest|line")]
)
def test_broken_templates(template: str, why: str) -> None:
    found = fault(template)
    assert found is not None
    refused(f"is broken|{why}", text, template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no system message') }}", "{{ messages[9].content }}", "{{ 1 // 0 }}",
        "{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)  # fmt: skip
def test_templates_that_refuse_a_chat(template: str) -> None:
    refused("does not accept this chat", text, template)


@pytest.mark.parametrize(
    "template",
    [
        "{% set n = messages | length + 9 %}{{ n ** (n ** (n ** n)) }}",  # one multiplication that takes years
        "{{ 10 ** (10 ** 10) }}",  # ... while it is compiled
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_templates_that_never_end(template: str, short: None) -> None:
    began = time.monotonic()
    refused("chat template", text, template)
    assert time.monotonic() - began < 20
    assert text(GOOD).startswith("<user>")


@pytest.mark.parametrize(
    "template",
    [
        "{% set ns = namespace(s='a') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{{ 'a'.ljust(messages | length * 10 ** 11) }}",
        "{{ '%0100000000000d' % 1 }}",
        "{{ 'a' * 10 ** 11 }}",
        "{% for i in range(99999) %}{{ 'abcdefghijklmnop' * 999 }}{% endfor %}",
    ],
)
def test_templates_that_need_much_memory(template: str) -> None:
    refused("chat template", text, template)
    assert text(GOOD).startswith("<user>")


def test_what_is_no_chat() -> None:
    refused("message 0 of the chat", render, GOOD, [{"content": "x"}], add_generation_prompt=True, special={})
    refused(
        "not plain JSON", render, GOOD, [{"role": "user", "content": object()}], add_generation_prompt=True, special={}
    )


def test_a_process_that_was_killed_is_started_again() -> None:
    text(GOOD)
    assert chat._process._process is not None
    first = chat._process._process.pid
    os.kill(first, 9)
    chat._process._process.wait()
    assert text(GOOD).startswith("<user>") and chat._process._process.pid != first


def test_tools_have_a_template_of_their_own_where_there_is_one(tmp_path: Path) -> None:
    tokenizer, tools = chat_tokenizer(), [{"type": "function", "function": {"name": "f"}}]
    tokenizer.tool_use_template = "{{ tools[0].function.name }} {{ messages[0].content }}"
    tokenizer.save(tmp_path)
    again = Tokenizer.from_file(tmp_path)
    assert again.render_chat(HELLO, tools=tools) == f"f {HELLO[0]['content']}"
    assert again.render_chat(HELLO) == tokenizer.render_chat(HELLO) != again.render_chat(HELLO, tools=tools)
    # As newer folders have it: files beside each other.
    (tmp_path / "chat_template.jinja").write_text("plain")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with {{ tools | length }}")
    again = Tokenizer.from_file(tmp_path)
    assert again.render_chat(HELLO) == "plain" and again.render_chat(HELLO, tools=tools) == "with 1"
