"""Does every architecture compute what `transformers` computes, on every path? Largest difference of logits.

A tiny random model of each architecture is saved by `transformers`, loaded by us, and both compute the same tokens:

    prefill       the model's own forward over a whole text
    decode        the engine, a text in pieces and then token by token, with its KV cache
    fused         the engine's fused steps, where the architecture has them; CUDA graphs on a GPU
    fused int4    the same in bf16 with packed weights and their kernels, on a GPU, against our forward in fp32 of
                  these weights; `baseline_value` is that of our forward in bf16
    packed int8   weights rounded to 8 bits (one group per row), against `transformers` with the rounded weights
    cpu step      a token in one step on a CPU with inputs rounded to 8 bits, against our forward of the same layers

The difference is relative to the largest logit. It is the rounding of fp32 where the path computes the same function;
every line must stay below its bound, or the script fails. `baseline_value` is that of `transformers` against itself
with another attention (sdpa against eager): what such a difference is worth.

In bf16, rounding may choose another expert, which is another function. The fp32 forward is therefore computed again
with the experts that bf16 chose, row by row and layer by layer, and compared with that. `quality` has the share of rows
with other experts than fp32 chooses in any layer, and the difference with the experts that fp32 chooses.

    python -m benchmarks.models                     all of them; 1 min, CPU; on a GPU the fused steps are kernels
    python -m benchmarks.models --only llama,gemma2 --device cpu
"""

from __future__ import annotations

import argparse
import copy
import itertools
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.results import markdown, newest, provenance, record
from shoestring.formats import convert, pack, parse_format, use_kernels
from shoestring.formats.int8_activations import quantize_activations
from shoestring.kernels.lowbit.w4a8 import unusable
from shoestring.model import Decoder, load_model, transformer
from shoestring.model.transformer import MixtureOfExperts
from shoestring.serve.engine.block_pool import BlockPool, RowSpan
from shoestring.serve.engine.cpu_decode import executor_of
from shoestring.serve.engine.fused_decoder import FusedDecoder, unusable_experts
from shoestring.serve.engine.fused_experts import FusedExperts
from shoestring.serve.engine.runner import Batch, Runner

SMALL = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 63,
    "pad_token_id": 0,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64}
GEMMA = {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16}
OWN = {"fused int4": "our own forward in bf16"}  # baselines that are not those of `transformers`
LENGTH, CHUNK, BLOCK = 40, 16, 16
BOUNDS = {"cpu": 1e-5, "cuda": 2e-3}  # of the largest logit, in fp32; kernels on a GPU add in another order
BOUND_INT8 = 5e-2  # where inputs are rounded to 8 bits, against the same layers layer by layer


@dataclass(frozen=True)
class Architecture:
    title: str
    fields: dict[str, Any] = field(default_factory=dict)  # of its config, beside SMALL; None: it has no such field


@dataclass(frozen=True)
class Found:
    path: str
    value: float  # largest difference, of the largest logit
    bound: float
    own: float | None  # that of `transformers` with another attention, or of our own forward in bf16
    quality: dict[str, float] = field(default_factory=dict)


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("Llama, SmolLM2"),
    "mistral": Architecture("Mistral"),
    "qwen2": Architecture("Qwen2"),
    "qwen3": Architecture("Qwen3", {"head_dim": 16}),
    "gpt2": Architecture("GPT-2", GPT2),
    "gemma2": Architecture("Gemma 2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3_text": Architecture("Gemma 3 (text)", {**GEMMA, "num_hidden_layers": 6}),
    "phi3": Architecture("Phi-3, Phi-4", {"partial_rotary_factor": 0.5}),
    "olmo2": Architecture("OLMo 2"),
    "smollm3": Architecture("SmolLM3", {"num_hidden_layers": 4}),
    "gpt_neox": Architecture("GPT-NeoX, Pythia", {"num_key_value_heads": None}),
    "mixtral": Architecture("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": Architecture("Qwen2-MoE", {**MOE, "shared_expert_intermediate_size": 64}),
    "qwen3_moe": Architecture("Qwen3-MoE", {**MOE, "head_dim": 16, "norm_topk_prob": True}),
    "olmoe": Architecture("OLMoE", {"num_experts": 4, "num_experts_per_tok": 2}),
}


def tiny_config(name: str) -> Any:
    """A config of `transformers` for a tiny model of this architecture."""
    from transformers import AutoConfig

    fields = {k: v for k, v in {**SMALL, **ARCHITECTURES[name].fields}.items() if v is not None}
    return AutoConfig.for_model(name, **copy.deepcopy(fields))


def tiny_peer(name: str, attention: str = "eager") -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(name), attn_implementation=attention).float().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model


