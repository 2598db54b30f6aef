"""A server under load: the rows of docs/results/serving.md, about 3 minutes each.

    python -m benchmarks.serve --rate 0.4                                                            on a CPU
    python -m benchmarks.serve --trace AzureLLMInferenceTrace_conv.csv --rate 0.6 --seconds 150
    python -m benchmarks.serve --trace ... --shape 1b --rate 20 40 --peer-rate 2 --seconds 60 --max-context 4096
                                                                                                     on a GPU

SmolLM2-135M-Instruct is packed in the fastest form for a CPU (benchmarks/cpu_decode.py); with --shape a model of random
weights takes its place. It is served by `shoestring serve` in its own process, and loaded as by `shoestring bench
serve` (shoestring/evals/server_load.py), at one rate after the other. With --peer-rate `transformers serve` then serves
the same model with continuous batching under the same load; it takes its prompts as text, of about as many tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.cpu_decode import FORMATS, MODEL
from benchmarks.results import RESULTS, counting, markdown, provenance, recorded
from benchmarks.serve_saturation import SHAPES, make_model, peer_command, server
from benchmarks.smollm2 import need_smollm2
from shoestring.device import pick_device, pick_dtype
from shoestring.errors import UserError, as_command
from shoestring.evals.server_load import (
    Planned,
    Slo,
    Target,
    bodies_for,
    from_trace,
    own_server,
    poisson,
    run_load,
    send_all,
)
from shoestring.formats import IntAsym, convert, pack, parse_format
from shoestring.model import Tokenizer, load_model, save_model
from shoestring.model.transformer import untie_head

BENCH = "serve"
PEER_TEXTS, PEER_BATCH = 16, 2048  # whole contexts that the peer has room for, tokens of one of its steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="arrivals and lengths; without it arrivals are Poisson")
    parser.add_argument("--rate", type=float, nargs="+", default=[0.15])
    parser.add_argument("--peer-rate", type=float, nargs="*", default=[], help="with --shape: of `transformers serve`")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--prompt-tokens", type=int, default=64, help="without a trace")
    parser.add_argument("--new-tokens", type=int, default=32, help="without a trace")
    parser.add_argument("--max-context", type=int, default=256, help="what is longer is shortened to it")
    parser.add_argument("--slo-ttft", type=float, default=2.0)
    parser.add_argument("--slo-tpot", type=float, default=0.2)
    parser.add_argument("--shape", choices=list(SHAPES), help="random weights of this shape, instead of SmolLM2")
    parser.add_argument("--device", default="auto", help="with --shape")
    parser.add_argument("--note", default="", help="what else a reader of the line should know")
    args = parser.parse_args()
    if args.peer_rate and not args.shape:
        raise UserError("--peer-rate needs --shape: the packed model is one that `transformers serve` does not read")
    slo = Slo(args.slo_ttft, args.slo_tpot)
    options = ["--max-context", str(args.max_context)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / (f"llama-{args.shape}" if args.shape else MODEL)
        if args.shape:
            device = pick_device(args.device)
            dtype = pick_dtype("auto", device)
            make_model(folder, args.shape, device, dtype)
            options, weights = [*options, "--device", str(device)], f"random, {dtype}".replace("torch.", "")
        else:
            options, weights = ["--int8-activations", *options], pack_smollm2(folder)

        def measure(server: str | Target, rate: float, seed: int, options: list[str], who: str = "") -> None:
            load, plan = planned(args, rate)
            note = "; ".join(filter(None, (args.note, f"load average before it {os.getloadavg()[0]:.1f}")))
            about = {"model": folder.name, "load": load, "weights": weights, "server": shlex.join(options)}
            case = ", ".join(filter(None, (load, folder.name, who)))
            save = RESULTS / f"{BENCH}.jsonl"
            run_load(server, plan, slo, case, seed=seed, save=save, about=about, note=note)

        with own_server(str(folder), options) as url:
            for seed, rate in enumerate(args.rate):  # other prompts each time: the server keeps those it has read
                measure(url, rate, seed, options)
        if args.peer_rate:
            command = peer_command(folder, args.max_context, PEER_TEXTS, device, dtype, batch_tokens=PEER_BATCH)
            with server(command, Path(f"{folder}.peer.log")) as peer:
                peer.ready("/health", 120)
                target = peer_target(peer.url, folder, args.max_context)
                warm_up = [Planned(0.0, 64, 8), Planned(0.0, args.max_context // 2, 8)]
                # It makes its cache and graphs.
                told = asyncio.run(send_all(peer.url, warm_up, bodies_for(warm_up, target, seed=len(args.peer_rate))))
                if failed := [sent for sent in told if not sent.whole]:
                    raise UserError(f"transformers serve did not answer a first request: {failed[0].error}")
                for seed, rate in enumerate(args.peer_rate):
                    measure(target, rate, seed, command[5:], "transformers serve")


def planned(args: argparse.Namespace, rate: float) -> tuple[str, list[Planned]]:
    """What the load is called, and its requests."""
    if args.trace:
        return args.trace.stem, from_trace(args.trace, args.seconds, rate=rate)
    return "Poisson", poisson(rate, args.seconds, num_prompt=args.prompt_tokens, num_new=args.new_tokens)


def peer_target(url: str, folder: Path, context: int) -> Target:
    tokenizer = Tokenizer.from_file(folder / "tokenizer.json")
    text = Path(json.__file__).read_text(encoding="utf-8")
    return Target(url, str(folder), context, tuple(tokenizer.encode(text, special=False)), tokenizer.decode)


def pack_smollm2(folder: Path) -> str:
    """Write the model in the fastest form for a CPU; returns what it is."""
    loaded = load_model(need_smollm2())
    model = loaded.model
    convert(model, [("*", parse_format(FORMATS[0]))])
    pack(model)
    untie_head(model, IntAsym(8, 0, symmetric=True))
    save_model(folder, model, loaded.tokenizer)
    return f"{FORMATS[0]}, head int8"


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.{1 if seconds < 0.01 else 0}f}"


def loads() -> list[dict[str, Any]]:
    """The lines that count: of one load the newest, whatever seed its prompts were drawn with."""
    lines = recorded(BENCH)
    for line in lines:
        line["config"].pop("seed", None)
    return counting(lines)


def table() -> str:
    lines = sorted(loads(), key=lambda n: "CPU" in n["device"])
    if not lines:
        return "Not measured yet."
    header = ["load", "machine", "tokens in, out (mean)", "requests/s offered", "completed", "tokens/s"]
    header += [f"{name} p50 / p90 / p99, ms" for name in ("TTFT", "TPOT", "ITL")]
    rows = [
        [
            n["case"],
            n["device"].partition(",")[0].removeprefix("NVIDIA "),
            f"{n['config']['prompt_tokens']:.0f}, {n['config']['new_tokens']:.0f}",
            f"{n['config']['rate']:.3g}",
            f"{n['quality']['num_whole']} of {n['quality']['num_sent']}",
            f"{n['quality']['tokens_per_s']:,.{0 if n['quality']['tokens_per_s'] > 1000 else 1}f}",
            *(" / ".join(map(milliseconds, n["quality"][name])) for name in ("ttft", "tpot", "itl")),
            f"{n['value']:.2f} ({n['config']['slo_ttft_s']:g} s, {1000 * n['config']['slo_tpot_s']:g} ms)",
        ]
        for n in lines
    ]
    said = {n["case"]: n["note"].partition("load average")[0].rstrip("; ") for n in lines}
    notes = "".join(f"\n- {case}: {note}" for case, note in said.items() if note)
    header.append("goodput, requests/s (TTFT, TPOT limits)")
    return markdown(header, rows) + (f"\n{notes}" if notes else "") + provenance(lines)


if __name__ == "__main__":
    as_command(main)
