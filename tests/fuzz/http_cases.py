"""Hostile HTTP: bodies, JSON schemas and connections, made from a seed. The same seed makes the same cases.

A case is what goes over the wire and nothing else; how it ended is `outcome_of_response` or `outcome_of_connection`.
Left out: what needs many clients at once (http_attacks.py).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from outcomes import Outcome

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
VECTORS = "/v1/embeddings"
ANSWERS = "/v1/responses"
PATHS = (TEXT, CHAT, ANSWERS, VECTORS, "/tokenize", "/detokenize")
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@dataclass(frozen=True)
class BodyCase:
    name: str
    path: str
    content: bytes


@dataclass(frozen=True)
class ConnectionCase:
    """Parts that are sent one after the other, with a short pause between them; then the client reads, or leaves."""

    name: str
    parts: tuple[bytes, ...]
    leaves: bool = False


# -- bodies --------------------------------------------------------------------------------------------------

NASTY_TEXT = (
    *(
        "",
        "\0",
        "\x7f",
        " " * 5000,
        "\n" * 3000,
        "a" * 70_000,
        "\u202e",
        "\ufeff",
        "\ufffd",
        "\U0010ffff",
        "e\u0301" * 99,
    ),
    *(
        "<|endoftext|>" * 40,
        "{{ 7*7 }}",
        "{% for x in y %}",
        "../../etc/passwd",
        "'; DROP TABLE x; --",
        "\r\n\r\nGET /",
    ),
    *("0" * 300, "1e999", "NaN", "null", "true", "日本語" * 50, "🙂" * 50, "\u0600" * 40),
)
NASTY_NUMBERS = (0, -1, 1, 2**31, 2**31 + 1, 2**63, 2**64, -(2**63), 10**30, 10**400, 0.1, -0.0, 1e308, 5e-324, 1.0)
FIELDS: dict[str, tuple[Any, ...]] = {
    "max_tokens": (0, 1, 3, None),
    "temperature": (0, 0.7, 2),
    "top_p": (0.0, 0.5, 1),
    "top_k": (-1, 0, 5),
    "min_p": (0, 0.3),
    "seed": (0, 7, 2**64 - 1),
    "n": (1, 2),
    "stop": ("a", ["b", "cd"], None),
    "stream": (True, False),
    "stream_options": ({"include_usage": True}, None),
    "logit_bias": ({"1": 5, "2": -100}, {}),
    "presence_penalty": (0, -2, 2),
    "frequency_penalty": (0.5,),
    "repetition_penalty": (1.1, 100),
    "min_tokens": (0, 1),
    "ignore_eos": (True, False),
    "mark_drafts": (True,),
    "model": ("tiny", None),
    "user": ("me",),
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}],
}
OWN: dict[str, dict[str, tuple[Any, ...]]] = {
    TEXT: {"prompt": ("a", ["a", "b"], [1, 2], [[1], [2]]), "logprobs": (0, 2), "echo": (True, False)},
    CHAT: {
        "messages": (
            [{"role": "user", "content": "hi"}],
            [{"role": "system", "content": [{"type": "text", "text": "x"}]}],
            [CALLED, {"role": "tool", "tool_call_id": "a", "content": "5"}],
        ),
        "logprobs": (True, False),
        "top_logprobs": (0, 2),
        "max_completion_tokens": (1, 4),
        "response_format": ({"type": "text"}, {"type": "json_object"}),
        "tools": ([], TOOLS),
        "tool_choice": ("auto", "none", "required", {"type": "function", "function": {"name": "f"}}),
        "parallel_tool_calls": (True, False),
    },
    ANSWERS: {
        "input": (
            "a",
            [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}],
            [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}],
            [{"type": "function_call_output", "call_id": "a", "output": "5"}],
        ),
        "instructions": ("x", None),
        "max_output_tokens": (1, 3),
        "stream": (True, False),
        "text": ({"format": {"type": "text"}}, {"format": {"type": "json_object"}}),
        "tools": ([], [{"type": "function", "name": "f", "parameters": {}}]),
        "tool_choice": ("auto", "none", "required", {"type": "function", "name": "f"}),
        "metadata": ({"a": "b"}, None),
        "seed": (1,),
    },
    VECTORS: {
        "input": ("a", ["a", "b"], [1, 2], [[1], [2, 3]]),
        "encoding_format": ("float", "base64"),
        "dimensions": (1, 8),
        "pooling": ("mean", "last"),
        "user": ("me",),
    },
    "/tokenize": {"prompt": ("a b c",), "messages": (None,), "add_special_tokens": (True, False)},
    "/detokenize": {"tokens": ([1, 2, 3], []), "skip_special_tokens": (True, False)},
    LOAD: {"lora_name": ("a", "b", "tiny", "é" * 200), "lora_path": ("a", "b", "../a", "link", "broken", ".", "/")},
    UNLOAD: {"lora_name": ("a", "b", "c"), "lora_int_id": (1, None)},
}
FIRST = {
    TEXT: "prompt",
    CHAT: "messages",
    ANSWERS: "input",
    VECTORS: "input",
    "/tokenize": "prompt",
    "/detokenize": "tokens",
    LOAD: "lora_path",
    UNLOAD: "lora_name",
}


def adapter_cases(seed: int, num: int) -> Iterator[BodyCase]:
    """For the two paths of an administrator, between requests to the adapters."""
    return body_cases(seed, num, (LOAD, LOAD, UNLOAD, TEXT))


def body_cases(seed: int, num: int, paths: Sequence[str] = PATHS) -> Iterator[BodyCase]:
    rng = random.Random(seed)
    damages = (_wrong_value, _wrong_name, _damaged_bytes, _repeated_key, _odd_encoding, _large, _untouched)
    for i in range(num):
        path = rng.choice(paths)
        damage = damages[i % len(damages)]
        yield BodyCase(f"{damage.__name__[1:]} {path} seed={seed} case={i}", path, damage(rng, path))


def _body(rng: random.Random, path: str) -> dict[str, Any]:
    own = OWN[path]
    fields = own if path not in (TEXT, CHAT) else {**FIELDS, **own}
    names = rng.sample(sorted(fields), rng.randint(0, min(5, len(fields))))
    body = {name: rng.choice(fields[name]) for name in names}
    body[FIRST[path]] = rng.choice(own[FIRST[path]])
    if path in (TEXT, CHAT, ANSWERS):
        body.setdefault("max_output_tokens" if path == ANSWERS else "max_tokens", 2)
    return body


def _any_value(rng: random.Random, depth: int = 0) -> Any:
    kinds: list[Callable[[], Any]] = [
        lambda: None,
        lambda: rng.random() < 0.5,
        lambda: rng.choice(NASTY_NUMBERS),
        lambda: rng.randint(-(2**70), 2**70),
        lambda: rng.choice(NASTY_TEXT),
        lambda: "".join(chr(rng.choice((rng.randint(0, 0x2FF), rng.randint(0xE000, 0x10FFFF)))) for _ in range(5)),
    ]
    if depth < 4:
        kinds += [
            lambda: [_any_value(rng, depth + 1) for _ in range(rng.randint(0, 3))],
            lambda: {str(_any_value(rng, 9))[:40]: _any_value(rng, depth + 1) for _ in range(rng.randint(0, 3))},
        ]
    return rng.choice(kinds)()


def _untouched(rng: random.Random, path: str) -> bytes:
    return json.dumps(_body(rng, path)).encode()


def _wrong_value(rng: random.Random, path: str) -> bytes:
    body = _body(rng, path)
    body[rng.choice(sorted(body))] = _any_value(rng)
    return json.dumps(body).encode()


def _wrong_name(rng: random.Random, path: str) -> bytes:
    body = _body(rng, path)
    name = rng.choice((*NASTY_TEXT, *(n + "x" for n in FIELDS), "__class__", "model_config", "Prompt", "messages "))
    return json.dumps({**body, name: _any_value(rng)}).encode()


def _damaged_bytes(rng: random.Random, path: str) -> bytes:
    content = bytearray(_untouched(rng, path))
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(content) + 1)
        what = rng.randrange(4)
        if what == 0:
            content[at : at + 1] = bytes([rng.randrange(256)])
        elif what == 1:
            content[at:at] = rng.choice(
                (b"\xed\xa0\x80", b"\\ud800", b"\xff\xfe", b"\0", b"\\u0000", b"\\", b'"', b"[", b"}")
            )
        elif what == 2:
            del content[at : at + rng.randint(1, 20)]
        else:
            content = content[:at] or bytearray(b" ")
    return bytes(content)


def _repeated_key(rng: random.Random, path: str) -> bytes:
    body = _body(rng, path)
    name = rng.choice(sorted(body))
    again = f"{json.dumps(name)}: {json.dumps(_any_value(rng))}"
    return (json.dumps(body)[:-1] + ", " + again + "}").encode()


def _odd_encoding(rng: random.Random, path: str) -> bytes:
    text = json.dumps(_body(rng, path) | {FIRST[path]: rng.choice(NASTY_TEXT)}, ensure_ascii=False)
    encoding = rng.choice(("utf-16", "utf-16-le", "utf-32", "utf-8-sig", "utf-7", "latin-1"))
    return text.encode(encoding, errors="replace")


def _large(rng: random.Random, path: str) -> bytes:
    """Small on the wire for a single case, large for what it asks of a parser."""
    name = FIRST[path]
    return rng.choice(
        (
            lambda: b'{"%s": %s1%s}' % (name.encode(), b"[" * 3000, b"]" * 3000),
            lambda: json.dumps({name: [rng.choice([1, "a", [1]])] * 20_000}).encode(),
            lambda: json.dumps({name: "x", "k" * 50_000: 1}).encode(),
            lambda: json.dumps({str(i): i for i in range(5_000)}).encode(),
            lambda: json.dumps({name: "a", "logit_bias": {str(i): "x" for i in range(6_000)}}).encode(),
            lambda: json.dumps({name: "a", "stop": ["x"] * 5_000}).encode(),
            lambda: json.dumps({"messages": [{"role": "user", "content": "x"}] * 5_000}).encode(),
            lambda: b'{"%s": %s}' % (name.encode(), b"9" * 4_000),
            lambda: json.dumps({name: rng.choice(("ab ", "7", " ", "\n", "日")) * 40_000}).encode(),
        )
    )()


# -- schemas -------------------------------------------------------------------------------------------------


def schema_cases(seed: int, num: int) -> Iterator[BodyCase]:
    """Chats with a response_format: schemas of every kind, legal and not."""
    rng = random.Random(seed)
    for i in range(num):
        schema = _hostile_schema(rng) if i % 4 == 0 else _schema(rng)
        form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        if i % 11 == 10:
            form = rng.choice(({"type": "json_schema"}, {"type": "xml"}, {}, {"type": ["json_schema"]}, {"type": None}))
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "seed": i, "response_format": form}
        yield BodyCase(f"schema seed={seed} case={i}", CHAT, json.dumps(body).encode())


def tool_cases(seed: int, num: int) -> Iterator[BodyCase]:
    """Chats with tools: damaged tools, choices and calls, and calls that must follow schemas of every kind."""
    rng = random.Random(seed)
    for i in range(num):
        schema = _hostile_schema(rng) if i % 5 == 0 else _schema(rng)
        name = rng.choice(("f", "g.h", "", "a b", 'q"', "x" * 65, None, 5)) if i % 3 == 0 else "f"
        tool: dict[str, Any] = {"type": "function", "function": {"name": name, "parameters": schema}}
        message = {"role": "user", "content": "a"}
        body: dict[str, Any] = {"messages": [message], "max_tokens": 3, "tools": [tool], "tool_choice": "required"}
        if i % 4 == 1:
            call = json.loads(json.dumps(CALLED))
            holder = rng.choice((call, call["tool_calls"][0], call["tool_calls"][0]["function"]))
            holder[rng.choice(sorted(holder))] = _any_value(rng)
            body |= {"messages": [message, call], "tool_choice": "auto"}
        elif i % 4 == 2:
            damaged = rng.choice((body, tool, tool["function"]))
            damaged[rng.choice(sorted(damaged))] = _any_value(rng)
        yield BodyCase(f"tools seed={seed} case={i}", CHAT, json.dumps(body).encode())


def _schema(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.choice(
        ("object", "array", "string", "integer", "number", "boolean", "null", "enum", "anyOf", "ref", "any")
    )
    if depth > 3 and kind in ("object", "array", "anyOf"):
        kind = "string"
    small = rng.randint(0, 4)
    if kind == "object":
        names = [rng.choice(("a", "b", "ä", 'q"', "", "$ref", "x" * 40)) for _ in range(small)]
        made = {"type": "object", "properties": {n: _schema(rng, depth + 1) for n in names}}
        made["required"] = rng.choice((names, names[:1], ["missing"], []))
        made["additionalProperties"] = rng.choice((False, True, {"type": "string"}))
        return made
    if kind == "array":
        return {
            "type": "array",
            "items": _schema(rng, depth + 1),
            "minItems": small,
            "maxItems": small + rng.randint(-2, 3),
        }
    if kind == "string":
        return {"type": "string"} | rng.choice(
            (
                {},
                {"minLength": small},
                {"maxLength": small},
                {"pattern": "^[a-c]+$"},
                {"format": "date-time"},
                {"pattern": "("},
            )
        )
    if kind in ("integer", "number"):
        return {"type": kind} | rng.choice(
            ({}, {"minimum": -3, "maximum": small}, {"multipleOf": 7}, {"minimum": 1e400})
        )
    if kind == "enum":
        return {"enum": [_any_value(rng, 3) for _ in range(small)]}
    if kind == "anyOf":
        return {rng.choice(("anyOf", "oneOf", "allOf")): [_schema(rng, depth + 1) for _ in range(small)]}
    if kind == "ref":
        return {"$ref": rng.choice(("#", "#/$defs/a", "#/nowhere", "http://example.invalid/x", 5))}
    if kind == "any":
        return rng.choice((True, False, {}, [], None, 1, "x", {"type": ["string", "null"]}, {"type": "nothing"}))
    return {"type": kind}


def _hostile_schema(rng: random.Random) -> Any:
    deep: Any = {"type": "string"}
    for _ in range(80):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    size = rng.choice((10, 200, 1000))
    return rng.choice(
        (
            deep,
            {"$ref": "#"},
            {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
            {"type": "string", "pattern": "(a+)+$"},
            {"type": "string", "pattern": "(" * 50 + "a" + ")*" * 50},
            {"type": "string", "pattern": f"[a-z]{{1,{size * 50}}}"},
            {"type": "string", "minLength": size * 1000, "maxLength": size * 1000 + 1},
            {"type": "array", "items": {"type": "integer"}, "minItems": size * 10, "maxItems": size * 20},
            {"enum": [f"{i}" * 5 for i in range(size)]},
            {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(size)}},
            {"allOf": [{"type": "object", "properties": {f"p{i}": {"enum": [i, "x"]}}} for i in range(min(size, 60))]},
            {
                "anyOf": [
                    {"type": "array", "items": {"anyOf": [{"const": j} for j in range(20)]}}
                    for _ in range(min(size, 40))
                ]
            },
            {"type": "integer", "minimum": 0, "maximum": 10**30},
            {"type": "number", "multipleOf": 1e-300},
            {"not": {}},
            {"patternProperties": {"^(a|b)*$": {"type": "string"}}, "type": "object"},
        )
    )


# -- connections ---------------------------------------------------------------------------------------------


def connection_cases(seed: int, num: int) -> Iterator[ConnectionCase]:
    rng = random.Random(seed)
    kinds = (
        *(_wrong_length, _broken_chunks, _garbage, _broken_head, _pipelined, _half, _smuggled, _large_head, _upgrade),
        *(_leaves, _expects),
    )
    for i in range(num):
        kind = kinds[i % len(kinds)]
        made = kind(rng)
        yield ConnectionCase(f"{kind.__name__[1:]} seed={seed} case={i}", tuple(made), kind is _leaves)


ASKED = b'{"prompt": "a", "max_tokens": 2}'
STREAMED = b'{"prompt": "a", "max_tokens": 3, "stream": true}'


def head(path: str = TEXT, *more: bytes, method: str = "POST") -> bytes:
    lines = (f"{method} {path} HTTP/1.1".encode(), b"Host: localhost", b"Content-Type: application/json", *more)
    return b"\r\n".join(lines) + b"\r\n\r\n"


def request(content: bytes = ASKED, path: str = TEXT, *more: bytes) -> bytes:
    return head(path, b"Content-Length: %d" % len(content), *more) + content


def _wrong_length(rng: random.Random) -> list[bytes]:
    length = rng.choice(
        (b"-1", b"0", b"5", b"31", b"33", b"1e3", b"0x20", b"+32", b"99999999999999999999", b"", b"32, 32", b"32,33")
    )
    return [head(TEXT, b"Content-Length: " + length) + ASKED]


def _broken_chunks(rng: random.Random) -> list[bytes]:
    chunked = head(
        TEXT, b"Transfer-Encoding: " + rng.choice((b"chunked", b"chunked", b"CHUNKED", b"gzip, chunked", b"x"))
    )
    whole = b"%x\r\n%s\r\n0\r\n\r\n" % (len(ASKED), ASKED)
    chunks = rng.choice(
        (
            whole,
            whole.replace(b"\r\n", b"\n"),
            b"FFFFFFFFFFFFFFFFF\r\na\r\n",
            b"-1\r\na\r\n",
            b"5;x=" + b"y" * 3000 + b"\r\nabcde\r\n0\r\n\r\n",
            b"1\r\n \r\n" * 6000,
            b"zz\r\n",
            b"3\r\nabcdef\r\n",
            b"0\r\nTrailer: x\r\n" * 3 + b"\r\n",
            whole[: rng.randrange(len(whole))],
        )
    )
    return [chunked, chunks]


def _garbage(rng: random.Random) -> list[bytes]:
    return [rng.randbytes(rng.choice((1, 20, 500, 70_000)))]


def _broken_head(rng: random.Random) -> list[bytes]:
    line = rng.choice(
        (
            *(
                b"GET / HTTP/1.0",
                b"GET / HTTP/2.0",
                b"GET / HTTP/1.1 x",
                b"GET  / HTTP/1.1",
                b"GET /",
                b" GET / HTTP/1.1",
            ),
            *(
                b"GET /\0 HTTP/1.1",
                b"G\xc3\xa4T / HTTP/1.1",
                b"GET http://x/ HTTP/1.1",
                b"CONNECT x:1 HTTP/1.1",
                b"* * *",
            ),
            *(
                b"OPTIONS * HTTP/1.1",
                b"GET /%zz HTTP/1.1",
                b"GET /%ff%00 HTTP/1.1",
                b"GET //x HTTP/1.1",
                b"GET ? HTTP/1.1",
            ),
        )
    )
    field = rng.choice(
        (
            *(
                b"Host: localhost",
                b"Host : localhost",
                b"Host: localhost\r\nHost: other",
                b": x",
                b"X",
                b"X: \x01",
                b"X: a\r\n b",
            ),
            *(
                b"X: a\rb",
                b"X: a\n\nb",
                b"X: \xff",
                b"Connection: close, \0",
                b"Content-Length: 0\r\nContent-Length: 1",
                b"",
            ),
        )
    )
    return [line + b"\r\n" + field + b"\r\nConnection: close\r\n\r\n"]


def _pipelined(rng: random.Random) -> list[bytes]:
    get = head("/health", method="GET")
    many = rng.choice(
        (get * 50, request() * 5, request(STREAMED) + get, request() + rng.randbytes(60), get + b"\r\n\r\n" + get)
    )
    cut = rng.randrange(1, len(many))
    return [many[:cut], many[cut:]] if rng.random() < 0.5 else [many]


def _half(rng: random.Random) -> list[bytes]:
    whole = request()
    return [whole[: rng.randrange(1, len(whole))]]


def _smuggled(rng: random.Random) -> list[bytes]:
    both = head(TEXT, b"Content-Length: %d" % len(ASKED), b"Transfer-Encoding: chunked")
    hidden = head("/metrics", method="GET")
    return [both + rng.choice((ASKED, b"0\r\n\r\n" + hidden, b"%x\r\n%s\r\n0\r\n\r\n" % (len(ASKED), ASKED) + hidden))]


def _large_head(rng: random.Random) -> list[bytes]:
    more = rng.choice(
        (
            [b"X-%d: %s" % (i, b"y" * 50) for i in range(400)],
            [b"X: " + b"y" * 100_000],
            [b"a:" for _ in range(3000)],
            [b"Cookie: " + b"a=b; " * 2000],
        )
    )
    path = rng.choice(("/health", "/" + "x" * 20_000, "/v1/models/" + "%41" * 3000, "/health?" + "a=b&" * 4000))
    return [head(path, *more, method="GET")]


def _upgrade(rng: random.Random) -> list[bytes]:
    asked = rng.choice((b"websocket", b"h2c", b"TLS/1.0", b"\x16\x03\x01"))
    return [head("/", b"Connection: Upgrade", b"Upgrade: " + asked, b"Sec-WebSocket-Key: x", method="GET")]


def _leaves(rng: random.Random) -> list[bytes]:
    whole = rng.choice((request(), request(STREAMED), request(b'{"prompt": "%s"}' % (b"a " * 30_000), "/tokenize")))
    return [whole[: rng.choice((len(whole), rng.randrange(1, len(whole))))]]


def _expects(rng: random.Random) -> list[bytes]:
    expected = rng.choice((b"100-continue", b"200-ok", b"100-continue, 100-continue"))
    return [head(TEXT, b"Content-Length: %d" % len(ASKED), b"Expect: " + expected), ASKED]


# -- how they end --------------------------------------------------------------------------------------------


def outcome_of_response(status: int, headers: dict[str, str], content: bytes) -> tuple[Outcome, str]:
    """A defect is a 500, an error without OpenAI's object, or a refusal for lack of room without a Retry-After."""
    told = f"{status} {content[:300]!r}"
    if b"Traceback" in content:
        return "traceback", told
    if status < 400:
        broken = (b'"error":{' in content or b"event: error" in content) and b"data: " in content
        return ("traceback", told) if broken else ("ok", told)
    try:
        error = json.loads(content)["error"]
    except (ValueError, LookupError, TypeError):
        return "traceback", f"no error object: {told}"
    if status == 500 or set(error) != {"message", "type", "param", "code"} or len(content) > 4000:
        return "traceback", told
    if status in (429, 503) and not headers.get("retry-after", "").isdecimal():
        return "traceback", f"no Retry-After: {told}"
    return "clean", told


def outcome_of_connection(received: bytes) -> tuple[Outcome, str]:
    """What a raw connection got, up to its end. Nothing at all is clean: the server has closed it."""
    told = repr(received[:200])
    statuses = [line.split(b" ")[1] for line in received.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    if b"Traceback" in received or any(status.startswith(b"5") and status != b"503" for status in statuses):
        return "traceback", told
    if received and not received.startswith(b"HTTP/1.1 "):
        return "traceback", f"no HTTP: {told}"
    return ("ok" if b"200" in statuses else "clean"), told
