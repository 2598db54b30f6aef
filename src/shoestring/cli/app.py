"""The command line: `shoestring VERB ...`, also `python -m shoestring` under torchrun.

Verbs are thin: they parse, import what they need when they need it (so that --help is quick), call one
function and print. What goes wrong ends in one of these ways:
    UserError           one line `error: ...` on stderr, exit code 2
    Interrupted         one line that says where the run was saved and how to continue, exit code 2
    out of memory, disk full, no permission, another process lost, ...   one line, exit code 2
    nobody reads the output any more (| head)                            nothing, exit code 141
    anything else       the traceback and one line asking to report it, exit code 1
Under torchrun the other ranks print nothing but errors of their own.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from shoestring import __version__
from shoestring.cli.ckpt import ckpt_app
from shoestring.cli.names import check_settings
from shoestring.cli.options import AdapterOption, DeviceOption, ModelArgument, PlaceOptions, from_fields
from shoestring.cli.pipeline import pipeline_app
from shoestring.cli.reshard import reshard_app
from shoestring.cli.terminal import (
    OutputReaders,
    ended_by_ctrl_c,
    help_of_recipe,
    obey_sigterm_as_first_process,
    open_missing_streams,
    stoppable,
    tell_warnings_in_one_line,
    write_or_give_up,
    write_unprintable_as_question_marks,
)
from shoestring.cli.text_verbs import chat, generate, serve
from shoestring.errors import (
    Interrupted,
    UserError,
    is_users,
    lost_peer_as_user_error,
    memory_as_user_error,
    room,
    shortened,
    suggest,
)
from shoestring.json_files import check_path
from shoestring.model.export_names import check_options, pick_layout
from shoestring.paths import check_text, find_model

if TYPE_CHECKING:
    pass

CALIBRATED = ("int2", "int3", "int4", "nf", "fp3", "fp4")  # formats that `quantize` does not just round

app = typer.Typer(
    name="shoestring",
    help="Train, shrink and serve language models on a shoestring.",
    epilog="MODEL is a Hugging Face folder, a run folder, a .gguf file or a hub id. First steps: shoestring demo",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

bench_app = typer.Typer(help="Measure a server under load.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
app.add_typer(ckpt_app, name="ckpt")
app.add_typer(reshard_app, name="reshard")
app.add_typer(pipeline_app, name="pipeline")


OverridesArgument = Annotated[list[str] | None, typer.Argument(help="key=value ...")]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help="Read settings from a YAML file; key=value on the command line wins."
    ),
]

# -- verbs -------------------------------------------------------------------------------------------


@app.command()
def demo(overrides: OverridesArgument = None, config: ConfigOption = None) -> None:
    """The whole path on this machine, in minutes: train, shrink, evaluate, chat, report."""
    _run_recipe("demo", overrides or [], config)


@app.command()
def recipes(name: Annotated[str | None, typer.Argument(help="Show one recipe and all its settings.")] = None) -> None:
    """List the built-in recipes, or show one."""
    from shoestring.config import describe
    from shoestring.recipes.find import builtin_recipes, first_line, load_recipe
    from shoestring.report import Table

    if name is None:
        rows = [[key, first_line(path)] for key, path in builtin_recipes().items()]
        Table("Recipes", ["name", "what it does"], rows).print()
        print("shoestring recipes NAME lists the settings; shoestring run NAME key=value ... runs it")
        return
    recipe = load_recipe(name)
    print((recipe.__doc__ or "").strip() + "\n")
    options = describe(recipe.Config)
    for title, advanced in (("Settings", False), ("Advanced settings", True)):
        part = [[o.key, o.type, o.default, o.help] for o in options if o.advanced is advanced]
        if part:
            Table(title, ["key", "type", "default", "what it does"], part).print()


@app.command()
def run(
    recipe: Annotated[
        str, typer.Argument(help="A name (train/dense) or your .py file; add --help to see its settings.")
    ],
    overrides: OverridesArgument = None,
    config: ConfigOption = None,
) -> None:
    """Run a recipe. For N processes: torchrun --nproc-per-node N -m shoestring run ..."""
    _run_recipe(recipe, overrides or [], config)


@app.command()
def pretrain(
    data: Annotated[
        str | None,
        typer.Argument(help="A file, a folder or a glob of texts; python: the Python sources of this machine."),
    ] = None,
    overrides: OverridesArgument = None,
    method: Annotated[str, typer.Option(help="dense, fst or sste; fst and sste train 2:4 sparse.")] = "dense",
    config: ConfigOption = None,
) -> None:
    """Train a model from scratch. Short for: run train/dense data=DATA"""
    recipes_of = {"dense": "train/dense", "fst": "train/sparse24_fst", "sste": "train/sparse24_sste"}
    if method not in recipes_of:
        raise UserError(
            f"--method {method!r} is unknown; give {', '.join(recipes_of)}.{suggest(method, list(recipes_of))}"
        )
    given = overrides or []
    if data is not None:
        given = [data if _is_setting(data) else f"data={data}", *given]
    _run_short_form(recipes_of[method], given, config)


@app.command()
def finetune(
    model: ModelArgument,
    data: Annotated[
        str | None, typer.Argument(help="A .jsonl, .json or .parquet file of chats, prompts or preference pairs.")
    ] = None,
    overrides: OverridesArgument = None,
    config: ConfigOption = None,
) -> None:
    """Adapt a model to examples: LoRA on dense or packed weights, or all weights. Short for: run train/finetune"""
    given = overrides or []
    if data is not None:
        given = [data if _is_setting(data) else f"data={data}", *given]
    _run_short_form("train/finetune", [f"model={model}", *given], config)


@app.command()
def quantize(
    model: ModelArgument,
    format: Annotated[
        str, typer.Argument(help="int2 int3 int4 int8 nf2 nf3 nf4 fp3 fp4 fp8 sparse24, with :g64, :sym, :min, :s1 ...")
    ] = "int4",
    overrides: OverridesArgument = None,
    config: ConfigOption = None,
) -> None:
    """Shrink a model to few bits, calibrated on text that it writes itself. Short for: run shrink/ptq; with method=rtn,
    and for formats that are not calibrated, run shrink/rtn."""
    from shoestring.model.encoder_types import encoder_type

    given = overrides or []
    if _is_setting(format):  # the format was left out
        given, format = [format, *given], "int4"
    keys, recipe, added = {item.partition("=")[0] for item in given}, "shrink/ptq", []
    if encoder_type(find_model(model)) is not None:
        added = [] if {"calib", "method"} & keys else ["method=rtn"]
    elif "calib" not in keys and ("method=rtn" in given or not format.startswith(CALIBRATED)):
        recipe, given = "shrink/rtn", [item for item in given if item != "method=rtn"]
    _run_short_form(recipe, [f"model={model}", f"format={format}", *added, *given], config)


for verb in (generate, chat, serve):  # here: verbs are listed in the order in which they are added
    app.command()(verb)


@app.command("eval")
@from_fields
def evaluate(
    model: ModelArgument,
    *,
    text: Annotated[str | None, typer.Option(help="A text file: perplexity over all of it.")] = None,
    data: Annotated[str | None, typer.Option(help="A corpus (python, a file, a folder): its validation split.")] = None,
    context: Annotated[
        int | None, typer.Option(min=2, help="Tokens the model sees at once; default: 1024, or all it can.")
    ] = None,
    stride: Annotated[int | None, typer.Option(min=1, help="Tokens between windows; default: the context.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=2, help="Stop after this many tokens of the text.")] = None,
    tasks: Annotated[list[Path] | None, typer.Option(help="A .jsonl task (choice or cloze); may be repeated.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Items per task at most.")] = None,
    speed: Annotated[bool, typer.Option("--speed", help="Measure prefill and decode tokens per second.")] = False,
    adapter: AdapterOption = None,
    place: PlaceOptions,
) -> None:
    """Perplexity, task accuracy and speed; results of a run are kept in its evals.jsonl."""
    place.check_names(model, adapter=adapter)
    for name, given in (("--text", text), ("--data", data)):
        if given == "":  # as a path, that would be the folder in which the command runs
            raise UserError(f"{name} is empty; give what to evaluate on, or leave {name} out")
    if text is not None:
        check_text(text)
    with ended_by_ctrl_c():
        from shoestring.evals.model_row import evaluate_row, is_run, measure_task, text_tokens
        from shoestring.evals.perplexity import usual_context
        from shoestring.evals.tasks import read_task
        from shoestring.report import eval_table
        from shoestring.runlog import keep_evaluation

    if limit is not None and not tasks:
        raise UserError(
            f"--limit {limit} only applies to --tasks; give a task file, or use --max-tokens to read less text"
        )
    for task in tasks or []:
        read_task(task, limit=limit)  # what is wrong with a file is said before the long work
    loaded = place.load(model, adapter=adapter)
    asked = {"--context": context, "--stride": stride, "--max-tokens": max_tokens}
    context = usual_context(loaded.spec, context)
    tokens, name = text_tokens(loaded, model, text=text, data=data)
    if tokens is None and not tasks and not speed:
        raise UserError(
            f"{model} has no corpus of its own; choose what to evaluate on with --text FILE, --data or --tasks"
        )
    if tokens is None and (unused := [f"{key} {value}" for key, value in asked.items() if value is not None]):
        raise UserError(f"{unused[0]} only applies to perplexity; give --text or --data, or leave it out")
    lengths = {"context": context, "stride": stride, "max_tokens": max_tokens}
    rows = [evaluate_row(loaded, model, tokens, name, speed=speed, **lengths)]  # type: ignore[arg-type]
    rows += [measure_task(loaded, model, task, limit) for task in tasks or []]
    eval_table(rows).print()  # first: where the run's folder cannot be written to, the work was not for nothing
    try:
        for row in rows if is_run(Path(model)) and adapter is None else ():
            keep_evaluation(Path(model), row)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):  # a full disk is the user's to mend
            raise
        print(f"nothing was kept: cannot write {error.filename}: {error.strerror}", file=sys.stderr)


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="A run, a model folder, a checkpoint, a .safetensors or a .gguf file.")],
    against: Annotated[
        str | None, typer.Option(help="The model it was made from: show the error of each layer's weight.")
    ] = None,
    layers: Annotated[bool, typer.Option("--layers", help="One row per weight, not per kind.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read everything: checksums, and weights that are NaN or infinite.")
    ] = False,
) -> None:
    """What a run, a model, a checkpoint, a safetensors or a GGUF file holds: parameters, formats, sizes, metrics."""
    check_path(path)
    if not path or not Path(path).exists():  # before anything heavy is imported
        kinds = "a run, a model folder, a checkpoint folder, a .safetensors file or a .gguf file"
        raise UserError(f"{path or 'the empty path'} does not exist; give {kinds}")
    with ended_by_ctrl_c():
        from shoestring.cli.inspect import errors_table, summarize, verified_table

        if verify or against is not None:
            import torch  # noqa: F401  (headers need none)
    tables = summarize(Path(path), each_layer=layers)
    if against is not None:
        tables.append(errors_table(path, against))
    problems: list[str] = []
    if verify:
        table, problems = verified_table(Path(path))
        tables.append(table)
    for table in tables:
        table.print()
    if problems:
        raise UserError(f"{problems[0]}; do not use it, copy or download it again")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of training runs.")],
    out: Annotated[Path, typer.Option(help="The folder that report.html is written to.")] = Path(),
) -> None:
    """Loss of several training runs against seconds and against tokens, in one page."""
    from shoestring.report import Table, comparison_sections, write_report

    sections = comparison_sections(runs)
    for table in sections:
        if isinstance(table, Table):
            table.print()
    out.mkdir(parents=True, exist_ok=True)
    print(write_report(out, "Runs side by side", sections))


@app.command()
def export(
    model: ModelArgument,
    out: Annotated[
        Path, typer.Argument(help="The folder to write, or a file name that ends in .gguf; it must not exist yet.")
    ],
    layout: Annotated[
        str | None, typer.Option("--as", help="dense, packed (ours), compressed-tensors, fp8 (for vLLM) or gguf.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="For folders: auto, fp32, bf16 or fp16; auto is bf16, or the dtype of the scales.")
    ] = "auto",
    kind: Annotated[
        str,
        typer.Option(
            "--type", help="For GGUF: F16, BF16, Q8_0, Q4_0, ..., Q4_K_M; auto takes the smallest exact type."
        ),
    ] = "auto",
    certify: Annotated[
        bool,
        typer.Option("--certify", help="Load the result in transformers or llama.cpp, compare, write a certificate."),
    ] = False,
    text: Annotated[Path | None, typer.Option(help="With --certify: a text file to compare on.")] = None,
    adapter: AdapterOption = None,
) -> None:
    """Write a model that others load: dense weights, integers for vLLM and transformers, or GGUF for llama.cpp."""
    find_model(model)
    check_options(pick_layout(out, layout), dtype != "auto", kind)
    with ended_by_ctrl_c():
        from shoestring.cli.inspect import written_table
        from shoestring.device import pick_dtype
        from shoestring.evals import certificate
        from shoestring.evals.model_row import megabytes_on_disk
        from shoestring.json_files import read_text
        from shoestring.model.export import export_model
        from shoestring.runlog import check_free

    check_free(out)
    if certify and adapter is not None:
        raise UserError(
            "--certify compares with MODEL as it is: export with --adapter, then certify an export of the result"
        )
    if text is not None and not certify:
        raise UserError(f"--text {text} only applies to --certify; give both options or neither")
    words = None if text is None else read_text(text)
    if certify:
        certificate.check_target(pick_layout(out, layout))
    wanted = None if dtype == "auto" else pick_dtype(dtype, "cpu")
    exported = export_model(model, out, layout, wanted, kind, adapter)
    if exported.tensors:
        written_table(exported.tensors).print()
    print(f"wrote {out} ({megabytes_on_disk(out):.1f} MB); {exported.reader}")
    if exported.note is not None:
        print(f"note: {exported.note}")
    if certify:
        print(certificate.paragraph(certificate.certify(exported, words)))
        print(f"certificate: {certificate.certificate_path(out)}")


@app.command()
def push(
    run: Annotated[str, typer.Argument(help="A run folder or a model folder.")],
    repo: Annotated[str, typer.Argument(help="The repository on the hub: org/name, or org/name@branch.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    message: Annotated[str | None, typer.Option(help="The commit message.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Upload nothing: print the files and the model card.")
    ] = False,
) -> None:
    """Upload a finished model to the Hugging Face hub, with a model card made from its run."""
    with ended_by_ctrl_c():
        from shoestring.cli.push import described
        from shoestring.cli.push import push as push_model

    pushed = push_model(run, repo, private=private, dry_run=dry_run, message=message)
    if dry_run:
        print(pushed.card)
    print(f"{'would push' if dry_run else f'pushed to {pushed.url}'}: {described(pushed, run)}")


@app.command("env")
def environment() -> None:
    """Versions, devices, which kernels will be used and why not others, and the cache. For bug reports."""
    from shoestring.cli.environment import summarize_machine

    for table in summarize_machine():
        table.print()


@app.command("net")
def network(
    device: DeviceOption = "auto",
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds to wait for another process.")] = 60.0,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FILE", help="Append the result to FILE as a line of JSON.")
    ] = None,
) -> None:
    """Latency, jitter and bandwidth between all processes: torchrun --nproc-per-node N -m shoestring net."""
    from shoestring.cli.net import measure

    measure(device, timeout, save)


@bench_app.command("serve")
def bench_serve(
    target: Annotated[str, typer.Argument(help="A running server (http://...), or a MODEL to start one for.")],
    rate: Annotated[
        float | None, typer.Option(help="Requests per second; default: 1, or the rate of the trace.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to send requests.")] = 30.0,
    trace: Annotated[
        Path | None, typer.Option(help="Arrivals and lengths from a CSV: TIMESTAMP, ContextTokens, GeneratedTokens.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt (without a trace).")] = 128,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer (without a trace).")] = 64,
    slo_ttft: Annotated[float, typer.Option(help="Target (SLO): seconds to the first token.")] = 1.0,
    slo_tpot: Annotated[float, typer.Option(help="Target (SLO): seconds per token after the first.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Seed of arrivals and prompts.")] = 0,
    api_key: Annotated[str | None, typer.Option(envvar="SHOESTRING_API_KEY", help="The server's key.")] = None,
    serve_options: Annotated[
        str, typer.Option(help="Options for the server that is started for a MODEL, e.g. '--max-requests 32'.")
    ] = "",
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FILE", help="Append the result to FILE as a line of JSON.")
    ] = None,
) -> None:
    """Send requests at a rate or from a trace; report latency percentiles, throughput and goodput under an SLO."""
    with ended_by_ctrl_c():
        from shoestring.evals.server_load import Slo, at_url, check_save, from_trace, poisson, run_load

    if trace is not None:
        plan = from_trace(trace, seconds, rate=rate)
    else:
        asked = 1.0 if rate is None else rate
        plan = poisson(asked, seconds, num_prompt=prompt_tokens, num_new=new_tokens, seed=seed)
    slo = Slo(slo_ttft, slo_tpot)
    if not plan:  # said before a server starts
        given = f"of {trace}" if trace else f"at a rate of {asked:g}"
        raise UserError(f"no request arrives in {seconds:g} seconds {given}; give more --seconds or a higher --rate")
    check_save(save)
    with at_url(target, serve_options) as url:
        case = f"{'trace' if trace else 'Poisson'}, {Path(target).name}"
        about = {"load": "trace" if trace else "Poisson", "server": serve_options or ""}
        run_load(url, plan, slo, case, seed=seed, api_key=api_key, save=save, about=about)


# -- what the verbs share ----------------------------------------------------------------------------


def _is_setting(word: str) -> bool:
    """Whether a word that could be a path is key=value."""
    return word.partition("=")[0].replace(".", "_").isidentifier() and "=" in word and not Path(word).exists()


def _run_short_form(name: str, overrides: list[str], settings: Path | None) -> None:
    """Run a recipe, and say which command that is."""
    import shlex

    if _rank() == 0:
        file = [] if settings is None else ["--config", str(settings)]
        print(f"= shoestring run {shlex.join([name, *file, *overrides])}", flush=True)
    _run_recipe(name, overrides, settings)


def _run_recipe(name: str, overrides: list[str], settings: Path | None = None) -> None:
    """`settings`: a file whose settings hold where `overrides` has none."""
    from shoestring.config import with_settings
    from shoestring.recipes.find import builtin_recipes, load_recipe, own_faults, resolve_config
    from shoestring.runlog import import_tracker

    try:
        import_tracker(os.environ.get("SHOESTRING_TRACK", ""))  # wrong: before a folder is made
        if settings is not None:
            overrides = with_settings(settings, overrides)
        if name in builtin_recipes():
            check_settings(overrides)  # before the recipe's imports, which take seconds
        with ended_by_ctrl_c():
            recipe = load_recipe(name)
        config = resolve_config(recipe, overrides)
    except UserError:
        if _rank() > 0:  # every rank reads the same command; one of them answers
            raise typer.Exit(2) from None
        raise
    with own_faults(recipe), memory_as_user_error(config), lost_peer_as_user_error(name, config), stoppable():
        recipe.main(config)


# -- errors and exit codes ---------------------------------------------------------------------------


def run_cli(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    # click's UsageError, wherever this version of typer keeps it
    usage_error = cast(type[Exception], typer.BadParameter.__base__)
    streams, readers = (sys.stdout, sys.stderr), OutputReaders()
    try:
        with memory_as_user_error(), lost_peer_as_user_error():
            args = help_of_recipe(sys.argv[1:] if argv is None else argv)
            result = app(args=args, prog_name="shoestring", standalone_mode=False)
        sys.stdout.flush()  # what goes wrong here is told as everything else
        return result if isinstance(result, int) else 0
    except Interrupted as stop:
        return _complain(str(stop), 2)
    except UserError as error:
        return _complain(f"error: {error}", 2)
    except KeyboardInterrupt:
        return 130
    except usage_error as error:
        text = error.format_message()  # type: ignore[attr-defined]
        context = error.ctx  # type: ignore[attr-defined]
        verb = context.command_path if context is not None else "shoestring"
        return _complain(f"error: {text} (see {verb} --help)", 2) if text else 2  # none: help was shown
    except SystemExit as stop:
        if not isinstance(stop.__context__, BrokenPipeError):
            raise
        sys.stdout, sys.stderr = streams  # typer may have replaced them; and it says nothing
        return _broken_pipe(stop.__context__, readers)
    except BrokenPipeError as error:
        return _broken_pipe(error, readers)
    except OSError as error:
        if is_users(error):
            where = f" ({shortened(str(error.filename), 100)})" if error.filename else ""
            return _complain(f"error: {error.strerror}{where}; {room(error)}choose another place", 2)
        return _bug(error)
    except Exception as error:
        return _bug(error)


def main() -> None:
    open_missing_streams()
    obey_sigterm_as_first_process(os.getpid())
    write_unprintable_as_question_marks()
    tell_warnings_in_one_line()
    sys.exit(run_cli())


def _broken_pipe(error: BrokenPipeError, readers: OutputReaders) -> int:
    """The reader of our output went away (| head), which ends other programs by a signal; or a connection broke."""
    if not readers.left():
        return _bug(error)
    for stream in (sys.stdout, sys.stderr):
        write_or_give_up(stream)
    return 128 + signal.SIGPIPE


def _complain(text: str, code: int) -> int:
    write_or_give_up(sys.stdout)
    rank = f"[rank {_rank()}] " if _rank() > 0 else ""
    printable = text.encode("utf-8", "backslashreplace").decode()  # bytes of a file name that are no text
    write_or_give_up(sys.stderr, rank + " ".join(printable.split()) + "\n")
    return code


def _bug(error: BaseException) -> int:
    import traceback

    write_or_give_up(sys.stdout)
    write_or_give_up(sys.stderr, "".join(traceback.format_exception(error)))
    note = "this is a bug in shoestring, please report it with the lines above"
    return _complain(f"{note} and the output of: shoestring env", 1)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _print_version(asked: bool) -> None:
    if asked:
        from shoestring.runlog import versions

        others = (f"{k} {v}" for k, v in versions().items() if k != "shoestring")
        print("  ".join([f"shoestring {__version__}", *others]))
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print versions and exit.")
    ] = False,
) -> None: ...
