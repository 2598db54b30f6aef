"""Measuring a model: its size, perplexity, task accuracy and speed, each as one flat row.

A row has the keys of `report.EVAL_COLUMNS`, so that evals.jsonl, the console and report.html show the same table.
Megabytes are those of the weight files, as `ls -l` and `shoestring inspect` say them: the files that were read, or, of
a model that was changed since, those that `save_model` would write. `--speed` is a quick look; benchmarks/ has warm-up
and spread.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoestring.errors import UserError
from shoestring.formats import Dense, keep_decoded
from shoestring.formats.convert import format_hosts, format_linears
from shoestring.json_files import read_text
from shoestring.paths import check_text, expand
from shoestring.runlog import RunLog, read_config

if TYPE_CHECKING:
    from shoestring.host.block_offload import BlockOffload
    from shoestring.model.folder import LoadedModel
    from shoestring.model.gguf_file import GgufTensor
    from shoestring.model.tokenizer import Tokenizer
    from shoestring.model.transformer import Decoder

ROWS = 4096  # per forward pass of an evaluation: fills a processor, small beside the weights


def ready(loaded: LoadedModel) -> LoadedModel:
    """Set for inference. On a CPU, which has no kernels for packed weights, decode them once."""
    loaded.model.eval()
    if loaded.model.device.type == "cpu":
        keep_decoded(loaded.model, dtype=loaded.model.compute_dtype)
    return loaded


# -- size --------------------------------------------------------------------------------------------


def size_of(loaded: LoadedModel, *, changed: bool = False) -> dict[str, float]:
    """Megabytes of the weight files, and stored bits per weight of the linear layers without embedding and head.

    `changed`: since the model was loaded, so that its files say nothing about it.
    """
    from shoestring.model.folder import weight_files
    from shoestring.model.save import saved_files
    from shoestring.state.files import model_bytes

    model = loaded.model
    if changed:
        files = saved_files(model)
        total, dtype = model_bytes(files), _float_dtype((t.dtype, t.num_bytes) for part in files.values() for t in part)
    else:
        total = sum(f.stat().st_size for f in weight_files(loaded.path))
        if stored := _gguf_blocks(loaded):
            return {"megabytes": round(total / 1e6, 3), "bits_per_weight": round(_bits(stored), 3)}
        dtype = _float_dtype(_folder_tensors(loaded))
    row = {"megabytes": round(total / 1e6, 3)}
    layers = [layer for name, layer in format_linears(model) if name != "head"]
    weights = [layer.in_features * layer.out_features for layer in layers]
    if layers:
        stored_bits = [layer.format.bits_per_weight(layer.shape, dtype) for layer in layers]
        bits = sum(b * n for b, n in zip(stored_bits, weights, strict=True))
        row["bits_per_weight"] = round(bits / sum(weights), 3)
    return row


def _float_dtype(tensors: Iterable[tuple[torch.dtype, int]]) -> torch.dtype:
    """The floating dtype with most bytes, of (dtype, bytes): that of dense weights and of what 2:4 masks keep."""
    sizes: Counter[torch.dtype] = Counter()
    for dtype, num_bytes in tensors:
        if dtype.is_floating_point:
            sizes[dtype] += num_bytes
    return max(sizes, key=lambda d: sizes[d], default=torch.bfloat16)


def _folder_tensors(loaded: LoadedModel) -> Iterator[tuple[torch.dtype, int]]:
    """(dtype, bytes) of every tensor in the files of a folder."""
    from shoestring.model.folder import weight_files
    from shoestring.state.files import DTYPES
    from shoestring.state.tensor_files import open_tensors

    for path in weight_files(loaded.path):
        opened = open_tensors(path)
        for name in opened.keys():  # noqa: SIM118  (not a dict)
            tensor = opened.get_slice(name)
            if (dtype := DTYPES.get(str(tensor.get_dtype()))) is not None:
                yield dtype, math.prod(tensor.get_shape()) * dtype.itemsize


def _gguf_blocks(loaded: LoadedModel) -> list[GgufTensor]:
    """The matrices of a GGUF file but for embedding and head; none where the model is a folder.

    The model computes with decoded values, so its layers do not say what the file holds."""
    from shoestring.model.folder import weight_files
    from shoestring.model.gguf_file import open_gguf

    (first, *_) = weight_files(loaded.path)
    if first.suffix != ".gguf":
        return []
    return [t for t in open_gguf(first).tensors.values() if t.name.startswith("blk.") and len(t.shape) > 1]


def _bits(stored: list[GgufTensor]) -> float:
    return 8 * sum(t.num_bytes for t in stored) / sum(math.prod(t.shape) for t in stored)


def stored_format(loaded: LoadedModel) -> str:
    """What the file holds: formats_name, or a GGUF file's own types, the one with most bytes first."""
    sizes: Counter[str] = Counter()
    for t in _gguf_blocks(loaded):
        sizes[t.kind] += t.num_bytes
    return " + ".join(kind for kind, _ in sizes.most_common()) or formats_name(loaded.model)


