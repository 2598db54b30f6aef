"""Give the linear layers and embeddings of any model a Format, pack them, and unpack them again.

    report = convert(model, [("blocks.0.*", Dense()), ("*", IntAsym(bits=4))])  # then train with any loop
    pack(model)  # weights become codes and scales

Rules are (glob, Format) pairs on dotted module names; the first match wins; `*` also matches dots. A rule without
effect is an error. Embeddings, and modules whose last name is in `skip` (the output head), are only converted by a
rule that spells their last name out: ("embed", IntAsym(bits=8, group=0)).

Modules are changed in place: an nn.Linear becomes a FormatLinear (an nn.Embedding a FormatEmbedding) by changing its
class, so its name, Parameters, hooks and every reference to it stay. transformers' Conv1D (GPT-2) becomes a
FormatLinear too; its weight is a new Parameter, transposed to [out, in]. A weight that two modules share (a tied head)
is never converted: packing would untie it. A `Decoder` has one module for both, which can be. Convolutions and
subclasses of nn.Linear and nn.Embedding are never converted.

Some modules of torch read the weights of their layers past the layers' forward. nn.TransformerEncoderLayer does so in
eval mode; where one of its layers is converted, that path is turned off. nn.MultiheadAttention always does; its weights
stay dense and the report names them. `bypassed` finds other cases by running the model.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from shoestring.errors import UserError, shown, suggest
from shoestring.formats.base import Format, Parts
from shoestring.formats.dense import Dense
from shoestring.formats.embedding import FormatEmbedding, check_row_wise
from shoestring.formats.linear import FormatHost, FormatLinear
from shoestring.formats.registry import from_json

Rule = tuple[str, Format]
F = TypeVar("F")  # a Format, of one kind or another


@dataclass(frozen=True)
class LayerTarget(Generic[F]):
    """A module, and the Format that the rules give it."""

    name: str
    module: nn.Module
    owner: nn.Module  # what moves to a device as one: the block that the module is in, or the module itself
    format: F

    @property
    def host(self) -> FormatHost:
        assert isinstance(self.module, FormatHost), self.name
        return self.module


@dataclass(frozen=True)
class Changed:
    name: str
    shape: tuple[int, int]
    before: str
    format: Format


@dataclass(frozen=True)
class Left:
    name: str
    kind: str
    reason: str
    num_bytes: int = field(default=0, compare=False)  # of its parameters, in the dtype they have now


ENDS = ("head", "lm_head", "embed")  # rounded to nearest by every method, and counted by themselves


@dataclass
class ConvertReport:
    """What `convert` did; `print(report)` shows it as a table, with layer numbers folded."""

    changed: list[Changed] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight over the changed layers, once packed: without embedding and head, where others are."""
        layers = [c for c in self.changed if c.name not in ENDS] or self.changed
        weights = sum(c.shape[0] * c.shape[1] for c in layers)
        bits = sum(c.format.bits_per_weight(c.shape) * c.shape[0] * c.shape[1] for c in layers)
        return bits / weights if weights else 0.0

    def __str__(self) -> str:
        rows: Counter[tuple[str, ...]] = Counter()
        for c in self.changed:
            bits = f"{c.format.bits_per_weight(c.shape):.2f} bits per weight"
            rows[fold(c.name), f"{c.shape[0]} x {c.shape[1]}", f"{c.before} -> {c.format.label}", bits] += 1
        for x in self.left:
            rows[fold(x.name), x.kind, "left alone", x.reason] += 1
        cells = [(key[0], f"x{n}" if n > 1 else "", *key[1:]) for key, n in rows.items()]
        widths = [max(len(row[i]) for row in cells) for i in range(5)] if cells else []
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
        summary = f"{len(self.changed)} layers changed ({self.bits_per_weight:.2f} bits per weight)"
        size = sum(x.num_bytes for x in self.left) / 1e6
        return "\n".join([*lines, f"{summary}, {len(self.left)} left alone ({size:,.1f} MB)"])


def fold(name: str) -> str:
    """blocks.12.attn.q -> blocks.*.attn.q"""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


# -- which modules -------------------------------------------------------------------------------------------
def is_conv1d(module: nn.Module) -> bool:
    """transformers' Conv1D: y = x @ weight + bias with weight [in, out]. By name, so transformers is not imported."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def weight_shape(module: nn.Module) -> tuple[int, int]:
    """[out, in]"""
    if isinstance(module, nn.Linear):
        return (module.out_features, module.in_features)
    if isinstance(module, nn.Embedding):
        return (module.num_embeddings, module.embedding_dim)
    assert isinstance(module.weight, Tensor)
    return (module.weight.shape[1], module.weight.shape[0])


def weight_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every module that multiplies with a weight matrix, convertible or not, by its first dotted name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear | nn.Embedding) or is_conv1d(m)}


def tied_names(model: nn.Module) -> dict[str, str]:
    """{module name: the other module that holds the same weight Parameter}."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None:
            owners.setdefault(id(weight), []).append(name)
    return {n: next(o for o in names if o != n) for names in owners.values() if len(names) > 1 for n in names}


