"""What hostile inputs led to: the table of the fuzz campaigns.

    python -m pytest -m lab tests/fuzz        runs the campaigns and records their lines
    python -m benchmarks.tables               writes the tables into the pages

The campaigns are tests (tests/fuzz); this module only lays out what they have recorded in results/fuzz.jsonl.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.results import markdown, newest, provenance

OUTCOMES = ("cases", "ok", "clean", "traceback", "hang", "abort")
HEADER = ["cases", "accepted", "refused with a reason", "failed with a traceback", "hung", "ended by a signal"]
FAMILIES = {
    "http": "requests to the server",
    "file": "files of users",
    "settings": "settings of recipes",
    "run": "whole runs of recipes",
    "publish": "followers that attack a publisher",
    "follow": "publishers that attack a server",
}
ATTACK = "http attack: "
WORST = 3  # attacks that stand on the page, by either measure
NOTHING = "No campaign has been recorded."


def table() -> str:
    """One row per kind of case. The kinds that are attacks on a server have a largest gap of other clients' streams."""
    lines = [line for line in _newest() if not line["case"].startswith(ATTACK)]
    rows = [[kind, *_counts([found])] for kind, found in _by_case(lines).items()]
    return f"{markdown(['kind of case', *HEADER], rows)}{provenance(lines)}" if rows else NOTHING


def short() -> str:
    """The same, one row per family of kinds."""
    lines = [line for line in _newest() if not line["case"].startswith(ATTACK)]
    families: dict[str, list[dict[str, float]]] = {}
    for kind, found in _by_case(lines).items():
        families.setdefault(FAMILIES[kind.split()[0].rstrip(":")], []).append(found)
    rows = [[family, f"{len(kinds)}", *_counts(kinds)] for family, kinds in families.items()]
    return f"{markdown(['what is sent or read', 'kinds', *HEADER], rows)}{provenance(lines)}" if rows else NOTHING


def attacks() -> str:
    """One row per attack on a server: what two well-behaved clients felt meanwhile."""
    return _felt(lambda values: list(values))


def worst() -> str:
    """The same without any attack and under those that were felt most."""

    def chosen(values: dict[str, dict[str, float]]) -> list[str]:
        by = {m: sorted(values, key=lambda case: -values[case][m]) for m in ("largest_gap_s", "first_token_s")}
        felt = {case for cases in by.values() for case in cases[:WORST]}
        return [case for case in values if case in felt or case == f"{ATTACK}none"]

    return _felt(chosen)


def _newest() -> list[dict[str, Any]]:
    """The last line of each case and metric, whatever the seed."""
    return list({(line["case"], line["metric"]): line for line in newest("fuzz")}.values())


def _felt(choose: Callable[[dict[str, dict[str, float]]], list[str]]) -> str:
    lines = [line for line in _newest() if line["case"].startswith(ATTACK)]
    values = _by_case(lines)
    rows = [
        [case.removeprefix(ATTACK), f"{values[case]['largest_gap_s']:.2f}", f"{values[case]['first_token_s']:.2f}"]
        for case in choose(values)
    ]
    header = ["attack", "largest gap in a stream, s", "longest wait for a first token, s"]
    if not rows:
        return NOTHING
    loads = [line["quality"]["load_average"] for line in lines]
    told = f"Load average of the machine, the server and its attackers included: {min(loads):.0f} to {max(loads):.0f}."
    grown = [line["value"] for line in _newest() if line["metric"] == "memory_above_start_gb"]
    told += f" The server used at most {grown[-1]:.2f} GB more than at its start." if grown else ""
    return f"{markdown(header, rows)}\n\n{told}{provenance(lines)}"


def _counts(kinds: list[dict[str, float]]) -> list[str]:
    return [f"{sum(found.get(name, 0) for found in kinds):,.0f}" for name in OUTCOMES]


def _by_case(lines: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for line in lines:
        found.setdefault(line["case"], {})[line["metric"]] = line["value"]
    return found


if __name__ == "__main__":
    print(table(), attacks(), sep="\n\n")
