"""What the recipes of shrink/ share: the run, its inputs (model, rules, calibration windows) and its outputs (packed
model, rows before and after, report.html).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from shoestring.config import config_record, to_json
from shoestring.device import pick_dtype
from shoestring.errors import UserError, in_run
from shoestring.evals.model_row import corpus_of_run, fitting_context, need_tokenizer, read_tokens, validation_split
from shoestring.format_names import check_rules
from shoestring.formats import Format, parse_format, unpack
from shoestring.formats.convert import LayerTarget, Rule, resolve
from shoestring.host.block_offload import fits_on_device
from shoestring.json_files import read_object
from shoestring.mesh import Mesh
from shoestring.model import Decoder, LoadedModel, load_model, save_model
from shoestring.model.folder import read_spec, weight_files
from shoestring.model.tokenizer import Tokenizer
from shoestring.paths import expand, find_model
from shoestring.report import Curves, Section, Series, Table, Text, eval_table, run_sections, size_scatter, write_report
from shoestring.runlog import (
    AS_SAVED,
    RunLog,
    check_resume_from,
    check_run_folder,
    check_unfinished,
    open_run_folder,
    resumable,
    write_atomically,
)
from shoestring.shrink.block_files import BlockFiles
from shoestring.shrink.calibrate import windows
from shoestring.shrink.quality_gate import refuse, set_aside
from shoestring.shrink.quantize import HEADS, QuantizeReport
from shoestring.shrink.self_text import own_windows
from shoestring.state.agreement import on_main
from shoestring.state.files import DTYPES, check_room, write_json
from shoestring.state.run_lock import LOCK, check_not_held, hold_run, is_held
from shoestring.state.tensor_files import TensorFiles
from shoestring.train.shards import tokenize_corpus

OWN = "own"  # as `calib`: what the model writes itself
MIN_HELD_OUT = 128  # tokens that a perplexity of a held-out part needs
SOURCE = "source.json"  # of a run folder: stamps of the weight files that the run began with
STAMP_PIECES, STAMP_BYTES = 256, 4096
MAX_TOKENS = 5_000_000  # of a calibration corpus: windows are spread over these


@dataclass(frozen=True)
class ShrinkRun:
    recipe: str
    folder: Path
    log: RunLog
    mesh: Mesh
    compute: torch.dtype


@contextmanager
def open_run(
    recipe: str,
    cfg: Any,
    *sources: str | Path,
    device: torch.device,
    mesh: Mesh | None = None,
    done: Callable[[Path], str] = lambda folder: "",
) -> Iterator[ShrinkRun]:
    """The folder of a run whose settings are checked, new or resumed, with its log and its lock. `sources`: the models
    that it begins with. `done(folder)` says how far a stopped run came, where training does not."""
    settings, mesh = to_json(cfg), mesh or Mesh(0, 1, device)
    folder = on_main(mesh, open_run_folder, recipe, settings)
    on_main(mesh, keep_source, folder, *sources)
    with in_run(folder), resumable(recipe, folder, lambda: done(folder)), hold_run(folder, mesh):
        log = RunLog(folder, main=mesh.is_main)
        of_command = {key: value for key, value in AS_SAVED.items() if key in settings}
        log.save_config(config_record(recipe, cfg, **of_command, run=str(folder)))
        yield ShrinkRun(recipe, folder, log, mesh, pick_dtype(cfg.dtype, mesh.device))


def blocks_done(num_blocks: int, folder: Path) -> str:
    return f" after {BlockFiles(folder / 'blocks').count()} of {num_blocks} blocks"


def deliver_or_refuse(run: ShrinkRun, reason: str | None, *delivered: Path) -> None:
    """UserError on all ranks where the first has a `reason` (quality_gate.judge); it sets `delivered` aside."""
    reason = run.mesh.broadcast_object(reason)
    if reason is not None:
        kept = [str(set_aside(folder)) for folder in delivered] if run.mesh.is_main else []
        refuse(reason, f"resume={run.folder}", " and ".join(kept))


def run_once(mesh: Mesh, folder: Path, name: str, action: Callable[[], object]) -> None:
    """Run a long action on the first rank, once per run folder. The other ranks poll for its mark, because a collective
    would time out, and for the run's lock, which the first rank holds until it ends."""
    done, failed = folder / f"{name}.done", folder / f"{name}.failed"
    if mesh.is_main:
        if done.is_file():
            return
        failed.unlink(missing_ok=True)
        try:
            action()
        except BaseException as error:
            if mesh.world_size > 1:
                write_atomically(failed, str(error) or type(error).__name__)
            raise
        write_atomically(done, "")
        return
    began = time.time()
    while not done.is_file():
        # An older mark is that of an earlier attempt.
        if failed.is_file() and failed.stat().st_mtime > began - 1:
            raise UserError(f"the first process could not finish {name}: {failed.read_text()}")
        if (folder / LOCK).is_file() and not is_held(folder) and not done.is_file():
            raise UserError(f"the first process ended before {name} was finished; its own output says why")
        time.sleep(0.2)


