"""A corpus as token ids on disk, made once and memory-mapped ever after.

`tokenize_corpus` reads the documents of a source, sends each to the training or the validation split by a hash of
its own text (so the split does not depend on order or on the other documents), encodes them in batches and
writes one array of ids per split: document, EOS, document, EOS, ... Where documents have prompts, a second
array says which tokens are counted.

The folder of a corpus is named after everything that decides its content (files with size and time,
tokenizer, options), is written beside its place and renamed when complete: a folder that exists is complete
and is read. Processes that start at the same time wait for the one that builds.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoestring.config import option
from shoestring.errors import UserError
from shoestring.model.folder import read_spec
from shoestring.model.tokenizer import Tokenizer
from shoestring.paths import cache_folder
from shoestring.runlog import OpenProgressBar, RunLog
from shoestring.train.corpus import PYTHON, Document, Reading, SourceFile, list_files, read_files

VERSION = 2  # of the files below; part of the key, so that older ones are not misread
SPLITS = ("train", "val")
TOKENIZER_TEXT = 10_000_000  # bytes of training documents that a new tokenizer is trained on
MAX_WORD = 1000  # characters
_LETTER, _MARK = r"[^\W\d_]", r"(?:[^\w\s]|_)"  # the runs that byte-level BPE takes for words
_LONG_WORD = re.compile("|".join(f"(?<!{one}){one}{{{MAX_WORD + 1},}}" for one in (_LETTER, _MARK, r"\s")))
_LONG_SPACE = re.compile(rf"\s{{{MAX_WORD + 1}}}")
_BATCH_DOCUMENTS, _BATCH_BYTES = 512, 2_000_000  # encoded at a time


@dataclass(frozen=True)
class TokenShards:
    """One split: token ids end to end, and which of them are counted (None: all)."""

    tokens: np.ndarray
    mask: np.ndarray | None
    fingerprint: str  # of the content: equal ids and masks give equal fingerprints on every machine
    name: str = "train"
    num_documents: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def head(self, num_tokens: int | None = None) -> Tensor:
        """The first tokens as an int64 tensor."""
        return torch.from_numpy(self.tokens[:num_tokens].astype(np.int64))


@dataclass(frozen=True)
class Corpus:
    train: TokenShards
    val: TokenShards  # may be empty: a corpus of few documents, or val_fraction=0
    tokenizer: Tokenizer
    folder: Path
    num_unreadable: int = 0


@dataclass(frozen=True)
class CorpusConfig:
    data: str = option(
        "python", "file, folder or glob of .txt .md .py .jsonl .parquet; python: the Python sources of this machine"
    )
    max_mb: float | None = option(100.0, "read at most this many megabytes of the corpus; none reads all", least=0.001)
    tokenizer: str | None = option(None, "folder or tokenizer.json to use; none trains a BPE on the corpus")
    vocab_size: int = option(  # 256 bytes, end of text
        4096, "vocabulary of the tokenizer that is trained", least=257, deciding=True
    )


def load_corpus(cfg: CorpusConfig, init_from: str | None = None, progress: OpenProgressBar | None = None) -> Corpus:
    """The corpus of a training run, in the tokens of tokenizer=, else of the model that it goes on from, else in new
    ones. Tokenised once by one process; the others read what it wrote."""
    tokenizer = None
    if cfg.tokenizer is not None:
        tokenizer = Tokenizer.from_file(cfg.tokenizer)
    elif init_from is not None:
        tokenizer = read_spec(init_from)[1]
        if tokenizer is None:
            raise UserError(f"init_from={init_from} has no tokenizer; give its own with tokenizer=")
    max_bytes = None if cfg.max_mb is None else int(cfg.max_mb * 1e6)
    options: dict[str, Any] = {"tokenizer": tokenizer, "vocab_size": cfg.vocab_size, "max_bytes": max_bytes}
    return tokenize_corpus(cfg.data, **options, progress=progress)


def tokenize_corpus(
    source: str,
    cache_dir: str | Path | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    vocab_size: int = 4096,
    max_bytes: int | None = None,
    val_fraction: float = 0.02,
    progress: OpenProgressBar | None = None,
    key: str = "data",
) -> Corpus:
    """The tokenised corpus of `source`, from the cache where it is there; `key` is the setting that gave it.

    Without a tokenizer, one of `vocab_size` tokens is trained on the training split.
    """
    if not 0 <= val_fraction < 1:
        raise UserError(f"val_fraction={val_fraction} must be at least 0 and less than 1")
    if max_bytes is not None and max_bytes < 1:
        raise UserError(f"max_bytes={max_bytes} must be positive; leave it out to read everything")
    cache = Path(cache_dir) if cache_dir is not None else cache_folder()
    files = list_files(source, key)
    origin = {
        "version": VERSION,
        "files": [(f.name, str(f.path.absolute()), f.size, f.mtime_ns) for f in files],
        "python": source == PYTHON,
        "max_bytes": max_bytes,
        "val_fraction": val_fraction,
    }
    read = _Read(source, files, max_bytes, val_fraction, progress or RunLog(None, quiet=True).progress, key)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if tokenizer is None:
            folder = cache / f"tokenizer-{_key({**origin, 'vocab_size': vocab_size})}"
            if not (folder / "tokenizer.json").is_file():
                _build(folder, "tokenizer.json", lambda temp: _train_tokenizer(temp, read, vocab_size))
            tokenizer = Tokenizer.from_file(folder)
        folder = cache / f"corpus-{_key({**origin, 'tokenizer': tokenizer.fingerprint})}"
        if not is_whole(folder):
            _build(folder, "index.json", lambda temp: _tokenize(temp, read, tokenizer))
        return open_corpus(folder, tokenizer)
    except OSError as error:
        hint = " The disk is full." if error.errno == errno.ENOSPC else ""
        raise UserError(
            f"cannot write the tokenised corpus to {cache}: {error.strerror or error}.{hint} "
            "Set SHOESTRING_CACHE to a folder with room"
        ) from error


def in_validation(document: Document, fraction: float) -> bool:
    """Decided by the document alone: the same text is on the same side in every corpus."""
    digest = hashlib.blake2b((document.prompt or "").encode() + b"\0" + document.text.encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "big") < fraction * 2**64


# --- building -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Read:
    """Everything needed to go through the documents, as often as needed."""

    source: str
    files: list[SourceFile]
    max_bytes: int | None
    val_fraction: float
    progress: OpenProgressBar
    key: str

    @property
    def given(self) -> str:
        return f"{self.key}={self.source}"

    @property
    def num_bytes(self) -> int:
        total = sum(f.size for f in self.files)
        return total if self.max_bytes is None else min(total, self.max_bytes)

    def documents(self, reading: Reading | None = None) -> Iterator[Document]:
        return read_files(self.files, skip_bad=self.source == PYTHON, max_bytes=self.max_bytes, reading=reading)


def _train_tokenizer(folder: Path, read: _Read, vocab_size: int) -> None:
    limit = min(read.num_bytes, TOKENIZER_TEXT)
    with read.progress(limit, "tokenizer") as bar:

        def texts() -> Iterator[str]:
            left = limit
            for document in read.documents():
                if left <= 0:
                    return
                if not in_validation(document, read.val_fraction):
                    left -= document.num_bytes
                    yield from cut_long_words((document.prompt or "") + document.text)
                    bar.advance(document.num_bytes)

        trained = Tokenizer.train(_not_empty(texts(), read.given), vocab_size)
        bar.expect(bar.done)  # the bytes of the files were an estimate
    trained.save(folder)


def cut_long_words(text: str) -> Iterator[str]:
    """The text for the training of a tokenizer, which takes the square of a word's length in time: runs of letters, of
    marks or of spaces (a genome, base64) are cut after MAX_WORD characters. What is not that long stays whole."""
    start = 0
    has_some = max(map(len, text.split()), default=0) > MAX_WORD or _LONG_SPACE.search(text)  # fast: few texts have
    for run in _LONG_WORD.finditer(text) if has_some else ():
        for cut in range(run.start() + MAX_WORD, run.end(), MAX_WORD):
            yield text[start:cut]
            start = cut
    yield text[start:]


def _not_empty(texts: Iterator[str], given: str) -> Iterator[str]:
    first = next(texts, None)
    if first is None:
        raise UserError(f"{given} has no text to learn from; all its files are empty")
    yield first
    yield from texts


def _tokenize(folder: Path, read: _Read, tokenizer: Tokenizer) -> None:
    if tokenizer.eos_id is None:
        raise UserError(
            "the tokenizer has no EOS token to put between documents; set eos_token in its tokenizer_config.json"
        )
    dtype = np.dtype("<u2") if tokenizer.vocab_size <= 65536 else np.dtype("<u4")
    num_added = int(tokenizer.adds_eos)

    def encode(texts: list[str]) -> list[list[int]]:
        """Without the EOS of tokenizers that add one: a document gets one below, and a prompt none."""
        return [ids[: len(ids) - num_added] for ids in tokenizer.encode_batch(texts)]

    reading = Reading()
    with contextlib.ExitStack() as stack:
        writers = {split: stack.enter_context(_SplitWriter(folder, split, dtype)) for split in SPLITS}
        bar = stack.enter_context(read.progress(read.num_bytes, "tokenise"))
        for batch in _batches(read.documents(reading)):
            has_prompts = any(d.prompt is not None for d in batch)
            prompts = encode([d.prompt or "" for d in batch]) if has_prompts else None
            # Behind a prompt the text begins in the middle: nothing (no BOS) is added in front of it.
            whole = [d.text for d in batch]
            texts = encode(whole) if prompts is None else tokenizer.encode_batch(whole, special=False)
            for i, document in enumerate(batch):
                prompt: list[int] = []
                text = texts[i]
                if prompts is not None and document.prompt is not None:
                    prompt = prompts[i]
                elif prompts is not None:
                    text = encode([document.text])[0]
                split = "val" if in_validation(document, read.val_fraction) else "train"
                writers[split].add(prompt, [*text, tokenizer.eos_id])
            bar.advance(sum(d.num_bytes for d in batch))
        bar.expect(bar.done)  # files hold other bytes than their texts, and texts that are passed over
    if reading.num_documents == 0:
        raise UserError(f"{read.given} has no text to learn from; all its files are empty")
    if writers["train"].num_tokens == 0:
        raise UserError(
            f"{read.given} has only {reading.num_documents} documents, all of which fell to the validation split; "
            "give more text, or set val_fraction=0"
        )
    index = {
        "version": VERSION,
        "source": read.source,
        "tokenizer": tokenizer.fingerprint,
        "dtype": dtype.str,
        "num_unreadable": reading.num_unreadable,
        "num_duplicates": reading.num_duplicates,
        "splits": {split: writer.summary() for split, writer in writers.items()},
    }
    (folder / "index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if len(batch) >= _BATCH_DOCUMENTS or size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _SplitWriter:
    """Appends documents to <split>.bin, and to <split>.mask once a document has a prompt."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype) -> None:
        self._tokens = (folder / f"{split}.bin").open("wb")
        self._mask_path = folder / f"{split}.mask"
        self._mask: Any = None
        self._dtype = dtype
        self._hash = hashlib.blake2b(digest_size=16)
        self.num_tokens = self.num_documents = 0

    def add(self, prompt: list[int], text: list[int]) -> None:
        if prompt and self._mask is None:
            self._mask = self._mask_path.open("wb")
            for start in range(0, self.num_tokens, 1 << 20):  # everything so far was counted
                self._mask.write(b"\1" * min(1 << 20, self.num_tokens - start))
        ids = np.array(prompt + text, dtype=np.int64)
        self._tokens.write(ids.astype(self._dtype).tobytes())
        # The hash must not depend on the width of the ids, and must see where prompts end.
        self._hash.update(np.array([len(prompt), len(text)], dtype="<i8").tobytes())
        self._hash.update(ids.astype("<i8").tobytes())
        if self._mask is not None:
            self._mask.write(b"\0" * len(prompt) + b"\1" * len(text))
        self.num_tokens += len(ids)
        self.num_documents += 1

    def summary(self) -> dict[str, Any]:
        return {
            "num_tokens": self.num_tokens,
            "num_documents": self.num_documents,
            "masked": self._mask is not None,
            "fingerprint": self._hash.hexdigest(),
        }

    def __enter__(self) -> _SplitWriter:
        return self

    def __exit__(self, *error: object) -> None:
        for file in (self._tokens, self._mask):
            if file is not None:
                if error[0] is None:
                    file.flush()
                    os.fsync(file.fileno())
                file.close()


