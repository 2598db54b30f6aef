"""Arrival plans, and what a load on a real server reports about it."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("httpx")
import httpx
from serving import running

from benchmarks import results, serve, soak
from shoestring.cli.app import run_cli
from shoestring.errors import UserError
from shoestring.evals.server_load import (
    Planned,
    Sent,
    Slo,
    Target,
    bodies_for,
    fit,
    from_trace,
    look_at,
    percentiles,
    poisson,
    read_stream,
    send_all,
    summarize,
    summary_line,
)


def test_no_server_is_started_for_nothing(command: Callable[..., str]) -> None:
    assert "more --seconds" in command("bench", "serve", "nowhere", "--rate", "1e-9", "--seconds", "0.1", fails=True)
    assert "slo_tpot=-1.0" in command("bench", "serve", "nowhere", "--slo-tpot", "-1", fails=True)
    assert "slo_ttft=nan" in command("bench", "serve", "nowhere", "--slo-ttft", "nan", fails=True)


@pytest.mark.parametrize("rate, seconds", [(0, 1), (-1, 1), (math.nan, 1), (math.inf, 1), (1, math.inf), (1, 0)])
def test_rates_and_times_that_make_no_plan(rate: float, seconds: float, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="give a number above 0"):
        poisson(rate, seconds, num_prompt=1, num_new=1)
    with pytest.raises(UserError, match="give a number above 0"):
        from_trace(tmp_path / "not-read.csv", seconds, rate=rate)


def test_poisson_arrivals_have_the_rate_and_the_spread() -> None:
    plan = poisson(50.0, 200.0, num_prompt=3, num_new=4, seed=1)
    gaps = [b.at - a.at for a, b in itertools.pairwise(plan)]
    assert abs(len(plan) / 200 - 50) < 2
    # Exponential gaps: the standard deviation is the mean.
    assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.1)
    assert poisson(50.0, 200.0, num_prompt=3, num_new=4, seed=1) == plan
    assert poisson(50.0, 200.0, num_prompt=3, num_new=4, seed=2) != plan


def test_a_trace_keeps_its_rhythm_at_any_speed(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.6805900,396,109\n2023-11-16 18:15:54.6805901,879,55\n"
    )
    plan = from_trace(path, 60.0)
    assert [(p.num_prompt, p.num_new) for p in plan] == [(374, 44), (396, 109), (879, 55)]
    assert [p.at for p in plan] == pytest.approx([0, 4, 8], abs=1e-5)
    twice = from_trace(path, 60.0, rate=2 * 3 / 8)
    assert [p.at for p in twice] == pytest.approx([0, 2, 4], abs=1e-5)
    assert len(from_trace(path, 5.0)) == 2
    path.write_text("TIMESTAMP,ContextTokens\n1,2\n")
    with pytest.raises(UserError, match="no column GeneratedTokens"):
        from_trace(path, 60.0)
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n1,many,2\n")
    with pytest.raises(UserError, match="line 2"):
        from_trace(path, 60.0)
    with pytest.raises(UserError, match="cannot read"):
        from_trace(tmp_path / "none.csv", 60.0)


@given(st.integers(2, 5000), st.integers(1, 9000), st.integers(1, 9000))
def test_what_is_sent_fits_the_context(context: int, num_prompt: int, num_new: int) -> None:
    [ask], shortened = fit([Planned(0.0, num_prompt, num_new)], context)
    assert 1 <= ask.num_prompt <= num_prompt and 1 <= ask.num_new <= num_new
    assert ask.num_prompt + ask.num_new <= context
    assert shortened == (ask != Planned(0.0, num_prompt, num_new))


def test_goodput_counts_only_whole_answers_that_kept_both_promises() -> None:
    def sent(ttft: float, tpot: float, status: int = 200, error: str = "") -> Sent:
        pieces = [1 + ttft + tpot * i for i in range(11)]
        return Sent(Planned(1.0, 5, 11), 1.0, pieces, 10.0, 11, "x", status, error)

    slo = Slo(ttft_s=0.5, tpot_s=0.05)
    all_sent = [
        sent(0.1, 0.01), sent(0.9, 0.01), sent(0.1, 0.09), sent(0.1, 0.01, error="broke off"), sent(0.1, 0.01, 429),
    ]  # fmt: skip
    s = summarize(all_sent, slo)
    assert (s.num_whole, s.num_refused, s.num_failed) == (3, 1, 1)
    assert s.goodput == pytest.approx(1 / 10) and s.tokens_per_s == pytest.approx(3.3)
    assert s.ttft == pytest.approx((0.1, 0.9, 0.9))
    assert percentiles(list(range(101))) == (50, 90, 99)
    with pytest.raises(UserError, match="no request"):
        summarize([], slo)


def test_prompts_are_token_ids_or_text_of_about_as_many_tokens() -> None:
    plan, pool = [Planned(0.0, n, 3) for n in (1, 7, 40)], tuple(range(25))
    ids = bodies_for(plan, Target("", "m", 64, pool))
    assert [len(body["prompt"]) for body in ids] == [1, 7, 40] and all(body["ignore_eos"] for body in ids)
    texts = bodies_for(plan, Target("", "m", 64, pool, decode=lambda ids: " ".join(map(str, ids))))
    for body, ask in zip(texts, plan, strict=True):
        numbers = [int(n) for n in body["prompt"].split()[1:]]
        assert len(numbers) == max(1, ask.num_prompt - 4) and body["max_tokens"] == 3
        assert all((b - a) % len(pool) == 1 for a, b in itertools.pairwise(numbers)), (
            "in one piece, from the front again"
        )
        assert "ignore_eos" not in body, "a server that takes text only may refuse it"


@pytest.mark.parametrize("decode", [None, lambda ids: " ".join(map(str, ids))], ids=["ids", "text"])
def test_prompts_share_no_beginning(decode: Callable[[Any], str] | None) -> None:
    """Neither within a plan nor between plans of two seeds, which are sent to one server."""
    plan = [Planned(0.0, 40, 1)] * 200
    target = Target("", "m", 64, tuple(range(1000)), decode)
    begins = [tuple(b["prompt"][:6]) for seed in (0, 1) for b in bodies_for(plan, target, seed)]
    assert len(set(begins)) == len(begins)


@pytest.mark.parametrize(
    "lines, whole",
    [
        (['{"choices": [{"text": "a"}]}', "[DONE]"], True),
        (['{"choices": [{"text": "a"}]}'], False),
        (['{"choices": [{"text": "a", "finish_reason": "stop"}]}'], False),
        (['{"choices": [{"text": "a", "finish_reason": "stop"}], "usage": {"completion_tokens": 1}}'], True),
    ],
)
def test_an_answer_is_whole_when_its_end_was_said(lines: list[str], whole: bool) -> None:
    stream = "".join(f"data: {line}\n\n" for line in lines)

    async def ask() -> Sent:
        answers = httpx.MockTransport(lambda request: httpx.Response(200, text=stream))
        sent = Sent(Planned(0.0, 1, 1))
        async with httpx.AsyncClient(transport=answers) as client:
            await read_stream(client, "http://server", {}, sent, lambda: 0.0)
        return sent

    sent = asyncio.run(ask())
    assert sent.whole == whole and ("broke off" in sent.error) != whole
    assert len(sent.pieces) == 1


def test_a_real_server_under_load() -> None:
    """Every answer has its planned length, times are in order, and a full queue shows as refusals."""
    plan = [Planned(0.02 * i, 5 + i, 6 + i) for i in range(10)]
    with running(max_requests=4, max_queue=20) as service:
        url: str = service.url  # type: ignore[attr-defined]
        target = look_at(url)
        assert target.model == "tiny" and target.max_context == 4096
        bodies = bodies_for(plan, target)
        assert [len(b["prompt"]) for b in bodies] == [p.num_prompt for p in plan]
        sent = asyncio.run(send_all(url, plan, bodies))
        for planned, one in zip(plan, sent, strict=True):
            assert one.whole, one.error
            assert one.num_tokens == planned.num_new
            assert planned.at <= one.began <= one.pieces[0] <= one.pieces[-1] <= one.ended
    with running(max_requests=1, max_queue=0) as service:
        url = service.url  # type: ignore[attr-defined]
        burst = [Planned(0.0, 8, 200)] * 6
        sent = asyncio.run(send_all(url, burst, bodies_for(burst, target)))
        summary = summarize(sent, Slo())
        assert summary.num_refused >= 1 and summary.num_failed == 0
        assert summary.num_whole + summary.num_refused == 6
    dead = asyncio.run(send_all(url, plan[:1], bodies[:1]))
    assert dead[0].status == 0 and "Connect" in dead[0].error
    with pytest.raises(UserError, match="no OpenAI-compatible server"):
        look_at(url)


def test_a_server_that_does_not_start_is_said(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that starts, and the report of its load: tests/test_wheel.py."""
    monkeypatch.chdir(tmp_path)
    assert run_cli(["bench", "serve", "no-such-model", "--rate", "8", "--seconds", "2"]) == 2
    assert "the server did not start" in capsys.readouterr().err


