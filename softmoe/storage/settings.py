"""Read settings from tables of plain values strictly: every key known, every value of the declared type."""

import dataclasses
import difflib
import reprlib
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_LARGEST = sys.float_info.max  # neither NaN nor infinity is a setting


def from_dict(cls: type, values: Any, path: str = "") -> Any:
    """Make a `cls` from a table. Missing keys take their defaults; an unknown key or a wrong type is a ValueError."""
    if not isinstance(values, dict):
        raise ValueError(f"{path or cls.__name__} must be a table of settings, got {reprlib.repr(values)}")
    hints = get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    check_keys(values, names, f"{path}." if path else "")
    return cls(**{key: convert(hints[key], value, _join(path, key)) for key, value in values.items()})


def convert(hint: Any, value: Any, path: str) -> Any:
    """Return the value as the type says, or raise a ValueError that names its place."""
    origin: Any = get_origin(hint)
    if origin in (Union, types.UnionType):
        tables = [member for member in get_args(hint) if dataclasses.is_dataclass(member)]
        if tables and isinstance(value, dict):  # so that the error is that of the key inside
            return convert(tables[0], value, path)
        for member in get_args(hint):
            try:
                return convert(member, value, path)
            except ValueError:
                continue
    elif dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return value if isinstance(value, hint) else from_dict(hint, value, path)
    elif origin is Literal:
        if value in get_args(hint):
            return value
    elif origin is tuple:
        if isinstance(value, list | tuple):
            return _convert_tuple(get_args(hint), value, path)
    elif origin is dict:
        if isinstance(value, dict):
            return dict(value)
    elif hint is types.NoneType:
        if value is None:
            return None
    elif hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST <= value <= _LARGEST:
            return float(value)
    elif type(value) is hint:  # exactly: True is not a number here
        return value
    raise ValueError(f"{path} must be {describe(hint)}, got {reprlib.repr(value)}")


def _convert_tuple(members: tuple, values: list | tuple, path: str) -> tuple:
    if len(members) == 2 and members[1] is Ellipsis:
        members = (members[0],) * len(values)
    if len(members) != len(values):
        raise ValueError(f"{path} must have {len(members)} values, got {len(values)}")
    return tuple(convert(member, value, path) for member, value in zip(members, values, strict=True))


def describe(hint: Any) -> str:
    """Say a type in words: `int or None`, `one of softmax, sigmoid`."""
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(describe(member) for member in get_args(hint))
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if hint is types.NoneType:
        return "None"
    return str(hint) if get_args(hint) else getattr(hint, "__name__", str(hint))


def flatten(values: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Turn {"data": {"train": x}} into {"data.train": x}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, _join(path, key)) if isinstance(value, dict) else {_join(path, key): value}
    return flat


def check_keys(values: Any, known: Iterable[str], path: str) -> None:
    """Raise ValueError unless `values` is a table of known keys alone; `path` is written before a key."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{path.rstrip('.') or 'it'} must be an object, not {reprlib.repr(values)}")
    names = dict.fromkeys(known)
    for key in values:
        if key not in names:
            word = str(key)[:100]  # the work grows with its square
            near = difflib.get_close_matches(word, names, n=1, cutoff=0.0)[0]
            raise ValueError(f"unknown key {path + word!r}, did you mean {path + near!r}?")


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)