# --- the cache ----------------------------------------------------------------------------------


def _build(folder: Path, last_file: str, write: Callable[[Path], None]) -> None:
    """Write `folder` by `write(temporary folder)`, once even if many processes ask at the same time."""
    with _locked(folder.with_suffix(".lock")):
        if is_whole(folder) if last_file == "index.json" else (folder / last_file).is_file():
            return  # another process built it while this one waited
        # Leftovers of runs that were killed: under the lock no process writes them any more.
        for leftover in (folder, *folder.parent.glob(f"{folder.name}.tmp-*")):
            shutil.rmtree(leftover, ignore_errors=True)
        temp = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
        temp.mkdir()
        try:
            write(temp)
            temp.rename(folder)
        except BaseException:
            shutil.rmtree(temp, ignore_errors=True)
            raise


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Held by one process at a time; the system releases it when that process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _key(origin: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(origin, sort_keys=True).encode(), digest_size=12).hexdigest()


def is_whole(folder: Path) -> bool:
    """Whether the index is there and every array has the length it states."""
    try:
        index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        width = np.dtype(index["dtype"]).itemsize
        for split in SPLITS:
            stated = index["splits"][split]
            if (folder / f"{split}.bin").stat().st_size != stated["num_tokens"] * width:
                return False
            if stated["masked"] and (folder / f"{split}.mask").stat().st_size != stated["num_tokens"]:
                return False
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


def open_corpus(folder: Path, tokenizer: Tokenizer) -> Corpus:
    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    dtype = np.dtype(index["dtype"])
    splits = {}
    for split in SPLITS:
        stated = index["splits"][split]
        splits[split] = TokenShards(
            tokens=_map(folder / f"{split}.bin", dtype, stated["num_tokens"]),
            mask=_map(folder / f"{split}.mask", np.dtype(np.uint8), stated["num_tokens"]) if stated["masked"] else None,
            fingerprint=stated["fingerprint"],
            name=split,
            num_documents=stated["num_documents"],
        )
    return Corpus(splits["train"], splits["val"], tokenizer, folder, index["num_unreadable"])


def _map(path: Path, dtype: np.dtype, length: int) -> np.ndarray:
    if length == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r", shape=(length,))
