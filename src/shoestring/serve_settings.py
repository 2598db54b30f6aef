"""What a server can be told, with help texts: the options of `shoestring serve` and the settings of its ServeOptions.

Apart from the server, because the command line reads them before it imports anything large.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shoestring.config import option


@dataclass(frozen=True)
class ServeAddress:
    host: str = option("127.0.0.1", "The address to listen on; 0.0.0.0 listens on all.")
    port: int = option(8000, "The port to listen on; 0 takes a free one.")
    model_name: str | None = option(None, "What clients call the model.")
    api_keys: tuple[str, ...] = option((), "A key clients must send; may be repeated.", envvar="SHOESTRING_API_KEY")


@dataclass(frozen=True)
class ServeSettings:
    max_requests: int | None = option(
        None, "Requests computed at the same time; default: from memory and measured steps."
    )
    max_queue: int | None = option(
        None, "Requests that may wait; more are refused. Default: twice max-requests, at least 64."
    )
    max_context: int | None = option(None, "The most tokens of one request, prompt and new ones together.")
    deadline_s: float = option(600.0, "Seconds after which a request is ended.")
    drain_s: float = option(30.0, "Seconds to finish running requests after SIGTERM.")
    rank_timeout_s: float = option(20.0, "Under torchrun: a process that is silent for this many seconds has failed.")
    max_body_mb: float = option(4.0, "The largest request body in MB.")
    max_connections: int = option(512, "Open connections; idle ones make room for new ones.")
    header_timeout_s: float = option(10.0, "Seconds a client has to send a request's header.")
    body_timeout_s: float = option(60.0, "Seconds a client has to send a request's body.")
    read_timeout_s: float = option(60.0, "Seconds after which a client that reads nothing is disconnected.")
    allow_hosts: tuple[str, ...] = option(
        (), "A further host name of this server, besides localhost and addresses; only checked without API keys."
    )
    allow_origins: tuple[str, ...] = option((), "A web site whose pages may call the server (CORS); may be repeated.")
    chat_template: Path | None = option(None, "A Jinja file to use instead of the model's chat template.")
    tool_format: str = option(
        "auto", "How the model writes tool calls: auto (from its template), hermes, llama3 or mistral."
    )
    pooling: str = option(
        "auto", "Pooling of embeddings: mean, last or cls (encoders only); auto reads the folder, else mean."
    )
    adapters: tuple[str, ...] = option(
        (),
        "An adapter (a folder in PEFT's layout) that requests choose by this name as their model; may be repeated.",
        metavar="NAME=DIR",
    )
    admin_key: str | None = option(
        None,
        "A key for POST /v1/load_lora_adapter and /v1/unload_lora_adapter; without it these paths do not exist.",
        envvar="SHOESTRING_ADMIN_KEY",
    )
    adapter_folder: Path | None = option(None, "With --admin-key: adapters are loaded from below this folder only.")
    metrics_prefix: str = option("shoestring", "Prefix of the metrics' names.")
    follow: str | None = option(
        None, "Take new weights from the training run that publishes them there.", metavar="HOST:PORT"
    )
    on_update: Literal["drain", "recompute"] = option(
        "drain", "drain: running requests finish with the old weights; recompute: they continue with the new ones."
    )
    update_wait_s: float = option(30.0, "Seconds that drain waits for running requests.")
    follow_drafter: str | None = option(None, "The same for the draft model of --drafter.", metavar="HOST:PORT")
    follow_older: bool = option(False, "Also accept an older step.")
    follow_hosts: tuple[str, ...] = option(
        (), "Address of another machine with ranks of the run that is followed; may be repeated."
    )
    insecure: bool = option(False, "Follow over a network without SHOESTRING_PUBLISH_KEY.")
