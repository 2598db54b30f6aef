"""Training with 2:4 weights: FST, S-STE, SR-STE as hooks around the ordinary loop.

A method is a Format (format.py: what the products see) and a few of these hooks:

    SR-STE   Sparse24()                             MaskedDecay
    FST      Sparse24("tile", held, mvue)           NoiseClock, MaskRefresh, MaskedDecay, DenseFinish
    S-STE    Sparse24("soft", mvue)                 NoiseClock
    all      FlipMeter: flip rate and magnitudes of kept and masked weights
    FST      FlipController: finds the strength of the decay

The flip rate is ||M_t xor M_{t-1}||_1 / number of weights, M_t the mask chosen from the weights after step t (even if
the method does not use a new mask at every step, so that all methods and a dense run compare).

Masks are state of the Format and sharded with the weight; every rank writes its own rows. Hooks act on layers outside a
dense phase, so not after DenseFinish. sparse24_optim.py has optimizers that keep the decay out of the momentum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoestring.errors import UserError
from shoestring.formats import Format, FormatLinear, convert, pack
from shoestring.formats.linear import full, like_weight, local
from shoestring.formats.rounding import cast_weight
from shoestring.mesh import Mesh
from shoestring.methods.sparse24.format import Sparse24
from shoestring.methods.sparse24.kernels.masked_decay import masked_decay_
from shoestring.methods.sparse24.kernels.masks import is_24, mask24_eager
from shoestring.methods.sparse24.slorb import Slorb
from shoestring.methods.sparse24.stacked import Stacked
from shoestring.model import load_model, save_model
from shoestring.report import Section, metric_curves
from shoestring.runlog import RunLog, read_metrics
from shoestring.train.gradients import cut_axes
from shoestring.train.step import Hook, PassCounter, Run

# Distance between the token positions of two ranks where tokens_per_step is not given.
FAR = 1 << 24
PULL_OF_WEIGHT = 3.0  # what stands for |gradient| / |weight| where masked decay acts on weights
LEAST = 0.01  # smallest decay that FlipController sets, as a part of its first strength
TORCH_FOR_RANKS = (2, 12)  # the first version that shards masks and row numbers (integer Parameters)


@dataclass(frozen=True)
class SparseLayer:
    """A layer and how it is pruned, or will be after its dense phase."""

    name: str
    linear: FormatLinear
    pruning: Sparse24

    @property
    def is_pruned(self) -> bool:
        return self.linear.suspended is None

    @torch.no_grad()
    def choose(self) -> Tensor:
        """The mask of this rank's part, chosen from the current weight."""
        if self.pruning.select == "tile":
            # FSDP2 may cut inside a tile: choose on the whole weight.
            whole = self.pruning.choose(full(self.linear.weight))
            return local(like_weight(whole, self.linear.weight))
        return mask24_eager(local(self.linear.weight).detach())

    def mask(self) -> Tensor:
        """The mask in use, of this rank's part."""
        return local(self.linear.weight_mask) if self.pruning.hold_mask else self.choose()  # type: ignore[arg-type]


def sparse_layers(model: nn.Module, *, dense_phase: bool = False) -> list[SparseLayer]:
    """Layers that train with a 2:4 Format; with `dense_phase` also those in a dense phase."""
    found = []
    for name, linear in model.named_modules():
        if isinstance(linear, FormatLinear) and not linear.packed:
            pruning = pruning_of(linear.format if linear.suspended is None or not dense_phase else linear.suspended)
            if pruning is not None:
                found.append(SparseLayer(name, linear, pruning))
    return found


def start_dense_phase(model: nn.Module) -> None:
    for layer in sparse_layers(model):
        layer.linear.start_dense_phase()


def end_dense_phase(model: nn.Module) -> None:
    for layer in sparse_layers(model, dense_phase=True):
        layer.linear.end_dense_phase()


def pruning_of(format: Format) -> Sparse24 | None:
    while isinstance(format, Slorb | Stacked):
        format = format.first
    return format if isinstance(format, Sparse24) else None


def torch_version() -> tuple[int, ...]:
    """Major and minor. Not a full version, in which a vendor's 2.12.0a0 would be before 2.12."""
    return tuple(int(number) for number in torch.__version__.split(".")[:2])


