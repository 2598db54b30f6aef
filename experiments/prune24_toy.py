"""Pruning and retraining in miniature: the effect of AST, its pull, its start and SLoRB on a model of a grammar.

    python -m experiments.prune24_toy            about 3 minutes of one CPU core

The text is a random grammar: each pair of 32 tokens has two successors, one three times as likely as the other, so the
best possible loss is 0.56 nats. A Llama of 2 blocks and 98,304 weights learns it in 400 steps of 1,024 tokens, is
pruned to 2:4 in every way and retrained for 80 steps. One seed; differences below 0.02 are noise. Unlike in real
models, no input channel is much larger than others, so Wanda is no better than magnitude, and every training token is
new.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.results import markdown, newest, provenance, record
from shoestring.errors import as_command
from shoestring.formats import parse_format
from shoestring.formats.convert import store_states
from shoestring.mesh import MeshConfig, open_mesh
from shoestring.methods.sparse24.prune import PRUNERS, prune, take_branches
from shoestring.methods.sparse24.retrain import Retrain, build_student, check_coverage, retrain
from shoestring.model import Decoder, ModelSpec, load_model, save_model
from shoestring.model.parallel import init_weights
from shoestring.runlog import RunLog
from shoestring.shrink.calibrate import walk
from shoestring.train.objectives import CrossEntropy
from shoestring.train.optim import adamw, warmup_cosine
from shoestring.train.step import Micro, Run
from shoestring.train.trainer import train

BENCH = "prune24_toy"
VOCAB, ROWS, CONTEXT = 32, 16, 64
STEPS, RETRAIN_STEPS = 400, 80
SPEC = ModelSpec(
    vocab_size=VOCAB, d_model=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, d_ff=192,
    max_positions=CONTEXT,
)  # fmt: skip
PLAIN, BOOSTED = "sparse24:held", "sparse24:held+slorb16"
NEVER = 1 << 30  # steps between new masks; those of the final weights are taken at the end all the same
# case: start, format, settings
TRAINED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "AST": ("sparsegpt", PLAIN, {}),
    "AST, masks of SparseGPT throughout": ("sparsegpt", PLAIN, {"refresh": NEVER}),
    "AST + SLoRB": ("sparsegpt+slorb", BOOSTED, {}),
    "AST, published pull 1e-4": ("sparsegpt", PLAIN, {"pull": 1e-4}),
    "AST, from the dense weights": ("dense", PLAIN, {}),
    "AST, from the dense weights, pull 1e-4": ("dense", PLAIN, {"pull": 1e-4}),
    "AST + SLoRB, trained projection": ("sparsegpt+slorb", f"{BOOSTED}:trained", {}),
    "CAST": ("dense", PLAIN, {"rule": "cast"}),
    "CAST, published pull 4e-7": ("dense", PLAIN, {"rule": "cast", "pull": 4e-7}),
}


class Grammar:
    """ROWS rows of CONTEXT tokens a step; another seed gives other text of the same grammar."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.table = torch.randint(0, VOCAB, (VOCAB, VOCAB, 2), generator=torch.Generator().manual_seed(0))

    def rows(self, num: int, length: int, step: int) -> Tensor:
        gen = torch.Generator().manual_seed(self.seed * 100_003 + step)
        out = list(torch.randint(0, VOCAB, (num, 2), generator=gen).unbind(1))
        while len(out) < length:
            rare = (torch.rand(num, generator=gen) < 0.25).long()
            out.append(self.table[out[-2], out[-1], rare])
        return torch.stack(out, 1)

    def step(self, step: int) -> list[Micro]:
        rows = self.rows(ROWS, CONTEXT + 1, step)
        index = torch.zeros(ROWS, CONTEXT, dtype=torch.int64)
        return [Micro(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), index)]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@torch.no_grad()