# -- inputs --------------------------------------------------------------------------------------------------


def check_start(settings: dict[str, Any], deciding: Mapping[str, Any]) -> None:
    """The checks with which most recipes begin; `deciding` are the settings that a resumed run may not change."""
    check_model_given(settings["model"])
    check_run_folder(settings, deciding)
    if "resume_from" in settings:  # only recipes with checkpoints have it
        check_resume_from(settings)
    if settings["resume"] is not None:
        check_not_held(Path(settings["resume"]))
    check_unfinished(settings["resume"])


def keep_source(folder: Path, model: str | Path, *others: str | Path) -> None:
    """Note in a new run folder which weights the run begins with. UserError where a resumed one would go on with
    others: a model made of both, half of its blocks from each, would be no one's."""
    file, stamps = folder / SOURCE, {path.name: file_stamp(path) for path in weight_files(model)}
    for i, other in enumerate(others, start=1):
        stamps |= {f"{i}/{path.name}": file_stamp(path) for path in weight_files(other)}
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_json(file, stamps)
    elif read_object(file) != stamps:
        raise UserError(
            f"resume={folder}: the weights of {' and '.join(map(str, [model, *others]))} are not those that this run "
            "began with, and what it has done so far does not fit them; put the old ones back, or start a new run"
        )


