"""Campaigns of live updates: 20 versions under 16 streams, publishers and servers that are killed, and the commands."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from serving import running, wait_for
from test_follow import ENV, Trainer, complete, expected, get, killed, step_of

from benchmarks.results import record
from shoestring.state.reshard import exchange

pytestmark = pytest.mark.lab
NUM_STREAMS, NUM_VERSIONS, NUM_TOKENS = 16, 20, 40


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    made = Trainer(tmp_path)
    yield made
    made.hook.server.close()


@pytest.mark.parametrize("mode", ["drain", "recompute"])
def test_twenty_versions_under_sixteen_streams(trainer: Trainer, mode: str) -> None:
    texts = {step: {} for step in range(1, NUM_VERSIONS + 1)}  # type: dict[int, dict[str, str]]
    prompts = [f"stream {i}: the quick brown fox " * 3 for i in range(4)]
    trainer.publish(1)
    answers: list[tuple[str, Any]] = []
    with running(follow=trainer.address, on_update=mode, max_requests=NUM_STREAMS) as service:
        wait_for(lambda: step_of(service) == 1)
        ended = threading.Event()
        stalls: list[float] = []
        take = service.engine_thread.update_weights
        service.engine_thread.update_weights = lambda *given: stalls.append(take(*given)) or stalls[-1]

        def stream(i: int) -> None:
            while not ended.is_set():
                prompt = prompts[i % len(prompts)]
                answers.append((prompt, complete(service, NUM_TOKENS, prompt)))

        threads = [threading.Thread(target=stream, args=(i,)) for i in range(NUM_STREAMS)]
        for thread in threads:
            thread.start()
        for step in range(2, NUM_VERSIONS + 1):
            trainer.publish(step)
            wait_for(lambda s=step: step_of(service) == s)
        ended.set()
        for thread in threads:
            thread.join(120)
        longest, mean = 1e3 * max(stalls), 1e3 * sum(stalls) / len(stalls)
        print(f"{mode}: {len(answers)} answers, engine stopped {mean:.1f} ms on average, {longest:.1f} ms at most")
        assert len(stalls) == NUM_VERSIONS - 1 and step_of(service) == NUM_VERSIONS
        assert "weights_updates_total{" in get(service, "/metrics")
    assert len(answers) >= NUM_STREAMS
    for prompt, answer in answers:
        assert answer["finish_reason"] == "length"
        steps = [int(w["version"].partition("@")[2].partition("-")[0]) for w in answer["weights"]]
        assert steps == sorted(steps) and answer["weights"][0]["first_token"] == 0
        if mode == "drain":
            assert len(steps) == 1
        if len(steps) == 1:  # written by one set of weights: exactly its text
            known = texts[steps[0]]
            if prompt not in known:
                known[prompt] = expected(steps[0], NUM_TOKENS, prompt)
            assert answer["text"] == known[prompt]


def test_a_publisher_that_dies_in_the_middle_of_transfers(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections are cut at random places; every text is one that a version writes, and the last version arrives."""
    draw, send = random.Random(0), socket.socket.sendall

    def cut(self: socket.socket, data: Any, *more: Any) -> None:
        if threading.current_thread().name == "publish-to" and len(data) > 1000 and draw.random() < 0.3:
            send(self, memoryview(data)[: len(data) // 2])
            self.shutdown(socket.SHUT_RDWR)
            raise ConnectionResetError("killed")
        return send(self, data, *more)

    class Cutting(socket.socket):
        sendall = cut  # type: ignore[assignment]

    trainer.publish(1)
    with running(follow=trainer.address) as service:
        wait_for(lambda: step_of(service) == 1)
        original = exchange.Channel.__init__

        def wrapped(self: exchange.Channel, sock: socket.socket, *more: Any) -> None:
            original(self, Cutting(fileno=sock.detach()), *more)

        monkeypatch.setattr(exchange.Channel, "__init__", wrapped)
        trainer.hook.server.close()
        again = Trainer(Path(str(trainer.run.log.folder)).parent / "again", trainer.address)
        for step in range(2, 8):
            again.publish(step)
            time.sleep(1.0)
            before = step_of(service)
            text = complete(service, 12)["text"]
            assert text in (expected(before, 12), expected(step_of(service), 12))
        monkeypatch.undo()
        wait_for(lambda: step_of(service) == 7)
        assert complete(service, 12)["text"] == expected(7, 12)
        again.hook.server.close()


@pytest.mark.parametrize("seed", range(1, 5))
def test_campaign_of_kills(tmp_path: Path, seed: int) -> None:
    """200 kills of the trainer, its agent, the HTTP process and the engine's process during updates."""
    told = killed(tmp_path, 50, seed)
    quality = {"answers": told["answers"], "versions": told["versions"], **told["kills"]}
    for metric, value in (("kills", sum(told["kills"].values())), ("mixed_versions", told["mixed"])):
        measured: dict[str, Any] = {"bench": "live_weights", "case": "kills", "metric": metric, "samples": [value]}
        record(**measured, unit=metric.split("_")[-1], config={"seed": seed}, quality=quality)
    assert told["mixed"] == 0 and told["answers"] > 100 and min(told["kills"].values()) > 7


# -- the commands ---------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def command(*args: str, ranks: int = 1, port: int = 0) -> list[str]:
    if ranks == 1:
        return [sys.executable, "-m", "shoestring", *args]
    launch = [sys.executable, "-m", "torch.distributed.run", f"--master-port={port}", f"--nproc-per-node={ranks}"]
    return [*launch, "-m", "shoestring", *args]


def end_whole(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to it and all below it: torchrun's workers are in sessions of their own, where no signal to its process
    group reaches them. It is
    stopped first, so that it starts none while they are listed."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGSTOP)
    below = psutil.Process(process.pid).children(recursive=True)
    for one in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.kill()
    process.wait(60)
    _, alive = psutil.wait_procs(below, timeout=30)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


class Served:
    def __init__(self, folder: Path, address: str, log: Path, *, ranks: int = 1, more: tuple[str, ...] = ()) -> None:
        self.port, self.log = free_port(), log
        args = ("serve", str(folder), "--port", str(self.port), "--follow", address, "--device", "cpu", *more)
        self.process = subprocess.Popen(
            command(*args, ranks=ranks, port=free_port()), env=ENV, stderr=log.open("w"), start_new_session=True
        )
        self.url = f"http://127.0.0.1:{self.port}"
        wait_for(self.up, 240)

    def up(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            urllib.request.urlopen(self.url + "/health", timeout=2).close()
            return True
        except OSError:
            return False

    def step(self) -> int:
        with urllib.request.urlopen(self.url + "/v1/models", timeout=30) as answer:
            return json.loads(answer.read())["data"][0].get("weights", {}).get("step", -1)

    def text(self, prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
        request = urllib.request.Request(
            self.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())["choices"][0]["text"]

    def stop(self) -> None:
        end_whole(self.process)


@pytest.mark.parametrize(("ranks", "form"), [(1, "int8:g0"), (2, "dense")])
def test_the_commands(tmp_path: Path, ranks: int, form: str) -> None:
    """An FSDP2 trainer on two processes; a packed server, and a tensor-parallel one. A killed server comes back."""
    draw = random.Random(1)
    words = [bytes(draw.choices(b"abcdefghij", k=4)).decode() for _ in range(200)]
    texts = [json.dumps({"text": " ".join(draw.choices(words, k=60))}) for _ in range(300)]
    (tmp_path / "texts.jsonl").write_text("\n".join(texts))
    common = [f"data={tmp_path / 'texts.jsonl'}", "context=32", "batch=4", "eval_every=0", "warmup=1", "device=cpu"]
    shape = ["size=tiny", "d_model=64", "num_heads=4", "num_kv_heads=2", "num_layers=2", "d_ff=128", "vocab_size=320"]
    base = tmp_path / "base"
    subprocess.run(command("run", "train/dense", *common, *shape, "steps=2", f"run={base}"), env=ENV, check=True)
    served = base / "model"
    if form != "dense":
        packed = tmp_path / "packed"
        pack = ["run", "shrink/rtn", f"model={served}", f"format={form}", f"run={packed}"]
        subprocess.run(command(*pack), env=ENV, check=True)
        served = packed / "model"
    address = f"127.0.0.1:{free_port()}"
    server = Served(served, address, tmp_path / "serve.log", ranks=ranks)
    started: list[subprocess.Popen[bytes]] = [server.process]
    try:
        run = tmp_path / "run"
        more = [f"init_from={base / 'model'}", "steps=500", "lr=0.003", "mesh.dp=2", "save_every=0", f"run={run}"]
        publish = [f"publish={address}", "publish_every=20"]
        training = subprocess.Popen(
            command("run", "train/dense", *common, *more, *publish, ranks=2, port=free_port()), env=ENV
        )
        started.append(training)
        wait_for(lambda: server.step() >= 20 or training.poll() is not None, 240)
        server.stop()  # at a random moment: in a pull, a swap or between
        server = Served(served, address, tmp_path / "serve2.log", ranks=ranks)
        started.append(server.process)
        assert training.wait(240) == 0
        wait_for(lambda: server.step() == 500, 60)
        prompt = " ".join(words[:2])
        found = server.text(prompt)
        if form == "dense":
            want = run / "model"
        else:
            again = tmp_path / "packed2"
            pack = ["run", "shrink/rtn", f"model={run / 'model'}", f"format={form}", f"run={again}"]
            subprocess.run(command(*pack), env=ENV, check=True)
            want = again / "model"
        args = ["generate", str(want), prompt, "--max-tokens", "12", "--temperature", "0", "--device", "cpu"]
        plain = subprocess.run(command(*args), env=ENV, check=True, capture_output=True, text=True).stdout
        assert found.strip() and found.strip() in plain
    finally:
        for one in started:
            end_whole(one)
