"""Write pages that open from disk, with no server and no network: templates filled in, pictures inside the page."""

import base64
import io
from importlib.resources import files
from typing import Any

import jinja2
from PIL import Image

from softmoe import __version__


def render(room: str, template: str, **values: Any) -> str:
    """Fill in a template of the package `room`. Values are escaped: names and texts in them may be a stranger's."""
    text = files(room).joinpath(template).read_text(encoding="utf-8")
    return jinja2.Environment(autoescape=True).from_string(text).render(version=__version__, **values)


def data_address(content: bytes, kind: str = "image/png") -> str:
    """Return a file as an address that holds the file itself."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def thumbnail(pixels: Any, side: int, *, keep_pixels: bool = False) -> str:
    """Return a small copy of an image as the data address of a JPEG.

    With `keep_pixels` a tiny image becomes a PNG, whose pixels are shown as they are.
    """
    small = Image.fromarray(pixels)
    small.thumbnail((side, side))
    buffer = io.BytesIO()
    if keep_pixels and max(small.size) < 96:
        small.save(buffer, "PNG", optimize=True)
        return data_address(buffer.getvalue())
    small.save(buffer, "JPEG", quality=85)
    return data_address(buffer.getvalue(), "image/jpeg")