def check_torch(pruning: Sparse24, num_processes: int) -> None:
    """UserError for several processes on a torch that cannot shard masks and row numbers."""
    sharded = pruning.hold_mask or pruning.weight_grad == "mvue"
    if num_processes == 1 or not sharded or torch_version() >= TORCH_FOR_RANKS:
        return
    newer = ".".join(str(number) for number in TORCH_FOR_RANKS)
    other = "" if pruning.hold_mask else ", or weight_grad=exact"
    raise UserError(
        f"{pruning.label} on {num_processes} processes needs torch {newer} or newer, this is {torch.__version__}: "
        f"install that, or train on one process{other}"
    )


@torch.no_grad()
def pruned_weight(linear: FormatLinear, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight that the forward multiplies with; of a SLoRB layer the pruned term, without the branch."""
    if isinstance(linear.format, Slorb):
        return linear.format.first.fake(cast_weight(local(linear.weight), dtype), linear.format_state())
    return linear.effective_weight(dtype)


def count_24(model: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, int]:
    """How many layers train with a 2:4 Format, and how many of them multiply with a 2:4 weight."""
    layers = sparse_layers(model, dense_phase=True)
    held = sum(is_24(pruned_weight(layer.linear, dtype)) for layer in layers)
    return {"layers": len(layers), "layers_24": held}


# -- clocks --------------------------------------------------------------------------------------------------
class NoiseClock(Hook, PassCounter):
    """Keys the random numbers of MVUE by seed, layer, step and position of the token in the step.

    With `tokens_per_step` (over all ranks) a rank draws for its tokens what a single process would have drawn; without
    it ranks draw different numbers, but the result depends on how the batch is split.
    """

    def __init__(self, model: nn.Module, *, seed: int = 0, tokens_per_step: int = 0, mesh: Mesh | None = None) -> None:
        layers = sparse_layers(model, dense_phase=True)
        self.linears = [x.linear for x in layers if x.pruning.weight_grad == "mvue"]
        rank, size = (0, 1) if mesh is None else (mesh.dp_rank, mesh.dp_size)
        self.first = rank * (tokens_per_step // size or FAR)
        self.next = self.first
        for number, linear in enumerate(self.linears):
            _set_clocks(linear, seed=seed % 2**63, layer=number, step=0, token=self.first)
        model.register_forward_pre_hook(self._count)

    def _count(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        # A hook on the whole model: it does not run again when blocks are recomputed in the backward pass.
        if model.training and torch.is_grad_enabled():
            for linear in self.linears:
                _set_clocks(linear, token=self.next)
            self.next += args[0].numel()

    def rewind(self) -> None:
        self.next = self.first

    def after_step(self, run: Run) -> None:
        self.rewind()
        for linear in self.linears:
            _set_clocks(linear, step=run.step)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rewind()  # a run that goes back may have left its bad step in the middle


def _set_clocks(linear: FormatLinear, **values: int) -> None:
    for name, value in values.items():
        getattr(linear, f"weight_{name}").fill_(value)


# -- masks ---------------------------------------------------------------------------------------------------
class MaskRefresh(Hook):
    """Choose held masks again every `every` steps; logs mask_change, the share of the masks that changed.

    `dense_phase`: also for layers that compute densely (CAST). `until`: the step from which masks stay, so that a model
    is trained with the masks it is delivered with.
    """

    def __init__(self, every: int = 40, *, dense_phase: bool = False, until: int | None = None) -> None:
        if every < 1:
            raise UserError(f"masks cannot be refreshed every {every} steps: use 1 or more")
        self.every, self.dense_phase, self.until = every, dense_phase, until

    def after_step(self, run: Run) -> None:
        if run.step % self.every == 0 and (self.until is None or run.step < self.until):
            self.refresh(run)

    @torch.no_grad()
    def refresh(self, run: Run) -> None:
        layers = [x for x in sparse_layers(run.model, dense_phase=self.dense_phase) if x.pruning.hold_mask]
        if not layers:
            return
        changes = []
        for layer in layers:
            mask, new = layer.mask(), layer.choose()
            bad = ~local(layer.linear.weight).isfinite()
            changes.append((layer.linear.weight, torch.stack([(mask != new).sum(), bad.sum()])))
            mask.copy_(new)
        per_layer = sum_over_cuts(changes).tolist()
        for layer, (_, bad) in zip(layers, per_layer, strict=True):
            if bad:
                raise UserError(
                    f"{layer.name}: {int(bad)} weights are NaN or infinite at step {run.step}; lower the "
                    f"learning rate and resume from an earlier checkpoint in {run.log.folder}/checkpoints"
                )
        run.log.log(run.step, mask_change=sum(c for c, _ in per_layer) / _num_weights(layers))


class MaskedDecay(Hook):
    """grad += strength * W * (1 - M), after the clip and before the optimizer (FST, eq. 10; SR-STE).

    On the gradient, not on the weight: Adam divides by the gradient's size, so weights with small gradients, whose
    flips are noise, are pulled harder. Muon makes all directions of a matrix equally long, the pull with them:
    `on="weight"` is decoupled decay instead, W -= lr * strength * W * (1 - M).
    """

    def __init__(
        self, strength: float | Callable[[int], float], on: Literal["gradient", "weight"] = "gradient"
    ) -> None:
        self.strength, self.on = strength, on

    @torch.no_grad()
    def before_step(self, run: Run) -> None:
        strength = self.strength(run.step) if callable(self.strength) else self.strength
        if not strength:
            return
        rates = {id(p): group["lr"] for group in run.optimizer.param_groups for p in group["params"]}
        for layer in sparse_layers(run.model):
            weight = layer.linear.weight
            if self.on == "weight":
                masked_decay_(local(weight), local(weight), layer.mask(), -rates[id(weight)] * strength)
            elif weight.grad is not None:
                masked_decay_(local(weight.grad), local(weight), layer.mask(), strength)

    def first_strength(self, run: Run, share: float) -> float:
        """Where a controller begins: the pull is `share` of the gradient, or so much of the weight in 1 / lr steps."""
        return share * (gradient_ratio(sparse_layers(run.model)) if self.on == "gradient" else PULL_OF_WEIGHT)


class DenseStart(Hook):
    """A MaskedDecay of given strength whose layers compute densely before step `until`; a FlipController starts densely
    by itself.

    Masks of random weights that stay for many steps cost loss (experiments/sparse24.md). It wraps the decay, so that
    the number of hooks, which a checkpoint must match, is that of runs without it.
    """

    def __init__(self, model: nn.Module, decay: MaskedDecay, until: int) -> None:
        self.model, self.decay, self.until, self.done = model, decay, until, False
        start_dense_phase(model)

    def before_step(self, run: Run) -> None:
        self.decay.before_step(run)

    def after_step(self, run: Run) -> None:
        if run.step >= self.until and not self.done:
            self._end_dense_phase()
            MaskRefresh(1).refresh(run)
            run.log.say(f"step {run.step}: sparse")

    def _end_dense_phase(self) -> None:
        self.done = True
        end_dense_phase(self.model)

    def state_dict(self) -> dict[str, Any]:
        return {"started": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("started", True):  # a MaskedDecay by itself, sparse from the first step, has no state
            self._end_dense_phase()
        else:  # a run that goes back may be sparse by now
            self.done = False
            start_dense_phase(self.model)


class DenseFinish(Hook):
    """From step `at` on all layers compute densely: no mask, no decay, no MVUE (FST: the last sixth).

    `starts_dense`: a DenseStart or FlipController is listed before it.
    """

    def __init__(self, model: nn.Module, at: int, *, starts_dense: bool = False) -> None:
        self.model, self.at, self.starts_dense, self.done = model, at, starts_dense, False

    def after_step(self, run: Run) -> None:
        if run.step >= self.at and not self.done:
            self._start_dense_phase()
            run.log.say(f"step {run.step}: dense from here on")

    def _start_dense_phase(self) -> None:
        self.done = True
        start_dense_phase(self.model)

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["done"]:
            self._start_dense_phase()
        elif self.done:  # a run that goes back
            self.done = False
            if not self.starts_dense:  # else that hook has just set the phase of the version, which may be dense
                end_dense_phase(self.model)


# -- flip rate -----------------------------------------------------------------------------------------------
class FlipMeter(Hook):
    """Every `every` steps: flip_rate of that one step, and mean |w| of kept and of masked weights.

    Costs two mask searches per measured step. Layers in a dense phase are measured as if they were pruned.
    """

    def __init__(self, every: int = 10) -> None:
        self.every = every
        self.rate: float | None = None  # of the step just made, when it was measured
        self.magnitude = 0.0  # mean |w| at the last measurement
        self._before: list[Tensor] = []

    def measures(self, finished: int) -> bool:
        return finished % self.every == 0

    def before_step(self, run: Run) -> None:
        if self.measures(run.step + 1):
            self._before = [layer.choose() for layer in sparse_layers(run.model, dense_phase=True)]

    @torch.no_grad()
    def after_step(self, run: Run) -> None:
        self.rate = None
        layers = sparse_layers(run.model, dense_phase=True)
        if not self.measures(run.step) or not layers:
            return
        counts = []
        for layer, before in zip(layers, self._before, strict=True):
            after, size = layer.choose(), local(layer.linear.weight).abs()
            kept = size.masked_fill(~after, 0.0).sum(dtype=torch.float64)
            counted = torch.stack([(before != after).sum().double(), kept, size.sum(dtype=torch.float64)])
            counts.append((layer.linear.weight, counted))
        self._before = []
        flips, kept_sum, whole_sum = sum_over_cuts(counts).sum(0).tolist()
        num = _num_weights(layers)
        self.rate, self.magnitude = flips / num, whole_sum / num
        run.log.log(
            run.step,
            flip_rate=self.rate,
            kept_magnitude=2 * kept_sum / num,
            masked_magnitude=2 * (whole_sum - kept_sum) / num,
        )


def check_probe(probe: int, every: int) -> None:
    if probe < 2 * every:
        raise UserError(
            f"a probe of {probe} steps (probe=) measures the flip rate less than twice: give at least {2 * every}, or "
            f"measure more often than every {every} steps (flip_every=)"
        )


class FlipController(Hook):
    """Sets the strength of a MaskedDecay by the flip rate.

    The first `probe` steps train densely and measure the flip rate r that the masks *would* have had. The reference is
    r * |w| / lr over the second half of them, |w| the mean magnitude of the weights. After that, at every measurement

        mu = r' * |w'| / (reference * lr)      smoothed over about `memory` measurements

    is compared with the band: above it masks flip too much and the decay grows by `gain`, below it they freeze and it
    shrinks. FST finds mu in [0.6, 0.95] to be healthy by trying several strengths; this applies the rule all the time.
    The first strength is `start` * |grad| / |weight|, which has the right unit for any model and loss; it never falls
    below LEAST of that, so that it can grow again in time.

    Why |w|: weights grow, and the same step flips fewer of them. In a dense GPT-2 run r / lr halved from the warm-up to
    the end while r * |w| / lr stayed within a quarter; by r alone the masks of a healthy run would seem to freeze.

    Cost: `probe` dense steps, and two mask searches per measured step. List it after its FlipMeter and MaskedDecay and
    before DenseFinish.
    """

    def __init__(
        self,
        model: nn.Module,
        meter: FlipMeter,
        decay: MaskedDecay,
        *,
        probe: int,
        band: tuple[float, float] = (0.6, 0.95),
        gain: float = 1.5,
        memory: float = 3.0,
        start: float = 0.03,
    ) -> None:
        check_probe(probe, meter.every)
        self.model, self.meter, self.decay = model, meter, decay
        self.probe, self.band, self.gain, self.memory, self.start = probe, band, gain, memory, start
        self.rates = self.lrs = self.first = 0.0
        self.mu: float | None = None
        decay.strength = 0.0
        start_dense_phase(model)

    @property
    def reference(self) -> float:
        """Flip rate of the dense run times mean |w| per unit of learning rate."""
        return self.rates / self.lrs if self.lrs else 0.0

    def before_step(self, run: Run) -> None:
        if run.step >= self.probe and self.decay.strength == 0.0:
            self.decay.strength = self.first = self.decay.first_strength(run, self.start)

    def after_step(self, run: Run) -> None:
        lr, rate = float(run.optimizer.param_groups[0]["lr"]), self.meter.rate
        if rate is not None:
            rate *= self.meter.magnitude
        if rate is not None and self.probe // 2 <= run.step <= self.probe:
            self.rates, self.lrs = self.rates + rate, self.lrs + lr
        elif rate is not None and run.step > self.probe and sparse_layers(self.model):
            self._adjust(rate / max(self.reference * lr, 1e-12))
            assert self.mu is not None and isinstance(self.decay.strength, float)
            run.log.log(run.step, mu=self.mu, masked_decay=self.decay.strength)
        if run.step == self.probe:
            end_dense_phase(self.model)
            MaskRefresh(1).refresh(run)
            run.log.say(f"step {run.step}: sparse; a dense run flips {self.reference:.3g} x lr / |w| per step")

    def _adjust(self, mu: float) -> None:
        share = 1 / self.memory
        self.mu = mu if self.mu is None else (1 - share) * self.mu + share * mu
        assert isinstance(self.decay.strength, float)
        if self.mu > self.band[1]:
            self.decay.strength *= self.gain
        elif self.mu < self.band[0]:
            self.decay.strength = max(self.decay.strength / self.gain, LEAST * self.first)

    def state_dict(self) -> dict[str, Any]:
        awake = any(layer.is_pruned for layer in sparse_layers(self.model, dense_phase=True))
        return {
            "rates_by_weight": self.rates, "lrs": self.lrs, "mu": self.mu, "strength": self.decay.strength,
            "first": self.first, "awake": awake,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "rates_by_weight" not in state:
            raise UserError(
                "this checkpoint has a flip-rate controller of an older kind, whose reference does not know that "
                "weights grow; resume it with the version that wrote it, or start a new run"
            )
        self.rates, self.lrs, self.mu = state["rates_by_weight"], state["lrs"], state["mu"]
        self.decay.strength, self.first = state["strength"], state["first"]
        # A run that goes back may be in another phase than the version.
        (end_dense_phase if state["awake"] else start_dense_phase)(self.model)


# -- sums over a sharded model -------------------------------------------------------------------------------
def gradient_ratio(layers: Iterable[SparseLayer]) -> float:
    """|gradient| / |weight| over the layers."""
    grad, weight = _squares_of_gradients_and_weights(layers)
    return math.sqrt(grad) / max(math.sqrt(weight), 1e-30)


def gradient_rms(layers: Iterable[SparseLayer]) -> float:
    """Root mean square of the layers' gradients."""
    layers = list(layers)
    return math.sqrt(_squares_of_gradients_and_weights(layers)[0] / max(1, _num_weights(layers)))


@torch.no_grad()
def _squares_of_gradients_and_weights(layers: Iterable[SparseLayer]) -> tuple[float, float]:
    """Summed over the layers that have a gradient."""
    weights = [x.linear.weight for x in layers]
    squares = [
        (w, torch.stack([local(t).square().sum(dtype=torch.float64) for t in (w.grad, w)]))
        for w in weights
        if w.grad is not None
    ]
    if not squares:
        return 0.0, 0.0
    grad, weight = sum_over_cuts(squares).sum(0).tolist()
    return grad, weight


def sum_over_cuts(values: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The stacked small tensors, each summed over the mesh axes that cut its weight."""
    total = torch.stack([value.double() for _, value in values])
    cuts: dict[tuple[Any, tuple[int, ...]], list[int]] = {}
    for i, (weight, _) in enumerate(values):
        cuts.setdefault(cut_axes(weight), []).append(i)
    for (mesh, axes), rows in cuts.items():
        part = total[rows]
        for axis in axes:
            dist.all_reduce(part, group=mesh.get_group(axis))
        total[rows] = part
    return total


def _num_weights(layers: Iterable[SparseLayer]) -> int:
    return sum(x.linear.in_features * x.linear.out_features for x in layers)


# -- delivery ------------------------------------------------------------------------------------------------
def save_packed(folder: Path, layers: str, dtype: torch.dtype) -> None:
    """Write packed/ beside model/: the same weights in 2:4 storage, in `dtype` (a GPU's decoding kernel needs 16
    bits)."""
    loaded = load_model(folder / "model", dtype=torch.float32)
    report = convert(loaded.model, [(layers, Sparse24())])
    for changed in report.changed:
        weight = loaded.model.get_parameter(f"{changed.name}.weight")
        if not is_24(weight):
            raise UserError(f"{changed.name} is not 2:4 after training; packing it would change the model")
    loaded.model.compute_dtype = dtype
    pack(loaded.model, dtype=dtype)
    save_model(folder / "packed", loaded.model, loaded.tokenizer)
    RunLog(None).say(f"{len(report.changed)} layers are 2:4; packed model in {folder}/packed")


def flip_plots(folder: Path) -> list[Section]:
    """Flip rate, magnitudes and the controller's mu against the step."""
    rows = read_metrics(folder / "metrics.jsonl")
    return [
        metric_curves(rows, "Flip rate", "share of the mask that one step changes", "flip_rate"),
        metric_curves(rows, "Kept and masked weights", "mean |w|", "kept_magnitude", "masked_magnitude"),
        metric_curves(rows, "Flip rate over that of a dense run", "mu", "mu"),
    ]
