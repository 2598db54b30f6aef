"""The table of experiments/lowbit_quality in small: a model that learned a Markov chain, at 2 bits; and its layout."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from chain_subject import chain_subject

from benchmarks import results
from experiments import lowbit_methods, lowbit_quality, lowbit_subjects, lowbit_tables
from experiments.lowbit_methods import evaluate, shrink, unformat
from experiments.lowbit_subjects import KEPT
from experiments.sparse24_quality import GPT2
from experiments.stories260k import BOS, StoryCodec, load_stories
from experiments.trained_model import fingerprint, open_trained, save_trained
from shoestring.errors import Interrupted, UserError
from shoestring.evals.perplexity import perplexity
from shoestring.formats import parse_format
from shoestring.formats.convert import format_linears
from shoestring.mesh import open_mesh
from shoestring.model import Decoder, ModelSpec
from shoestring.model.parallel import init_weights
from shoestring.shrink.blockwise import Blockwise
from shoestring.shrink.qat import Rates
from shoestring.train.shards import TokenShards
from tiny import CHAIN_VOCAB, chain, small_corpus, taught


def test_settings_by_name_do_what_they_say(tmp_path: Path) -> None:
    model, text = taught(3)[0], TokenShards(chain(3_000, 1), None, "short")
    subject = chain_subject(
        model, text, 512, 8, steps=4, batch=8, blockwise=Blockwise(epochs=1, batch=4), cache_folder=tmp_path / "cache"
    )
    subject.top = 16
    embed = model.embed.weight.detach().clone()
    got, told = shrink(subject, "ours@live,0.5,gamma=0,batch=4,rest=0,blocks=0", "int2:g32", 0)
    assert torch.equal(got.embed.weight, embed) and not (tmp_path / "cache").exists()
    assert told == {"training_tokens": 1024, "rates": 0.5, "live": True, "batch": 4, "text_id": "short"}
    unformat(got)
    got, told = shrink(subject, "ours@norm=0", "int2:g32", 0)  # the defaults otherwise
    assert not torch.equal(got.embed.weight, embed) and (tmp_path / "cache").exists()
    assert told == {"training_tokens": 1024, "rates": 1.0, "live": False, "batch": 8, "text_id": "short"}
    unformat(got)
    got, told = shrink(subject, "ours@blocks=0,norm=0,mix=nf2:s1:g32+nf3:s1:g32", "nf2:s2:g32", 0)
    chosen = {m.format.label for _, m in format_linears(got)}
    assert len(chosen) > 1 and unformat(got) <= parse_format("nf2:s2:g32").bits_per_weight((32, 32)) + 1e-6

    got, told = shrink(subject, "ours@live,derived,gamma=0.5,weight=0,norm=0,rest=1e-2", "int2:g32", 0)
    assert told["training_tokens"] == 1024  # none of them block by block
    w, full = (state["blocks.0.attn.v.weight"] for state in (got.state_dict(), subject.original))
    assert w.abs().max() <= full.abs().max() and not torch.equal(w, full)  # clamped, as BitDistiller's
    unformat(got)
    subject.valid, ends = subject.test, []
    for keep in ("", ",best"):  # at a rate that ruins the model
        got, told = shrink(subject, f"bitdistiller@1,batch=4,clip=full{keep}", "int2:g32", 0)
        assert told == {"training_tokens": 1024, "lr": 1.0, "batch": 4, "text_id": "short"}
        ends.append(perplexity(got, subject.test, context=subject.context).value)
        unformat(got)
    assert ends[1] < ends[0]
    got, told = shrink(subject, "bitdistiller@1e-3,mix=nf2:s1:g32+nf3:s1:g32", "nf2:s2:g32", 0)
    assert len({m.format.label for _, m in format_linears(got)}) > 1
    unformat(got)


@pytest.mark.slow
@pytest.mark.lab
def test_orderings_at_two_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = taught(250)
    subject = chain_subject(
        model,
        text,
        4096,
        32,
        steps=60,
        batch=16,
        lr=5e-4,
        top=16,
        blockwise_part=0.125,
        blockwise=Blockwise(epochs=2, batch=16),
        rates=Rates(weight=1e-2, scale=3e-3, zero=1e-2, norm=1e-2, rest=2e-2),
        cache_folder=tmp_path / "cache",
    )
    found = {"dense": evaluate(subject)["perplexity"]}
    for method in ("rtn", "awq", "gptq", "bitdistiller", "ours"):
        got, told = shrink(subject, method, "int2:g32", 0)
        bits = unformat(got)
        assert bits == pytest.approx(2.75)
        found[method] = evaluate(subject)["perplexity"]
        assert (told["training_tokens"] > 0) == (method in ("bitdistiller", "ours"))
    assert found["dense"] < 2.8
    assert found["bitdistiller"] < 0.8 * min(found["gptq"], found["awq"]), found
    assert found["ours"] < found["bitdistiller"], found
    # Another part of the rates starts from the blocks that are trained already, in passes of a few rows.
    monkeypatch.delattr(lowbit_methods, "train_blocks")
    subject.micro = 5
    got, told = shrink(subject, "ours@0.5", "int2:g32", 0)
    unformat(got)
    assert told["rates"] == 0.5 and evaluate(subject)["perplexity"] < found["bitdistiller"]


def test_a_model_that_was_kept_is_shrunk_on_its_own_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """GPT-2's shape in small (layer norms, biases, learned positions), every kind of method."""
    corpus = small_corpus(tmp_path)
    shape: dict[str, Any] = {
        **GPT2,
        "d_model": 64,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 2,
        "head_dim": 32,
        "d_ff": 128,
    }
    model = Decoder(ModelSpec(vocab_size=corpus.tokenizer.vocab_size, max_positions=64, **shape))
    init_weights(model, 0)
    save_trained(tmp_path / "kept", model, corpus, mesh=open_mesh(), seed=7, tokens=12345)
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    cells = [f"{m} int2:g64" for m in ("rtn", "clip", "awq", "gptq", "bitdistiller", "ours@live,gamma=0,batch=2,0.25")]
    common = ["lowbit_quality", "--part", "kept", "--only", *cells, "--steps", "4"]
    monkeypatch.setattr(sys, "argv", common)
    with pytest.raises(SystemExit, match="--kept"):
        lowbit_quality.main()
    more = ["--kept", tmp_path / "kept", "--tokens", 1024, "--batch", 4, "--folder", tmp_path / "work"]
    monkeypatch.setattr(sys, "argv", [*common, *map(str, more)])
    lowbit_quality.main()
    assert "FAILED" not in (told := capsys.readouterr().out), told
    lines = [json.loads(text) for text in (tmp_path / "lowbit_quality.jsonl").read_text().splitlines()]
    assert [n["case"] for n in lines] == ["dense", *cells]
    config = lines[-1]["config"]
    assert (config["model_seed"], config["model_tokens"], config["context"]) == (7, 12345, 64)
    assert config["corpus"] == corpus.train.fingerprint[:8] and config["parameters"] == model.spec.num_params()
    assert all(np.isfinite(n["value"]) for n in lines) and len({n["value"] for n in lines}) == len(lines)
    assert all(n["quality"]["valid"] != n["quality"]["perplexity"] for n in lines)  # of another part
    shown = lowbit_tables.table()
    columns = "bits/weight | rounding | clip search (16k) | AWQ (16k) | GPTQ (16k) | BitDistiller | ours"
    assert f"GPT-2's small shape, trained here | {columns}" in shown and "(seed 7, " in shown
    assert config["weights"] == fingerprint(model)[:8]


