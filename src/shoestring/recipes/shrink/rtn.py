"""Shrink a model to 2, 3, 4 or 8 bits by rounding to the nearest level; no data and no training needed.

Run:     shoestring run shrink/rtn model=DIR format=nf3
         shoestring run shrink/rtn model=RUN "rules=*.mlp.*=nf3;*.attn.*=int4" text=some.txt
         shoestring run shrink/rtn model=file.gguf format=int4:g64 out=DIR dense_out=DIR2
Needs:   memory for the model in fp32 (CPU) or bf16 (GPU)
Time:    seconds to a minute for 135M parameters on 2 CPU cores, plus the evaluation of a text
Expect:  int4:g64 takes 4.4 bits per weight, nf3:g64 3.5. On SmolLM2-135M perplexity on WikiText-2 rises by
         about a quarter with int4:g64: small models lose most by plain rounding
Leaves:  a run folder with the packed model/ (or out=), the table before and after, report.html
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoestring.config import config_record, option, to_json
from shoestring.device import pick_device, pick_dtype
from shoestring.errors import UserError
from shoestring.evals.model_row import evaluate_row, text_tokens
from shoestring.formats import Dense, Format, convert, pack, unpack
from shoestring.formats.convert import check_fits, format_hosts, resolve
from shoestring.formats.linear import all_finite
from shoestring.model import Decoder, load_model, save_model
from shoestring.model.encoder_types import encoder_type
from shoestring.model.folder import described
from shoestring.model.save import round_rest
from shoestring.paths import find_model
from shoestring.recipes.settings import FormatSettings, GateSettings, RoundSettings, RunSettings
from shoestring.recipes.shrink_run import check_results_fit, read_rules, report_before_after
from shoestring.runlog import RunLog, check_outputs, check_run_folder, open_run_folder
from shoestring.shrink.quality_gate import judge, mean_kl, predictions, refuse, verify_model
from shoestring.shrink.quantize import HEADS
from shoestring.shrink.whole_model import with_embedding


@dataclass(frozen=True, kw_only=True)
class Config(GateSettings, RoundSettings, RunSettings, FormatSettings):
    model: str = option(help="a Hugging Face folder, a run folder or a .gguf file")
    speed: bool = option(False, "measure tokens per second before and after")


def main(cfg: Config) -> Path:
    rules = read_rules(cfg.rules, cfg.format)
    settings = to_json(cfg)
    check_outputs(settings, "out", "dense_out")
    check_run_folder(settings)
    if encoder_type(find_model(cfg.model)) is not None:
        raise UserError(f"{cfg.model} is an encoder: `shoestring run shrink/ptq method=rtn` rounds it")
    device = pick_device(cfg.device)
    if (shape := described(cfg.model)) is not None:
        check_source(shape, with_embedding(rules, cfg.embed, shape), cfg.model)
        check_results_fit(settings, shape, with_embedding(rules, cfg.embed, shape))
    loaded = load_model(cfg.model, device=device, dtype=pick_dtype(cfg.dtype, device))
    rules = with_embedding(rules, cfg.embed, loaded.model)
    check_source(loaded.model, rules, cfg.model)
    check_results_fit(settings, loaded.model, rules)  # of a GGUF file, whose model is known only now
    tokens, text = text_tokens(loaded, cfg.model, text=cfg.text, data=cfg.data)

    folder = open_run_folder("shrink/rtn", settings)
    log = RunLog(folder)
    log.save_config(config_record("shrink/rtn", cfg))
    options: dict[str, Any] = {"context": cfg.context, "max_tokens": cfg.max_tokens, "speed": cfg.speed}
    log.evaluated(**evaluate_row(loaded, "before", tokens, text, **options))
    predicted = predictions(loaded.model, tokens)
    log.say(str(convert(loaded.model, rules)))
    verify_model(loaded.model, cfg.verify)
    pack(loaded.model, dtype=loaded.model.compute_dtype)
    round_rest(loaded.model)
    verify_model(loaded.model, cfg.verify)
    log.evaluated(**evaluate_row(loaded, "after", tokens, text, **options, changed=True))

    kl = mean_kl(predicted, predictions(loaded.model, tokens))
    refuse(judge(loaded.model, log, max_perplexity=cfg.max_perplexity, force=cfg.force, kl=kl), "the same with")
    out = Path(cfg.out) if cfg.out else folder / "model"
    save_model(out, loaded.model, loaded.tokenizer)
    if cfg.dense_out is not None:
        unpack(loaded.model)
        save_model(cfg.dense_out, loaded.model, loaded.tokenizer)
    report_before_after("shrink/rtn", log, folder, out)
    return folder


def check_source(model: Decoder, rules: list[tuple[str, Format]], path: str) -> None:
    """UserError for layers that cannot be rounded, before the run folder is made."""
    chosen = {t.name: t.format for t in resolve(model, rules, HEADS)[0]}
    for name, layer in format_hosts(model):
        if layer.packed:
            raise UserError(
                f"{path} is packed already ({name} is {layer.format.label}): quantize the model it was made from"
            )
        if not layer.weight.is_meta and not all_finite(layer.weight):
            raise UserError(f"{name}.weight holds NaN or infinite values; check the model {path}")
        check_fits(name, layer, chosen.get(name, Dense()))
