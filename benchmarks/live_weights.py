"""Live weights under attack and under kills: the tables of the campaigns.

    python -m pytest -m lab tests/fuzz/test_fuzz_live.py tests/serve/http/test_follow_lab.py     run and record them
    python -m benchmarks.tables                                                writes the table into the page

The campaigns are tests; this module only lays out what they have recorded in results/live_weights.jsonl.
"""

from __future__ import annotations

from benchmarks.results import markdown, newest, provenance

NOTHING = "No campaign has been recorded."


def table() -> str:
    """What was tried, and what came of it. Kills are recorded in parts, which are summed."""
    lines = newest("live_weights")
    found: dict[str, list[float]] = {}
    for line in lines:
        found.setdefault(line["metric"], []).append(line["value"])
    if not {"hostile_sessions", "kills"} <= found.keys():
        return NOTHING
    answers = sum(line["quality"]["answers"] for line in lines if line["metric"] == "kills")
    rows = [
        ["hostile sessions against publisher and follower", f"{sum(found['hostile_sessions']):,.0f}"],
        ["of these, weights taken over", f"{sum(found['taken_over']):.0f}"],
        ["longest time that an honest follower was kept out", f"{max(found['lockout_s']):.2f} s"],
        ["memory above the start", f"{1e3 * max(found['memory_gb']):.0f} MB"],
        ["kills of trainer, agent, HTTP and engine during updates", f"{sum(found['kills']):,.0f}"],
        ["answers that one whole version did not write", f"{sum(found['mixed_versions']):.0f} of {answers:,}"],
    ]
    return f"{markdown(['campaign', 'found'], rows)}{provenance(lines)}"


if __name__ == "__main__":
    print(table())
