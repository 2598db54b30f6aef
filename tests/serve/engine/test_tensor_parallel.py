"""One engine over two processes, and what travels between them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoestring.cli.app import run_cli
from shoestring.errors import UserError
from shoestring.mesh import Mesh
from shoestring.model import Tokenizer
from shoestring.model.folder import save_model
from shoestring.model.parallel import tensor_parallel_
from shoestring.serve.engine.block_pool import RowSpan
from shoestring.serve.engine.runner import Batch
from shoestring.serve.engine.tensor_parallel import Ranks, open_ranks, pack_batch, unpack_batch
from tiny import chat_tokenizer, served_model, tiny_decoder


def test_a_batch_travels_as_numbers() -> None:
    batch = Batch([RowSpan([4, 2, 9], 3, 2), RowSpan([7], 0, 1)], [11, 12, 13], [1, 2])
    got = unpack_batch(pack_batch(batch, 4))
    # Blocks beyond the rows are not needed.
    assert got == Batch([RowSpan([4, 2], 3, 2), RowSpan([7], 0, 1)], [11, 12, 13], [1, 2])


def test_one_process_has_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert open_ranks("cpu") is None


def test_a_wrong_number_of_processes_is_said_as_it_was_given() -> None:
    model = tiny_decoder()
    num = model.spec.num_kv_heads + 1
    axis: Any = SimpleNamespace(size=lambda: num)
    ranks = object.__new__(Ranks)  # no group is needed to see that it does not go
    ranks.mesh, ranks._axis = Mesh(0, num, torch.device("cpu")), axis
    with pytest.raises(UserError, match=rf"torchrun's {num} processes \(--nproc-per-node\) cannot share"):
        ranks.share(model)
    with pytest.raises(UserError, match=rf"mesh\.tp={num} cannot share .* evenly; allowed are 1, 2$"):
        tensor_parallel_(model, axis)


@pytest.mark.ranks
def test_two_ranks_write_the_text_of_one(run_ranks: Callable[..., str]) -> None:
    """Dense, with a cut vocabulary, packed, and experts with norms over all heads; chunks, preemption, drafters, skip
    sets, prompt scores."""
    assert run_ranks(2, Path(__file__).with_name("ranks_serving.py"), timeout=120).count("same tokens") == 4


FAULT = """
import contextlib, io, os, pathlib, sys
from shoestring.cli.app import run_cli
from shoestring.model import Decoder

forward, calls, out = Decoder.forward, [], io.StringIO()
sys.stdin = io.StringIO("The fox\\nThe dog\\n")

def fail_later(self, *args, **options):
    calls.append(1)
    if len(calls) == 9:
        self.blocks[-1].mlp = None  # in the middle of the blocks, behind sums over all processes
    return forward(self, *args, **options)

if os.environ["RANK"] == "0":
    Decoder.forward = fail_later
with contextlib.redirect_stdout(out):
    code = run_cli(sys.argv[2:])
pathlib.Path(sys.argv[1]).write_text(out.getvalue())
assert code == 1
"""


@pytest.mark.ranks
def test_a_first_process_that_fails_ends_all_of_them(
    run_ranks: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`chat` on two processes: the first answer is that of one process; in the second, the first process fails
    in the middle of a forward, in which the other would wait for it."""
    tokenizer = Tokenizer.train(["The quick brown fox jumps over the lazy dog. " * 3], 290)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    model = tiny_decoder(vocab_size=tokenizer.vocab_size + tokenizer.vocab_size % 2, max_positions=64).float()
    save_model(tmp_path / "model", model, tokenizer)
    command = ["chat", str(tmp_path / "model"), "--max-tokens", "6", "--device", "cpu"]
    monkeypatch.setattr("sys.stdin", io.StringIO("The fox\n"))
    assert run_cli(command) == 0
    answer = capsys.readouterr().out
    script = tmp_path / "chat.py"
    script.write_text(FAULT)
    with pytest.raises(AssertionError) as failed:
        run_ranks(2, script, str(tmp_path / "out.txt"), *command, timeout=60)
    # The first process ended as the script wants it to; the other had to be freed from its wait.
    assert "1 of 2 ranks failed" in str(failed.value) and "--- rank 1, exit 1" in str(failed.value)
    assert "error: process 1 stops: the first process failed: 'NoneType'" in str(failed.value)
    written = (tmp_path / "out.txt").read_text()
    assert len(answer) > len("> The fox\n") and written.startswith(answer) and "> The dog" in written


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "model"
    tokenizer = chat_tokenizer()
    save_model(folder, served_model(tokenizer.vocab_size + tokenizer.vocab_size % 2), tokenizer)
    return folder


@pytest.mark.ranks
@pytest.mark.parametrize(("case", "code"), [("silence", "rank_failed"), ("sigterm", "draining")])
def test_a_stopped_follower_is_a_failed_one(
    case: str, code: str, run_ranks: Callable[..., str], served: Path, tmp_path: Path
) -> None:
    """Clients are answered, /health tells, and both processes end: by themselves, or at once after SIGTERM."""
    pytest.importorskip("uvicorn")
    script = Path(__file__).with_name("ranks_stopped.py")
    with pytest.raises(AssertionError) as failed:
        run_ranks(2, script, str(served), str(tmp_path), case, timeout=60)
    said, seen = str(failed.value), json.loads((tmp_path / "seen.json").read_text())
    assert "2 of 2 ranks failed" in said and "Traceback" not in said, said
    assert seen["last"][1] == "data: [DONE]" and json.loads(seen["last"][0][6:])["error"]["code"] == code
    assert seen["seconds"] < 20
    if case == "silence":
        lost = "process 1 has not answered for 5 s: it is stopped or unreachable"
        assert seen["health"][0] == 503 and seen["health"][1]["status"] == code and lost in seen["health"][1]["reason"]
        assert seen["refused"] == [503, code]
        assert "--- rank 0, exit 1:" in said and f"error: process 0 stops: {lost}" in said
        assert f"error: process 1 stops: {lost}" in said
    else:
        assert "--- rank 0, exit 2:" in said and "error: the engine is stuck in a step since" in said
        assert "error: process 1 stops: the first process failed: the engine is stuck" in said
