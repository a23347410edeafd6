"""Any image file becomes (h, w, 3) uint8 RGB."""

import numpy as np
import pytest
from PIL import Image

from softmoe.data import BrokenImage
from softmoe.data import decode as module
from softmoe.data.decode import decode


@pytest.fixture(params=["simplejpeg", "pillow"])
def either_decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Once with the fast decoder, if it is installed, and once without."""
    if request.param == "pillow":
        monkeypatch.setattr(module, "simplejpeg", None)
    elif module.simplejpeg is None:
        pytest.skip("simplejpeg is not installed")
    return request.param


@pytest.mark.parametrize("form", ["PNG", "TIFF", "WEBP", "BMP", "PPM"])
def test_lossless_formats_are_exact(form, picture, encoded):
    """What was saved comes back."""
    image = picture(1)
    options = {"lossless": True} if form == "WEBP" else {}
    assert np.array_equal(decode(encoded(image, form, **options), "x"), image)


def test_jpeg_is_close(picture, encoded, either_decoder):
    """Both decoders give the picture up to compression."""
    image = picture(2)
    result = decode(encoded(image, quality=95), "x")
    assert result.dtype == np.uint8
    assert np.abs(result.astype(int) - image).mean() < 4


def test_gray_and_one_bit(picture, encoded):
    """One channel becomes three equal ones."""
    gray = Image.fromarray(picture(3)).convert("L")
    for form, pil in (("PNG", gray), ("JPEG", gray), ("PNG", gray.convert("1")), ("TIFF", gray)):
        result = decode(encoded(pil, form), "x")
        assert result.shape == (24, 32, 3)
        assert np.array_equal(result[..., 0], result[..., 2])
    assert np.array_equal(decode(encoded(gray, "PNG"), "x")[..., 1], np.asarray(gray))


def test_cmyk(encoded, either_decoder):
    """CMYK is converted, not taken for four gray channels."""
    red = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    pixel = decode(encoded(red, "JPEG", quality=95), "x")[8, 8]
    assert pixel[0] > 200
    assert max(pixel[1:]) < 60


def test_palette_and_transparency(encoded):
    """A palette gives its colors; what is transparent shows white."""
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 10, 200, 30] + [0] * 30)
    assert decode(encoded(palette, "PNG"), "x")[0, 0].tolist() == [10, 200, 30]
    assert decode(encoded(palette, "PNG", transparency=1), "x")[0, 0].tolist() == [255, 255, 255]
    assert decode(encoded(palette, "GIF"), "x")[0, 0].tolist() == [10, 200, 30]
    half = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    assert decode(encoded(half, "PNG"), "x")[0, 0].tolist() == [255, 255, 255]
    gray_alpha = Image.new("LA", (4, 4), (90, 255))
    assert decode(encoded(gray_alpha, "PNG"), "x")[0, 0].tolist() == [90, 90, 90]


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_sixteen_bit(form, encoded):
    """16-bit gray is scaled to 8 bits, not clipped to white."""
    ramp = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    result = decode(encoded(Image.fromarray(ramp), form), "x")[..., 0]
    assert np.array_equal(result, ramp >> 8)


def test_wide_gray(encoded):
    """32-bit integers and floats keep their range."""
    wide = Image.fromarray(np.array([[0, 65535], [32768, 256]], dtype=np.int32))
    assert np.abs(decode(encoded(wide, "TIFF"), "x")[..., 0] - np.array([[0, 255], [127, 1]])).max() <= 1
    real = Image.fromarray(np.array([[0.0, 1.0], [0.5, 0.25]], dtype=np.float32))
    assert np.abs(decode(encoded(real, "TIFF"), "x")[..., 0] - np.array([[0, 255], [127, 63]])).max() <= 1


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
def test_exif_orientation(form, picture, encoded, either_decoder):
    """A photo taken with the camera on its side stands upright, also at reduced size."""
    image = picture(4, 64, 128)
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned by a quarter to the right
    options = {"quality": 95} if form == "JPEG" else {}
    data = encoded(image, form, exif=exif, **options)
    upright = np.rot90(image, -1)
    result = decode(data, "x")
    assert result.shape == upright.shape == (128, 64, 3)
    assert np.abs(result.astype(int) - upright).mean() < 4
    seen = []
    small = decode(data, "x", lambda h, w: seen.append((h, w)) or 32)
    assert seen == [(128, 64)]
    assert small.shape[0] == 2 * small.shape[1] >= 64


def test_orientation_late_in_the_file_and_in_xmp(picture, encoded, either_decoder):
    """Both decoders find the orientation behind a long color profile, and in XMP where there is no EXIF."""
    jpeg = encoded(picture(4, 32, 64))
    profile = b"\xff\xe2" + (5002).to_bytes(2) + bytes(5000)
    exif = Image.Exif()
    exif[0x0112] = 6
    xmp = b'http://ns.adobe.com/xap/1.0/\0<rdf:Description tiff:Orientation="6"/>'
    for note in (exif.tobytes(), xmp):
        segment = b"\xff\xe1" + (len(note) + 2).to_bytes(2) + note
        assert decode(jpeg[:2] + profile + segment + jpeg[2:], "x").shape == (64, 32, 3)


@pytest.mark.parametrize(
    ("side", "expected"), [(None, 160), (0, 160), (81, 160), (80, 80), (21, 40), (20, 20), (5, 20), (500, 160)]
)
def test_reduced_size(side, expected, picture, encoded, either_decoder):
    """The shorter side is the smallest eighth, quarter, half or whole that is not below what was asked for."""
    image = picture(5, 160, 240)
    result = decode(encoded(image, quality=90), "x", side)
    assert result.shape == (expected, expected * 3 // 2, 3)
    reference = Image.fromarray(image).resize(result.shape[1::-1], Image.Resampling.BOX)
    assert np.abs(result.astype(int) - np.asarray(reference)).mean() < 4


@pytest.mark.parametrize("side", [1, 21, 60, 81, 150, 160, 400])
def test_never_below_the_wanted_side(side, picture, encoded, either_decoder):
    """A reduced image still has the pixels that were asked for."""
    result = decode(encoded(picture(6, 160, 240)), "x", side)
    assert min(result.shape[:2]) >= min(side, 160)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_broken(form, picture, encoded, either_decoder):
    """Truncated, empty and foreign files are a BrokenImage with the file's name."""
    data = encoded(picture(7, 64, 64), form)
    for bad in (data[: len(data) // 2], data[:20], b"", b"not an image at all"):
        with pytest.raises(BrokenImage, match=r"cats/7\.jpg cannot be read") as caught:
            decode(bad, "cats/7.jpg")
        assert caught.value.name == "cats/7.jpg"
        assert caught.value.reason