def formats_name(model: nn.Module) -> str:
    """The formats of a model's layers: 'dense', 'int4:g64', or several joined by +, those of embeddings last."""
    inner = [layer.format.label for name, layer in format_linears(model) if name != "head"]
    ends = [host.format.label for _, host in format_hosts(model) if not isinstance(host.format, Dense)]
    return " + ".join(dict.fromkeys([*inner, *ends])) or "dense"


def megabytes_on_disk(path: Path) -> float:
    """Of a file, or of all files in a folder."""
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return sum(p.stat().st_size for p in files) / 1e6


# -- evaluation --------------------------------------------------------------------------------------


def evaluate_row(
    loaded: LoadedModel,
    label: str,
    tokens: Tensor | None = None,
    text: str = "",
    *,
    context: int = 1024,
    stride: int | None = None,
    max_tokens: int | None = None,
    speed: bool = False,
    offload: BlockOffload | None = None,
    changed: bool = False,
) -> dict[str, Any]:
    """One model as one row: its format and size, perplexity where tokens are given, speed where asked.

    changed: the model is not what lies at loaded.path any more.
    offload: the model stays in the host's memory, and one block at a time is on the device that is named there.
    """
    if offload is None and (tokens is not None or speed):  # else nothing is computed
        ready(loaded)
    stored = formats_name(loaded.model) if changed else stored_format(loaded)
    row: dict[str, Any] = {"model": label, "format": stored, **size_of(loaded, changed=changed)}
    if tokens is not None:
        context = min(context, loaded.spec.max_positions)
        row |= {"text": text, **measure_perplexity(loaded.model, tokens, context, stride, max_tokens, offload)}
    if speed:
        row |= measure_speed_of(loaded.model)
    return row


def fitting_context(key: str, context: int, loaded: LoadedModel) -> int:
    """`context`, or the model's positions where they are fewer, with a message."""
    room = loaded.spec.max_positions
    if context > room:
        RunLog(None).say(f"{key}={context} is more than the model's {room} positions: windows of {room} are used")
    return min(context, room)


