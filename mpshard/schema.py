"""From dataclass annotations to a checked configuration: types, ranges, errors with the nearest name, TOML both ways.

Knows nothing about this project's keys: a `Schema` is made from a frozen dataclass whose fields are sections, each a
frozen dataclass of keys declared with `key`. Types a key may have: bool, int, float, str, a ``Literal`` of strings,
``tuple[T, ...]``, ``tuple[T, T]``, and unions of these.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import tomllib
import types
import typing
from collections.abc import Callable
from dataclasses import Field
from typing import Any, Literal, NamedTuple


class ConfigError(ValueError):
    """What the user has to change, in one line whatever the names and values in it."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.encode("utf-8", "backslashreplace").decode().split()))


class Check(NamedTuple):
    """A condition on one value, and what to say of a value that breaks it: "must be at least 1"."""

    holds: Callable[[Any], bool]
    words: str


def at_least(low: float) -> Check:
    return Check(lambda value: value >= low, f"must be at least {low}")


def at_most(high: float) -> Check:
    return Check(lambda value: value <= high, f"must be at most {high}")


def key(default: Any, text: str, *checks: Check, needs: str = "") -> Any:
    """Declare a key.

    Parameters
    ----------
    default : its value when nobody sets it.
    text : what it is for, as ``--help`` prints it.
    checks : conditions beyond the annotated type.
    needs : ``"section.key=a|b"``: the key has no effect, and must keep its default, unless that other key is a or b.
    """
    return dataclasses.field(default=default, metadata={"text": text, "checks": checks, "needs": needs})


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The tables of a TOML file; `ConfigError` for a file that is missing, unreadable or wrong (with its line)."""
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(f"no configuration file {os.fspath(path)}; is the path right?") from None
    except OSError as error:
        raise ConfigError(f"cannot read {os.fspath(path)}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{os.fspath(path)} is not UTF-8 at byte {error.start}; is it a TOML file?") from None
    except ValueError as error:  # TOMLDecodeError, or an integer of more digits than Python converts
        raise ConfigError(f"{os.fspath(path)} is not valid TOML: {error}") from None


class Schema:
    """The keys of a configuration class. Keys are named in full, ``section.key``, throughout.

    Attributes
    ----------
    sections : section -> key -> (dataclass field, type).
    """

    def __init__(self, config_type: type) -> None:
        self.sections: dict[str, dict[str, tuple[Field[Any], Any]]] = {}
        for section, section_type in typing.get_type_hints(config_type).items():
            hints = typing.get_type_hints(section_type)
            # A key that is a Python keyword has a field with an underscore behind its name.
            fields = dataclasses.fields(section_type)
            self.sections[section] = {f.name.removesuffix("_"): (f, hints[f.name]) for f in fields}

    # --- in ---

    def settings(self, tables: dict[str, Any]) -> dict[str, Any]:
        """``{"optim": {"lr": 1}}`` to ``{"optim.lr": 1}``, refusing unknown names. Values are not yet checked."""
        settings = {}
        for section, values in tables.items():
            if section not in self.sections:
                raise self._unknown(section, is_section=isinstance(values, dict))
            if not isinstance(values, dict):
                raise ConfigError(f"{section}={show(values)} should be a section: write [{section}] above its keys")
            for name, value in values.items():
                self.lookup(f"{section}.{name}")
                settings[f"{section}.{name}"] = value
        return settings

    def parse_override(self, override: str) -> tuple[str, Any]:
        """``"section.key=value"`` to its name and value: TOML, else a bare string."""
        full_name, equals, text = (part.strip() for part in override.partition("="))
        if not equals:
            raise ConfigError(f"{override!a} is not an override; write section.key=value")
        _, hint = self.lookup(full_name)
        try:
            parsed = tomllib.loads(f"value = {text}")
            value = parsed["value"] if len(parsed) == 1 else text
        except ValueError:
            if text.startswith(("[", "{", '"', "'")):
                raise ConfigError(f"{full_name}={text} is not valid TOML; quote strings, close what is open") from None
            value = text
        # A key of strings takes what was typed: run.dir=2024 names a directory, not a number.
        hints = typing.get_args(hint) or (hint,)
        as_typed = str in hints and not isinstance(value, (str, list)) and type(value) not in hints
        return full_name, text if as_typed else value

    def checked(self, full_name: str, value: Any) -> Any:
        """`value` as the key's type (a list as a tuple, an int as a float) and in its range, or `ConfigError`."""
        field, hint = self.lookup(full_name)
        try:
            converted = _convert(value, hint)
        except TypeError as mismatch:
            raise ConfigError(f"{full_name}={show(value)} {mismatch}") from None
        for check in field.metadata["checks"]:
            if not check.holds(converted):
                raise ConfigError(f"{full_name}={show(value)} {check.words}")
        return converted

    def validate(self, config: Any) -> None:
        """Check every value's type and range, and that none is set without effect."""
        values = self.flat(config)
        for full_name, value in values.items():
            self.checked(full_name, value)
        for full_name, value in values.items():
            field, _ = self.lookup(full_name)
            if value != field.default and not _takes_effect(field, values):
                other = field.metadata["needs"].partition("=")[0]
                raise ConfigError(f"{full_name}={show(value)} has no effect with {other}={values[other]}; remove it")

    # --- out ---

    def flat(self, config: Any) -> dict[str, Any]:
        """``{"section.key": value}`` of every key, in the order of declaration."""
        return {f"{s}.{name}": getattr(getattr(config, s), field.name)
                for s, keys in self.sections.items() for name, (field, _) in keys.items()}

    def to_toml(self, config: Any) -> str:
        """TOML of all keys that have an effect."""
        values = self.flat(config)
        blocks = []
        for section, keys in self.sections.items():
            lines = [f"[{section}]"]
            for name, (field, _) in keys.items():
                value = values[f"{section}.{name}"]
                if value != field.default or _takes_effect(field, values):
                    lines.append(f"{name} = {_toml(value)}")
            blocks.append("\n".join(lines) + "\n")
        return "\n".join(blocks)

    def describe(self) -> list[tuple[str, str, str, str]]:
        """(section.key, type, default, text) of every key."""
        rows = []
        for section, keys in self.sections.items():
            for name, (field, hint) in keys.items():
                needs = field.metadata["needs"]
                text = field.metadata["text"] + (f" (only with {needs})" if needs else "")
                rows.append((f"{section}.{name}", _words(hint), _toml(field.default), text))
        return rows

    # --- names ---

    def lookup(self, full_name: str) -> tuple[Field[Any], Any]:
        """(dataclass field, type) of a key, or `ConfigError` with the nearest name."""
        section, _, name = full_name.partition(".")
        found = self.sections.get(section, {}).get(name)
        if found is None:
            raise self._unknown(full_name, is_section=bool(name) and section not in self.sections)
        return found

    def _unknown(self, full_name: str, is_section: bool) -> ConfigError:
        section, _, name = full_name.partition(".")
        everywhere = {k: f"{s}.{k}" for s, keys in self.sections.items() for k in keys}
        if is_section:
            if nearest := difflib.get_close_matches(section, self.sections, 1):
                return ConfigError(f"unknown section {section}; did you mean {nearest[0]}?")
            return ConfigError(f"unknown section {section}; there are {', '.join(self.sections)}")
        if section in self.sections and not name:
            return ConfigError(f"{section} is a section; write {section}.key=value")
        if nearest := difflib.get_close_matches(name, self.sections.get(section, ()), 1):
            return ConfigError(f"unknown key {full_name}; did you mean {section}.{nearest[0]}?")
        if nearest := difflib.get_close_matches(name or section, everywhere, 1):  # right key, wrong section or none
            return ConfigError(f"unknown key {full_name}; did you mean {everywhere[nearest[0]]}?")
        if section in self.sections:
            return ConfigError(f"unknown key {full_name}; [{section}] has {', '.join(self.sections[section])}")
        return ConfigError(f"unknown key {full_name}; write section.key, section one of {', '.join(self.sections)}")


