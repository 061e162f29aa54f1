"""Typed configs: dataclass defaults < one TOML file < `--section.key=value`. Knows no field by name.

Each room declares its own frozen dataclass with `option(default, "meaning", ...)` fields; settings.py puts
them together. Every mistake of a user raises `ConfigError`, which names key, value, limit and remedy.
"""

import dataclasses
import difflib
import errno
import json
import math
import os
import re
import stat
import textwrap
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

LONGEST = 10_000  # characters of a text
CONSOLE, MOST_KEY = 110, 44  # columns; of a key and its default, if its meaning is to begin where others begin


class Dataclass(Protocol):
    """An instance of any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field]]


T = TypeVar("T")
C = TypeVar("C", bound=Dataclass)
Name = TypeVar("Name", str, Path)


class ConfigError(ValueError):
    """A user's mistake: shown as one message without a traceback, exit code 2."""


def one_line(error: BaseException, most: int = 300) -> str:
    """Return an error's kind and text, of at most so many characters, for a message."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:most]


class Auto(int):
    """A number that the program chooses, where an option allows `auto`: below all that a user may give."""

    def __repr__(self) -> str:
        return '"auto"'  # as in TOML


AUTO = Auto(-1)


def regular(path: Name) -> Name:
    """Return the path of a regular file. Raises OSError: reading a pipe or a device might never end."""
    mode = Path(path).stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # the system's own message is good for folders
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path


def option(
    default: T,
    help: str,
    *,
    min: float | None = None,
    above: float | None = None,
    max: float | None = None,
    choices: Collection[str] | None = None,
    auto: bool = False,
) -> T:
    """Return a dataclass field with its meaning and limits. `min` and `max` are inclusive, `above` is not.

    `auto`: the field is a whole number of at least 0 that may be `AUTO` too.
    """
    limits = {"min": min, "above": above, "max": max, "choices": choices, "auto": auto}
    return dataclasses.field(default=default, metadata={"help": help, **limits})


def entry(default: str, about: str, table: Mapping[str, object]) -> str:
    """Return a field that names an entry of `table`, later entries included; `--help` shows their docstrings' heads."""
    heads = {name: (value.__doc__ or "").partition("\n")[0] for name, value in table.items()}
    said = "; ".join(f"{name}: {head.partition('. (')[0].rstrip('.')}" for name, head in heads.items())
    return option(default, f"{about} ({said})", choices=table)


def load_config(
    cls: type[C],
    source: str | Mapping[str, object] | None,
    overrides: Sequence[str] = (),
    without: Collection[str] = (),
) -> C:
    """Return a frozen `cls` from its defaults, a source and `--section.key=value` overrides.

    `source`: a TOML file, or a dict whose keys are sections or `section.key`. `without`: sections and keys of the file
    that are passed over.
    """
    config = cls()
    if isinstance(source, Mapping):
        given = set[str]()
        for key, value in source.items():
            config = _merge(config, values := _nested(str(key), value), source="")
            if twice := given & {*_keys(values)}:
                raise ConfigError(f"{min(twice)} is given twice; give it once")
            given |= {*_keys(values)}
    elif (path := source) is not None:
        config = _merge(config, _less(_read(path), without), source=f"{path}: ")
    for override in overrides:
        key, equals, text = override.removeprefix("--").partition("=")
        if not override.startswith("--") or not equals or not all(key.split(".")):
            is_file, file = override.endswith(".toml"), override.lstrip("-")
            right = f"--config {file}" if is_file else "--section.key=value or --config FILE.toml"
            raise ConfigError(f"{override!r} is not a setting; write {right} (--help lists every key)")
        config = _merge(config, _nested(key, _parse(text)), source="", raw=text)
    return config


def keys_in(path: str | None) -> set[str]:
    """Return the keys that a TOML file gives, as `section.key`; none without a file. Raises ConfigError."""
    return {*_keys(_read(path))} if path else set()


