"""Image files of every kind become uint8 (H, W, C) by the stated rules, or are refused by name."""

import io
import os
import struct
import time
import zlib

import numpy as np
import pytest
from PIL import Image, PngImagePlugin
from support.data_files import encoded, noise

from hsvit_jax.data import BadImage, fit_image, images, read_image


def picture(seed: int, channels: int = 3) -> np.ndarray:
    """A smooth picture, uint8 (24, 32, channels), of which JPEG keeps the colours."""
    planes = [Image.fromarray(plane) for plane in noise((channels, 3, 4), seed)]
    planes = [plane.resize((32, 24), Image.Resampling.BICUBIC) for plane in planes]
    return np.stack([np.asarray(plane) for plane in planes], axis=-1)


def png_chunk(name: bytes, content: bytes) -> bytes:
    check = zlib.crc32(name + content)
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", check)


def png_header(side: int) -> bytes:
    """A PNG that claims a size, with next to nothing in it."""
    head = png_chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + png_chunk(b"IDAT", zlib.compress(bytes(1000)))


def tiff(tags: dict[int, int | tuple[int, ...]], pixels: bytes = b"", order: str = "<") -> bytes:
    """A TIFF of numbers by tag, whose pixels lie at byte 8."""
    entries, body = [], pixels + bytes(-len(pixels) % 4)
    for tag, values in sorted(tags.items()):
        values = values if isinstance(values, tuple) else (values,)
        packed = struct.pack(f"{order}{len(values)}I", *values)
        if len(packed) > 4:
            body, packed = body + packed, struct.pack(f"{order}I", 8 + len(body))
        if values:
            entries.append(struct.pack(f"{order}HHI4s", tag, 4, len(values), packed))
    head = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(f"{order}I", 8 + len(body))
    return head + body + struct.pack(f"{order}H", len(entries)) + b"".join(entries) + bytes(4)


#: Two by two grey pixels.
SMALL = {256: 2, 257: 2, 258: 8, 259: 1, 262: 1, 273: 8, 277: 1, 278: 2, 279: 4}


def test_the_right_size_is_untouched_bit_for_bit(tmp_path):
    """Whatever the name: the content decides the format."""
    pixels, grey = noise((13, 17, 3)), noise((13, 17))
    path = tmp_path / "ünïcode 图.JPEG"
    path.write_bytes(encoded(pixels))
    np.testing.assert_array_equal(read_image(path, (13, 17), 3), pixels)
    content = encoded(grey)
    np.testing.assert_array_equal(read_image(content, (13, 17), 1), grey[..., None])
    for mode, options in (("RGB", {}), ("RGB", {"progressive": True}), ("CMYK", {}), ("L", {})):
        pixels = picture(2, len(mode)).squeeze()
        content = encoded(Image.fromarray(pixels, mode), "JPEG", quality=95, **options)
        plain = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
        np.testing.assert_array_equal(read_image(content, plain.shape[:2], 3), plain)
        if mode == "CMYK":  # Pillow's colours, which are believed here, are those that were meant
            ink, black = pixels[..., :3].astype(float), pixels[..., 3:].astype(float)
            assert np.abs(plain - (255 - ink) * (255 - black) / 255).mean() < 6


