"""The verbs that write text with a model: `generate`, `chat` and `serve`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from shoestring.cli.options import (
    AdapterOption,
    ChatSamplingOptions,
    DraftOptions,
    ModelArgument,
    PlaceOptions,
    SamplingOptions,
    StatsOption,
    from_fields,
)
from shoestring.cli.terminal import (
    adopt_adapter,
    chat_prompt,
    ended_by_ctrl_c,
    find_skips,
    lead,
    open_engine,
    read_prompt,
    stream_text,
    user_lines,
)
from shoestring.errors import UserError
from shoestring.serve_settings import ServeAddress, ServeSettings

if TYPE_CHECKING:
    from shoestring.model.folder import LoadedModel
    from shoestring.serve.engine.tensor_parallel import Ranks


@from_fields
def generate(
    model: ModelArgument,
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from standard input.")],
    *,
    sampling: SamplingOptions,
    adapter: AdapterOption = None,
    draft: DraftOptions,
    stats: StatsOption = False,
    place: PlaceOptions,
) -> None:
    """Continue a text and stream it to the terminal. Under torchrun the model is split over the processes."""
    place.check_names(model, draft.drafter, adapter)
    with ended_by_ctrl_c():
        from shoestring.evals.model_row import need_tokenizer

        asked = sampling.sampling()
    text = read_prompt(prompt)

    def write(loaded: LoadedModel, ranks: Ranks | None) -> None:
        tokenizer = need_tokenizer(loaded)
        tokens = tokenizer.encode(text) or tokenizer.beginning
        limit = loaded.spec.max_positions
        context = limit if len(tokens) >= limit else min(limit, len(tokens) + sampling.max_tokens)
        engine = open_engine(loaded, context, draft.drafter, draft.skip, ranks)
        stream_text(engine, tokens, asked, stats, echo=text, adapter=adopt_adapter(engine))

    lead(write, lambda ranks: place.load(model, ranks, adapter), place.device)


@from_fields
def chat(
    model: ModelArgument,
    *,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    sampling: ChatSamplingOptions,
    context: Annotated[
        int, typer.Option(help="Tokens of chat to remember; the oldest messages are dropped first.")
    ] = 4096,
    adapter: AdapterOption = None,
    draft: DraftOptions,
    stats: StatsOption = False,
    place: PlaceOptions,
) -> None:
    """Talk to a chat model, with its own chat template. Reads one message per line, from a pipe too."""
    place.check_names(model, draft.drafter, adapter)
    with ended_by_ctrl_c():
        from shoestring.evals.model_row import need_tokenizer
        from shoestring.model.chat import fault

        asked = sampling.sampling()

    def talk(loaded: LoadedModel, ranks: Ranks | None) -> None:
        tokenizer = need_tokenizer(loaded)
        if tokenizer.chat_template is None:
            raise UserError(
                f"{model} has no chat template, so it was not made for chat; use shoestring generate instead"
            )
        if (broken := fault(tokenizer.chat_template)) is not None:
            raise UserError(f"the chat template of {model} is broken, {broken}")
        room = min(context, loaded.spec.max_positions)
        engine = open_engine(loaded, room, draft.drafter, draft.skip, ranks)
        adopted = adopt_adapter(engine)
        messages = [{"role": "system", "content": system}] if system else []
        for line in user_lines():
            messages.append({"role": "user", "content": line})
            if tokens := chat_prompt(messages, tokenizer.encode_chat, room, sampling.max_tokens):
                text = stream_text(engine, tokens, asked, stats, adapter=adopted)
                messages.append({"role": "assistant", "content": text})

    lead(talk, lambda ranks: place.load(model, ranks, adapter), place.device)


@ended_by_ctrl_c()
@from_fields
def serve(
    model: ModelArgument,
    *,
    address: ServeAddress,
    draft: DraftOptions,
    settings: ServeSettings,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check all checksums first, and that no weight is NaN or infinite.")
    ] = False,
    place: PlaceOptions,
) -> None:
    """Serve a model over an OpenAI-compatible API, with a playground for the browser."""
    place.check_names(model, draft.drafter)
    from shoestring.device import pick_device, pick_dtype
    from shoestring.serve.http.server import ServeOptions, main

    given = vars(address) | vars(settings)
    options = ServeOptions(**given, drafter=draft.drafter, int8_activations=place.int8_activations)
    device = pick_device(place.device)
    if verify:
        from shoestring.model.verify import check_intact

        check_intact(model)
    length = settings.max_context or 2048
    main(
        model,
        options,
        device=device,
        dtype=pick_dtype(place.dtype, device),
        skips=None if draft.skip == "none" else lambda loaded: find_skips(loaded, draft.skip, length),
        apart=True,
    )
