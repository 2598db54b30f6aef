from __future__ import annotations

from shoestring.bench import decode_plans
from shoestring.bench.decode import LLAMA_8B
from shoestring.kernels import lowbit_few
from shoestring.kernels.lowbit_few import Plan
from shoestring.kernels.lowbit_layout import Layout

INT2 = Layout(2, 64, False, 1, False)


def test_plans_offered_can_run_and_begin_with_the_one_in_use() -> None:
    for use in decode_plans.uses(LLAMA_8B).values():
        offered = decode_plans.candidates(INT2, use)
        assert offered[0] == lowbit_few.choose_plan(INT2, 1, use.out, use.width, *use.around)
        assert len(offered) > 5 and len(set(offered)) == len(offered)
        for plan in offered:
            assert plan.fits(INT2, 1, use.width, use.norm)
            assert not use.swiglu or plan.row_warps * plan.tiles % 2 == 0


def test_the_search_sees_what_stands_beside() -> None:
    """Alone, a is best with 4; beside a b of 2, which is found first, with 1."""
    offered = {"b": [Plan(n, 1) for n in (1, 2)], "a": [Plan(n, 1) for n in (1, 4)]}
    asked = []

    def measure(choice: decode_plans.Choice) -> float:
        a, b = choice["a"].row_warps, choice["b"].row_warps
        asked.append((a, b))
        return {(4, 1): 9.0, (1, 1): 10.0, (4, 2): 8.0, (1, 2): 7.0}[a, b]

    best, least = decode_plans.descend({"b": Plan(1, 1), "a": Plan(4, 1)}, offered, measure)
    assert (best["a"].row_warps, best["b"].row_warps, least) == (1, 2, 7.0)
    assert len(asked) == len(set(asked))  # nothing is timed twice

    stopped, _ = decode_plans.descend({"b": Plan(1, 1), "a": Plan(4, 1)}, offered, measure, lambda: True)
    assert stopped == {"b": Plan(1, 1), "a": Plan(4, 1)}


def test_the_kernel_runs_by_the_plans_of_a_choice_and_then_by_its_own() -> None:
    uses = decode_plans.uses(LLAMA_8B)
    choice = {name: Plan(1 + i, 2) for i, name in enumerate(uses)}
    before = lowbit_few.choose_plan
    with decode_plans.plans_of(choice):
        for name, use in uses.items():
            assert lowbit_few.choose_plan(INT2, 1, use.out, use.width, *use.around) == choice[name]
    assert lowbit_few.choose_plan is before
    assert len({(u.out, u.width) for u in uses.values()}) == len(uses)
