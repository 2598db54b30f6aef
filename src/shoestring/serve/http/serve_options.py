"""The settings of a server, checked before a model is loaded."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shoestring.errors import UserError
from shoestring.serve.engine.embedding import POOLINGS
from shoestring.serve.http.tool_calls import FORMAT_NAMES
from shoestring.serve_settings import ServeAddress, ServeSettings
from shoestring.state.reshard.exchange import check_key, parse_address

MOST_S = 365 * 86400.0  # timers take no infinite time
MOST_MB = 1e6  # of a body: more than any memory
ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+")


@dataclass(frozen=True)
class ServeOptions(ServeSettings, ServeAddress):
    chunk: int = 512  # rows per step
    num_blocks: int | None = None  # key/value memory in blocks of 16 positions; default: grows with need
    drafter: str | None = None  # 'ngram', the path of a draft model, or several joined by '+'
    int8_activations: bool = False  # on a CPU: int layers round their inputs to 8 bits

    def __post_init__(self) -> None:
        at_most = f"and at most {MOST_S:.0f} (a year)"
        for name, good, allowed in (
            (
                "host",
                self.host.strip() != "",  # to a socket, no name means every address
                "an address or name of this machine, such as 127.0.0.1, ::1 or localhost, or 0.0.0.0 for all",
            ),
            ("port", 0 <= self.port < 65536, "0 to 65535"),
            ("max_requests", self.max_requests is None or self.max_requests >= 1, "1 or more"),
            ("max_queue", self.max_queue is None or self.max_queue >= 0, "0 or more"),
            ("deadline_s", 0 < self.deadline_s <= MOST_S, f"more than 0 {at_most}"),
            ("drain_s", 0 <= self.drain_s <= MOST_S, f"0 or more {at_most}"),
            ("rank_timeout_s", 1 <= self.rank_timeout_s <= MOST_S, f"1 or more {at_most}"),
            ("max_body_mb", 0 < self.max_body_mb <= MOST_MB, f"more than 0, at most {MOST_MB:g}"),
            ("max_connections", self.max_connections >= 1, "1 or more"),
            ("header_timeout_s", 0 < self.header_timeout_s <= MOST_S, f"more than 0 {at_most}"),
            ("body_timeout_s", 0 < self.body_timeout_s <= MOST_S, f"more than 0 {at_most}"),
            ("read_timeout_s", 0 < self.read_timeout_s <= MOST_S, f"more than 0 {at_most}"),
            (
                "allow_hosts",
                not any("/" in name or not name.strip() for name in self.allow_hosts),
                "names such as llm.example.org, without http:// and path, or '*' for any",
            ),
            (
                "allow_origins",
                all(ORIGIN.fullmatch(site) for site in self.allow_origins),  # as browsers send it, or it never matches
                "sites such as https://app.example.org, without a path or / at the end, or '*' for any",
            ),
            ("tool_format", self.tool_format in ("auto", *FORMAT_NAMES), "auto, " + ", ".join(FORMAT_NAMES)),
            ("pooling", self.pooling in ("auto", *POOLINGS), "auto, " + ", ".join(POOLINGS)),
            ("on_update", self.on_update in ("drain", "recompute"), "drain or recompute"),
            ("update_wait_s", 0 <= self.update_wait_s <= MOST_S, f"0 or more {at_most}"),
            ("metrics_prefix", self.metrics_prefix.isidentifier(), "a name of letters, digits and _"),
        ):
            if not good:
                raise UserError(f"{name}={getattr(self, name)!r} is not allowed; give {allowed}")
        for address in (self.follow, self.follow_drafter):
            if address is not None and parse_address(address)[1] == 0:
                raise UserError(f"nobody publishes at port 0 ({address}); give the HOST:PORT of a training run")
            if address is not None:
                check_key(parse_address(address), self.insecure, "--insecure")
        if self.follow_drafter is not None and self.drafter is None:
            raise UserError("--follow-drafter needs a draft model to update; give --drafter its folder")
        keys = self.api_keys if self.admin_key is None else (*self.api_keys, self.admin_key)
        if any(not key.isascii() or not key.strip() for key in keys):
            raise UserError("an API key is empty or not ASCII; a header could not carry it")
        if (self.admin_key is None) != (self.adapter_folder is None):
            raise UserError("--admin-key and --adapter-folder belong together: give both or neither")
        if self.adapter_folder is not None and not self.adapter_folder.is_dir():
            raise UserError(f"--adapter-folder {self.adapter_folder} is no folder")
        _ = self.adapter_places

    @property
    def adapter_places(self) -> dict[str, str]:
        """The adapters to serve from the beginning: names and folders."""
        places: dict[str, str] = {}
        for given in self.adapters:
            name, equals, place = given.partition("=")
            if not (name and equals and place):
                raise UserError(f"--adapter {given} is not NAME=DIR; give a name, =, and the folder of an adapter")
            if name in places:
                raise UserError(f"--adapter {name} is given twice; give each adapter a name of its own")
            places[name] = place
        return places