def _takes_effect(field: Field[Any], values: dict[str, Any]) -> bool:
    other, _, accepted = field.metadata["needs"].partition("=")
    return not other or _toml(values[other]).strip('"') in accepted.split("|")


def _convert(value: Any, hint: Any) -> Any:
    """`value` as `hint`; `TypeError` says what it is instead. Strict: a bool is no int, nan is no float."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal and isinstance(value, str):
        if value in args:
            return value
        nearest = difflib.get_close_matches(value, args, 1)
        raise TypeError(f"is unknown; did you mean {nearest[0]}?" if nearest else f"is unknown; use {_words(hint)}")
    if origin in (types.UnionType, typing.Union):
        fitting = [arg for arg in args if isinstance(value, (list, tuple)) == (typing.get_origin(arg) is tuple)]
        for arg in fitting if len(fitting) == 1 else [arg for arg in fitting if type(value) is arg]:
            return _convert(value, arg)
    if origin is tuple and isinstance(value, (list, tuple)):
        element_types = [args[0]] * len(value) if args[1:] == (...,) else list(args)
        if len(element_types) == len(value):
            return tuple(_convert(item, element) for item, element in zip(value, element_types, strict=True))
        raise TypeError(f"has {len(value)} elements; needed: {_words(hint)}")
    if hint is float and type(value) in (int, float):
        if not abs(value) <= 1.7e308:  # nan, too, and integers that no float holds
            raise TypeError("is not a finite number")
        return float(value)
    if hint is int and type(value) is int and not -(2**63) <= value < 2**63:
        raise TypeError("does not fit 64 bits")
    if hint is str and isinstance(value, str) and not _is_unicode(value):
        raise TypeError("is not valid Unicode")
    if type(value) is hint:
        return value
    raise TypeError(f"is {_kind(value)}; needed: {_words(hint)}")


def _is_unicode(text: str) -> bool:
    """False for lone surrogates (what Python makes of undecodable arguments), which no TOML file can hold."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):  # JSON's escapes are TOML's too, except that TOML wants DEL escaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return repr(value)


def show(value: Any) -> str:
    """A value in an error: as it would be written, and not too long."""
    text = _toml(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _kind(value: Any) -> str:
    if isinstance(value, float):
        return "a number with a point" if math.isfinite(value) else "not finite"
    kinds = {bool: "a boolean", int: "an integer", str: "a string", list: "a list", tuple: "a list", dict: "a table"}
    return kinds.get(type(value), f"a {type(value).__name__}")


def _words(hint: Any) -> str:
    """A type as the user reads it."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "|".join(args)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_words(arg) for arg in args)
    if origin is tuple:
        length = "" if args[1:] == (...,) else f"{len(args)} "
        return f"list of {length}{_words(args[0])}s"
    return {bool: "true|false", int: "integer", float: "number", str: "string"}[hint]
