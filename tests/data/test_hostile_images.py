"""Images made to hurt: what they may cost is bounded before a decoder sees them, and the reason names no machine."""

import io
import os
import socket
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from softmoe.data import BrokenImage, open_source
from softmoe.data import decode as module
from softmoe.data.decode import MAX_BLOCKS, MAX_CHUNKS, MAX_SCANS, MAX_SEGMENTS, decode

EPS = b"""%!PS-Adobe-3.0 EPSF-3.0
%%BoundingBox: 0 0 10 10
%%EndComments
(%%pipe%touch /tmp/pwned) (w) file
showpage
%%EOF
"""


def refused(data: bytes, *words: str, **options) -> str:
    with pytest.raises(BrokenImage) as caught:
        decode(data, "x", **options)
    reason = caught.value.reason
    assert "\n" not in reason
    assert "/" not in reason
    for word in words:
        assert word in reason, reason
    return reason


def segment(marker: int, body: bytes) -> bytes:
    return bytes([0xFF, marker]) + (len(body) + 2).to_bytes(2) + body


def with_exif(jpeg: bytes) -> bytes:
    """Return a JPEG with an EXIF segment added, so that Pillow decodes it."""
    return jpeg[:2] + segment(0xE1, b"Exif\0\0") + jpeg[2:]


def resized(jpeg: bytes, height: int, width: int) -> bytes:
    """The same JPEG with another size in its frame header."""
    place = next(i for i in range(len(jpeg) - 1) if jpeg[i] == 0xFF and jpeg[i + 1] in (0xC0, 0xC2))
    return jpeg[: place + 5] + struct.pack(">HH", height, width) + jpeg[place + 9 :]


def many_scans(jpeg: bytes, count: int) -> bytes:
    """A progressive JPEG whose last scan is repeated."""
    place = jpeg.rindex(b"\xff\xda")
    return jpeg[:place] + jpeg[place:-2] * count + jpeg[-2:]


def test_no_format_that_needs_another_program(monkeypatch):
    """PostScript under any name is refused without Ghostscript being looked for."""
    from PIL import EpsImagePlugin

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: pytest.fail("Ghostscript was called"))
    refused(EPS, "known format")


@pytest.mark.parametrize("form", ["ICO", "PCX", "TGA", "SGI", "JPEG2000", "ICNS", "DDS", "AVIF", "PDF"])
def test_only_the_formats_that_are_named(form, encoded, picture):
    """What Pillow could open besides is no image here."""
    try:
        data = encoded(picture(1, 32, 32), form)
    except (KeyError, OSError):
        pytest.skip(f"this Pillow does not write {form}")
    refused(data, "known format")


def test_size_hidden_from_one_library(encoded, picture, monkeypatch):
    """The limit holds in both decoders, also for a frame header that only one of them would find: the file states a
    small frame in a segment that libjpeg passes over, and a large one in the segment that it decodes."""
    large = resized(encoded(picture(1, 64, 64), "JPEG"), 30000, 30000)
    small = encoded(picture(1, 8, 8), "JPEG")
    frame = small[small.index(b"\xff\xc0") :][:19]
    hidden = large[:2] + segment(0xE5, b"x" + frame) + b"\xff" * 3 + large[2:]
    for data in (large, hidden, with_exif(hidden)):
        refused(data, "too many pixels", "30000 x 30000")
    monkeypatch.setattr(module, "simplejpeg", None)
    for data in (large, hidden):
        refused(data, "too many pixels")


def test_progressive_headers_too_large(encoded, picture):
    """A progressive JPEG of 65,000 x 65,000 would have its coefficients allocated before the first pixel."""
    data = resized(encoded(picture(1, 64, 64), "JPEG", progressive=True), 65000, 65000)
    refused(data, "too many pixels")
    refused(with_exif(data), "too many pixels")