def measure_perplexity(
    model: Decoder,
    tokens: Tensor,
    context: int,
    stride: int | None = None,
    max_tokens: int | None = None,
    offload: BlockOffload | None = None,
) -> dict[str, Any]:
    from shoestring.evals.perplexity import perplexity

    batch = max(1, ROWS // max(1, context))
    with RunLog(None).progress(min(len(tokens), max_tokens or len(tokens)), "perplexity") as bar:

        def progress(done: int, total: int) -> None:
            bar.expect(total)  # fewer than tokens: the first of a window is not predicted
            bar.advance(done - bar.done)

        options: dict[str, Any] = {"context": context, "stride": stride, "max_tokens": max_tokens, "batch": batch}
        result = perplexity(model, tokens, **options, progress=progress, offload=offload)
    return {
        "perplexity": round(result.value, 4),
        "num_tokens": result.num_tokens,
        "context": result.context,
        "stride": result.stride,
    }


def measure_speed_of(model: Decoder, *, prompt: int = 128, new: int = 32, repeats: int = 3) -> dict[str, float]:
    from shoestring.evals.speed import measure_speed

    prompt = min(prompt, model.spec.max_positions // 2)
    new = min(new, model.spec.max_positions - prompt)
    result = measure_speed(model, prompt=prompt, new=new, repeats=repeats)
    return {
        "prefill_tokens_per_s": round(result.prefill_tokens_per_s, 1),
        "decode_tokens_per_s": round(result.decode_tokens_per_s, 1),
    }


def measure_task(loaded: LoadedModel, label: str, path: Path, limit: int | None = None) -> dict[str, Any]:
    from shoestring.evals.tasks import run_task

    result = run_task(loaded.model, need_tokenizer(loaded), path, limit=limit)
    row = {"model": label, "format": formats_name(loaded.model), "task": result.name}
    return {**row, "accuracy": round(result.accuracy, 4), "num": result.num}


# -- texts -------------------------------------------------------------------------------------------


def text_tokens(
    loaded: LoadedModel, given: str, *, text: str | None = None, data: str | None = None
) -> tuple[Tensor | None, str]:
    """The tokens to measure perplexity on, and their name; (None, "") when there are none.

    A text file, the validation split of a corpus, or, when `given` is a run, that of its own corpus.
    """
    if text is not None and data is not None:
        raise UserError("both a text and a corpus (data) are given; give one of them")
    if text is not None:
        return read_tokens(Path(text), need_tokenizer(loaded)), Path(text).name
    if data is not None:
        return validation_tokens(data, need_tokenizer(loaded)), f"{data} (validation)"
    data, max_mb = corpus_of_run(Path(given))
    if data is None:
        return None, ""
    tokenizer = need_tokenizer(loaded)
    try:
        val = validation_split(data, tokenizer, max_mb)
    except UserError as error:
        raise UserError(
            f"the corpus of {given} cannot be read; evaluate on another text (text=FILE, --text FILE), "
            f"or go to where it can: {error}"
        ) from None
    # A run on a text too short for a validation split. No text was requested, so this is no error.
    return (None, "") if len(val) < 2 else (val, f"{data} (validation)")


def need_tokenizer(loaded: LoadedModel) -> Tokenizer:
    if loaded.tokenizer is None:
        raise UserError(f"{loaded.path} has no tokenizer; put its tokenizer.json into the folder")
    return loaded.tokenizer


def check_apart(settings: dict[str, Any], *keys: str) -> None:
    """UserError if the evaluated text is also one of the settings `keys`, which are texts to learn from."""
    for key in keys:
        text, other = settings["text"], settings[key]
        if text is None or other is None:
            continue
        mine = Path(text)
        theirs = [expand(one.strip()) for one in (other, *other.split(","))]  # several texts have commas between
        if mine.exists() and any(one.exists() and mine.samefile(one) for one in theirs):
            raise UserError(
                f"text={text} and {key}={other} are the same file: a perplexity measured there flatters the result; "
                "give two texts"
            )


def read_tokens(path: Path, tokenizer: Tokenizer) -> Tensor:
    """A whole text file as token ids, at least two."""
    check_text(path)
    ids = tokenizer.encode(read_text(path))
    if len(ids) < 2:
        raise UserError(f"{path} has less than two tokens; give a longer text")
    return torch.tensor(ids, dtype=torch.int64)


def validation_tokens(data: str, tokenizer: Tokenizer) -> Tensor:
    """The validation split of a requested corpus; UserError where it is empty."""
    val = validation_split(data, tokenizer)
    if len(val) < 2:
        raise UserError(
            f"data={data} has no document in its validation split; give more text, or a text file (text=FILE for a "
            "recipe, --text FILE for a command)"
        )
    return val


def validation_split(data: str, tokenizer: Tokenizer, max_mb: float | None = None) -> Tensor:
    """The validation split of a corpus, tokenised once and cached; it may be empty."""
    from shoestring.train.shards import tokenize_corpus

    max_bytes = None if max_mb is None else int(max_mb * 1e6)
    corpus = tokenize_corpus(data, tokenizer=tokenizer, max_bytes=max_bytes, progress=RunLog(None).progress)
    return corpus.val.head()


def is_run(path: Path) -> bool:
    return "recipe" in read_config(path)


def corpus_of_run(path: Path) -> tuple[str | None, float | None]:
    """The corpus of a run and its max_mb; for a run that shrank a model, those of that model's run."""
    config = read_config(path).get("config", {})
    if config.get("data"):
        return str(config["data"]), config.get("max_mb")
    return corpus_of_run(Path(config["model"])) if config.get("model") else (None, None)
