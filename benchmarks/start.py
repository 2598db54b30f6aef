"""What a new user waits for and how much memory it takes: four commands as processes of their own.

    python -m benchmarks.start             about a minute

`inspect` of a GGUF file, `typo` (a format that does not exist), `generate` of 4 tokens and `quantize` to int4, of
SmolLM2-135M-Instruct on the CPU in fp32. A line is the seconds of a process, with those of processor time in `quality`,
or the most memory that it had. In `quality` beside `peak_mb`:
the megabytes of the weights in fp32, and the memory of a process that only imports torch.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.results import markdown, newest, provenance, record
from benchmarks.smollm2 import need_smollm2
from shoestring.errors import as_command
from shoestring.model.folder import read_spec


def table() -> str:
    lines = newest("start")
    digits = {"seconds": 2, "peak_mb": 0}
    cells = {(n["case"], n["metric"]): f"{n['value']:.{digits[n['metric']]}f}" for n in lines}
    cases = dict.fromkeys(n["case"] for n in lines)
    rows = [[case, cells[case, "seconds"], cells[case, "peak_mb"]] for case in cases]
    return markdown(["command", "seconds", "MB at most"], rows) + provenance(lines) if rows else ""


# A process begins with the most memory of the one that started it, so it is started by a small one.
_STARTED = """
import json, os, subprocess, sys, time
start, quiet = time.perf_counter(), subprocess.DEVNULL
process = subprocess.Popen(sys.argv[1:], stdout=quiet, stderr=quiet)
_, status, usage = os.wait4(process.pid, 0)
seconds = time.perf_counter() - start
print(json.dumps([os.waitstatus_to_exitcode(status), seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1e3]))
"""


def run(argv: list[str], folder: str, expected: int = 0) -> list[float]:
    """Seconds, seconds of processor time and the most megabytes (kB on Linux / 1,000) of one process."""
    launch = [sys.executable, "-c", _STARTED, sys.executable, *argv]
    code, *found = json.loads(subprocess.run(launch, cwd=folder, stdout=subprocess.PIPE, check=True).stdout)
    assert code == expected, (argv, code)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a case")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--note", default="", help="what else the machine does")
    args = parser.parse_args()
    model = str(need_smollm2())
    spec, _ = read_spec(model)
    weights = round(4 * spec.num_params() / 1e6, 1)
    commands: dict[str, tuple[list[str], int]] = {
        "inspect": (["inspect", model], 0),
        "typo": (["quantize", model, "int5"], 2),
        "generate": (["generate", model, "The library", "--max-tokens", "4", "--device", "cpu"], 0),
        "quantize": (["quantize", model, "int4", "device=cpu"], 0),
    }
    torch_mb = run(["-c", "import torch"], str(Path.cwd()))[-1]
    for case, (argv, code) in commands.items():
        if args.only not in case:
            continue
        with tempfile.TemporaryDirectory() as folder:
            samples = [run(["-m", "shoestring", *argv], folder, code) for _ in range(args.repeats)]
        config = {"model": "SmolLM2-135M-Instruct", "dtype": "fp32"}
        heavy = {"weights_mb": weights, "torch_mb": round(torch_mb, 1)} if case in ("generate", "quantize") else {}
        seconds, busy, peaks = [list(column) for column in zip(*samples, strict=True)]
        about = {"bench": "start", "case": case, "config": config, "note": args.note}
        record(**about, metric="seconds", unit="s", samples=seconds, quality={"processor_s": round(min(busy), 3)})
        line = record(**about, metric="peak_mb", unit="MB", samples=peaks, quality=heavy)
        print(f"{case:10} {sorted(seconds)[len(seconds) // 2]:6.2f} s {line['value']:8.0f} MB", flush=True)


if __name__ == "__main__":
    as_command(main)
