"""Options that several verbs of the command line share."""

from __future__ import annotations

from typing import Annotated

import typer

ModelArgument = Annotated[str, typer.Argument(help="A Hugging Face folder, a run folder or a .gguf file.")]
DeviceOption = Annotated[
    str, typer.Option(help="auto, cpu, cuda or cuda:N; auto takes the GPU where there is one.")
]
DtypeOption = Annotated[
    str, typer.Option(help="auto, fp32, bf16 or fp16; auto is bf16 on a GPU and fp32 on a CPU.")
]
Int8Option = Annotated[
    bool,
    typer.Option(
        "--int8-activations",
        help="On a CPU: int layers round their inputs to 8 bits; faster, not quite the same.",
    ),
]
MaxTokensOption = Annotated[int, typer.Option(min=1, help="New tokens at most.")]
TemperatureOption = Annotated[float, typer.Option(help="0 always takes the likeliest token.")]
TopKOption = Annotated[int, typer.Option(help="Choose among the k likeliest tokens; 0 is off.")]
TopPOption = Annotated[float, typer.Option(help="Choose among the likeliest tokens of this total; 1 is off.")]
MinPOption = Annotated[
    float, typer.Option(help="Drop tokens below this fraction of the likeliest; 0 is off.")
]
SeedOption = Annotated[int | None, typer.Option(help="The same seed gives the same text.")]
StopOption = Annotated[
    list[str] | None, typer.Option(help="End the text before this string; may be repeated.")
]
DrafterOption = Annotated[
    str | None, typer.Option(help="Guess ahead with ngram, a draft model's path, or both: ngram+PATH.")
]
SkipOption = Annotated[
    str,
    typer.Option(
        help="Leave sublayers out: none, adaskip, measured, a file of shrink/skip_set; lossless only guesses ahead."
    ),
]
StatsOption = Annotated[bool, typer.Option("--stats", help="Print tokens and tokens per second at the end.")]
