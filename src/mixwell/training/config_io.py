"""Config files: read with overrides, refused with messages for people, written out whole."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mixwell.training.config import Config, section_at
from mixwell.utils import files
from mixwell.utils.parsing import parse_toml, parse_yaml, shown
from mixwell.utils.regular_files import expand_user, read_regular


def read_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a config file.

    Args:
        path: a YAML file, or TOML by its suffix. Relative paths in it refer to its folder.
        overrides: ``key=value`` with dots in the key, the value as YAML has it.

    Raises:
        ValueError: with the key, the value that was got, and the values allowed, for everything that is wrong.
    """
    try:
        text = read_regular(path).decode("utf-8")
    except OSError as error:
        raise ValueError(
            f"cannot read the config {path} ({error.strerror}); `mixwell init` writes one to start from"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file in UTF-8 ({error})") from error
    language, parse = ("TOML", parse_toml) if path.suffix == ".toml" else ("YAML", parse_yaml)
    try:
        plain = parse(text)
    except ValueError as error:
        raise ValueError(f"{path} is not {language} that can be read: {error}") from error
    if not isinstance(plain, dict):
        raise ValueError(f"{path} must have keys such as domains and validation; got {shown(plain)}")
    plain = cast("dict[str, Any]", plain)
    for override in overrides:
        _override(plain, override)
    plain.setdefault("base", ".")
    if isinstance(plain["base"], str):
        plain["base"] = str(_resolved(path.parent / expand_user(plain["base"])))
    return validate_config(plain, where=str(path))


def validate_config(plain: Mapping[str, Any], *, where: str = "the config") -> Config:
    """Validate plain values; messages begin with ``where``.

    Raises:
        ValueError: with the key, the value that was got, and the values allowed, for everything that is wrong.
    """
    try:
        # Twice, so that a date or a path in `arguments` is the same text as in the file that is written.
        return Config.model_validate(Config.model_validate(plain).model_dump(mode="json"))
    except ValidationError as error:
        lines = _lines(error.errors(), plain)
    raise ValueError(
        f"{where}: " + (lines[0] if len(lines) == 1 else "".join(f"\n  - {line}" for line in lines))
    )


def write_config(config: Config, path: Path) -> None:
    """Write a config with all defaults filled in; :func:`read_config` reads it back."""
    files.write_atomically(
        path, yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=100)
    )


def differences(one: Config, other: Config, *, except_keys: Sequence[str] = ()) -> list[str]:
    """Return a phrase with key and both values for each setting that differs between two configs.

    Args:
        except_keys: keys at the top that may differ.
    """
    mine, theirs = (_flat(config.model_dump(mode="json")) for config in (one, other))
    return [
        f"{key} is {shown(mine.get(key))} here and {shown(theirs.get(key))} there"
        for key in mine | theirs
        if mine.get(key) != theirs.get(key) and key.split(".")[0] not in except_keys
    ]


def _flat(plain: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in plain.items():
        inside = cast("dict[str, Any]", value) if isinstance(value, dict) else None
        found |= _flat(inside, f"{before}{key}.") if inside else {before + key: value}
    return found


def _override(plain: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key.strip():
        raise ValueError(f"--set takes key=value, such as --set optimizer.lr=0.001; got {override!r}")
    try:
        parsed = parse_yaml(value) if value.strip() else value
    except ValueError as error:
        raise ValueError(f"--set {key}: the value is not YAML: {error}") from error
    *path, last = key.strip().split(".")
    here = plain
    for place, part in enumerate(path):
        inside = here.setdefault(part, {})
        if inside is None:  # everything in it is commented out
            inside = here[part] = {}
        elif isinstance(inside, str | list) and _is_data(path[: place + 1]):
            inside = here[part] = {"files": inside}  # a domain by its path
        elif isinstance(inside, bool) and path[0] == "loggers":
            inside = here[part] = {}  # a logger by its defaults
        if not isinstance(inside, dict):
            raise ValueError(f"--set {key}: {part} is {shown(inside)}, which has nothing inside")
        here = cast("dict[str, Any]", inside)
    here[last] = parsed


def _is_data(path: Sequence[str]) -> bool:
    """Whether a key is that of a domain, of the validation set or of the test set."""
    return path[0] in ("validation", "test") if len(path) == 1 else path[0] == "domains" and len(path) == 2


def _lines(errors: Sequence[ErrorDetails], plain: Mapping[str, Any]) -> list[str]:
    """One line for each key that is wrong; what the branches of a union allow is joined."""
    allowed: dict[str, list[str]] = {}
    values: dict[str, str] = {}
    lines: dict[str, str] = {}
    for error in errors:
        path = _keys(error, plain)
        key = ".".join(path)
        kind, context = error["type"], error.get("ctx") or {}
        if error["loc"][-1:] == ("[key]",):
            lines[key] = f"{key}: the name {shown(error['input'])} is not text; put it into quotes"
        elif kind == "extra_forbidden":
            lines[key] = f"{key} is not a setting{_nearest(path, plain)}"
        elif kind == "missing":
            lines[key] = f"{key} is missing"
        elif kind == "too_short":
            lines[key] = f"{key} must not be empty"
        elif kind == "value_error":
            lines[key] = f"{key}: {context['error']}" if key else str(context["error"])
        else:
            # pydantic says "Input should be ..."
            allowed.setdefault(key, []).append(error["msg"].removeprefix("Input should be "))
            values[key] = shown(error["input"])
            lines[key] = f"{key} must be {' or '.join(allowed[key])}, got {values[key]}"
    return list(lines.values())


def _keys(error: ErrorDetails, plain: Mapping[str, Any]) -> list[str]:
    """The place of an error as keys of the file, without the names of a union's branches."""
    here: Any = plain
    keys: list[str] = []
    for index, part in enumerate(error["loc"]):
        last = index == len(error["loc"]) - 1
        named = isinstance(here, Mapping) and part in here
        item = isinstance(here, list) and isinstance(part, int) and part < len(cast("list[Any]", here))
        if named or item or (last and error["type"] in ("missing", "extra_forbidden")):
            keys.append(str(part))
            here = cast("Any", here)[part] if named or item else None
    return keys


def _nearest(path: Sequence[str], plain: Mapping[str, Any]) -> str:
    """Suggest what an unknown key may have meant, or list the keys there are."""
    section = section_at(path[:-1], plain)
    if section is None:
        return ""
    known = list(section.model_fields)
    near = difflib.get_close_matches(path[-1], known, n=1)
    return f"; did you mean {near[0]}?" if near else f"; there are {', '.join(known)}"


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (ValueError, RuntimeError, OSError) as error:  # a NUL, or links that lead to themselves
        raise ValueError(f"base: {str(path)[:80]!r} is not a path ({error})") from error
