"""Weights from a training run to a follower: dense, or encoded on the trainer's side; and what can go wrong."""

from __future__ import annotations

import socket
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from refusals import refused
from shoestring.errors import UserError
from shoestring.formats import convert, keep_decoded, pack, parse_format
from shoestring.mesh import open_mesh
from shoestring.model import Decoder
from shoestring.runlog import RunLog
from shoestring.serve.engine.weight_pull import BackgroundPull, WeightPull, check_catalogue, pieces_by_rank
from shoestring.serve.engine.weight_update import WeightTarget
from shoestring.serve.http.follower import WeightFollower
from shoestring.state.reshard import exchange
from shoestring.state.reshard.exchange import Catalogue, Channel, Gone, parse_address
from shoestring.state.reshard.layouts import REPLICATE, MeshLayout, shard
from shoestring.train.publish import Publish, WeightsSnapshot, check_publish
from shoestring.train.step import Run
from tiny import QWEN2, random_model


class Publishing:
    """A run that has trained `step` steps."""

    def __init__(self, model: Decoder, tmp_path: Path, address: str = "127.0.0.1:0") -> None:
        mesh = open_mesh(device="cpu")
        self.hook = Publish(model, mesh, address, 2)
        self.naming = self.hook.named("my-run")
        self.naming.__enter__()
        self.run = Run(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh, RunLog(tmp_path / "run"))

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.run.step += 1
            with torch.no_grad():
                for p in self.run.model.parameters():
                    p.mul_(1.01)
            self.hook.after_step(self.run)
            self.hook.wait()

    @property
    def address(self) -> tuple[str, int]:
        return self.hook.server.address


@pytest.fixture
def publishing(tmp_path: Path) -> Iterator[Publishing]:
    made = Publishing(random_model(QWEN2), tmp_path)
    yield made
    made.hook.server.close()


def packed(model: Decoder) -> Decoder:
    convert(model, [("blocks.*", parse_format("int4:g32"))])
    pack(model)
    return model


def test_dense_weights_arrive_in_the_dtype_they_are_served_in(publishing: Publishing) -> None:
    served = random_model(QWEN2, 1).to(torch.bfloat16)
    pull = WeightPull(publishing.address, WeightTarget(served))
    assert pull.newest() is None  # nothing is published yet
    publishing.train(3)
    found = pull.newest()
    assert found is not None and (pull.run, found.step, found.turns) == ("my-run", 2, 0)
    publishing.train(1)
    values, version, num_bytes = pull.pull(4)
    want = {n: p.bfloat16() for n, p in publishing.run.model.named_parameters()}
    assert all(torch.equal(values[n][""], t) for n, t in want.items()) and values.keys() == want.keys()
    assert (version.run, version.step) == ("my-run", 4) and len(version.digest) == 32
    assert num_bytes == sum(t.nbytes for t in want.values())
    with pytest.raises(Gone):
        pull.pull(2)
    assert pull.pull(4)[1] == version  # the connection survives that
    assert publishing.hook.server.wait_until_pulled(600.0)
    pull.close()


@pytest.mark.parametrize("label", ["int4:g32", "nf3:s2:g32", "int8:sym:g0"])
def test_packed_servers_get_packed_bytes(publishing: Publishing, label: str) -> None:
    """The parts are those of converting and packing the trained model here, and far fewer bytes travel."""
    publishing.train(2)

    def as_served(model: Decoder) -> Decoder:
        convert(model, [("blocks.*", parse_format(label))])
        pack(model)
        return model

    pull = WeightPull(publishing.address, WeightTarget(as_served(random_model(QWEN2, 1))))
    values, _, num_bytes = pull.pull(2)
    pull.close()
    trained = random_model(QWEN2)
    trained.load_state_dict(publishing.run.model.state_dict())
    want = as_served(trained).state_dict()
    for name, parts in values.items():
        for part, t in parts.items():
            assert torch.equal(t, want[f"{name}_{part}" if part else name]), (name, part)
    dense = sum(p.nbytes for p in publishing.run.model.parameters())
    assert num_bytes < 0.6 * dense  # the embedding stays dense


