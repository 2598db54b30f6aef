"""Scripts say what was wrong with what they were given in one line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from shoestring.errors import UserError, as_command, in_run, lost_peer, lost_peer_as_user_error


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


GLOO = "[/w/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:64738: Connection reset by peer. GLHF!"


class DistNetworkError(RuntimeError):
    """As torch.distributed calls its own; known by name, because torch is not imported for this."""


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError(GLOO), "Connection reset by peer"),
        (RuntimeError("gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1000ms for recv operation"), "Timed"),
        (RuntimeError("Application timeout caused pair closure"), "Application timeout caused pair closure"),
        (DistNetworkError("failed to recv, got 0 bytes"), "failed to recv, got 0 bytes"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
        (ConnectionResetError("Connection reset by peer"), None),  # of a client's socket
    ],
)
def test_errors_of_a_lost_process_are_known(error: Exception, reason: str | None) -> None:
    found = lost_peer(error)
    assert found == reason if reason is None else found is not None and found.startswith(reason)
    wrapped = ValueError("in a checkpoint")
    wrapped.__cause__ = error
    assert lost_peer(wrapped) == found


def test_a_lost_process_is_said_with_the_command_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Config:
        resume: str | None = None
        run: str | None = None

    def line() -> str:
        with pytest.raises(UserError) as said, lost_peer_as_user_error("train/dense", Config()), in_run(tmp_path):
            raise RuntimeError(GLOO)
        return str(said.value)

    assert line().endswith("; start all of them again")  # nothing to go on with yet
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    again = f"torchrun --nnodes 2 --nproc-per-node 4 -m shoestring run train/dense resume={tmp_path}"
    assert line().endswith(f"continue with `{again}`") and "(Connection reset by peer)" in line()
    with pytest.raises(RuntimeError, match="a defect"), lost_peer_as_user_error("train/dense", Config()):
        raise RuntimeError("a defect")
