from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoestring.serve.engine.request import TextStream, find_stop, held_back


class Pieces:
    """A token stream in which token i is the i-th piece of text."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def step(self, id: int) -> str:
        return self.pieces[id]

    def finish(self) -> str:
        return ""


def run(pieces: list[str], stop: list[str]) -> tuple[list[str], bool]:
    stream = TextStream(Pieces(pieces), stop)
    out = []
    for i in range(len(pieces)):
        out.append(stream.push(i))
        if stream.stopped:
            return out, True
    return [*out, stream.flush()], False


def test_a_possible_stop_string_is_held_back_until_it_is_decided() -> None:
    assert run(["Hi<", "|e", "x", "<|", "end|>", "never"], ["<|end|>"]) == (["Hi", "", "<|ex", "", ""], True)
    assert run(["a", "ST"], ["STOP"]) == (["a", "", "ST"], False)


def test_the_stop_string_that_is_complete_first_ends_the_text() -> None:
    assert find_stop("xabcd", ["abcd", "bc"]) == 2
    assert find_stop("xabc", ["abc", "bc"]) == 1
    assert find_stop("xyz", ["a"]) is None
    assert held_back("xxab", ["abc", "b"]) == 2


@given(st.lists(st.text("ab", max_size=4), max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_text_does_not_depend_on_how_it_was_cut(pieces: list[str], stop: list[str]) -> None:
    text = "".join(pieces)
    cut, stopped = run(pieces, stop)
    letters, stopped_letters = run(list(text), stop)
    assert ("".join(cut), stopped) == ("".join(letters), stopped_letters)
    assert stopped == any(s in text for s in stop)
    assert text.startswith("".join(cut))
    assert not any(s in "".join(cut) for s in stop)