@pytest.mark.parametrize("form", ["PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM"])
def test_pixel_limit_in_every_format(form, encoded):
    """A small limit refuses a small image, whatever its format."""
    data = encoded(Image.new("RGB", (64, 32), "red"), form)
    assert decode(data, "x", max_pixels=2048).shape == (32, 64, 3)
    refused(data, "too many pixels", "64 x 32", max_pixels=2047)


def test_scan_bombs(encoded, picture):
    """Thousands of scans are refused by counting; those that encoders make are decoded."""
    data = encoded(picture(1, 64, 64), "JPEG", progressive=True, quality=95)
    assert decode(data, "x").shape == (64, 64, 3)
    refused(many_scans(data, 5000), "too many scans")
    refused(with_exif(many_scans(data, 5000)), "too many scans")
    repeated = with_exif(many_scans(data, MAX_SCANS - 20))  # for Pillow, which takes odd scripts
    assert decode(repeated, "x").shape == (64, 64, 3)
    wide = resized(data, 7000, 7000)  # 49 million pixels, ten scans each: as much as is allowed
    refused(many_scans(wide, 20), "too many scans")


@pytest.mark.parametrize("marker", [0xFE, 0xE5, 0xDB])
def test_segment_bombs(marker, encoded, picture):
    """Millions of tiny segments would be walked one by one; as many as a file has room for full ones are allowed."""
    jpeg, tiny = encoded(picture(1), "JPEG"), segment(marker, b"")
    if marker != 0xDB:
        assert decode(jpeg[:2] + tiny * (MAX_SEGMENTS - 50) + jpeg[2:], "x").shape == (24, 32, 3)
    refused(jpeg[:2] + tiny * MAX_SEGMENTS + jpeg[2:], "more than 10,000 segments")


@pytest.mark.parametrize("name", [b"abCd", b"tEXt"])
def test_chunk_bombs(name, encoded, picture):
    """Millions of empty chunks of a PNG would be looked at one by one."""
    png, body = encoded(picture(1), "PNG"), b"k\0" if name == b"tEXt" else b""
    chunk = struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
    assert decode(png[:33] + chunk * 1000 + png[33:], "x").shape == (24, 32, 3)
    refused(png[:33] + chunk * MAX_CHUNKS + png[33:], "more than 100,000 chunks")


def test_block_bombs(encoded, picture):
    """Comments of a GIF in millions of blocks of a byte each would take gigabytes; whole blocks are fine."""
    gif = encoded(picture(1), "GIF")
    head = 13 + (3 << (gif[10] & 7) + 1)
    for block, count in ((b"\x01a", MAX_BLOCKS), (b"", 0)):
        comments = (b"!\xfe" + block * count + b"\0") * (1 if count else MAX_BLOCKS)
        refused(gif[:head] + comments + gif[head:], "more than 10,000 blocks")
    long = b"!\xfe" + (b"\xff" + b"a" * 255) * 1000 + b"\0"
    assert decode(gif[:head] + long + gif[head:], "x").shape == (24, 32, 3)


def test_headers_of_ppm(picture, encoded):
    """Comments that fill the header are not read byte by byte, wherever they stand; nor are millions of words."""
    ppm = encoded(picture(1), "PPM")
    assert (decode(b"P6 # one\n" + ppm[2:], "x") == picture(1)).all()
    long = b"#" + b"a" * 200_000 + b"\n"
    for start in (b"P6 ", b"P6 40 ", b"P6 40 30 ", b"P6 4#\n0#\n 3#\n0 "):
        refused(start + long + b"40 30 255\n" + ppm[15:], "header")
    refused(b"P2 3000 3000 255 " + b"1 " * 9_000_000, "too many pixels")


def test_embedded_thumbnails_and_trailing_data_are_not_counted(encoded, picture):
    """What libjpeg passes over (a thumbnail in a segment, a film after the end) does not count as scans or frames."""
    data = encoded(picture(1, 64, 64), "JPEG", quality=95, progressive=True)
    bomb = resized(many_scans(data, 300), 65000, 65000)[:60000]
    harmless = data[:2] + segment(0xE7, bomb) + data[2:] + bomb
    assert np.array_equal(decode(harmless, "x"), decode(data, "x"))