def obstacle(module: nn.Module, name: str, tied: dict[str, str]) -> str | None:
    """Why this module cannot be converted at all, or None."""
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse):
        return "it changes its rows while it is used (max_norm), or has sparse gradients"
    if not (isinstance(module, FormatHost) or type(module) in (nn.Linear, nn.Embedding) or is_conv1d(module)):
        return f"{type(module).__name__} may not use its weight as nn.Linear and nn.Embedding do"
    if name in tied:
        return f"its weight is tied to {tied[name]}"
    if "forward" in module.__dict__:
        return "its forward has been replaced (remove the wrapper, convert, then wrap again)"
    return None


def spells_out(glob: str, name: str) -> bool:
    """Whether the rule ends with the module's last name, without wildcards."""
    return glob.rsplit(".", 1)[-1] == name.rsplit(".", 1)[-1]


def resolve(
    model: nn.Module, rules: Sequence[Rule], skip: Iterable[str], block_of_prefix: Mapping[str, nn.Module] | None = None
) -> tuple[list[LayerTarget[Format]], list[Left]]:
    """Which Format each module gets, and why the others get none; raises UserError on a rule without effect."""
    modules, tied = weight_modules(model), tied_names(model)
    for rule in rules:
        match rule:
            case (str(), Format()):
                continue
        raise UserError(f"{shown(rule)} is no rule; give a list of (glob, Format), like [('*', parse_format('int4'))]")
    skip = tuple(skip)
    targets: list[LayerTarget[Format]] = []
    left: list[Left] = []
    matched: dict[int, list[str]] = {i: [] for i in range(len(rules))}
    used: set[int] = set()
    for name, module in modules.items():
        hits = [i for i, (glob, _) in enumerate(rules) if fnmatchcase(name, glob)]
        for i in hits:
            matched[i].append(name)
        skipped = isinstance(module, nn.Embedding)
        skipped |= any(fnmatchcase(name, s) or fnmatchcase(name.rsplit(".", 1)[-1], s) for s in skip)
        if skipped:
            hits = [i for i in hits if spells_out(rules[i][0], name)]
        reason = obstacle(module, name, tied)
        if reason and hits and rules[hits[0]][0] == name and not isinstance(rules[hits[0]][1], Dense):
            raise UserError(f"{name} cannot be converted: {reason}. Remove it from the rules.")
        if reason or not hits:
            what = "an embedding" if isinstance(module, nn.Embedding) else "the output head"
            why = reason or (f"{what}; name it in a rule to convert it" if skipped else "no rule matches")
            left.append(Left(name, type(module).__name__, why, num_bytes(module)))
            continue
        used.add(hits[0])
        owner = next((block for prefix, block in (block_of_prefix or {}).items() if name.startswith(prefix)), module)
        targets.append(LayerTarget(name, module, owner, rules[hits[0]][1]))
    for i, (glob, _) in enumerate(rules):
        if i not in used:
            raise UserError(idle_rule(glob, matched[i], left, list(modules)))
    return targets, left


def idle_rule(glob: str, matched: list[str], left: list[Left], names: list[str]) -> str:
    """The message for a rule that changes nothing."""
    if not matched:
        if not names:
            return f"Rule {glob!r} matches nothing: this model has no linear layer and no embedding."
        hint = suggest(glob, names) or f" There are: {', '.join(sorted({fold(n) for n in names})[:8])}."
        return f"Rule {glob!r} matches no linear layer and no embedding.{hint}"
    reasons = [f"{x.name}: {x.reason}" for x in left if x.name in matched]
    if not reasons:
        return f"Rule {glob!r} has nothing left: earlier rules take all it matches. Put it before them."
    more = f"; and {len(reasons) - 3} more" if len(reasons) > 3 else ""
    return f"Rule {glob!r} matches only layers that are left alone ({'; '.join(reasons[:3])}{more})."