def loss(model: Decoder) -> float:
    """On 8 steps of held-out text."""
    objective, data = CrossEntropy(), Grammar(9)
    micros = [m for step in range(8) for m in data.step(step)]
    return sum(float(objective(model.eval(), m)) for m in micros) / sum(m.num_counted for m in micros)


class Toy:
    """A trained model in `folder`/dense, and its pruned starts beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.mesh = folder, open_mesh(MeshConfig(), "cpu")
        self.branches: dict[str, Any] = {"dense": {}}
        self.dense = Decoder(SPEC)
        init_weights(self.dense, 0)
        run = Run(self.dense, adamw(self.dense, lr=5e-3), self.mesh, RunLog(None, quiet=True))
        schedule = warmup_cosine(5e-3, warmup=20, steps=STEPS)
        train(run, Grammar(1), CrossEntropy(), steps=STEPS, schedule=schedule)
        save_model(folder / "dense", self.dense)

    def one_shot(self, name: str) -> float:
        """`name`: a method, with +slorb for a branch. The loss after pruning; keeps the start for training."""
        method, _, boosted = name.partition("+")
        model = load_model(self.folder / "dense").model
        rules = [("*", parse_format(BOOSTED if boosted else PLAIN))]
        prune(model, rules, walk(model, Grammar(3).rows(32, CONTEXT, 0)), PRUNERS[method])
        value = loss(model)
        self.branches[name] = take_branches(model)
        save_model(self.folder / name, model)
        return value

    def trained(self, case: str) -> tuple[float, list[float]]:
        """The loss after retraining, and the flip rates during it."""
        start, label, settings = TRAINED[case]
        rules = [("*", parse_format(label))]
        student = build_student(self.folder / start, rules, self.mesh)
        store_states(student, self.branches[start])
        chosen = Retrain(**{"steps": RETRAIN_STEPS, "lr": 2e-3, "warmup": 5, **settings})
        log = RunLog(None, quiet=True)
        run = Run(student, chosen.optimizer(student), self.mesh, log)
        retrain(run, self.dense, Grammar(5), chosen)  # type: ignore[arg-type]
        coverage = check_coverage(student, rules)
        assert coverage.layers == 14 and coverage.kept <= coverage.weights // 2
        return loss(student), [row["flip_rate"] for row in log.history if "flip_rate" in row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(TRAINED), choices=list(TRAINED), help="retrained ones")
    cases = parser.parse_args().cases
    with tempfile.TemporaryDirectory() as folder:
        toy = Toy(Path(folder))
        dense = loss(toy.dense)
        save("dense", dense, dense, {})
        for method in PRUNERS:
            for name in (method, f"{method}+slorb"):
                save(name, toy.one_shot(name), dense, {})
        for case in cases:
            value, rates = toy.trained(case)
            save(case, value, dense, {"flip_rate_first": rates[0], "flip_rate_last": rates[-1]})


def save(case: str, value: float, dense: float, quality: dict[str, Any]) -> None:
    steps = RETRAIN_STEPS if quality else 0
    record(
        bench=BENCH,
        case=case,
        metric="loss",
        unit="nats per token",
        samples=[value],
        baseline="dense",
        baseline_value=dense,
        ratio=dense / value,
        quality=quality,
        config={"d_model": SPEC.d_model, "layers": SPEC.num_layers, "steps": steps, "seed": 0},
        note="random grammar, 8,192 held-out tokens",
    )
    print(f"{case:40} {value:.4f}", flush=True)


def table() -> str:
    lines = newest(BENCH)
    rows = []
    for n in lines:
        first, last = (n["quality"].get(f"flip_rate_{k}") for k in ("first", "last"))
        flips = "" if first is None else f"{first:.4f} -> {last:.4f}"
        rows.append([n["case"], f"{n['value']:.3f}", flips])
    return markdown(["toy model", "loss, nats", "flip rate"], rows) + provenance(lines)


if __name__ == "__main__":
    as_command(main)