def kept_line(method: str, label: str, value: float, dense: float, **more: object) -> dict[str, Any]:
    config = {"model": KEPT, "method": method, "format": label, "bits": 2.0, "seed": 0, "context": 64}
    config |= {"tokens": 9, "parameters": 1, "vocabulary": 2, "model_seed": 1, "model_tokens": 5, "corpus": "old"}
    config |= {"training_tokens": 0 if method in ("dense", "rtn") else 10, **more}
    told = {"case": f"{method} {label}", "metric": "perplexity", "baseline_value": dense, "config": config}
    other = {"device": "d", "versions": {}, "commit": "c", "date": "2026-01-01"}
    return {**told, **other, "quality": {"perplexity": value, "valid": value + 0.77}}


@pytest.mark.parametrize(
    "new", [{"corpus": "new"}, {"model_seed": 2}, {"model_tokens": 6}, {"weights": "ab"}, {}], ids=str
)
def test_two_kept_models_never_share_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new: dict[str, object]
) -> None:
    """The one that was measured last has it alone, also where only its own perplexity tells it from the other, and
    where the other has cells that it lacks."""
    old = [
        kept_line("dense", "dense", 5.0, 5.0),
        kept_line("rtn", "int4:g64", 5.5, 5.0),
        kept_line("ours", "int2:g64", 6.0, 5.0),
        kept_line("bitdistiller", "int2:g64", 6.5, 5.0),
    ]
    own = [kept_line("dense", "dense", 7.0, 7.0, **new), kept_line("ours", "int2:g64", 7.5, 7.0, **new)]
    monkeypatch.setattr(results, "RESULTS", tmp_path)

    def shown(lines: list[dict[str, Any]]) -> str:
        (tmp_path / "lowbit_quality.jsonl").write_text("".join(json.dumps(n) + "\n" for n in lines))
        return "\n".join((lowbit_tables.table(), lowbit_tables.must_hold(), lowbit_tables.settings()))

    page = shown([*old, *own])
    assert "| int2:g64 | 2.00 | 7.500 |" in page and "full precision 7.000" in page
    assert "int4" not in page and "5.000" not in page and "6.000" not in page and "below BitDistiller" not in page
    # The other, measured again in one cell: its lines count again, those of this one no longer.
    page = shown([*old, *own, kept_line("ours", "int2:g64", 6.1, 5.0)])
    assert "full precision 5.000" in page and "| int4:g64 | 2.00 | 5.500 |" in page and "7.500" not in page
    assert "| 6.100 against 6.500 (-6.15%) |" in page


