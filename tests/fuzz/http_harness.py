"""A real server under attack, and what its other clients feel meanwhile.

`served` starts `shoestring serve` with a tiny model as a process of its own. `Bystanders` are two well-behaved clients:
one streams text after text, one asks for a single token now and then. They note the largest gap between two pieces of
the stream and the longest time to a first token.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

REPO = Path(__file__).resolve().parents[2]
TEXT = "/v1/completions"


@contextmanager
def served(folder: Path, *options: str) -> Iterator[tuple[str, int]]:
    """Host and port of a server with a tiny model, saved in `folder`; its log is folder/log, its id in folder/pid."""
    from shoestring.model.folder import save_model
    from tiny import TOOL_CHAT_TEMPLATE, chat_tokenizer, served_model

    tokenizer = chat_tokenizer()
    tokenizer.chat_template = TOOL_CHAT_TEMPLATE
    save_model(folder / "tiny", served_model(tokenizer.vocab_size), tokenizer)
    command = [sys.executable, "-m", "shoestring", "serve", str(folder / "tiny"), "--port", "0", "--device", "cpu"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("w") as log:
        server = subprocess.Popen([*command, *options], stderr=log, cwd=REPO, env=env)
    (folder / "pid").write_text(str(server.pid))
    try:
        ends = time.monotonic() + 120
        while not (found := re.search(r"at http://([\d.]+):(\d+)/v1", (folder / "log").read_text())):
            assert server.poll() is None and time.monotonic() < ends, (folder / "log").read_text()
            time.sleep(0.05)
        yield found[1], int(found[2])
        assert server.poll() is None, "the server ended under attack:\n" + (folder / "log").read_text()[-3000:]
    finally:
        server.kill()
        server.wait()


def memory_gb(folder: Path, field: Literal["VmRSS", "VmHWM"]) -> float:
    """Resident memory of the server of `folder`: now (VmRSS), or the most it ever had (VmHWM)."""
    status = Path(f"/proc/{(folder / 'pid').read_text()}/status").read_text()
    found = re.search(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE)
    assert found, status
    return int(found[1]) * 1024 / 1e9


@dataclass
class Bystanders:
    host: str
    port: int
    gaps: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @contextmanager
    def watching(self) -> Iterator[None]:
        self._stop = threading.Event()
        threads = [threading.Thread(target=work) for work in (self._stream, self._ask)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(120)

    def _stream(self) -> None:
        while not self._stop.is_set():
            body = {"prompt": "The", "max_tokens": 1000, "ignore_eos": True, "stream": True, "seed": 1}
            last = time.monotonic()
            for _ in self._events(body):
                now = time.monotonic()
                self.gaps.append(now - last)
                last = now
                if self._stop.is_set():
                    return
                time.sleep(0.002)  # reads faster than it must, without taking the processor for itself

    def _ask(self) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            began = time.monotonic()
            for _ in self._events({"prompt": f"{number} fox", "max_tokens": 1, "stream": True, "ignore_eos": True}):
                self.first_tokens.append(time.monotonic() - began)
                break
            self._stop.wait(0.1)

    def _events(self, body: dict[str, object], timeout: float = 60.0) -> Iterator[bytes]:
        """The events of a stream as they come; a refusal or a broken stream is a failure."""
        content = json.dumps(body).encode()
        head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        received = b""
        began = time.monotonic()
        try:
            with socket.create_connection((self.host, self.port), timeout=timeout) as client:
                client.sendall(head.encode() + f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
                while part := client.recv(65536):
                    received += part
                    if not received.startswith(b"HTTP/1.1 200") and len(received) > 12:
                        self.failures.append(received[-300:].decode(errors="replace"))
                        return
                    if b'"error"' in part:
                        self.failures.append(part.decode(errors="replace")[:300])
                        return
                    if b"data: " in part:
                        yield part
                    received = received[:12] if b"\r\n\r\n" in received else received
                    if b"[DONE]" in part:
                        return
        except OSError as error:
            self.failures.append(f"{type(error).__name__} after {time.monotonic() - began:.1f} s")


def attack(host: str, port: int, name: str, seconds: float, address: str = "127.0.0.2") -> dict[str, int]:
    """Run one attack of http_attacks.py to its end; statuses and how often."""
    script = str(Path(__file__).parent / "http_attacks.py")
    command = [sys.executable, script, host, str(port), name, str(seconds), address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def receive_all(host: str, port: int, parts: tuple[bytes, ...], leaves: bool, timeout: float = 20.0) -> bytes | None:
    """Send the parts over a raw connection; all that comes back, or None where it does not end in time."""
    received = b""
    ends = time.monotonic() + timeout
    with suppress(ConnectionError), socket.create_connection((host, port), timeout=timeout) as client:
        for part in parts:
            with suppress(ConnectionError):  # refused before all of it was sent
                client.sendall(part)
            time.sleep(0.001)
        if leaves:
            return b""
        while time.monotonic() < ends:
            try:
                part = client.recv(65536)
            except TimeoutError:
                return None
            if not part:
                return received
            received += part
        return None
    return received
