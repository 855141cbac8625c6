"""Where each option's value comes from: command line, environment, file or default."""

from __future__ import annotations

import argparse
import difflib
import os
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from eldr.serving import dropin
from eldr.serving.config import ConfigError, RouterConfig, options, without_password

ENV_PREFIX = "ELDR_SERVE_"
_CONFIG_ENV = ENV_PREFIX + "CONFIG"


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration and the origin of each of its values.

    Attributes:
        notes: what of the command line has no effect, and why.
    """

    config: RouterConfig
    origins: dict[str, str]
    notes: list[str]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for every option, in groups; a flag not given stays absent."""
    parser.add_argument("--config", metavar="FILE", help="TOML or JSON file with options")
    parser.add_argument(
        "--show-config",
        action="store_true",
        help="print every option's value and where it comes from, then exit",
    )
    parser.add_argument("--json", action="store_true", help="with --show-config: one JSON object")
    groups: dict[str, Any] = {}
    for name, option in options().items():
        group = option.metadata["group"]
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        _add(groups[group], name, _type(name), option)
    dropin.add_flags(parser)


def show(resolved: Resolved) -> dict[str, dict[str, Any]]:
    """Every option's value and origin; secrets only say that they are set."""
    out: dict[str, dict[str, Any]] = {}
    for name, option in options().items():
        value = getattr(resolved.config, name)
        if option.metadata["secret"]:
            value = "set" if value else "not set"
        elif name == "otel_endpoint":
            value = without_password(value)
        out[name] = {"value": value, "origin": resolved.origins[name]}
    return out


def _add(group: Any, name: str, kind: Any, option: Any) -> None:
    flag = "--" + name.replace("_", "-")
    settings: dict[str, Any] = {"default": argparse.SUPPRESS, "help": _help(option)}
    if kind is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **settings)
        return
    if kind == tuple[str, ...]:
        group.add_argument(flag, action="extend", nargs="+", metavar="VALUE", **settings)
        return
    if typing.get_origin(kind) is Literal:
        settings["choices"] = typing.get_args(kind)
    else:
        settings["metavar"] = {int: "N", float: "X"}.get(kind, name.upper())
        settings["type"] = kind
    group.add_argument(flag, **settings)


def _help(option: Any) -> str:
    text = str(option.metadata["help"]).replace("%", "%%")
    if option.default in ("", (), None) or option.metadata["secret"]:
        return text
    return f"{text} (default: {option.default})"


def resolve(args: argparse.Namespace, env: Mapping[str, str] | None = None) -> Resolved:
    """The configuration that command line, environment and file give together.

    Raises:
        ConfigError: unknown key, wrong type or range; names origin and key.
    """
    environment = os.environ if env is None else env
    path = getattr(args, "config", None) or environment.get(_CONFIG_ENV)
    given = dict(vars(args))
    translated, notes = dropin.translate(given)
    layers: list[tuple[str, dict[str, Any]]] = [
        ("flag", {n: v for n, v in {**given, **translated}.items() if n in options()}),
        ("environment", _from_environment(environment)),
        (f"file {path}", _from_file(path) if path else {}),
    ]
    values: dict[str, Any] = {}
    origins = dict.fromkeys(options(), "default")
    for origin, layer in reversed(layers):  # a value that is overridden must be right as well
        for name, value in layer.items():
            values[name] = _convert(name, value, origin, strict=origin.startswith("file"))
            origins[name] = origin
    return Resolved(RouterConfig(**values), origins, notes)


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in environment.items():
        if not key.startswith(ENV_PREFIX) or key == _CONFIG_ENV:
            continue
        name = key.removeprefix(ENV_PREFIX).lower()
        _known(name, f"environment variable {key}")
        many = _type(name) == tuple[str, ...]
        out[name] = value.replace(",", " ").split() if many else value
    return out


def _from_file(path: str) -> dict[str, Any]:
    decode = msgspec.json.decode if path.endswith(".json") else msgspec.toml.decode
    try:
        content = decode(Path(path).read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"config file {path}: expected a table of options")
    for name in content:
        _known(name, f"config file {path}: key {name!r}")
    return content


def _known(name: str, where: str) -> None:
    if name in options():
        return
    close = difflib.get_close_matches(name, options(), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"{where}: no such option{hint}")


def _convert(name: str, value: Any, origin: str, *, strict: bool) -> Any:
    kind = _type(name)
    try:
        return msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        shown = "a secret" if options()[name].metadata["secret"] else repr(value)
        raise ConfigError(f"{name} (from {origin}): {error}, got {shown}") from error


_TYPES = typing.get_type_hints(RouterConfig)


def _type(name: str) -> Any:
    return _TYPES[name]