def _read(path: str) -> dict:
    try:
        return tomllib.loads(Path(regular(path)).read_text(encoding="utf-8-sig"))  # editors put a mark before
    except OSError as error:
        raise ConfigError(f"{path}: cannot read it ({error.strerror}); configs/ has examples") from None
    except (ValueError, RecursionError) as error:  # TOML, encoding, a number of thousands of digits
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def _less(values: Mapping, without: Collection[str], prefix: str = "") -> dict:
    return {
        name: _less(value, without, f"{prefix}{name}.") if isinstance(value, Mapping) else value
        for name, value in values.items()
        if prefix + name not in without
    }


def _nested(key: str, value: object) -> dict:
    section, _, name = key.rpartition(".")
    return _nested(section, {name: value}) if section else {name: value}


def _keys(values: Mapping, prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def _parse(text: str) -> object:
    """Read one override with TOML's own rules; a bare word is a string."""
    try:
        value = tomllib.loads(f"v = {text}")["v"]
        return text if isinstance(value, str) and text.rstrip()[-1] not in "\"'" else value  # not cut at a #
    except (ValueError, RecursionError, KeyError):
        return text


def _merge(config: C, values: Mapping, source: str, prefix: str = "", raw: str | None = None) -> C:
    fields: dict[str, dataclasses.Field] = {field.name: field for field in dataclasses.fields(config)}
    new: dict[str, object] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name not in fields:
            near = difflib.get_close_matches(str(name), fields, 1)
            known = f"did you mean {prefix}{near[0]}?" if near else f"known here: {', '.join(fields)}"
            raise ConfigError(f"{source}unknown key {key}; {known}")
        old = getattr(config, name)
        if dataclasses.is_dataclass(old) and not isinstance(old, type):
            if not isinstance(value, dict):
                raise ConfigError(f"{source}{key} is a section; set {key}.{dataclasses.fields(old)[0].name} or others")
            new[name] = _merge(old, value, source, f"{key}.", raw)
            continue
        if isinstance(old, str | tuple) and raw is not None and not isinstance(value, str | dict | list):
            value = raw  # --run.dir=7 names a folder
        if isinstance(old, tuple) and value == raw and value.startswith("["):
            raise ConfigError(
                f"{key} = {value[:60]} is not a list of texts; the shell removes quotes: write '--{key}=[\"END\"]'"
            )
        if isinstance(old, tuple) and isinstance(value, str | list):
            value = (value,) if isinstance(value, str) else tuple(value)  # --rollout.stop=END is a list of one
        default = fields[name].default if isinstance(old, Auto) else old  # a flag over a file's "auto"
        new[name] = _within(key, value, default, fields[name].metadata, source)
    return dataclasses.replace(config, **new)


def _within(key: str, value: object, old: object, limits: Mapping[str, Any], source: str) -> object:
    """Return `value` in the type of the default `old`. Raises ConfigError if the type or a limit forbids it."""
    if isinstance(old, float) and type(value) is int:
        try:
            value = float(value)
        except OverflowError:
            raise ConfigError(f"{source}{key} is too large for a floating-point number") from None
    if limits["auto"] and (value == "auto" or isinstance(value, Auto)):
        return AUTO
    if type(value) is not type(old):
        type_name = f"{type(old).__name__}{' or auto' * limits['auto']}"
        such = "true or false" if isinstance(old, bool) else f"such as {toml_text(old)}"
        raise ConfigError(f"{source}{key} = {value!r} has the wrong type: it must be {type_name}, {such}")
    if isinstance(value, tuple) and not all(isinstance(text, str) and text for text in value):
        raise ConfigError(f'{source}{key} = {list(value)!r} is not a list of texts, such as ["END"], none empty')
    texts = value if isinstance(value, tuple) else (value,) if isinstance(value, str) else ()
    if any("\0" in text or len(text) > LONGEST for text in texts):
        raise ConfigError(f"{source}{key} has a zero byte or over {LONGEST} characters; shorten or correct it")
    if any("\ud800" <= character <= "\udfff" for text in texts for character in text):
        raise ConfigError(f"{source}{key} = {value!r} is not UTF-8 text; write it in UTF-8")
    if key.rpartition(".")[2] not in ("template", "system", "stop"):  # the shell writes out a ~/ that stands alone
        texts = tuple(os.path.expanduser(text) if text.startswith("~/") else text for text in texts)
        value = texts if isinstance(value, tuple) else texts[0] if isinstance(value, str) else value
    low, above, high, choices = (limits[name] for name in ("min", "above", "max", "choices"))
    if choices is not None and value not in choices:
        raise ConfigError(f"{source}{key} = {value!r} is not one of: {', '.join(choices)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{source}{key} = {value} is not a finite number")
    number = value if isinstance(value, int | float) else 0  # others have no limits
    if low is not None and number < low:
        raise ConfigError(f"{source}{key} = {value} is too small: at least {low}")
    if above is not None and number <= above:
        raise ConfigError(f"{source}{key} = {value} is too small: more than {above}")
    if high is not None and number > high:
        raise ConfigError(f"{source}{key} = {value} is too large: at most {high}")
    return value


def check_options(config: Dataclass, section: str) -> None:
    """Raise ConfigError on values outside their limits, for configs that `load_config` has not made."""
    for field in dataclasses.fields(config):
        _within(f"{section}.{field.name}", getattr(config, field.name), field.default, field.metadata, "")


def flatten(config: Dataclass, prefix: str = "") -> dict[str, tuple[object, str]]:
    """Return {"section.key": (value, meaning)} for every key."""
    flat: dict[str, tuple[object, str]] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            flat |= flatten(value, f"{prefix}{field.name}.")
        else:
            flat[prefix + field.name] = (value, field.metadata["help"])
    return flat


def describe(config: Dataclass, section: str = "", is_short: bool = False) -> str:
    """Return the text of `--help`: each key, or each of a section, or one, with its default and its meaning.

    `is_short`: a key has one line of the console's width. Raises ConfigError for an unknown section.
    """
    rows = {f"--{key}={toml_text(value)}": help for key, (value, help) in flatten(config).items()}
    sections = list(dict.fromkeys(text[2:].partition(".")[0] for text in rows))
    if section and not any(text.startswith((f"--{section}.", f"--{section}=")) for text in rows):
        raise ConfigError(f"--help {section}: there is no such section; possible: {', '.join(sections)}")
    lines = []
    for name in [section] if section else sections:
        own = {text: help for text, help in rows.items() if text.startswith((f"--{name}.", f"--{name}="))}
        width = min(max(map(len, own)), MOST_KEY) + 2
        lines.append("")
        for text, help in own.items():
            room = CONSOLE - 2 - max(width, len(text) + 2)
            line = f"  {text:<{width - 2}}  {_cut(help, room) if is_short else help}"
            lines += textwrap.wrap(line, CONSOLE, subsequent_indent=" " * (width + 2), break_on_hyphens=False)
    return "\n".join(lines)


def _cut(text: str, room: int) -> str:
    """Return the first clauses of a text that fit, or as many words."""
    if len(text) <= room:
        return text
    ends = [match.start() for match in re.finditer(r"[;,] | \(", text[: room - 1])]
    whole = [text[:end] for end in ends if text[:end].count("(") == text[:end].count(")")]
    return f"{whole[-1]} …" if whole else textwrap.shorten(text, room, placeholder=" …")


def dump_toml(config: Dataclass) -> str:
    """Return the config as TOML that `load_config` reads back to the same value."""
    lines = []
    for field in dataclasses.fields(config):
        keys = flatten(getattr(config, field.name))
        lines += [f"[{field.name}]", *(f"{key} = {toml_text(value)}" for key, (value, _) in keys.items()), ""]
    return "\n".join(lines)


def toml_text(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml_text, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value).lower()  # true, false and numbers
