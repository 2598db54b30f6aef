"""The first process of a group, with others that are played by plain sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from shoestring.errors import UserError
from shoestring.serve.engine import rank_failure
from shoestring.serve.engine.rank_failure import RankFailureWatch

GONE = RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer")


class Others:
    """Processes 1 and up, which say what a test lets them say."""

    def __init__(self, num: int) -> None:
        self.num, self.sockets, self.strangers = num, list[socket.socket](), list[socket.socket]()

    def connect(self, numbers: list[int]) -> list[int]:
        """In the place of the broadcast: when it returns they have connected, behind strangers without a token."""
        port, token = numbers
        for hello in (b"GET / HTTP/1.1\r\n", b"hello 1 1\n", b"hello\n"):
            self.strangers.append(socket.create_connection(("127.0.0.1", port)))
            self.strangers[-1].sendall(hello)
        for rank in range(1, self.num):
            self.sockets.append(socket.create_connection(("127.0.0.1", port)))
            self.sockets[-1].sendall(f"hello {token} {rank}\nbeat\n".encode())
        return numbers

    def say(self, rank: int, line: str) -> None:
        self.sockets[rank - 1].sendall(line.encode() + b"\n")

    def heard(self, rank: int, words: str) -> bool:
        """Whether a line comes that begins like this."""
        self.sockets[rank - 1].settimeout(5)
        file = self.sockets[rank - 1].makefile()
        return any(line.startswith(words) for line in file)


@contextmanager
def watched(num: int = 2, lost_after_s: float = 30.0) -> Iterator[tuple[RankFailureWatch, Others, Callable[[], str]]]:
    """The watch, the others, and a function that waits for the failure."""
    others, failed = Others(num), threading.Event()
    watch = RankFailureWatch(0, num, others.connect, lost_after_s=lost_after_s, host="127.0.0.1")

    def failure() -> str:
        assert failed.wait(10)
        return watch.failed

    watch.on_failure = lambda message: failed.set()
    try:
        yield watch, others, failure
    finally:
        watch.close()  # or it would end this process
        for s in (*others.sockets, *others.strangers):
            s.close()


def test_a_process_that_fails_tells_all_the_others() -> None:
    with watched(3) as (watch, others, failure):
        watch.check()
        others.say(1, "failed process 1 failed: out of memory")
        assert failure() == "process 1 failed: out of memory"
        assert others.heard(1, "heard") and others.heard(2, "failed process 1 failed: out of memory")
        with pytest.raises(UserError, match="process 1 failed: out of memory; the processes are out of step"):
            watch.check()


def test_a_process_that_is_silent_or_ends_has_failed() -> None:
    with watched(lost_after_s=0.5) as (_, _, failure):
        assert failure() == "process 1 has not answered for 0.5 s: it is stopped or unreachable"
    with watched() as (watch, others, failure):
        others.sockets[0].close()
        watch.announce(GONE)  # the engine's thread sees it at the same moment; the others' failure is said, not its own
        assert failure() == "process 1 ended"


def test_a_goodbye_is_no_failure() -> None:
    with watched() as (watch, others, _):
        others.say(1, "bye")
        others.sockets[0].close()
        threading.Event().wait(5 * rank_failure.BEAT_S)
        watch.check()


def test_a_failure_of_its_own_is_announced_until_it_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_failure, "NOTICE_S", 0.1)
    with watched() as (watch, others, _):
        answer = threading.Thread(target=lambda: others.heard(1, "failed the first") and others.say(1, "heard"))
        answer.start()
        watch.announce(GONE)  # nobody has ended: a time-out
        answer.join(10)
        assert watch.failed == f"the first process failed: {GONE}" and others.num == 2
