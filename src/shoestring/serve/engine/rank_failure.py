"""How processes that compute together learn that one of them failed, ended or is stuck.

A process that fails inside a forward leaves the others in a collective that never completes: gloo waits for minutes,
NCCL on the device, and nothing sent through the group would reach them. So every process has one connection to the
first one beside the group, and a thread that serves it. A line a moment says that the process runs; a line says that it
failed and why.

    silent for `lost_after_s`   the process is stopped, or its machine is gone: it has failed
    end of the connection       the process ended without saying goodbye: it has failed

What then happens:

    the others    print the line and exit with code 1, whatever they wait for
    the first     has requests to answer first: `failed` is set, `on_failure` is called and `check` raises; if it still
                  waits after PATIENCE_S seconds it exits, too

Silence is counted in this thread's own turns, not on a clock: a process that was stopped itself and goes on finds the
lines of the others in its buffer before it judges them.

Left out: threads that hang while their process runs (the deadlines of requests and the group's time-out bound those).
Not torch's TCPStore: each of its calls waits without end while the process that holds it is stopped.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Callable

from shoestring.errors import UserError, lost_peer

BEAT_S = 0.2
LOST_AFTER_S = 20.0
PATIENCE_S = 5.0
NOTICE_S = 2.0  # more than a connection takes to end
HEARD_S = 5.0  # how long a process that failed waits for the others to know
MAX_LINE = 4096  # no line of ours is longer
BEAT, HEARD, BYE, FAILED, HELLO = "beat", "heard", "bye", "failed ", "hello "


class _Peer:
    """One connection: lines in both directions, and how long the other side has been silent."""

    def __init__(self, name: str, connection: socket.socket) -> None:
        self.name, self.connection = name, connection
        self.silent_turns = 0
        self.open, self.said_bye, self.heard = True, False, threading.Event()
        self._unread = b""
        self._lock = threading.Lock()  # the watch and `announce` both write
        connection.setblocking(False)

    def write(self, line: str) -> None:
        """Never waits: lines are short, and a peer that does not read them for minutes is given up long before."""
        with self._lock, contextlib.suppress(OSError):  # a broken connection is noted by the next read
            self.connection.send(line.encode() + b"\n")

    def read(self) -> list[str]:
        """The lines that have arrived; at the end of the connection `open` turns False."""
        try:
            data = self.connection.recv(65536)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        self.open = bool(data) and len(self._unread) < MAX_LINE
        self.silent_turns = 0
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def close(self) -> None:
        self.connection.close()


class RankFailureWatch:
    def __init__(
        self,
        rank: int,
        num: int,
        share: Callable[[list[int]], list[int]],
        *,
        lost_after_s: float = LOST_AFTER_S,
        host: str | None = None,
    ) -> None:
        """`share` gives every process the numbers of the first one. Returns when all are connected."""
        self.rank, self.num, self.failed = rank, num, ""
        self.on_failure: Callable[[str], None] | None = None  # of the first process; called by the watching thread
        self._lost_after = max(lost_after_s, 2 * BEAT_S)
        self._closed, self._noticed = threading.Event(), threading.Event()
        host = host or os.environ.get("MASTER_ADDR", "127.0.0.1")
        self._peers = self._accept(host, share) if rank == 0 else [self._connect(host, share)]
        self._thread = threading.Thread(target=self._watch, name="shoestring-rank-failure", daemon=True)
        self._thread.start()

    # -- connecting -----------------------------------------------------------------------------------------
    def _accept(self, host: str, share: Callable[[list[int]], list[int]]) -> list[_Peer]:
        """Whoever knows the token is one of the group: only its processes get it."""
        token = secrets.randbits(62)
        with _listen(host) as listener:
            share([listener.getsockname()[1], token])
            listener.settimeout(self._lost_after)
            peers: dict[int, _Peer] = {}
            while len(peers) < self.num - 1:
                try:
                    connection, _ = listener.accept()
                except OSError as error:
                    missing = [r for r in range(1, self.num) if r not in peers]
                    raise RuntimeError(f"processes {missing} did not connect to the first one: {error}") from None
                words = _read_line(connection).split()
                if len(words) == 3 and words[0] == HELLO.strip() and secrets.compare_digest(words[1], str(token)):
                    peers[int(words[2])] = _Peer(f"process {words[2]}", connection)
                else:
                    connection.close()
        return list(peers.values())

    def _connect(self, host: str, share: Callable[[list[int]], list[int]]) -> _Peer:
        port, token = share([0, 0])
        connection = socket.create_connection((host, port), timeout=self._lost_after)
        connection.sendall(f"{HELLO}{token} {self.rank}\n".encode())
        return _Peer("the first process", connection)

    # -- called from anywhere ------------------------------------------------------------------------------
    def announce(self, error: BaseException) -> None:
        """This process failed. Returns when the others know, or after a few seconds. A collective that fails because
        another process is gone is that one's failure, which the watch is about to notice."""
        if lost_peer(error) is not None and self._noticed.wait(NOTICE_S):
            return
        who = "the first process" if self.rank == 0 else f"process {self.rank}"
        message = " ".join(str(error).split()) or type(error).__name__
        self.failed = self.failed or f"{who} failed: {message[:300]}"
        self._tell(self.failed, wait_s=HEARD_S)

    def check(self) -> None:
        if self.failed:
            raise UserError(f"{self.failed}; the processes are out of step: start them again")

    def close(self) -> None:
        """Say goodbye: the end of this process is no failure from now on."""
        self._closed.set()
        self._write(BYE)

    def _write(self, line: str) -> None:
        for peer in self._peers:
            peer.write(line)

    # -- the thread ----------------------------------------------------------------------------------------
    def _watch(self) -> None:
        while not self._closed.is_set():
            message = self._turn()
            if message and not self.failed:
                self._end(message)
            if self.failed:  # also where it was this one
                return

    def _turn(self) -> str:
        """One beat: send it, read what has come; what failed, if something did."""
        began = time.monotonic()
        self._write(BEAT)
        message = ""
        while not message and (left := BEAT_S - (time.monotonic() - began)) > 0:
            alive = [p for p in self._peers if p.open]
            if not alive:
                self._closed.wait(left)
                break
            ready, _, _ = select.select([p.connection for p in alive], [], [], left)
            for peer in alive:
                if peer.connection in ready:
                    message = message or self._hear(peer)
        for peer in self._peers:
            if peer.open and not peer.said_bye:
                peer.silent_turns += 1
                if peer.silent_turns * BEAT_S > self._lost_after:
                    message = message or (
                        f"{peer.name} has not answered for {self._lost_after:g} s: it is stopped or unreachable"
                    )
        return message

    def _hear(self, peer: _Peer) -> str:
        message = ""
        for line in peer.read():
            if line.startswith(FAILED):
                message = line.removeprefix(FAILED)
            elif line == HEARD:
                peer.heard.set()
            elif line == BYE:
                peer.said_bye = True
        if not peer.open:
            peer.heard.set()
            if not peer.said_bye and not message:
                message = f"{peer.name} ended"
        return message

    def _end(self, message: str) -> None:
        self.failed = message
        self._noticed.set()
        if self.rank == 0:
            self._tell(message, wait_s=0)
            self._write(HEARD)
            if self.on_failure is not None:
                self.on_failure(message)
            if self._closed.wait(PATIENCE_S):
                return
        elif message.endswith(" ended") and self._closed.wait(PATIENCE_S):
            return  # the connections of the group broke as well, which the main thread has said
        print(f"error: process {self.rank} stops: {message}", file=sys.stderr, flush=True)
        self._write(HEARD)
        os._exit(1)  # the main thread may wait in a collective for ever

    def _tell(self, message: str, wait_s: float) -> None:
        self._write(FAILED + message)
        deadline = time.monotonic() + wait_s
        for peer in self._peers:
            while peer.open and not peer.heard.is_set() and time.monotonic() < deadline:
                if threading.current_thread() is self._thread or not self._thread.is_alive():
                    self._hear(peer)
                peer.heard.wait(BEAT_S / 4)


def _listen(host: str) -> socket.socket:
    """On the address that the others reach this machine by; on all of them where it has no such one of its own."""
    both = socket.has_dualstack_ipv6()
    for address, family in ((host, socket.AF_INET), (host, socket.AF_INET6), ("", socket.AF_INET6 if both else None)):
        try:
            everywhere = {"dualstack_ipv6": both} if not address else {}
            return socket.create_server((address, 0), family=family or socket.AF_INET, backlog=128, **everywhere)
        except OSError:
            continue
    raise RuntimeError(f"cannot listen on any port of {host}")


def _read_line(connection: socket.socket) -> str:
    """The first line and nothing behind it; what is not one, or comes too slowly, is empty."""
    connection.settimeout(HEARD_S)
    line = b""
    try:
        while not line.endswith(b"\n") and len(line) < MAX_LINE:
            if not (byte := connection.recv(1)):
                return ""
            line += byte
    except OSError:
        return ""
    return line.decode(errors="replace")
