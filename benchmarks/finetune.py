"""Fine-tuning beside peft: speed and memory of QLoRA.

    python -m benchmarks.finetune speed --peers FOLDER         4 minutes on an H200: an 8B Llama shape, LoRA r16 on nf4
    python -m benchmarks.finetune served                       seconds on a CPU: the model in training and its files
`FOLDER` holds peft, accelerate and (for speed) bitsandbytes, unpacked. Speed: random weights, rows of 1,024 tokens,
every block recomputed in the backward pass, AdamW on the branches; the median of steps after the warm-up, peers and
ours in one process, one after the other. Peers are transformers with sdpa, bitsandbytes' nf4 layers and peft's LoRA
under autocast, eager, and with each layer compiled. Ours is compiled block by block; `shoestring eager` is not.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.results import markdown, newest, provenance, record
from benchmarks.train_dense import llama
from shoestring.errors import as_command
from shoestring.formats import convert, pack, parse_format, use_kernels
from shoestring.formats.adapter import AdapterConfig, adapted_layers, adapter_weights, add_adapters, attach_adapters
from shoestring.mesh import Mesh
from shoestring.model import Decoder, load_model, save_model
from shoestring.model.adapter_folder import read_adapter, write_adapter
from shoestring.model.parallel import CompileMode, ParallelConfig, parallelize
from shoestring.train.objectives import CrossEntropy
from shoestring.train.optim import adamw
from shoestring.train.step import Micro

SPEC = llama(4096, 32, 32, 8, 14336, tied=False)
TOKENS, CONTEXT, RANK, FORMAT = (1024, 4096, 16384), 1024, 16, "nf4"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Step = Callable[[Tensor], Tensor]


# -- speed ---------------------------------------------------------------------------------------------------


def our_step(compile: CompileMode, device: torch.device) -> Step:
    torch.manual_seed(0)
    with torch.device(device):
        model = Decoder(SPEC).to(torch.bfloat16)
    convert(model, [("*", parse_format(f"{FORMAT}:g64"))])
    pack(model, dtype=torch.bfloat16)
    add_adapters(model, AdapterConfig(RANK, 2.0 * RANK))
    parallelize(model, Mesh(0, 1, device), ParallelConfig(True, compile, torch.bfloat16))
    use_kernels(model)
    optimizer, objective = adamw(model, lr=1e-4), CrossEntropy()
    model.train()

    def step(rows_BT: Tensor) -> Tensor:
        tokens_BT, targets_BT = rows_BT[:, :-1].contiguous(), rows_BT[:, 1:].contiguous()
        loss = objective(model, Micro(tokens_BT, targets_BT, targets_BT, tokens_BT.numel())) / tokens_BT.numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def peft_step(compiled: bool, device: torch.device) -> Step:
    bnb, peft, transformers = (importlib.import_module(name) for name in ("bitsandbytes", "peft", "transformers"))

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=SPEC.vocab_size, hidden_size=SPEC.d_model, intermediate_size=SPEC.d_ff,
        num_hidden_layers=SPEC.num_layers, num_attention_heads=SPEC.num_heads,
        num_key_value_heads=SPEC.num_kv_heads, max_position_embeddings=SPEC.max_positions, rope_theta=SPEC.rope_theta,
        tie_word_embeddings=False, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device(device):
        model: Any = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in PROJECTIONS:
            packed = bnb.nn.Linear4bit(
                module.in_features, module.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type=FORMAT,
                device="meta",
            )  # fmt: skip
            weight = module.weight.data.cpu()
            packed.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type=FORMAT, module=packed)
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, packed.to(device))
            del module.weight
    model.is_loaded_in_4bit = True
    wanted = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=list(PROJECTIONS), task_type="CAUSAL_LM")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    tuned: Any = peft.get_peft_model(model, wanted)
    tuned.train()
    if compiled:
        for layer in model.model.layers:
            layer.compile()
    optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=1e-4, fused=True)

    def step(rows_BT: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            loss = tuned(input_ids=rows_BT[:, :-1], labels=rows_BT[:, :-1], use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def time_steps(step: Step, tokens: int, device: torch.device, seconds: float = 6.0) -> tuple[list[float], float]:
    """Tokens per second of each timed step, and the peak of memory in GB."""
    torch._dynamo.reset()  # each size is compiled for itself
    rows_BT = torch.randint(0, SPEC.vocab_size, (tokens // CONTEXT, CONTEXT + 1), device=device)
    for _ in range(3):
        step(rows_BT)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    found: list[float] = []
    began = time.perf_counter()
    while len(found) < 5 or (time.perf_counter() - began < seconds and len(found) < 40):
        start = time.perf_counter()
        step(rows_BT)
        torch.cuda.synchronize()
        found.append(tokens / (time.perf_counter() - start))
    return found, torch.cuda.max_memory_allocated() / 1e9


def speed(only: str | None, sizes: list[int]) -> None:
    device = torch.device("cuda")
    cases: dict[str, Callable[[], Step]] = {
        "peft eager": lambda: peft_step(False, device),
        "peft compiled": lambda: peft_step(True, device),
        "shoestring eager": lambda: our_step("off", device),
        "shoestring": lambda: our_step("blocks", device),
    }
    found = {
        (n["metric"], n["config"].get("tokens")): n["value"] for n in newest("finetune") if n["case"] == "peft eager"
    }
    taken = {t: (found["tokens_per_s", t], found["peak_memory_gb", t]) for t in sizes if ("tokens_per_s", t) in found}
    for case, build in cases.items():
        if only is not None and only != case:
            continue
        try:
            step = build()
            for tokens in sizes:
                rates, peak = time_steps(step, tokens, device)
                rate, base = statistics.median(rates), taken.get(tokens)
                if case == "peft eager":
                    taken[tokens] = rate, peak
                config = {"model": "llama-8b", "adapter": f"lora:r{RANK}", "format": FORMAT, "tokens": tokens}
                note = "random weights, rows of 1,024 tokens, every block recomputed"
                same: dict[str, Any] = {"bench": "finetune", "case": case, "config": config, "note": note}
                beside: dict[str, Any] = {"baseline": "peft eager"} if base and case != "peft eager" else {}
                fast: dict[str, Any] = {"baseline_value": base[0], "ratio": rate / base[0]} if base else {}
                small: dict[str, Any] = {"baseline_value": base[1], "ratio": base[1] / peak} if base else {}
                record(metric="tokens_per_s", unit="tokens/s", samples=rates, **same, **beside, **fast)
                record(metric="peak_memory_gb", unit="GB", samples=[peak], **same, **beside, **small)
                print(f"{case:17} {tokens:6} tokens  {rate:9.0f} tokens/s  {peak:6.1f} GB", flush=True)
            del step
        except Exception:
            print(f"{case}: FAILED\n{traceback.format_exc()[-1500:]}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()


# -- what is served is what was trained ------------------------------------------------------------------------


def served() -> None:
    """The largest difference of logits between a model in training and its files, loaded again; on a CPU."""
    small = dataclasses.replace(SPEC, d_model=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, d_ff=256)
    small = dataclasses.replace(small, vocab_size=512)
    tokens = torch.arange(64)[None]
    for format in ("dense", "int4:g64", "nf4:g64", "nf3:g64"):
        for adapter in ("lora:r16", "dora:r16"):
            torch.manual_seed(0)
            model = Decoder(small)
            if format != "dense":
                convert(model, [("*", parse_format(format))])
                pack(model)
            with tempfile.TemporaryDirectory() as folder, torch.no_grad():
                save_model(Path(folder) / "base", model)
                add_adapters(model, AdapterConfig.parse(adapter) or AdapterConfig())
                for layer in adapted_layers(model).values():
                    layer.B.normal_(0, 0.05)
                write_adapter(Path(folder) / "adapter", model, adapter_weights(model))
                again = load_model(Path(folder) / "base", packed=True).model
                attach_adapters(again, read_adapter(Path(folder) / "adapter", again).weights)
                worst = float((model.eval()(tokens) - again(tokens)).abs().max())
            config = {"format": format, "adapter": adapter}
            same: dict[str, Any] = {"bench": "finetune", "case": "shoestring", "config": config}
            record(metric="served_difference", unit="logits", samples=[worst], **same)
            print(f"{format:9} {adapter}  {worst:g}")


def table() -> str:
    lines = newest("finetune")
    rates = {(n["config"]["tokens"], n["case"]): n for n in lines if n["metric"] == "tokens_per_s"}
    sizes = {(n["config"]["tokens"], n["case"]): n for n in lines if n["metric"] == "peak_memory_gb"}
    rows = []
    for (tokens, case), line in sorted(rates.items(), key=lambda item: (item[0][0], item[1]["value"])):
        ratio = "" if line["ratio"] is None else f"{line['ratio']:.2f}"
        rows.append([f"{tokens:,}", case, f"{line['value']:,.0f}", ratio, f"{sizes[tokens, case]['value']:.1f}"])
    header = ["tokens a step", "trainer", "tokens/s", "of peft eager", "peak GB"]
    return markdown(header, rows) + provenance([*rates.values(), *sizes.values()])


# -- the command ---------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("speed", "served"))
    parser.add_argument("--peers", help="a folder with peft, accelerate and bitsandbytes")
    parser.add_argument("--only", help="one case; ratios are to the recorded peft eager")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="tokens a step, with commas")
    args = parser.parse_args()
    if args.peers:
        sys.path.append(args.peers)
    if args.what == "served":
        served()
    else:
        speed(args.only, [int(t) for t in args.tokens.split(",")])


if __name__ == "__main__":
    as_command(main)
