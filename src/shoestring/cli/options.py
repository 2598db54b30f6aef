"""Options of verbs, declared once as fields of dataclasses.

`@from_fields` lets a verb take such dataclasses: typer is shown one option for each field, and the verb gets objects.
A field `name` is `--name`. Without what belongs to Python alone: `deadline_s` is `--deadline`; a tuple, `api_keys`, is
`--api-key`, which may be repeated.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shoestring.config import about_option, option
from shoestring.device import check_device, check_dtype
from shoestring.errors import UserError
from shoestring.paths import drafter_names, find_model

if TYPE_CHECKING:
    from shoestring.model.folder import LoadedModel
    from shoestring.serve.engine.logit_rules import SamplingWithRules
    from shoestring.serve.engine.tensor_parallel import Ranks

ModelArgument = Annotated[
    str,
    typer.Argument(
        help="A Hugging Face folder, a run folder, a .gguf file, or an id on the Hugging Face hub (org/name)."
    ),
]
AdapterOption = Annotated[
    Path | None, typer.Option("--adapter", help="An adapter of the model: a folder in PEFT's layout.")
]
StatsOption = Annotated[bool, typer.Option("--stats", help="Print tokens and tokens per second at the end.")]
_DEVICE = "auto, cpu, cuda or cuda:N; auto takes the GPU if there is one."
DeviceOption = Annotated[str, typer.Option(help=_DEVICE)]


@dataclass(frozen=True)
class SamplingOptions:
    max_tokens: int = option(128, "The most new tokens to write.", least=1)
    temperature: float = option(0.0, "0 always takes the most likely token.")
    top_k: int = option(0, "Choose among the k most likely tokens; 0 turns it off.")
    top_p: float = option(1.0, "Choose among the most likely tokens that add up to this probability; 1 turns it off.")
    min_p: float = option(0.0, "Drop tokens below this fraction of the highest probability; 0 turns it off.")
    repetition_penalty: float = option(
        1.0, "Above 1: tokens of the prompt and the text become less likely (1.1, say); 1 turns it off."
    )
    presence_penalty: float = option(0.0, "Subtracted from the logit of every token written so far; -2 to 2.")
    frequency_penalty: float = option(0.0, "The same for each time that a token was written; -2 to 2.")
    seed: int | None = option(None, "The same seed gives the same text.")
    stop: tuple[str, ...] = option((), "End the text before this string; may be repeated.")

    def sampling(self) -> SamplingWithRules:
        """As the engine takes it, checked."""
        from shoestring.serve.engine.logit_rules import LogitRules, SamplingWithRules

        given = dict(vars(self))
        penalties = {name: given.pop(f"{name}_penalty") for name in ("presence", "frequency", "repetition")}
        return SamplingWithRules(**given, rules=LogitRules(**penalties))


@dataclass(frozen=True)
class ChatSamplingOptions(SamplingOptions):
    max_tokens: int = option(512)


@dataclass(frozen=True)
class DraftOptions:
    drafter: str | None = option(
        None, "Speculative decoding with ngram, the path of a draft model, or both: ngram+PATH."
    )
    skip: str = option(
        "none", "Skip sublayers: none, adaskip, measured, or a file of shrink/skip_set; lossless: for drafts only."
    )


@dataclass(frozen=True)
class PlaceOptions:
    """Where and in which numbers a model computes."""

    device: str = option("auto", _DEVICE)
    dtype: str = option("auto", "auto, fp32, bf16 or fp16; auto is bf16 on a GPU and fp32 on a CPU.")
    int8_activations: bool = option(
        False,
        "On a CPU: integer layers (also of a quantized .gguf file) round their inputs to 8 bits. Faster, with slightly "
        "different results.",
    )

    def check_names(self, model: str, drafter: str | None = None, adapter: Path | None = None) -> None:
        """Before anything heavy is imported."""
        find_model(model)
        if adapter is not None and not adapter.is_dir():
            raise UserError(f"--adapter {adapter} is no folder; give the folder of an adapter, in PEFT's layout")
        drafter_names(drafter)
        check_device(self.device)
        check_dtype(self.dtype)

    def load(self, path: str, ranks: Ranks | None = None, adapter: Path | None = None) -> LoadedModel:
        from shoestring.device import pick_device, pick_dtype
        from shoestring.evals.model_row import ready
        from shoestring.model import load_model

        place = pick_device(self.device)
        # A model that is shared out is cut first and sent to its device then.
        start = place if ranks is None else "cpu"
        if self.int8_activations and place.type == "cpu":
            from shoestring.cli.terminal import begin_compiling

            begin_compiling()
        loaded = load_model(path, device=start, dtype=pick_dtype(self.dtype, place), packed=self.int8_activations)
        if adapter is not None:
            from shoestring.formats.adapter import attach_adapters
            from shoestring.model.adapter_folder import read_adapter

            attach_adapters(loaded.model, read_adapter(adapter, loaded.model).weights)
        if ranks is not None:
            ranks.share(loaded.model)
        if self.int8_activations:
            from shoestring.formats.int8_activations import quantize_activations

            quantize_activations(loaded.model, compute_dtype=loaded.model.compute_dtype)
        return ready(loaded)


def from_fields(verb: Callable[..., None]) -> Callable[..., None]:
    """`verb` with an option for each field in the place of every parameter that is a dataclass."""
    hints = typing.get_type_hints(verb, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in inspect.signature(verb).parameters.values():
        hint = hints[parameter.name]
        if dataclasses.is_dataclass(hint):
            groups[parameter.name] = hint
            parameters += _options(hint)
        else:
            parameters.append(parameter.replace(annotation=hint))

    @functools.wraps(verb)
    def call(**given: Any) -> None:
        for name, group in groups.items():
            values = {f.name: given.pop(_spelling(f)) for f in dataclasses.fields(group)}
            many = (f.name for f in dataclasses.fields(group) if isinstance(f.default, tuple))
            given[name] = group(**values | {key: tuple(values[key] or ()) for key in many})
        verb(**given)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    return call


def _options(group: Any) -> Iterator[inspect.Parameter]:
    hints = typing.get_type_hints(group)
    for f in dataclasses.fields(group):
        about, hint, default, name = about_option(group, f), hints[f.name], f.default, _spelling(f)
        if isinstance(default, tuple):
            hint, default = list[typing.get_args(hint)[0]] | None, None  # type: ignore[misc]
        elif typing.get_origin(hint) is Literal:
            hint = str  # the dataclass says what is allowed
        flag = [f"--{name.replace('_', '-')}"] if hint is bool else []  # without a --no-...
        shown = typer.Option(*flag, help=about.help, min=about.least, envvar=about.envvar, metavar=about.metavar)
        kind = inspect.Parameter.KEYWORD_ONLY
        yield inspect.Parameter(name, kind, default=default, annotation=Annotated[hint, shown])


def _spelling(f: dataclasses.Field[Any]) -> str:
    return f.name.removesuffix("s") if isinstance(f.default, tuple) else f.name.removesuffix("_s")
