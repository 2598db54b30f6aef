"""The verbs on a tiny real model, and every way a command can go wrong: exit code and one line."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import re
import shutil
import signal
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing

from shoestring.cli import terminal
from shoestring.cli.app import run_cli
from shoestring.cli.terminal import CompileLine, chat_prompt, open_engine, stream_text, tell_warnings_in_one_line
from shoestring.config import describe
from shoestring.errors import Interrupted, UserError
from shoestring.evals import model_row
from shoestring.evals.perplexity import perplexity
from shoestring.formats import convert, pack, parse_format
from shoestring.model import Decoder, ModelSpec, Tokenizer, load_model, save_model
from shoestring.model.parallel import init_weights
from shoestring.recipes.find import builtin_recipes, load_recipe
from shoestring.serve import Engine, Sampling
from shoestring.serve.engine.logit_rules import LogitRules, SamplingWithRules, TokenHistory, VerifyWithRules
from shoestring.serve.http.request_schema import ApiError, CompletionBody
from shoestring.serve.speculative.verify import verify

TEXT = "the quick brown fox jumps over the lazy dog. pack my box with five dozen liquor jugs. " * 40
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}<assistant>"


class Result(NamedTuple):
    code: int
    out: str
    err: str


Cli = Callable[..., Result]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    def call(*argv: object) -> Result:
        capsys.readouterr()
        code = run_cli([str(a) for a in argv])
        return Result(code, *capsys.readouterr())

    return call


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = Tokenizer.train([TEXT], 300)
    spec = ModelSpec(tokenizer.vocab_size, 64, 2, 4, 2, 16, 128, 64, eos_id=tokenizer.eos_id)
    model = Decoder(spec)
    init_weights(model, 0)
    save_model(folder, model, tokenizer)
    return folder


@pytest.fixture(scope="module")
def packed_folder(model_folder: Path) -> Path:
    loaded = load_model(model_folder)
    convert(loaded.model, [("*.mlp.*", parse_format("nf3:g32")), ("blocks.0.*", parse_format("int4:g64"))])
    pack(loaded.model)
    return save_model(model_folder.parent / "packed", loaded.model, loaded.tokenizer)


def assert_one_line_error(result: Result, *needles: str) -> None:
    assert result.code == 2, result
    assert result.err.startswith("error: ") and result.err.count("\n") == 1, result.err
    for needle in needles:
        assert needle in result.err


# -- ways to go wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "needle"),
    [
        (["trian"], "No such command 'trian'"),
        (["generate"], "Missing argument"),
        (["generate", "x", "y", "--temprature", "1"], "--temprature"),
        (["run", "train/dnse"], "Did you mean 'train/dense'?"),
        (["run", "nowhere.py"], "no such file: nowhere.py"),
        (["run", "train/dense", "stesp=3"], "Did you mean 'steps'?"),
        (["run", "train/dense", "steps=many"], "is not a value of type int"),
        (["run", "train/dense", "size=huge"], "allowed are tiny, small"),
        (["run", "train/dense", "context=1"], "give 2 or more"),
        (["run", "train/dense", "resume="], "resume= is empty"),
        (["run", "train/dense", "resume=nowhere"], "is not a run folder"),
        (["run", "shrink/rtn"], "model=... is required"),
        (["run", "shrink/rtn", "model=x", "format=int5"], "x does not exist"),  # before the recipe is imported
        (["recipes", "train/dens"], "Did you mean 'train/dense'?"),
        (["generate", "nowhere", "hi"], "nowhere does not exist"),
        (["inspect", "nowhere"], "nowhere does not exist"),
        (["eval", "nowhere"], "nowhere does not exist"),
        (["export", "nowhere", "out"], "nowhere does not exist"),
        (["chat", "nowhere"], "nowhere does not exist"),
    ],
)
def test_bad_commands(cli: Cli, argv: list[str], needle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = cli(*argv)
    assert_one_line_error(result, needle)
    assert result.out == ""
    assert not list(tmp_path.iterdir())  # nothing half-written


def test_compiled_kernels_are_counted_on_one_line() -> None:
    out = io.StringIO()
    line = CompileLine(out)
    line.clear()
    assert not out.getvalue()
    for hit in (False, True, False):
        line.listen(cache_hit=hit, src=None, times=None)
    assert out.getvalue().endswith("the first time only: 2") and "\n" not in out.getvalue()
    line.clear()
    assert out.getvalue().endswith("\033[K")


def test_bad_values_for_a_good_model(cli: Cli, model_folder: Path, tmp_path: Path) -> None:
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"caf\xe9 \xff\xfe")
    long = cli("generate", model_folder, "the " * 100)
    assert_one_line_error(long, "tokens, but the context holds 64")
    assert long.out == ""  # the prompt is shown with what comes behind it
    assert_one_line_error(cli("generate", model_folder, "the", "--temperature", "-1"), "temperature")
    assert_one_line_error(cli("generate", model_folder, "th\udce9"), "not text in UTF-8")
    assert_one_line_error(cli("generate", "~nobody-there/m", "the"), "~nobody-there/m does not exist")
    assert_one_line_error(cli("run", "train/dense", "data=~nobody-there/x"), "data=~nobody-there/x does not")
    bench = ("bench", "serve", model_folder)
    assert_one_line_error(cli(*bench, "--serve-options", "'x"), "--serve-options")
    assert_one_line_error(cli(*bench, "--rate", "0"), "is not a rate")
    no_url = cli("bench", "serve", "http://[::1", "--rate", 9)
    assert_one_line_error(no_url, "no OpenAI-compatible server answers at http://[::1")
    assert_one_line_error(cli("generate", model_folder, "the", "--dtype", "int3"), "allowed are auto, fp32")
    for device in ("tpu9", "xpu", "meta"):
        assert_one_line_error(cli("generate", model_folder, "the", "--device", device), "device")
    assert_one_line_error(cli("chat", model_folder), "has no chat template")
    assert_one_line_error(cli("eval", model_folder), "--text FILE")
    assert_one_line_error(cli("eval", model_folder, "--text", tmp_path / "no.txt"), "does not exist")
    assert_one_line_error(cli("eval", model_folder, "--text", binary), "is not UTF-8")
    assert_one_line_error(cli("eval", model_folder, "--tasks", binary), "binary.txt")
    rtn = ("run", "shrink/rtn", f"model={model_folder}")
    assert_one_line_error(cli(*rtn, "format=int5"), "int5")
    assert_one_line_error(cli(*rtn, "rules=mlp"), "is not glob=format")
    assert_one_line_error(cli(*rtn, "format=int4:g48"), "48")
    assert_one_line_error(cli("eval", model_folder, "--speed", "--limit", 3), "--limit 3 only applies to --tasks")
    for option in ("--context", "--stride", "--max-tokens"):
        ignored = cli("eval", model_folder, "--speed", option, 5)
        assert_one_line_error(ignored, f"{option} 5 only applies to perplexity")
    for option in ("--text", "--data"):  # of a shell variable that is not set, say
        assert_one_line_error(cli("eval", model_folder, option, ""), f"{option} is empty")
    for context in (65, 10**6):  # of more tokens than the model has positions
        wanted = f"context={context} does not fit this model, which has 64 positions; give 2 to 64"
        assert_one_line_error(cli("eval", model_folder, "--data", "nowhere", "--context", context), wanted)
    for context in (1, 0, -5):
        assert_one_line_error(cli("eval", model_folder, "--context", context), "'--context'")
    assert_one_line_error(cli("inspect", binary), "neither a .safetensors nor a .gguf file")
    nothing = cli("inspect", model_folder, "--against", "nowhere")
    assert_one_line_error(nothing, "nowhere does not exist")
    assert nothing.out == ""
    guess = cli("generate", model_folder, "the", "--drafter", "ngrm")
    assert_one_line_error(guess, "no drafter ngrm", "give ngram, the path of", "Did you mean 'ngram'?")
    assert_one_line_error(cli("inspect", tmp_path), "not a run, model or checkpoint")
    assert_one_line_error(cli("export", model_folder, model_folder), "exists already")


def write_recipe(path: Path, body: str) -> Path:
    head = "from dataclasses import dataclass\nfrom shoestring.config import option\n\n\n"
    config = "@dataclass\nclass Config:\n    steps: int = option(3, 'how many')\n\n\n"
    path.write_text(head + config + body)
    return path


def test_my_own_recipe(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = write_recipe(tmp_path / "mine.py", "def main(config):\n    print('steps', config.steps)\n")
    assert cli("run", recipe, "steps=7") == Result(0, "steps 7\n", "")
    assert "how many" in cli("recipes", recipe).out
    assert_one_line_error(cli("run", recipe, "stops=7"), "Did you mean 'steps'?")
    assert_one_line_error(cli("run", write_recipe(tmp_path / "half.py", "")), "defines no main")
    (tmp_path / "typo.py").write_text("import json\ndef main(:\n")
    assert_one_line_error(cli("run", tmp_path / "typo.py"), "typo.py, line 2: invalid syntax")
    (tmp_path / "early.py").write_text("import json\njson.loads('{')\n")
    assert_one_line_error(cli("run", tmp_path / "early.py"), "early.py, line 2: JSONDecodeError: ")
    monkeypatch.chdir(tmp_path)
    assert_one_line_error(cli("run", "early.py"), "error: early.py, line 2: JSONDecodeError: ")
    (tmp_path / "binary.py").write_bytes(b"\0")
    assert_one_line_error(cli("run", "binary.py"), "error: binary.py", "cannot contain null bytes")
    (tmp_path / "plain.py").write_text("class Config: ...\ndef main(config): ...\n")
    assert_one_line_error(cli("run", tmp_path / "plain.py"), "plain.py is not a dataclass")


@pytest.mark.parametrize("rank", [0, 2])
def test_exit_codes(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    prefix = "[rank 2] " if rank else ""
    head = "import errno\nfrom shoestring.errors import Interrupted, UserError, shortened\n\n\ndef main(config):\n"
    cases = {
        "raise UserError('too\\nlong')": (2, f"{prefix}error: too long\n"),
        "raise Interrupted('stopped at 3')": (2, f"{prefix}stopped at 3\n"),
        "raise KeyboardInterrupt": (130, ""),
        "raise OSError(errno.ENOSPC, 'No space left on device', 'x/y')": (2, "No space left on device (x/y)"),
        "raise OSError(errno.EROFS, 'Read-only', 'x/y')": (2, "error: Read-only (x/y); choose another place\n"),
        "shortened(3, 1)": (1, "this is a bug in shoestring, please report"),
        "raise RuntimeError('oops')": (2, f"{prefix}error: case.py, line 15: RuntimeError: oops\n"),
        "__import__('json').loads('{')": (2, "error: case.py, line 15: JSONDecodeError: Expecting property"),
    }
    for line, (code, err) in cases.items():
        result = cli("run", write_recipe(tmp_path / "case.py", f"{head}    {line}\n"))
        assert result.code == code, line
        assert err in result.err
        assert ("Traceback" in result.err) == (code == 1 or "case.py, line" in err)
        if "case.py, line" in err:  # from the recipe's own lines on
            assert "app.py" not in result.err and 'case.py", line 15, in main' in result.err
    assert errno.ENOSPC and issubclass(Interrupted, ValueError)


def test_warnings_of_the_package_are_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    others: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *rest: others.append(str(message)))
    tell_warnings_in_one_line()
    own = str(Path(terminal.__file__).parents[1] / "formats/convert.py")
    for text, category, file in (
        ("install g++", UserWarning, own),
        ("a", UserWarning, "nn.py"),
        ("b", FutureWarning, own),
    ):
        warnings.showwarning(category(text), category, file, 7)
    assert capsys.readouterr().err == "warning: install g++\n" and others == ["a", "b"]


def test_help_of_a_recipe_is_its_own(cli: Cli) -> None:
    for asked in (("run", "train/dense", "--help"), ("run", "train/dense", "steps=3", "-h")):
        out = cli(*asked).out
        assert out == cli("recipes", "train/dense").out and "weight_decay" in out
    assert "Usage: shoestring run" in cli("run", "--help").out
    assert "no-such" in cli("run", "no-such", "--help").err


def test_no_command_shows_the_help_and_nothing_else(cli: Cli) -> None:
    for argv in ((), ("bench",)):
        result = cli(*argv)
        assert result.code == 2 and "Usage: shoestring" in result.out + result.err
        assert "error" not in result.err


def test_a_wrong_command_is_answered_by_one_rank(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert cli("run", "train/dense", "stesp=3") == Result(2, "", "")


# -- verbs -------------------------------------------------------------------------------------------


def test_short_forms_are_the_recipes(
    cli: Cli, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some.txt").write_text(TEXT * 20)
    (tmp_path / "s.yaml").write_text("run: r\nmax_tokens: 64\ntext: some.txt\ncontext: 32\n")
    rounded = cli("quantize", model_folder, "int4:g32", "method=rtn", "--config", "s.yaml", "run=one")
    assert rounded.code == 0, rounded
    assert f"= shoestring run shrink/rtn --config s.yaml model={model_folder} format=int4:g32 run=one\n" in rounded.out
    assert json.loads((tmp_path / "one" / "config.json").read_text())["config"]["max_tokens"] == 64
    small = ["calib_windows=1", "calib_context=16", "run=two"]
    calibrated = cli("quantize", model_folder, "int4:g32", "calib=some.txt", *small)
    assert calibrated.code == 0, calibrated
    assert json.loads((tmp_path / "two" / "config.json").read_text())["config"]["method"] == "gptq+clip"
    own = cli("quantize", model_folder, "int4:g32", "calib_windows=1", "calib_context=16", "run=three")
    assert own.code == 0 and "shrink/ptq" in own.out and "quality lost: KL divergence" in own.out, own
    assert "shrink/rtn" in cli("quantize", model_folder, "int8:g32", "run=four").out  # what calibration hardly changes
    for argv, said in (
        (["pretrain", "nowhere.txt", "steps=1"], "shoestring run train/dense data=nowhere.txt steps=1"),
        (["pretrain", "data=nowhere.txt", "--method", "sste"], "shoestring run train/sparse24_sste data=nowhere.txt"),
    ):
        result = cli(*argv)
        assert result.code == 2 and said in result.out and "nowhere.txt" in result.err, result
    assert_one_line_error(cli("pretrain", "x", "--method", "fts"), "Did you mean 'fst'?")
    assert_one_line_error(cli("run", "train/dense", "--config", "none.yaml"), "none.yaml")


def test_recipes_lists_all_and_shows_one(cli: Cli) -> None:
    listed = cli("recipes").out
    for name in ("demo", "train/dense", "shrink/rtn"):
        assert name in listed
    shown = cli("recipes", "train/dense").out
    for needle in ("Run:", "torchrun", "steps", "2,000" if "2,000" in shown else "2000", "mesh.tp", "optimizer steps"):
        assert needle in shown


@pytest.mark.parametrize("name", builtin_recipes())
def test_a_recipe_shows_what_its_example_sets_before_what_is_advanced(cli: Cli, name: str) -> None:
    shown = cli("recipes", name).out
    everyday, _, advanced = shown[shown.index("\nSettings") :].partition("\nAdvanced settings")
    keys = [[line.split()[0] for line in part.splitlines() if line[2:3].isalpha()] for part in (everyday, advanced)]
    rows = describe(load_recipe(name).Config)
    for part, expected in zip(keys, (False, True), strict=True):
        assert [key for key in part if key in {row.key for row in rows}] == [
            row.key for row in rows if row.advanced is expected
        ]
    example = re.search(rf"shoestring run {name}.*", shown)
    used = re.findall(r"(\w+)=", example[0] if example else "")
    assert (used or name == "demo") and set(used) <= set(keys[0])
    assert len(keys[0]) <= 30  # with the header: a screen of them


def test_training_shows_steps_before_reducers(cli: Cli) -> None:
    shown = cli("recipes", "train/dense").out
    first = shown[shown.index("\nSettings") : shown.index("\nAdvanced settings")]
    for key in ("data", "size", "steps", "batch", "context", "lr", "save_every", "run", "resume"):
        assert f"\n  {key} " in first
    for key in ("reducer", "rollback", "levels.peer", "mesh.dp"):
        assert f"\n  {key} " not in first and f"\n  {key} " in shown


def test_generate_streams_the_engines_text(cli: Cli, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shoestring.serve import Engine, Sampling

    sampling = Sampling(temperature=1.0, top_k=20, seed=5, max_tokens=12)
    loaded = load_model(model_folder)
    expected = Engine(loaded.model, loaded.tokenizer).generate(["the quick"], sampling)[0].text
    options = ["--temperature", 1.0, "--top-k", 20, "--seed", 5, "--max-tokens", 12]
    assert cli("generate", model_folder, "the quick", *options) == Result(0, f"the quick{expected}\n", "")
    assert cli("generate", model_folder, "the quick", *options[:5], 6, *options[6:]).out != f"the quick{expected}\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("the quick"))
    shown = cli("generate", model_folder, "-", *options, "--stats").out
    assert shown.startswith(f"the quick{expected}\n")
    assert "12 new tokens" in shown or "end" in shown
    drafted = cli("generate", model_folder, "the quick", *options, "--drafter", model_folder, "--stats").out
    assert drafted.startswith(f"the quick{expected}\n")  # guessing ahead never changes the text
    # Whether it pays is told by the clock, which a busy machine upsets.
    assert "drafted tokens accepted" in drafted or "[nothing was drafted: " in drafted
    nothing = cli("generate", model_folder, "the quick", "--max-tokens", 1, "--drafter", "ngram", "--stats").out
    assert "[nothing was drafted: " in nothing


def test_penalties_are_the_engines(cli: Cli, model_folder: Path) -> None:
    from shoestring.serve import Engine

    loaded = load_model(model_folder)
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    prompt = tokenizer.encode("the quick")
    engine = Engine(loaded.model, tokenizer, verify=VerifyWithRules(verify))
    plain = None
    for options, rules in (
        ((), LogitRules()),
        (("--repetition-penalty", 1.5), LogitRules(repetition=1.5)),
        (("--presence-penalty", 2), LogitRules(presence=2.0)),
        (("--frequency-penalty", -1), LogitRules(frequency=-1.0)),
        (("--frequency-penalty", 1, "--presence-penalty", 0.5), LogitRules(frequency=1.0, presence=0.5)),
    ):
        sampling = SamplingWithRules(0.7, seed=3, max_tokens=24, rules=rules, history=TokenHistory(tuple(prompt)))
        expected = engine.generate([prompt], sampling)[0].text
        argv = ("generate", model_folder, "the quick", "--temperature", 0.7, "--seed", 3, "--max-tokens", 24)
        assert cli(*argv, *options) == Result(0, f"the quick{expected}\n", "")
        assert expected != plain
        plain = plain or expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 100.5),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3.0),
    ],
)
def test_a_penalty_out_of_range_is_told_as_the_server_does(
    cli: Cli, model_folder: Path, name: str, value: float
) -> None:
    with pytest.raises(ApiError) as refused:
        CompletionBody.parse({"prompt": "the", name: value})
    assert f"{name}={value} is not allowed; it must be " in str(refused.value)
    option = "--" + name.replace("_", "-")
    for argv in (("generate", model_folder, "the"), ("chat", model_folder)):
        assert_one_line_error(cli(*argv, option, value), str(refused.value))


def test_a_run_that_has_no_validation_text_needs_none(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows a short training can be done; who asks for such a corpus is told what else there is."""
    monkeypatch.setattr(model_row, "corpus_of_run", lambda path: ("texts", None))
    monkeypatch.setattr(model_row, "validation_split", lambda *_: torch.zeros(1, dtype=torch.int64))
    loaded = load_model(model_folder)
    assert model_row.text_tokens(loaded, str(model_folder)) == (None, "")
    with pytest.raises(UserError, match=r"no document in its validation split.*text=FILE.*--text FILE"):
        model_row.text_tokens(loaded, str(model_folder), data="texts")