# -- convert -------------------------------------------------------------------------------------------------
def convert(model: nn.Module, rules: Sequence[Rule], *, skip: Sequence[str] = ("head", "lm_head")) -> ConvertReport:
    """Give layers Formats, in place; nothing is changed when a rule or a shape is wrong.

    Works on meta tensors too: fill the weights, then call `init_state(model)`.
    """
    targets, left = resolve(model, rules, skip)
    for t in targets:
        if isinstance(t.module, FormatHost) and t.module.packed:
            raise UserError(f"{t.name} is packed as {t.host.format.label}: call unpack(model) before converting again.")
        check_fits(t.name, t.module, t.format)
    report = ConvertReport(left=[*left, *loose_matrices(model)])
    for name, module, format in ((t.name, t.module, t.format) for t in targets):
        if isinstance(format, Dense) and not isinstance(module, FormatHost):
            report.left.append(Left(name, type(module).__name__, "dense by rule", num_bytes(module)))
            continue
        before = module.format.label if isinstance(module, FormatHost) else type(module).__name__
        to_format_host(module).set_format(format)
        report.changed.append(Changed(name, weight_shape(module), before, format))
    turn_off_fast_paths(model)
    return report


def check_fits(name: str, module: nn.Module, format: Format) -> None:
    """UserError with the module's name for a Format that it cannot hold."""
    try:
        shape = weight_shape(module)
        if isinstance(module, nn.Embedding):
            check_row_wise(format)
        format.check(shape)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None


def num_bytes(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters(recurse=False))


def loose_matrices(model: nn.Module) -> list[Left]:
    """Parameters of two dims that belong to no linear layer: nn.MultiheadAttention's in_proj_weight, say."""
    known, found = set(weight_modules(model).values()), []
    for name, module in model.named_modules():
        if module in known:
            continue
        for own, param in module.named_parameters(recurse=False):
            if param.ndim == 2:
                kind, reason = type(module).__name__, "a parameter of its own, read by no linear layer"
                found.append(Left(f"{name}.{own}".lstrip("."), kind, reason, param.nbytes))
    return found


def turn_off_fast_paths(model: nn.Module) -> None:
    """In eval mode nn.TransformerEncoderLayer multiplies with `linear1.weight` itself. It would compute the layer as if
    it had not been converted, and find no weight once it is packed."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and any(True for _ in format_linears(module)):
            module.activation_relu_or_gelu = 0  # says that torch's kernel does not know the activation
        if isinstance(module, nn.TransformerEncoder) and any(True for _ in format_linears(module)):
            module.use_nested_tensor = False  # which only the fast path can read


@torch.no_grad()
def bypassed(model: nn.Module, *inputs: Any, **named_inputs: Any) -> list[str]:
    """Run the model on the inputs; the converted layers whose forward did not run. Such a layer is used by other code
    than its own, which may read the unquantized weight, or it is not used at all for these inputs."""
    called: set[str] = set()
    hosts = {name: layer for name, layer in format_hosts(model) if "forward" not in layer.__dict__}
    # Not by hooks: torch's fast paths step aside for layers with hooks, and come back without them.
    for name, layer in hosts.items():
        layer.__dict__["forward"] = _noted(called, name, layer.forward)
    try:
        model(*inputs, **named_inputs)
    finally:
        for layer in hosts.values():
            del layer.__dict__["forward"]
    return [name for name, layer in hosts.items() if name not in called and not isinstance(layer.format, Dense)]


def _noted(called: set[str], name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        called.add(name)
        return forward(*args, **kwargs)

    return noted


def to_format_host(module: nn.Module) -> FormatHost:
    """Turn an nn.Linear, Conv1D or nn.Embedding into a dense host of Formats, in place."""
    if not isinstance(module, nn.Embedding):
        return to_format_linear(module)
    if not isinstance(module, FormatEmbedding):
        module.__class__ = FormatEmbedding
        assert isinstance(module, FormatEmbedding)
        module._host()
    return module


def to_format_linear(module: nn.Module) -> FormatLinear:
    """Turn an nn.Linear or Conv1D into a dense FormatLinear, in place."""
    if isinstance(module, FormatLinear):
        return module
    attributes: Any = module
    if is_conv1d(module):
        out_features, in_features = weight_shape(module)
        weight = attributes.weight
        with torch.no_grad():
            turned = weight.t().contiguous()
        attributes.weight = nn.Parameter(turned, requires_grad=weight.requires_grad)
        attributes.in_features, attributes.out_features = in_features, out_features
        del attributes.nx, attributes.nf
    module.__class__ = FormatLinear
    assert isinstance(module, FormatLinear)
    module._host()
    return module


def init_state(model: nn.Module) -> None:
    """Compute the Formats' state (tables, masks) from the weights: after a meta build has been filled."""
    for _, module in format_hosts(model):
        module.init_state()


# -- pack ----------------------------------------------------------------------------------------------------
def format_hosts(model: nn.Module) -> Iterator[tuple[str, FormatHost]]:
    """Linear layers and embeddings."""
    return ((name, m) for name, m in model.named_modules() if isinstance(m, FormatHost))