def test_strangers_get_little_time_and_no_room(publishing: Publishing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the proof of the key: a large message and silence both end the connection."""
    monkeypatch.setattr(exchange, "PROOF_S", 0.3)
    for sent in (b"shsw" + (1 << 20).to_bytes(4, "little"), b""):
        with socket.create_connection(publishing.address, timeout=10) as stranger:
            stranger.sendall(sent)
            got = b""
            while part := stranger.recv(4096):
                got += part
        assert b"challenge" in got and b"tensors" not in got


def test_followers_that_come_while_the_last_version_is_waited_for(publishing: Publishing) -> None:
    """The thread that waits goes through the connections under the lock under which one is added."""
    server, held = publishing.hook.server, []

    class Watched(set[Channel]):
        def add(self, channel: Channel) -> None:
            held.append(server._changed._is_owned())  # type: ignore[attr-defined]
            super().add(channel)

    server._channels = Watched()
    WeightPull(publishing.address, WeightTarget(random_model(QWEN2))).close()
    assert held == [True]


def shards(publishing: Publishing, num: int) -> list[exchange.SnapshotServer]:
    """The published step from `num` ranks, of which each is asked for its rows."""
    catalogue, snapshot = publishing.hook.server.catalogue, publishing.hook.server._snapshot
    assert isinstance(snapshot, WeightsSnapshot)
    layout = MeshLayout((num,), (shard(0),))
    cut = Catalogue("run", {n: (shape, dtype, layout) for n, (shape, dtype, _) in catalogue.tensors.items()})
    servers = [exchange.SnapshotServer(("127.0.0.1", 0), cut) for _ in range(num)]
    for rank, server in enumerate(servers):
        server.endpoints = [s.address for s in servers]
        server.publish(replace(snapshot, digest=str(rank)))
    return servers


def test_what_all_ranks_send_must_be_the_same(publishing: Publishing) -> None:
    """A table belongs to a weight of which several ranks hold rows."""
    publishing.train(2)
    served = random_model(QWEN2, 1)
    convert(served, [("blocks.*", parse_format("nf3:s2:g32"))])
    pack(served)
    servers = shards(publishing, 2)
    pull = WeightPull(servers[0].address, WeightTarget(served))
    values, _, _ = pull.pull(2)
    whole = WeightPull(publishing.address, WeightTarget(served))
    want, _, _ = whole.pull(2)
    assert all(torch.equal(values[n][p], t) for n, parts in want.items() for p, t in parts.items())
    snapshot, name = servers[1]._snapshot, "blocks.0.mlp.up.weight"
    for forms in snapshot._encoded[name].values():  # type: ignore[union-attr]
        forms["table"].mul_(2)
    refused(f"sent different 'table' of '{name}'", pull.pull, 2)
    for one in (pull, whole, *servers):
        one.close()


def test_ranks_on_other_hosts_are_followed_where_that_is_allowed(publishing: Publishing) -> None:
    publishing.train(2)
    servers = shards(publishing, 2)
    servers[0].endpoints = [servers[0].address, ("127.0.0.2", servers[1].address[1])]
    target = WeightTarget(random_model(QWEN2, 1))
    refused(r"is at '127.0.0.2', another host .* --follow-host", WeightPull, servers[0].address, target)
    with pytest.raises(ConnectionRefusedError):  # allowed, and nobody listens there
        WeightPull(servers[0].address, target, hosts=["127.0.0.2"])
    for server in servers:
        server.close()


def test_a_share_of_other_weights_of_the_same_step_is_not_written(publishing: Publishing) -> None:
    """Of a tensor-parallel server: a run that went back publishes a step again."""
    publishing.train(2)
    pull = BackgroundPull(publishing.address, WeightTarget(random_model(QWEN2, 1)))
    first = WeightPull(publishing.address, WeightTarget(random_model(QWEN2, 1)))
    version = first.pull(2)[1]
    for digest, taken in (("another", False), (version.digest, True)):
        pull.begin(2)
        assert (pull.take(2, digest, 60.0) is not None) == taken
    assert pull.take(2, version.digest, 60.0) is None  # once
    with torch.no_grad():
        publishing.run.model.get_parameter("norm.weight").fill_(float("nan"))
    publishing.train(2)
    pull.begin(4)
    assert pull.take(4, first.pull(4)[1].digest, 60.0) is None
    first.close()


def test_a_model_of_another_kind_is_refused_by_name(publishing: Publishing) -> None:
    publishing.train(2)
    cases = [
        (replace(QWEN2, qkv_bias=False, model_type="llama"), "has 'blocks.0.attn.q.bias', which the served model"),
        (replace(QWEN2, qk_norm=True), "has no 'blocks.0.attn.q_norm.weight'"),
        (replace(QWEN2, vocab_size=97), "has shape"),
    ]
    for spec, line in cases:
        refused(line, WeightPull, publishing.address, WeightTarget(random_model(spec)))


def test_keys_addresses_and_strangers(publishing: Publishing, monkeypatch: pytest.MonkeyPatch) -> None:
    publishing.train(2)
    target = WeightTarget(random_model(QWEN2))
    monkeypatch.setenv(exchange.KEY, "another")
    refused("the key is wrong", WeightPull, publishing.address, target)
    monkeypatch.delenv(exchange.KEY)
    for text in ("29600", "host:", ":1", "host:port", "host:99999"):
        refused("is not an address", parse_address, text)
    assert parse_address("[::1]:29600") == ("::1", 29600)
    refused("cannot publish at", Publishing, random_model(QWEN2), Path("/nowhere"), "203.0.113.7:1")
    for address, insecure, said_no in (
        ("127.0.0.1:1", False, False),
        ("[::1]:1", False, False),
        ("localhost:1", False, False),
        ("127.example.org:1", False, True),
        ("10.0.0.7:1", False, True),
        ("10.0.0.7:1", True, False),
        ("0.0.0.0:1", False, True),
    ):
        with pytest.raises(UserError, match="set SHOESTRING_PUBLISH_KEY") if said_no else nullcontext():
            check_publish(address, insecure)
    monkeypatch.setenv(exchange.KEY, "secret")
    check_publish("10.0.0.7:1", False)
    monkeypatch.delenv(exchange.KEY)
    with socket.create_connection(publishing.address) as stranger:  # not our protocol
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
        while stranger.recv(4096):
            pass
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(OSError):
            WeightPull(silent.getsockname(), target, timeout_s=0.2)
    WeightPull(publishing.address, target).close()  # the publisher goes on


def test_a_follower_that_stops_reading_or_dies_does_not_stop_training(publishing: Publishing) -> None:
    publishing.train(2)
    pull = WeightPull(publishing.address, WeightTarget(random_model(QWEN2)))
    channel = pull._ranks[0]._channel
    rows = [["embed.weight", [0, 0], [96, 64], 0]] * 4000
    channel.send({"op": "get", "step": 2, "pieces": rows, "forms": [{"dtype": "F32"}]})  # 100 MB that are never read
    publishing.train(4)  # nothing of it waits for the follower, to which it is still being sent
    assert [c.pulled for c in publishing.hook.server._channels] == [""] and pull._ranks[0]._channel is channel
    other = WeightPull(publishing.address, WeightTarget(random_model(QWEN2)))
    assert other.pull(6)[1].step == 6
    other.close()
    pull.close()


def test_a_damaged_or_broken_transfer_gives_nothing(publishing: Publishing, monkeypatch: pytest.MonkeyPatch) -> None:
    publishing.train(2)
    target = WeightTarget(random_model(QWEN2))
    crc = zlib.crc32

    def damaging(data: object, start: int = 0) -> int:  # the publisher's checksum is another one than the follower's
        return crc(data, start) ^ (threading.current_thread().name == "publish-to")  # type: ignore[arg-type]

    pull = WeightPull(publishing.address, target)
    monkeypatch.setattr(exchange.zlib, "crc32", damaging)
    refused("arrived damaged", pull.pull, 2)
    monkeypatch.undo()
    pull.close()

    pull = WeightPull(publishing.address, target)
    monkeypatch.setattr(exchange, "_buckets", lambda *a: (_ for _ in ()).throw(ConnectionError("killed")))
    with pytest.raises(OSError):
        pull.pull(2)
    pull.close()


def test_what_cannot_be_sent_is_refused_by_name(publishing: Publishing) -> None:
    convert(publishing.run.model, [("blocks.0.mlp.*", parse_format("int4:g32:learned"))])
    trained = Publishing(publishing.run.model, Path("/tmp"))
    trained.run.step = 1
    trained.run.log = publishing.run.log
    trained.train(1)
    pull = WeightPull(trained.address, WeightTarget(random_model(QWEN2, 1)))
    refused("trains in", pull.pull, 2)
    pull.close()
    served = packed(random_model(QWEN2, 1))
    keep_decoded(served, dtype=torch.float32)
    pull = WeightPull(trained.address, WeightTarget(served))
    values, _, _ = pull.pull(2)  # the trained grid where there is one, rounding elsewhere
    layer = dict(trained.hook._layers)["blocks.0.mlp.up.weight"]
    for part, t in layer.encode(torch.float32).items():
        assert torch.equal(values["blocks.0.mlp.up.weight"][part], t)
    pull.close()
    trained.hook.server.close()


def test_a_run_that_goes_back_publishes_what_it_goes_on_from(publishing: Publishing) -> None:
    pull = WeightPull(publishing.address, WeightTarget(random_model(QWEN2, 1)))
    hook, run = publishing.hook, publishing.run
    publishing.train(4)
    discarded = pull.newest()
    assert discarded is not None and discarded.place == (0, 4)
    wrong = pull.pull(4)[1]
    hook.before_step(run)  # not gone back: nothing is published
    assert pull.newest(other_than=discarded) == discarded
    run.step = 3
    with torch.no_grad():
        for p in run.model.parameters():
            p.mul_(0.5)
    hook.before_step(run)
    hook.wait()
    found = pull.newest(other_than=discarded, seconds=60.0)
    assert found is not None and found.place == (1, 3) > discarded.place
    values, _, _ = pull.pull(3)
    assert all(torch.equal(values[n][""], p) for n, p in run.model.named_parameters())
    publishing.train(1)  # to step 4 again, which a follower that has seen the other step 4 alone is told of
    again = pull.newest(other_than=discarded, seconds=60.0)
    assert again is not None and again.place == (1, 4)
    assert not hook.server.wait_until_pulled(0.0)  # although this follower has once pulled a step 4
    assert pull.pull(4)[1].digest != wrong.digest
    assert hook.server.wait_until_pulled(600.0)
    hook.before_step(run)
    assert pull.newest() == again
    pull.close()


def test_the_last_step_is_published_also_where_the_one_before_is_still_read(
    publishing: Publishing, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, digest = threading.Event(), WeightsSnapshot.make_digest
    monkeypatch.setattr(WeightsSnapshot, "make_digest", lambda self: go_on.wait(60) and digest(self))
    hook, run = publishing.hook, publishing.run
    hook.last = 5
    for run.step in (2, 4):  # 4 is left out
        hook.after_step(run)
    threading.Timer(0.3, go_on.set).start()
    run.step = 5
    hook.after_step(run)
    hook.wait()
    pull = WeightPull(publishing.address, WeightTarget(random_model(QWEN2, 1)))
    found = pull.newest()
    pull.close()
    assert found is not None and found.step == 5
    assert [row["step"] for row in run.log.history] == [2, 5]


def test_what_cannot_follow_is_one_line(
    publishing: Publishing, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Shards that end inside a block of a Format, another dtype or protocol, and an address that nobody serves."""
    target = WeightTarget(packed(random_model(QWEN2)))
    wanted = target.wanted
    name = "blocks.0.mlp.down.weight"
    tensors = {n: (w.shape, torch.float32, MeshLayout((1,), (REPLICATE,))) for n, w in wanted.items()}
    cut = Catalogue("run", {**tensors, name: (wanted[name].shape, torch.float32, MeshLayout((3,), (shard(1),)))})
    refused(
        r"'blocks\.0\.mlp\.down\.weight' is served as .* cut along dim 1 at multiples of", pieces_by_rank, cut, wanted
    )
    codes = Catalogue("run", {**tensors, "norm.weight": (wanted["norm.weight"].shape, torch.int32, tensors[name][2])})
    refused(r"'norm\.weight' is torch\.int32 at the publisher", check_catalogue, codes, wanted)
    monkeypatch.setattr(exchange, "PROTOCOL", 2)  # both sides are here, so the greeting of the publisher is changed
    monkeypatch.setattr(exchange.SnapshotServer, "_serve", lambda self, channel: channel.send({"protocol": 1}))
    refused("another version of the protocol", WeightPull, publishing.address, WeightTarget(random_model(QWEN2)))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = unused.getsockname()
    caplog.set_level("INFO", logger="shoestring.serve")
    follower = WeightFollower(address, target, None)  # type: ignore[arg-type]
    follower.start()
    end = time.monotonic() + 30
    while "no publisher at 127.0.0.1" not in caplog.text and time.monotonic() < end:
        time.sleep(0.01)
    follower.stop()
    assert caplog.text.count("no publisher at 127.0.0.1") == 1 and follower.version is None
