"""Dictionaries <-> frozen dataclasses: every key known, every value of the declared type."""

import dataclasses
import difflib
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def to_dict(config: Any) -> dict[str, Any]:
    return dataclasses.asdict(config)


def from_dict(cls: type, values: Any, path: str = "") -> Any:
    """An instance of `cls`. Missing keys take their defaults; an unknown key or a wrong type is a ValueError."""
    if not isinstance(values, dict):
        raise ValueError(f"{path or cls.__name__} must be a table of settings, got {values!r}")
    hints = get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    for key in values:
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1, cutoff=0.0)[0]
            raise ValueError(f"unknown key {_join(path, key)!r}, did you mean {_join(path, near)!r}?")
    return cls(**{key: convert(hints[key], value, _join(path, key)) for key, value in values.items()})


def convert(hint: Any, value: Any, path: str) -> Any:
    """The value as the type says, or a ValueError that names its place."""
    origin: Any = get_origin(hint)
    if origin in (Union, types.UnionType):
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
    elif hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    elif type(value) is hint:  # exactly: True is not a number here
        return value
    raise ValueError(f"{path} must be {describe(hint)}, got {value!r}")


def _convert_tuple(members: tuple, values: list | tuple, path: str) -> tuple:
    if len(members) == 2 and members[1] is Ellipsis:
        members = (members[0],) * len(values)
    if len(members) != len(values):
        raise ValueError(f"{path} must have {len(members)} values, got {len(values)}")
    return tuple(convert(member, value, path) for member, value in zip(members, values, strict=True))


def describe(hint: Any) -> str:
    """A type as a sentence can say it: `int or None`, `one of softmax, sigmoid`."""
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(describe(member) for member in get_args(hint))
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if hint is types.NoneType:
        return "None"
    return str(hint) if get_args(hint) else getattr(hint, "__name__", str(hint))


def flatten(values: dict[str, Any], path: str = "") -> dict[str, Any]:
    """{"data": {"train": x}} -> {"data.train": x}"""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, _join(path, key)) if isinstance(value, dict) else {_join(path, key): value}
    return flat


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)