# -- paths ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def engine_logits(
    model: Decoder, tokens: list[int], *, graphs: bool, after: Callable[[int], None] = lambda num: None
) -> Tensor:
    """Logits [T, V] as the engine computes them: the first half in pieces, the rest a token at a time. `after` is told
    how many rows a step had."""
    runner = Runner(model, BlockPool(-(-len(tokens) // BLOCK) + 1, BLOCK), graphs=graphs)
    runner.refresh()
    found, start = [], 0
    while start < len(tokens):
        num = min(CHUNK, len(tokens) - start) if start < len(tokens) // 2 else 1
        span = RowSpan(list(range(-(-(start + num) // BLOCK))), start, num)
        found.append(runner.forward(Batch([span], tokens[start : start + num], range(num))).float().cpu())
        after(num)
        start += num
    return torch.cat(found)


def difference(got: Tensor, want: Tensor) -> float:
    return float((got.cpu() - want.cpu()).abs().max() / want.abs().max())


# -- the choice of experts -----------------------------------------------------------------------------------
Choice = Tensor  # [layers, rows, chosen], the experts of a row in ascending order


def chosen(logits: list[Tensor], top_k: int) -> Choice:
    """Of each layer's router logits [rows, experts]."""
    return torch.stack([x.float().topk(top_k, dim=-1).indices.sort(-1).values.cpu() for x in logits])


def forward_choice(model: Decoder, tokens_1T: Tensor) -> tuple[Tensor, Choice]:
    """(logits [T, V], the experts that the model's own forward chose)"""
    seen: list[Tensor] = []
    mixtures = [m for m in model.modules() if isinstance(m, MixtureOfExperts)]
    hooks = [m.router.register_forward_hook(lambda *call: seen.append(call[-1])) for m in mixtures]
    logits = model(tokens_1T)[0].float()
    for hook in hooks:
        hook.remove()
    return logits, chosen(seen, mixtures[0].top_k)


def forward_with(model: Decoder, tokens_1T: Tensor, choice: Choice) -> Tensor:
    """Logits of the model's own forward with these experts, weighed by its own router."""
    layers = iter(choice)

    def given(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        experts_RK = next(layers).to(logits.device)
        weight_RK = logits.float().softmax(-1).gather(-1, experts_RK)
        return (weight_RK / weight_RK.sum(-1, keepdim=True) if renormalize else weight_RK), experts_RK

    with mock.patch.object(transformer, "choose_experts", given):
        return model(tokens_1T)[0].float()


def step_choice(model: Decoder, tokens: list[int]) -> tuple[Tensor, Choice]:
    """(logits [T, V], the experts chosen) of the engine's fused steps; graphs write the router's logits to a buffer."""
    plan = next(layer.experts for layer in model.plan.layers if layer.experts is not None)
    num_layers = len(model.plan.layers)
    buffer = torch.zeros(num_layers, CHUNK, plan.num, device=model.device)
    calls, found = itertools.count(), []
    plain = FusedExperts.logits

    def watched(experts: FusedExperts, *given: Any) -> Tensor:
        logits = plain(experts, *given)
        buffer[next(calls) % num_layers, : len(logits)] = logits
        return logits

    with mock.patch.object(FusedExperts, "logits", watched):
        logits = engine_logits(model, tokens, graphs=True, after=lambda num: found.append(buffer[:, :num].clone()))
    return logits, chosen(list(torch.cat(found, 1)), plan.top_k)


@torch.no_grad()
def rounded_peer(peer: Any, model: Decoder, folder: Path) -> Any:
    """`transformers` with the weights that the packed layers stand for."""
    from transformers import AutoModelForCausalLM

    from shoestring.formats import unpack
    from shoestring.model import save_model

    dense = copy.deepcopy(model)
    unpack(dense)
    save_model(folder, dense, dtype=torch.float32)
    auto = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    return auto.to(next(peer.parameters()).device).eval()


@torch.no_grad()
def fused_int4(folder: Path, where: Tensor, tokens: list[int], dtype: torch.dtype = torch.bfloat16) -> Found:
    """bf16 with packed weights. With experts, fp32 computes with the choice that bf16 made."""
    model = load_model(folder, device=where.device).model
    convert(model, [("blocks.*", parse_format("int4:g32")), ("embed", parse_format("int8:g0"))])
    pack(model)
    exact_model = copy.deepcopy(model)
    exact = model(where)[0]
    model.to(dtype).compute_dtype = dtype
    use_kernels(model)
    assert unusable_experts(model) is None
    if model.spec.experts is None:
        own = difference(model(where)[0].float(), exact)
        return Found("fused int4", difference(engine_logits(model, tokens, graphs=True), exact), 2 * own + 5e-3, own)
    _, choice = forward_choice(exact_model, where)
    logits, of_own = forward_choice(model, where)
    own = difference(logits, forward_with(exact_model, where, of_own))
    logits, of_step = step_choice(model, tokens)
    value = difference(logits, forward_with(exact_model, where, of_step))
    other = [float((found != choice).any(-1).any(0).float().mean()) for found in (of_step, of_own)]
    quality = {
        "rows_with_other_experts": round(other[0], 4),
        "rows_with_other_experts_own": round(other[1], 4),
        "difference_with_fp32_choice": difference(logits, exact),
    }
    return Found("fused int4", value, 2 * own + 5e-3, own, quality)


@torch.no_grad()
def measure(name: str, device: torch.device) -> Iterator[Found]:
    """Every path that the architecture has."""
    tokens_1T = torch.randint(1, 60, (1, LENGTH), generator=torch.Generator().manual_seed(3))
    tokens, bound = tokens_1T[0].tolist(), BOUNDS[device.type]
    with tempfile.TemporaryDirectory() as folder:
        peer = tiny_peer(name)
        peer.save_pretrained(Path(folder) / "model")
        peer, where = peer.to(device), tokens_1T.to(device)
        want = peer(where).logits[0].float()
        own = None
        if peer.config._attn_implementation == "eager" and name != "gemma2":  # whose soft cap sdpa does not have
            other = tiny_peer(name, "sdpa").to(device)
            own = difference(other(where).logits[0].float(), want)
        model = load_model(Path(folder) / "model", device=device).model
        yield Found("prefill", difference(model(where)[0].float(), want), bound, own)
        yield Found("decode", difference(engine_logits(model, tokens, graphs=False), want), bound, own)
        if FusedDecoder.unsupported(model.plan) is None:
            if unusable_experts(model) is None:  # on a GPU they compute in bf16 only
                yield Found("fused", difference(engine_logits(model, tokens, graphs=True), want), bound, own)
            if device.type == "cuda":
                yield fused_int4(Path(folder) / "model", where, tokens)
        packed = load_model(Path(folder) / "model").model
        convert(packed, [("blocks.*", parse_format("int8:g0"))])
        pack(packed)
        same = rounded_peer(peer, packed, Path(folder) / "rounded")
        want = same(where).logits[0].float()
        packed = packed.to(device)
        yield Found("packed int8", difference(engine_logits(packed, tokens, graphs=False), want), bound, own)
        if device.type == "cpu" and unusable() is None:
            stepped = load_model(Path(folder) / "model").model
            convert(stepped, [("blocks.*", parse_format("int4:g32"))])
            pack(stepped)
            quantize_activations(stepped)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                has_step = executor_of(stepped) is not None
            if has_step:
                layers = torch.cat([stepped(tokens_1T[:, : i + 1])[0, -1:] for i in range(LENGTH)])
                value = difference(engine_logits(stepped, tokens, graphs=False), layers)
                yield Found("cpu step", value, BOUND_INT8, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(ARCHITECTURES), help="architectures, separated by commas")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dry", action="store_true", help="print, do not record")
    asked = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    failed = []
    for name in asked.only.split(","):
        for found in measure(name, torch.device(asked.device)):
            path, value, bound, own = found.path, found.value, found.bound, found.own
            print(f"{name:12} {path:12} {value:.2e} (bound {bound:.0e}) {found.quality or ''}", flush=True)
            if not value <= bound:
                failed.append(f"{name} {path}: {value:.2e} > {bound:.0e}")
            if not asked.dry:
                record(
                    bench="models",
                    case=f"{name}, {path}",
                    metric="logits_difference",
                    unit="of the largest logit",
                    samples=[value],
                    baseline=None if own is None else OWN.get(path, "transformers, sdpa against eager"),
                    baseline_value=own,
                    quality=found.quality,
                    config={"model": name, "path": path, "tokens": LENGTH, "seed": 0},
                )
    if failed:
        raise SystemExit("\n".join(failed))


ON_GPU = ("fused", "fused int4")  # what is another program there


def table() -> str:
    lines = newest("models")
    if not lines:
        return "Not measured yet."
    told = {(n["config"]["model"], n["config"]["path"], "CPU" in n["device"]): n for n in lines}
    paths = list(dict.fromkeys(path for _, path, cpu in told if cpu))
    rows = []
    for name in dict.fromkeys(line["config"]["model"] for line in lines):
        cells = [told.get((name, path, True)) for path in paths] + [told.get((name, path, False)) for path in ON_GPU]
        values = [None if line is None else line["value"] for line in cells]
        values.append(told[name, "prefill", True]["baseline_value"])
        texts = ["" if value is None else f"{value:.0e}" for value in values]
        other = cells[-1]["quality"].get("rows_with_other_experts") if cells[-1] else None
        texts.insert(-1, "" if other is None else f"{other:.1%}")
        rows.append([ARCHITECTURES[name].title, *texts])
    on_gpu = [f"{path}, GPU" for path in ON_GPU]
    header = ["", *paths, *on_gpu, "its rows with other experts than fp32", "`transformers`, sdpa against eager"]
    shown = [n for n in lines if "CPU" in n["device"] or n["config"]["path"] in ON_GPU]
    return markdown(header, rows) + provenance(shown)


if __name__ == "__main__":
    main()
