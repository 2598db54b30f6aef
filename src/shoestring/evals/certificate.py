"""Certificates: the exported model in the program it was exported for, compared with the same model here.

The exported files are read twice, by Shoestring and by their target (`ExportTarget`: transformers, or llama.cpp through
llama-cpp-python), and compared: token ids of a text, logits at every position of it, a greedy continuation, the
rendered chat template, the tokens that end a text. Beside it stands what the export itself has changed: the logits of
the source against those of the exported files, both computed here.

llama.cpp rounds activations to 8 bits before it multiplies them with quantized weights, so its logits differ from exact
ones however right the file is. To tell the two apart, the values of the file are also written as F32 and run there.

The result is `certificate.json` and a paragraph for the model card. A difference beyond what is stated as allowed makes
the certificate a failed one, which is an error; both files are written all the same.

Left out: quality. An export that rounds is compared with its source by one number; `shoestring eval` has the others.
"""

from __future__ import annotations

import ctypes
import datetime
import gc
import hashlib
import importlib.metadata
import importlib.util
import math
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoestring.errors import UserError
from shoestring.model.export import Exported, load_as_written
from shoestring.model.export_names import FP8, GGUF, NEEDS_LLAMA
from shoestring.model.folder import load_model, read_spec, weight_files
from shoestring.model.gguf_blocks import FLOAT_KINDS
from shoestring.model.gguf_write import save_gguf
from shoestring.model.spec import ModelSpec
from shoestring.model.tokenizer import Tokenizer
from shoestring.model.transformer import Decoder
from shoestring.runlog import run_of, versions, write_atomically
from shoestring.serve import Engine, Sampling
from shoestring.state.files import write_json

TEXT = (
    "The library opens at 9:30 and closes at 18:00, except on Sundays. Anna's café, twenty metres away, doesn't! "
    "def area(radius):\n    return 3.14159 * radius ** 2  # metres\n\n"
    "Water boils at 100 degrees Celsius at sea level; on a mountain of 3,000 metres it boils at about 90. "
    "Über allen Gipfeln ist Ruh, 日本語, привет.\tThe end of the story was not what anyone had expected."
)
MESSAGES = (
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "  And of Italy? <b>É</b>\n"},
)
NUM_NEW = 24  # tokens of the greedy continuation
MOST_TOKENS = 512  # of the text
# Root mean square of the difference of logits, in units of their standard deviation.
ALLOWED_SAME = 1e-3  # the same arithmetic in another order
ALLOWED_LLAMA = 1e-2  # llama.cpp's GELU and exp are tables and polynomials
ALLOWED_LLAMA_QUANTIZED = 0.1  # it multiplies quantized weights with activations that it rounds to 8 bits
ROWS = 16  # of logits, that are compared at a time
MOST_CONTROL = 2 * 10**9  # weights of a file that is also run in F32


class ExportTarget(ABC):
    """The program that the files were written for, with the model loaded."""

    name: str
    allowed: float
    packages: tuple[str, ...]
    note = ""  # how it was asked to compute, where that matters

    @abstractmethod
    def encode(self, text: str) -> list[int] | None:
        """Token ids; None where the target has no tokenizer."""

    @abstractmethod
    def logits(self, ids: Sequence[int]) -> Tensor:
        """[len(ids), vocabulary], fp32."""

    @abstractmethod
    def render(self, messages: Sequence[Mapping[str, str]]) -> str | None:
        """The chat as text; None where the target has no template."""

    @abstractmethod
    def stops(self) -> set[int]:
        """The tokens at which a text ends."""

    def greedy(self, ids: Sequence[int], num_new: int) -> list[int]:
        found: list[int] = []
        for _ in range(num_new):
            found.append(int(self.logits([*ids, *found])[-1].argmax()))
        return found


