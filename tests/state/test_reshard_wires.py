"""Four hosts as network namespaces with links of 200 Mbit/s: a planned reshard against its bound and a naive one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks_wires import HOSTS

SCRIPT = Path(__file__).with_name("ranks_wires.py")
REPO = SCRIPT.parents[2]  # for experiments/
RATE = 187e6 / 8  # bytes per second that a link of 200 Mbit/s really gives
pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("tc") is None, reason="needs root, ip and tc"),
]


def sh(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


class Wires:
    """A bridge with a namespace and a shaped link per host."""

    def __init__(self) -> None:
        self.tag = f"rw{os.getpid() % 10000}"
        self.bridge = f"{self.tag}br"
        self.hosts = sorted(set(HOSTS.values()))
        sh("ip", "link", "add", self.bridge, "type", "bridge")
        sh("ip", "link", "set", self.bridge, "up")
        for i, host in enumerate(self.hosts):
            space, outer = self.space(host), self.link(host)
            sh("ip", "netns", "add", space)
            sh("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
            sh("ip", "link", "set", outer, "master", self.bridge)
            sh("ip", "link", "set", outer, "up")
            for command in (
                f"ip addr add 10.77.{os.getpid() % 200}.{i + 1}/24 dev eth0",
                "ip link set eth0 up",
                "ip link set lo up",
                "tc qdisc add dev eth0 root tbf rate 200mbit burst 128k latency 100ms",  # what the host sends
            ):
                sh("ip", "netns", "exec", space, *command.split())
            sh(
                "tc",
                "qdisc",
                "add",
                "dev",
                outer,
                "root",
                "tbf",
                "rate",
                "200mbit",
                "burst",
                "128k",
                "latency",
                "100ms",
            )

    def space(self, host: str) -> str:
        return f"{self.tag}{host}"

    def link(self, host: str) -> str:
        return f"{self.tag}{host}v"

    def pull(self, host: str) -> None:
        sh("ip", "link", "set", self.link(host), "down")

    def start(self, *args: str) -> list[subprocess.Popen[str]]:
        port, ranks = "29777", []
        for rank, host in HOSTS.items():
            env = {
                **os.environ, "RANK": str(rank), "WORLD_SIZE": str(len(HOSTS)), "MASTER_PORT": port,
                "PYTHONPATH": str(REPO),
                "MASTER_ADDR": f"10.77.{os.getpid() % 200}.1", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            command = ["ip", "netns", "exec", self.space(host), sys.executable, str(SCRIPT), *args]
            ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
        return ranks

    def close(self) -> None:
        for host in self.hosts:
            subprocess.run(["ip", "netns", "del", self.space(host)], capture_output=True)
            subprocess.run(["ip", "link", "del", self.link(host)], capture_output=True)
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True)


@pytest.fixture
def wires() -> Iterator[Wires]:
    made = None
    try:
        made = Wires()
        yield made
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made here: {error.stderr!r}")
    finally:
        if made is not None:
            made.close()


def test_planned_against_bound_and_naive(wires: Wires) -> None:
    megabytes = 24.0
    ranks = wires.start("time", str(megabytes))
    outs = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), outs
    line = next(text for text in outs[0].splitlines() if text.startswith("RESULT"))
    planned, naive, planned_bytes, naive_bytes = (float(x) for x in line.split()[1:])
    bound = megabytes * 1e6 / RATE
    print(f"planned {planned:.2f} s, bound {bound:.2f} s, naive {naive:.2f} s")
    assert naive_bytes == 2 * planned_bytes  # between hosts; out of the first one, 6 times
    assert planned <= 1.5 * bound
    assert naive >= 3 * planned


def test_a_pulled_link_is_an_error_and_nobody_hangs(wires: Wires) -> None:
    ranks = wires.start("pulled", "60")
    assert ranks[0].stdout is not None
    assert ranks[0].stdout.readline().startswith("MOVING")
    time.sleep(1.0)
    wires.pull("h2")
    began = time.monotonic()
    outs = [rank.communicate(timeout=180)[0] for rank in ranks]
    assert time.monotonic() - began < 120
    assert not any("ARRIVED" in out for out in outs) and any("FAILED" in out for out in outs)
