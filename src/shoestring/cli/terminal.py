"""A model at the terminal: what `generate`, `chat` and `serve` share.

Imports what it needs when it needs it, as the command line does, so that --help is quick.
"""

from __future__ import annotations

import io
import os
import select
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from shoestring.errors import UserError
from shoestring.runlog import give_up

if TYPE_CHECKING:
    from shoestring.model.folder import LoadedModel
    from shoestring.model.skip import SkipSet
    from shoestring.serve import Engine, SkipPolicy
    from shoestring.serve.engine.logit_rules import SamplingWithRules
    from shoestring.serve.engine.tensor_parallel import Ranks


def lead(
    use: Callable[[LoadedModel, Ranks | None], None], load: Callable[[Ranks | None], LoadedModel], device: str
) -> None:
    """use(model, ranks); under torchrun the first process does, and the others compute their shares."""
    from shoestring.serve.engine.tensor_parallel import open_ranks

    ranks = open_ranks(device)
    loaded = load(ranks)
    if ranks is not None and not ranks.first:
        ranks.follow(loaded.model)
        return ranks.close()
    try:
        use(loaded, ranks)
    finally:
        if ranks is not None:
            ranks.end()


def hint_at_speed(loaded: LoadedModel) -> None:
    from shoestring.formats.int8_activations import gains_on, would_gain
    from shoestring.model.gguf import is_quantized

    model = loaded.model
    in_file = loaded.path.suffix == ".gguf" and gains_on(model, model.compute_dtype) and is_quantized(loaded.path)
    if in_file or would_gain(model, model.compute_dtype):
        print(
            "hint: --int8-activations may be several times as fast for integer weights on this processor; it rounds "
            "inputs to 8 bits",
            file=sys.stderr,
        )


def open_engine(
    loaded: LoadedModel, context: int, drafter: str | None = None, skip: str = "none", ranks: Ranks | None = None
) -> Engine:
    from shoestring.serve import Engine, open_drafter
    from shoestring.serve.engine.logit_rules import VerifyWithRules
    from shoestring.serve.speculative.verify import verify

    if ranks is not None and skip != "none" and not _is_files(skip):
        raise UserError(
            f"--skip {skip} searches on the whole model, which is split over processes here; "
            "search first (shoestring run shrink/skip_set) and give the file"
        )
    guess = None
    if drafter is not None:
        device, dtype = loaded.model.device, loaded.model.compute_dtype
        guess = open_drafter(drafter, loaded.model, device=str(device), dtype=dtype)
    policy, draft_skip = (None, None) if skip == "none" else find_skips(loaded, skip, context)
    if ranks is None and sys.stderr.isatty():
        hint_at_speed(loaded)
    return Engine(
        loaded.model,
        loaded.tokenizer,
        max_requests=1,
        max_context=context,
        drafter=guess,
        verify=VerifyWithRules(verify),
        skip=policy,
        draft_skip=draft_skip,
        ranks=ranks,
    )


def _is_files(skip: str) -> bool:
    return all(Path(p).is_file() for p in skip.removeprefix("lossless:").split("+"))


def find_skips(loaded: LoadedModel, skip: str, context: int) -> tuple[SkipPolicy | None, SkipSet | None]:
    """What --skip names: a policy for requests, or a set for drafts."""
    from shoestring.evals.model_row import corpus_of_run
    from shoestring.serve.engine.skip_policy import open_skip

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    corpus, _ = corpus_of_run(loaded.path)
    found = open_skip(skip, loaded, context=context, corpus=corpus, say=say)
    return found.policy, found.draft


class CompileLine:
    """A line on a terminal that counts the kernels compiled so far; `clear` makes room for the text."""

    def __init__(self, out: TextIO) -> None:
        self.out, self.count = out, 0

    def listen(self, *, cache_hit: bool, **_: Any) -> None:
        """Triton's listener: called for every kernel that is compiled or read from the disk."""
        if not cache_hit:
            self.count += 1
            self.out.write(f"\rcompiling kernels for this GPU, the first time only: {self.count}")
            self.out.flush()

    def clear(self) -> None:
        if self.count:
            self.out.write("\r\033[K")
            self.out.flush()
            self.count = 0


