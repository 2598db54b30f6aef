"""Run on two ranks by test_tensor_parallel.py: a server whose follower is stopped (SIGSTOP) while it writes a text.

    ranks_stopped.py MODEL FOLDER silence    the first process notices by itself
    ranks_stopped.py MODEL FOLDER sigterm    it is told to end before it could notice

The first process writes what its client saw into FOLDER/seen.json.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from shoestring.errors import as_command
from shoestring.serve.engine.rank_failure import RankFailureWatch
from shoestring.serve.http import server

model, folder, case = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
server.STOP_S = 0.5
options = server.ServeOptions(port=0, drain_s=0.5, rank_timeout_s=5 if case == "silence" else 100)
TEXT = {"prompt": "The", "max_tokens": 2000, "ignore_eos": True, "stream": True}


def follower() -> int:
    return int((folder / "follower").read_text())


def client() -> None:
    while not (found := re.search(r"at (http://[\d.:]+)/v1", lines[-1] if lines else "")):
        time.sleep(0.01)
    url, seen = found[1], {}
    with httpx.stream("POST", url + "/v1/completions", json=TEXT, timeout=60) as answer:
        texts = answer.iter_lines()
        first = next(texts)
        os.kill(follower(), signal.SIGSTOP)
        began = time.monotonic()
        if case == "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)
        seen["last"] = [line for line in (first, *texts) if line][-2:]
    seen["seconds"] = time.monotonic() - began
    if case == "silence":
        health = httpx.get(url + "/health")
        seen["health"] = [health.status_code, health.json()]
        refused = httpx.post(url + "/v1/completions", json={"prompt": "The"})
        seen["refused"] = [refused.status_code, refused.json()["error"]["code"]]
    (folder / "seen.json").write_text(json.dumps(seen))
    if case == "silence":
        os.kill(follower(), signal.SIGCONT)


lines: list[str] = []
if os.environ["RANK"] == "0":
    info = server.log.info

    def note(message: str, *args: Any) -> None:
        lines.append(message % args)
        info(message, *args)

    announce = RankFailureWatch.announce

    def announce_and_continue(self: RankFailureWatch, error: BaseException) -> None:
        os.kill(follower(), signal.SIGCONT)  # the first process has given up: the follower must find out and end, too
        announce(self, error)

    RankFailureWatch.announce = announce_and_continue  # type: ignore[method-assign]
    server.log.info = note  # type: ignore[method-assign]
    threading.Thread(target=client, daemon=True).start()
else:
    (folder / "follower").write_text(str(os.getpid()))
as_command(lambda: server.main(model, options))