def test_a_trace_through_the_command_is_sent_and_recorded(
    tmp_path: Path, command: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    trace = tmp_path / "trace.csv"
    # The third does not fit the server's context; the last comes after the time is over and is not sent.
    rows = ["15:46.6805900,9,4", "15:48.6805900,20,7", "15:50.6805900,500,6", "15:54.6805900,3,1", "16:58.6805900,3,1"]
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens", *(f"2023-11-16 18:{row}" for row in rows)]
    trace.write_text("\n".join(lines))
    rate = 10 * len(rows) / 72  # ten times as fast as the trace, which lasts 72 s
    with running(max_context=64) as service:
        url: str = service.url  # type: ignore[attr-defined]
        asked = ["--trace", trace, "--rate", rate, "--seconds", 2, "--slo-ttft", 30, "--slo-tpot", 5]
        shown = command("bench", "serve", f"{url}/v1", *asked, "--save", "serve.jsonl")
    assert "4 of 4 answered whole" in shown and "1 of 4 requests were shortened" in shown
    [folder] = (tmp_path / "runs").iterdir()
    sent = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    assert [s["at"] for s in sent] == pytest.approx([0, 0.2, 0.4, 0.8], abs=1e-5)
    assert [(s["num_prompt"], s["num_new"]) for s in sent] == [(9, 4), (20, 7), (58, 6), (3, 1)]
    assert all(s["num_tokens"] == s["num_new"] and s["began"] >= s["at"] for s in sent)

    [line] = results.newest("serve")
    assert line["quality"]["num_whole"] == line["quality"]["num_sent"] == 4
    assert line["value"] == line["quality"]["requests_per_s"], "nobody broke such long promises"
    wanted = {"model": "tiny", "rate": 3.75, "num_requests": 4, "num_shortened": 1, "max_context": 64}
    wanted |= {"slo_ttft_s": 30, "slo_tpot_s": 5, "prompt_tokens": 22.5, "new_tokens": 4.5}
    assert wanted.items() <= line["config"].items()
    assert "| 22, 4 | 3.75 | 4 of 4 |" in serve.table() and "(30 s, 5000 ms)" in serve.table()


def test_a_load_without_answers_is_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    assert serve.table() == "Not measured yet."
    lost = summarize([Sent(Planned(0.0, 5, 5), error="ConnectError")], Slo())
    with pytest.raises(UserError, match="nothing to record"):
        summary_line("Poisson", lost, {})


def test_a_line_that_cannot_be_saved_is_refused_before_the_load(tmp_path: Path, command: Callable[..., str]) -> None:
    assert "is a folder" in command("bench", "serve", "nowhere", "--save", tmp_path, fails=True)
    assert "there is no folder" in command("bench", "serve", "nowhere", "--save", tmp_path / "a/b", fails=True)


@pytest.mark.slow
@pytest.mark.lab
def test_a_short_soak_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "NUM_QUESTIONS", 24)
    outcome = soak.run(clients=12, seconds=2.5, max_requests=5)
    assert outcome.counts["whole"] >= 5 and outcome.counts["left"] >= 1  # several times as many on idle cores
    assert outcome.counts["wrong"] == outcome.counts["failed"] == 0, outcome.first_wrong
    assert outcome.kv_usage == 0
