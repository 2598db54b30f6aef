"""`shoestring reshard VERB`: what moving tensors from one mesh to another costs, before anything is moved.

Verbs are thin, as in app.py: they parse, import what they need, call one function and print.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoestring.errors import UserError

if TYPE_CHECKING:
    from shoestring.state.reshard.layouts import Layout

reshard_app = typer.Typer(help="Plan how tensors move from one mesh to another.", no_args_is_help=True)

LayoutOf = Callable[[str, tuple[int, ...]], "Layout"]  # of a tensor's name and shape
Shapes = dict[str, tuple[tuple[int, ...], int]]  # name -> shape, bytes per element
MESH_HELP = "dp=16, replica=8,tp=2, '2x4:S(0),R' (sizes and placements)"


@reshard_app.command()
def explain(
    src: Annotated[str, typer.Argument(help=f"Where the tensors are: {MESH_HELP} or a checkpoint folder.")],
    dst: Annotated[str, typer.Argument(help=f"Where they go: {MESH_HELP}.")],
    model: Annotated[str | None, typer.Option(help="The model whose parameters are moved: a folder.")] = None,
    tensor: Annotated[
        list[str] | None, typer.Option(help="A shape instead, such as 1024x4096; may be repeated.")
    ] = None,
    itemsize: Annotated[int, typer.Option(min=1, max=16, help="Bytes per element on the wire.")] = 2,
    topology: Annotated[Path | None, typer.Option(help="JSON: hosts, interfaces and rates.")] = None,
    same_ranks: Annotated[bool, typer.Option("--same-ranks", help="Both meshes are the same processes.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write FOLDER/report.html, a timeline.")] = None,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan as JSON.")] = None,
) -> None:
    """Bytes per link, the time against the bound of the links, and who sends what when."""
    from shoestring.report import write_report
    from shoestring.runlog import write_atomically
    from shoestring.state.reshard.plan import make_plan
    from shoestring.state.reshard.tasks import MovedTensor
    from shoestring.state.reshard.timeline import links_table, sections_of, summary, transfers_table
    from shoestring.state.reshard.topology import Topology, read_topology

    links = Topology() if topology is None else read_topology(topology)
    if (Path(src) / "manifest.json").is_file():
        shapes, src_layout, num_src = _checkpoint(Path(src))
    else:
        shapes = _shapes(model, tensor or [], itemsize)
        src_layout, num_src = _layouts(src, 0)
    dst_layout, _ = _layouts(dst, 0 if same_ranks else num_src)
    moved = {
        name: MovedTensor(shape, size, src_layout(name, shape), dst_layout(name, shape))
        for name, (shape, size) in shapes.items()
    }
    plan = make_plan(moved, links)
    for table in (summary(plan), links_table(plan), transfers_table(plan)):
        table.print()
    try:
        if html is not None:
            html.mkdir(parents=True, exist_ok=True)
            print(f"wrote {write_report(html, f'From {src} to {dst}', sections_of(plan))}")
        if save is not None:
            write_atomically(save, json.dumps(plan.to_json()) + "\n")
            print(f"wrote {save}")
    except OSError as error:
        raise UserError(f"cannot write {html or save}: {error.strerror}; give another place") from None


def _layouts(text: str, first_rank: int) -> tuple[LayoutOf, int]:
    """The layout of each tensor on the mesh that `text` describes, and the number after its last rank."""
    from shoestring.model.mesh_layouts import MOST_RANKS, layout_on, parse_axes
    from shoestring.state.reshard.layouts import MeshLayout, Placement

    if ":" in text:
        sizes_text, _, placements_text = text.partition(":")
        if not re.fullmatch(r"[1-9]\d{0,5}(x[1-9]\d{0,5})*", sizes_text):
            raise UserError(f"{text!r}: {sizes_text!r} is not a list of mesh sizes; write it like 2x4")
        sizes = tuple(int(n) for n in sizes_text.split("x"))
        if math.prod(sizes) > MOST_RANKS:
            raise UserError(f"{text!r} has {math.prod(sizes):,} ranks; at most {MOST_RANKS:,} can be planned")
        placements = tuple(
            Placement.parse(p) for p in re.findall(r"_?[A-Z](?:\([^)]*\))?|[^,\s][^,]*", placements_text)
        )
        last = first_rank + math.prod(sizes)
        layout = MeshLayout(sizes, placements, tuple(range(first_rank, last)))
        return lambda name, shape: layout, last
    axes = parse_axes(text)
    return lambda name, shape: layout_on(name, shape, axes, first_rank), first_rank + math.prod(axes.values())


def _shapes(model: str | None, tensors: list[str], itemsize: int) -> Shapes:
    if model is not None and tensors:
        raise UserError(f"both --model {model} and --tensor {tensors[0]} are given; give one of them")
    if model is None and not tensors:
        raise UserError(
            "give the tensors to move: --model MODEL, or --tensor SHAPE (such as 1024x4096) one or more times"
        )
    if model is not None:
        return _model_shapes(model, itemsize)
    for shape in tensors:
        if not re.fullmatch(r"[1-9]\d{0,12}(x[1-9]\d{0,12}){0,7}", shape):
            raise UserError(f"--tensor {shape!r} is not a shape; give sizes of 1 or more like 1024x4096")
    return {f"tensor{i}": (tuple(int(n) for n in shape.split("x")), itemsize) for i, shape in enumerate(tensors)}


def _model_shapes(model: str, itemsize: int) -> Shapes:
    import torch

    from shoestring.model.gguf import GgufSource
    from shoestring.model.hf import spec_of_folder
    from shoestring.model.transformer import Decoder
    from shoestring.paths import find_model

    folder = find_model(model)
    if not folder.is_dir():
        return {name: (shape, itemsize) for name, shape in GgufSource(folder).shapes.items()}
    with torch.device("meta"):
        decoder = Decoder(spec_of_folder(folder))
    return {name: (tuple(p.shape), itemsize) for name, p in decoder.named_parameters()}


def _checkpoint(folder: Path) -> tuple[Shapes, LayoutOf, int]:
    """The tensors of a checkpoint, the boxes that its parts hold (part n counts as rank n), and their number."""
    from shoestring.state.manifest import read_manifest
    from shoestring.state.reshard.layouts import BoxLayout

    manifest = read_manifest(folder)
    number = {part: i for i, part in enumerate(sorted(manifest.parts))}
    shapes = {name: (t.shape, t.dtype.itemsize) for name, t in manifest.tensors.items()}
    layouts = {name: BoxLayout(tuple((number[b.part], b.box) for b in t.boxes)) for name, t in manifest.tensors.items()}
    return shapes, lambda name, shape: layouts[name], len(number)
