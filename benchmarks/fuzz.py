"""What hostile inputs led to: the table of the fuzz campaigns.

    python -m pytest -m lab tests/fuzz        runs the campaigns and records their lines
    python -m benchmarks.tables               writes the tables into the pages

The campaigns are tests (tests/fuzz); this module only lays out what they have recorded in results/fuzz.jsonl.
"""

from __future__ import annotations

from typing import Any

from benchmarks.results import markdown, newest, provenance

OUTCOMES = ("cases", "ok", "clean", "traceback", "hang", "abort")
ATTACK = "http attack: "


def table() -> str:
    """One row per kind of case. The kinds that are attacks on a server have a largest gap of other clients' streams."""
    lines = [line for line in newest("fuzz") if not line["case"].startswith(ATTACK)]
    values = _by_case(lines)
    rows = [[kind, *(f"{found.get(name, 0):,.0f}" for name in OUTCOMES)] for kind, found in values.items()]
    header = [
        "kind of case",
        "cases",
        "accepted",
        "refused with a reason",
        "failed with a traceback",
        "hung",
        "ended by a signal",
    ]
    return f"{markdown(header, rows)}{provenance(lines)}" if rows else "No campaign has been recorded."


def attacks() -> str:
    """One row per attack on a server: what two well-behaved clients felt meanwhile."""
    lines = [line for line in newest("fuzz") if line["case"].startswith(ATTACK)]
    values = _by_case(lines)
    rows = [
        [case.removeprefix(ATTACK), f"{found['largest_gap_s']:.2f}", f"{found['first_token_s']:.2f}"]
        for case, found in values.items()
    ]
    header = ["attack", "largest gap in a stream, s", "longest wait for a first token, s"]
    if not rows:
        return "No campaign has been recorded."
    loads = [line["quality"]["load_average"] for line in lines]
    told = f"Load average of the machine, the server and its attackers included: {min(loads):.0f} to {max(loads):.0f}."
    grown = [line["value"] for line in newest("fuzz") if line["metric"] == "memory_above_start_gb"]
    told += f" The server used at most {grown[-1]:.2f} GB more than at its start." if grown else ""
    return f"{markdown(header, rows)}\n\n{told}{provenance(lines)}"


def _by_case(lines: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for line in lines:
        found.setdefault(line["case"], {})[line["metric"]] = line["value"]
    return found


if __name__ == "__main__":
    print(table(), attacks(), sep="\n\n")
