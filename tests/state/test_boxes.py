"""Boxes: algebra and the reshard plan, against brute force over small tensors."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.errors import UserError
from shoestring.state.boxes import Box, Layout, check_cover, local_box, overlapping, plan, uncovered


def cells(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(a, b) for a, b in zip(box.start, box.stop, strict=True))))


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(0, 7), min_size=0, max_size=3)))


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    ends = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Uneven splits: cut the box again and again at random places."""
    pieces = [Box.full(shape)]
    for _ in range(draw(st.integers(0, 5))):
        box = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
        if not box.start:
            return [box]
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(box.start[dim], box.stop[dim]))
        pieces.append(Box(box.start, (*box.stop[:dim], cut, *box.stop[dim + 1 :])))
        pieces.append(Box((*box.start[:dim], cut, *box.start[dim + 1 :]), box.stop))
    return pieces


@st.composite
def layouts(draw: st.DrawFn) -> tuple[dict[str, tuple[int, ...]], Layout, Layout]:
    """Two layouts of the same tensors: uneven tilings, each tile held by one or more owners."""
    names = {f"t{i}": draw(shapes()) for i in range(draw(st.integers(1, 3)))}
    sides: list[Layout] = []
    for _ in range(2):
        layout: Layout = {}
        for name, shape in names.items():
            layout[name] = [
                (owner, box)
                for box in draw(tilings(shape))
                for owner in draw(st.sets(st.integers(0, 4), min_size=1, max_size=3))
            ]
        sides.append(layout)
    return names, sides[0], sides[1]


@settings(deadline=None)
@given(st.data())
def test_intersection_and_subtraction_agree_with_sets(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    common = a.intersect(b)
    assert (cells(common) if common else set()) == cells(a) & cells(b)
    assert common == b.intersect(a)
    rest = a.subtract(b)
    assert Counter(c for r in rest for c in cells(r)) == Counter(cells(a) - cells(b))
    assert a.size == len(cells(a)) and all(r.size for r in rest)
    if cells(b):
        assert a.contains(b) == (cells(b) <= cells(a))


@settings(deadline=None)
@given(st.data())
def test_slices_pick_the_right_elements(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    outer = data.draw(boxes_in(shape))
    inner = outer.intersect(data.draw(boxes_in(shape)))
    if inner is None:
        return
    t = torch.arange(Box.full(shape).size).reshape(shape)
    assert torch.equal(t[outer.slices()][inner.slices(outer)], t[inner.slices()])


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_plan_covers_every_destination_element_once(case: tuple[dict, Layout, Layout]) -> None:
    _, src, dst = case
    copies = plan(src, dst)
    got = Counter((c.name, c.dst_owner, cell) for c in copies for cell in cells(c.box))
    want = Counter((n, owner, cell) for n, held in dst.items() for owner, box in held for cell in cells(box))
    assert got == want
    for c in copies:
        assert any(owner == c.src_owner and box.contains(c.box) for owner, box in src[c.name])


def test_plan_balances_replicated_senders_and_prefers_local_copies() -> None:
    whole = Box.full((8, 4))
    src: Layout = {f"w{i}": [(f"s{r}", whole) for r in range(4)] for i in range(8)}
    dst: Layout = {f"w{i}": [("reader", whole)] for i in range(8)}
    sent = Counter()
    for c in plan(src, dst):
        sent[c.src_owner] += c.box.size
    assert set(sent.values()) == {2 * whole.size} and len(sent) == 4
    local = plan({"w": [("a", whole), ("b", whole)]}, {"w": [("b", whole), ("a", whole)]})
    assert all(c.src_owner == c.dst_owner for c in local)


def test_plan_names_what_nobody_holds() -> None:
    with pytest.raises(UserError, match=r"'w'.*\[3, 0\] to \[4, 2\].*'reader'"):
        plan({"w": [("a", Box((0, 0), (3, 2)))]}, {"w": [("reader", Box.full((4, 2)))]})
    with pytest.raises(UserError, match="nobody holds"):
        plan({}, {"w": [("reader", Box.full(()))]})


@settings(deadline=None)
@given(st.data())
def test_cover_check_agrees_with_counting(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    boxes = data.draw(st.one_of(tilings(shape), st.lists(boxes_in(shape), max_size=4)))
    count = Counter(c for b in boxes for c in cells(b))
    gaps = uncovered(shape, boxes)
    assert {c for g in gaps for c in cells(g)} == cells(Box.full(shape)) - set(count)
    assert (overlapping(boxes) is None) == all(n == 1 for n in count.values())
    if not gaps and all(n == 1 for n in count.values()):
        check_cover("t", shape, boxes)
    else:
        with pytest.raises(UserError, match="'t'"):
            check_cover("t", shape, boxes)


def test_cover_check_refuses_boxes_outside() -> None:
    with pytest.raises(UserError, match="outside"):
        check_cover("t", (4,), [Box((0,), (5,))])
    with pytest.raises(UserError, match="outside"):
        check_cover("t", (4,), [Box((0, 0), (2, 2))])
    with pytest.raises(ValueError, match="not a box"):
        Box((3,), (2,))


def test_local_box_of_a_plain_tensor_is_everything() -> None:
    assert local_box(torch.zeros(3, 5)) == Box((0, 0), (3, 5))
    assert local_box(torch.tensor(1.0)) == Box((), ()) and local_box(torch.tensor(1.0)).size == 1
