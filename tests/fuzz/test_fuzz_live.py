"""Live weights under attack: no hostile publisher's weights are taken over, and no stranger keeps a follower out.

A few sessions of each kind run always; `-m lab` runs 1,000 and saves what it counted to results/fuzz.jsonl and
results/live_weights.jsonl.
"""

from __future__ import annotations

import resource
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from live_sessions import AGAINST_FOLLOWER, AGAINST_PUBLISHER, Address, attack_follower, attack_publisher, logged_in
from outcomes import SEED, Tally, lab_seeds

from benchmarks.results import record
from shoestring.errors import UserError
from shoestring.formats import convert, pack, parse_format
from shoestring.mesh import open_mesh
from shoestring.model import Decoder
from shoestring.runlog import RunLog
from shoestring.serve.engine.weight_pull import WeightPull
from shoestring.serve.engine.weight_update import WeightTarget
from shoestring.state.reshard import exchange
from shoestring.state.reshard.exchange import Publisher, SnapshotServer
from shoestring.train.publish import MOST_FORMS, Publish
from shoestring.train.step import Run
from tiny import QWEN2, random_model

KEY, FEW, MANY = "a secret", 4, 500
LOCKOUT_S, MEMORY_GB = 2.0, 1.0


@pytest.fixture
def publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Publish]:
    """A run with a key that has published step 2. An exception that ends one of its threads fails the test."""
    monkeypatch.setenv(exchange.KEY, KEY)
    model = random_model(QWEN2)
    hook = Publish(model, open_mesh(device="cpu"), "127.0.0.1:0", 2)
    run = Run(model, torch.optim.SGD(model.parameters()), open_mesh(device="cpu"), RunLog(tmp_path / "run"), step=2)
    hook.publish(run)
    hook.wait()
    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    yield hook
    hook.server.close()
    assert not raised, raised


def served() -> Decoder:
    model = random_model(QWEN2, 1)
    convert(model, [("blocks.0.*", parse_format("int4:g32")), ("blocks.1.*", parse_format("nf3:s2:g32"))])
    pack(model)
    return model


def follow_sessions(publish: Publish, seeds: range) -> Tally:
    tally, model = Tally("follow"), served()
    for seed in seeds:
        tally.add(*attack_follower(seed, publish.server, model, KEY))
    return tally


def publish_sessions(publish: Publish, seeds: range, at_once: int = 8) -> Tally:
    tally = Tally("publish")
    with ThreadPoolExecutor(at_once) as pool:
        for found in pool.map(lambda seed: attack_publisher(seed, publish.server.address), seeds):
            tally.add(*found)
    return tally


def test_no_hostile_publisher_is_followed(publish: Publish, monkeypatch: pytest.MonkeyPatch) -> None:
    tally = follow_sessions(publish, range(FEW * len(AGAINST_FOLLOWER)))
    tally.check()
    assert tally.counts["clean"] == tally.cases


def test_a_publisher_under_attack_goes_on(publish: Publish, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "PROOF_S", 0.5)
    tally = publish_sessions(publish, range(2 * FEW * len(AGAINST_PUBLISHER)))
    tally.check()
    assert tally.counts["ok"] > 4 and tally.counts["clean"] > 16
    assert pulled(publish)


def pulled(publish: Publish) -> bool:
    """Whether a follower gets the weights, whole."""
    model = random_model(QWEN2, 1)
    pull = WeightPull(publish.server.address, WeightTarget(model))
    values, _, _ = pull.pull(2)
    pull.close()
    return all(torch.equal(values[name][""], t) for name, t in random_model(QWEN2).named_parameters())


def test_the_login_has_a_limit_in_all(publish: Publish, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "PROOF_S", 0.6)
    began = time.monotonic()
    with socket.create_connection(publish.server.address, timeout=20) as stranger, pytest.raises(OSError):
        while time.monotonic() < began + 20:
            stranger.sendall(b"s")
            time.sleep(0.1)
            stranger.recv(4096, socket.MSG_DONTWAIT) if time.monotonic() > began + 2 else None
    assert time.monotonic() < began + 15


def test_the_oldest_stranger_gives_way_and_followers_have_places_of_their_own(
    publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = logged_in(publish.server.address)
    strangers = [socket.create_connection(publish.server.address) for _ in range(exchange.MOST_STRANGERS)]
    assert pulled(publish)  # in the place of the oldest
    strangers[0].settimeout(20)
    while strangers[0].recv(4096):
        pass
    strangers[-1].setblocking(False)
    with pytest.raises(BlockingIOError):
        while strangers[-1].recv(4096):
            pass
    follower.send({"op": "wait"})
    assert follower.receive()["newest"]["step"] == 2
    monkeypatch.setattr(exchange, "MOST_FOLLOWERS", 1)
    with pytest.raises(UserError, match="1 followers already"):
        Publisher(publish.server.address)
    for stranger in strangers:
        stranger.close()
    follower.close()


def test_encoded_forms_are_bounded(publish: Publish) -> None:
    snapshot: Any = publish.server._snapshot
    name, (box, _) = next((n, held) for n, held in snapshot.held.items() if n.endswith("mlp.up.weight"))
    for group in (0, 8, 16, 32, 64, 32):
        form = parse_format(f"int4:g{group}").to_json()
        snapshot.parts(name, box, {"dtype": "F32", "format": form})
    assert len(snapshot._encoded[name]) == MOST_FORMS


# -- the campaign --------------------------------------------------------------------------------------------


class Honest:
    """A follower that comes again and again: the longest time that it was kept out."""

    def __init__(self, server: SnapshotServer) -> None:
        self.address: Address = server.address
        self.longest, self.logins = 0.0, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Honest:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            while True:
                try:
                    publisher = Publisher(self.address)
                    assert publisher.newest() is not None
                    publisher.close()
                    break
                except (OSError, UserError):
                    time.sleep(0.05)
            self.longest = max(self.longest, time.monotonic() - began)
            self.logins += 1
            self._stop.wait(0.05)


def drip(address: Address, until: float) -> None:
    """64 strangers with a byte now and then, who come again."""
    held: list[socket.socket] = []
    while time.monotonic() < until:
        while len(held) < 64:
            held.append(socket.create_connection(address))
        for one in list(held):
            try:
                one.sendall(b"s")
            except OSError:
                held.remove(one)
                one.close()
        time.sleep(0.5)
    for one in held:
        one.close()


@pytest.mark.lab
def test_campaign_of_hostile_sessions(publish: Publish) -> None:
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seeds = lab_seeds(MANY)
    with Honest(publish.server) as honest:
        dripping = threading.Thread(target=drip, args=(publish.server.address, time.monotonic() + 30))
        dripping.start()
        attacked = publish_sessions(publish, seeds, at_once=16)
        hostile = follow_sessions(publish, seeds)
        dripping.join()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) * 1024 / 1e9
    taken = sum("taken over" in line for line in hostile.details)
    config = {"seed": SEED}
    for metric, value, unit in (
        ("hostile_sessions", attacked.cases + hostile.cases, "sessions"),
        ("taken_over", taken, "sessions"),
        ("lockout_s", honest.longest, "s"),
        ("memory_gb", grown, "GB"),
    ):
        quality = {"logins": honest.logins}
        record(bench="live_weights", case="hostile sessions", metric=metric, unit=unit, samples=[value], config=config,
               quality=quality)  # fmt: skip
    for tally in (attacked, hostile):
        tally.save()
        tally.check()
    assert taken == 0 and pulled(publish)
    assert honest.logins > 20 and honest.longest < LOCKOUT_S and grown < MEMORY_GB, (honest.longest, grown)
