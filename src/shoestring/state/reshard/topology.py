"""Topology: on which host every rank runs, and how fast the links are.

Ranks of one host share a fast domain (NVLink, shared memory). Between hosts there are network interfaces: one per
host, or one per rank. An interface sends and receives at the same time, each at its full rate.

    {"ranks_per_host": 8, "nic": "rank", "nic_gbit_s": 400, "fast_gbit_s": 3600}
    {"hosts": {"a": [0, 1], "b": [2, 3]}, "nic_gbit_s": 0.2, "host_gbit_s": {"b": 0.1}}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shoestring.errors import UserError, shown, suggest
from shoestring.json_files import Fields, read_object

GBIT = 1e9 / 8  # bytes per second
LEAST_GBIT, MOST_GBIT = 1e-6, 1e9
_KEYS = ("ranks_per_host", "hosts", "nic", "nic_gbit_s", "host_gbit_s", "fast_gbit_s", "chunk_bytes", "hop_s")


@dataclass(frozen=True)
class Topology:
    """`hosts` names the host of some ranks; any other rank r is on host r // ranks_per_host. `host_rates`: interfaces
    with a rate of their own. A chain forwards chunks of `chunk_bytes` (0: infinitely small) and every transfer between
    hosts costs `hop_s` per hop besides."""

    ranks_per_host: int = 8
    hosts: Mapping[int, str] = field(default_factory=dict)
    nic: Literal["host", "rank"] = "host"
    nic_rate: float = 100 * GBIT
    host_rates: Mapping[str, float] = field(default_factory=dict)
    fast_rate: float = 2400 * GBIT
    chunk_bytes: int = 0
    hop_s: float = 0.0

    def host(self, rank: int) -> str:
        return self.hosts.get(rank) or f"host{rank // self.ranks_per_host}"

    def interface(self, rank: int) -> str:
        """The name of the interface that a rank sends and receives through."""
        return self.host(rank) if self.nic == "host" else f"{self.host(rank)}/{rank}"

    def rate(self, rank: int) -> float:
        return self.host_rates.get(self.host(rank), self.nic_rate)

    def to_json(self) -> dict[str, Any]:
        named: dict[str, list[int]] = {}
        for rank, host in self.hosts.items():
            named.setdefault(host, []).append(rank)
        return {
            "ranks_per_host": self.ranks_per_host,
            "hosts": named,
            "nic": self.nic,
            "nic_gbit_s": self.nic_rate / GBIT,
            "host_gbit_s": {host: rate / GBIT for host, rate in self.host_rates.items()},
            "fast_gbit_s": self.fast_rate / GBIT,
            "chunk_bytes": self.chunk_bytes,
            "hop_s": self.hop_s,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any], where: str = "the topology") -> Topology:
        for key in data:
            if key not in _KEYS:
                raise UserError(
                    f"{where}: unknown key {shown(key)}; known are {', '.join(_KEYS)}." + suggest(key, list(_KEYS))
                )
        fields = Fields(data, where)
        nic = fields.text("nic", "host")
        if nic not in ("host", "rank"):
            raise UserError(f"{where}: nic is {shown(nic)}; give host (one interface per host) or rank (one per rank)")
        rates = Fields(fields.object("host_gbit_s", {}), f"{where}: host_gbit_s")
        return Topology(
            fields.whole("ranks_per_host", 8),
            _hosts(fields.object("hosts", {}), where),
            nic,
            fields.number("nic_gbit_s", 100.0, least=LEAST_GBIT, most=MOST_GBIT) * GBIT,
            {host: rates.number(host, least=LEAST_GBIT, most=MOST_GBIT) * GBIT for host in rates.values},
            fields.number("fast_gbit_s", 2400.0, least=LEAST_GBIT, most=MOST_GBIT) * GBIT,
            fields.whole("chunk_bytes", 0, least=0),
            fields.number("hop_s", 0.0, least=0, most=3600),
        )


def read_topology(path: str | Path) -> Topology:
    return Topology.from_json(read_object(Path(path), remedy="the page on resharding lists its keys"), str(path))


def _hosts(data: Mapping[str, Any], where: str) -> dict[int, str]:
    hosts: dict[int, str] = {}
    for host, ranks in data.items():
        if not host or not isinstance(ranks, list):
            raise UserError(f"{where}: hosts must be an object of host: [ranks], not {shown(ranks)} for {shown(host)}")
        for rank in ranks:
            if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < 1 << 31:
                raise UserError(
                    f"{where}: {shown(rank)} of host {shown(host)} is not a rank; give whole numbers from 0"
                )
            if rank in hosts:
                raise UserError(f"{where}: rank {rank} is on {shown(hosts[rank])} and on {shown(host)}; list it once")
            hosts[rank] = host
    return hosts