class TransformersTarget(ExportTarget):
    name, allowed = "transformers", ALLOWED_SAME
    packages: tuple[str, ...] = ("transformers", "torch")

    def __init__(self, path: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        options: dict[str, Any] = {"dtype": torch.float32}
        if getattr(AutoConfig.from_pretrained(path), "attn_logit_softcapping", None) is not None:
            options["attn_implementation"] = "eager"
            self.note = (
                'transformers was asked for attn_implementation="eager": its other implementations may leave out the '
                "cap of the attention scores."
            )
        self._model = AutoModelForCausalLM.from_pretrained(path, **options).eval()
        has_tokenizer = (path / "tokenizer.json").is_file()
        self._tokenizer = AutoTokenizer.from_pretrained(path) if has_tokenizer else None

    def encode(self, text: str) -> list[int] | None:
        return None if self._tokenizer is None else list(self._tokenizer(text)["input_ids"])

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> Tensor:
        return self._model(torch.tensor([list(ids)])).logits[0].float()

    def render(self, messages: Sequence[Mapping[str, str]]) -> str | None:
        if self._tokenizer is None or self._tokenizer.chat_template is None:
            return None
        asked = [dict(message) for message in messages]
        return str(self._tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True))

    def stops(self) -> set[int]:
        ends = self._model.generation_config.eos_token_id
        return set() if ends is None else {ends} if isinstance(ends, int) else set(ends)


class CompressedTensorsTarget(TransformersTarget):
    name = "transformers with compressed-tensors"
    packages = ("transformers", "compressed-tensors", "torch")


class LlamaCppTarget(ExportTarget):
    name, packages = "llama.cpp", ("llama-cpp-python", "gguf")

    def __init__(self, path: Path, *, context: int, quantized: bool) -> None:
        import llama_cpp

        self.allowed = ALLOWED_LLAMA_QUANTIZED if quantized else ALLOWED_LLAMA
        self._library = llama_cpp
        length = min(MOST_TOKENS + NUM_NEW, context)
        # Keys and values in fp32: what a user's cache rounds is not the file's. Negative: as the file says.
        self._model = llama_cpp.Llama(
            str(path),
            n_ctx=length,
            n_batch=length,
            n_threads=torch.get_num_threads(),
            logits_all=True,
            type_k=llama_cpp.GGML_TYPE_F32,
            type_v=llama_cpp.GGML_TYPE_F32,
            yarn_attn_factor=-1.0,
            yarn_beta_fast=-1.0,
            yarn_beta_slow=-1.0,
            verbose=False,
        )

    def encode(self, text: str) -> list[int] | None:
        return list(self._model.tokenize(text.encode(), add_bos=True, special=True))

    def logits(self, ids: Sequence[int]) -> Tensor:
        self._model.reset()
        self._model.eval(list(ids))
        return torch.from_numpy(self._model.scores[: len(ids)].copy())

    def greedy(self, ids: Sequence[int], num_new: int) -> list[int]:
        self._model.reset()
        self._model.eval(list(ids))
        found: list[int] = []
        while True:
            found.append(int(self._model.scores[len(ids) + len(found) - 1].argmax()))
            if len(found) == num_new:
                return found
            self._model.eval([found[-1]])

    def render(self, messages: Sequence[Mapping[str, str]]) -> str | None:
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        template = self._model.metadata.get("tokenizer.chat_template")
        if template is None:
            return None
        begin, end = (self._text(t()) for t in (self._model.token_bos, self._model.token_eos))
        return Jinja2ChatFormatter(template, eos_token=end, bos_token=begin)(messages=list(messages)).prompt  # type: ignore[arg-type]

    def _text(self, token: int) -> str:
        return "" if token < 0 else self._model._model.token_get_text(token)

    def stops(self) -> set[int]:
        vocabulary, is_end = self._model._model.vocab, self._library.llama_vocab_is_eog
        return {i for i in range(self._model.n_vocab()) if is_end(vocabulary, i)}


def check_target(layout: str) -> None:
    """UserError that says how to install the target of a layout; before the export, which may take long."""
    needed = {"dense": ("transformers",), "compressed-tensors": ("transformers", "compressed_tensors")}
    if layout == GGUF:
        if importlib.util.find_spec("llama_cpp") is None:
            raise UserError(f"--certify loads the file in llama.cpp, which is not installed: {NEEDS_LLAMA}")
    elif layout == FP8:
        raise UserError("--certify cannot load FP8 folders: their readers need a GPU; use --as compressed-tensors")
    elif layout not in needed:
        raise UserError(f"--certify compares with another program, and only shoestring reads {layout} folders")
    else:
        for module in needed[layout]:
            if importlib.util.find_spec(module) is None:
                package = module.replace("_", "-")
                raise UserError(
                    f"--certify loads the folder with {package}, which is not installed: pip install {package}"
                )


