"""The quality gate: a model that shrinking has broken is not delivered.

After any shrinking the layers are looked at. Those whose error is out of line with their kind are listed: such a layer
often wants more bits. A model is broken, and the run ends with an error, where

    a packed layer has become one value everywhere, or holds scales that are not finite
    the perplexity is not finite, or more than `max_perplexity` times that of the model before
    the predictions are not finite, or their mean KL to those of the model before is more than log(max_perplexity):
    as far from them as that perplexity would be, whatever the text. shrink/ptq and shrink/rtn measure it

`force=true` keeps it all the same.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.errors import UserError
from shoestring.formats.convert import format_hosts
from shoestring.formats.self_check import self_check
from shoestring.model import Decoder
from shoestring.report import Table
from shoestring.runlog import RunLog
from shoestring.shrink.chosen_grid import LayerError

MAX_PERPLEXITY = 10.0
VERIFIED_PARAMS = 2_000_000_000  # up to here one short input costs less than loading the model
KL_TOKENS = 128  # of the evaluated text, or of the calibration text
OUT_OF_LINE = 5.0  # times the median error of the layers of a kind


@dataclass(frozen=True)
class Outlier:
    name: str
    format: str
    error: float
    usual: float  # the median of its kind

    def __str__(self) -> str:
        times = f"{self.error / self.usual:.1f} times the median of its kind"
        return f"{self.name} ({self.format}): error {self.error:.3g}, {times}"


def outliers(layers: Sequence[LayerError], most: float = OUT_OF_LINE) -> list[Outlier]:
    """Layers whose output error (weight error where no text was seen) is out of line with their kind: the same place in
    other blocks, in the same format. The worst first."""
    kinds: dict[tuple[str, str, bool], list[tuple[str, float]]] = {}
    for layer in layers:
        measured = layer.output_error is not None
        error = layer.weight_error if layer.output_error is None else layer.output_error
        kind = ".".join("*" if part.isdigit() else part for part in layer.name.split("."))
        kinds.setdefault((kind, layer.format, measured), []).append((layer.name, error))
    found = []
    for (_, format, _), members in kinds.items():
        usual = median(error for _, error in members)
        found += [Outlier(name, format, e, usual) for name, e in members if usual > 0 and not e <= most * usual]
    return sorted(found, key=lambda o: -o.error / o.usual)


def outlier_table(found: Sequence[Outlier]) -> Table:
    rows = [[o.name, o.format, o.error, o.usual, o.error / o.usual] for o in found]
    note = f"More than {OUT_OF_LINE:g} times the median error of their kind. Give such layers more bits with rules=."
    return Table("Layers with a large error", ["layer", "format", "error", "median of its kind", "times"], rows, note)


@torch.no_grad()
def broken_layers(model: nn.Module) -> list[str]:
    """What is wrong with packed layers, one sentence each."""
    found = []
    for name, host in format_hosts(model):
        if not host.packed:
            continue
        weight = host.effective_weight(torch.float32)
        if not bool(weight.isfinite().all()):
            found.append(f"{name} ({host.format.label}) holds weights that are not finite")
        elif weight.numel() > 1 and bool(weight.amin() == weight.amax()):
            found.append(f"{name} ({host.format.label}) has collapsed: all of its weights are {float(weight.amin()):g}")
    return found


def broken_perplexity(rows: Sequence[dict[str, Any]], most: float) -> list[str]:
    """Of the last row against the first."""
    known = [row["perplexity"] for row in rows if row.get("perplexity") is not None]
    if len(known) < 2:
        return []
    before, after = float(known[0]), float(known[-1])
    if not math.isfinite(after):
        return [f"its perplexity is {after}"]
    if math.isfinite(before) and after > most * before:
        return [f"its perplexity is {after:,.4g}, {after / before:,.1f} times the original one (allowed: {most:g})"]
    return []


@torch.no_grad()
def predictions(model: Decoder, tokens: Tensor | None) -> Tensor | None:
    """Log-probabilities [T, V] of the tokens after the first of a text, fp32 on the CPU; None without a text."""
    if tokens is None:
        return None
    text_1T = tokens.flatten()[: min(KL_TOKENS, model.spec.max_positions)].long()[None].to(model.device)
    return model(text_1T)[0].float().log_softmax(-1).cpu()


def mean_kl(before_TV: Tensor | None, after_TV: Tensor | None) -> float | None:
    """Nats a token."""
    if before_TV is None or after_TV is None:
        return None
    return float((before_TV.exp() * (before_TV - after_TV)).sum(-1).mean())


def broken_predictions(kl: float | None, most: float) -> list[str]:
    if kl is None or kl <= math.log(most):  # False for NaN
        return []
    return [f"its KL divergence from the original model is {kl:.3g} nats per token (allowed: {math.log(most):.3g})"]


def verify_model(model: Decoder, verify: str) -> None:
    """The self-check with a few tokens, where `verify` (auto, true or false) asks for it."""
    if verify == "false" or (verify == "auto" and model.spec.num_params() > VERIFIED_PARAMS):
        return
    length = min(16, model.spec.max_positions)
    tokens = torch.arange(length, device=model.device)[None] * 7 % model.spec.vocab_size
    self_check(model, tokens)


def judge(
    model: nn.Module,
    log: RunLog,
    *,
    max_perplexity: float,
    force: bool,
    layers: Sequence[LayerError] = (),
    kl: float | None = None,
    problems: Sequence[str] | None = None,
) -> str | None:
    """List what is out of line; why the model is broken, or None. With `force` the reason is only said. `kl`: of
    `mean_kl`. `problems`: of a model without perplexity."""
    for outlier in (found := outliers(layers))[:10]:
        log.say(f"large error: {outlier}")
    if found[10:]:
        log.say(f"large error: {len(found) - 10} more layers, see report.html")
    if problems is None and not any(row.get("perplexity") for row in log.evaluations()):
        log.say("perplexity was not measured; give text=FILE to measure it")
    if kl is not None:
        lost = f"{100 * math.expm1(min(kl, 10)):.0f}% more perplexity"
        log.say(f"quality lost: KL divergence {kl:.3g} nats per token on {KL_TOKENS} tokens, {lost}")
    broken = [*broken_perplexity(log.evaluations(), max_perplexity), *broken_predictions(kl, max_perplexity)]
    broken += [*(problems or ()), *broken_layers(model)]
    for problem in broken:
        log.say(f"broken: {problem}")
    if not broken or force:
        return None
    more = f" ({len(broken)} problems in all, listed above)" if broken[1:] else ""
    return f"the shrunk model is broken: {broken[0]}{more}"


def refuse(reason: str | None, again: str, kept: str = "") -> None:
    """UserError for a broken model. `again`: the command, or part of it, that delivers it; `kept`: where it is now."""
    if reason is not None:
        raise UserError(
            f"{reason}. It is not delivered{f' but kept in {kept}' if kept else ''}. Use more bits, a smaller group or "
            f"another method; {again} force=true delivers it anyway"
        )


def set_aside(folder: Path) -> Path:
    """Rename a model folder that was written and turned out to be broken."""
    aside = folder.with_name(f"{folder.name}-broken")
    if aside.exists():
        shutil.rmtree(aside)
    return folder.rename(aside)
