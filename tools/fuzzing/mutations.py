"""Small damage and hostile values for the fuzzer; all that is random comes from the generator given.

Bytes lose, gain, repeat and exchange pieces, and get numbers at which sizes overflow; JSON values and command lines get
others of the wrong kind or size at random places.
"""

import json
import random
from typing import Any

NUMBERS = (
    0,
    1,
    2,
    7,
    127,
    128,
    255,
    256,
    32767,
    65535,
    65536,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**62,
    2**63 - 1,
    2**64 - 1,
)
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 0.5, -0.0, 1e308, float("nan"), float("inf"), 10**20, 2**31, 10_000, "", "x", "0",
    "../../x", "/etc/passwd", "\x00", "\ud800", "a" * 300, "nan", [], {}, [[]], [0], [1, 2, 3], {"a": 1}, ["x"] * 50,
)  # fmt: skip
WORDS = (
    "", "-1", "0", "1e999", "nan", "inf", "99999999999999999999", "None", "True", "x", "../x", "~nobody/x", "/dev/null",
    "/dev/zero", "\udcff", "a" * 3000, "{", "[", "*", "**/*", "[!", "{000..999999999}", "--", "-", "--help", "--json",
    "{}", "[1,2", "0x10", "1,2", "224x0", "0x0", "-5x3", "12x", "\n", "é", "wds:", "folder:", "shapes?size=0",
    "shapes?classes=nothing", "idx:/", "shapes?a", "hf:", "--top", "--top=0", "--batch-size=0", "--workers=-1",
)  # fmt: skip


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """The data with one to four pieces of damage, more of it near the beginning, where headers are."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        _damage(rng, changed)
    return bytes(changed)


def _place(rng: random.Random, length: int) -> int:
    return rng.randrange(min(length, rng.choice((16, 64, 512, length)))) if length else 0


def _damage(rng: random.Random, data: bytearray) -> None:
    if not data:
        data += rng.randbytes(rng.randrange(1, 64))
        return
    place = _place(rng, len(data))
    end = min(len(data), place + rng.choice((1, 2, 4, 8, 16, 64, 512)))
    match rng.randrange(9):
        case 0:
            data[place] ^= 1 << rng.randrange(8)
        case 1:
            data[place] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        case 2:
            width = rng.choice((2, 4, 8))
            number = (rng.choice(NUMBERS) + rng.choice((-1, 0, 0, 1))) % 256**width
            data[place : place + width] = number.to_bytes(width, rng.choice(("little", "big")))
        case 3:
            del data[place:end]
        case 4:
            data[place:place] = data[place:end] * rng.choice((1, 2, 3, 30, 300))
        case 5:
            data[place:place] = rng.randbytes(rng.choice((1, 2, 4, 16, 100)))
        case 6:
            del data[rng.randrange(len(data)) :]
        case 7:
            data[place:end] = bytes(end - place)
        case _:
            other = _place(rng, len(data))
            piece = data[place:end]
            data[other : other + len(piece)] = piece


def mutate_json(rng: random.Random, text: bytes) -> bytes:
    """The JSON text with one to three values replaced, removed, renamed or scaled; now and then damaged as bytes."""
    if rng.random() < 0.1:
        return mutate_bytes(rng, text)
    if rng.random() < 0.01:
        return rng.choice((b"[", b'{"a":')) * 100_000
    value = json.loads(text)
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = list(_places(value))
        if not places:
            return json.dumps(rng.choice(VALUES)).encode()
        holder, key = rng.choice(places)
        _change(rng, holder, key)
    return json.dumps(value).encode()


def _places(value: Any) -> Any:
    """(holder, key or index) of every value within a value."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


def _change(rng: random.Random, holder: Any, key: Any) -> None:
    old = holder[key]
    match rng.randrange(6):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[rng.choice(("x", str(key) + "_", str(key).upper(), ""))] = holder.pop(key)
        case 2 if isinstance(old, (int, float)):
            try:
                holder[key] = rng.choice((old + 1, old - 1, -old, old * 2, old * 1000, old * 10**12, old / 2))
            except OverflowError:
                holder[key] = 0
        case 3 if isinstance(old, str):
            holder[key] = mutate_bytes(rng, old.encode("utf-8", "replace")).decode("utf-8", "replace")
        case 4 if isinstance(old, list) and old:
            holder[key] = rng.choice((old * 2, old[:-1], [old], [*old, rng.choice(VALUES)]))
        case _:
            holder[key] = json.loads(json.dumps(rng.choice(VALUES)))


def mutate_words(rng: random.Random, words: list[str]) -> list[str]:
    """A command line with one to three words replaced, added, removed, repeated or damaged. No word holds a zero byte:
    the system passes none."""
    changed = list(words)
    for _ in range(rng.choice((1, 1, 2, 3))):
        place = rng.randrange(len(changed) + 1)
        match rng.randrange(5):
            case 0:
                changed[place : place + 1] = [rng.choice(WORDS)]
            case 1:
                changed.insert(place, rng.choice(WORDS))
            case 2:
                del changed[place : place + 1]
            case 3:
                changed[place:place] = changed[place : place + 2]
            case _:
                text = "".join(changed[place : place + 1]).encode("utf-8", "surrogateescape")
                changed[place : place + 1] = [mutate_bytes(rng, text).decode("utf-8", "surrogateescape")]
    return [word.replace("\0", "") for word in changed]
