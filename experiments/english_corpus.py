"""English to retrain a pruned model on, none of it from WikiText: free books and manuals, and text by the model.

    python -m experiments.english_corpus free FOLDER --assets ASSETS              a minute; needs apt-get and dpkg
    python -m experiments.english_corpus write FOLDER --questions ASSETS/prompts/*  --texts 60000         a GPU
    python -m experiments.prune24 --assets ASSETS --text FOLDER ...

`free` downloads the Debian packages below and takes those paragraphs of their documents that are sentences; speeches,
stories and plays come from the assets. `write` lets the dense model complete beginnings: of paragraphs of these texts,
of questions (in its chat template), and of sentences about every name and thing in a list of words, so that the text
covers more than the topics of these documents. --part 0/3, 1/3, ... are processes that write side by side.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from random import Random

import torch

from benchmarks.smollm2 import need_smollm2
from shoestring.errors import UserError, as_command
from shoestring.model import Tokenizer, load_model
from shoestring.serve.engine.sampling import Sampling
from shoestring.shrink.self_text import generate_text, read_prompts
from shoestring.train.corpus import END_OF_TEXT

ASSETS = ("sotu", "tinystories_2M", "tinyshakespeare")
WORDS = "words.list"  # not a text to train on, so without the suffix of a corpus
SHORTEST = 80  # characters of a paragraph that is taken
LETTERS = 0.93  # and the part of them that is letters, spaces, commas, periods
SAMPLING = Sampling(temperature=0.8, top_p=0.95, max_tokens=448, seed=0)
ABOUT_NAMES = ("{} is", "{} was", "The history of {}", "In {},", "{} and")
ABOUT_THINGS = ("The {}", "A {} is", "In the {},", "When the {}")


# -- free English --------------------------------------------------------------------------------------------
class Paragraphs(HTMLParser):
    """The text of a page, with an empty line where a block begins or ends."""

    BLOCKS = frozenset(("p", "div", "li", "h1", "h2", "h3", "h4", "h5", "br", "tr", "pre", "dt", "dd", "ul", "ol"))
    UNSEEN = frozenset(("script", "style", "head"))

    def __init__(self, page: str) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.unseen = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.unseen += tag in self.UNSEEN
        self._cut(tag)

    def handle_endtag(self, tag: str) -> None:
        self.unseen = max(0, self.unseen - (tag in self.UNSEEN))
        self._cut(tag)

    def handle_data(self, data: str) -> None:
        if not self.unseen:
            self.parts.append(re.sub(r"\s+", " ", data))

    def _cut(self, tag: str) -> None:
        if tag in self.BLOCKS:
            self.parts.append("\n\n")

    def text(self) -> str:
        return "".join(self.parts)


def sentences(text: str) -> str:
    """The paragraphs of running text, each on one line: no tables, code, headings or lists of links."""
    kept = []
    for paragraph in re.split(r"\n\s*\n", text):
        line = " ".join(paragraph.split())
        plain = sum(c.isalpha() or c in " ,.'" for c in line)
        if len(line) >= SHORTEST and plain >= LETTERS * len(line) and "." in line:
            kept.append(line)
    return "\n\n".join(kept)


def read_text(path: Path) -> str:
    content = path.read_bytes()
    if path.suffix in (".gz", ".dz"):
        content = gzip.decompress(content)
    return content.decode("utf-8", "replace")


def manuals(folder: Path) -> Iterator[str]:
    """Documents of the kernel, without translations and without descriptions of devices, which are tables."""
    for path in sorted(folder.glob("usr/share/doc/linux-doc-*/Documentation/**/*")):
        is_text = path.name.endswith((".rst", ".rst.gz", ".txt", ".txt.gz"))
        if is_text and not {"translations", "devicetree"} & set(path.parts):
            yield sentences(read_text(path))


def pages(pattern: str) -> Callable[[Path], Iterator[str]]:
    def read(folder: Path) -> Iterator[str]:
        for path in sorted(folder.glob(pattern)):
            yield sentences(Paragraphs(read_text(path)).text())

    return read


def entries(folder: Path) -> Iterator[str]:
    """The entries of a dictionary in dictd's layout: a word at the start of a line, its meaning below it."""
    for path in folder.glob("usr/share/dictd/*.dict.dz"):
        for entry in re.split(r"\n(?=\S)", read_text(path)):
            word, _, meaning = entry.partition("\n")
            told = sentences(re.sub(r"[{}]", "", meaning))
            if told:
                yield f"{word.strip()}\n\n{told}"


PACKAGES: dict[str, Callable[[Path], Iterator[str]]] = {
    "linux-doc": manuals,  # of the newest kernel that the distribution has
    "debian-handbook": pages("usr/share/doc/debian-handbook/html/en-US/*.html"),
    "anarchism": pages("usr/share/doc/anarchism/html/*.html"),
    "stellarium-data": pages("usr/share/stellarium/**/*en.utf8"),  # constellations of many cultures
    "dict-foldoc": entries,  # a dictionary of computing
}