def begin_compiling() -> None:
    """For 8-bit activations, while the model is loaded."""
    from shoestring.serve.engine.cpu_decode import begin_compiling

    line = begin_compiling()
    if line is not None and sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)


def watch_compilations(engine: Engine) -> CompileLine:
    """The first use of a shape on a GPU compiles for seconds; on a terminal a line says so."""
    line = CompileLine(sys.stderr)
    if engine.runner.device.type == "cuda" and sys.stderr.isatty():
        from shoestring.kernels.runtime.triton_backend import triton_refusal

        if triton_refusal() is None:
            import triton

            triton.knobs.compilation.listener = line.listen
    return line


def adopt_adapter(engine: Engine) -> str | None:
    """Have the engine serve the adapter that its model was loaded with, so that steps stay graphs; its name there.
    None: there is none, or the model's own layers compute it."""
    from shoestring.formats.adapter import adapter_weights, attach_adapters, remove_adapters
    from shoestring.model.adapter_folder import AdapterFile

    if engine.model.device.type == "cpu" or engine.model.embed.group is not None:
        return None
    if not (weights := adapter_weights(engine.model)):
        return None
    remove_adapters(engine.model)
    try:
        return engine.adapters.load("adapter", AdapterFile(weights, "")).name
    except UserError:  # DoRA, say
        attach_adapters(engine.model, weights)
        return None


def stream_text(
    engine: Engine,
    tokens: list[int],
    sampling: SamplingWithRules,
    stats: bool,
    *,
    echo: str = "",
    adapter: str | None = None,
) -> str:
    """Print a completion as it comes, behind `echo` once the engine has taken the prompt; returns it."""
    import time

    from shoestring.serve.engine.logit_rules import TokenHistory

    sampling = replace(sampling, history=TokenHistory(tuple(tokens)))  # what penalties look at: of this answer alone
    pieces: list[str] = []
    compiling = watch_compilations(engine)
    began, first = time.perf_counter(), 0.0
    before = replace(engine.stats)  # an engine counts on from one answer of a chat to the next
    for piece in engine.stream(tokens, sampling, adapter):
        first = first or time.perf_counter() - began
        compiling.clear()
        print("" if pieces else echo, piece, sep="", end="", flush=True)
        pieces.append(piece)
    print("" if pieces else echo, flush=True)
    if stats:
        num, rest = engine.stats.num_new_tokens - before.num_new_tokens, time.perf_counter() - began - first
        rate = f"first after {first:.2f}s, then {(num - 1) / rest if num > 1 else 0:.1f} tokens/s"
        print(f"[{len(tokens)} prompt tokens, {num} new tokens, {rate}]")
        for skip in engine.skip_sets.sets.values():
            what = f"{len(skip.attn)} attention and {len(skip.mlp)} FFN sublayers skipped"
            name = "a set for guessing ahead, used in its place" if skip.name == "lossless" else skip.name
            print(f"[{what}: {name or skip.id}; the text is not the whole model's]")
        drafted = engine.stats.num_drafted - before.num_drafted
        if drafted:
            accepted, steps = engine.stats.num_accepted - before.num_accepted, engine.stats.num_steps - before.num_steps
            share = f"{accepted} of {drafted} drafted tokens accepted ({accepted / drafted:.0%})"
            print(f"[{share}, {steps} steps, {num / steps:.2f} tokens per step]")
        elif engine.drafter is not None:
            print("[nothing was drafted: there was no guess, or drafting was not faster]")
    return "".join(pieces)


def read_prompt(prompt: str) -> str:
    """The prompt itself; for -, all of standard input."""
    try:
        return check_text(sys.stdin.read() if prompt == "-" else prompt)
    except UnicodeError:
        raise UserError("the prompt is not text in UTF-8; convert it first (iconv, say)") from None


def check_text(text: str) -> str:
    """The text itself. Bytes that are none come from the command line as lone surrogates: a UnicodeError."""
    text.encode()
    return text