def test_weights_tell_models_apart() -> None:
    model = Decoder(ModelSpec(CHAIN_VOCAB, 32, 1, 1, 1, 32, 64, 64))
    init_weights(model, 0)
    before = fingerprint(model)
    assert before == fingerprint(model)
    with torch.no_grad():
        model.embed.weight[3, 5] += 1e-3
    assert fingerprint(model) != before


def test_a_rate_is_chosen_on_validation_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    label, gptq = "int2:g128", kept_line("gptq", "int2:g128", 6.0, 5.0, training_tokens=0)
    lines = [kept_line("dense", "dense", 5.0, 5.0), gptq]
    worse = [kept_line(m, label, 9.0, 5.0, training_tokens=0) for m in ("rtn", "clip")]
    lines += [kept_line(f"bitdistiller@{r}", label, v, 5.0, lr=float(r)) for r, v in (("1e-4", 5.6), ("2e-5", 5.5))]
    lines[2]["quality"]["valid"] = 6.2  # best there, not on the test text
    lines += [kept_line("ours", label, 5.7, 5.0), *worse, kept_line("awq", label, 6.1, 5.0, training_tokens=0)]
    (tmp_path / "lowbit_quality.jsonl").write_text("".join(json.dumps(n) + "\n" for n in lines))
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    wide, _, below, plain = lowbit_tables.verdicts()
    best = "bitdistiller@1e-4, best of 2 by validation"
    assert [f.chosen for f in wide.trained] == [best] and wide.small.mean == 5.6
    assert wide.left == pytest.approx(np.log(5.6 / 5.0) / np.log(6.0 / 5.0)) and wide.word == "FAILS"
    assert below.word == "FAILS" and [f.chosen for f in below.trained] == ["ours", best]
    assert plain.word == "holds" and plain.what == "ours below all without training (best: gptq)"
    page = lowbit_tables.must_hold()
    assert f"| 5.600 against 6.000 (62% of its loss left) | {best} |" in page
    assert page.count("| FAILS, one seed |") == 3 and page.count("| holds, one seed |") == 1


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_a_wide_margin_is_half_of_the_loss_on_any_model(scale: float) -> None:
    """Whatever full precision has: half of a loss in nats is left at the square root of what it does to perplexity."""

    def found(value: float) -> lowbit_tables.Found:
        line = {"quality": {"perplexity": scale * value}, "config": {"seed": 0, "training_tokens": 1}}
        return lowbit_tables.Found("m", [line])

    for small, word in ((1.09, "holds"), (1.11, "FAILS")):  # 1.1 ** 2 = 1.21
        v = lowbit_tables.Verdict("w", "m", "f", found(small), found(1.21), lowbit_tables.WIDE, found(1.0))
        assert v.word == word