def test_an_empty_path_is_called_that(cli: Cli, model_folder: Path) -> None:
    for argv in (["generate", "", "x"], ["generate", model_folder, "x", "--drafter", ""]):
        assert_one_line_error(cli(*argv), "the path of a model is empty")


def test_a_recipe_that_is_terminated_is_interrupted(cli: Cli, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.py"
    recipe.write_text(
        "import os, signal\nfrom dataclasses import dataclass\nfrom shoestring.errors import Interrupted\n\n\n"
        "@dataclass(frozen=True)\nclass Config:\n    steps: int = 1\n\n\ndef main(config):\n    try:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n        signal.pause()\n"
        "    except KeyboardInterrupt:\n        raise Interrupted('saved, go on with resume=') from None\n"
    )
    before = signal.getsignal(signal.SIGTERM)
    result = cli("run", recipe)
    assert (result.code, result.err) == (2, "saved, go on with resume=\n")
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture
def chat_folder(model_folder: Path, tmp_path: Path) -> Path:
    """The tiny model with a chat template."""
    loaded = load_model(model_folder)
    assert loaded.tokenizer is not None
    loaded.tokenizer.chat_template = TEMPLATE
    return save_model(tmp_path / "chat", loaded.model, loaded.tokenizer)


def test_chat_reads_lines_from_a_pipe(cli: Cli, chat_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\nbox\n"))
    result = cli("chat", chat_folder, "--max-tokens", 4)
    assert result.code == 0
    assert [line for line in result.out.splitlines() if line.startswith("> ")] == ["> hello", "> box"]


def test_an_empty_prompt_begins_a_new_text(cli: Cli, model_folder: Path) -> None:
    loaded = load_model(model_folder)
    assert loaded.tokenizer is not None and loaded.tokenizer.encode("") == [] and loaded.tokenizer.beginning
    answer = Engine(loaded.model, loaded.tokenizer).generate([loaded.tokenizer.beginning], Sampling(max_tokens=6))
    assert cli("generate", model_folder, "", "--max-tokens", 6).out.strip() == answer[0].text.strip()


@pytest.mark.parametrize("command", [("generate", "the"), ("chat",), ("serve",)], ids=lambda words: words[0])
def test_a_drafter_that_is_not_there_is_told_before_the_model_is_loaded(
    command: tuple[str, ...], cli: Cli, chat_folder: Path
) -> None:
    (chat_folder / "model.safetensors").write_bytes(b"nothing that could be loaded")
    name, *words = command
    for drafter in ("nowhere", "ngram+nowhere", "./nowhere/else"):
        told = cli(name, chat_folder, *words, "--drafter", drafter)
        assert_one_line_error(told, f"no drafter {drafter.removeprefix('ngram+')}")


def test_a_drafter_does_not_change_a_chat(cli: Cli, chat_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(*options: object) -> Result:
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nbox\n"))
        return cli("chat", chat_folder, "--max-tokens", 9, *options)

    plain = answers()
    for drafter in ("ngram", chat_folder, f"ngram+{chat_folder}"):
        assert answers("--drafter", drafter) == plain
    shown = answers("--drafter", "ngram", "--stats").out
    assert shown.count("drafted tokens accepted") + shown.count("[nothing was drafted: ") == 2  # for each answer
    assert_one_line_error(answers("--drafter", "ngrm"), "no drafter ngrm", "Did you mean 'ngram'?")
    assert_one_line_error(answers("--drafter", ""), "the path of a model is empty")


def test_what_drafts_gained_is_told_of_each_answer(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from shoestring.serve import DraftModel, Engine

    loaded = load_model(model_folder)
    drafter = DraftModel(load_model(model_folder).model)
    engine = Engine(loaded.model, loaded.tokenizer, max_requests=1, drafter=drafter, num_drafts=3)
    for _ in range(2):
        stream_text(engine, [5, 6, 7], SamplingWithRules(max_tokens=13, ignore_eos=True), stats=True)
        # The first step reads the prompt, before which nothing is drafted; then three drafts and one token a step.
        assert "[9 of 9 drafted tokens accepted (100%), 4 steps, 3.25 tokens per step]" in capsys.readouterr().out


def test_penalties_of_a_chat_look_at_one_answer(
    cli: Cli, chat_folder: Path, model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written in the answer before is part of the prompt now, and is not counted twice."""
    engine = open_engine(load_model(model_folder), 64)
    sampling = SamplingWithRules(max_tokens=12, ignore_eos=True, rules=LogitRules(presence=2.0, frequency=2.0))
    texts = [stream_text(engine, [5, 6, 7], sampling, stats=False) for _ in range(2)]
    assert texts[0] == texts[1] and len(set(texts[0])) > 2
    capsys.readouterr()

    def answer(*options: object) -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
        result = cli("chat", chat_folder, "--max-tokens", 12, *options)
        assert result.code == 0, result
        return result.out.removeprefix("> hello\n")

    plain = answer()
    assert len(plain) == 13 and answer("--repetition-penalty", 3) != plain
    assert answer("--stop", plain[0]) == "\n"  # the text ends before it


def test_a_chat_forgets_its_oldest_messages(cli: Cli, chat_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n" * 9 + "the lazy dog " * 60 + "\nbox\n"))
    result = cli("chat", chat_folder, "--max-tokens", 4)
    assert result.code == 0 and "the chat has room for 64" in result.err
    assert sum(line.startswith("> ") for line in result.out.splitlines()) == 11

    def encode(messages: list[dict[str, str]]) -> list[int]:
        return [0] * (10 * len(messages))

    talk = [{"role": role, "content": ""} for role in ("system", *("user", "assistant") * 3, "user")]
    asked = talk[-1]
    assert chat_prompt(talk, encode, 60, 100) == [0] * 40  # a quarter of the room is for the answer
    assert [m["role"] for m in talk] == ["system", "user", "assistant", "user"] and talk[-1] is asked
    assert chat_prompt(talk, encode, 20, 1) is None and talk == [{"role": "system", "content": ""}]


def test_chat_begins_once(cli: Cli, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The template writes the BOS, and the tokenizer would add one to a text."""
    loaded = load_model(model_folder)
    tokenizer = loaded.tokenizer
    assert tokenizer is not None and tokenizer.bos_id is not None
    bos = tokenizer.backend.id_to_token(tokenizer.bos_id)
    tokenizer.chat_template = f"{bos}{TEMPLATE}"
    tokenizer.backend.post_processor = TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.bos_id)]
    )
    assert tokenizer.encode("hello")[0] == tokenizer.bos_id
    folder = save_model(tmp_path / "chat", loaded.model, tokenizer)
    asked: list[list[int]] = []
    monkeypatch.setattr("shoestring.cli.text_verbs.stream_text", lambda _, ids, *rest, **more: asked.append(ids) or "")
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert cli("chat", folder, "--max-tokens", 1).code == 0
    assert asked[0].count(tokenizer.bos_id) == 1 and asked[0][0] == tokenizer.bos_id


def test_chat_with_a_broken_template_does_not_wait_for_a_message(
    cli: Cli, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(model_folder)
    assert loaded.tokenizer is not None
    loaded.tokenizer.chat_template = "{{ bos_token }}\n{% for m in %}"
    folder = save_model(tmp_path / "chat", loaded.model, loaded.tokenizer)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    result = cli("chat", folder)
    assert_one_line_error(result, f"the chat template of {folder} is broken, line 2: Expected an expression")
    assert result.out == ""
    (folder / "chat_template.jinja").write_bytes(b"caf\xe9")
    assert_one_line_error(cli("chat", folder), f"{folder}/chat_template.jinja is not UTF-8 text")


def test_eval_reports_what_the_evals_compute(cli: Cli, model_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    task = tmp_path / "cloze.jsonl"
    task.write_text(json.dumps({"context": "the quick brown", "continuation": " fox"}) + "\n")
    argv = ["--text", text, "--context", 32, "--stride", 16, "--max-tokens", 200, "--tasks", task, "--speed"]
    shown = cli("eval", model_folder, *argv)
    assert shown.code == 0, shown.err
    loaded = load_model(model_folder)
    assert loaded.tokenizer is not None
    tokens = torch.tensor(loaded.tokenizer.encode(TEXT))
    value = perplexity(loaded.model, tokens, context=32, stride=16, max_tokens=200).value
    assert f"{value:.4g}" in shown.out
    for needle in ("text.txt", "cloze", "accuracy", "decode tokens/s", "dense"):
        assert needle in shown.out
    assert not (model_folder / "evals.jsonl").exists()  # a model folder is not ours to write to
    without = cli("eval", model_folder, "--text", text)  # a context: all of the 64 positions
    assert f"{perplexity(loaded.model, tokens, context=64).value:.4g}" in without.out


def test_results_that_cannot_be_kept_are_shown(cli: Cli, model_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(model_folder, run / "model")
    (run / "config.json").write_text('{"recipe": "train/dense", "config": {}}')
    (run / "metrics.jsonl").touch()
    (run / "evals.jsonl").symlink_to("/dev/full")
    (tmp_path / "text.txt").write_text(TEXT)
    result = cli("eval", run, "--text", tmp_path / "text.txt", "--max-tokens", 100)
    assert result.code == 2 and result.err == (
        f"error: No space left on device ({run / 'evals.jsonl'}); free some space or choose another place\n"
    )
    assert "perplexity" in result.out and "text.txt" in result.out


def test_a_run_that_cannot_be_written_to_is_evaluated(model_folder: Path, tmp_path: Path) -> None:
    """On a mount that is read-only, in a namespace of the command's own."""
    run = tmp_path / "run"
    shutil.copytree(model_folder, run / "model")
    (run / "config.json").write_text('{"recipe": "train/dense", "config": {}}')
    (run / "metrics.jsonl").touch()
    (tmp_path / "text.txt").write_text(TEXT)
    asked = [sys.executable, "-m", "shoestring", "eval", str(run), "--text", str(tmp_path / "text.txt")]
    mount = f'mount --bind {run} {run} && mount -o remount,ro,bind {run} && exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh", *asked]
    if subprocess.run([*command[:7], mount.replace('exec "$@"', "true")], capture_output=True).returncode:
        command = asked  # no namespaces here: a folder without the right to write says the same to a user, not to root
        run.chmod(0o555)
    done = subprocess.run([*command, "--max-tokens", "100"], capture_output=True, text=True)
    run.chmod(0o755)
    assert done.returncode == 0 and "perplexity" in done.stdout, done.stderr
    if os.geteuid() or command is not asked:
        assert f"nothing was kept: cannot write {run / 'evals.jsonl'}: " in done.stderr
        assert not (run / "evals.jsonl").exists()


def test_progress_ends_at_its_total(
    cli: Cli, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOESTRING_CACHE", str(tmp_path / "cache"))
    Path("some.txt").write_text(TEXT)
    rows = [{"text": f"{i} {TEXT[:300]}"} for i in range(30)] + [{"text": " "}] * 9
    Path("some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    of = f"model={model_folder}"
    eval_text = ("text=some.txt", "max_tokens=200")
    calib = ("calib=some.jsonl", "calib_windows=2", "calib_context=16")
    skips = ("run", "shrink/skip_set", of, "context=32", *calib, *eval_text)
    train = ("data=some.jsonl", "vocab_size=280", "steps=3", "batch=2", "context=16", "eval_every=0", "device=cpu")
    bars = {
        ("eval", model_folder, "--text", "some.txt", "--context", 16): {"perplexity"},
        ("eval", model_folder, "--text", "some.txt", "--context", 16, "--stride", 8): {"perplexity"},
        (*skips, "method=measured", "run=1"): {"tokenise", "measured: trials", "perplexity"},
        (*skips, "method=adaskip", "run=2"): {"perplexity"},  # there are no trials, and the text is tokenised
        ("run", "shrink/ptq", of, "method=rtn", "format=int4:g32", *eval_text, "run=3"): {"perplexity"},
        ("run", "shrink/ptq", of, "method=gptq", "format=int4:g32", *calib, *eval_text, "run=4"): {
            *("tokenise", "gptq by block", "perplexity")
        },
        ("run", "shrink/prune24", of, "method=magnitude", "train=none", *eval_text, "run=5"): {"perplexity"},
        ("run", "train/dense", *train, "run=6"): {"tokenizer", "tokenise", "train", "perplexity"},
    }
    for argv, expected in bars.items():
        shown = cli(*argv)
        assert shown.code == 0, shown
        found = re.findall(r"^(.+?): (\d+)/(\d+) in \d+s", shown.out, re.MULTILINE)
        assert {name for name, _, _ in found} == expected, shown.out
        assert all(done == total != "0" for _, done, total in found), found


def test_inspect_shows_formats_per_layer(cli: Cli, model_folder: Path, packed_folder: Path) -> None:
    dense, packed = cli("inspect", model_folder).out, cli("inspect", packed_folder).out
    assert "model.layers.*.mlp.up_proj.weight" in dense and "f32" in dense
    assert "nf3" in packed and "int4" in packed
    row = next(line for line in packed.splitlines() if "layers.0.self_attn.q_proj.weight" in line)
    assert "int4" in row and "64 x 64" in row
    row = next(line for line in packed.splitlines() if "layers.1.self_attn.q_proj.weight" in line)
    assert "f32" in row and " 32." in row


def test_inspect_of_one_safetensors_file(cli: Cli, model_folder: Path, tmp_path: Path) -> None:
    shown = cli("inspect", model_folder / "model.safetensors", "--verify")
    assert shown.code == 0 and "1 fit" in shown.out and f"A part of {model_folder}" in shown.out, shown
    spec = load_model(model_folder).spec
    row = next(line for line in shown.out.splitlines() if "layers.*.mlp.up_proj.weight" in line)
    assert row.split() == ["model.layers.*.mlp.up_proj.weight", "2", "128", "x", "64", "f32", "32", "0.065536"]
    num = sum(t.numel() for t in load_file(model_folder / "model.safetensors").values())
    assert f"parameters           {num:,}" in shown.out and spec.num_layers == 2
    file = tmp_path / "any.safetensors"
    tensors = {"w.0": torch.ones(3, 5, dtype=torch.bfloat16), "w.1": torch.ones(3, 5, dtype=torch.bfloat16)}
    tensors |= {"codes": torch.arange(7, dtype=torch.uint8), "phase": torch.ones(2, dtype=torch.complex64)}
    save_file(tensors, file, metadata={"made by": "hand\n" * 400})
    shown = cli("inspect", file, "--layers", "--verify")
    assert shown.code == 0 and "0 fit, 1 weight file has none" in shown.out and "A part of" not in shown.out, shown
    assert "metadata 'made by'" in shown.out and "hand\\nhand" in shown.out
    rows = [line.split() for line in shown.out.splitlines()]
    assert ["w.0", "3", "x", "5", "bf16", "16", "3e-05"] in rows and ["codes", "7", "u8", "8", "7e-06"] in rows
    (tmp_path / "manifest.json").write_text('{"name": "a page"}')  # not a checkpoint's
    assert "0 fit, 1 weight file has none" in cli("inspect", file, "--verify").out
    for name, at, value in (("w.1", (2, 4), torch.inf), ("phase", 1, complex(0, torch.nan))):
        broken = {k: t.clone() for k, t in tensors.items()}
        broken[name][at] = value
        save_file(broken, file)
        assert_one_line_error(cli("inspect", file, "--verify"), f"tensor '{name}' holds NaN or infinite values (1 of")


def test_a_safetensors_file_in_types_that_torch_cannot_compute_with(cli: Cli, tmp_path: Path) -> None:
    for kind, num_bytes in (("F4", 16), ("F6_E2M3", 24)):
        header = json.dumps({"w": {"dtype": kind, "shape": [4, 8], "data_offsets": [0, num_bytes]}}).encode()
        file = tmp_path / f"{kind}.safetensors"
        file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(num_bytes))
        shown = cli("inspect", file, "--verify")
        assert shown.code == 0, shown
        bits = 8 * num_bytes // 32
        row = ["w", "1", "4", "x", "8", kind.lower(), str(bits)]
        assert row == next(line.split() for line in shown.out.splitlines() if f" {kind.lower()} " in line)[:7]


def test_inspect_of_files_that_hold_no_weights(cli: Cli, model_folder: Path, tmp_path: Path) -> None:
    good = (model_folder / "model.safetensors").read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    for data, said in (
        (good[:-1], "is truncated or corrupt"),
        (good[:30], "is truncated or corrupt"),
        (b"", "is truncated or corrupt"),
        (b"<!DOCTYPE html><title>404</title>", "is truncated or corrupt"),
        (pointer, "is a Git LFS pointer, not the weights; run `git lfs pull`"),
    ):
        file = tmp_path / "m.safetensors"
        file.write_bytes(data)
        for options in ((), ("--layers",), ("--verify",)):
            result = cli("inspect", file, *options)
            assert_one_line_error(result, f"{file} {said}")
            assert result.out == ""
    changed = tmp_path / "changed"
    shutil.copytree(model_folder, changed)
    (changed / "model.safetensors").write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert_one_line_error(cli("inspect", changed / "model.safetensors", "--verify"), "its checksum does not fit")
    for name in ("m.bin", "m.pt", "m.pth", "m.ckpt", "m.pkl"):
        (tmp_path / name).write_bytes(pickle.dumps(Trap()))
        assert_one_line_error(cli("inspect", tmp_path / name), "is a pickle", "never read", "convert it to safetensors")
    assert_one_line_error(cli("inspect", model_folder / "model.safetensors", "--against", model_folder), "is a file")


def test_inspect_says_in_words_that_there_is_nothing(cli: Cli, tmp_path: Path) -> None:
    save_file({}, tmp_path / "empty.safetensors")
    for options in ((), ("--layers",)):
        shown = cli("inspect", tmp_path / "empty.safetensors", *options).out
        assert "Weights: none, no tensors are stored here\n" in shown and "bits per weight" not in shown
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    shown = cli("inspect", tmp_path / "run", "--verify").out
    assert "Config: none\n" in shown
    assert f"Verified: nothing, {tmp_path / 'run'} holds no model or checkpoint\n" in shown


def test_inspect_of_a_part_of_a_checkpoint(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOESTRING_CACHE", str(tmp_path / "cache"))
    Path("some.txt").write_text(TEXT * 3)
    sizes = ("vocab_size=280", "steps=1", "batch=2", "context=16", "eval_every=0", "d_model=32")
    assert cli("run", "train/dense", "data=some.txt", *sizes, "device=cpu", "run=r").code == 0
    part = Path("r/checkpoints/step-00000001/part-00000.safetensors")
    shown = cli("inspect", part, "--verify")
    assert shown.code == 0 and "1 fit" in shown.out and f"A part of {part.parent}" in shown.out, shown
    data = part.read_bytes()
    part.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert_one_line_error(cli("inspect", part, "--verify"), f"{part} is not what was written")


class Trap:
    """A pickle that ends whoever opens it."""

    def __reduce__(self) -> tuple[Callable[[int], None], tuple[int]]:
        return os._exit, (99,)


def test_inspect_against_the_source_shows_each_layers_error(
    cli: Cli, model_folder: Path, packed_folder: Path, tmp_path: Path
) -> None:
    shown = cli("inspect", packed_folder, "--against", model_folder)
    assert shown.code == 0, shown.err
    rows = shown.out[shown.out.index("against") :].splitlines()

    def error(layer: str) -> float:
        return float(next(line for line in rows if layer in line).split()[-1])

    ours, source = load_model(packed_folder).model, load_model(model_folder).model
    got = ours.get_submodule("blocks.0.attn.q").effective_weight(torch.float32)  # type: ignore[operator]
    want = source.get_submodule("blocks.0.attn.q").weight
    expected = float((got - want).norm() / want.norm())  # type: ignore[operator]
    assert error("layers.0.self_attn.q_proj") == pytest.approx(expected, rel=1e-2)
    assert error("layers.1.self_attn.q_proj") == 0  # left dense
    assert error("layers.0.mlp.up_proj") > error("layers.0.self_attn.q_proj") > 0.01  # 3 bits, then 4
    row = next(line for line in rows if "layers.0.self_attn.q_proj" in line)
    assert "int4:g64" in row and "4.38" in row
    other = load_model(model_folder)
    torch.manual_seed(0)
    deeper = Decoder(replace(other.spec, num_layers=other.spec.num_layers + 1))
    save_model(tmp_path / "other", deeper)
    assert_one_line_error(cli("inspect", tmp_path / "other", "--against", model_folder), "has no layer")


def test_export_as_compressed_tensors_and_its_refusals(
    cli: Cli, model_folder: Path, packed_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert_one_line_error(
        cli("export", packed_folder, out, "--as", "onnx"), "dense, compressed-tensors, fp8, packed, gguf"
    )
    assert_one_line_error(cli("export", packed_folder, out, "--as", "gptq"), "still read", "--as compressed-tensors")
    assert_one_line_error(cli("export", packed_folder, out, "--as", "compressed-tensors"), "nf3", "--as packed")
    assert_one_line_error(cli("export", model_folder, out, "--as", "compressed-tensors"), "shoestring quantize")
    assert not out.exists()
    loaded = load_model(model_folder)
    convert(loaded.model, [("*", parse_format("int8:sym:g32"))])
    pack(loaded.model)
    save_model(tmp_path / "int8", loaded.model, loaded.tokenizer)
    shown = cli("export", tmp_path / "int8", out, "--as", "compressed-tensors", "--dtype", "fp32")
    assert shown.code == 0 and "vLLM" in shown.out, shown.err
    ids = torch.arange(1, 41)[None]
    with torch.no_grad():
        assert torch.equal(load_model(out).model(ids), loaded.model(ids))
    assert "int8:sym:g32" in cli("inspect", out).out


def test_int8_activations_on_the_command_line(cli: Cli, packed_folder: Path, model_folder: Path) -> None:
    argv = ["the", "--max-tokens", "4", "--device", "cpu"]
    assert cli("generate", packed_folder, *argv, "--int8-activations").code == 0
    wrong = cli("generate", packed_folder, *argv, "--int8-activations", "--dtype", "bf16")
    assert_one_line_error(wrong, "8-bit activations are for models on a CPU in float32")
    assert_one_line_error(cli("generate", model_folder, *argv, "--int8-activations"), "packed integer layers")


def test_a_terminal_is_told_of_the_faster_way(
    cli: Cli, packed_folder: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["the", "--max-tokens", "2", "--device", "cpu"]
    assert "hint" not in cli("generate", packed_folder, *argv).err  # no terminal
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("shoestring.formats.int8_activations.unusable", lambda: None)
    for is_arm, compiler in ((True, None), (False, "g++"), (False, None)):
        monkeypatch.setattr("shoestring.formats.int8_activations.has_arm_kernels", lambda is_arm=is_arm: is_arm)
        monkeypatch.setattr("shoestring.formats.int8_activations.find_compiler", lambda found=compiler: found)
        hint = "hint: --int8-activations"
        assert (hint in cli("generate", packed_folder, *argv).err) is (compiler is not None)
        assert hint not in cli("generate", packed_folder, *argv, "--dtype", "bf16").err
        assert hint not in cli("generate", model_folder, *argv).err
    monkeypatch.setattr("shoestring.formats.int8_activations.has_arm_kernels", lambda: True)
    assert "hint" not in cli("generate", packed_folder, *argv, "--int8-activations").err


def test_export_gives_transformers_the_same_logits(cli: Cli, packed_folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "hf"
    assert cli("export", packed_folder, out, "--dtype", "fp32").code == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    ids = torch.arange(1, 41)[None]
    ours = load_model(packed_folder).model
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-5, atol=1e-5)
    again = load_model(out)
    assert replace(again.spec, eos_id=None) == replace(ours.spec, eos_id=None)


def test_a_model_of_nan_is_one_line(
    cli: Cli, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(model_folder)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.fill_(torch.nan)
    loaded.tokenizer.chat_template = TEMPLATE  # type: ignore[union-attr]
    broken = save_model(tmp_path / "broken", loaded.model, loaded.tokenizer)
    text, task = tmp_path / "text.txt", tmp_path / "task.jsonl"
    text.write_text(TEXT[:200])
    task.write_text(json.dumps({"query": "the", "choices": [" fox", " dog"], "gold": 0}) + "\n")
    assert_one_line_error(cli("generate", broken, "the quick"), "logits are not finite", "weights are damaged")
    assert_one_line_error(cli("eval", broken, "--text", text), "log-probabilities are NaN")
    assert_one_line_error(cli("eval", broken, "--tasks", task), "log-probabilities are NaN")
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert_one_line_error(cli("chat", broken), "logits are not finite")


@pytest.mark.parametrize(("pid", "code"), [(1, 143), (7, -signal.SIGTERM)])
def test_sigterm_ends_process_1_which_has_no_default_action(pid: int, code: int) -> None:
    """A test cannot be process 1, but the handler that process 1 needs can be seen by the exit code."""
    program = f"""
import os, signal, time
from shoestring.cli.terminal import obey_sigterm_as_first_process
obey_sigterm_as_first_process({pid})
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(30)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == code


@pytest.mark.usefixtures("warm_python")
def test_ctrl_c_ends_a_server_that_starts(model_folder: Path) -> None:
    """Also where a library swallows the KeyboardInterrupt, as some do while they are imported."""
    program = f"""
import os, signal, time
import shoestring.serve.http.server as server
from shoestring.cli.app import run_cli

signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run in the background of a script

def load(*given, **options):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)
    except BaseException:
        print("swallowed")

server.main = load
run_cli(["serve", {str(model_folder)!r}, "--port", "0"])
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize(
    "verb",
    [
        "generate {model} the",
        "chat {model}",
        "eval {model} --speed",
        "inspect {model} --verify",
        "export {model} out",
        "push {model} org/name --dry-run",
        "bench serve {model}",
        "run shrink/rtn model={model}",
    ],
)
def test_ctrl_c_ends_a_command_that_imports(model_folder: Path, tmp_path: Path, verb: str) -> None:
    program = f"""
import os, signal, sys, time
from shoestring.cli.app import run_cli

signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run in the background of a script

class Swallows:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(30)
            except BaseException:
                print("swallowed", flush=True)

sys.meta_path.insert(0, Swallows())
run_cli({verb.format(model=model_folder).split()!r})
"""
    argv = [sys.executable, "-c", program]
    done = subprocess.run(argv, timeout=60, capture_output=True, text=True, cwd=tmp_path, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_letters_that_the_terminal_does_not_have(model_folder: Path) -> None:
    argv = [sys.executable, "-m", "shoestring", "generate", str(model_folder), "caf\u00e9 \u65e5", "--max-tokens", "1"]
    given = {**os.environ, "PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "1"}  # arguments are UTF-8, the output is not
    done = subprocess.run(argv, capture_output=True, env=given, timeout=300)
    assert done.returncode == 0 and done.stdout.startswith(b"caf\xe9 ?"), done


REDIRECTED = {
    "> /dev/full": (2, "error: No space left on device; free some space or choose another place\n"),
    ">&-": (0, ""),
    ">&- 2>&- <&-": (0, ""),
    "": (141, ""),
}
GENERATE = "generate {model} the --max-tokens 2"
TRIED = [("--version", "> /dev/full"), *(("inspect {model}", to) for to in REDIRECTED), (GENERATE, "")]
CAMPAIGN = [("--version", to) for to in (">&-", ">&- 2>&- <&-", "")] + [(GENERATE, to) for to in list(REDIRECTED)[:3]]


@pytest.mark.parametrize(
    ("verb", "redirected"), [*TRIED, *(pytest.param(*case, marks=pytest.mark.lab) for case in CAMPAIGN)]
)
def test_output_that_cannot_be_written(model_folder: Path, verb: str, redirected: str) -> None:
    """By Python, which holds it back until a command ends, as it does outside of tests."""
    code, said = REDIRECTED[redirected]
    reader, writer = os.pipe()
    os.close(reader)  # where it is not redirected, nobody reads it
    line = f"exec {sys.executable} -m shoestring {verb.format(model=model_folder)} {redirected}"
    given = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        ["bash", "-c", line], env=given, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=300
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (code, said)


@pytest.mark.parametrize("background", [False, True])  # where Ctrl-C is ignored
def test_a_run_whose_output_nobody_reads_is_stopped_as_by_ctrl_c(tmp_path: Path, background: bool) -> None:
    body = """
from pathlib import Path
from shoestring.runlog import RunLog, resumable

def main(config):
    with resumable("mine", Path("folder")):
        RunLog().say("step 1")
        raise AssertionError("went on")
"""
    recipe = write_recipe(tmp_path / "case.py", body)
    reader, writer = os.pipe()
    os.close(reader)
    argv = [sys.executable, "-m", "shoestring", "run", str(recipe)]
    action = signal.SIG_IGN if background else signal.default_int_handler
    before = signal.signal(signal.SIGINT, action)  # only what is ignored is inherited
    try:
        done = subprocess.run(argv, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=300)
    finally:
        signal.signal(signal.SIGINT, before)
    os.close(writer)
    said = "stopped; continue with `shoestring run mine resume=folder`\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_a_connection_that_breaks_is_not_taken_for_a_reader_that_left(cli: Cli, tmp_path: Path) -> None:
    body = "def main(config):\n    raise BrokenPipeError(32, 'oops')\n"
    result = cli("run", write_recipe(tmp_path / "case.py", body))
    assert result.code == 1 and "BrokenPipeError: [Errno 32] oops" in result.err and "this is a bug" in result.err
