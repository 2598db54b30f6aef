"""A server that follows a training run: versions are shown, no text is lost or mixed, errors leave it as it is."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import running, wait_for

from shoestring.errors import UserError
from shoestring.mesh import open_mesh
from shoestring.model import Decoder
from shoestring.runlog import RunLog
from shoestring.serve import Engine, Sampling
from shoestring.serve.engine.embedding import embedding_parts
from shoestring.serve.engine.logit_rules import SamplingWithRules
from shoestring.serve.engine.weight_update import WeightTarget
from shoestring.serve.http.engine_messages import EmbeddingJob, PendingChoice, Report
from shoestring.serve.http.engine_thread import EngineThread, WeightUpdate
from shoestring.serve.http.metrics import Metrics
from shoestring.serve.http.server import ServeOptions, _draft_target
from shoestring.serve.speculative import drafter_stack
from shoestring.serve.speculative.draft_model import DraftModel
from shoestring.serve.speculative.ngram_drafter import NgramDrafter
from shoestring.state.reshard.version import WeightsVersion
from shoestring.train.publish import Publish
from shoestring.train.step import Run
from tiny import chat_tokenizer, served_model

VOCAB = chat_tokenizer().vocab_size
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
PROMPT = "the quick brown fox jumps over the lazy dog " * 3


def weights_of(step: int) -> Decoder:
    """What the run has learned after `step` steps."""
    model = served_model(VOCAB)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(step + len(name))))
    return model


NEW = WeightsVersion("run", 1, "aa")


def update_of(model: Decoder, not_after: float = math.inf) -> WeightUpdate:
    """To the weights of step 1."""
    target = WeightTarget(model)
    values = target.prepare({name: {"": p.detach().clone()} for name, p in weights_of(1).named_parameters()})
    return WeightUpdate(target, values, NEW, not_after)


def run_until(thread: EngineThread, happened: Callable[[], bool]) -> None:
    thread.start()
    try:
        wait_for(happened)
    finally:
        thread.stop()


def versions_of(*choices: PendingChoice) -> list[list[WeightsVersion | None]]:
    return [[version for version, _ in choice.request.versions] for choice in choices if choice.request]


class Trainer:
    def __init__(self, tmp_path: Path, address: str = "127.0.0.1:0") -> None:
        self.model = served_model(VOCAB)
        mesh = open_mesh(device="cpu")
        self.hook = Publish(self.model, mesh, address, 1)
        self.naming = self.hook.named("run-a")
        self.naming.__enter__()
        self.run = Run(self.model, torch.optim.SGD(self.model.parameters()), mesh, RunLog(tmp_path / "run"))

    def go_back(self, step: int) -> None:
        """As rollback=auto does, up to the next gradient."""
        self.model.load_state_dict(weights_of(step).state_dict())
        self.run.step = step
        self.hook.before_step(self.run)

    def publish(self, step: int) -> None:
        self.model.load_state_dict(weights_of(step).state_dict())
        self.run.step = step
        self.hook.after_step(self.run)
        self.hook.wait()

    @property
    def address(self) -> str:
        return "{}:{}".format(*self.hook.server.address)


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    made = Trainer(tmp_path)
    yield made
    made.hook.server.close()


def get(service: Any, path: str) -> Any:
    with urllib.request.urlopen(service.url + path, timeout=60) as answer:
        body = answer.read().decode()
    return body if path == "/metrics" else json.loads(body)


def complete(service: Any, num: int, prompt: str = PROMPT) -> Any:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": num, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        service.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())["choices"][0]


def expected(step: int, num: int, prompt: str = PROMPT) -> str:
    engine = Engine(weights_of(step), chat_tokenizer(), eos_ids=())
    return engine.generate([prompt], Sampling(max_tokens=num))[0].text


def step_of(service: Any) -> int:
    return get(service, "/v1/models")["data"][0].get("weights", {}).get("step", -1)


def test_versions_are_taken_over_and_shown(trainer: Trainer, caplog: pytest.LogCaptureFixture) -> None:
    with running(follow=trainer.address) as service:
        assert step_of(service) == -1 and "weights" not in complete(service, 4)
        for step in (1, 2):
            trainer.publish(step)
            wait_for(lambda s=step: step_of(service) == s)
            answer = complete(service, 12)
            assert answer["text"] == expected(step, 12)
            assert [w["first_token"] for w in answer["weights"]] == [0]
            assert answer["weights"][0]["version"].startswith(f"run-a@{step}-")
        assert "shoestring:weights_step{" in (text := get(service, "/metrics")) and "weights_updates_total" in text
        # An older step is refused, and the server goes on.
        trainer.publish(1)
        wait_for(lambda: service.followers[0]._refused is not None)
        assert step_of(service) == 2 and complete(service, 12)["text"] == expected(2, 12)
        # Not so where the run itself has gone back: the weights of step 2 were discarded.
        trainer.publish(2)
        trainer.go_back(1)
        wait_for(lambda: step_of(service) == 1)
        assert complete(service, 12)["text"] == expected(1, 12)
        # A publisher that goes away, and another one in its place.
        trainer.hook.server.close()
        again = Trainer(Path(trainer.run.log.folder).parent / "again", trainer.address)
        again.publish(5)
        wait_for(lambda: step_of(service) == 5)
        again.hook.server.close()
        assert complete(service, 12)["text"] == expected(5, 12)


def test_weights_that_are_not_finite_are_refused_and_counted(
    trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(service: Any) -> float:
        lines = get(service, "/metrics").splitlines()
        return next(float(x.split()[-1]) for x in lines if x.startswith("shoestring:weights_updates_refused_total{"))

    trainer.publish(1)
    with running(follow=trainer.address) as service:
        wait_for(lambda: step_of(service) == 1)
        for step, bad in ((2, math.nan), (3, -math.inf), (4, 1e20)):
            with torch.no_grad():
                trainer.model.load_state_dict(weights_of(step).state_dict())
                next(trainer.model.parameters()).view(-1)[7] = bad
            trainer.run.step = step
            trainer.hook.after_step(trainer.run)
            wait_for(lambda n=step - 1: refused(service) == n)
        assert "run-a@4 is not taken: 'embed.weight' holds NaN, infinite or far too large values" in caplog.text
        assert step_of(service) == 1 and complete(service, 12)["text"] == expected(1, 12)
        trainer.publish(5)  # over the same connection, at once
        wait_for(lambda: step_of(service) == 5)
        assert complete(service, 12)["text"] == expected(5, 12)


@pytest.mark.parametrize("mode", ["drain", "recompute"])
def test_texts_that_run_while_weights_change(trainer: Trainer, mode: str) -> None:
    trainer.publish(1)
    with running(follow=trainer.address, on_update=mode, max_requests=4) as service:
        wait_for(lambda: step_of(service) == 1)
        answers: list[Any] = []
        threads = [threading.Thread(target=lambda: answers.append(complete(service, 90))) for _ in range(6)]
        for thread in threads:
            thread.start()
        wait_for(lambda: service.engine.stats.num_new_tokens > 20)
        trainer.publish(2)
        for thread in threads:
            thread.join(120)
        assert len(answers) == 6 and all(a["finish_reason"] == "length" for a in answers)
        begun = [[w["version"].split("-")[1].split("@")[1] for w in a["weights"]] for a in answers]
        if mode == "drain":  # each text has one version, whole
            assert all(len(steps) == 1 for steps in begun) and ["1"] in begun
            whole = {step: expected(int(step), 90) for (step,) in begun}
            assert all(a["text"] == whole[steps[0]] for a, steps in zip(answers, begun, strict=True))
        else:
            assert ["1", "2"] in begun
        assert step_of(service) == 2


def test_a_draft_model_follows_a_run_of_its_own(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    draft = weights_of(9)
    monkeypatch.setattr(drafter_stack, "open_drafter", lambda *_: DraftModel(draft))
    caplog.set_level("INFO", logger="shoestring.serve")
    trainer.publish(1)
    with running(drafter="a folder", follow_drafter=trainer.address, on_update="drain") as service:
        wait_for(lambda: "weights of the drafter are now run-a@1-" in caplog.text)
        assert step_of(service) == -1  # the served weights are as before
        text = Engine(served_model(VOCAB), chat_tokenizer(), eos_ids=()).generate([PROMPT], Sampling(max_tokens=12))
        assert complete(service, 12)["text"] == text[0].text
    want = weights_of(1).state_dict()
    assert all(torch.equal(t, want[n]) for n, t in draft.state_dict().items())
    with pytest.raises(UserError, match="there are 0"):
        _draft_target(NgramDrafter())


def test_weights_that_come_together_are_all_taken_by_an_idle_engine() -> None:
    """Those of the model and of its draft model, from two threads."""
    draft, new = weights_of(9), weights_of(1)
    engine = Engine(served_model(VOCAB), chat_tokenizer(), drafter=DraftModel(draft), num_drafts=2)
    thread = EngineThread(engine, Metrics("tiny"), max_running=2)
    updates = [update_of(model, not_after=0.0) for model in (draft, engine.model)]
    for update in updates:
        thread._updates.put(update)
        thread.post(("update", None))
    run_until(thread, lambda: all(update.done.is_set() for update in updates))
    assert all(torch.equal(t, new.state_dict()[n]) for n, t in engine.model.state_dict().items())


def test_embeddings_of_one_request_are_of_the_same_weights() -> None:
    old, new, texts = served_model(VOCAB), weights_of(1), [[5] * 9, [6] * 9]
    thread = EngineThread(Engine(served_model(VOCAB), chat_tokenizer(), chunk=9), Metrics("tiny"), max_running=2)
    found: dict[int, torch.Tensor | None] = {}
    thread.on_report = lambda report: found.update((number, part.vectors_ND) for number, part in report.parts)
    thread._updates.put(update_of(thread.engine.model))  # type: ignore[union-attr]
    for number in (1, 2):  # one text of the first client is computed when the weights come
        job = EmbeddingJob(texts, "mean")
        thread.post(("add", [PendingChoice([], SamplingWithRules(), embedding=job, client=f"{number}", id=number)]))
    run_until(thread, lambda: len(found) == 2)
    for number, model in ((1, old), (2, new)):
        want = [vectors for text in texts for vectors in embedding_parts(model, [text], "mean", 9)]
        torch.testing.assert_close(found[number], torch.cat(want))


def test_a_text_that_has_given_way_ends_with_the_weights_it_began_with() -> None:
    engine = Engine(served_model(VOCAB), chat_tokenizer(), max_requests=2, eos_ids=())
    thread, long = EngineThread(engine, Metrics("tiny"), max_running=2), SamplingWithRules(max_tokens=40)
    greedy = [PendingChoice([5], long, client="greedy", id=i) for i in range(2)]
    other, late = (PendingChoice([5], long, client="other", id=i) for i in (2, 3))
    ended, paused = set[int](), list[int]()

    def follow(report: Report) -> None:  # on the engine's thread, between two turns
        ended.update(report.ended)
        lengths = [0 if c.request is None else len(c.request.new_tokens) for c in (greedy[0], other)]
        if lengths == [5, 0]:
            thread.post(("add", [other]))
        elif lengths[1] == 5:
            paused.extend(choice.id for choice in thread._line)
            thread._updates.put(update_of(engine.model))
            thread.post(("add", [late]))

    thread.on_report = follow
    thread.post(("add", greedy))
    run_until(thread, lambda: len(ended) == 4)
    assert paused == [1]
    assert versions_of(*greedy, other, late) == [[None], [None], [None], [NEW]]


def test_a_text_is_written_with_the_weights_that_scored_its_prompt() -> None:
    engine = Engine(served_model(VOCAB), chat_tokenizer(), max_requests=1, eos_ids=())
    thread, long = EngineThread(engine, Metrics("tiny"), max_running=1), SamplingWithRules(max_tokens=20)
    first, scored, late = (PendingChoice([5, 6], long, client="one", id=i) for i in range(3))
    scored.score_prompt = 0
    ended, waited = set[int](), list[int]()

    def follow(report: Report) -> None:  # on the engine's thread, between two turns
        ended.update(report.ended)
        if first.request is not None and len(first.request.new_tokens) == 5:
            thread.post(("add", [scored]))
        elif scored in thread._line and not waited:
            waited.append(scored.id)
            thread._updates.put(update_of(engine.model))
            thread.post(("add", [late]))

    thread.on_report = follow
    thread.post(("add", [first]))
    run_until(thread, lambda: len(ended) == 3)
    assert waited == [1]
    assert versions_of(first, scored, late) == [[None], [None], [NEW]]


def test_options(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"^10.0.0.7:29600 is reached over a network: set SHOESTRING_.*--insecure$"):
        ServeOptions(follow="10.0.0.7:29600")
    assert ServeOptions(follow="10.0.0.7:29600", insecure=True)
    monkeypatch.setenv("SHOESTRING_PUBLISH_KEY", "secret")
    assert ServeOptions(follow="10.0.0.7:29600")
    with pytest.raises(UserError, match="needs a draft model"):
        ServeOptions(follow_drafter="127.0.0.1:9")
    with pytest.raises(UserError, match="is not an address"):
        ServeOptions(follow="nowhere")
    with pytest.raises(UserError, match="drain or recompute"):
        ServeOptions(on_update="now")  # type: ignore[arg-type]


def killed(folder: Path, num: int, seed: int) -> dict[str, Any]:
    """What live_kills.py counted."""
    script, tests = Path(__file__).with_name("live_kills.py"), Path(__file__).parents[2]
    paths = ":".join(map(str, (tests, tests / "serve", Path(__file__).parent)))
    command = [sys.executable, str(script), str(folder), str(num), str(seed)]
    done = subprocess.run(command, env=ENV | {"PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


@pytest.mark.usefixtures("warm_python")
def test_a_few_kills_leave_every_answer_to_one_version(tmp_path: Path) -> None:
    told = killed(tmp_path, 3, seed=0)
    assert told["mixed"] == 0 and sum(told["kills"].values()) == 3
    assert told["answers"] >= 6 and told["versions"] >= 2