def test_seeds_do_not_hide_a_better_setting() -> None:
    """A setting with several seeds is shown only where it is as good as the best."""

    def found(name: str, *values: float) -> lowbit_tables.Found:
        lines = [{"quality": {"valid": v, "perplexity": v}, "config": {"seed": i}} for i, v in enumerate(values)]
        return lowbit_tables.Found(name, lines)

    often = found("often", 10.0, 10.2)
    assert lowbit_tables.best_of([often, found("once", 9.0)]).method == "once"
    assert lowbit_tables.best_of([often, found("once", 10.05)]).method == "often"


def test_a_kept_model_wants_its_own_corpus(tmp_path: Path) -> None:
    corpus = small_corpus(tmp_path)
    (corpus.folder / "tokenizer.json").unlink()  # as in a corpus that was prepared here
    model = Decoder(ModelSpec(corpus.tokenizer.vocab_size, 32, 1, 1, 1, 32, 64, 64))
    save_trained(tmp_path / "kept", model, corpus, mesh=open_mesh(), seed=0, tokens=1)
    again, opened, told = open_trained(tmp_path / "kept", "cpu")
    assert torch.equal(again.embed.weight, model.embed.weight)
    assert opened.val.fingerprint == corpus.val.fingerprint and told["vocabulary"] == model.spec.vocab_size
    about = tmp_path / "kept/trained.json"
    about.write_text(about.read_text().replace(corpus.train.fingerprint, "another"))
    with pytest.raises(UserError, match="not the corpus any more"):
        open_trained(tmp_path / "kept", "cpu")
    about.unlink()
    with pytest.raises(UserError, match=r"no trained\.json"):
        open_trained(tmp_path / "kept", "cpu")


def test_who_is_asked_to_stop_begins_no_other_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []

    def measure(subject: object, method: str, *rest: object) -> None:
        seen.append(method)
        raise UserError("odd") if method == "rtn" else Interrupted("stopped at step 3")

    monkeypatch.setattr(lowbit_quality, "measure", measure)
    monkeypatch.setattr(lowbit_quality, "measure_dense", lambda subject: 1.0)
    monkeypatch.setattr(lowbit_quality, "kept", lambda args, folder: SimpleNamespace(name=KEPT, blocks={}))
    monkeypatch.setattr(lowbit_quality, "known_dense", lambda subject: None)
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    cells = [f"{m} int2:g64" for m in ("rtn", "bitdistiller", "awq")]
    monkeypatch.setattr(sys, "argv", ["lowbit_quality", "--part", "kept", "--only", *cells])
    lowbit_quality.main()
    assert seen == ["rtn", "bitdistiller"]
    told = capsys.readouterr().out
    assert "FAILED" in told and "stopped in GPT-2's small shape, trained here bitdistiller int2:g64" in told


