"""Documents from text sources: files, folders, globs, and this machine's own Python sources.

A source is a string: "python", a file, a folder (read recursively) or a glob. `list_files` says which files
it means, in a fixed order; `documents` reads them one document at a time, so that a corpus may be larger
than memory. A file that cannot be read is an error that names the file and the place; only "python", whose files
were not chosen by hand, skips unreadable files and counts them.

Left out: the web, compressed files, cleaning and near-duplicate removal.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import mmap
import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from shoestring.errors import UserError, shortened, shown, suggest
from shoestring.json_files import MOST_TEXT, json_lines, kind_of, parse_json, read_json
from shoestring.paths import expand

PYTHON = "python"
SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet")
END_OF_TEXT = "<|endoftext|>"

_BLOCK = 1 << 20  # bytes read at a time
_MIN_CHUNK = 2048  # characters: a text without marks is cut at blank lines into pieces of at least this
_MAX_CHUNK = 32768  # ... and at a line end, then anywhere, where no blank line comes for so long
_MOST_UNFOLDED = 1 << 28  # bytes that a row group of a parquet file may have, however small the file is
_MOST_EMPTY = 100_000  # documents without text, one after the other
_MOST_DOCUMENT = 1 << 26  # characters; also how far a mark is looked for in a text
_BLANK_LINE = re.compile(r"\n[ \t\r]*\n\s*")


@dataclass(frozen=True)
class Document:
    """A text to learn. `prompt` comes before it and is read, but not counted in the loss."""

    text: str
    prompt: str | None = None

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode()) + len((self.prompt or "").encode())


@dataclass
class Reading:
    """What happened while reading: filled in by `documents`."""

    num_documents: int = 0
    num_bytes: int = 0
    num_duplicates: int = 0
    num_unreadable: int = 0
    reached_limit: bool = False


class SourceFile(NamedTuple):
    path: Path
    name: str  # relative to the root of the source; decides the order, wherever that root is
    size: int
    mtime_ns: int


def documents(
    source: str, *, max_bytes: int | None = None, reading: Reading | None = None, key: str = "data"
) -> Iterator[Document]:
    """Every document of the source, in a fixed order, at most `max_bytes` of text in all."""
    files = list_files(source, key)
    yield from read_files(files, skip_bad=source == PYTHON, max_bytes=max_bytes, reading=reading)


def read_files(
    files: list[SourceFile], *, skip_bad: bool = False, max_bytes: int | None = None, reading: Reading | None = None
) -> Iterator[Document]:
    reading = reading if reading is not None else Reading()
    seen: set[bytes] = set()
    num_empty = 0
    for file in files:
        try:
            for document in _read_file(file.path):
                if not document.text.strip():
                    num_empty += 1
                    if num_empty > _MOST_EMPTY:
                        raise UserError(f"{file.path} has {num_empty:,} documents without text in a row; clean it")
                    continue
                num_empty = 0
                if skip_bad:  # the same file is often vendored into several packages
                    digest = hashlib.blake2b(document.text.encode(), digest_size=16).digest()
                    if digest in seen:
                        reading.num_duplicates += 1
                        continue
                    seen.add(digest)
                size = document.num_bytes
                if max_bytes is not None and reading.num_documents and reading.num_bytes + size > max_bytes:
                    reading.reached_limit = True
                    return
                reading.num_documents += 1
                reading.num_bytes += size
                yield document
        except UserError:
            if not skip_bad:
                raise
            reading.num_unreadable += 1


# --- which files --------------------------------------------------------------------------------


def list_files(source: str, key: str = "data", suffixes: tuple[str, ...] = SUFFIXES) -> list[SourceFile]:
    """The files a source means; never empty. `key` is the setting that gave it, for errors."""
    texts = suffixes == SUFFIXES
    if source == PYTHON and texts:
        return _python_files()
    path, allowed = expand(source), ", ".join(suffixes)
    if path.is_file():
        if path.suffix.lower() not in suffixes:
            hint = ". Rename it to .txt if it is plain text" if texts else ""
            kind = "corpora" if texts else "samples"
            raise UserError(f"{source} ends in {path.suffix or 'nothing'!r}; {kind} are {allowed} files{hint}")
        return [_source_file(path, path.parent)]
    if path.is_dir():
        found = [p for p in _walk(path) if p.suffix.lower() in suffixes]
        if not found:
            raise UserError(f"{source} holds no {allowed} file, nor do the folders in it")
        return _in_order(found, path)
    if glob.has_magic(source):
        found = [Path(p) for p in glob.glob(str(path), recursive=True)]  # noqa: PTH207 (an absolute pattern)
        found = [p for p in found if p.is_file() and p.suffix.lower() in suffixes]
        if not found:
            raise UserError(f"no {allowed} file matches {source}")
        return _in_order(found, Path(os.path.commonpath([p.parent for p in found])))
    python = f", or 'python' for this machine's Python sources.{suggest(source, [PYTHON])}" if texts else ""
    raise UserError(f"{key}={source} does not exist; give a file ({allowed}), a folder, a glob in quotes{python}")


def _python_files() -> list[SourceFile]:
    """Python's standard library and the installed packages.

    Ordered by a hash of their names: a part of the corpus (max_bytes) is then a mixture of all packages and
    not those that begin with "a".
    """
    paths = sysconfig.get_paths()
    installed = {paths["purelib"], paths["platlib"], *site.getsitepackages()}
    installed |= {p for p in sys.path if p.endswith(("site-packages", "dist-packages"))}
    # lib64 is often a link to lib; remaining duplicates are dropped by content.
    roots = dict.fromkeys(Path(p).resolve() for p in (paths["stdlib"], *sorted(installed)))
    found: list[SourceFile] = []
    for root in roots:
        walk = _walk(root, leave_out=("site-packages", "dist-packages", "__pycache__"))
        found += [_source_file(path, root) for path in walk if path.suffix == ".py"]
    if not found:
        raise UserError("this Python has no .py sources on disk; give a file or a folder as data")
    return sorted(found, key=lambda f: (hashlib.blake2b(f.name.encode()).digest(), str(f.path)))


def _walk(root: Path, leave_out: tuple[str, ...] = ()) -> Iterator[Path]:
    for folder, names, files in os.walk(root):
        names[:] = sorted(n for n in names if not n.startswith(".") and n not in leave_out)
        yield from (Path(folder) / name for name in sorted(files) if not name.startswith("."))


def _in_order(paths: list[Path], root: Path) -> list[SourceFile]:
    return sorted((_source_file(p, root) for p in paths), key=lambda f: f.name)


def _source_file(path: Path, root: Path) -> SourceFile:
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    return SourceFile(path, path.relative_to(root).as_posix(), status.st_size, status.st_mtime_ns)


# --- what is in them ----------------------------------------------------------------------------


def _read_file(path: Path) -> Iterator[Document]:
    suffix = path.suffix.lower()
    try:
        if suffix == ".jsonl":
            yield from _read_jsonl(path)
        elif suffix == ".parquet":
            yield from _read_parquet(path)
        elif suffix == ".py":
            if path.stat().st_size > _MOST_DOCUMENT:
                raise UserError(f"{path} has more than {_MOST_DOCUMENT:,} bytes, which no program has; leave it out")
            yield Document("".join(_decoded(path)))
        else:
            yield from (Document(text) for text in _read_text(path))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def _decoded(path: Path) -> Iterator[str]:
    """The text of a UTF-8 file, block by block."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0
    with path.open("rb") as file:
        while True:
            block = file.read(_BLOCK)
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise _not_utf8(path, offset - pending + error.start) from None
            yield text.removeprefix("\ufeff") if offset == 0 else text
            if not block:
                return
            offset += len(block)


