"""The committed pictures are what results/ says, and every one is shown on a page."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from benchmarks.figures import FIGURES, FOLDER
from benchmarks.svg_plot import WIDTH, Axis, Bar, Marks, Panel, bar_plot, xy_plot
from benchmarks.tables import REPO, pages

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_drawn_from_results(name: str) -> None:
    drawn = FIGURES[name]()
    assert (FOLDER / f"{name}.svg").read_text() == drawn, f"{name}.svg is stale: run python -m benchmarks.figures"
    assert "prefers-color-scheme:dark" in drawn
    root = ElementTree.fromstring(drawn)
    assert root.get("aria-label") and root.tag == f"{SVG}svg"
    width, height = (float(v) for v in root.get("viewBox", "").split()[2:])
    for text in root.findall(f".//{SVG}text[@x]"):
        assert 0 <= float(text.get("x", "")) <= width and -1 <= float(text.get("y", "")) <= height, text.text


def test_every_figure_is_shown_and_none_is_left_over() -> None:
    text = "".join(file.read_text() for file in (*pages(), REPO / "mkdocs.yml"))
    shown = set(re.findall(r"figures/(\w+)\.(?:svg|png)", text))
    assert set(FIGURES) <= shown
    assert {p.stem for p in FOLDER.glob("*")} <= shown  # drawn ones, and those that are no plots


def test_points_stand_where_the_axes_say() -> None:
    assert Axis("", 0, 10, []).place(2.5, 100, 200) == 125
    assert Axis("", 1, 100, [], log=True).place(10, 0, 50) == pytest.approx(25)
    panel = Panel(
        Axis("x", 0, 1, [0, 1]), Axis("y", 0, 2, [0, 2], names=["none", "all"]), [Marks("m", [(0, 0), (1, 2)], 0)]
    )
    root = ElementTree.fromstring(xy_plot("t", "c", [panel], height=200))
    line = root.find(f".//{SVG}polyline")
    assert line is not None
    (x0, y0), (x1, y1) = (map(float, p.split(",")) for p in line.get("points", "").split())
    assert x1 > x0 and y1 < y0  # up is more
    assert [t.text for t in root.iter(f"{SVG}text")].count("all") == 1


def test_bars_are_as_long_as_their_values_and_leave_room_for_their_numbers() -> None:
    root = ElementTree.fromstring(bar_plot("t", "c", [Bar("a", 2.0, "two"), Bar("b", 1.0, "one", limit=4.0)]))
    widths = [float(r.get("width", "")) for r in root.iter(f"{SVG}rect") if r.get("class") == "f0"]
    assert widths[0] == pytest.approx(2 * widths[1], abs=0.2)
    ends = [float(t.get("x", "")) for t in root.iter(f"{SVG}text") if t.text in ("two", "one")]
    assert max(ends) < WIDTH - 20
