"""Nothing that comes over HTTP makes the server fail, hang, or stop its other clients.

A few hundred cases run always; `-m lab` runs thousands and every attack, and saves what it counted and measured to
results/fuzz.jsonl.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")
from http_attacks import ATTACKS  # noqa: E402
from http_cases import (  # noqa: E402
    LOAD,
    BodyCase,
    ConnectionCase,
    adapter_cases,
    body_cases,
    connection_cases,
    outcome_of_connection,
    outcome_of_response,
    schema_cases,
    tool_cases,
)
from http_harness import Bystanders, attack, memory_gb, receive_all, served  # noqa: E402
from outcomes import SEED, Tally  # noqa: E402
from serving import nothing_is_left, running, wait_for  # noqa: E402

from benchmarks.results import record  # noqa: E402
from tiny import TOOL_CHAT_TEMPLATE, chat_tokenizer, make_adapter, served_model  # noqa: E402

LIMITS = {"max_requests": 4, "max_queue": 4, "max_context": 48, "max_body_mb": 1}
# What a well-behaved client may feel while others attack, and what the server may use above its memory at the start.
# They hold on a machine with little other work.
GAP_S, FIRST_S, MEMORY_GB = 1.0, 2.0, 2.0
GAPS_S = {"tokenize flood": 0.5}


@pytest.fixture(scope="module")
def service() -> Iterator[Any]:
    with running(TOOL_CHAT_TEMPLATE, header_timeout_s=0.3, body_timeout_s=0.3, **LIMITS) as started:
        yield started


@pytest.fixture
def place(service: Any) -> tuple[str, int]:
    url = httpx.URL(service.url)
    return url.host, url.port


def send_bodies(place: tuple[str, int], kind: str, cases: Iterable[BodyCase], key: str = "none") -> Tally:
    tally = Tally(kind)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=f"http://{place[0]}:{place[1]}", timeout=30) as client:
        for case in cases:
            try:
                answer = client.post(case.path, content=case.content, headers=headers)
            except httpx.TimeoutException as error:
                tally.add("hang", case.name, repr(error))
            except httpx.TransportError as error:
                tally.add("abort", case.name, repr(error))
            else:
                outcome, told = outcome_of_response(answer.status_code, dict(answer.headers), answer.content)
                tally.add(outcome, f"{case.name}: {case.content[:200]!r}", told)
    return tally


def send_connections(place: tuple[str, int], kind: str, cases: Iterable[ConnectionCase], at_once: int = 16) -> Tally:
    tally = Tally(kind)
    with ThreadPoolExecutor(at_once) as pool:
        asked = [(case, pool.submit(receive_all, *place, case.parts, case.leaves)) for case in cases]
        for case, found in asked:
            received = found.result()
            outcome, told = ("hang", "") if received is None else outcome_of_connection(received)
            tally.add(outcome, case.name, told)
    return tally


def is_well(place: tuple[str, int]) -> bool:
    return bool(httpx.get(f"http://{place[0]}:{place[1]}/health", timeout=30).json() == {"status": "ok"})


def test_bodies(service: Any, place: tuple[str, int]) -> None:
    tally = send_bodies(place, "http bodies", body_cases(seed=1, num=140))
    tally.check()
    assert tally.counts["ok"] > 20 and tally.counts["clean"] > 60  # neither kind is missing
    assert is_well(place)
    wait_for(lambda: nothing_is_left(service))


def test_adapters(tmp_path: Path) -> None:
    """What an administrator may send, and requests to adapters that come and go; then a good one is loaded."""
    make_adapter(tmp_path / "below" / "a", served_model(chat_tokenizer().vocab_size))
    make_adapter(tmp_path / "outside", served_model(chat_tokenizer().vocab_size))
    (tmp_path / "below" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "below" / "broken").mkdir()
    (tmp_path / "below" / "broken" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with running(admin_key="key", adapter_folder=tmp_path / "below", **LIMITS) as service:
        url = httpx.URL(service.url)
        here = url.host, url.port
        tally = send_bodies(here, "http adapters", adapter_cases(seed=1, num=160), "key")
        tally.check()
        assert tally.counts["ok"] > 4 and tally.counts["clean"] > 60
        ask = {"headers": {"Authorization": "Bearer key"}, "timeout": 30}
        loaded = httpx.post(f"{service.url}{LOAD}", json={"lora_name": "last", "lora_path": "a"}, **ask)
        assert loaded.status_code == 200
        names = [card["id"] for card in httpx.get(f"{service.url}/v1/models").json()["data"]]
        assert names[0] == "tiny" and names[-1] == "last" and len(names) == len({*names})
        assert is_well(here)


def test_schemas(service: Any, place: tuple[str, int]) -> None:
    tally = send_bodies(place, "http schemas", schema_cases(seed=1, num=44))
    tally.check()
    assert tally.counts["ok"] > 4 and tally.counts["clean"] > 4
    assert is_well(place)
    wait_for(lambda: nothing_is_left(service))


def test_tools(service: Any, place: tuple[str, int]) -> None:
    tally = send_bodies(place, "http tools", tool_cases(seed=1, num=48))
    tally.check()
    assert tally.counts["ok"] > 4 and tally.counts["clean"] > 4
    assert is_well(place)
    wait_for(lambda: nothing_is_left(service))


def test_connections(service: Any, place: tuple[str, int], caplog: pytest.LogCaptureFixture) -> None:
    tally = send_connections(place, "http connections", connection_cases(seed=1, num=110))
    tally.check()
    assert tally.counts["ok"] > 10 and tally.counts["clean"] > 20
    assert is_well(place) and "Traceback" not in caplog.text and "Fatal" not in caplog.text


@pytest.mark.parametrize(
    "name", ["tokenize flood", "64 long prompts each", "a key of 3 MB", "headers a line at a time"]
)
def test_others_are_served_during_an_attack(service: Any, place: tuple[str, int], name: str) -> None:
    """The seconds are for a machine that is busy with other work; the targets are those of the campaign."""
    bystanders = Bystanders(*place)
    with bystanders.watching():
        told = attack(*place, name, 1.5)
    assert told and not {status for status in told if status.startswith("5") and status != "503"}, told
    assert not bystanders.failures and bystanders.gaps and bystanders.first_tokens
    assert max(bystanders.gaps) < 10 and max(bystanders.first_tokens) < 10


def test_cases_are_functions_of_their_seed() -> None:
    makers: tuple[Callable[..., Iterator[Any]], ...] = (
        *(body_cases, adapter_cases, schema_cases, tool_cases, connection_cases),
    )
    for make in makers:
        assert list(make(7, 60)) == list(make(7, 60)) != list(make(8, 60))


# -- campaigns -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """A server process whose texts and connections soon end; at its end, nothing in its log is a defect."""
    folder = tmp_path_factory.mktemp("server")
    with served(folder, "--header-timeout", "2", "--body-timeout", "2", "--max-context", "128") as place:
        yield place
        assert is_well(place)
    told = (folder / "log").read_text()
    assert "Traceback" not in told, told[told.index("Traceback") - 500 :][:3000]


@pytest.mark.lab
@pytest.mark.parametrize(
    ("kind", "num"), [("http bodies", 2400), ("http schemas", 600), ("http tools", 400), ("http connections", 1200)]
)
def test_campaign_of_cases(process: tuple[str, int], kind: str, num: int) -> None:
    if kind == "http connections":
        tally = send_connections(process, kind, connection_cases(seed=SEED, num=num), at_once=32)
    else:
        make = {"http bodies": body_cases, "http schemas": schema_cases, "http tools": tool_cases}[kind]
        tally = send_bodies(process, kind, make(seed=SEED, num=num))
    tally.save()
    tally.check()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """A server process as a user starts it."""
    with served(tmp_path) as place:
        yield place
    told = (tmp_path / "log").read_text()
    assert "Traceback" not in told, told[told.index("Traceback") - 500 :][:3000]


@pytest.mark.lab
def test_campaign_of_attacks(server: tuple[str, int], tmp_path: Path) -> None:
    """Each attack for some seconds, from another address than the well-behaved clients'."""
    whole = Tally("http attacks")
    late = []
    at_start = memory_gb(tmp_path, "VmRSS")
    for name in (None, *ATTACKS):
        bystanders = Bystanders(*server)
        load = os.getloadavg()[0]
        with bystanders.watching():
            time.sleep(0.5)
            told = {} if name is None else attack(*server, name, 5)
            time.sleep(5 if name is None else 0)
        gap, first = max(bystanders.gaps, default=99.0), max(bystanders.first_tokens, default=99.0)
        for status, num in told.items():
            bad = status.startswith("5") and status != "503"
            for _ in range(num):
                whole.add("traceback" if bad else "ok" if status.startswith("2") else "clean", f"{name}: {status}")
        for failure in bystanders.failures:
            whole.add("hang", f"a bystander of {name}", failure)
        whole.largest_gap_s = max(whole.largest_gap_s, gap)
        case = f"http attack: {name or 'none'}"
        for metric, value in (("largest_gap_s", gap), ("first_token_s", first)):
            record(
                **{"bench": "fuzz", "case": case, "metric": metric, "unit": "s", "samples": [value]},
                config={"seed": 0},
                quality={"load_average": round(load, 1)},
            )
        if gap > GAPS_S.get(name or "", GAP_S) or first > FIRST_S:
            late.append(f"{name}: largest gap {gap:.2f} s, first token {first:.2f} s; load average {load:.1f}")
    above = memory_gb(tmp_path, "VmHWM") - at_start
    record(
        **{"bench": "fuzz", "case": whole.kind, "metric": "memory_above_start_gb", "unit": "GB", "samples": [above]},
        config={"seed": 0},
    )
    whole.save(seed=0)
    whole.check()
    assert not late, "\n".join(late)
    assert above < MEMORY_GB, f"{above:.2f} GB above the {at_start:.2f} GB at the start"


def test_the_campaign_writes_where_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.results.RESULTS", tmp_path)
    tally = Tally("http bodies")
    tally.add("clean", "a case")
    tally.save(seed=1)
    assert (tmp_path / "fuzz.jsonl").read_text().count('"http bodies"') == 7
