"""Calls in a model's text: found in pieces of any size, and constrained by grammars that the parsers read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken

from shoestring.serve.http.tool_calls import (
    CallPart,
    Part,
    TextPart,
    ToolCallParser,
    ToolFormat,
    call_grammar,
    detect_format,
    format_named,
    shown_ids,
)
from tiny import chat_tokenizer

HERMES, LLAMA = format_named("hermes", ""), format_named("llama3", "")
MISTRAL, MISTRAL_ARGS = format_named("mistral", ""), format_named("mistral", "[ARGS]")
PARIS, ROME = '{"city": "Par\\"is {[", "days": [1, {"a": 2}]}', '{"city": "Rome"}'


def parsed(form: ToolFormat, text: str, piece: int, **more: Any) -> tuple[str, list[tuple[str, str]]]:
    """The content and the calls (name, arguments) of a text that comes in pieces."""
    parser = ToolCallParser(form, ["weather", "time"], **more)
    parts: list[Part] = []
    for at in range(0, len(text), piece):
        parts += parser.feed(text[at : at + piece])
    parts += parser.finish()
    content, calls = "", list[list[str]]()
    for part in parts:
        if isinstance(part, TextPart):
            content += part.text
        elif part.name is not None:
            assert part.index == len(calls)
            calls.append([part.name, part.arguments])
        else:
            calls[part.index][1] += part.arguments
    return content, [(name, arguments) for name, arguments in calls]


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def listed(*calls: tuple[str, str], key: str = "arguments", between: str = ", ") -> str:
    return between.join(f'{{"name": "{name}", "{key}": {arguments}}}' for name, arguments in calls)


WEATHER, TIME = ("weather", PARIS), ("time", ROME)
CASES: list[tuple[ToolFormat, str, str, list[tuple[str, str]]]] = [
    (HERMES, "No call, a < b.\n", "No call, a < b.\n", []),
    (HERMES, f"I look.\n\n{hermes(*WEATHER)}\n{hermes(*TIME)}\n", "I look.", [WEATHER, TIME]),
    (HERMES, hermes(*WEATHER) + "Done.", "Done.", [WEATHER]),
    # The order of the keys, arguments as a string or not there, more keys, no end.
    (HERMES, f'<tool_call>{{"arguments": {ROME}, "id": 3, "name": "time"}}</tool_call>', "", [TIME]),
    (HERMES, f'<tool_call>{{"name": "time", "arguments": {json.dumps(ROME)}}}</tool_call>', "", [TIME]),
    (HERMES, '<tool_call>{"name": "time"}</tool_call>', "", [("time", "{}")]),
    (HERMES, '<tool_call>{"name": "time", "arguments": null}', "", [("time", "{}")]),
    (HERMES, '<tool_call>{"name": "time", "arguments": {"city": "Ro', "", [("time", '{"city": "Ro')]),
    # Not calls: their text is kept.
    (HERMES, "<tool_call>\nnothing</tool_call>", "<tool_call>\nnothing</tool_call>", []),
    (HERMES, '<tool_call>{"answer": 5}</tool_call>!', '<tool_call>{"answer": 5}</tool_call>!', []),
    (HERMES, '<tool_call>{"na', '<tool_call>{"na', []),
    (HERMES, "a <tool_ca", "a <tool_ca", []),
    (HERMES, "<tool_call>{name: 1}", "<tool_call>{name: 1}", []),
    (LLAMA, f'\n{{"name": "weather", "parameters": {PARIS}}}', "", [WEATHER]),
    (LLAMA, listed(WEATHER, TIME, key="parameters", between="; "), "", [WEATHER, TIME]),
    (LLAMA, '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
    (LLAMA, '{"answer": [1]} is it', '{"answer": [1]} is it', []),
    (LLAMA, 'So: {"name": "time", "parameters": {}}', 'So: {"name": "time", "parameters": {}}', []),
    (MISTRAL, f"[TOOL_CALLS] [{listed(WEATHER, TIME)}]", "", [WEATHER, TIME]),
    (MISTRAL, "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    (MISTRAL_ARGS, f"Hm[TOOL_CALLS]weather[ARGS]{PARIS}[TOOL_CALLS]time[CALL_ID]1[ARGS]{ROME}", "Hm", [WEATHER, TIME]),
    (MISTRAL_ARGS, f"[TOOL_CALLS][{listed(TIME)}]", "", [TIME]),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_calls_are_found_in_pieces_of_any_size(
    form: ToolFormat, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    whole = parsed(form, text, len(text))
    assert whole == (content, calls)
    for piece in (1, 2, 3, 7):
        assert parsed(form, text, piece) == whole


def test_arguments_are_given_out_while_they_are_written() -> None:
    parser = ToolCallParser(HERMES, ["weather"])
    assert parser.feed('Well. <tool_call>\n{"name": "weather", "arg') == [TextPart("Well."), CallPart(0, "weather", "")]
    assert parser.feed('uments": {"city": "Pa') == [CallPart(0, None, '{"city": "Pa')]
    assert parser.feed('ris"}, "x": 1') == [CallPart(0, None, 'ris"}')]
    assert parser.feed("}\n</tool_call>") == parser.finish() == []


def test_one_call_where_several_are_not_wanted() -> None:
    text = f"{hermes(*WEATHER)}\n{hermes(*TIME)}"
    assert parsed(HERMES, text, 4, max_calls=1) == ("", [WEATHER])


def test_formats_are_found_in_templates() -> None:
    assert detect_format("{% if tools %}<tool_call>{{ tools }}</tool_call>{% endif %}") == HERMES
    assert detect_format("{{ tools }}<tool_call><function=x>") is None
    assert detect_format("{{ tools }}<tool_call><arg_key>") is None
    llama = '<|start_header_id|>{{ tools }} in the format {"name": function name, "parameters": dictionary}'
    assert detect_format(llama) == LLAMA
    assert detect_format("[AVAILABLE_TOOLS] {{ tools }}[TOOL_CALLS]") == MISTRAL
    assert detect_format("[AVAILABLE_TOOLS] {{ tools }}[TOOL_CALLS][ARGS]") == MISTRAL_ARGS
    assert detect_format("{{ messages }}<tool_call>") is None and detect_format("{{ tools }}") is None
    assert len(MISTRAL.call_id()) == 9 and MISTRAL.call_id().isalnum() and HERMES.call_id().startswith("call_")


@pytest.mark.parametrize("tokens", ["none", "added", "special"])
@pytest.mark.parametrize("form", [HERMES, LLAMA, MISTRAL, MISTRAL_ARGS], ids=lambda f: f.name + "_args" * f.named)
def test_a_grammar_takes_what_its_parser_reads(form: ToolFormat, tokens: str) -> None:
    """With marks that are text, tokens, and special tokens, as the families have them."""
    llguidance = pytest.importorskip("llguidance")
    tokenizer = chat_tokenizer()
    if tokens != "none":
        added = [AddedToken(mark, special=tokens == "special", normalized=False) for mark in form.marks]
        tokenizer.backend.add_tokens(added)
        tokenizer = type(tokenizer)(tokenizer.backend, special=tokenizer.special)
    assert len(shown_ids(form, tokenizer)) == (len(form.marks) if tokens == "special" else 0)
    schema = {"type": "object", "properties": {"city": {"$ref": "#/$defs/c"}}, "required": ["city"]}
    parameters = {"weather": {**schema, "$defs": {"c": {"enum": ["Rome", "Bonn"]}}}, "time": {}}
    table = llguidance.LLTokenizer(tokenizer.backend.to_str(), n_vocab=tokenizer.vocab_size, eos_token=[0])

    def takes(text: str, *, parallel: bool) -> bool:
        source = call_grammar(form, parameters, tokenizer, parallel=parallel, spaces=" ?")
        matcher = llguidance.LLMatcher(table, llguidance.LLMatcher.grammar_from_lark(source), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = tokenizer.encode(text, special=False)
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())

    def written(*calls: tuple[str, str]) -> str:
        key = "parameters" if form == LLAMA else "arguments"
        objects = [listed(call, key=key) for call in calls]
        if form == HERMES:
            return "\n".join(f"<tool_call>\n{o}\n</tool_call>" for o in objects)
        if form == MISTRAL_ARGS:
            return "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in calls)
        return objects[0] if form == LLAMA else f"[TOOL_CALLS][{', '.join(objects)}]"

    one, two = [("weather", ROME)], [("weather", ROME), ("time", '{"x": [1]}')]
    assert takes(written(*one), parallel=False) and takes(written(*one), parallel=True)
    assert parsed(form, written(*one), 5) == ("", one)
    if form != LLAMA:
        assert takes(written(*two), parallel=True) and not takes(written(*two), parallel=False)
        assert parsed(form, written(*two), 5) == ("", two)
    for bad in (("weather", '{"city": "Oslo"}'), ("weather", "{}"), ("other", "{}"), ("time", "5")):
        assert not takes(written(bad), parallel=True)
    assert not takes("Hello", parallel=True)
