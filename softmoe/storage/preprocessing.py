"""The steps that turn an image into a saved model's input, as its config.json states them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from softmoe.storage.settings import check_keys

EVALUATION_CROPS = {"inception": "central", "pad_crop": "resize"}
"""The crops of evaluation that stand for those which training draws at random."""
MOST_SIDE = 1 << 14
MOST_PIXELS = 1 << 26


@dataclass(frozen=True)
class Preprocessing:
    """Size, crop and values of the images that a model is evaluated on."""

    image_size: tuple[int, int] = (224, 224)
    """Height and width."""
    crop: str = "central"
    """central: shorter side to central_ratio times the size, middle cut out; resize: the whole image, stretched."""
    central_ratio: float = 256 / 224
    antialias: bool = True
    value_range: tuple[float, float] = (-1.0, 1.0)
    """The values of black and white. Models of other ranges have the difference folded into their patch embedding."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_size", _pair(self.image_size))
        object.__setattr__(self, "value_range", tuple(self.value_range))
        if max(self.image_size) > MOST_SIDE or self.image_size[0] * self.image_size[1] > MOST_PIXELS:
            raise ValueError(f"preprocessing.image_size {list(self.image_size)} is more than can be worked on")
        if isinstance(self.central_ratio, bool) or not 1.0 <= self.central_ratio <= 100.0:  # also false for NaN
            raise ValueError(f"preprocessing.central_ratio is from 1 to 100, not {self.central_ratio!r}")
        if not isinstance(self.antialias, bool):
            raise ValueError(f"preprocessing.antialias is true or false, not {self.antialias!r}")
        if self.crop not in ("central", "resize"):
            raise ValueError(f"preprocessing.crop is central or resize, not {self.crop!r}")
        if self.value_range != (-1.0, 1.0):
            raise ValueError(f"preprocessing.value_range is always [-1, 1], not {list(self.value_range)}")

    @classmethod
    def of(cls, transform: Any) -> "Preprocessing":
        """Keep the evaluation part of a data transform's settings (softmoe.data.TransformConfig)."""
        drawn: str = transform.crop
        crop = EVALUATION_CROPS.get(drawn, drawn)
        return cls(_pair(transform.image_size), crop, transform.central_ratio, transform.antialias)


def parse_preprocessing(values: Mapping[str, Any], *, complete: bool = False) -> Preprocessing:
    """Read preprocessing from a table; one from a file must be `complete`, so that no default is guessed."""
    names = [f.name for f in fields(Preprocessing)]
    check_keys(values, names, "preprocessing.")
    for name in names if complete else names[:1]:
        if name not in values:
            raise ValueError(f"preprocessing.{name} is missing")
    try:
        return Preprocessing(**values)
    except TypeError as error:
        raise ValueError(f"preprocessing has a value of the wrong type ({error})") from error


def _pair(size: int | tuple[int, int] | list[int]) -> tuple[int, int]:
    pair = (size, size) if isinstance(size, int) else tuple(size)
    if len(pair) != 2 or not all(type(side) is int and side > 0 for side in pair):
        raise ValueError(f"image_size must be pixels or [height, width], not {size!r}")
    return pair[0], pair[1]
