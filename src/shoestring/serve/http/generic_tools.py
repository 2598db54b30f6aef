"""Tools for models whose chat template has no place for them: a prompt explains them, a grammar enforces the form.

The model was not trained to call anything, so it is told how in the system message (in the first message of the user,
where there is none: some templates take no system message). Calls and results of earlier turns become ordinary messages
of the assistant and the user, in turns, as such templates want them. An answer is a call or a text; whether it is a
call, its first character decides: behind a brace the grammar allows nothing but a call with arguments of its schema.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from shoestring.serve.http.request_schema import Tool
from shoestring.serve.http.tool_calls import ToolFormat

GENERIC = ToolFormat("llama3")  # a call is the whole answer
HEADER = {"X-Shoestring-Tools": "generic prompt: the model's chat template has no place for tools"}


def instructions(tools: Sequence[Tool]) -> str:
    listed = "\n".join(json.dumps(tool.given["function"], ensure_ascii=False) for tool in tools)
    return (
        f"You can call these functions:\n{listed}\n"
        'To call one, answer with one JSON object and nothing else: {"name": the name, "parameters": the arguments}. '
        "You are then told its result. Call a function only where it helps; otherwise answer in plain text."
    )


def plain_chat(messages: Sequence[dict[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The same chat for a template that knows no tools."""
    chat: list[dict[str, Any]] = []
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            role, content = "user", f"Result: {content}"
        calls = [call["function"] for call in message.get("tool_calls", ())]
        told = [json.dumps({"name": f["name"], "parameters": f["arguments"]}, ensure_ascii=False) for f in calls]
        content = "\n".join([content, *told] if content else told) if told else content
        if chat and chat[-1]["role"] == role == "user":
            chat[-1]["content"] += f"\n{content}"
        else:
            chat.append({"role": role, "content": content})
    if not chat or chat[0]["role"] not in ("system", "user"):
        chat.insert(0, {"role": "user", "content": ""})
    chat[0]["content"] = f"{chat[0]['content']}\n\n{instructions(tools)}".strip()
    return chat