def _not_utf8(path: Path, offset: int) -> UserError:
    return UserError(
        f"{path} is not UTF-8 text: byte {offset} does not decode; convert it, for example with "
        f"iconv -f latin1 -t utf-8"
    )


def _read_text(path: Path) -> Iterator[str]:
    marked = _contains(path, END_OF_TEXT.encode())
    buffer = ""
    for block in _decoded(path):
        buffer += block
        if len(buffer) > _MOST_DOCUMENT:
            raise UserError(f"{path} has a document of more than {_MOST_DOCUMENT:,} characters; mark where texts end")
        if marked:
            *whole, buffer = buffer.split(END_OF_TEXT)
            yield from (text.strip("\n") for text in whole)
        else:
            start = 0
            while (cut := _find_cut(buffer, start)) is not None:
                yield buffer[start:cut].strip("\n")
                start = cut
            buffer = buffer[start:]
    yield buffer.strip("\n")


def _find_cut(text: str, start: int) -> int | None:
    """Where the piece that begins at `start` ends; None where more text is needed to say."""
    blank = _BLANK_LINE.search(text, start + _MIN_CHUNK, start + _MAX_CHUNK)
    # A match at the very end of what was read so far may continue in the next block.
    if blank and blank.end() < len(text):
        return blank.end()
    if len(text) - start < _MAX_CHUNK:
        return None
    for mark in ("\n", " "):
        at = text.rfind(mark, start + _MIN_CHUNK, start + _MAX_CHUNK)
        if at >= 0:
            return at + 1
    return start + _MAX_CHUNK