@pytest.mark.parametrize("stage", ["model", "cell"])
def test_sigterm_outside_training_keeps_what_was_measured(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While a model is read or a block is trained no trainer listens to the signal."""
    made: list[Path] = []

    def asked_to_stop() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)  # longer than a test may take

    def kept(args: object, folder: Path) -> SimpleNamespace:
        made.append(folder)
        if stage == "model":
            asked_to_stop()
        return SimpleNamespace(name=KEPT, blocks={})

    def measure(subject: object, method: str, label: str, seed: int, dense: float) -> None:
        if method == "bitdistiller":
            asked_to_stop()
        results.record(bench="lowbit_quality", case=method, metric="perplexity", unit="perplexity", samples=[1.0])

    monkeypatch.setattr(lowbit_quality, "kept", kept)
    monkeypatch.setattr(lowbit_quality, "measure", measure)
    monkeypatch.setattr(lowbit_quality, "verdicts", list)
    monkeypatch.setattr(lowbit_quality, "known_dense", lambda subject: 1.0)
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    cells = [f"{m} int2:g64" for m in ("rtn", "bitdistiller", "awq")]
    monkeypatch.setattr(sys, "argv", ["lowbit_quality", "--part", "kept", "--only", *cells])
    before = signal.getsignal(signal.SIGTERM)
    lowbit_quality.main()
    assert signal.getsignal(signal.SIGTERM) is before and not made[0].exists()
    assert [line["case"] for line in results.recorded("lowbit_quality")] == ([] if stage == "model" else ["rtn"])
    where = "rtn" if stage == "model" else "bitdistiller"
    assert f"stopped in GPT-2's small shape, trained here {where} int2:g64" in capsys.readouterr().out


def test_a_longer_training_is_another_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    text = SimpleNamespace(fingerprint="aaaaaaaa" * 4)
    model = SimpleNamespace(name=lowbit_tables.STORIES, blocks={}, text=text, told={})

    def line(method: str, training_tokens: int) -> str:
        config = {"model": model.name, "method": method, "format": "int2:g64", "seed": 0, "tokens": 9}
        config["text_id"] = "aaaaaaaa"
        told = {"case": method, "metric": "perplexity", "device": results.device_name(), "baseline_value": 1.0}
        line = {**told, "config": {**config, "training_tokens": training_tokens}, "quality": {"perplexity": 2.0}}
        return json.dumps(line) + "\n"

    (tmp_path / "lowbit_quality.jsonl").write_text(line("rtn", 0) + line("bitdistiller@5e-4", 40 * 16 * 128))
    monkeypatch.setattr(lowbit_quality, "measure", lambda subject, method, *rest: seen.append(method))
    monkeypatch.setattr(lowbit_quality, "stories", lambda args, folder: model)
    monkeypatch.setattr(lowbit_quality, "known_dense", lambda subject: 1.0)
    monkeypatch.setattr(lowbit_quality, "verdicts", list)
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    for steps in ("40", "80"):
        cells = [f"{m} int2:g64" for m in ("rtn", "bitdistiller@5e-4", "awq")]
        common = ["lowbit_quality", "--assets", str(tmp_path), "--small", "--missing", "--small-steps", steps]
        monkeypatch.setattr(sys, "argv", [*common, "--only", *cells])
        lowbit_quality.main()
    assert seen == ["awq", "bitdistiller@5e-4", "awq"]


def test_texts_are_asked_for_where_a_part_needs_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for part in (["--part", "two"], ["--small"]):
        monkeypatch.setattr(sys, "argv", ["lowbit_quality", *part])
        with pytest.raises(SystemExit):
            lowbit_quality.main()
        assert "--assets FOLDER is needed" in capsys.readouterr().err


def test_a_cell_that_takes_too_long_is_given_up() -> None:
    with pytest.raises(RuntimeError, match="not finished"), lowbit_quality.at_most(0.05):
        time.sleep(600)  # longer than a test may take
    with lowbit_quality.at_most(0.01):
        pass
    time.sleep(0.03)  # nothing rings any more
    with lowbit_quality.at_most(0):  # no limit
        time.sleep(0.02)


def test_table_and_verdicts_read_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def line(method: str, label: str, seed: int, value: float, tokens: int = 0, device: str = "d") -> str:
        config = {
            "model": lowbit_quality.SMOLLM2, "method": method, "format": label, "bits": 2.375, "seed": seed,
            "training_tokens": tokens, "tokens": 16384, "context": 1024, "items": 300,
        }  # fmt: skip
        told = {"case": f"{method} {label}", "metric": "perplexity", "config": config, "device": device}
        quality = {"perplexity": value, "accuracy_piqa": 0.5}
        return json.dumps({**told, "quality": quality, "versions": {}, "commit": "c", "date": "2026-01-01"})

    (tmp_path / "lowbit_quality.jsonl").write_text(
        "\n".join(
            (
                line("dense", "dense", 0, 20.0),
                line("gptq", "int2:g64", 0, 400.0),
                line("awq", "int2:g64", 0, 90.0),
                line("clip", "int2:g64", 0, 500.0),
                line("rtn", "int2:g64", 0, 900.0),
                line("awq", "int2:g192", 0, 70.0),  # alone, so nobody is below all without training
                line("bitdistiller", "int2:g64", 0, 70.0, 1_310_720),
                line("ours", "int2:g64", 0, 50.0, 1_310_720),
                line("ours", "int2:g64", 1, 52.0, 1_310_720),
                line("ours@0.5", "int2:g64", 0, 60.0, 1_310_720),  # three lines, but two seeds
                line("ours@0.5", "int2:g64", 0, 60.0, 1_310_720, "another"),
                line("ours@0.5", "int2:g64", 1, 60.0, 1_310_720),
                line("ours", "int4:g64", 0, 20.5, 1_310_720),
                line("bitdistiller@1e-4", "nf3:s2:g64", 0, 24.0, 1_310_720),
                line("bitdistiller@3e-4", "nf3:s2:g64", 0, 23.0, 1_310_720),
                line("ours", "nf3:s2:g64", 0, 22.5, 1_310_720),
                line("ours", "nf3:s2:g64", 1, 23.1, 1_310_720),
                line("ours", "nf3:s2:g64", 0, 21.0, 2_621_440),  # more tokens than the other had
                line("bitdistiller", "int2:g192", 0, 80.0, 1_310_720),
                line("ours", "int2:g192", 0, 85.0, 1_310_720),
                line("ours@live,mix=int3:g192", "int2:g192", 0, 60.0, 1_310_720),
            )
        )
    )
    monkeypatch.setattr("benchmarks.results.RESULTS", tmp_path)
    page = lowbit_tables.table()
    assert "| int2:g64 | 2.38 | 900.0 | 500.0 | 90.00 | 400.0 | 70.00 | 50.00 to 52.00 |  |" in page
    assert page.index("| int4:g64 | 2.38 |  |  |  |  |  | 20.50 |  |") < page.index("| int2:g64")  # 4 bits before 2
    assert "| nf3:s2:g64 | BitDistiller | 23.00 | 50.0 |" in lowbit_tables.accuracies()
    assert "| nf3:s2:g64 | bitdistiller@1e-4 | 0 | 1,310,720 |  |  | 24.00 |" in lowbit_tables.settings()
    said = [str(v) for v in lowbit_tables.verdicts()]
    model = "SmolLM2-135M-Instruct"
    half, left = "BitDistiller leaves at most half of what", "of its loss left)"
    assert f"holds: {half} gptq loses, int2:g64, {model}: 70.00 against 400.0 (42% {left}" in said
    assert f"FAILS: {half} awq loses, int2:g64, {model}: 70.00 against 90.00 (83% {left}" in said
    assert f"holds: ours below BitDistiller, int2:g64, {model}: 51.00 against 70.00 (-27.14%)" in said
    assert f"holds: ours within 5% of full precision, int4:g64, {model}: 20.50 against 20.00 (+2.50%)" in said
    assert f"holds: ours, mixed below BitDistiller, int2:g192, {model}: 60.00 against 80.00 (-25.00%)" in said
    assert f"FAILS: ours below BitDistiller, int2:g192, {model}: 85.00 against 80.00 (+6.25%)" in said
    assert "| int2:g192 | 2.38 |  |  | 70.00 |  | 80.00 | 85.00 | 60.00 |" in page
    assert f"ties: ours below BitDistiller, nf3:s2:g64, {model}: 22.80 against 23.00 (-0.87%)" in said
    best = "ours below all without training (best: awq)"
    assert f"holds: {best}, int2:g64, {model}: 51.00 against 90.00 (-43.33%)" in said
    assert len(said) == 9 and lowbit_tables.must_hold().count("\n| ") == 10
    assert f"| {model} | int2:g64 | 50.00 to 52.00 against 70.00 (-27.14%) | ours, best of 2 by test; " in (
        lowbit_tables.must_hold()
    )
    absent = page.partition("Not measured at all: ")[2].partition(".")[0].split(", ")
    assert "int4:g192" in absent and "int2:g192" not in absent and len(absent) == 22
    assert "fp3:s2:g192" in absent and "fp4:s1:g64" in absent


def test_rows_on_a_part_of_the_text_have_their_own_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def line(method: str, label: str, value: float, tokens: int, device: str, **quality: float) -> str:
        config = {"model": lowbit_tables.SMOLLM2, "method": method, "format": label, "bits": 3.5, "seed": 0,
                  "training_tokens": 0, "tokens": tokens, "context": 2048}  # fmt: skip
        told = {"case": f"{method} {label}", "metric": "perplexity", "config": config, "device": device, "note": ""}
        told |= {"quality": {"perplexity": value, **quality}, "value": value}
        return json.dumps({**told, "versions": {}, "commit": "c", "date": "2026-01-01"})

    monkeypatch.setattr("benchmarks.results.RESULTS", tmp_path)
    gpu = [line("dense", "dense", 20.0, 9000, "GPU"), line("rtn", "int3:g64", 40.0, 9000, "GPU")]
    (tmp_path / "lowbit_quality.jsonl").write_text("\n".join(gpu))
    assert lowbit_tables.two_scales_off_text() == "Not measured yet."
    cpu = [line("rtn", "nf3:s2:g64", value, 4096, "CPU", novels=90.0) for value in (31.0, 30.0)]  # the newest counts
    cpu.append(line("dense", "dense", 22.0, 4096, "CPU", novels=50.0))
    (tmp_path / "lowbit_quality.jsonl").write_text("\n".join([*gpu, *cpu]))
    page = lowbit_tables.two_scales_off_text()
    assert "| 3 | 64 | rounding |  |  | 30.00 / 90.00 |" in page and "31.00" not in page
    assert "first 4,096 tokens" in page and "(full precision 22.00 / 50.00)" in page
    found = lowbit_tables.best_settings()
    assert found[lowbit_tables.SMOLLM2, "dense", "dense"].perplexities == [20.0]
    assert (lowbit_tables.SMOLLM2, "rtn", "nf3:s2:g64") not in found


def test_rates_are_compared_at_as_many_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def line(method: str, seed: int, value: float, tokens: int = 100, **more: Any) -> str:
        config = {"model": lowbit_tables.STORIES, "method": method, "format": "int2:g64", "bits": 2.375, "seed": seed,
                  "training_tokens": tokens, "tokens": 9, "context": 8, "text_id": "t", **more}  # fmt: skip
        told = {"case": method, "metric": "perplexity", "config": config, "device": "d", "versions": {}, "commit": "c"}
        return json.dumps({**told, "quality": {"perplexity": value, "valid": value - 1}, "date": "2026-01-01"}) + "\n"

    recipe = "ours@live,{},weight=5e-3"
    lines = [
        line("dense", 0, 5.0, 0, format="dense", text_id=""),
        line("bitdistiller@5e-4,best", 0, 12.0, lr=5e-4),
        *(line(recipe.format(1), seed, 10.0 + seed, rates=1.0) for seed in (0, 1)),
        line(recipe.format(0.5), 0, 11.5, rates=0.5),
        *(line(recipe.format(p), 0, v, 200, rates=p) for p, v in ((1.0, 8.0), (0.5, 7.0))),  # twice the tokens
        line("ours@live,0.25", 0, 13.0, rates=0.25),  # other rates, of which this is a part
    ]
    (tmp_path / "lowbit_quality.jsonl").write_text("".join(lines))
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    rows = [row for row in lowbit_tables.rates().splitlines() if row.startswith("| stories260K")]
    start = "| stories260K | int2:g64 | ours |"
    assert rows == [
        f"{start} 100 | A | 1 of the recipe's rates | 2 | 9.500 | 10.50 | 10.00 to 11.00 |",
        f"{start} 100 | A | 0.5 of the recipe's rates | 1 | 10.50 | 11.50 | 11.50 |",
        f"{start} 200 | A | 1 of the recipe's rates | 1 | 7.000 | 8.000 | 8.000 |",
        f"{start} 200 | A | 0.5 of the recipe's rates | 1 | 6.000 | 7.000 | 7.000 |",
    ]
    page = lowbit_tables.published()  # BitDistiller had 100 tokens
    assert "| 2.38 | ours | 3 | 1 of the recipe's rates | 2 | 10.00 to 11.00 |" in page and "7.000" not in page
    assert "stories260K: 100 training tokens; full precision 5.000." in page


def test_a_row_has_one_text_and_a_verdict_compares_on_shared_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def line(method: str, value: float, text: str | None, label: str = "int2:g64", seed: int = 0, **more: Any) -> str:
        config = {"model": lowbit_tables.SMOLLM2, "method": method, "format": label, "bits": 2.375, "seed": seed,
                  "training_tokens": 100, "tokens": 9, "context": 8, **more}  # fmt: skip
        if text:
            config["text_id"] = text
        told = {"case": method, "metric": "perplexity", "config": config, "device": "d", "versions": {}, "commit": "c"}
        return json.dumps({**told, "quality": {"perplexity": value, "valid": value - 1}, "date": "2026-01-01"}) + "\n"

    half, whole = {"rates": 0.5}, {"rates": 1.0}
    lines = [
        line("dense", 5.0, None, "dense", training_tokens=0),
        line("bitdistiller@5e-4,best", 12.0, "old", lr=5e-4),
        line("bitdistiller@1e-3,best", 13.0, "old", lr=1e-3),
        line("ours@live,1", 10.0, "old", **whole),
        line("ours@live,0.5", 9.0, "old", **half),
        line("ours@live,0.5", 8.8, "new", **half),
        line("ours@live,0.5", 8.6, "new", seed=1, **half),
        line("bitdistiller@1e-3", 30.0, None, "int2:g192", lr=1e-3),
        line("bitdistiller@1e-3,best", 29.0, None, "int2:g192", lr=1e-3),  # two settings, one rate
        line("ours@live,1", 20.0, None, "int2:g192", **whole),
        line("bitdistiller@1e-3", 30.0, "old", "int2:g128", lr=1e-3),
        line("ours@live,1", 20.0, "new", "int2:g128", **whole),
    ]
    (tmp_path / "lowbit_quality.jsonl").write_text("".join(lines))
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    page = lowbit_tables.published()
    start = "| SmolLM2-135M-Instruct | int2:g64 |"
    assert f"{start} A | 2.38 | BitDistiller | 2 | 0.0005 | 1 | 12.00 |" in page
    assert f"{start} A | 2.38 | ours | 2 | 0.5 of the recipe's rates | 1 | 9.000 |" in page
    assert f"{start} B | 2.38 | ours | 1 | 0.5 of the recipe's rates | 2 | 8.600 to 8.800 |" in page
    assert "A (old) and B (new) of" in page
    compared = [row for row in lowbit_tables.rates().splitlines() if "| ours |" in row]
    assert len(compared) == 2 and all("| A |" in row for row in compared)  # the other text has one part only
    said = {row.split(" | ")[2]: row for row in lowbit_tables.must_hold().splitlines() if "ours below Bit" in row}
    # Ours was trained on a second text, too, which BitDistiller was not.
    assert "9.000 against 12.00 (-25.00%)" in said["int2:g64"]
    assert (
        "best of 2 by validation (text: A); bitdistiller@5e-4,best, best of 2 by validation (text: A)"
        in (said["int2:g64"])
    )
    assert said["int2:g64"].endswith("| holds, one seed |")
    assert "20.00 against 30.00" in said["int2:g128"]
    assert said["int2:g128"].endswith("| holds, one seed, one rate, other texts |")
    assert said["int2:g192"].endswith("| holds, one seed, one rate |") and "(text: earlier)" in said["int2:g192"]


def test_settings_are_judged_on_one_text() -> None:
    def found(method: str, **quality: float) -> lowbit_tables.Found:
        return lowbit_tables.Found(method, [{"quality": quality, "config": {"seed": 0}}])

    low, high = found("low", perplexity=5.0, valid=7.0), found("high", perplexity=6.0, valid=6.5)
    best = lowbit_tables.best_of([low, high])
    assert best.chosen == "high, best of 2 by validation" and best.lines is high.lines
    best = lowbit_tables.best_of([found("old", perplexity=5.5), low, high])
    assert best.chosen == "low, best of 3 by test" and lowbit_tables.best_of([low]).chosen == "low"


@pytest.mark.assets
def test_the_llama_is_trained_once_and_not_on_what_measures_it(
    assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = {"vocab_size": 300, "d_model": 64, "num_heads": 2, "num_kv_heads": 1, "d_ff": 64, "steps": 2}
    monkeypatch.setattr(lowbit_subjects, "LLAMA_256", lowbit_subjects.LLAMA_256 | short)
    args = SimpleNamespace(assets=assets, tokens=0, small_steps=1, micro=0)
    first = lowbit_subjects.llama256(args, tmp_path)  # type: ignore[arg-type]
    monkeypatch.setattr(lowbit_subjects.dense, "main", pytest.fail)
    again = lowbit_subjects.llama256(args, tmp_path)  # type: ignore[arg-type]
    assert first.told == again.told and first.told["model_tokens"] == 2 * 16 * 128
    assert first.tokenizer is not None and first.valid is not None
    seen = (tmp_path / "stories.txt").read_text()
    for held_out in (first.test, first.valid):
        stories = first.tokenizer.decode(held_out.tolist(), skip_special=False).split("<|endoftext|>")
        assert len(stories) == lowbit_subjects.HELD_OUT and not any(story.strip() in seen for story in stories)


@pytest.mark.assets
def test_stories260k_is_read_as_it_was_trained(assets: Path) -> None:
    home = assets / "models/stories260k"
    model, codec = load_stories(home / "stories260K.bin"), StoryCodec(home / "tok512.bin")
    story = (assets / "text/tinystories_2M.txt").read_text().split("<|endoftext|>")[3].strip()
    ids = codec.encode(story)
    text = b"".join(codec.pieces[i] for i in ids).decode()
    assert text.replace("<0x0A> ", "\n").strip() == story
    assert perplexity(model, torch.tensor([BOS, *ids]), context=256).value < 8  # 512 tokens; chance is 512
