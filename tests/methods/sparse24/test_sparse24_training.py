"""2:4 training methods on one process: their equations, resume, recomputation, micro-batches, the controller."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sparse24_runs import METHODS, Rows, fit, masks_of, new_run
from torch import nn

from refusals import refused
from shoestring.errors import UserError
from shoestring.formats import Dense, FormatLinear, convert, parse_format
from shoestring.methods.sparse24.format import Sparse24
from shoestring.methods.sparse24.kernels.masks import mask24
from shoestring.methods.sparse24.optim import SparseAdam
from shoestring.methods.sparse24.training import (
    FlipController,
    FlipMeter,
    MaskedDecay,
    MaskRefresh,
    NoiseClock,
    check_torch,
    count_24,
    sparse_layers,
)
from shoestring.methods.sparse24.tune import multiplied
from shoestring.model import Decoder, ModelSpec
from shoestring.runlog import RunLog
from shoestring.state.checkpointer import Checkpointer
from shoestring.train.step import Hook, Run


def series(run: Run, name: str) -> dict[int, float]:
    return {row["step"]: row[name] for row in run.log.history if name in row}


def metrics(run: Run) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if k not in ("time", "tokens_per_s")} for row in run.log.history]


def one_layer(format: str, width: int = 16) -> Run:
    torch.manual_seed(0)
    model = nn.Sequential(FormatLinear(width, 8, bias=False, format=parse_format(format)))
    return Run(model, torch.optim.SGD(model.parameters(), lr=0.1), None, RunLog(None, quiet=True))  # type: ignore[arg-type]


def test_masked_decay_pulls_masked_weights_only() -> None:
    run = one_layer("sparse24")
    layer: Any = run.model[0]  # type: ignore[index]
    layer.weight.grad = torch.ones_like(layer.weight)
    MaskedDecay(0.5).before_step(run)
    mask, w = mask24(layer.weight), layer.weight.detach()
    assert torch.equal(layer.weight.grad, torch.where(mask, 1.0, 1.0 + 0.5 * w))
    MaskedDecay(lambda step: 2.0 * step).before_step(run)  # step 0: nothing
    assert torch.equal(layer.weight.grad, torch.where(mask, 1.0, 1.0 + 0.5 * w))
    before, grad = w.clone(), layer.weight.grad.clone()
    MaskedDecay(0.5, on="weight").before_step(run)  # lr=0.1, past the optimizer
    assert torch.allclose(layer.weight, torch.where(mask, before, 0.95 * before))
    assert torch.equal(layer.weight.grad, grad)


def test_masks_are_refreshed_when_due_and_the_change_is_logged() -> None:
    run = one_layer("sparse24:tile:held")
    layer: Any = run.model[0]  # type: ignore[index]
    old = layer.weight_mask.clone()
    with torch.no_grad():
        layer.weight.normal_()
    hook = MaskRefresh(every=3)
    for run.step in (1, 2):
        hook.after_step(run)
        assert torch.equal(layer.weight_mask, old)
    run.step = 3
    hook.after_step(run)
    want = Sparse24("tile").choose(layer.weight)
    assert torch.equal(layer.weight_mask, want) and not torch.equal(want, old)
    assert series(run, "mask_change") == {3: pytest.approx(float((want != old).float().mean()))}
    with torch.no_grad():
        layer.weight[2, 3] = float("nan")
    run.step = 6
    refused("0: 1 weights are NaN or infinite at step 6", hook.after_step, run)


def test_masks_are_not_refreshed_when_no_step_would_use_them() -> None:
    run = one_layer("sparse24:tile:held")
    layer: Any = run.model[0]  # type: ignore[index]
    old = layer.weight_mask.clone()
    with torch.no_grad():
        layer.weight.normal_()
    run.step = 6
    MaskRefresh(every=3, until=6).after_step(run)
    assert torch.equal(layer.weight_mask, old)
    MaskRefresh(every=3, until=7).after_step(run)
    assert not torch.equal(layer.weight_mask, old)


@pytest.mark.parametrize(
    ("format", "fails"),
    [
        ("sparse24", False), ("sparse24:soft", False), ("sparse24:soft:mvue", True), ("sparse24:held", True),
        ("sparse24:tile:held:mvue", True),
    ],
)  # fmt: skip
def test_several_processes_need_a_newer_torch(format: str, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pruning = parse_format(format)
    assert isinstance(pruning, Sparse24)
    for version in ("2.12.0a0+nv26", "2.13.1+cu130"):
        monkeypatch.setattr(torch, "__version__", version)
        check_torch(pruning, 2)
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu128")
    check_torch(pruning, 1)
    if not fails:
        check_torch(pruning, 2)
        return
    with pytest.raises(UserError, match=r"on 2 processes needs torch 2.12 or newer, this is 2.11.0") as said:
        check_torch(pruning, 2)
    assert ("weight_grad=exact" in str(said.value)) == (not pruning.hold_mask)  # where that would help


def test_flip_rate_and_magnitudes_of_one_step() -> None:
    run = one_layer("sparse24")
    layer: Any = run.model[0]  # type: ignore[index]
    meter = FlipMeter(every=2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([4.0, 3.0, 2.0, 1.0] * 4).expand(8, 16))
    run.step = 1
    meter.before_step(run)
    with torch.no_grad():
        layer.weight[:, 0] = 0.5  # 0 leaves, 2 comes: two flips in one of four groups
    run.step = 2
    meter.after_step(run)
    assert meter.rate == pytest.approx(2 / 16)
    assert series(run, "kept_magnitude")[2] == pytest.approx((3 * 7 + 5) / 8)
    assert series(run, "masked_magnitude")[2] == pytest.approx((3 * 3 + 1.5) / 8)
    run.step = 3
    meter.after_step(run)
    assert meter.rate is None and len(run.log.history) == 1


@pytest.mark.parametrize(
    ("method", "stops"), [("controlled", (3, 11, 18)), ("sste", (7,)), ("slorb", (7,)), ("cast", (7,))]
)
@pytest.mark.few(3)
def test_killed_and_resumed_bit_for_bit(tmp_path: Path, method: str, stops: tuple[int, ...]) -> None:
    whole, hooks = new_run(method)
    fit(whole, 20, hooks)

    class Die(Hook):
        def after_step(self, run: Run) -> None:
            if run.step == stop + 1:
                raise RuntimeError("killed")

    for stop in stops:  # in the probe, while sparse, after the dense finish
        folder = tmp_path / str(stop)
        part, hooks = new_run(method, folder)
        with pytest.raises(RuntimeError, match="killed"):
            fit(part, 20, [*hooks, Die()], checkpointer=Checkpointer(folder / "checkpoints", every=stop))
        again, hooks = new_run(method, folder)
        fit(again, 20, [*hooks, Hook()], checkpointer=Checkpointer(folder / "checkpoints", every=100))
        assert metrics(again) == metrics(whole)
        state = again.model.state_dict()
        for name, value in whole.model.state_dict().items():
            assert torch.equal(state[name], value), name


@pytest.mark.parametrize(("version", "bad"), [(3, 5), (16, 18), (3, 18)])
@pytest.mark.parametrize("method", ["controlled", "started", "fst"])
@pytest.mark.few(2)
def test_a_run_that_goes_back_over_a_change_of_phase_is_the_same_run(
    tmp_path: Path, method: str, version: int, bad: int
) -> None:
    """As rollback does it, in one process: out of the sparse steps into the dense start, out of the dense finish into
    the sparse steps, and out of the dense finish into the dense start."""
    whole, hooks = new_run(method)
    fit(whole, 20, hooks)
    run, hooks = new_run(method, tmp_path)
    fit(run, version, hooks, checkpointer=Checkpointer(tmp_path / "checkpoints", every=version))
    fit(run, bad, hooks)
    next(h for h in hooks if isinstance(h, NoiseClock)).next += 7  # the bad step ended in the middle
    fit(run, 20, hooks, checkpointer=Checkpointer(tmp_path / "checkpoints", every=100))
    assert metrics(run) == metrics(whole)
    state = run.model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in whole.model.state_dict().items())


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_and_logs(method: str) -> None:
    run, hooks = new_run(method)
    losses = fit(run, 20, hooks)
    assert min(losses[-3:]) < losses[0]
    counted = count_24(run.model)
    assert counted["layers"] == 6  # gate, up, down in two blocks
    assert counted["layers_24"] == (0 if method in ("fst", "controlled", "cast", "dense") else 6)
    rates = series(run, "flip_rate")
    assert sorted(rates) == [2, 4, 6, 8, 10, 12, 14, 16, 18, 20] and all(0 <= r <= 1 for r in rates.values())
    assert all(series(run, "masked_magnitude")[s] < series(run, "kept_magnitude")[s] for s in rates)


def test_cast_shrinks_what_it_will_prune() -> None:
    ratio = {}
    for method in ("dense", "cast"):
        run, hooks = new_run(method)
        fit(run, 20, hooks)
        ratio[method] = series(run, "masked_magnitude")[20] / series(run, "kept_magnitude")[20]
    assert ratio["cast"] < 0.9 * ratio["dense"]
    for layer in sparse_layers(run.model, dense_phase=True):
        layer.linear.end_dense_phase()
    assert count_24(run.model) == {"layers": 6, "layers_24": 6}


@pytest.mark.parametrize("method", ["fst", "slorb", "sste", "srste"])
@pytest.mark.few(2)
def test_recomputed_blocks_draw_the_same_noise_and_see_the_same_masks(method: str) -> None:
    losses, masks, weights = {}, {}, {}
    for recompute in (False, True):
        run, hooks = new_run(method, recompute=recompute)
        losses[recompute], masks[recompute] = fit(run, 6, hooks), masks_of(run)
        weights[recompute] = run.model.get_parameter("blocks.0.mlp.up.weight").detach()
    assert losses[False] == losses[True] and masks[False] == masks[True]
    assert torch.equal(weights[False], weights[True])


@pytest.mark.parametrize("method", ["fst", "sste", "srste"])
def test_recomputed_products_see_the_masks_of_the_forward(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no mask is held and every forward chooses its own."""
    seen: list[torch.Tensor] = []
    multiply = Sparse24.train_with

    def noting(format: Sparse24, used: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(used.detach() != 0)
        return multiply(format, used, *rest)

    monkeypatch.setattr(Sparse24, "train_with", noting)
    run, hooks = new_run(method, recompute=True)
    fit(run, 6, hooks, data=Rows(micro=4))
    passes = [seen[i : i + 12] for i in range(0, len(seen), 12)]
    assert len(seen) == 6 * 12  # gate, up, down of two blocks, and again in the backward pass, last block first
    for masks in passes:
        for there, again in zip(masks[:6], [*masks[9:], *masks[6:9]], strict=True):
            assert torch.equal(there, again)
    assert not torch.equal(passes[0][0], passes[-1][0])  # masks did change meanwhile


def test_micro_batches_draw_what_the_whole_batch_draws() -> None:
    losses = []
    for micro in (4, 1):
        run, hooks = new_run("fst")
        losses.append(fit(run, 6, hooks, data=Rows(micro=micro)))
    assert max(abs(a - b) for a, b in zip(*losses, strict=True)) < 1e-5
    run, hooks = new_run("fst")
    clock = next(h for h in hooks if isinstance(h, NoiseClock))
    clock.linears = []  # noise that neither step nor token changes is another run
    assert max(abs(a - b) for a, b in zip(fit(run, 6, hooks), losses[0], strict=True)) > 1e-5


def test_any_seed_keys_the_noise() -> None:
    run = one_layer("sparse24:soft:mvue")
    for seed in (0, 2**63 - 1, 2**63 + 5, 2**70):
        (linear,) = NoiseClock(run.model, seed=seed).linears
        assert int(linear.weight_seed) == seed % 2**63  # type: ignore[arg-type]


def test_the_dense_finish_is_dense_and_keeps_the_checkpoint_layout() -> None:
    run, hooks = new_run("fst")
    names = list(run.model.state_dict())
    fit(run, 15, hooks)
    assert len(sparse_layers(run.model)) == 6
    fit(run, 20, hooks)
    assert not sparse_layers(run.model) and list(run.model.state_dict()) == names
    assert all(isinstance(x.linear.format, Dense) for x in sparse_layers(run.model, dense_phase=True))
    assert max(series(run, "mask_change")) == 16  # masks are left alone afterwards


def test_the_controller_probes_then_servoes_the_decay() -> None:
    run, hooks = new_run("controlled")
    controller = next(h for h in hooks if isinstance(h, FlipController))
    assert not sparse_layers(run.model)
    fit(run, 4, hooks)
    assert len(sparse_layers(run.model)) == 6 and controller.decay.strength == 0.0
    assert controller.reference > 0
    fit(run, 5, hooks)
    first = controller.decay.strength
    assert isinstance(first, float) and first > 0
    for mu, want in ((2.0, first * 1.5), (0.7, first * 1.5), (0.1, first)):
        controller.mu = None
        controller._adjust(mu)
        assert controller.decay.strength == pytest.approx(want)
    for _ in range(40):  # masks seem frozen for long: the decay shrinks, but not out of reach
        controller._adjust(0.1)
    assert controller.decay.strength == pytest.approx(first / 100)
    resumed = next(h for h in new_run("controlled")[1] if isinstance(h, FlipController))
    resumed.load_state_dict(controller.state_dict())
    resumed._adjust(0.1)
    assert resumed.decay.strength == pytest.approx(first / 100)
    refused(
        "older kind", resumed.load_state_dict, {"rates": 1.0, "lrs": 1.0, "mu": None, "strength": 0.0, "awake": False}
    )
    fit(run, 14, hooks)
    assert sorted(series(run, "mu")) == sorted(series(run, "masked_decay")) == [6, 8, 10, 12, 14]
    refused("at least 20", FlipController, run.model, FlipMeter(10), MaskedDecay(0.0), probe=10)


def test_growing_weights_flip_less_and_the_controller_knows_that() -> None:
    run, hooks = new_run("controlled")
    meter = next(h for h in hooks if isinstance(h, FlipMeter))
    servo = FlipController(run.model, meter, MaskedDecay(0.0), probe=4)
    servo.decay.strength = 1.0
    for step, rate, magnitude in ((2, 0.02, 0.1), (4, 0.02, 0.1), (6, 0.01, 0.2)):
        run.step, meter.rate, meter.magnitude = step, rate, magnitude
        servo.after_step(run)
    assert servo.mu == pytest.approx(1.0)  # flips halved, weights doubled
    meter.measures = lambda finished: True  # type: ignore[method-assign]
    meter.before_step(run)
    meter.after_step(run)
    weights = [x.linear.weight.detach().abs() for x in sparse_layers(run.model, dense_phase=True)]
    assert meter.magnitude == pytest.approx(float(sum(w.sum() for w in weights)) / sum(w.numel() for w in weights))


@pytest.mark.parametrize("rule", ["ast", "cast"])
def test_sparse_adam_is_its_equation(rule: Any) -> None:
    run = one_layer("sparse24:held", width=8)
    layer: Any = run.model[0]  # type: ignore[index]
    optimizer = SparseAdam(run.model, lr=0.1, rule=rule, strength=0.3, anneal=4, weight_decay=0.01)
    w, m, v = layer.weight.detach().double(), torch.zeros(8, 8).double(), torch.zeros(8, 8).double()
    for t in range(1, 7):
        g = torch.randn(8, 8, generator=torch.Generator().manual_seed(t))
        layer.weight.grad = g.clone()
        optimizer.step()
        masked, share = ~layer.weight_mask, min(1.0, t / 4)
        w = w * (1 - 0.1 * 0.01)
        m = 0.9 * m + 0.1 * g.double()
        pulled = m + share * 0.3 * w if rule == "ast" else (1 - share) * m + share * 0.3 * w.sign()
        u = torch.where(masked, pulled, m)
        v = 0.95 * v + 0.05 * u.square()
        w = w - 0.1 * (u / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
        torch.testing.assert_close(layer.weight.detach().double(), w, rtol=1e-5, atol=1e-6)
    state = optimizer.state[layer.weight]
    torch.testing.assert_close(state["exp_avg"].double(), m, rtol=1e-5, atol=1e-7)  # no trace of the pull


def test_sparse_adam_is_adamw_without_a_pull() -> None:
    runs = []
    for strength in (None, 0.0):
        run = one_layer("sparse24:held")
        run.model.append(nn.Linear(8, 4))  # type: ignore[operator]
        torch.manual_seed(1)
        for p in run.model.parameters():
            if p.requires_grad:
                p.data.normal_()
        params = [p for p in run.model.parameters() if p.requires_grad]
        if strength is None:
            decays = [{"params": [p for p in params if (p.dim() >= 2) == d], "weight_decay": 0.1 * d} for d in (1, 0)]
            optimizer: Any = torch.optim.AdamW(decays, lr=0.1, betas=(0.9, 0.95))
        else:
            optimizer = SparseAdam(run.model, lr=0.1, rule="ast", strength=strength, anneal=1)
        for t in range(4):
            for p in params[1:]:
                p.grad = torch.full_like(p, float(t - 1))
            optimizer.step()
        runs.append(params[1:])
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(("tp", "methods"), [("1", ["controlled", "sste", "cut"]), ("2", ["slorb"])])
def test_ranks_equal_one_process(run_ranks: Callable[..., str], tp: str, methods: list[str]) -> None:
    """FSDP2 over two processes, then tensor parallel: losses, flip rates, strengths and masks of one."""
    script = Path(__file__).with_name("sparse24_runs.py")
    out = run_ranks(2, script, "1" if tp == "2" else "2", tp, *methods)
    got = json.loads(next(x for x in out.splitlines() if x.startswith("RESULT ")).removeprefix("RESULT "))
    for method in methods:
        run, hooks = new_run(method)
        first, last = got["masks"][method]
        assert first == masks_of(run)
        fit(run, 20, hooks)
        want, seen = metrics(run), got["metrics"][method]
        # Gradients are summed in another order: a group whose weights tie up to rounding may choose otherwise.
        pairs = [pair for name, mask in masks_of(run).items() for pair in zip(mask, last[name], strict=True)]
        assert sum(a != b for a, b in pairs) <= len(pairs) // 1000
        assert [row.keys() for row in seen] == [row.keys() for row in want]
        for mine, theirs in zip(want, seen, strict=True):
            for key, value in mine.items():
                slack = 3e-4 if key in ("flip_rate", "mask_change") else 2e-6  # one such group
                assert theirs[key] == pytest.approx(value, rel=2e-5, abs=slack), (method, key, mine, theirs)


def test_gate_and_up_are_measured_as_one_weight() -> None:
    spec = ModelSpec(
        vocab_size=32, d_model=64, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=32, d_ff=128, max_positions=16
    )
    model = Decoder(spec)
    convert(model, [("*.mlp.*", Sparse24("tile", weight_grad="mvue"))])
    shapes = [shape for _, shape in multiplied(model)]
    assert shapes == [(256, 64), (256, 64), (64, 128)]
    model.blocks[0].mlp.down.start_dense_phase()  # type: ignore[union-attr,operator]
    assert [shape for _, shape in multiplied(model)] == shapes, "a dense phase ends"
    convert(model, [("*.mlp.down", Sparse24())])
    assert [shape for _, shape in multiplied(model)] == [(128, 64), (128, 64), (64, 128)]
