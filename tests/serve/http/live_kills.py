"""Kills one process after the other of a training run that publishes and a server that follows. Run by test_follow.

    live_kills.py FOLDER NUM SEED

A trainer (with copies in memory, so it has an agent) publishes a version every moment; `shoestring serve` follows it,
with HTTP in a process of its own. Both are forked from here. Each round kills (SIGKILL) the trainer, its agent, the
HTTP process or the engine's process: the latter at a random moment, inside a pull, or inside the write of new weights.
What died is started again. Every answer, before and after, must be the text of the one version that it names.

The last line is JSON: kills by victim, answers, versions seen, answers that no single version writes.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

folder, num_kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
os.environ["SHOESTRING_MEMORY_DIR"] = str(folder / "memory")
torch.set_num_threads(1)

from test_follow import VOCAB, expected, weights_of  # noqa: E402

from shoestring.mesh import open_mesh  # noqa: E402
from shoestring.model.folder import save_model  # noqa: E402
from shoestring.runlog import RunLog  # noqa: E402
from shoestring.serve.engine.weight_update import WeightTarget  # noqa: E402
from shoestring.serve.http.server import ServeOptions, main  # noqa: E402
from shoestring.state.levels.agent import STATUS  # noqa: E402
from shoestring.state.levels.cache import CheckpointCache  # noqa: E402
from shoestring.state.levels.settings import CheckpointConfig, LevelsConfig  # noqa: E402
from shoestring.state.reshard.exchange import Channel  # noqa: E402
from shoestring.train.publish import Publish  # noqa: E402
from shoestring.train.step import Run  # noqa: E402
from tiny import chat_tokenizer, served_model  # noqa: E402

VICTIMS = ("engine, writing", "publisher", "engine, pulling", "http", "agent", "engine")
NUM_TOKENS, BEGAN = 12, time.monotonic()
DIE = folder / "die"  # names the place where the engine's process is to end


def forked(name: str, action: Callable[[], object]) -> int:
    log = (folder / f"{name}.log").open("a")
    pid = os.fork()
    if pid == 0:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        with suppress(BaseException):
            action()
        os._exit(0)
    log.close()
    return pid


def train(port: int) -> None:
    model, mesh = served_model(VOCAB), open_mesh(device="cpu")
    optimizer = torch.optim.SGD(model.parameters())
    often = CheckpointConfig(checkpoint="auto", levels=LevelsConfig(mttf_hours=1e-4, budget=0.2))
    cache = CheckpointCache(folder / "run", model, optimizer, settings=often, quiet=True)
    cache.load()
    hook = Publish(model, mesh, f"127.0.0.1:{port}", 1)
    run = Run(model, optimizer, mesh, RunLog(None, quiet=True))
    with hook.named("run"):
        while True:
            run.step = int(10 * (time.monotonic() - BEGAN))  # later than before, in every life
            cache.wait()
            model.load_state_dict(weights_of(run.step).state_dict())
            hook.after_step(run)
            cache.step(run.step)
            time.sleep(0.3)


def serve(port: int) -> None:
    """As the command does; it ends itself in the middle of a pull or a write where it finds that it should."""
    draw, receive, pairs = random.Random(time.monotonic()), Channel.receive_bytes, WeightTarget._pairs

    def die(place: str) -> bool:
        return DIE.exists() and DIE.read_text() == place

    def receive_bytes(self: Channel, like: torch.Tensor) -> torch.Tensor:
        if die("engine, pulling") and draw.random() < 0.2:
            os.kill(os.getpid(), signal.SIGKILL)
        return receive(self, like)

    def next_pairs(self: WeightTarget, name: str, new: Any) -> Any:
        if die("engine, writing") and draw.random() < 0.2:
            os.kill(os.getpid(), signal.SIGKILL)
        return pairs(self, name, new)

    Channel.receive_bytes, WeightTarget._pairs = receive_bytes, next_pairs  # type: ignore[method-assign]
    options = ServeOptions(port=0, follow=f"127.0.0.1:{port}", update_wait_s=0.2, drain_s=1.0)
    main(folder / "model", options, apart=True)


def alive(pid: int) -> bool:
    done, _ = os.waitpid(pid, os.WNOHANG)
    return done == 0


class Server:
    def __init__(self, port: int) -> None:
        self.log = folder / "serve.log"
        self.log.write_text("")
        self.pid = forked("serve", lambda: serve(port))
        ends = time.monotonic() + 120
        while not (found := re.search(r"at http://[\d.]+:(\d+)/v1", self.log.read_text())):
            assert time.monotonic() < ends and alive(self.pid), self.log.read_text()[-2000:]
            time.sleep(0.02)
        self.port = int(found[1])
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        self.http = int(children[0])

    def answer(self) -> dict[str, Any] | None:
        """One completion; None where no server answers with a text."""
        body = {"prompt": "the quick brown fox", "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            told = connection.getresponse()
            content = told.read()
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()
        return json.loads(content)["choices"][0] if told.status == 200 else None

    def end(self) -> None:
        for pid in (self.pid, self.http):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


class Answers:
    def __init__(self) -> None:
        self.num = self.mixed = self.changing = 0
        self.steps: set[int] = set()
        self._texts: dict[int, str] = {}

    def check(self, answer: dict[str, Any] | None) -> int:
        """The step that wrote the answer; -1: as loaded, -2: there is none, or two versions wrote it."""
        if answer is None:
            return -2
        self.num += 1
        written = answer.get("weights", [])
        if len(written) > 1:
            self.changing += 1  # a text that went on after the wait, and says so
            return -2
        step = int(written[0]["version"].partition("@")[2].partition("-")[0]) if written else -1
        if step not in self._texts:
            self._texts[step] = expected(step, NUM_TOKENS, "the quick brown fox") if step >= 0 else AS_LOADED
        self.mixed += answer["text"] != self._texts[step]
        self.steps.add(step)
        return step


def agents() -> list[int]:
    found = []
    for status in folder.rglob(STATUS):
        with suppress(OSError, ValueError):
            found.append(int(json.loads(status.read_bytes())["pid"]))
    return found


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def campaign() -> None:
    draw, answers, kills = random.Random(seed), Answers(), Counter[str]()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    trainer, server = forked("train", lambda: train(port)), Server(port)
    newest = -1
    try:
        for number in range(num_kills):
            until = time.monotonic() + 60
            while (step := answers.check(server.answer())) <= newest:  # weights newer than before the last kill
                assert time.monotonic() < until, (step, newest, (folder / "train.log").read_text()[-1500:])
                assert alive(trainer) and alive(server.pid), server.log.read_text()[-1500:]
                time.sleep(0.02)
            newest, victim = step, VICTIMS[number % len(VICTIMS)]
            time.sleep(draw.uniform(0.0, 0.4))
            if victim == "publisher":
                kill(trainer)
                os.waitpid(trainer, 0)
                assert answers.check(server.answer()) > -2  # it goes on with what it has
                trainer = forked("train", lambda: train(port))
            elif victim == "agent":
                while not (found := agents()):
                    assert time.monotonic() < until + 60
                    time.sleep(0.1)
                for agent in found:
                    kill(agent)
                kill(trainer)  # its next life starts an agent
                os.waitpid(trainer, 0)
                trainer = forked("train", lambda: train(port))
            else:
                if victim in ("http", "engine"):
                    kill(server.http if victim == "http" else server.pid)
                else:
                    DIE.write_text(victim)
                until = time.monotonic() + 60
                while alive(server.pid):
                    answers.check(server.answer())
                    assert time.monotonic() < until, (victim, server.log.read_text()[-1500:])
                DIE.unlink(missing_ok=True)
                server.end()
                server = Server(port)
            kills[victim] += 1
            answers.check(server.answer())
    finally:
        kill(trainer)
        server.end()
        for agent in agents():
            kill(agent)
    told = {
        "answers": answers.num,
        "versions": len(answers.steps),
        "mixed": answers.mixed,
        "changing": answers.changing,
    }
    print(json.dumps({"kills": dict(kills), **told}))


if __name__ == "__main__":
    folder.mkdir(parents=True, exist_ok=True)
    save_model(folder / "model", served_model(VOCAB), chat_tokenizer())
    from shoestring.serve import Engine, Sampling

    as_loaded = Engine(served_model(VOCAB), chat_tokenizer(), eos_ids=())
    AS_LOADED = as_loaded.generate(["the quick brown fox"], Sampling(max_tokens=NUM_TOKENS))[0].text
    campaign()
