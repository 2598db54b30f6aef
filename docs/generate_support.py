"""The tables of docs/reference/support.md: every architecture with every Format, on every path.

    python docs/generate_support.py            try every cell (a few minutes), write support_cells.json and the page
    python docs/generate_support.py --check    exit 1 where the page is not what support_cells.json says

A cell is what happens when it is tried on a tiny random model: trained for a step, decoded through the engine and
compared with the model's own forward, exported. Nothing is claimed that did not run. tests/test_support.py tries some
of the cells on every run of the suite, and all of them with `-m lab`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.models import ARCHITECTURES, tiny_config
from shoestring.errors import UserError
from shoestring.formats import convert, kernel_layout, pack, parse_format, use_kernels
from shoestring.formats.convert import format_linears
from shoestring.formats.float_asym import TABLES
from shoestring.formats.int8_activations import quantize_activations
from shoestring.formats.registry import SPELLINGS
from shoestring.model import Decoder, Tokenizer, parallel, save_model
from shoestring.model.export import export_model
from shoestring.model.export_names import READERS
from shoestring.model.hf import spec_from_hf
from shoestring.serve import Engine, Sampling
from shoestring.serve.engine.cpu_decode import CompiledDecodeStep, executor_of
from shoestring.serve.engine.fused_decoder import FusedDecoder, unusable
from shoestring.train.data import Micro
from shoestring.train.objectives import CrossEntropy

HERE = Path(__file__).parent
PAGE, CELLS = HERE / "reference" / "support.md", HERE / "support_cells.json"
BEGIN, END = "<!-- support -->", "<!-- /support -->"
# What is tried, and the Formats it stands for: tables differ in their numbers only.
FORMATS: dict[str, tuple[str, ...]] = {
    **{kind: (kind,) for kind in ("dense", "int2", "int3", "int4", "int8", "int4:min")},
    "nf3": tuple(TABLES),
    **{kind: (kind,) for kind in ("fp8", "sparse24", "sparse24+int4")},
}
assert sorted(chain(*FORMATS.values())) == sorted((*SPELLINGS, "int4:min", "sparse24", "sparse24+int4")), (
    "a Format has no column"
)
TOKENS = torch.randint(1, 60, (2, 24), generator=torch.Generator().manual_seed(1))
OWN = "model's forward"

Cells = dict[str, dict[str, dict[str, str]]]  # path -> architecture -> format -> what happens


def label(kind: str) -> str:
    """The Format that is tried: groups of 32, as kernels on a CPU want them."""
    return kind if kind in ("dense", "fp8", "sparse24") else f"{kind}:g32"


@cache
def spec_of(name: str) -> Any:
    return spec_from_hf(tiny_config(name).to_dict())


def model_of(name: str) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(spec_of(name)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.2 + (p.ndim == 1))
    return model


def packed_model(name: str, kind: str) -> Decoder:
    model = model_of(name)
    if kind != "dense":
        convert(model, [("blocks.*", parse_format(label(kind)))])
        pack(model)
    model.compute_dtype = torch.float32
    return model


# -- one cell ------------------------------------------------------------------------------------------------


def trained(name: str, kind: str) -> str:
    model = model_of(name).train()
    convert(model, [("blocks.*", parse_format(label(kind)))])
    micro = Micro(TOKENS[:, :-1], TOKENS[:, 1:], torch.zeros_like(TOKENS[:, 1:]), TOKENS[:, 1:].numel())
    CrossEntropy()(model, micro).backward()
    grads = [layer.weight.grad for _, layer in format_linears(model) if layer.weight.grad is not None]
    assert grads and all(g.isfinite().all() for g in grads) and any(g.abs().max() > 0 for g in grads)
    return "yes"


def _texts(model: Decoder, graphs: bool) -> list[list[int]]:
    prompts = [TOKENS[0, :5].tolist(), TOKENS[1, :17].tolist()]
    found = Engine(model, graphs=graphs).generate(prompts, Sampling(max_tokens=4, ignore_eos=True))
    return [list(text.token_ids) for text in found]


@torch.no_grad()
def gpu_step(name: str, kind: str) -> str:
    """The fused step is the same program on a CPU, with kernels in plain torch."""
    want = _texts(packed_model(name, kind), graphs=False)
    model = packed_model(name, kind)
    with mock.patch.object(kernel_layout, "chunks_usable", lambda t: True):  # the order of weights that a GPU has
        use_kernels(model)
    reason = FusedDecoder.unsupported(model.plan) or unusable(model)
    if reason is not None:
        assert _texts(model, graphs=False) == want
        return f"{OWN}: {re.sub(r'of [A-Z].* on this device', 'of this Format', reason)}"
    assert _texts(model, graphs=True) == want
    return "fused"


@torch.no_grad()
def cpu_step(name: str, kind: str) -> str:
    model = packed_model(name, kind)
    if not kind.startswith("int"):
        _texts(model, graphs=False)
        return f"{OWN}, in fp32"
    quantize_activations(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the fall-back says why; so does the cell
        step = executor_of(model)
        tokens = _texts(model, graphs=False)
    want = TOKENS[:1, :5]
    for token in tokens[0]:
        logits = model(want)[0, -1]
        assert logits.max() - logits[token] < 1e-2  # rounded inputs: an equal token, not always the same
        want = torch.cat([want, torch.tensor([[token]])], dim=1)
    if step is None:
        experts = spec_of(name).experts is not None
        return f"{OWN}, 8-bit inputs: {'experts' if experts else CompiledDecodeStep.unsupported(model.plan)}"
    return "one step, 8-bit inputs"


def tensor_parallel(name: str, kind: str) -> str:
    """By the fields of the plan, each of which runs on two ranks in tests/model/test_layer_plan.py."""
    reason = parallel.SUPPORT.missing(model_of(name).plan)
    return "yes" if reason is None else f"no: {reason}"


def exported(name: str, kind: str) -> str:
    """The layouts that can be written, and the first reason of each that cannot."""
    tokenizer = Tokenizer.train(["a page of the support matrix"], 260)
    done, refused = [], []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "model"
        save_model(source, packed_model(name, kind), tokenizer)
        for layout in READERS:
            out = Path(folder) / (f"{layout}.gguf" if layout == "gguf" else layout)
            try:
                export_model(source, out, layout)
                done.append(layout)
            except UserError as error:
                refused.append(f"{layout}: {_short(str(error), folder)}")
    return ", ".join(done) + ("" if not refused else "; not " + "; not ".join(refused))


def _short(message: str, folder: str) -> str:
    """The beginning of an error, without the names of this one model."""
    text = message.replace(f"{folder}/model", "the model").replace(folder, "")
    text = re.sub(r"\ba \w+ model\b", "such a model", text)
    text = re.sub(r"\b(model|transformer|gpt_neox|blocks)\.[\w.]+", "a layer", text).replace("|", "/")
    text = re.sub(r"a layer is [\w:+]*\w", "a layer has another Format", text)
    text = re.sub(r"a layer as [\w:+]*\w", "a layer of this Format", text)
    return re.split(r"; |: quantize|, or use", text)[0].strip(" .,")


@dataclass(frozen=True)
class SupportPath:
    title: str
    says: str
    cell: Callable[[str, str], str]


PATHS: dict[str, SupportPath] = {
    "train": SupportPath("Training", "*yes*: a step has finite gradients for every matrix.", trained),
    "gpu": SupportPath(
        "Decoding on a GPU",
        f"*fused*: whole steps as one program, as a CUDA graph on a GPU. *{OWN}*: the same result, slower; the note "
        "has the feature that is not fused.",
        gpu_step,
    ),
    "cpu": SupportPath(
        "Decoding on a CPU",
        f"*one step*: a token in one C++ call with `--int8-activations`. *{OWN}*: layer by layer.",
        cpu_step,
    ),
    "tensor_parallel": SupportPath("Tensor parallel", "Training and serving over several processes.", tensor_parallel),
    "export": SupportPath("Export", "The layouts of `shoestring export --as`, written from a packed model.", exported),
}


def tried(path: str, name: str, kind: str) -> str:
    """What happens in this cell. A failure is no cell: it raises."""
    return PATHS[path].cell(name, kind)


# -- the page ------------------------------------------------------------------------------------------------


def tables(cells: Cells) -> str:
    lines = [
        "Architectures and Formats with the same row or column share one. Every cell was tried on a tiny random model",
        "(`docs/generate_support.py`).",
        "",
    ]
    for key, path in PATHS.items():
        rows = cells[key]
        assert set(rows) == set(ARCHITECTURES) and all(set(row) == set(FORMATS) for row in rows.values()), key
        lines += [f"### {path.title}", "", path.says, "", *_table(rows), ""]
    return "\n".join(lines)


def _table(rows: dict[str, dict[str, str]]) -> list[str]:
    columns = _alike(tuple(FORMATS), lambda kind: tuple(rows[name][kind] for name in ARCHITECTURES))
    notes: list[str] = []
    titles = [" ".join(f"`{name}`" for kind in kinds for name in FORMATS[kind]) for kinds in columns]
    head = ["", *(titles if len(columns) > 1 else ["all Formats"])]
    lines = [head, ["---"] * len(head)]
    for names in _alike(tuple(ARCHITECTURES), lambda name: tuple(rows[name].values())):
        told = ", ".join(ARCHITECTURES[name].title for name in names)
        lines.append([told, *(_with_note(rows[names[0]][kinds[0]], notes) for kinds in columns)])
    noted = [f"{i}. {note}" for i, note in enumerate(notes, 1)]
    return ["| " + " | ".join(cells) + " |" for cells in lines] + (["", *noted] if noted else [])


def _alike(names: tuple[str, ...], key: Callable[[str], Any]) -> list[list[str]]:
    groups: dict[Any, list[str]] = {}
    for name in names:
        groups.setdefault(key(name), []).append(name)
    return list(groups.values())


def _with_note(cell: str, notes: list[str]) -> str:
    """Reasons go below the table."""
    told, *reasons = cell.split("; not ") if "; not " in cell else cell.split(": ", 1)
    for reason in reasons:
        if reason not in notes:
            notes.append(reason)
    numbers = ", ".join(str(notes.index(reason) + 1) for reason in reasons)
    return f"{told} ({numbers})" if numbers else told


def page_with(cells: Cells) -> str:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables(cells)}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        cells = json.loads(CELLS.read_text())
        sys.exit(0 if PAGE.read_text() == page_with(cells) else f"{PAGE} is not what {CELLS} says; run {__file__}")
    cells = {}
    for path in PATHS:
        cells[path] = {name: {kind: tried(path, name, kind) for kind in FORMATS} for name in ARCHITECTURES}
    CELLS.write_text(json.dumps(cells, indent=1) + "\n")
    PAGE.write_text(page_with(cells))


if __name__ == "__main__":
    main()
