"""One engine over two processes, and what travels between them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_serve import tiny_decoder

from shoestring.cli import run_cli
from shoestring.model import Tokenizer
from shoestring.model.folder import save_model
from shoestring.serve.kv_cache import Span
from shoestring.serve.runner import Batch
from shoestring.serve.tensor_parallel import open_ranks, pack_batch, unpack_batch


def test_a_batch_travels_as_numbers() -> None:
    batch = Batch([Span([4, 2, 9], 3, 2), Span([7], 0, 1)], [11, 12, 13], [1, 2])
    got = unpack_batch(pack_batch(batch, 4))
    # Blocks beyond the rows are not needed.
    assert got == Batch([Span([4, 2], 3, 2), Span([7], 0, 1)], [11, 12, 13], [1, 2])


def test_one_process_has_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert open_ranks("cpu") is None


@pytest.mark.ranks
def test_two_ranks_write_the_text_of_one(
    run_ranks: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Dense, with a cut vocabulary, and packed; chunks, preemption, drafters, skip sets, prompt scores; and
    `shoestring generate`."""
    tokenizer = Tokenizer.train(["The quick brown fox jumps over the lazy dog. " * 3], 290)
    model = tiny_decoder(vocab_size=tokenizer.vocab_size + tokenizer.vocab_size % 2, max_positions=64).float()
    save_model(tmp_path / "model", model, tokenizer)
    command = ["generate", str(tmp_path / "model"), "The quick", "--max-tokens", "8", "--device", "cpu"]
    assert run_cli(command) == 0
    text = capsys.readouterr().out
    script = tmp_path / "cli.py"
    script.write_text("import sys\nfrom shoestring.cli import run_cli\nsys.exit(run_cli(sys.argv[1:]))\n")
    new = text.removeprefix("The quick")  # warnings of torch may stand before it
    assert len(new) > 1 and new in run_ranks(2, script, *command, timeout=60)
    assert run_ranks(2, Path(__file__).with_name("ranks_serving.py"), timeout=120).count("same tokens") == 3
