"""Configs are frozen dataclasses; the command line sets their fields with `key=value`.

A recipe declares `Config` with `option(default, "what it does")` fields; `apply_overrides(Config,
["steps=20", "mesh.dp=2"])` builds it. Types come from the annotations, nested dataclasses are reached with
dots. An unknown key, a value of the wrong type or below the option's `least`, a key given twice and a missing
required key are each a UserError that says what to write.

`read_settings(file)` gives the same strings from a YAML file, so that a file is checked like a command line.

Left out on purpose: interpolation, includes, anchors. A variant of a recipe is a Python file that
calls `dataclasses.replace`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from shoestring.errors import UserError, shown, suggest
from shoestring.json_files import read_text

T = TypeVar("T")
MOST_SETTINGS = 1 << 16  # bytes of a file with settings
REQUIRED = "(required)"  # in the place of a default
_FOLDERS = ("run", "resume")  # listed behind the settings that say what is made
_MISSING: Any = dataclasses.MISSING


def option(
    default: Any = _MISSING,
    help: str | None = None,
    *,
    least: float | None = None,
    advanced: bool | None = None,
    deciding: bool | None = None,
    envvar: str | None = None,
    metavar: str | None = None,
) -> Any:
    """A dataclass field with a help text; without a default the key must be given. `least`: of a number. `advanced`:
    most users leave it as it is, so it is listed behind the others. `deciding`: whether what a stopped run has done
    depends on it, so that a resumed run may not change it. `envvar`, `metavar`: of an option of a verb
    (cli/options.py), the variable that also gives it, and the word for its value.

    An option that a base class has already needs only what differs: `batch: int = option(128)` keeps its text.
    """
    about = {
        "help": help,
        "least": least,
        "advanced": advanced,
        "deciding": deciding,
        "envvar": envvar,
        "metavar": metavar,
    }
    about = {key: value for key, value in about.items() if value is not None}
    if dataclasses.is_dataclass(default) and not isinstance(default, type):
        return dataclasses.field(default_factory=lambda: default, metadata=about)
    return dataclasses.field(default=default, metadata=about)


class Option(NamedTuple):
    """One settable key, as `shoestring recipes NAME` lists it."""

    key: str
    type: str
    default: str
    help: str
    advanced: bool = False


class Retired(NamedTuple):
    """A setting that is gone, or with the name KEY=VALUE one of its values, in the class variable RETIRED of the config
    that had it; old run folders name it."""

    unused: Any  # the value with which it did nothing
    instead: str  # what holds now


def apply_overrides(cls: type[T], overrides: list[str], start: T | None = None) -> T:
    """Build `cls` from its defaults (or from `start`) and `key=value` strings."""
    given: dict[str, str] = {}
    keys = _keys(cls)
    for item in overrides:
        key, equals, value = item.partition("=")
        if not equals:
            hint = "" if item in keys else suggest(item, keys)
            raise UserError(f"{shown(item)} is not key=value; write for example steps=100.{hint}")
        if key in given:
            raise UserError(f"{shown(key)} is given twice ({shown(given[key])} and {shown(value)}); give it once")
        given[key] = value
    unknown = [k for k in given if k not in keys]
    if unknown:
        raise UserError(_unknown(cls, unknown[0]))
    retired = _retired(cls)
    for key, value in given.items():
        if (gone := retired.get(f"{key}={value}")) is not None:
            raise UserError(f"{key}={value} is retired: {gone.instead}")
    return _build(cls, given, prefix="", start=_MISSING if start is None else start)


def with_settings(path: Path, overrides: Sequence[str]) -> list[str]:
    """The settings of a file, and those of the command line, which win."""
    given = {item.partition("=")[0] for item in overrides}
    return [*(item for item in read_settings(path) if item.partition("=")[0] not in given), *overrides]


def read_settings(path: Path) -> list[str]:
    """`key=value` of every setting in a YAML file; groups are nested or dotted, several values are a list.

    Every scalar stays the text that it is in the file, so that 1e-3, none and yes mean what they mean on the command
    line. Tags are ignored and nothing is constructed; aliases, which can make a small file large, are refused."""
    import yaml

    class Loader(yaml.BaseLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise UserError(
                    f"{path}, line {self.peek_event().start_mark.line + 1}: write the value out, not *alias"
                )
            return super().compose_node(parent, index)

    text = read_text(path, MOST_SETTINGS)
    try:
        root = yaml.compose(text, Loader=Loader)
        return [] if root is None else list(_pairs(root, str(path), ""))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f", line {mark.line + 1}"
        raise UserError(
            f"{path}{where} is not YAML: {error.problem or error.context}; write lines as key: value"
        ) from None
    except (yaml.YAMLError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0]
        raise UserError(f"{path} is not YAML: {reason}; write lines as key: value") from None


def _pairs(node: Any, path: str, prefix: str) -> Iterator[str]:
    if node.id != "mapping":
        raise UserError(f"{_line(node, path)}: settings are lines of key: value, not a {node.id}")
    seen: set[str] = set()
    for key_node, value in node.value:
        where = _line(key_node, path)
        if key_node.id != "scalar" or "=" in key_node.value or not key_node.value:
            raise UserError(f"{where}: the name of a setting is a word, as `shoestring recipes NAME` lists them")
        key = prefix + key_node.value
        if key in seen:
            raise UserError(f"{where}: {shown(key)} is given twice; give it once")
        seen.add(key)
        if value.id == "mapping":
            yield from _pairs(value, path, key + ".")
        elif value.id == "scalar":
            yield f"{key}={'none' if value.value == '~' and value.style is None else value.value}"
        elif all(item.id == "scalar" and "," not in item.value for item in value.value):
            yield f"{key}={','.join(item.value for item in value.value)}"
        else:
            raise UserError(f"{where}: {shown(key)} is a list of words or numbers, without commas in them")


def _line(node: Any, path: str) -> str:
    return f"{path}, line {node.start_mark.line + 1}"


def to_json(cfg: Any) -> Any:
    """A config as plain JSON values: dicts, lists, numbers, strings, None."""
    if dataclasses.is_dataclass(cfg) and not isinstance(cfg, type):
        return {f.name: to_json(getattr(cfg, f.name)) for f in dataclasses.fields(cfg)}
    if isinstance(cfg, tuple | list):
        return [to_json(v) for v in cfg]
    if isinstance(cfg, dict):
        return {str(k): to_json(v) for k, v in cfg.items()}
    return str(cfg) if isinstance(cfg, Path) else cfg


def config_record(recipe: str, cfg: Any, **instead: Any) -> dict[str, Any]:
    """What config.json says of a recipe's settings: their values (`instead` of some), and which were changed."""
    values = {**to_json(cfg), **instead}
    usual = {row.key: row.default for row in describe(type(cfg))}
    given = {row.key: row.default for row in describe(type(cfg), cfg)}
    # The folder of a run is no choice that makes another model.
    changed = [key for key in given if given[key] != usual[key] and key not in ("run", "resume", "resume_from")]
    return {"recipe": recipe, "config": values, "changed": changed}