def test_shorter_side_then_centre_crop():
    """And antialiased bicubic."""
    pixels = np.zeros((20, 60, 3), np.uint8)
    pixels[:, 20:40] = (10, 200, 30)  # the central square
    pixels[:, :20] = 255
    np.testing.assert_array_equal(read_image(encoded(pixels), (20, 20), 3), pixels[:, 20:40])
    half = read_image(encoded(pixels), (10, 10), 3)
    np.testing.assert_array_equal(half[:, 2:-2], np.broadcast_to((10, 200, 30), (10, 6, 3)))
    pixels = noise((64, 64, 3))
    expected = Image.fromarray(pixels).resize((16, 16), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(read_image(encoded(pixels), (16, 16), 3), np.asarray(expected))


def test_large_jpegs_decoded_small_keep_their_colours():
    for mode in ("RGB", "CMYK", "L"):
        small = Image.fromarray(picture(11, len(mode)).squeeze(), mode)
        large = small.resize((512, 384), Image.Resampling.BICUBIC)
        content = encoded(large, "JPEG", quality=95)
        full = Image.open(io.BytesIO(content)).convert("RGB")
        full = np.asarray(full.resize((32, 24), Image.Resampling.BICUBIC))
        assert np.abs(read_image(content, (24, 32), 3).astype(int) - full).max() < 6, mode


def test_any_shape_fits_any_target():
    for shape in ((1, 200, 3), (200, 1, 3), (7, 5, 3)):
        content = encoded(noise(shape))
        for size in ((11, 11), (30, 10), (10, 30), (1, 1)):
            assert read_image(content, size, 3).shape == (*size, 3)


def test_exif_rotation_is_applied():
    pixels = np.zeros((16, 16, 3), np.uint8)
    pixels[:8] = 255  # bright on top as stored
    exif = Image.Exif()
    exif[0x0112] = 6  # turn a quarter clockwise to see it upright: the top becomes the right
    stored = Image.fromarray(pixels)
    image = read_image(encoded(stored, "JPEG", exif=exif), (16, 16), 3)
    assert image[:, 10:].min() > 200
    assert image[:, :6].max() < 50
    damaged = encoded(stored, "JPEG", exif=exif.tobytes()[:20])
    with pytest.warns(UserWarning, match="Corrupt EXIF"):
        image = read_image(damaged, (16, 16), 3)
    np.testing.assert_array_equal(image, read_image(encoded(stored, "JPEG"), (16, 16), 3))
    for kind in ("PNG", "WEBP"):  # of which Pillow raises what it warns of for a JPEG
        damaged = encoded(stored, kind, exif=b"Exif\0\0garbage", lossless=True)
        np.testing.assert_array_equal(read_image(damaged, (16, 16), 3), pixels)


def test_sixteen_bits_are_scaled_and_never_saturate():
    values = np.array([[0, 257, 1000, 32896, 65535]], np.uint16)
    for kind, channels in (("PNG", 1), ("PNG", 3), ("TIFF", 1), ("PPM", 1)):
        image = read_image(encoded(values, kind), (1, 5), channels)
        np.testing.assert_array_equal(image[..., -1], [[0, 1, 4, 128, 255]])
    seen = read_image(encoded(values, "PNG", transparency=1000), (1, 5), 1)
    np.testing.assert_array_equal(seen[..., 0], [[0, 1, 255, 128, 255]])
    white_is_zero = encoded(values, "TIFF", tiffinfo={262: 0})
    image = read_image(white_is_zero, (1, 5), 1)
    np.testing.assert_array_equal(image[..., 0], [[255, 254, 251, 127, 0]])
    picture = Image.open(io.BytesIO(white_is_zero))
    np.testing.assert_array_equal(fit_image(picture, (1, 5), 1), image)


def test_a_tiff_of_twelve_bits_keeps_its_range():
    raw = tiff({**SMALL, 257: 1, 258: 12, 279: 3}, b"\x00\x0f\xff")  # 0 and 4095
    assert read_image(raw, (1, 2), 1)[0, :, 0].tolist() == [0, 255]


@pytest.mark.filterwarnings("ignore:some images are mostly transparent")
def test_every_mode_becomes_the_colour_that_it_shows():
    """Transparency is seen on white; the palette's second colour is (10, 20, 30)."""
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([255, 0, 0, 10, 20, 30])
    cases = [
        (encoded(palette), 3, [10, 20, 30]),
        (encoded(palette, transparency=1), 3, [255, 255, 255]),
        (encoded(palette, "GIF"), 1, [18]),
        (encoded(Image.new("1", (4, 4), 1)), 3, [255, 255, 255]),
        (encoded(Image.new("L", (4, 4), 77)), 3, [77, 77, 77]),
    ]
    for mode, colour in (("LA", (40,)), ("RGBA", (40, 40, 40))):
        for channels in (1, 3):
            for alpha, seen in ((0, 255), (255, 40)):
                image = Image.new(mode, (4, 4), (*colour, alpha))
                cases.append((encoded(image), channels, [seen] * channels))
    for content, channels, colour in cases:
        expected = np.broadcast_to(np.array(colour, np.uint8), (4, 4, channels))
        np.testing.assert_array_equal(read_image(content, (4, 4), channels), expected)


def tiff_of_bands(
    pixels: np.ndarray, extra: tuple[int, ...], order: str, bits: int, kind: int
) -> bytes:
    """A TIFF of bands that are all beside one another, of a photometric interpretation."""
    height, width, bands = pixels.shape
    body = (pixels.astype(np.uint32) * (257 if bits == 16 else 1)).astype(f"{order}u{bits // 8}")
    tags = {256: width, 257: height, 258: (bits,) * bands, 259: 1, 262: kind, 273: 8}
    tags |= {277: bands, 278: height, 279: body.nbytes, 338: extra}
    return tiff(tags, body.tobytes(), order)


@pytest.mark.filterwarnings("ignore:some images are mostly transparent")
@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("bits", (8, 16))
def test_alpha_is_what_a_tiff_declares_as_alpha(order, bits):
    """Near infrared, 30 of 255 everywhere, is neither seen nor taken for transparency."""
    colours, white = noise((6, 8, 3)), 255 - 30
    bands = np.concatenate([colours, np.full((6, 8, 2), 30, np.uint8)], axis=2)
    cases = [(bands[..., :4], (), 2), (bands[..., :4], (0,), 2)]
    if bits == 8:
        cases += [(bands, (0, 0), 2), (bands[..., 2:4], (0,), 1)]
    for pixels, extra, kind in cases:
        raw = tiff_of_bands(pixels, extra, order, bits, kind)
        expected = np.broadcast_to(pixels[..., : 1 + kind // 2 * 2], (6, 8, 3))
        for read in (read_image, lambda raw, *how: fit_image(Image.open(io.BytesIO(raw)), *how)):
            with pytest.warns(match="images are TIFFs with further bands, not declared as alpha"):
                np.testing.assert_array_equal(read(raw, (6, 8), 3), expected)
    declared = [(bands[..., :4], (2,), 2)] + [(bands, (2, 0), 2)] * (bits == 8)
    for pixels, extra, kind in declared:
        with pytest.warns() as said:
            image = read_image(tiff_of_bands(pixels, extra, order, bits, kind), (6, 8), 3)
        assert "mostly transparent" in str(said[-1].message) and len(said) == pixels.shape[2] - 3
        assert np.abs(image - (colours * (30 / 255) + white)).max() < 1
    associated = bands[..., :4] // np.array([9, 9, 9, 1], np.uint8)  # at most 28 of 30
    image = read_image(tiff_of_bands(associated, (1,), order, bits, 2), (6, 8), 3)
    assert np.abs(image - (associated[..., :3].astype(float) + white)).max() <= 1
    if bits == 8:
        image = read_image(tiff_of_bands(associated[..., 2:], (1,), order, bits, 1), (6, 8), 1)
        assert np.abs(image - (associated[..., 2:3].astype(float) + white)).max() <= 1


def pages_of_tiff(*pages: np.ndarray, **options) -> bytes:
    first, *rest = map(Image.fromarray, pages)
    return encoded(first, "TIFF", save_all=True, append_images=rest, **options)


def test_of_a_tiff_the_largest_page_is_read():
    """Neither the thumbnail before it nor a mask nor the smaller copies behind it."""
    picture, thumbnail = noise((24, 32, 3), 1), noise((6, 8, 3), 2)
    for options in ({}, {"compression": "tiff_lzw"}, {"big_tiff": True}):
        for pages in ((thumbnail, picture), (picture, thumbnail), (thumbnail, picture, thumbnail)):
            raw = pages_of_tiff(*pages, **options)
            np.testing.assert_array_equal(read_image(raw, (24, 32), 3), picture)
    assert images.peek(pages_of_tiff(thumbnail, picture)) == (24, False)
    black = np.zeros_like(picture)
    raw = pages_of_tiff(picture, black, thumbnail)
    with pytest.warns(match=r"some images have several .* one size \(the first is read\)"):
        np.testing.assert_array_equal(read_image(raw, (24, 32), 3), picture)
    loop = tiff(SMALL | {273: ()})
    with pytest.raises(BadImage, match="a TIFF that is cut off or of another"):
        read_image(loop[:-4] + loop[4:8], (8, 8), 3)  # followed by itself
    mask = Image.fromarray(np.zeros((48, 64), np.uint8))
    mask.encoderinfo = {"tiffinfo": {254: 4}}
    raw = encoded(picture, "TIFF", save_all=True, append_images=[mask])
    np.testing.assert_array_equal(read_image(raw, (24, 32), 3), picture)
    with pytest.raises(BadImage, match="a TIFF that is cut off or of another"):
        read_image(tiff({**SMALL, 254: 1, 330: 8}, bytes(4)), (2, 2), 1)  # a raw photo's thumbnail


def test_of_several_frames_the_first_is_read():
    """A depth map behind a photo is no frame of its own."""
    first, second = noise((8, 8)), noise((8, 8), 1)
    how = {"save_all": True, "append_images": [Image.fromarray(second)]}
    for kind, more in (("GIF", {}), ("PNG", {}), ("WEBP", {"lossless": True})):
        with pytest.warns(match="some images have several frames"):
            read = read_image(encoded(first, kind, **how, **more), (8, 8), 1)
        assert np.abs(read[..., 0].astype(int) - first).max() <= 1
    read_image(encoded(first, "MPO", **how), (8, 8), 1)


def test_a_tiff_of_bad_tags_prints_nothing(capfd):
    """Pillow warns of each one, and libtiff, which writes past Python, of each unknown type."""
    good = encoded(noise((8, 8, 3)), "TIFF", compression="tiff_lzw")
    start = int.from_bytes(good[4:8], "little")
    count = int.from_bytes(good[start : start + 2], "little")
    tags = good[start + 2 : start + 2 + 12 * count]
    for number in range(200):
        tags += struct.pack("<HHII", 40_000 + number, 99, 1, 8)  # of no type
        tags += struct.pack("<HHII", 50_000 + number, 1, 1 << 20, 8)  # beyond the file
    head = good[:4] + struct.pack("<I", len(good))
    bad = head + good[8:] + struct.pack("<H", len(tags) // 12) + tags + bytes(4)
    np.testing.assert_array_equal(read_image(bad, (8, 8), 3), read_image(good, (8, 8), 3))
    assert capfd.readouterr().err == ""


def test_decompression_bombs_are_never_decoded(monkeypatch):
    """Not by Pillow's limit, and not by ours when Pillow's is switched off."""

    def decode(*_):
        raise AssertionError("a bomb was decoded")

    monkeypatch.setattr(Image.Image, "load", decode)
    for side in (9_500, 20_000):
        with pytest.raises(BadImage, match=r"bomb\.png.*decompression bomb"):
            read_image(png_header(side), (8, 8), 3, name="bomb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    with pytest.raises(BadImage, match="9500×9500"):
        read_image(png_header(9500), (8, 8), 3)


GOOD = encoded(noise((40, 40, 3)), "JPEG")


def test_a_jpeg_of_thousands_of_scans_is_refused():
    """60 bytes are decoded over the whole image; bytes that look like scans do not count."""
    whole = encoded(noise((40, 40, 3)), "JPEG", progressive=True)
    scan = whole[whole.rindex(b"\xff\xc4") : -2]  # with its tables
    with pytest.raises(BadImage, match="more than 100 scans of a JPEG"):
        read_image(whole[:-2] + scan * 100 + whole[-2:], (8, 8), 3)
    few = whole[:-2] + scan * 9 + whole[-2:]
    like = b"\xff\xda" * 200
    made = few[:2] + b"\xff\xef" + struct.pack(">H", 2 + len(like)) + like + few[2:] + like
    assert np.array_equal(read_image(made, (40, 40), 3), read_image(few, (40, 40), 3))


EXIF = b"\xff\xe1" + struct.pack(">H", 22) + b"Exif\0\0II*\0\x08" + bytes(9)  # of no entry
PROFILE = png_chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(100)))
PNG = encoded(noise((8, 8, 3)))
REPEATED = {
    "comments of a PNM": lambda n: b"P2 8 8 255\n" + b"#\n" * n + b"7 " * 64,
    "EXIF segments of a JPEG": lambda n: GOOD[:2] + EXIF * n + GOOD[2:],
    "colour profiles of a PNG": lambda n: PNG[:33] + PROFILE * n + PNG[33:],
    "strips of a TIFF": lambda n: tiff(
        {**SMALL, 256: 1, 257: n * 1000, 273: (8,) * n * 1000, 278: 1, 279: (1,) * n * 1000}, b"4"
    ),
}


@pytest.mark.parametrize("what", REPEATED)
def test_a_file_that_repeats_its_header_is_refused_before_it_is_opened(what, monkeypatch):
    """Pillow takes 39 s over 8 MB of EXIF segments."""
    assert read_image(REPEATED[what](100), (8, 8), 3).shape == (8, 8, 3)
    monkeypatch.setattr(Image, "open", None)
    with pytest.raises(BadImage, match=f"more than 100(,000)? {what} are refused"):
        read_image(REPEATED[what](101), (8, 8), 3)


@pytest.mark.parametrize("most", (1, 200, 1023, 65535))
@pytest.mark.parametrize("bands", (1, 3))
def test_a_binary_pnm_is_read_as_its_text(most, bands):
    values = np.random.default_rng(most).integers(0, most + 1, (7, 6, bands))
    body = values.astype(">u2" if most > 255 else np.uint8).tobytes()
    binary = b"P%d 6 7 %d\n" % (5 + bands // 3, most) + body
    text = b" # a b\n".join(b"%d" % value for value in values.ravel()).replace(b"# a b", b"", 90)
    text = b"P%d 6 7 %d\n" % (2 + bands // 3, most) + text + b"\n9 9"
    for channels in (1, 3):
        image = read_image(binary, (7, 6), channels)
        np.testing.assert_array_equal(image, read_image(text, (7, 6), channels))
    if bands == channels:
        np.testing.assert_array_equal(image, np.rint(values / most * 255))
    for raw in (binary[:-1], b"P2 2 2 9 1 2 3", b"P2 2 2 9 1 2 3 10", b"P1 2 2 0 1 2 0"):
        with pytest.raises(BadImage, match="cannot be read"):
            read_image(raw, (2, 2), 3)


def bmp_of_runs(width: int, height: int, runs: bytes) -> bytes:
    start = 14 + 40 + 1024
    head = struct.pack("<2sIHHI", b"BM", start + len(runs), 0, 0, start)
    size = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(runs), 0, 0, 256, 0)
    return head + size + bytes(1024) + runs


GIF = encoded(noise((8, 8)), "GIF")
GIF_START = 13 + (6 << (GIF[10] & 7))
PIECES = {
    "fill bytes": lambda n: GOOD[:2] + (b"\xff" * 9 + b"\xfe\0\2") * n + GOOD[2:],
    "comments": lambda n: GOOD[:20] + b"\xff\xfe\0\3x" * n + GOOD[20:],
    "empty chunks": lambda n: PNG[:33] + png_chunk(b"teSt", b"") * n + PNG[33:],
    "comments of a GIF": lambda n: GIF[:GIF_START] + b"!\xfe\1x\0" * n + GIF[GIF_START:],
    "blanks": lambda n: b"P6" + b" " * n + b"2 2 255\n" + bytes(12),
    "runs": lambda n: bmp_of_runs(8, 8, b"\1\0" * n),
}


@pytest.mark.parametrize("what", PIECES)
def test_pieces_that_pillow_reads_one_by_one_are_bounded(what, monkeypatch):
    """It takes a second for a megabyte of fill bytes, and a thousand of each do no harm."""
    if what != "runs":  # which end behind the last row
        assert read_image(PIECES[what](1000), (8, 8), 3).shape == (8, 8, 3)
    with pytest.raises(
        BadImage, match="more than 50,000 fill bytes, blanks, comments, chunks or r"
    ):
        read_image(PIECES[what](200_000), (8, 8), 3)


def test_fill_bytes_of_a_jpeg_are_read_once():
    """Within a scan libjpeg reads them again for each 64 KiB: a minute for 80 MB."""
    for place in (2, len(GOOD) - 2):
        start = time.perf_counter()
        filled = GOOD[:place] + b"\xff" * 80_000_000 + GOOD[place:]
        np.testing.assert_array_equal(read_image(filled, (8, 8), 3), read_image(GOOD, (8, 8), 3))
        assert time.perf_counter() - start < 20


def test_runs_of_a_bmp_are_bounded_by_its_pixels():
    row = b"\1\7" * 400 + b"\0\0"
    assert read_image(bmp_of_runs(400, 400, row * 400), (8, 8), 1).shape == (8, 8, 1)


TEXT = PngImagePlugin.PngInfo()
TEXT.add_text("x", "y" * 2_000_000, zip=True)
PLANES = {258: (16,) * 3, 262: 2, 273: (8, 16, 24), 277: 3, 279: (8,) * 3, 284: 2}
TILE = {273: (), 322: 10_000, 323: 10_000, 324: 8, 325: 1}
SCANS = b"\xff\xfe\0\4\xff\xda" * 60_000  # comments, each of which looks like a scan
BAD_FILES = {
    "empty": (b"", "not an image"),
    "text": (b"P1 2000 2000\n", "more than 2,097,152 pixels of a run-length"),
    "html": (b"<!DOCTYPE html><html>404</html>", "not an image"),
    "cut jpeg": (GOOD[: len(GOOD) // 2], "truncated"),
    "cut png": (encoded(noise((40, 40, 3)))[:900], "truncated"),
    "script": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
    "float": (encoded(Image.fromarray(np.ones((3, 3), np.float32)), "TIFF"), "floating-point"),
    "int32": (encoded(Image.fromarray(np.full((3, 3), 200, np.int32)), "TIFF"), "32-bit"),
    "tile": (tiff(SMALL | TILE), r"89,478,485 pixels \(10000×10000\) are"),
    "planar": (tiff(SMALL | PLANES, bytes(range(24))), "a plane of 16 bits for each colour"),
    "bands": (b"II*\0" + bytes(40), "a TIFF that is cut off"),
    "text chunk": (encoded(noise((4, 4, 3)), pnginfo=TEXT), "MAX_TEXT_CHUNK"),
    "runs": (bmp_of_runs(9000, 9000, b"\1\0\0\0" * 9000), "more than 2,097,152 pixels of a run"),
    "scans": (GOOD[:-2] + SCANS + GOOD[-2:], "more than 100 scans of a JPEG"),
}


def test_bad_files_are_named(tmp_path):
    path = tmp_path / "holiday.jpg"
    for data, why in BAD_FILES.values():
        path.write_bytes(data)
        with pytest.raises(BadImage, match=rf"holiday\.jpg: .*{why}"):
            read_image(path, (8, 8), 3)


def test_no_files_and_wrong_shapes(tmp_path):
    (tmp_path / "loop.png").symlink_to("loop.png")
    (tmp_path / "device.png").symlink_to("/dev/zero")
    (tmp_path / "folder.png").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    with open(tmp_path / "huge.png", "wb") as file:
        file.truncate(images.MAX_FILE_BYTES + 1)
    free = os.dup(0)  # the lowest number that is free
    os.close(free)
    for name, why in (
        ("none.png", "No such file"),
        ("loop.png", "Too many levels"),
        ("device.png", "not a regular file"),
        ("folder.png", "Is a directory"),
        ("pipe.png", "not a regular file"),
        ("huge.png", "larger than 256 MiB"),
    ):
        with pytest.raises(BadImage, match=rf"{name}: cannot be read: {why}"):
            read_image(tmp_path / name, (8, 8), 3)
    os.close(again := os.dup(0))
    assert again == free  # every file was closed
    with pytest.raises(BadImage, match=r"^a\\x1b\[1m\\udce9\.png: not an image"):
        read_image(b"", (8, 8), 3, name="a\x1b[1m\udce9.png")


def test_a_photo_can_be_padded_or_stretched_instead():
    """Left half red, right half blue: a crop loses the outer quarters, padding adds black rows."""
    photo = np.zeros((20, 40, 3), np.uint8)
    photo[:, :20, 0] = photo[:, 20:, 2] = 200
    cropped, padded, stretched = (
        fit_image(photo, (10, 10), 3, fit) for fit in ("crop", "pad", "stretch")
    )
    assert cropped.shape == padded.shape == stretched.shape == (10, 10, 3)
    assert not padded[:2].any() and not padded[-3:].any() and padded[3:7].any(-1).all()
    for whole in (padded[4], stretched[0], stretched[-1]):
        assert whole[0].tolist() == [200, 0, 0] and whole[-1].tolist() == [0, 0, 200]
    same = photo[:10, :10]
    for fit in ("crop", "pad", "stretch"):
        np.testing.assert_array_equal(fit_image(same, (10, 10), 3, fit), same)
