"""Reads images of any format as uint8 (H, W, C), by one rule.

A file must be a regular one of at most 256 MiB and 89,478,485 pixels, and begin as a JPEG, PNG,
GIF, BMP, WebP, TIFF or PNM. Then, in this order: the first frame is read, of a TIFF the largest
page; the EXIF rotation is applied; 16-bit grey is divided by 257 and rounded; transparency is
composited on white, and bands that a TIFF does not declare as alpha are dropped; the rest becomes
RGB or, for one channel, ITU-R 601 grey. Last, the image is fitted to its target: 'crop' scales it,
antialiased bicubic, to just cover the target and cuts out the centre; 'pad' scales it to fit inside
and adds black at its sides; 'stretch' ignores its shape. An image of the target's size is
unchanged. Floating-point images and integers beyond 16 bits have no stated range and are refused.
"""

import contextlib
import errno
import io
import math
import os
import re
import stat
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hsvit_jax.text import one_line

if TYPE_CHECKING:
    from PIL import Image

MAX_PIXELS = 89_478_485
MAX_FILE_BYTES = 1 << 28
# The last six are refused by name, because skipping them would lose images silently.
_EXTENSIONS = re.compile(
    "jpg|jpeg|jpe|jfif|mpo|png|apng|gif|bmp|webp|tiff?|p[pgbn]m|hei[cf]|avif|jp2|jxl|tga"
)
#: The first `_HEAD_BYTES` of an image of one of these formats match it.
_BEGINNINGS = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|GIF8[79]a|RIFF.{4}WEBP|II[*+]\0|MM\0[*+]"
    rb"|BM.{12}[\x0c(48@l|]\0\0\0|P[1-6]\s+(#|\d+\s+\d+\s)"
    rb"|.{4}ftyp(he[iv]|mif1|msf1|avi[fs])|\0\0\0\x0c(jP  |JXL )|\xff\x0a|\xffO\xffQ",
    re.DOTALL,
)
_HEAD_BYTES = 32
# Naming the formats keeps Pillow from trying others, some of which start external programs.
_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM")
# A JPEG's scan of a few bytes is decoded over the whole image; libtiff has the same limit.
_MOST_SCANS = 100
# A marker that is followed by a length: no stuffed byte, no restart and no TEM.
_JPEG_MARKER = re.compile(rb"\xff([\x02-\xcf\xd8-\xfe])")
_SCAN, _END = b"\xda", b"\xd9"
# No segment of a JPEG is as long, so these are fill bytes; libjpeg rereads them every 64 KiB.
_FILL = b"\xff" * (1 << 16)
# Pillow takes up to 39 s a megabyte for files that begin like this and repeat the mark.
_MOST_REPEATS = 100
_REPEATS = (
    (rb"\xff\xd8", b"Exif\0\0", "EXIF segments of a JPEG"),
    (rb"\x89PNG", b"iCCP", "colour profiles of a PNG"),
    (rb"P[1-3]", b"#", "comments of a PNM"),
)
# Pillow reads these one by one in Python, at a second for a megabyte.
_PIECES = "fill bytes, blanks, comments, chunks or runs"
_SMALL_BYTES, _MOST_READS, _BYTES_A_READ = 1 << 16, 50_000, 512
# Pillow decodes these codecs in Python, pixel by pixel.
_SLOW_CODECS, _MOST_SLOW_PIXELS = ("bmp_rle", "ppm_plain"), 1 << 21
_TIFF_HEADS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+", b"MM*\0", b"II\0*")
# A TIFF may have one strip for each row.
_MOST_STRIPS = 100_000
_MOST_PAGES, _MOST_SAMPLES, _BIG_TIFF = 10_000, 6, 43
_TIFF_BITS, _TIFF_PHOTOMETRIC, _TIFF_SAMPLES, _TIFF_PLANES, _TIFF_EXTRA = 258, 262, 277, 284, 338
_TIFF_TILE_WIDTH, _TIFF_TILE_HEIGHT, _TIFF_STRIPS, _TIFF_INNER = 322, 323, (273, 324), 330
_TIFF_SHAPE = 254, 256, 257, _TIFF_SAMPLES  # kind of page, width, height
_TIFF_REDUCED, _TIFF_MASK = 1, 4  # bits of the kind
# Pixels depend on these tags. Pillow and libtiff print a line for each other one that is damaged.
_TIFF_TAGS = {*range(254, 260), 262, 266, 273, 274, *range(277, 280), 284, 292, 293, 317, 320}
_TIFF_TAGS |= {*range(322, 326), 330, 332, 338, 339, 347, *range(512, 522), *range(529, 533), 700}
_MAX_SIDE = 8192  # data.image_size has the same limit
GREY_MODES = frozenset({"1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "I;16N"})
_TOO_MANY = "more than {:,} {} are refused (decompression bomb); save it again, smaller"
# These remarks are counted, and reported once for all images.
_TRANSPARENT = "are mostly transparent (read as white)"
_UNDECLARED = "are TIFFs with further bands, not declared as alpha (dropped)"
_SEVERAL = "have several frames, or pages of one size (the first is read)"


class BadImage(ValueError):
    """Reports a file that cannot be used as an image, with its name and the reason."""


def _warn(remark: str) -> None:
    warnings.warn(f"some images {remark}", stacklevel=2)  # Python shows it once


def is_image_name(name: str) -> bool:
    """Returns whether a file name is an image's: not hidden, and of a known extension."""
    base = name.rpartition("/")[2]
    known = _EXTENSIONS.fullmatch(base.rpartition(".")[2].lower())
    return known is not None and not base.startswith(".")


def check_shape(
    image_size: tuple[int, int], channels: int, fit: str
) -> tuple[tuple[int, int], int]:
    """Returns (H, W) and channels as Python's numbers; raises ValueError if they are not valid."""
    sides = np.asarray(image_size)
    whole = sides.shape == (2,) and sides.dtype.kind in "iu"
    if not whole or not 1 <= sides.min() <= sides.max() <= _MAX_SIDE:
        raise ValueError(f"image_size={image_size}: set two integers (H, W) from 1 to {_MAX_SIDE}")
    if channels not in (1, 3):
        raise ValueError(f"channels={channels}: set 1 (grey) or 3 (RGB)")
    if fit not in ("crop", "pad", "stretch"):
        raise ValueError(f"fit={fit!r}: set 'crop', 'pad' or 'stretch'")
    return tuple(map(int, sides)), int(channels)


def read_image(
    source: str | Path | bytes,
    image_size: tuple[int, int],
    channels: int,
    *,
    name: str | None = None,
    fit: str = "crop",
    max_pixels: int = MAX_PIXELS,
    remark: Callable[[str], Any] = _warn,
) -> np.ndarray:
    """Reads one image by the rules at the head of this file.

    Args:
      source: a path, or the bytes of a file.
      image_size: (H, W) of the result.
      channels: 1 or 3.
      name: the image's name in errors; defaults to the path.
      fit: 'crop', 'pad' or 'stretch'.
      max_pixels: the limit of the stored image's pixels.
      remark: called with each remark on the image; warns by default.

    Returns:
      uint8 (H, W, C).

    Raises:
      BadImage: the file is missing, cut off, too large or not an image.
      ValueError: the size, the channels or the fit is not valid.
    """
    check_shape(image_size, channels, fit)
    name = name or ("<bytes>" if isinstance(source, bytes) else os.fspath(source))
    remarks: list[str] = []
    try:
        raw = source if isinstance(source, bytes) else read_file(os.path.expanduser(source))
        image = _open(raw, min(max_pixels, MAX_PIXELS), remarks.append)
        if image.format in ("JPEG", "MPO"):
            # Decoding at half, quarter or eighth size is several times faster. Twice the target is
            # enough for the antialiasing filter. EXIF may turn the image, so the longer target
            # side stands for both.
            cover = max(max(image_size) / min(image.size), 1e-9) * 2
            image.draft(None, tuple(int(n * cover) + 1 for n in image.size))
        if image.format == "PPM" and image.tile[0][0] == "ppm":
            image = _binary_pnm(image, raw)
        image = upright(image, remarks.append)
        pixels = fit_pillow(image, image_size, channels, fit, remark=remarks.append)
    except Exception as error:  # damaged files make Pillow raise nearly anything
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        reason = str(error) if isinstance(error, BadImage) else f"cannot be read: {why}"
        raise BadImage(f"{one_line(name)}: {reason}") from error
    for text in remarks:
        remark(text)
    return pixels


def fit_image(
    image: Any, image_size: tuple[int, int], channels: int, fit: str = "crop"
) -> np.ndarray:
    """Fits an image of any kind by the rules at the head of this file.

    Args:
      image: a path, the bytes of a file, a Pillow image, or an array (h, w) or (h, w, 1, 3 or 4)
        of uint8, bool or floats from 0 to 1.
      image_size: (H, W) of the result.
      channels: 1 or 3.
      fit: 'crop', 'pad' or 'stretch'.

    Returns:
      uint8 (H, W, C).

    Raises:
      BadImage: a file that `read_image` refuses, or an array of another shape, dtype or range.
      ValueError: the size, the channels or the fit is not valid.
    """
    from PIL import Image

    if isinstance(image, str | bytes | os.PathLike):
        return read_image(image, image_size, channels, fit=fit)
    check_shape(image_size, channels, fit)
    if isinstance(image, Image.Image):
        return fit_pillow(upright(image), image_size, channels, fit)
    pixels = np.asarray(image)
    if not pixels.size or (*pixels.shape[2:],) not in ((), (1,), (3,), (4,)) or pixels.ndim < 2:
        raise BadImage(f"an array of shape {pixels.shape}; expected (h, w) or (h, w, 1, 3 or 4)")
    if pixels.dtype.kind == "f" or pixels.dtype.name == "bfloat16":
        if not (pixels.min() >= 0 and pixels.max() <= 1):  # written so that NaN fails
            raise BadImage(f"{pixels.dtype} from {pixels.min()} to {pixels.max()}; expected 0 to 1")
        pixels = np.rint(pixels * 255).astype(np.uint8)
    elif pixels.dtype == bool:
        pixels = pixels.astype(np.uint8) * 255
    elif pixels.dtype != np.uint8:
        raise BadImage(f"an array of {pixels.dtype}; expected uint8, or floats from 0 to 1")
    image = Image.fromarray(pixels[..., 0] if pixels.shape[2:] == (1,) else pixels)
    return fit_pillow(image, image_size, channels, fit)


def upright(image: "Image.Image", remark: Callable[[str], Any] = _warn) -> "Image.Image":
    """Applies a Pillow image's EXIF rotation; 12- and 16-bit grey becomes 0 to 65535.

    Drops a TIFF's bands that it does not declare as alpha.
    """
    from PIL import Image, ImageOps

    image.load()
    tags = getattr(image, "tag_v2", {})
    alpha = tags and tags.get(_TIFF_EXTRA, ())[:1] in ((1,), (2,))
    colours = tags and {2: 3, 5: 4, 6: 3, 8: 3}.get(tags.get(_TIFF_PHOTOMETRIC), 1)
    if tags and tags.get(_TIFF_SAMPLES, 0) > colours + alpha:
        remark(_UNDECLARED)
        image = image if alpha or image.mode != "RGBA" else image.convert("RGB")
    pgm = image.mode == "I" and image.format == "PPM"
    white_is_zero, bits = tags.get(_TIFF_PHOTOMETRIC) == 0, tags.get(_TIFF_BITS)
    with contextlib.suppress(Exception):  # damaged EXIF data raise nearly anything
        image = ImageOps.exif_transpose(image)
    image = image.convert("I;16") if pgm else image  # Pillow opens 16-bit PGMs as 32 bits
    if white_is_zero and image.mode.startswith("I;16"):  # Pillow inverts 8 bits only
        image = Image.fromarray(np.uint16(65535) - np.asarray(image).astype(np.uint16))
    if bits == (12,):  # Pillow leaves them at 0 to 4095
        values = np.asarray(image).astype(np.uint32)
        image = Image.fromarray((values * 65535 // 4095).astype(np.uint16))
    return image


def holds_image(path: str) -> bool:
    """Returns whether a file begins as an image; False if it cannot be read."""
    with contextlib.suppress(OSError):
        return _BEGINNINGS.match(read_file(path, _HEAD_BYTES)) is not None
    return False


def read_file(path: str | Path, most: int = MAX_FILE_BYTES) -> bytes:
    """Reads a regular file, or its first bytes; pipes and devices may have no end.

    Raises:
      OSError: it is no regular file, is larger than MAX_FILE_BYTES, or cannot be read.
      ValueError: the name has a null byte.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
        if info.st_size > MAX_FILE_BYTES:
            raise OSError(errno.EFBIG, f"larger than {MAX_FILE_BYTES >> 20} MiB", os.fspath(path))
        return file.read(min(info.st_size, most))


def peek(data: bytes) -> tuple[int, bool] | None:
    """Reads (shorter side in pixels, is grey) from an image header; None if it is no image."""
    with contextlib.suppress(Exception):  # decoding reports it, with its name
        image = _open(data)
        return min(image.size), image.mode in GREY_MODES
    return None


class _Counted(io.BytesIO):
    """Lets Pillow read at most `left` pieces of a large file in memory."""

    def read(self, size: int | None = -1) -> bytes:
        """Reads the next bytes; raises BadImage once no piece is left."""
        self.left -= 1
        if self.left < 0:
            raise BadImage(_TOO_MANY.format(_MOST_READS, _PIECES))
        return super().read(size)


def _open(
    data: bytes, max_pixels: int = MAX_PIXELS, remark: Callable[[str], Any] = bool
) -> "Image.Image":
    """Reads an image's header, and refuses an image that must not be decoded."""
    from PIL import Image, UnidentifiedImageError

    for start, mark, what in _REPEATS:
        if re.match(start, data) and data.count(mark) > _MOST_REPEATS:
            raise BadImage(_TOO_MANY.format(_MOST_REPEATS, what))
    if data[:4] in _TIFF_HEADS:
        data = _largest_page(data, remark)
    elif data[:2] == b"\xff\xd8":
        data = data.replace(_FILL, b"\xff")
    file = io.BytesIO(data) if len(data) < _SMALL_BYTES else _Counted(data)
    file.left = _MOST_READS + len(data) // _BYTES_A_READ
    Image.init()
    formats = [name for name in _FORMATS if name in Image.OPEN]  # Pillow can be built without some
    try:
        image = Image.open(file, formats=formats)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadImage(_TOO_MANY.format(max_pixels, "pixels")) from error
    except UnidentifiedImageError as error:
        raise BadImage(f"not an image ({', '.join(formats)})") from error
    tags = getattr(image, "tag_v2", {})
    # Tiles are decoded whole, however much of them lies outside the image.
    sizes = zip(image.size, (_TIFF_TILE_WIDTH, _TIFF_TILE_HEIGHT), strict=True)
    width, height = (-(-n // tile) * tile for n, tag in sizes for tile in [tags.get(tag) or 1])
    slow = width * height if image.tile[:1] and image.tile[0][0] in _SLOW_CODECS else 0
    scans = _count_scans(data) if image.format in ("JPEG", "MPO") else 0
    for count, most, what in (
        (width * height, max_pixels, f"pixels ({width}×{height})"),
        (slow, _MOST_SLOW_PIXELS, "pixels of a run-length encoded BMP or plain PNM"),
        (scans, _MOST_SCANS, "scans of a JPEG"),
    ):
        if count > most:
            raise BadImage(_TOO_MANY.format(most, what))
    if tags.get(_TIFF_PLANES) == 2 and max(tags.get(_TIFF_BITS, (8,))) > 8:  # Pillow mixes them up
        raise BadImage("a TIFF with a plane of 16 bits for each colour; save it as 8-bit RGB")
    parts = {"TIFF": _MOST_STRIPS, "BMP": 2 * width * height, "GIF": len(data) // 100}
    file.left += parts.get(image.format, 0)
    if image.format in ("GIF", "PNG", "WEBP"):
        with contextlib.suppress(Exception):  # a damaged later frame is not read
            image.is_animated and remark(_SEVERAL)
    return image


def _largest_page(data: bytes, remark: Callable[[str], Any]) -> bytes:
    """Returns a TIFF of the largest page, the first of equal ones, with only its pixels' tags."""
    order, big = "little" if data[:2] == b"II" else "big", _BIG_TIFF in data[2:4]
    head, short, word = (8, 8, 8) if big else (4, 2, 4)  # bytes
    entry = struct.Struct("<>"[order == "big"] + ("HHQ8s" if big else "HHI4s"))

    def at(start: int, size: int) -> int:
        return int.from_bytes(data[start : start + size], order)

    def number(_: int, kind: int, count: int, value: bytes) -> int:
        return int.from_bytes(value[: {1: 1, 3: 2, 16: 8}.get(kind, 4)], order)

    none, pages, place, left = (0, 0, 0, b""), {}, at(head, word), len(data)
    while place and place not in pages:
        end = place + short + at(place, short) * entry.size
        left -= end - place
        if left < 0 or end > len(data):
            break  # damaged from here on
        if len(pages) == _MOST_PAGES:
            raise BadImage(_TOO_MANY.format(_MOST_PAGES, "pages of a TIFF"))
        found = entry.iter_unpack(memoryview(data)[place + short : end])
        tags = {tag[0]: tag for tag in found if tag[0] in _TIFF_TAGS}
        kind, width, height, samples = (number(*tags.get(tag, none)) for tag in _TIFF_SHAPE)
        strips = max(tags.get(tag, none)[2] for tag in _TIFF_STRIPS)
        within = kind & _TIFF_REDUCED and _TIFF_INNER in tags  # a camera's raw file has these
        read = not within and samples <= _MOST_SAMPLES and width * height * strips > 0
        pages[place] = (not kind & _TIFF_MASK, width * height), strips, read, tags
        place = at(end, word)
    start = max(pages, key=lambda place: pages[place][0], default=0)
    area, strips, read, tags = pages.get(start, ((), 0, False, {}))
    if not read:
        raise BadImage(
            "not an image, but a TIFF that is cut off or of another kind: save it as PNG"
        )
    if strips > _MOST_STRIPS:
        raise BadImage(_TOO_MANY.format(_MOST_STRIPS, "strips of a TIFF"))
    if [page[0] for page in pages.values()].count(area) > 1:
        remark(_SEVERAL)
    page = [entry.pack(*tags[tag]) for tag in sorted(tags)]
    page = b"".join((len(page).to_bytes(short, order), *page, bytes(word)))
    first, rest = memoryview(data)[head + word : start], memoryview(data)[start + len(page) :]
    return b"".join((data[:head], start.to_bytes(word, order), first, page, rest))


def _binary_pnm(image: "Image.Image", data: bytes) -> "Image.Image":
    """Reads a binary PNM of any maximum; Pillow decodes one other than 255 pixel by pixel."""
    from PIL import Image

    _, _, start, (_, most) = image.tile[0]
    shape = (image.height, image.width, len(image.getbands()))
    last = 65535 if image.mode == "I" else 255
    values = np.frombuffer(data, ">u2" if most > 255 else np.uint8, math.prod(shape), start)
    table = np.rint(np.arange(65536) / most * last).clip(0, last)
    pixels = table.astype(np.uint16 if image.mode == "I" else np.uint8)[values].reshape(shape)
    return Image.fromarray(pixels[..., 0] if shape[2] == 1 else pixels)


def _count_scans(data: bytes) -> int:
    """Counts the scans of a JPEG's first picture; 0 if the whole file is within the limit."""
    place, scans = 2, 0
    if data.count(b"\xff" + _SCAN) <= _MOST_SCANS:
        return 0
    for _ in range(_MOST_READS):
        found = _JPEG_MARKER.search(data, place)
        if not found or found[1] == _END:
            return scans
        scans += found[1] == _SCAN
        place = found.end() + int.from_bytes(data[found.end() : found.end() + 2], "big")
    return _MOST_READS


def _convert(image: "Image.Image", channels: int, remark: Callable[[str], Any]) -> "Image.Image":
    """Converts to mode L or RGB; scales 16 bits, and composites transparency on white."""
    from PIL import Image

    mode = "L" if channels == 1 else "RGB"
    if image.mode.startswith("I;16"):
        values = np.asarray(image).astype(np.int32)
        values[values == image.info.get("transparency", -1)] = 65535  # white
        image = Image.fromarray(((values * 2 + 257) // 514).astype(np.uint8))
    elif image.mode in ("I", "F"):
        kind = "32-bit integer" if image.mode == "I" else "floating-point"
        raise BadImage(f"{kind} image without a stated range; save it as 8 or 16 bits")
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        image = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        if np.asarray(image.getchannel("A")).mean() < 128:
            remark(_TRANSPARENT)
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    image = image.convert("RGB") if image.mode == "P" else image
    return image if image.mode == mode else image.convert(mode)


def fit_pillow(
    image: "Image.Image",
    image_size: tuple[int, int],
    channels: int,
    fit: str,
    *,
    bilinear: bool = False,
    remark: Callable[[str], Any] = _warn,
) -> np.ndarray:
    """Fits an upright Pillow image by the rules at the head of this file: uint8 (H, W, C).

    Args:
      bilinear: resample bilinearly, because bicubic resampling rings on tiny images.
      remark: called with each remark on the image; warns by default.
    """
    from PIL import Image

    resample = Image.Resampling.BILINEAR if bilinear else Image.Resampling.BICUBIC
    image = _convert(image, channels, remark)
    height, width = image_size
    scales = height / image.height, width / image.width
    if fit == "pad":
        inner = [max(1, round(n * min(scales))) for n in image.size]
        whole = Image.new(image.mode, (width, height))
        place = (width - inner[0]) // 2, (height - inner[1]) // 2
        whole.paste(image.resize(inner, resample), place)
        image = whole
    elif fit == "stretch":
        image = image.resize((width, height), resample)
    elif max(scales) == 1:
        left, top = (image.width - width) // 2, (image.height - height) // 2
        image = image.crop((left, top, left + width, top + height))
    else:
        # Only the part that is kept is resampled: a 10000×1 strip must not be blown up first.
        left = max(0.0, (image.width - width / max(scales)) / 2)
        top = max(0.0, (image.height - height / max(scales)) / 2)
        box = (left, top, image.width - left, image.height - top)
        image = image.resize((width, height), resample, box=box)
    pixels = np.asarray(image, dtype=np.uint8)
    return pixels[..., None] if pixels.ndim == 2 else pixels