def open_target(exported: Exported) -> ExportTarget:
    if exported.layout == GGUF:
        quantized = any(t.kind not in FLOAT_KINDS for t in exported.tensors)
        return LlamaCppTarget(exported.path, context=exported.spec.default_context, quantized=quantized)
    return (TransformersTarget if exported.layout == "dense" else CompressedTensorsTarget)(exported.path)


# -- the comparison ----------------------------------------------------------------------------------


def certify(exported: Exported, text: str | None = None) -> dict[str, Any]:
    """Compare, and write the certificate and the paragraph beside the model; UserError where a comparison fails."""
    check_target(exported.layout)
    certificate = compare(exported, text or TEXT)
    write_certificate(exported.path, certificate)
    if certificate["failed"]:
        raise UserError(
            f"{exported.path} is written, but {certificate['target']} does not compute the same model: "
            f"{'; '.join(certificate['failed'])}. {certificate_path(exported.path)} has the numbers"
        )
    return certificate


@dataclass(frozen=True)
class Computed:
    """What one program makes of the exported files."""

    token_ids: list[int] | None  # of the text; None without a tokenizer
    logits: Tensor
    greedy: list[int]  # after the first half of the text
    chat: str | None
    stops: set[int]


def compare(exported: Exported, text: str) -> dict[str, Any]:
    """The source, the exported files here and in their target, one after the other: the weights of one of them at a
    time are in memory, and of the others only what they computed."""
    spec, tokenizer = read_spec(exported.path)
    ids = _ids(spec, tokenizer, text)[: min(MOST_TOKENS, spec.default_context - NUM_NEW)]
    prompt = ids[: max(1, len(ids) // 2)]
    before = _logits(load_as_written(exported.source, exported.layout).model, ids)
    with tempfile.TemporaryDirectory(dir=exported.path.parent, prefix=".certify-") as place:
        in_f32 = Path(place) / "f32.gguf"
        here, choices = _computed_here(exported, text, ids, prompt, in_f32)
        changed = _difference(before, here.logits)
        del before  # logits of a text are as large as a small model
        _give_back_memory()
        target = open_target(exported)
        there = Computed(
            target.encode(text),
            target.logits(ids),
            target.greedy(prompt, NUM_NEW),
            target.render(MESSAGES),
            target.stops(),
        )
        about = {"target": target.name, "allowed": target.allowed, "note": target.note, "versions": _versions(target)}
        del target
        _give_back_memory()
        control = _control(in_f32, ids, here.logits)
    difference = _difference(here.logits, there.logits)
    found: dict[str, Any] = {
        "target": about["target"],
        "layout": exported.layout,
        "source": _name(exported.source),
        "source_sha256": _digests(exported.source),
        "exported": exported.path.name,
        "megabytes": _megabytes(exported.path),
        "tokens": len(ids),
        "tokenizer": _tokenizer(here, there),
        "logits": {**difference, "allowed_relative": about["allowed"]},
        "greedy": _greedy(here, there, choices, difference["largest_difference"]),
        "chat_template": _chat(here, there),
        "stop_tokens": _stops(here.stops, there.stops),
        "export": {**changed, **_rounding(exported)},
    }
    if control is not None:
        found["logits_in_f32"] = control
    if about["note"]:
        found["note"] = about["note"]
    found["failed"] = _failures(found)
    return found | {"versions": about["versions"], "date": datetime.date.today().isoformat()}


def _give_back_memory() -> None:
    """Of models that are not needed any more: an engine is a cycle that holds its model, and glibc keeps what is freed
    for this process alone."""
    gc.collect()
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _computed_here(
    exported: Exported, text: str, ids: list[int], prompt: list[int], in_f32: Path
) -> tuple[Computed, Tensor]:
    """What Shoestring computes from the exported files, and the logits behind its greedy tokens. The values of a
    quantized GGUF file are written to `in_f32`, too."""
    ours = load_model(exported.path)
    tokenizer, ends = ours.tokenizer, set(ours.spec.eos_ids)
    logits = _logits(ours.model, ids)
    sampling = Sampling(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
    greedy = list(Engine(ours.model).generate([prompt], sampling)[0].token_ids)
    choices = _logits(ours.model, [*prompt, *greedy])[len(prompt) - 1 : -1].clone()
    plain = exported.layout != GGUF or all(t.kind == "F32" for t in exported.tensors)
    if not plain and ours.spec.num_params() <= MOST_CONTROL:
        save_gguf(in_f32, ours.model, tokenizer, kind="F32")
    if tokenizer is None:
        return Computed(None, logits, greedy, None, ends), choices
    chat = None if tokenizer.chat_template is None else tokenizer.render_chat(MESSAGES)
    return Computed(tokenizer.encode(text), logits, greedy, chat, ends | set(tokenizer.eos_ids)), choices


def _control(in_f32: Path, ids: Sequence[int], here: Tensor) -> dict[str, Any] | None:
    """llama.cpp with the values of the file in F32; None where the file is in F32 or very large."""
    if not in_f32.is_file():
        return None
    there = LlamaCppTarget(in_f32, context=len(ids), quantized=False).logits(ids)
    return {**_difference(here, there), "allowed_relative": ALLOWED_LLAMA}


def _ids(spec: ModelSpec, tokenizer: Tokenizer | None, text: str) -> list[int]:
    if tokenizer is not None:
        return tokenizer.encode(text)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, spec.vocab_size, (128,), generator=generator).tolist()


@torch.no_grad()
def _logits(model: Decoder, ids: Sequence[int]) -> Tensor:
    return model(torch.tensor([list(ids)]))[0].float()


def _difference(one: Tensor, other: Tensor) -> dict[str, Any]:
    """`relative`: root mean square of the difference in standard deviations of the logits. Row by row in fp64: of all
    rows at once it would take more memory than a small model."""
    largest, squares, kl, same = 0.0, 0.0, 0.0, 0
    mean = float(one.mean(dtype=torch.float64))
    spread = 0.0
    for a, b in zip(one.split(ROWS), other.split(ROWS), strict=True):
        a, b = a.double(), b.double()
        gap = (a - b).abs()
        largest = max(largest, float(gap.max())) if bool(gap.isfinite().all()) else math.nan
        squares += float(gap.square().sum())
        spread += float((a - mean).square().sum())
        kl += float((a.log_softmax(-1).exp() * (a.log_softmax(-1) - b.log_softmax(-1))).sum())
        same += int((a.argmax(-1) == b.argmax(-1)).sum())
    return {
        "largest_difference": largest,
        "relative": math.sqrt(squares / one.numel()) / math.sqrt(spread / (one.numel() - 1)),
        "mean_kl": max(0.0, kl / len(one)),
        "same_choice": same / len(one),
    }


def _tokenizer(here: Computed, there: Computed) -> dict[str, Any]:
    if here.token_ids is None or there.token_ids is None:
        return {"compared": False}
    return {"compared": True, "equal": here.token_ids == there.token_ids}


def _greedy(here: Computed, there: Computed, choices: Tensor, largest: float) -> dict[str, Any]:
    """Texts may part where the two likeliest tokens are closer than the logits of the two programs."""
    one, other = here.greedy, there.greedy
    equal = next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), NUM_NEW)
    found: dict[str, Any] = {"tokens": NUM_NEW, "equal": equal}
    if equal < NUM_NEW:
        gap = float(choices[equal, one[equal]] - choices[equal, other[equal]])
        found |= {"gap_where_they_part": gap, "a_tie": gap <= 2 * largest}
    return found


