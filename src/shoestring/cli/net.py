"""`shoestring net`: the links between all processes of a job, as a matrix."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

from shoestring.errors import UserError
from shoestring.report import Table


def measure(device: str, timeout_s: float, save: Path | None) -> None:
    """Measure on all processes and print on the first."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        raise UserError(
            "net measures the links between processes, and there is one; start several: `torchrun --nproc-per-node N "
            "-m shoestring net`, on several machines with --nnodes and --rdzv-endpoint"
        )
    from shoestring.json_files import check_path
    from shoestring.mesh import MeshConfig, open_mesh
    from shoestring.runlog import append_jsonl
    from shoestring.train.reducers.network import measure_link, measure_pairs
    from shoestring.train.reducers.rounds import Link

    if save is not None:
        check_path(save)
        if save.is_dir() or not save.absolute().parent.is_dir():
            raise UserError(f"--save {save} is not a file in a folder that exists; give another place")
    mesh = open_mesh(MeshConfig(replica=size, timeout_s=timeout_s), device)
    pairs = measure_pairs(mesh)
    speed = measure_link(Link(mesh.group("replica")), mesh.device)
    if mesh.is_main:
        for title, matrix in (
            ("Latency, ms (from row to column)", pairs.latency_ms),
            ("Jitter, ms (10th to 90th percentile)", pairs.jitter_ms),
            ("Bandwidth, Mbit/s", pairs.mbit),
        ):
            rows = [
                [f"rank {i}", *("" if i == j else f"{v:.3g}" for j, v in enumerate(r))] for i, r in enumerate(matrix)
            ]
            Table(title, ["", *(f"rank {j}" for j in range(size))], rows).print()
        mbit = speed.bytes_per_s * 8 / 1e6
        delay = f"{speed.latency_s * 1e3:.2g} ms"
        print(f"all at once, as in a training step: {mbit:,.0f} Mbit/s out of each process, {delay}")
        if save is not None:
            append_jsonl(save, {**asdict(pairs), "exchange_mbit": mbit, "exchange_latency_ms": speed.latency_s * 1e3})
    mesh.close()