def file_stamp(file: Path) -> str:
    """Of the size of a file and of pieces all over it: gigabytes are not read for it, and a copy has the same one."""
    size = file.stat().st_size
    hashed = hashlib.blake2b(str(size).encode(), digest_size=16)
    with file.open("rb") as opened:
        for i in range(STAMP_PIECES):
            opened.seek(max(0, size - STAMP_BYTES) * i // (STAMP_PIECES - 1))
            hashed.update(opened.read(STAMP_BYTES))
    return hashed.hexdigest()


def check_model_given(model: str) -> None:
    if not model:
        raise UserError("model= is missing: give a Hugging Face folder, a run folder or a .gguf file")


def read_rules(rules: str | None, format: str) -> list[tuple[str, Format]]:
    """The rules of a recipe's settings: `rules` where it is given, else `format` for all layers."""
    parsed = check_rules(rules) if rules else [("*", format)]
    return [(glob, parse_format(name)) for glob, name in parsed]


def check_results_fit(settings: dict[str, Any], model: Decoder, rules: Sequence[Rule]) -> None:
    """UserError where the disk has no room for the results, before the work. `model` may be without weights; what has
    no Format is stored in 16 bits at least."""
    check_targets_fit(settings, model.spec.num_params(), resolve(model, rules, HEADS)[0])


def check_targets_fit(settings: dict[str, Any], num_params: int, targets: Sequence[LayerTarget[Any]]) -> None:
    bits = 16.0 * num_params
    for t in targets:
        shape = t.host.shape
        bits += math.prod(shape) * (t.format.stored().bits_per_weight(shape) - 16)
    given = settings.get("resume") or settings["run"]
    run = Path("runs/new" if given is None else given)
    check_room(run / "model" if settings["out"] is None else Path(settings["out"]), int(bits / 8))
    if settings["dense_out"] is not None:
        check_room(Path(settings["dense_out"]), 2 * num_params)


def load_where_it_fits(
    model: str, device: torch.device, compute: torch.dtype, stream: Literal["auto", "true", "false"]
) -> tuple[LoadedModel, torch.device | None]:
    """The model, and the device that its blocks are moved to one at a time (None: the whole model is on the device)."""
    if stream == "false":
        return load_model(model, device=device, dtype=compute), None
    if Path(model).suffix == ".gguf":  # always read into host memory as a whole
        loaded = load_model(model, dtype=compute)
        if stream == "true" or not fits_on_device(loaded.spec.num_params(), device, compute):
            return loaded, device
        loaded.model.to(device)
        return loaded, None
    # Decided before a weight is read: what fits on the device is not loaded into host memory.
    if stream == "auto" and fits_on_device(read_spec(model)[0].num_params(), device, compute):
        return load_model(model, device=device, dtype=compute), None
    loaded = load_model(model, dtype=offload_dtype(model, compute))
    loaded.model.compute_dtype = compute
    return loaded, device


def offload_dtype(path: str | Path, compute: torch.dtype) -> torch.dtype:
    """The dtype in host memory of a model whose blocks compute in `compute`: the dtype of its files where `compute`
    holds all of its values, else `compute`.
    """
    if Path(path).suffix == ".gguf":  # de-quantized when it is read
        return compute
    folder = find_model(path)
    if not any((folder / f"model.safetensors{end}").is_file() for end in ("", ".index.json")):
        return compute  # packed, or no weights: loading raises
    files = TensorFiles(folder)
    stored: torch.dtype | None = None
    for name in files.names:
        found = DTYPES.get(files.dtype(name))
        if found is not None and found.is_floating_point and found.itemsize > 1:
            stored = found if stored is None else torch.promote_types(stored, found)
    return stored if stored is not None and torch.promote_types(stored, compute) == compute else compute


def calibration_windows(
    loaded: LoadedModel,
    model: str,
    calib: str | None,
    num_windows: int,
    context: int,
    method: str,
    *,
    hold_out: bool = False,
) -> Tensor:
    """[windows, context] token ids of `calib`: a text or a corpus, several of them with commas between (as many windows
    of each), or `own` for text that the model writes. None: the corpus that the run `model` was trained on, else `own`.
    `method` is for the error message. `hold_out` leaves the last tenth of a single text file alone (`held_out_text`).
    """
    source, max_mb = (calib, None) if calib is not None else corpus_of_run(Path(model))
    if source is None:
        if not _can_write(loaded):
            raise UserError(
                f"method={method} needs a calibration text: give calib=FILE or a corpus, several with commas between; "
                "not the text that is evaluated; or round without one: method=rtn"
            )
        print(f"no calib= was given: the model writes {num_windows} windows of text itself (calib={OWN})", flush=True)
        source = calib = OWN
    tokenizer, context = need_tokenizer(loaded), fitting_context("calib_context", context, loaded)
    sources = [source] if calib is None or expand(source).exists() else [one.strip() for one in source.split(",")]
    if "" in sources:  # a path that is empty would be the folder one is in
        raise UserError(f"calib={source} has no text beside one of its commas; give files or corpora between them")
    if len(sources) > num_windows:
        raise UserError(
            f"calib names {len(sources)} texts and calib_windows={num_windows}: use one window of each or more"
        )
    found = []
    for i, one in enumerate(sources):
        num = num_windows // len(sources) + (i < num_windows % len(sources))
        if calib is not None and one == OWN:
            if not _can_write(loaded):
                raise UserError("calib=own needs the whole model on its device: give a text or a corpus here")
            found.append(own_windows(loaded.model, tokenizer, num, context))
        else:
            tokens = _calibration_tokens(one, tokenizer, max_mb, calib is None)
            if hold_out and _is_text(one) and len(sources) == 1:
                tokens = tokens[: _held_out_from(len(tokens), num, context)]
            found.append(windows(tokens, num, context))
    return torch.cat(found)


def held_out_text(loaded: LoadedModel, calib: str, num_windows: int, context: int) -> tuple[Tensor | None, str]:
    """What calibration with `hold_out` has not seen, and its name: the last tenth of a text file, or the validation
    split of a corpus. (None, "") where the text is too short for both."""
    if calib == OWN or ("," in calib and not expand(calib).exists()):
        return None, ""
    tokenizer = need_tokenizer(loaded)
    if not _is_text(calib):
        found = validation_split(calib, tokenizer)
        return (found, f"{calib} (validation)") if len(found) >= MIN_HELD_OUT else (None, "")
    tokens = read_tokens(Path(calib), tokenizer)
    rest = tokens[_held_out_from(len(tokens), num_windows, fitting_context("calib_context", context, loaded)) :]
    return (rest, f"{Path(calib).name} (its last tenth, not calibrated on)") if len(rest) else (None, "")


def _held_out_from(num_tokens: int, num_windows: int, context: int) -> int:
    """Where the last tenth of a text begins; its end, where the windows need it all or a tenth says too little."""
    start = num_tokens - num_tokens // 10
    return start if start >= num_windows * context and num_tokens - start >= MIN_HELD_OUT else num_tokens


def _is_text(source: str) -> bool:
    return Path(source).is_file() and Path(source).suffix in (".txt", ".md", "")


def _can_write(loaded: LoadedModel) -> bool:
    """Whether the model is where it computes: not without weights, and not streamed from host memory."""
    model = loaded.model
    return model.device.type == "cuda" or (model.device.type == "cpu" and model.compute_dtype == torch.float32)


def _calibration_tokens(source: str, tokenizer: Tokenizer, max_mb: float | None, of_run: bool) -> Tensor:
    if _is_text(source):
        return read_tokens(Path(source), tokenizer)
    options: dict[str, Any] = {"max_bytes": None if max_mb is None else int(max_mb * 1e6)}
    options |= {"key": "data" if of_run else "calib", "progress": RunLog(None).progress}
    return tokenize_corpus(source, tokenizer=tokenizer, **options).train.head(MAX_TOKENS).to(torch.int64)


# -- outputs -------------------------------------------------------------------------------------------------


def report_before_after(
    recipe: str, log: RunLog, folder: Path, out: Path, *, plots: Sequence[Section] = (), tables: Sequence[Section] = ()
) -> None:
    """Print the rows before and after, and write report.html."""
    rows = log.evaluations()
    eval_table(rows, "Before and after").print()
    commands = f'shoestring inspect {out}\nshoestring generate {out} "Once upon a time"\nshoestring export {out} DIR'
    sections: list[Section] = [
        size_scatter("Size and perplexity", rows),
        *plots,
        *run_sections(folder),
        *tables,
        Text("Next", commands, code=True),
    ]
    page = write_report(folder, recipe, sections, subtitle=str(folder))
    log.say(f"packed model in {out}, report in {page}. Next:\n{commands}")
    log.close()


def save_quantized(loaded: LoadedModel, report: QuantizeReport, out: Path, dense_out: str | None, **notes: Any) -> None:
    """Save the packed model with errors and `notes` in quantization.json, and with `dense_out` the dense one."""
    model = loaded.model
    # Also what was never on the device: the files do not depend on streaming.
    model.to(model.compute_dtype)
    save_model(out, model, loaded.tokenizer)
    write_atomically(out / "quantization.json", json.dumps({**report.to_json(), **notes}, indent=1) + "\n")
    if dense_out is not None:
        unpack(model)
        save_model(dense_out, model, loaded.tokenizer)


def error_sections(log: RunLog, report: QuantizeReport) -> tuple[list[Section], list[Section]]:
    """The curve of errors by block; the tables of blocks and layers."""
    blocks = [row for row in log.history if "output_error" in row]
    curve = Series("output error", [row["step"] for row in blocks], [row["output_error"] for row in blocks])
    fields = [f.name for f in dataclasses.fields(report.layers[0])] if report.layers else []
    layers = [[getattr(layer, f) for f in fields] for layer in report.layers]
    trained = [[i, b["before"], b["after"]] for i, b in enumerate(report.blocks)]
    tables: list[Section] = [
        Table("Layers", [f.replace("_", " ") for f in fields], layers, "Errors are relative mean squares.")
    ]
    if trained:
        head = ["block", "error before", "error after"]
        tables.insert(0, Table("Blocks", head, trained, "On windows held out."))
    return [Curves("Error by block", [curve], "block", "mean square of the outputs' change, relative")], tables