def _contains(path: Path, wanted: bytes) -> bool:
    with path.open("rb") as file:
        size = min(os.fstat(file.fileno()).st_size, _MOST_DOCUMENT)
        if size == 0:
            return False
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as content:
            return content.find(wanted) >= 0


def read_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(where, value) of every row of a .jsonl, .json (a list) or .parquet file, whatever its fields are."""
    suffix = path.suffix.lower()
    try:
        if suffix == ".parquet":
            yield from _parquet_rows(path)
        elif suffix == ".json":
            rows = read_json(path, MOST_TEXT, "repair it")
            if not isinstance(rows, list):
                raise UserError(
                    f"{path} must hold a list of samples, not {kind_of(rows)}; or give one a line as .jsonl"
                )
            yield from ((f"{path}, sample {number}", row) for number, row in enumerate(rows, start=1))
        else:
            for number, line in json_lines(path):
                where = f"{path}:{number}"
                yield where, parse_json(line, where, "repair or delete the line")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    pyarrow, parquet = _import_pyarrow()
    try:
        number = 0
        with parquet.ParquetFile(path) as table:
            _check_unfolded(path, table.metadata)
            for batch in table.iter_batches(batch_size=256, use_threads=False):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError, IndexError) as error:
        raise _unreadable_parquet(path, error) from error


def _import_pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError("reading .parquet needs pyarrow: pip install 'shoestring[data]'") from error
    return pyarrow, pyarrow.parquet


def _unreadable_parquet(path: Path, error: Exception) -> UserError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return UserError(f"{path} is not a readable parquet file: {shortened(reason, 200)}")


def _read_jsonl(path: Path) -> Iterator[Document]:
    for number, line in json_lines(path):
        where = f"{path}:{number}"
        yield _document_of(parse_json(line, where, "repair or delete the line"), where)


def _read_parquet(path: Path) -> Iterator[Document]:
    pyarrow, parquet = _import_pyarrow()
    try:
        with parquet.ParquetFile(path) as table:
            columns = _text_columns(path, table.schema_arrow)
            _check_unfolded(path, table.metadata)
        number = 0
        # Equal texts are stored once: as a dictionary and row by row, a batch takes what the file has, not what it
        # unfolds to.
        with parquet.ParquetFile(path, read_dictionary=columns) as table:
            for batch in table.iter_batches(batch_size=1024, columns=columns, use_threads=False):
                texts = [batch.column(name).dictionary for name in columns]
                for places in zip(*(batch.column(name).indices.to_pylist() for name in columns), strict=True):
                    number += 1
                    found = (None if at is None else text[at].as_py() for text, at in zip(texts, places, strict=True))
                    yield _document_of(dict(zip(columns, found, strict=True)), f"{path}, row {number}")
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError, IndexError) as error:
        raise _unreadable_parquet(path, error) from error


def _text_columns(path: Path, schema: Any) -> list[str]:
    kinds = {field.name: str(field.type) for field in schema}
    columns = ["text"] if "text" in kinds else ["prompt", "completion"]
    if not set(kinds).issuperset(columns) or len(kinds) < len(schema):
        raise UserError(f"{path} has the columns {shown(sorted(kinds))}; a corpus needs text, or prompt and completion")
    for name in columns:
        if not re.fullmatch("(large_)?string(_view)?|dictionary<values=(large_)?string.*", kinds[name]):
            raise UserError(f"{path}: the column {name} is {shortened(kinds[name], 100)}; a corpus needs texts there")
    return columns


def _check_unfolded(path: Path, about: Any) -> None:
    """Text shrinks to a fourth, seldom to a tenth. A page is unfolded whole before its first row can be read."""
    for group in range(about.num_row_groups):
        columns = [about.row_group(group).column(i) for i in range(about.num_columns)]
        stored, unfolded = (
            sum(c.total_compressed_size for c in columns),
            sum(c.total_uncompressed_size for c in columns),
        )
        if unfolded > _MOST_UNFOLDED and unfolded > 1000 * stored:
            raise UserError(
                f"{path} unfolds {stored:,} bytes to {unfolded:,}, which no text does; it is damaged or made to fill "
                "the memory"
            )


def _document_of(row: Any, where: str) -> Document:
    if isinstance(row, dict):
        text, prompt, completion = row.get("text"), row.get("prompt"), row.get("completion")
        if isinstance(text, str):
            return Document(text)
        if isinstance(prompt, str) and isinstance(completion, str):
            return Document(completion, prompt)
    found = f"the fields {shown(sorted(row))}" if isinstance(row, dict) else kind_of(row)
    raise UserError(
        f"{where} has {found}; expected an object with a string 'text', or strings 'prompt' and 'completion'"
    )
