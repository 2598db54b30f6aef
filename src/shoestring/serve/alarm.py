"""How processes that compute together learn that one of them failed.

A process that fails inside a forward leaves the others in a sum that never comes: gloo waits for minutes, NCCL on
the device. Nothing sent the same way would reach them. So the alarm has a line of its own, a small store beside
the group, at which a thread of every process looks a few times a second. Whoever fails writes a line there.

    the others    print it and exit with code 1, whatever they wait for
    the first     has its own work to end (requests to answer): `failed` is set, `check` raises, and where it is
                  still stuck after `PATIENCE` seconds it exits, too

A process that is killed cannot ring; its connections break, which ends the others as well.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

LOOK_S = 0.2
PATIENCE_S = 20.0


class Alarm:
    def __init__(self, rank: int, num: int, share: Callable[[int], int]) -> None:
        """`share` gives every process the first one's number."""
        self.rank, self.num, self.failed = rank, num, ""
        self._closed = threading.Event()
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        if rank == 0:
            self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
            share(self._store.port)
        else:
            self._store = dist.TCPStore(host, share(0), is_master=False, wait_for_workers=False)
        threading.Thread(target=self._watch, name="shoestring-alarm", daemon=True).start()

    def ring(self, error: BaseException) -> None:
        """This process failed; returns when the others know, or soon."""
        who = "the first process" if self.rank == 0 else f"process {self.rank}"
        said = " ".join(str(error).split()) or type(error).__name__
        self.failed = self.failed or f"{who} failed: {said[:300]}"
        try:
            self._store.set("failed", self.failed)
            deadline = time.monotonic() + 25 * LOOK_S
            heard = [f"heard {r}" for r in range(self.num) if r != self.rank]
            while not self._store.check(heard) and time.monotonic() < deadline:
                time.sleep(LOOK_S)
        except RuntimeError:
            pass  # the store is gone with the process that held it, and that has not gone unnoticed

    def check(self) -> None:
        if self.failed:
            raise RuntimeError(f"{self.failed}; the processes are out of step: start them again")

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_S):
            try:
                if not self._store.check(["failed"]):
                    continue
                said = self._store.get("failed").decode()
                self._store.set(f"heard {self.rank}", "")
            except RuntimeError:
                return  # the first process is gone: the group's own connections tell
            if self.failed:
                return  # it was this one
            self.failed = said
            if self.rank == 0 and self._closed.wait(PATIENCE_S):
                return
            print(f"error: process {self.rank} stops: {said}", file=sys.stderr, flush=True)
            os._exit(1)  # the main thread may wait for a sum that never comes
