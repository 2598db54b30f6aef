"""GPU memory of a whole model with low-bit weights, beside the same model in bf16.

    python -m benchmarks.memory                on a GPU with room for the model in bf16 (16 GB) and a layer more

The shape of Llama-3-8B with random weights, packed, laid out for its kernels and with layers joined as in the engine,
after a forward pass. Reported is the fall of `torch.cuda.memory_allocated` when the model is freed: in total, and for
the linear layers of the blocks. Keys and values are not included.
"""

from __future__ import annotations

import gc
from typing import Any

import torch

from benchmarks.decode import MODELS, build
from benchmarks.results import markdown, newest, provenance, record
from shoestring.errors import UserError, as_command
from shoestring.formats import convert, pack, parse_format, use_kernels
from shoestring.formats.convert import format_linears
from shoestring.model import Decoder, ModelSpec
from shoestring.serve.engine.fused_decoder import FusedDecoder

BENCH = "memory"
SHAPE = "Llama 8B shape"
BLOCKS = ("bf16", "int4:g128", "int3:g128", "int2:g128")
HEAD = "int8:g0"  # the other head that a packed model is measured with, as in benchmarks/decode.py
LINEAR, WHOLE = "linear_weights", "whole_model"
WANTED = ("int4:g128", 3.5)  # times smaller, the linear weights


def allocated() -> int:
    """Allocated bytes on the GPU."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def pack_head(model: Decoder) -> None:
    convert(model, [("head", parse_format(HEAD))], skip=())
    pack(model, dtype=torch.bfloat16)
    use_kernels(model)


def drop_linears(model: Decoder) -> None:
    """Free the weights of the blocks' linear layers."""
    for _, layer in format_linears(model.blocks):
        layer._parameters.clear()
        layer._buffers.clear()


@torch.no_grad()
def measure(spec: ModelSpec, blocks: str, device: str = "cuda") -> dict[tuple[str, str], int]:
    """{(linear_weights or whole_model, Format of the head): bytes held}"""
    model = build(spec, blocks, "bf16", device)
    model(torch.zeros(1, 1, dtype=torch.long, device=device))  # a dense copy that a product keeps would count
    joined = FusedDecoder(model)
    held = {"bf16": allocated()}
    del joined
    if blocks != "bf16":
        pack_head(model)
        joined = FusedDecoder(model)
        held[HEAD] = allocated()
        del joined
    with_linears = allocated()
    drop_linears(model)
    linears = with_linears - allocated()
    del model
    rest = allocated()
    found = {(WHOLE, head): whole - rest for head, whole in held.items()}
    return found | {(LINEAR, head): linears for head in held}


def save(shape: str, blocks: str, held: dict[tuple[str, str], int], dense: dict[tuple[str, str], int]) -> None:
    for (metric, head), num in held.items():
        base = dense[metric, "bf16"]
        record(
            bench=BENCH, case=f"{blocks}, head {head}", metric=metric, unit="MB", samples=[num / 1e6],
            baseline="bf16", baseline_value=base / 1e6, ratio=base / num,
            config={"model": shape, "blocks": blocks, "head": head},
            note="torch.cuda.memory_allocated, after a forward pass",
        )  # fmt: skip
        print(f"{blocks}, head {head}: {metric} {num / 1e6:,.0f} MB, {base / num:.2f} times less", flush=True)


def table() -> str:
    """One row for blocks and head: the linear weights alone, and the whole model.

    Rows with only one of the two are left out: their run ended between its lines.
    """
    by_row: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for n in newest(BENCH):
        by_row.setdefault((n["config"]["blocks"], n["config"]["head"]), {})[n["metric"]] = n
    found = {row: by_metric for row, by_metric in by_row.items() if by_metric.keys() >= {LINEAR, WHOLE}}
    if not found:
        return "Not measured yet."
    rows = []
    for (blocks, head), by_metric in found.items():
        cells = by_metric[LINEAR], by_metric[WHOLE]
        numbers = (text for n in cells for text in (f"{n['value']:,.0f}", f"{n['ratio']:.2f}"))
        rows.append([blocks, head, *numbers])
    header = ["linear layers", "head", "linear layers, MB", "times smaller", "whole model, MB", "times smaller"]
    lines = [n for by_metric in found.values() for n in by_metric.values()]
    said = f"\n\n{lines[0]['config']['model']}."
    label, least = WANTED
    if (label, "bf16") in found:
        ratio = found[label, "bf16"][LINEAR]["ratio"]
        said += (
            f" Target for linear layers at `{label}`: {least:g} times smaller "
            f"({'met' if ratio >= least else 'missed'})."
        )
    return markdown(header, rows) + said + provenance(lines)


def main() -> None:
    if not torch.cuda.is_available():
        raise UserError("this bench measures a GPU's memory and found none: run it where there is a CUDA GPU")
    dense: dict[tuple[str, str], int] = {}
    for blocks in BLOCKS:
        held = measure(MODELS[SHAPE], blocks)
        dense = dense or held
        save(SHAPE, blocks, held, dense)


if __name__ == "__main__":
    as_command(main)
