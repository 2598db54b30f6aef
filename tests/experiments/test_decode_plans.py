from __future__ import annotations

from benchmarks.decode import LLAMA_8B
from experiments import decode_plans
from shoestring.kernels.lowbit import few_rows
from shoestring.kernels.lowbit.chunk_layout import ChunkLayout
from shoestring.kernels.lowbit.few_rows import FewRowsPlan

INT2 = ChunkLayout(2, 64, False, 1, False)


def test_plans_offered_can_run_and_begin_with_the_one_in_use() -> None:
    for use in decode_plans.uses(LLAMA_8B).values():
        offered = decode_plans.candidates(INT2, use)
        assert offered[0] == few_rows.choose_plan(use.of(INT2))
        assert len(offered) > 5 and len(set(offered)) == len(offered)
        for plan in offered:
            assert plan.fits(INT2, 1, use.width, use.norm)
            assert not use.swiglu or plan.row_warps * plan.tiles % 2 == 0


def test_the_search_sees_what_stands_beside() -> None:
    """Alone, a is best with 4; beside a b of 2, which is found first, with 1."""
    offered = {"b": [FewRowsPlan(n, 1) for n in (1, 2)], "a": [FewRowsPlan(n, 1) for n in (1, 4)]}
    asked = []

    def measure(choice: decode_plans.Choice) -> float:
        a, b = choice["a"].row_warps, choice["b"].row_warps
        asked.append((a, b))
        return {(4, 1): 9.0, (1, 1): 10.0, (4, 2): 8.0, (1, 2): 7.0}[a, b]

    best, least = decode_plans.descend({"b": FewRowsPlan(1, 1), "a": FewRowsPlan(4, 1)}, offered, measure)
    assert (best["a"].row_warps, best["b"].row_warps, least) == (1, 2, 7.0)
    assert len(asked) == len(set(asked))  # nothing is timed twice

    stopped, _ = decode_plans.descend({"b": FewRowsPlan(1, 1), "a": FewRowsPlan(4, 1)}, offered, measure, lambda: True)
    assert stopped == {"b": FewRowsPlan(1, 1), "a": FewRowsPlan(4, 1)}


def test_the_kernel_runs_by_the_plans_of_a_choice_and_then_by_its_own() -> None:
    uses = decode_plans.uses(LLAMA_8B)
    choice = {name: FewRowsPlan(2 + 2 * i, 2) for i, name in enumerate(uses)}

    def chosen() -> dict[str, FewRowsPlan]:
        return {n: few_rows.choose_plan(u.of(INT2)) for n, u in uses.items()}

    before = chosen()
    with decode_plans.plans_of(decode_plans.by_key(INT2, LLAMA_8B, 1, choice)):
        assert chosen() == choice != before
    assert chosen() == before
    assert len({(u.out, u.width) for u in uses.values()}) == len(uses)