def _chat(here: Computed, there: Computed) -> dict[str, Any]:
    return {"compared": here.chat is not None, "equal": here.chat == there.chat}


def _stops(mine: set[int], theirs: set[int]) -> dict[str, Any]:
    """A target may know further ends: llama.cpp goes by the names of tokens."""
    return {"ours": sorted(mine), "theirs": sorted(theirs), "all_known": mine <= theirs}


def _rounding(exported: Exported) -> dict[str, Any]:
    if not exported.tensors:
        return {}
    worst = max(exported.tensors, key=lambda t: t.relative_error)
    kinds: dict[str, int] = {}
    for tensor in exported.tensors:
        kinds[tensor.kind] = kinds.get(tensor.kind, 0) + 1
    return {"types": kinds, "exact": worst.exact, "largest_weight_error": worst.relative_error}


def _failures(found: dict[str, Any]) -> list[str]:
    failed = []
    if found["tokenizer"].get("equal") is False:
        failed.append("the text has other token ids")
    for name in ("logits", "logits_in_f32"):
        compared = found.get(name, {"relative": 0.0, "allowed_relative": 0.0})
        if not compared["relative"] <= compared["allowed_relative"]:  # NaN fails
            failed.append(
                f"{name.replace('_', ' ')} differ by {compared['relative']:.2g} standard deviations (allowed: "
                f"{compared['allowed_relative']:g})"
            )
    if found["greedy"].get("a_tie") is False:
        failed.append(f"the greedy text differs from token {found['greedy']['equal'] + 1} on")
    if not found["chat_template"]["equal"]:
        failed.append("the chat template is rendered otherwise")
    if not found["stop_tokens"]["all_known"]:
        failed.append("not all stop tokens are known")
    return failed