def user_lines() -> Any:
    """Lines typed by the user (with a prompt) or piped in, until the end of input."""
    interactive = sys.stdin.isatty()
    if interactive:
        print("Type a message; an empty line or Ctrl-D ends the chat.")
    while True:
        try:
            line = check_text(input("> " if interactive else "").strip())
        except (EOFError, KeyboardInterrupt):
            return
        except UnicodeError:
            raise UserError("a message is not text in UTF-8; convert it first (iconv, say)") from None
        if not line and interactive:
            return
        if line:
            if not interactive:
                print(f"> {line}")
            yield line


def obey_sigterm_as_first_process(pid: int) -> None:
    """As process 1 (a container without an init), SIGTERM without a handler is ignored. Here it ends the process with
    the code that a shell gives for it, until something else handles it. Other processes keep the default action, which
    also ends a process that is inside a library."""
    if pid == 1:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))


def write_unprintable_as_question_marks() -> None:
    """Where the terminal's encoding is not UTF-8, a model may write what it has no letter for; that is no error."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def tell_warnings_in_one_line() -> None:
    """Warnings of the package without the line of source that caused them; those of other libraries stay whole."""
    package, usual = str(Path(__file__).parents[1]), warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, UserWarning) and filename.startswith(package):
            print(f"warning: {message}", file=sys.stderr)
        else:
            usual(message, category, filename, lineno, file, line)

    warnings.showwarning = show


def open_missing_streams() -> None:
    """A program may be started with standard streams closed (2>&-). The next file that it opens would get the number of
    one, and messages of libraries would be written into it."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))


def write_or_give_up(stream: TextIO, text: str = "") -> None:
    """Write `text` and what was held back; a stream that cannot be written to (a full disk, no reader) is given up."""
    try:
        stream.write(text)
        stream.flush()
    except OSError:
        give_up(stream)


class OutputReaders:
    """Whether somebody still reads what this process writes to its standard streams, where those are pipes."""

    def __init__(self) -> None:
        self._files = [self._file(number) for number in (1, 2)]

    def left(self) -> bool:
        poll = select.poll()
        for number in (1, 2):
            poll.register(number, 0)
        # rich opens /dev/null in the place of a pipe that it could not write to.
        replaced = self._files != [self._file(number) for number in (1, 2)]
        return replaced or any(event & select.POLLERR for _, event in poll.poll(0))

    @staticmethod
    def _file(number: int) -> tuple[int, int] | None:
        try:
            status = os.fstat(number)
        except OSError:
            return None
        return status.st_dev, status.st_ino


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM inside acts as Ctrl-C, so that a run saves and says how to continue."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """Ctrl-C inside ends the process, as SIGTERM does, until something else handles it. A KeyboardInterrupt would not
    always: some libraries swallow it while they are imported, others abort. A job in the background of a script, which
    ignores Ctrl-C, goes on doing so."""
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored or threading.current_thread() is not threading.main_thread():
        yield
        return
    first = os.getpid() == 1  # for which there is no default action
    before = signal.signal(signal.SIGINT, (lambda *_: os._exit(128 + signal.SIGINT)) if first else signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def help_of_recipe(argv: list[str]) -> list[str]:
    """`run NAME ... --help` asks for that recipe's settings, which typer knows nothing of."""
    names = [arg for arg in argv[1:2] if not arg.startswith("-")]
    if argv[:1] == ["run"] and names and {"-h", "--help"} & set(argv):
        return ["recipes", *names]
    return argv


def chat_prompt(
    messages: list[dict[str, str]], encode: Callable[[list[dict[str, str]]], list[int]], room: int, answer: int
) -> list[int] | None:
    """Tokens of the chat; the oldest messages are forgotten (in place, the system's not) where it leaves no room for an
    answer. None, and the last message is taken back, where not even that one fits.
    """
    first = 1 if messages[0]["role"] == "system" else 0
    answer = min(answer, room // 4)  # one may ask for longer answers than the chat has room for
    while len(tokens := encode(messages)) > room - answer and len(messages) > first + 1:
        del messages[first : first + 2]  # a question and its answer
    if len(tokens) < room:
        return tokens
    messages.pop()
    print(
        f"this message makes {len(tokens)} tokens, and the chat has room for {room}: shorten it, or give more "
        "--context where the model reads more",
        file=sys.stderr,
    )
    return None
