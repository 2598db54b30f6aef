"""What a bug report needs of a machine: versions, devices, the kernels that will be used and why not others, the cache.

Every answer comes from the function that decides when a model runs, so that the table is what will happen. Values of
SHOESTRING_ variables are shown but for keys. Left out: names of the machine and its user; paths below the home folder
begin with ~.
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from shoestring import plugins
from shoestring.errors import UserError
from shoestring.paths import cache_folder, expand
from shoestring.report import Table

PACKAGES = (
    *("shoestring", "torch", "triton", "numpy", "safetensors", "tokenizers", "gguf", "typer", "tensorboard"),
    *("fastapi", "uvicorn", "llguidance", "httpx", "pyarrow"),
    *("transformers", "compressed-tensors", "lm-eval"),
)
EXTRAS = {"gpu": "triton", "serve": "fastapi", "grammar": "llguidance", "bench": "httpx", "data": "pyarrow"}
SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")
MB, GB = 1e6, 1e9
# What the first part of a name in the cache says of it.
CACHED = {"corpus": "corpora", "tokenizer": "tokenizers", "skip": "skip sets", "kernels": "compiled kernels"}


def summarize_machine() -> list[Table]:
    tables = [
        Table("Software", ["what", "version"], software()),
        Table("Hardware", ["what", "found"], [*processors(), *gpus()]),
        Table("Kernels", ["what", "used", "by", "why"], kernels()),
        Table("Cache", ["what", "number", "MB"], cached()),
    ]
    return [*tables, Table("Settings", ["variable", "value"], rows)] if (rows := settings()) else tables


def software() -> list[list[str]]:
    rows = [["python", platform.python_version()], ["system", f"{platform.system()} {platform.release()}"]]
    missing = [extra for extra, package in EXTRAS.items() if version(package) is None]
    rows += [[package, found] for package in PACKAGES if (found := version(package))]
    return rows + ([["extras not installed", ", ".join(missing)]] if missing else [])


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def processors() -> list[list[str]]:
    import psutil
    import torch

    from shoestring.kernels.runtime.cpp import find_compiler

    memory = psutil.virtual_memory()
    return [
        ["processor", f"{processor_name()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads of torch"],
        ["instructions", torch.backends.cpu.get_cpu_capability()],
        ["load", ", ".join(f"{average:.1f}" for average in psutil.getloadavg()) + " (1, 5, 15 minutes)"],
        ["memory", f"{memory.total / GB:.1f} GB, {memory.available / GB:.1f} free"],
        ["C++ compiler", find_compiler() or "none"],
    ]


def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return name or platform.processor() or platform.machine()


def gpus() -> list[list[str]]:
    import torch

    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        return [["GPU", f"none that torch sees (torch is {built})"]]
    rows = [["CUDA of torch", str(torch.version.cuda or torch.version.hip)]]
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        about = f"compute capability {found.major}.{found.minor}, {found.multi_processor_count} multiprocessors"
        rows.append([f"cuda:{index}", f"{found.name}, {about}, {total / GB:.1f} GB, {free / GB:.1f} free"])
    return rows


# -- kernels -----------------------------------------------------------------------------------------


def kernels() -> list[list[str]]:
    """what it computes, yes or no, by what, and the reason where it is no."""
    import torch

    has_gpu = torch.cuda.is_available()
    rows = [row(what, by, reason() if has_gpu else "no GPU") for what, by, reason in gpu_kernels()]
    return [*rows, *cpu_kernels()]


def gpu_kernels() -> list[tuple[str, str, Callable[[], str | None]]]:
    """What it computes, by what, and what says why not on the current GPU: the core's, and those of methods (entry
    points of shoestring.environment)."""
    import torch

    from shoestring.kernels.lowbit.lowbit_linear import chip_refusal, library_refusal
    from shoestring.kernels.runtime.triton_backend import triton_refusal

    def no_cuda_kernels() -> str | None:
        return chip_refusal(torch.cuda.current_device()) or library_refusal()

    rows: list[tuple[str, str, Callable[[], str | None]]] = [
        ("attention, norms, sampling, losses on a GPU", "Triton", triton_refusal),
        ("low-bit products, one-row attention", "CUDA C++ through NVRTC", no_cuda_kernels),
    ]
    for name in plugins.names("environment"):
        rows += plugins.load("environment", name)()
    return rows


def cpu_kernels() -> list[list[str]]:
    from shoestring.formats.int8_activations import refusal
    from shoestring.kernels.lowbit.w4a8 import has_arm_kernels

    what, compiled = "8-bit activations (--int8-activations)", "C++, compiled on first use"
    prompts = "torch, with Arm kernels" if has_arm_kernels() else compiled
    return [
        row("packed weights on a CPU", "torch, decoded once when loaded", None),
        row(f"{what}, prompts and batches", prompts, refusal()),
        row(f"{what}, single tokens", compiled, refusal()),
    ]


def row(what: str, by: str, reason: str | None) -> list[str]:
    return [what, "no" if reason else "yes", by, reason or ""]


# -- cache and settings ------------------------------------------------------------------------------


def cached() -> list[list[str | int | float]]:
    """Kinds of things in the cache folder with their numbers and sizes."""
    try:
        folder = cache_folder()
    except UserError as error:
        return [[str(error), 0, 0.0]]
    counts, sizes = Counter[str](), Counter[str]()
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        if entry.suffix == ".lock":
            continue
        first = entry.stem.partition("-")[0]
        kind = CACHED.get(first, "measured plans" if entry.suffix == ".json" else "other")
        files = [path for path in entry.rglob("*") if path.is_file()] if entry.is_dir() else [entry]
        counts[kind] += len(files) if kind == "compiled kernels" else 1
        sizes[kind] += sum(path.stat().st_size for path in files)
    rows: list[list[str | int | float]] = [[kind, counts[kind], round(sizes[kind] / MB, 1)] for kind in sorted(counts)]
    return [*rows, [f"all, in {shown(folder)}", counts.total(), round(sizes.total() / MB, 1)]]


def settings() -> list[list[str]]:
    """The variables that change what Shoestring does, where they are set; secrets only as such."""
    names = [name for name in os.environ if name.startswith("SHOESTRING_")] + ["OMP_NUM_THREADS", "CXX"]
    names += ["CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET", "PYTORCH_CUDA_ALLOC_CONF"]
    given = {name: os.environ[name] for name in sorted(names) if name in os.environ}
    return [[name, "(set)" if name.endswith(SECRET) else shown(value)] for name, value in given.items()]


def shown(path: str | Path) -> str:
    """A path without the name of its user."""
    home, text = str(expand("~")), str(path)
    return "~" + text.removeprefix(home) if home not in ("~", "/") and text.startswith(home) else text