def from_json(cls: type[T], values: dict[str, Any]) -> T:
    """The inverse of `to_json`: typed and ranged as on the command line; missing keys take the default."""
    hints, built, retired = typing.get_type_hints(cls), {}, _retired(cls)
    fields = {f.name: f for f in dataclasses.fields(_as_dataclass(cls))}
    for key, value in values.items():
        if key in retired:
            if value != retired[key].unused:
                raise UserError(
                    f"{key}={shown(value)} in the saved config.json is retired: {retired[key].instead}; delete it there"
                )
            continue
        if key not in fields:
            raise UserError(_unknown(cls, key))
        if (gone := retired.get(f"{key}={value}")) is not None:
            raise UserError(f"{key}={value} in the saved config.json is retired: {gone.instead}; change it there")
        built[key] = _typed(hints[key], value, key)
        _check_least(cls, fields[key], built[key], key)
    for key, f in fields.items():
        if key not in built and _default(f) is _MISSING:
            raise UserError(f"the saved config has no {shown(key)}; it is damaged, start a new run")
    return cls(**built)


def describe(cls: type, start: Any = _MISSING) -> list[Option]:
    """Every key of a config class, nested ones dotted: first those that must be given, then those of every day (the
    run's folder last), then the advanced ones, then the groups; each part in the order of declaration, bases before the
    class."""
    hints, rows = typing.get_type_hints(cls), []
    for f in dataclasses.fields(_as_dataclass(cls)):
        hint, default, about = (
            hints[f.name],
            _default(f) if start is _MISSING else getattr(start, f.name),
            about_option(cls, f),
        )
        if dataclasses.is_dataclass(hint):
            nested = describe(typing.cast(type, hint), default)
            rows += [
                row._replace(key=f"{f.name}.{row.key}", help=row.help or about.help, advanced=True) for row in nested
            ]
        else:
            rows.append(Option(f.name, type_name(hint), _show(default), about.help, about.advanced))
    return sorted(rows, key=lambda row: (row.default != REQUIRED, row.advanced, "." in row.key, row.key in _FOLDERS))


