"""Processes of tests that start at once: forks of one that has imported what ours import.

A new Python that imports torch and shoestring takes three seconds of processor time, and the suite starts dozens.
`WarmPopen` is subprocess.Popen, whose `python -c`, `python -m` and `python script` are forks; whatever else it is told
to start, it starts as ever. A test that is about a start itself (what it imports, how its streams are encoded) takes
subprocess.Popen.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from multiprocessing.context import ForkServerContext
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

# multiprocessing's fork server imports these once. It is a process of its own, and starts no threads.
PRELOAD = [
    "warm_process",
    "pydantic",
    "torch._dynamo",  # which DTensor imports at its first operation
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.utils.tensorboard",
    "shoestring.cli.app",
    "shoestring.methods.distill.lowbit_best",
    "shoestring.methods.sparse24.recipes.prune24",
    "shoestring.recipes.demo",
    "shoestring.recipes.train.dense",
    "shoestring.serve.http.server",
]


def fork_server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def run_script(script: str, args: list[str], env: dict[str, str], log: str) -> None:
    """As `python script args` with this environment, both outputs in the file `log`."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    _become([script, *args], env, str(Path.cwd()), (0, file, file))


def _become(argv: list[str], env: dict[str, str], cwd: str, streams: tuple[int, int, int]) -> None:
    for own, given in enumerate(streams):
        if own != given:
            os.dup2(given, own)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(fd, mode, closefd=False) for fd, mode in enumerate("rww"))
    sys.stderr.reconfigure(line_buffering=True)  # type: ignore[attr-defined]
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    kind, *rest = argv
    sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path.insert(0, str(Path(kind).parent) if kind not in ("-c", "-m") else "")
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        runpy.run_path(kind, run_name="__main__")


def _start(argv: list[str], env: dict[str, str], cwd: str, streams: list[Any]) -> None:
    _become(argv, env, cwd, tuple(stream.detach() for stream in streams))  # type: ignore[arg-type]


class WarmPopen(subprocess.Popen):  # type: ignore[type-arg]
    _process: Any = None

    def _execute_child(self, args: Any, *given: Any) -> None:
        (executable, preexec, _, pass_fds, cwd, env, _, _, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread,
         errwrite, *_) = given  # fmt: skip
        argv = [args] if isinstance(args, str) else [os.fspath(arg) for arg in args]
        is_python = argv[0] == sys.executable and (argv[1] in ("-c", "-m") or not argv[1].startswith("-"))
        if not is_python or executable or preexec or pass_fds or shell:
            super()._execute_child(args, *given)  # type: ignore[misc]
            return
        streams = [own if given < 0 else given for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        env = dict(os.environ if env is None else env)
        where = os.fspath(cwd or Path.cwd())
        self._process = fork_server().Process(target=_start, args=(argv[1:], env, where, _Duplicates(streams)))
        self._process.start()
        self.pid, self._child_created = self._process.pid, True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _try_wait(self, flags: int) -> tuple[int, int]:
        if self._process is None:
            return super()._try_wait(flags)  # type: ignore[misc]
        if not flags & os.WNOHANG:
            self._process.join()
        code = self._process.exitcode
        return (0, 0) if code is None else (self.pid, -code if code < 0 else code << 8)

    def _internal_poll(self, *args: Any, **options: Any) -> int | None:
        if self._process is None:
            return super()._internal_poll(*args, **options)  # type: ignore[misc]
        if self.returncode is None:
            self.returncode = self._process.exitcode
        return self.returncode


class _Duplicates(list[int]):
    """Descriptors that are duplicated for the child while it is started."""

    def __reduce__(self) -> Any:
        return list, ([DupFd(fd) for fd in self],)