def _versions(target: ExportTarget) -> dict[str, str]:
    here = versions()
    found: dict[str, str] = {n: here[n] for n in ("shoestring", "python", "torch", "machine") if n in here}
    for package in target.packages:
        found[package] = importlib.metadata.version(package)
    return found


def _name(source: Path) -> str:
    """The run's name where its model/ was exported."""
    run = run_of(source) if source.is_dir() else None
    return (source if run is None else run).resolve().name


def _digests(source: Path) -> dict[str, str]:
    """The files that the weights were read from, as sha256sum tells them."""
    found = {}
    for path in weight_files(source):
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _megabytes(path: Path) -> float:
    files = [path] if path.is_file() else list(path.iterdir())
    return round(sum(f.stat().st_size for f in files) / 1e6, 3)


# -- what is written ---------------------------------------------------------------------------------


def certificate_path(path: Path) -> Path:
    """In the folder; beside a file, with its name in front."""
    return path / "certificate.json" if path.is_dir() else path.with_name(path.stem + ".certificate.json")


def write_certificate(path: Path, certificate: dict[str, Any]) -> None:
    write_json(certificate_path(path), _without_nan(certificate))
    card = path / "README.md" if path.is_dir() else path.with_name(path.stem + ".README.md")
    title = path.name if path.is_dir() else path.stem
    write_atomically(card, f"# {title}\n\n{paragraph(certificate)}\n")


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nan(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def paragraph(c: dict[str, Any]) -> str:
    """For the model card."""
    logits, greedy, export = c["logits"], c["greedy"], c["export"]
    digests = ", ".join(f"{file} {digest[:12]}" for file, digest in c["source_sha256"].items())
    shoestring = c["versions"].get("shoestring", "")
    said = [
        f"Exported from `{c['source']}` (sha256: {digests}) with Shoestring {shoestring} and compared in {c['target']} "
        f"on {c['date']}, over a text of {c['tokens']} tokens. Largest difference of a logit: "
        f"{logits['largest_difference']:.3g} ({logits['relative']:.2g} standard deviations, root mean square); the "
        f"likeliest token is the same at {100 * logits['same_choice']:.1f}% of the positions.",
        _in_f32(c),
        c.get("note", ""),
        f"Greedy text: {greedy['equal']} of {greedy['tokens']} tokens equal"
        + (", then two tokens tie." if greedy.get("a_tie") else "."),
    ]
    if c["tokenizer"]["compared"]:
        said.append(f"Token ids of the text: {'equal' if c['tokenizer']['equal'] else 'not equal'}.")
    if c["chat_template"]["compared"]:
        said.append(f"Chat template: {'rendered alike' if c['chat_template']['equal'] else 'rendered otherwise'}.")
    said.append(f"Stop tokens: {'all known' if c['stop_tokens']['all_known'] else 'not all known'}.")
    if export.get("exact") or export["largest_difference"] == 0:
        said.append("The weights are those of the source, bit for bit.")
    else:
        said.append(
            f"Rounding in the export changes a logit by {export['largest_difference']:.3g} at most (mean KL "
            f"{export['mean_kl']:.2g} nats)."
        )
    if c["failed"]:
        said.append(f"**Failed:** {'; '.join(c['failed'])}.")
    used = ", ".join(f"{k} {v}" for k, v in c["versions"].items() if k not in ("shoestring", "machine"))
    return " ".join(filter(None, [*said, f"Versions: {used}."]))


def _in_f32(c: dict[str, Any]) -> str:
    if "logits_in_f32" not in c:
        return ""
    largest = c["logits_in_f32"]["largest_difference"]
    return f"With the same values in F32, where llama.cpp does not round activations: {largest:.2g}."
