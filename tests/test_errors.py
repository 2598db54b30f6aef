"""Scripts say what was wrong with what they were given in one line."""

from __future__ import annotations

import pytest

from shoestring.errors import UserError, as_command


def test_a_script_ends_with_one_line_and_the_exit_code_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> None:
        raise UserError("rows=0 is too few; use 1 or more")

    with pytest.raises(SystemExit) as ended:
        as_command(refuse)
    assert ended.value.code == 2 and capsys.readouterr().err == "error: rows=0 is too few; use 1 or more\n"
    as_command(lambda: None)


def test_what_is_a_defect_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        as_command(lambda: print(1 // 0))