def unpack_package(name: str, folder: Path) -> Path:
    """Download and unpack a Debian package, with the one that a metapackage depends on."""
    folder.mkdir()
    found = run("apt-cache", "depends", "--no-recommends", "--no-suggests", name)
    wanted = re.findall(rf"Depends: ({re.escape(name)}-\S+)", found) or [name]
    run("apt-get", "download", wanted[0], cwd=folder)
    (package,) = folder.glob("*.deb")
    run("dpkg-deb", "-x", package.name, ".", cwd=folder)
    return folder


def run(*command: str, cwd: Path | None = None) -> str:
    try:
        return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        raise UserError(
            f"{command[0]} is not there: free English comes in Debian's packages; run this on Debian or Ubuntu"
        ) from None
    except subprocess.CalledProcessError as error:
        raise UserError(f"{' '.join(command)} failed: {error.stderr.strip()[-300:]}") from None


def free(folder: Path, assets: Path) -> None:
    missing = [name for name in ASSETS if not (assets / f"text/{name}.txt").is_file()]
    if missing:
        raise UserError(f"--assets {assets} has no text/{missing[0]}.txt; it must hold {', '.join(ASSETS)} in text/")
    texts = {name: (assets / f"text/{name}.txt").read_text() for name in ASSETS}
    with tempfile.TemporaryDirectory() as temp:
        for name, documents in PACKAGES.items():
            given = unpack_package(name, Path(temp) / name)
            texts[name] = f"\n{END_OF_TEXT}\n".join(filter(None, documents(given)))
        listed = unpack_package("wamerican", Path(temp) / "wamerican") / "usr/share/dict/american-english"
        words = [word for word in listed.read_text().split() if word.isalpha() and len(word) > 2]
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
        print(f"{name}: {len(text):,} characters", flush=True)
    (folder / WORDS).write_text("\n".join(words))


# -- what the model writes -----------------------------------------------------------------------------------
def beginnings(folder: Path, questions: list[Path], tokenizer: Tokenizer, num: int, seed: int) -> list[str]:
    """`num` beginnings from all sources: questions and paragraphs, then names, then things."""
    if not (folder / WORDS).is_file():
        raise UserError(f"{folder} has no {WORDS}: run `english_corpus free {folder}` first")
    asked = [p for path in questions for p in read_prompts(str(path))]
    found = [tokenizer.render_chat([{"role": "user", "content": q}]) for q in asked]
    found += read_prompts(str(folder / "*.txt"))
    words = (folder / WORDS).read_text().split()
    random = Random(seed)
    random.shuffle(words)
    names, things = [w for w in words if w[0].isupper()], [w for w in words if not w[0].isupper()]
    for listed, forms in ((names, ABOUT_NAMES), (things, ABOUT_THINGS)):
        for turn in range(len(forms)):  # every word in one form before any has two
            found += [forms[(turn + i) % len(forms)].format(word) for i, word in enumerate(listed)]
    found = found[:num]
    random.shuffle(found)
    return found


def write(folder: Path, questions: list[Path], model: Path | None, num: int, part: str, requests: int) -> None:
    number, parts = parse_part(part)
    source = model or need_smollm2()
    on_gpu = torch.cuda.is_available()
    loaded = load_model(source, device="cuda" if on_gpu else "cpu", dtype=torch.bfloat16 if on_gpu else torch.float32)
    if loaded.tokenizer is None:
        raise UserError(f"--model {source} has no tokenizer; give a folder with its tokenizer.json")
    prompts = beginnings(folder, questions, loaded.tokenizer, num, seed=0)[number::parts]
    sampling = replace(SAMPLING, seed=number * num)
    out = generate_text(
        loaded.model.eval(), loaded.tokenizer, prompts, folder / f"self-{number}.jsonl",
        sampling=sampling, max_requests=requests,
    )  # fmt: skip
    written = sum(len(json.loads(line)["completion"]) for line in out.open(encoding="utf-8"))
    print(f"{out}: {len(prompts):,} texts, {written:,} characters", flush=True)


def parse_part(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not int(found[1]) < int(found[2]):
        raise UserError(f"--part {text} is not one of N parts: give 0/1, or 0/3, 1/3 and 2/3 to three processes")
    return int(found[1]), int(found[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = parser.add_subparsers(dest="stage", required=True)
    first = stages.add_parser("free", help="free English from Debian's packages and the assets")
    first.add_argument("folder", type=Path)
    first.add_argument("--assets", type=Path, required=True, help="holds text/")
    second = stages.add_parser("write", help="what the dense model writes")
    second.add_argument("folder", type=Path, help="where `free` left its texts")
    second.add_argument("--questions", type=Path, nargs="*", default=[], help=".json or .jsonl, for its chat")
    second.add_argument("--model", type=Path, help="instead of SmolLM2-135M-Instruct from its package")
    second.add_argument("--texts", type=int, default=60_000, help="how many, of up to 448 tokens")
    second.add_argument("--part", default="0/1", help="number/of: processes that write side by side")
    second.add_argument("--requests", type=int, default=256, help="texts that are written at a time")
    args = parser.parse_args()
    if args.stage == "free":
        free(args.folder, args.assets)
    else:
        write(args.folder, args.questions, args.model, args.texts, args.part, args.requests)


if __name__ == "__main__":
    as_command(main)
