"""The odd files of ImageNet and of phone cameras, through class folders, in memory and streamed."""

import io

import numpy as np
import pytest
from PIL import Image, ImageOps

from hsvit_jax import data
from hsvit_jax.data.stream import stream_batches

HEIGHT, WIDTH = 24, 32


def picture(seed: int, channels: int = 3) -> np.ndarray:
    """A smooth one, of which JPEG keeps the colours."""
    small = np.random.default_rng(seed).integers(0, 256, (3, 4, channels), dtype=np.uint8)
    planes = [Image.fromarray(small[..., i]) for i in range(channels)]
    planes = [p.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC) for p in planes]
    return np.stack([np.asarray(p) for p in planes], axis=-1)


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def turned() -> bytes:
    """Stored lying on its side, with the note that says so."""
    exif = Image.Exif()
    exif[0x0112] = 6
    lying = Image.fromarray(picture(6)).rotate(90, expand=True)
    return encoded(lying, "JPEG", exif=exif, quality=95)


WIDE = np.arange(HEIGHT * WIDTH, dtype=np.uint16).reshape(HEIGHT, WIDTH) * 85
GREY_ALPHA = picture(8, 2)
# File → its bytes, under the names that ImageNet has.
FILES = {
    "plain.JPEG": encoded(Image.fromarray(picture(0)), "JPEG", quality=95),
    "cmyk.JPEG": encoded(Image.fromarray(picture(1, 4), "CMYK"), "JPEG", quality=95),
    "png.JPEG": encoded(Image.fromarray(picture(2)), "PNG"),
    "gif.JPEG": encoded(Image.fromarray(picture(3)).quantize(), "GIF"),
    "grey.JPEG": encoded(Image.fromarray(picture(4, 1)[..., 0]), "JPEG"),
    "progressive.jpg": encoded(Image.fromarray(picture(5)), "JPEG", progressive=True),
    "turned.JPEG": turned(),
    "alpha.png": encoded(Image.fromarray(picture(7, 4), "RGBA"), "PNG"),
    "grey-alpha.png": encoded(Image.fromarray(GREY_ALPHA, "LA"), "PNG"),
    "wide.png": encoded(Image.fromarray(WIDE), "PNG"),
    "palette.PNG": encoded(Image.fromarray(picture(9)).quantize(), "PNG", transparency=3),
    "Profile.JPG": encoded(
        Image.fromarray(picture(10)), "JPEG", quality=95, icc_profile=b"\0" * 3000, comment=b"x"
    ),
}


def expected(name: str) -> np.ndarray:
    """As Pillow converts it, but that 16 bits are scaled and transparency is on white."""
    if name == "wide.png":
        grey = np.floor(WIDE / 257 + 0.5).astype(np.uint8)
        return np.repeat(grey[..., None], 3, axis=-1)
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(FILES[name])))
    if name in ("alpha.png", "grey-alpha.png", "palette.PNG"):
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return np.asarray(image.convert("RGB"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two classes of the same files, twice each in train."""
    root = tmp_path_factory.mktemp("quirks")
    for part, copies in (("train", 2), ("val", 1)):
        for label in ("n01", "n02"):
            for copy in range(copies):
                where = root / part / label / f"{copy}"
                where.mkdir(parents=True)
                for name, content in FILES.items():
                    (where / name).write_bytes(content)
    return root


@pytest.mark.parametrize("limit", [2**30, 0])
def test_every_file_has_its_own_colours(folder, limit, tmp_path):
    dataset = data.load(
        f"folder={folder}",
        image_size=(HEIGHT, WIDTH),
        data_dir=str(tmp_path),
        val_fraction=0.0,
        resident_limit_bytes=limit,
    )
    assert dataset.info.channels == 3
    names = sorted(FILES)
    for split, copies in ((dataset.train, 2), (dataset.test, 1)):
        assert len(split) == 2 * copies * len(FILES)
        if limit:
            images = split.images
        else:
            assert split.images is None
            order = np.arange(len(split)).reshape(2, -1)
            images = np.concatenate([x for x, _, _ in stream_batches(split, iter(order))])
        for image, name in zip(images, names * 2 * copies, strict=True):
            np.testing.assert_array_equal(image, expected(name), err_msg=name)


def test_the_pictures_are_what_was_drawn():
    """Pillow's conversion, which is believed above, gives the colours that were meant."""
    cyan, magenta, yellow, black = np.moveaxis(picture(1, 4).astype(float), -1, 0)
    ink = np.stack([cyan, magenta, yellow], axis=-1)
    cmyk = (255 - ink) * (255 - black[..., None]) / 255
    for name, drawn in (
        ("cmyk.JPEG", cmyk),
        ("turned.JPEG", picture(6).astype(float)),
        ("plain.JPEG", picture(0).astype(float)),
    ):
        assert np.abs(expected(name) - drawn).mean() < 6, name
    np.testing.assert_array_equal(expected("png.JPEG"), picture(2))
    value, alpha = np.moveaxis(GREY_ALPHA.astype(float), -1, 0)
    on_white = value * alpha / 255 + 255 - alpha
    assert np.abs(expected("grey-alpha.png")[..., 1] - on_white).max() < 1.5


@pytest.mark.parametrize("mode", ["CMYK", "L"])
def test_large_ones_are_decoded_small(mode):
    """Reduced decoding keeps the colours of CMYK and grey files as of others."""
    small = Image.fromarray(picture(11, len(mode)).squeeze(), mode)
    large = small.resize((WIDTH * 16, HEIGHT * 16), Image.Resampling.BICUBIC)
    content = encoded(large, "JPEG", quality=95)
    full = Image.open(io.BytesIO(content)).convert("RGB")
    full = full.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
    found = data.read_image(content, (HEIGHT, WIDTH), 3).astype(int)
    assert np.abs(found - np.asarray(full)).max() < 6


def test_a_damaged_exif_note_spoils_no_picture():
    """Pillow warns of it, and the pixels are what they are."""
    note = Image.Exif()
    note[0x0112] = 6
    content = encoded(Image.fromarray(picture(0)), "JPEG", quality=95, exif=note.tobytes()[:20])
    with pytest.warns(UserWarning, match="Corrupt EXIF"):
        found = data.read_image(content, (HEIGHT, WIDTH), 3)
    np.testing.assert_array_equal(found, expected("plain.JPEG"))
