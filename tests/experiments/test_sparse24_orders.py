"""The table of 2:4 pre-training in miniature: which orders of its rows hold on a toy, in a minute of processor time.

The text is a random chain: each of 900 words has two successors, one three times as likely as the other (the best
possible loss is 0.56 nats), and no part of it is read twice. The head is the embedding, so that the successors have
to be learned by the feed-forward layer, and a narrow one has hardly room for them. The learning rate stays until the
last sixth of the steps, in which FST is dense.
"""

from __future__ import annotations

import random
import statistics
import string
from dataclasses import dataclass
from pathlib import Path

import pytest

from experiments.sparse24_quality import FINISH, Size, build, make_hooks, validation_losses
from experiments.sparse24_tables import WSD
from shoestring.methods.sparse24.training import count_24
from shoestring.train.objectives import CrossEntropy
from shoestring.train.shards import Corpus, tokenize_corpus
from shoestring.train.trainer import train

pytestmark = [pytest.mark.slow, pytest.mark.lab]

CASES = ("dense", "half-width", "SR-STE", "FST", "S-STE")
LETTERS, NUM_TEXTS, TEXT_LENGTH = string.ascii_letters[:30], 94, 2000
SIZE = Size(
    {"d_model": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16, "d_ff": 48},
    vocab_size=2000, context=64, batch=8, micro=8, steps=300, warmup=30, lr=8e-3, refresh=10, schedule=WSD,
)  # fmt: skip
# Of FST's steps: the next one ends with dense layers.
LAST_SPARSE = SIZE.steps - round(FINISH * SIZE.steps) - 1
LAYERS = 3  # gate, up and down


@dataclass(frozen=True)
class Row:
    """What one method found, before the learning rate falls and at the end."""

    sparse_loss: float  # on the validation text, as all losses here
    loss: float
    layers_24: int  # that multiply with a 2:4 weight, before
    delivered_24: int
    flip_rate: float  # of one step, the mean from the middle of the run until then
    mu: float | None  # of the controller, over the same steps


def chain(place: Path) -> Corpus:
    draw = random.Random(0)
    words = [a + b for a in LETTERS for b in LETTERS]
    successors = {word: draw.choices(words, k=2) for word in words}
    (place / "text").mkdir()
    for number in range(NUM_TEXTS):
        text = [draw.choice(words)]
        while len(text) < TEXT_LENGTH:
            text.append(successors[text[-1]][draw.random() < 0.25])
        (place / "text" / f"{number}.txt").write_text(" " + " ".join(text))
    return tokenize_corpus(str(place / "text"), place / "cache", vocab_size=SIZE.vocab_size, val_fraction=0.1)


def trained(case: str, corpus: Corpus, seed: int) -> Row:
    run, data = build(case, SIZE, corpus, seed, None)
    hooks = make_hooks(case, SIZE, run.model, seed)

    def found_at(step: int) -> tuple[float, int]:
        train(run, data, CrossEntropy(), steps=step, hooks=hooks, log_every=20, schedule=SIZE.rate())
        loss = statistics.fmean(validation_losses(run, corpus, SIZE))
        return loss, count_24(run.model)["layers_24"]

    sparse_loss, layers_24 = found_at(LAST_SPARSE)
    loss, delivered_24 = found_at(SIZE.steps)
    settled = [row for row in run.log.history if SIZE.steps // 2 < row["step"] <= LAST_SPARSE]
    flip_rate = statistics.fmean(row["flip_rate"] for row in settled if "flip_rate" in row)
    mus = [row["mu"] for row in settled if "mu" in row]
    return Row(sparse_loss, loss, layers_24, delivered_24, flip_rate, mu=statistics.fmean(mus) if mus else None)


# Measured with seeds 0, 1, 2; the margins below are a half of the least distance or less.
#
#              validation loss    above dense, at 5/6       above dense, at the end   flips / dense's      mu
#   dense      .735 .749 .743
#   half-width                    +.010 +.006 +.017         +.009 +.009 +.012         1.05 0.91 0.97
#   FST                           +.046 +.041 +.041         +.011 +.014 +.016         (4x4 tiles)          .70 .63 .71
#   S-STE                         +.051 +.026 +.034         +.018 +.027 +.021         0.99 0.97 1.02
#   SR-STE                        +.104 +.089 +.115         +.054 +.082 +.053         2.96 2.87 2.78
@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    corpus = chain(tmp_path_factory.mktemp("chain"))
    assert len(corpus.train) > SIZE.steps * SIZE.batch * SIZE.context  # nothing is read twice
    return {case: trained(case, corpus, seed=0) for case in CASES}


def test_every_method_delivers_what_it_says(rows: dict[str, Row]) -> None:
    trains_24 = {case: row.layers_24 for case, row in rows.items()}
    delivers_24 = {case: row.delivered_24 for case, row in rows.items()}
    assert trains_24 == {"dense": 0, "half-width": 0, "SR-STE": LAYERS, "FST": LAYERS, "S-STE": LAYERS}
    assert delivers_24 == {"dense": 0, "half-width": 0, "SR-STE": LAYERS, "FST": 0, "S-STE": LAYERS}


def test_dense_is_ahead_and_srste_is_last(rows: dict[str, Row]) -> None:
    for case, margin in (("half-width", 0.003), ("FST", 0.004), ("S-STE", 0.008)):
        assert rows[case].loss > rows["dense"].loss + margin, rows
    for case in ("FST", "S-STE"):
        assert rows[case].sparse_loss > rows["dense"].sparse_loss + 0.012, rows
    for other in ("FST", "S-STE", "half-width"):
        assert rows["SR-STE"].sparse_loss > rows[other].sparse_loss + 0.02, rows
        assert rows["SR-STE"].loss > rows[other].loss + 0.015, rows


def test_fst_wins_back_by_its_dense_sixth(rows: dict[str, Row]) -> None:
    """More than dense wins by the falling learning rate in the same steps."""
    fst, dense = rows["FST"], rows["dense"]
    assert fst.loss - dense.loss < fst.sparse_loss - dense.sparse_loss - 0.012, rows


def test_sste_flips_as_dense_does_and_srste_much_more(rows: dict[str, Row]) -> None:
    """On this toy the published decay does not hold SR-STE's masks; at GPT-2's shape it freezes them."""
    assert 0.75 < rows["S-STE"].flip_rate / rows["dense"].flip_rate < 1.3, rows
    assert rows["SR-STE"].flip_rate / rows["dense"].flip_rate > 2, rows


def test_the_controller_holds_its_band(rows: dict[str, Row]) -> None:
    """0.6 to 0.95, in the mean over the second half of the sparse steps."""
    assert rows["FST"].mu is not None and 0.55 < rows["FST"].mu < 1.0, rows