def deciding(cls: type, *, unless_said: bool = True) -> dict[str, Any]:
    """The settings that a resumed run may not change, with their defaults; `unless_said`: whether those without the
    flag are among them."""
    flags = ((f, about_option(cls, f).deciding) for f in dataclasses.fields(_as_dataclass(cls)))
    found = {f.name: _default(f) for f, said in flags if (unless_said if said is None else said)}
    return {name: None if default is _MISSING else to_json(default) for name, default in found.items()}


def type_name(hint: Any) -> str:
    """How a type is named to a user: 'int', 'a or b', 'float or none'."""
    if typing.get_origin(hint) is Literal:
        return " | ".join(str(a) for a in typing.get_args(hint))
    if _is_union(hint):
        return " | ".join("none" if a is type(None) else type_name(a) for a in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return f"{type_name(typing.get_args(hint)[0])},..."
    return {str: "text", Path: "path", bool: "true | false"}.get(hint, getattr(hint, "__name__", str(hint)))


def parse_value(hint: Any, text: str, key: str = "value") -> Any:
    """`text` as a value of the annotated type."""
    optional = _is_union(hint) and type(None) in typing.get_args(hint)
    if text == "" and (optional or hint in (str, Path)):  # resume=$RUN with a RUN that is not set
        raise UserError(f"{key}= is empty; give a value{', or none to unset it' if optional else ''}")
    if _is_union(hint):
        if optional and text.lower() in ("none", "null"):
            return None
        for one in typing.get_args(hint):
            if one is not type(None):
                with contextlib.suppress(UserError):
                    return parse_value(one, text, key)
        raise UserError(f"{key}={shown(text)} is not a value of type {type_name(hint)}")
    if typing.get_origin(hint) is Literal:
        allowed = {str(a): a for a in typing.get_args(hint)}
        if text not in allowed:
            raise UserError(f"{key}={shown(text)}: allowed are {', '.join(allowed)}.{suggest(text, list(allowed))}")
        return allowed[text]
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        return tuple(parse_value(item, part.strip(), key) for part in text.split(",") if part.strip())
    if hint not in _PARSERS:
        raise UserError(
            f"{key} is of a type ({type_name(hint)}) that key=value cannot set; make it int, float, bool, str, Path, a "
            "Literal, a tuple of one of them, or one of them | None"
        )
    try:
        return _PARSERS[hint](text)
    except ValueError:
        example = {int: "; write for example 2000", float: "; write for example 1e-3", bool: "; write for example true"}
        raise UserError(
            f"{key}={shown(text)} is not a value of type {type_name(hint)}{example.get(hint, '')}"
        ) from None


# -- parsing ---------------------------------------------------------------------------------------


def _parse_int(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        value = float(text)  # 1e4 is how people write ten thousand
        if not value.is_integer():
            raise
        number = int(value)
    if abs(number) >= 2**63:  # torch and numpy have no larger ones
        raise ValueError(text)
    return number


def _parse_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):  # no setting means anything with it; what is off has none or 0
        raise ValueError(text)
    return number


def _parse_bool(text: str) -> bool:
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    if text.lower() not in words:
        raise ValueError(text)
    return words[text.lower()]


_PARSERS: dict[Any, Any] = {int: _parse_int, float: _parse_float, bool: _parse_bool, str: str, Path: Path}


# -- building --------------------------------------------------------------------------------------


def _build(cls: Any, given: dict[str, str], prefix: str, start: Any = _MISSING) -> Any:
    """`cls` with the given keys set, the rest from `start` where there is one, else from the defaults."""
    hints, values = typing.get_type_hints(cls), {}
    for f in dataclasses.fields(cls):
        key, hint = prefix + f.name, hints[f.name]
        default = _default(f) if start is _MISSING else getattr(start, f.name)
        if dataclasses.is_dataclass(hint):
            values[f.name] = _build(hint, given, key + ".", default)
        elif key in given:
            values[f.name] = parse_value(hint, given[key], key)
            _check_least(cls, f, values[f.name], key)
        elif default is _MISSING:
            text = about_option(cls, f).help
            raise UserError(f"{key}=... is required{f' ({text})' if text else ''}; add it to the command")
        else:
            values[f.name] = default
    return cls(**values)


def _check_least(cls: type, f: dataclasses.Field[Any], value: Any, key: str) -> None:
    least = about_option(cls, f).least
    if least is not None and value is not None and value < least:
        raise UserError(f"{key}={shown(value)} is not possible; give {least:g} or more")


def _typed(hint: Any, value: Any, key: str) -> Any:
    """A JSON value as one of the annotated type."""
    wrong = UserError(f"{key}={shown(value)} is not a value of type {type_name(hint)}; correct the saved config.json")
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise wrong
        return from_json(typing.cast(type, hint), value)
    if _is_union(hint):
        for one in typing.get_args(hint):
            with contextlib.suppress(UserError):
                return _typed(one, value, key)
        raise wrong
    if typing.get_origin(hint) is Literal:
        found = [a for a in typing.get_args(hint) if type(a) is type(value) and a == value]
        if not found:
            raise wrong
        return found[0]
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise wrong
        return tuple(_typed(typing.get_args(hint)[0], v, key) for v in value)
    kinds: dict[Any, tuple[type, ...]] = {float: (float, int), Path: (str,)}
    if type(value) not in kinds.get(hint, (hint,)) or (isinstance(value, float) and not math.isfinite(value)):
        raise wrong
    return hint(value) if hint in (float, Path) else value


def _keys(cls: type) -> list[str]:
    return [row.key for row in describe(cls)]


def _retired(cls: type) -> dict[str, Retired]:
    """Those of the bases, and dotted those of the groups."""
    found = {key: about for base in cls.__mro__ for key, about in vars(base).get("RETIRED", {}).items()}
    hints = typing.get_type_hints(cls).items()
    groups = {name: typing.cast(type, hint) for name, hint in hints if dataclasses.is_dataclass(hint)}
    nested = ((f"{name}.{key}", about) for name, hint in groups.items() for key, about in _retired(hint).items())
    return {**found, **dict(nested)}


def _unknown(cls: type, key: str) -> str:
    if (gone := _retired(cls).get(key)) is not None:
        return f"the setting {key} is retired: {gone.instead}; leave it out"
    keys = _keys(cls)
    nested = [k for k in keys if k.startswith(key + ".")]
    if nested:
        return f"{shown(key)} is a group of settings; set one of {', '.join(nested)}"
    hint = suggest(key, keys) or f" Known are {', '.join(keys)}."
    return f"unknown setting {shown(key)}.{hint}"


def _as_dataclass(cls: Any) -> Any:
    assert dataclasses.is_dataclass(cls), f"{cls!r} is not a dataclass"
    return cls


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _default(f: dataclasses.Field[Any]) -> Any:
    factory: Any = f.default_factory
    return f.default if factory is _MISSING else factory()


class AboutOption(NamedTuple):
    """What the declarations of an option say."""

    help: str = ""
    least: float | None = None
    advanced: bool = False
    deciding: bool | None = None
    envvar: str | None = None
    metavar: str | None = None


def about_option(cls: type, f: dataclasses.Field[Any]) -> AboutOption:
    """Bases first: what a class does not say of an option holds as its bases have it."""
    said: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if (declared := vars(base).get("__dataclass_fields__", {}).get(f.name)) is not None:
            said |= declared.metadata
    return AboutOption(**said)


def _show(value: Any) -> str:
    if value is _MISSING:
        return REQUIRED
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value)