def test_huge_tiff_tile(encoded):
    """A tile larger than the limit is refused although the image is small."""
    tags = [(256, 3, 16), (257, 3, 16), (258, 3, 8), (259, 3, 8), (262, 3, 1), (277, 3, 1)]
    packed = zlib.compress(bytes(1000))
    tags += [(322, 4, 40000), (323, 4, 40000), (324, 4, 8), (325, 4, len(packed))]
    body = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags)
    data = b"II*\0" + struct.pack("<I", 8 + len(packed)) + packed + struct.pack("<H", len(tags)) + body + bytes(4)
    refused(data, "tiles")


def test_long_thin_run_length_bitmap():
    """A 100-byte BMP whose rows are 40 million pixels long would be filled with 255 rows at one jump."""
    head = struct.pack("<IiiHHIIiiII", 40, 40_000_000, 1, 1, 8, 1, 0, 0, 0, 2, 0)
    pixels = head + bytes(8) + b"\0\2\0\xff" * 4
    data = b"BM" + struct.pack("<IHHI", 14 + len(pixels), 0, 0, 14 + 40 + 8) + pixels
    refused(data, "too long")


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return len(body).to_bytes(4) + kind + body + zlib.crc32(kind + body).to_bytes(4)


@pytest.mark.parametrize("kind", [b"iCCP", b"zTXt"])
def test_compressed_chunks_of_png_are_bounded(kind, encoded, picture):
    """A profile or text of 500 MB in a PNG of 500 KB is passed over or refused within 200 MB of memory."""
    data = encoded(picture(1), "PNG")
    bomb = png_chunk(kind, b"name\0\0" + zlib.compress(bytes(500_000_000), 9))
    program = (
        "import sys, resource; from softmoe.data.decode import decode, BrokenImage\n"
        "data, before = sys.stdin.buffer.read(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: decode(data, 'x')\nexcept BrokenImage: pass\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)"
    )
    done = subprocess.run([sys.executable, "-c", program], input=data[:33] + bomb + data[33:], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert int(done.stdout) < 200


def test_of_animations_the_first_frame(picture, encoded):
    """GIF, WebP and TIFF of many frames give their first one."""
    frames = [Image.fromarray(picture(seed, 16, 16)) for seed in range(4)]
    for form in ("GIF", "WEBP", "TIFF"):
        options = {"lossless": True} if form == "WEBP" else {}
        many = encoded(frames[0], form, save_all=True, append_images=frames[1:], **options)
        one = encoded(frames[0], form, **options)
        assert np.array_equal(decode(many, "x"), decode(one, "x")), form


def test_words_of_decoders_name_no_machine(monkeypatch, encoded, picture):
    """An error with a path or an object in memory becomes a sentence without."""

    def fail(*_, **__):
        raise OSError("gs -q -dNOPAUSE /home/me/secret failed <object at 0x7f>")

    monkeypatch.setattr(module, "_decode_pillow", fail)
    assert refused(encoded(picture(1), "PNG")) == "its data is damaged"


def test_floats_that_are_no_numbers(encoded):
    """NaN and infinity in a float TIFF become pixels, not warnings."""
    values = np.array([[0.0, np.nan], [np.inf, 1.0]], dtype=np.float32)
    assert decode(encoded(Image.fromarray(values), "TIFF"), "x").shape == (2, 2, 3)


@pytest.fixture
def special(tmp_path: Path, encoded, picture) -> Path:
    """A class folder with one image, a pipe, a socket, a dangling link and a link to the image."""
    folder = tmp_path / "set/train/a"
    folder.mkdir(parents=True)
    (folder / "good.png").write_bytes(encoded(picture(1), "PNG"))
    os.mkfifo(folder / "pipe.jpg")
    listener = socket.socket(socket.AF_UNIX)
    here = os.getcwd()
    os.chdir(folder)  # names of sockets are short
    listener.bind("socket.jpg")
    os.chdir(here)
    listener.close()
    (folder / "dangling.jpg").symlink_to(folder / "nowhere.jpg")
    (folder / "link.png").symlink_to(folder / "good.png")
    return tmp_path / "set"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("scheme", ["folder", "pairs"])
def test_special_files_are_broken_images(scheme, special):
    """Pipes, sockets and dangling links neither hang nor stop the scan: each counts as an image that cannot be read."""
    source = open_source(f"{scheme}:{special}", "train")
    assert len(source) == 5
    reasons = {}
    for index in range(5):
        try:
            source.read(index)
        except BrokenImage as error:
            reasons[Path(error.name).name] = error.reason
    assert set(reasons) == {"pipe.jpg", "socket.jpg", "dangling.jpg"}
    assert reasons["pipe.jpg"] == "it is not a regular file"


def test_a_file_too_large_to_be_an_image(tmp_path, special):
    """A sparse file of a terabyte is refused by its size."""
    with (special / "train/a/huge.png").open("wb") as file:
        file.truncate(1 << 40)
    source = open_source(f"folder:{special}", "train")
    names = [source._names[i] for i in range(len(source))]  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(BrokenImage, match="larger than"):
        source.read(names.index("a/huge.png"))


def test_limits_hold_for_images_in_memory(encoded, picture):
    """The service's own limit is the decoder's."""
    buffer = io.BytesIO()
    Image.new("1", (60000, 60000)).save(buffer, "PNG")
    refused(buffer.getvalue(), "too many pixels")


def test_comments_are_few(encoded, picture):
    """A file of thousands of comments, for each of which Pillow copies what it has read so far, is refused; some are
    fine."""
    photo, line = encoded(picture(1, 8, 8), "JPEG"), b"P3 1 1 255\n"
    exif = b"\xff\xe1\0\x08Exif\0\0"
    for many, few in (
        (photo[:2] + 200 * exif + photo[2:], photo[:2] + 3 * exif + photo[2:]),
        (line + 200 * b"#\n" + b"1 2 3", line + 3 * b"#\n" + b"1 2 3"),
    ):
        assert decode(few, "few").shape[2] == 3
        with pytest.raises(BrokenImage, match="more than 100 comments"):
            decode(many, "many")


@pytest.mark.parametrize(("order", "wide"), [("<", False), (">", False), ("<", True)])
def test_long_tables_of_tiff(order, wide):
    """A TIFF that says where a million strips are, for which Pillow would make a million objects, is refused at once;
    one of as many rows as it has strips is read."""

    def tiff(strips: int) -> bytes:
        word, size, start = ("Q", 8, 16) if wide else ("I", 4, 8)
        facts = {256: 1, 257: 100, 258: 8, 259: 1, 262: 1, 277: 1, 278: 1}
        end = start + (8 if wide else 2) + (9 * (20 if wide else 12)) + size
        tables = {273: (strips, end), 279: (strips, end + size * strips)}
        if wide:
            head = struct.pack("<2sHHHQQ", b"II", 43, 8, 0, start, 9)
        else:
            head = struct.pack(order + "2sHIH", b"II" if order == "<" else b"MM", 42, start, 9)
        kind = 16 if wide else 4
        entries = {tag: (1, value) for tag, value in facts.items()} | tables
        body = b"".join(struct.pack(f"{order}HH{word}{word}", t, kind, *entries[t]) for t in sorted(entries))
        offsets = struct.pack(f"{order}{strips}{word}", *[8] * strips) + struct.pack(
            f"{order}{strips}{word}", *[1] * strips
        )
        return head + body + bytes(size) + offsets

    assert decode(tiff(100), "x").shape == (100, 1, 3)
    refused(tiff(1_000_000), "tables is too long")