def format_linears(model: nn.Module) -> Iterator[tuple[str, FormatLinear]]:
    return ((name, m) for name, m in model.named_modules() if isinstance(m, FormatLinear))


def format_linear(model: nn.Module, name: str) -> FormatLinear:
    layer = model.get_submodule(name)
    assert isinstance(layer, FormatLinear), name
    return layer


def format_host(model: nn.Module, name: str) -> FormatHost:
    layer = model.get_submodule(name)
    assert isinstance(layer, FormatHost), name
    return layer


def store_states(model: nn.Module, states: Mapping[str, Parts]) -> None:
    """Overwrite the state of the named layers: chosen grids, fitted branches."""
    for name, state in states.items():
        format_host(model, name).store_state(state)


def formats_of(model: nn.Module) -> dict[str, Format]:
    """{module name: Format} of every layer that is not dense, packed or not."""
    return {name: m.format for name, m in format_hosts(model) if not isinstance(m.format, Dense)}


def pack(model: nn.Module, *, dtype: torch.dtype = torch.float32) -> list[str]:
    """Replace the weight of every layer with a Format by its stored parts, in place; returns their names.

    `dtype` is the one the model computes in: the parts encode weight.to(dtype), which is what training multiplied with.
    """
    from torch.distributed.fsdp import FSDPModule

    if any(isinstance(m, FSDPModule) for m in model.modules()):
        raise UserError("A model under fully_shard cannot be packed in place: use packed_state(model) and save that.")
    names = []
    for name, module in format_hosts(model):
        if module.packed or isinstance(module.format, Dense):
            continue
        try:
            module.pack(dtype)
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
        names.append(name)
    return names


def packed_state(model: nn.Module, *, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The state_dict that `pack` would leave, without touching the model (sharded weights give sharded parts)."""
    state = {name: t.detach() for name, t in model.state_dict().items()}
    for name, module in format_hosts(model):
        if module.packed or isinstance(module.format, Dense):
            continue
        prefix = f"{name}.weight" if name else "weight"
        for old in (prefix, *(f"{prefix}_{n}" for n in module.state_names)):
            state.pop(old, None)
        state.update({f"{prefix}_{part}": t for part, t in module.encode(dtype).items()})
    return state


def keep_decoded(model: nn.Module, *, dtype: torch.dtype = torch.float32) -> None:
    """Keep a decoded copy of every packed weight: without a kernel (CPU), decoding would take most of every forward.
    Call it after loading; moving the model drops the copies."""
    for _, module in format_hosts(model):
        module.keep_decoded(dtype)


def use_kernels(model: nn.Module) -> list[str]:
    """Lay packed weights out for the kernels of their device, in place; the names of those that have one.

    `load_model` does this on a GPU. Values, state_dict and memory stay what they were.
    """
    return [name for name, module in format_hosts(model) if module.use_kernels()]


def unpack(model: nn.Module, *, dtype: torch.dtype = torch.float32) -> list[str]:
    """Replace packed layers by dense ones with the decoded weights, in place; returns their names."""
    names = []
    for name, module in format_hosts(model):
        if module.packed:
            module.unpack(dtype)
            names.append(name)
    return names


def allocate_packed(model: nn.Module, formats: dict[str, dict[str, Any]], dtype: torch.dtype = torch.float32) -> None:
    """Make the named layers packed, with uninitialised parts for load_state_dict to fill.

    `formats` is {module name: Format.to_json()}, as `{n: f.to_json() for n, f in formats_of(model).items()}` gives it.
    """
    modules = weight_modules(model)
    tied = tied_names(model)
    for name, data in formats.items():
        if name not in modules:
            raise UserError(f"The model has no linear layer or embedding {name!r}.{suggest(name, list(modules))}")
        if reason := obstacle(modules[name], name, tied):
            raise UserError(f"{name} cannot hold packed weights: {reason}.")
        format = from_json(data).stored()
        check_fits(name, modules[name], format)
        if not isinstance(format, Dense):
            to_format_host(modules[name]).allocate_packed(format, dtype)


def bits_per_parameter(model: nn.Module) -> float:
    """Stored bits over everything that can have a Format, embeddings and heads too; a dense weight counts in the dtype
    it has. `bits_per_weight` elsewhere is that of one Format, or of the linear layers that have one."""
    weights, bits = 0, 0.0
    for _, m in format_hosts(model):
        numel = m.shape[0] * m.shape[1]
        dtype = torch.bfloat16 if m.weight is None else m.weight.dtype
        weights, bits = weights + numel, bits + numel * m.format.bits_per_weight(m.shape, dtype)
    return bits / weights if weights else 0.0
