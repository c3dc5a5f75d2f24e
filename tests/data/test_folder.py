"""Class folders and archives of them: layouts, splits, bad input, streaming, caching."""

import errno
import gzip
import io
import os
import re
import stat
import tarfile
import zipfile
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hsvit_jax import data
from hsvit_jax.classifier import files
from hsvit_jax.data import archives, cache, folder, listing
from hsvit_jax.data.dataset import stream_batches


def put(path: Path, value: int, size=(6, 6), mode: str = "RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    colour = value if mode == "L" else (value, 255 - value, 7)
    Image.new(mode, size, colour).save(path)
    return path


def make(root: Path, parts: dict[str, int], classes=("cat", "dog")) -> Path:
    """``parts`` maps 'train', 'test', … (or '' for none) to images per class."""
    value = 0
    for part, count in parts.items():
        for name in classes:
            for i in range(count):
                put(root / part / name / f"{i:03d}.png", value % 256)
                value += 1
    return root


@pytest.fixture
def load(tmp_path):
    def call(path, **options):
        options = {"image_size": (6, 6), "data_dir": str(tmp_path / "data"), **options}
        return data.load(f"folder={path}", **options)

    return call


def sizes(dataset):
    return len(dataset.train), len(dataset.val), len(dataset.test)


def test_layouts(tmp_path, load):
    for number, (parts, expected) in enumerate(
        (
            ({"train": 20, "test": 5}, (36, 4, 10)),
            ({"train": 20, "val": 5}, (36, 4, 10)),
            ({"train": 20, "val": 3, "test": 5}, (40, 6, 10)),
            ({"train": 20, "valid": 3, "test": 5}, (40, 6, 10)),
            ({"Training": 20, "Testing": 5}, (36, 4, 10)),
            ({"train": 20, "Val": 3, "Test": 5}, (40, 6, 10)),
            ({"train": 20}, (24, 8, 8)),
            ({"": 20}, (24, 8, 8)),
        )
    ):
        dataset = load(make(tmp_path / f"set{number}", parts))
        splits = (dataset.train, dataset.val, dataset.test)
        assert sizes(dataset) == expected
        assert dataset.info.class_names == ("cat", "dog") and dataset.resident
        colours = np.concatenate([split.images[:, 0, 0, 0] for split in splits])
        assert len(set(colours.tolist())) == sum(expected)  # one for each image: disjoint
        for split in splits:
            np.testing.assert_array_equal(np.bincount(split.labels), [len(split) // 2] * 2)
            assert split.labels.dtype == np.int32
            np.testing.assert_array_equal(split.gather([1, 0, 1]), split.images[[1, 0, 1]])


def test_a_class_may_be_called_train_and_unused_folders_are_named(tmp_path, load):
    dataset = load(make(tmp_path / "wheels", {"": 20}, classes=("Bus", "Train")))
    assert dataset.info.class_names == ("Bus", "Train")
    for name, parts in {"set": ("train", "test"), "Set": ("Train", "Test")}.items():
        root = make(tmp_path / name, {parts[0]: 20, parts[1]: 5, "raw": 5})
        with pytest.warns(UserWarning, match="folders beside train are ignored: raw"):
            assert sizes(load(root)) == (36, 4, 10)
    classes = ("train_station/hall", "train_station/track", "pub")
    put(tmp_path / "sun/__MACOSX/pub/1.png", 1)
    with pytest.warns(UserWarning, match="are no classes: train_station holds hall, track"):
        found = load(make(tmp_path / "sun", {"": 20}, classes))
    assert found.info.class_names == ("pub", "train_station")
    with pytest.warns(UserWarning, match="no train folder: test is taken for a class"):
        assert load(make(tmp_path / "trial", {"": 20}, ("control", "test"))).info.num_classes == 2


def test_first_bytes_tell_an_image_and_what_is_none_is_counted(tmp_path, load):
    """Whatever the ending, in a folder, an archive, and a folder for `predict`."""
    root = make(tmp_path / "set", {"": 20})
    kinds = {".JPG": "JPEG", ".jpg?w=640": "JPEG", ".jpeg.1": "JPEG", ".jpg_large": "JPEG"}
    kinds |= {"": "PNG", ".webp": "PNG", ".txt": "GIF", ".tif~": "TIFF", ".b": "BMP", ".w": "WEBP"}
    kinds |= {".p": "PPM"}
    for i, (end, kind) in enumerate(kinds.items()):
        image = Image.new("RGB", (6, 6), (200, 3 * i, 9))
        image.save(root / f"dog/odd{i}{end}", kind)
    for name in (".DS_Store", "cat/.DS_Store", "cat/Thumbs.db", "dog/desktop.ini", "README.md"):
        (root / name).write_bytes(b"BM\0\1 P5 no image")
    assert sum(sizes(load(root))) == 51
    others = {"a.txt": b"P2 is the second", "b.TXT": b"BM", "c.mp4": b"\0\0\0\x18ftypisom"}
    others |= {"d": b"GIF of a dog", "e.npy": b"\x93NUMPY", "f.ico": b"\0\0\1\0", "g.txt": b""}
    for name, content in others.items():
        (root / "dog" / name).write_bytes(content)
    os.mkfifo(root / "dog/h.pipe")
    with pytest.warns() as warned:
        whole = load(root)
    (root / "dog/h.pipe").unlink()
    assert sum(sizes(whole)) == 51 and len(warned) == 1 and ": 3 .txt, " in str(warned[0].message)
    assert str(warned[0].message).endswith(" and 1 more; dog/a.txt first")
    for name in ("a.zip", "a.tar.gz"):
        path = pack(root, tmp_path / name)
        for _ in range(2):  # from the cache too
            with pytest.warns(match=r"ignored, because they are .*: 3 \.txt, .*dog/a\.txt first"):
                assert load(path).fingerprint == whole.fingerprint
    with pytest.warns(match=r": 3 \.txt, .* first"):
        assert len(files.listed([str(root / "dog")])) == 31
    (root / "dog/photo.part").write_bytes((root / "dog/odd0.JPG").read_bytes()[:100])
    with pytest.raises(ValueError, match=r"photo\.part: cannot be read"), pytest.warns():
        load(root)


def test_remarks_on_images_are_counted(tmp_path, load):
    root = make(tmp_path / "set", {"": 10})
    for i in range(3):
        Image.new("RGBA", (6, 6), (9, 9, i, 20)).save(root / f"cat/clear{i}.png")
    frames = [Image.new("L", (6, 6), value) for value in (3, 4)]
    frames[0].save(root / "dog/film.gif", save_all=True, append_images=frames[1:])
    for _ in range(2):  # from the cache too
        with (
            pytest.warns(match=r"^1 of 24 images have several frames.*/dog/film\.gif first$"),
            pytest.warns(match=r"^3 of 24 images are mostly transparent.*/cat/clear0\.png first$"),
        ):
            load(root)


def test_a_streamed_image_that_is_replaced_is_noticed(tmp_path, load):
    """By another one of the same size and time, too."""
    root = make(tmp_path / "set", {"train": 10, "test": 3})
    for path in root.rglob("*.png"):
        os.utime(path, (1e9, 1e9))
    streamed = load(root, resident_limit_bytes=1)
    before = streamed.test.gather(range(6))
    (root / "test/cat/000.png").touch()
    np.testing.assert_array_equal(streamed.test.gather(range(6)), before)
    (root / "test/cat/001.png").rename(root / "test/cat/000.png")
    batches = stream_batches(streamed.test, iter([np.arange(2)]))
    for read in (lambda: streamed.test.gather([0]), lambda: next(batches)):
        with pytest.raises(data.BadImage, match=r"cat/000\.png: replaced or changed after"):
            read()


ARCHIVES = ("a.zip", "a.tar", "a.tar.gz", "a.tar.xz")


def pack(root: Path, path: Path) -> Path:
    """Packs a folder into an archive of the kind that its name says."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            for file in sorted(root.rglob("*")):
                archive.write(file, file.relative_to(root).as_posix())
    else:
        with tarfile.open(path, "w:" + path.suffix[1:].replace("tar", "")) as archive:
            archive.add(root, "set")
    return path


@pytest.mark.parametrize("name", ARCHIVES)
def test_archives_equal_their_folder(name, tmp_path, load):
    """With one folder around train and test, or around train alone."""
    root = make(tmp_path / "set", {"train": 5, "test": 2})
    expected = load(root)
    path = pack(root, tmp_path / name)
    for again in (False, True):
        with pytest.warns(match="cached files in .* damaged") if again else nullcontext():
            dataset = load(path)
        assert dataset.fingerprint == expected.fingerprint
        np.testing.assert_array_equal(dataset.train.images, expected.train.images)
        (notes,) = (tmp_path / "data").rglob(f"unpacked-{name.replace('.', '-')}-*/notes.json")
        next(notes.parent.rglob("*.png")).unlink()
        rows = folder.find_listing(str(path), tmp_path / "data").rows  # unpacked again
        assert len(rows) == 14 and all(os.path.isfile(row.file.path) for row in rows)
        notes.write_text("{")  # damaged: unpacked again
    for part in ("train", "Training"):
        root = make(tmp_path / part / "set", {part: 10})
        outer = root if "tar" in name else root.parent  # tars have a folder around them anyway
        found = load(pack(outer, tmp_path / f"{part}-{name}"))
        assert found.info.class_names == ("cat", "dog") and sizes(found) == (12, 4, 4)


def test_fingerprint_is_of_the_content_not_of_the_place(tmp_path, load):
    first = load(make(tmp_path / "one", {"train": 5, "test": 2})).fingerprint
    two = make(tmp_path / "two", {"train": 5, "test": 2})
    assert load(two).fingerprint == first
    cropped, padded = (load(tmp_path / "one", image_size=(8, 6), fit=f) for f in ("crop", "pad"))
    assert cropped.train.images[:, 0].any() and not padded.train.images[:, 0].any()
    others = [load(tmp_path / "one", **how) for how in ({"val_fraction": 0.3}, {"channels": 1})]
    (two / "train/cat/004.png").rename(two / "train/dog/-00.png")
    others += [cropped, padded, load(two)]  # the same files, another label
    (two / "train/dog/-00.png").rename(two / "train/cat/004.png")
    assert load(two).fingerprint == first
    put(two / "train/cat/000.png", 99)
    assert len({first, load(two).fingerprint, *(found.fingerprint for found in others)}) == 7


def test_size_and_channels_follow_from_headers_of_all_classes(tmp_path):
    for side, expected in ((20, 32), (33, 64), (100, 128), (400, 128)):
        for name in ("a", "b"):
            put(tmp_path / f"{side}/{name}/0.png", 1, (side, side + 50), "L")
            put(tmp_path / f"tiff/{name}/0.tiff", 1, (600, 600), "L")  # whose header is its end
        info = data.describe(f"folder={tmp_path}/{side}")
        assert (info.image_size, info.channels, info.num_classes) == ((expected,) * 2, 1, 2)
        assert len(info.mean) == len(info.std) == 1
    assert data.describe(f"folder={tmp_path}/tiff").channels == 1
    for number, name in enumerate("abcde"):
        for i in range(12):
            put(tmp_path / f"grey/{name}/{i}.png", i, mode="RGB" if number > 2 else "L")
            put(tmp_path / f"large/{name}/{i}.png", i, size=(80, 80) if number > 1 else (20, 20))
    assert data.describe(f"folder={tmp_path}/grey").channels == 3
    assert data.describe(f"folder={tmp_path}/large").image_size == (128, 128)


def spoil(root: Path) -> list[str]:
    (root / "train/cat/000.png").write_bytes(b"")
    (root / "train/dog/001.png").write_bytes(b"<html>")
    (root / "train/dog/link.png").symlink_to("nowhere.png")
    os.mkfifo(root / "train/dog/pipe.png")
    whole = (root / "test/dog/000.png").read_bytes()
    (root / "test/dog/000.png").write_bytes(whole[: len(whole) // 2])
    return ["cat/000.png", "dog/001.png", "dog/link.png", "dog/pipe.png", "test/dog/000.png"]


def test_bad_images_are_fatal_or_skipped_with_a_warning(tmp_path, load):
    root = make(tmp_path / "set", {"train": 6, "test": 3})
    clean = load(root, val_fraction=0)
    names = spoil(root)
    for limit in (2**30, 0):
        options = {"val_fraction": 0, "resident_limit_bytes": limit}
        for _ in range(2):  # nothing of the first attempt may make the second succeed
            with pytest.raises(ValueError, match="5 of 20 images cannot be used") as error:
                load(root, **options)
            assert all(name in str(error.value) for name in [*names, "on_bad_image='skip'"])
        for _ in range(2):  # from the files, then from the cache
            with pytest.warns(UserWarning, match="5 of 20 images") as caught:
                dataset = load(root, on_bad_image="skip", **options)
            assert all(name in str(caught[0].message) for name in names)
            assert sizes(dataset) == (10, 0, 5)
            kept = np.r_[1:6, 6, 8:12]  # cat 1..5, dog 0, 2..5
            images = dataset.train.gather(np.arange(10))
            np.testing.assert_array_equal(images, clean.train.images[kept])
        with pytest.raises(ValueError, match="5 of 20"):  # the cache does not soften this policy
            load(root, **options)
    for i in range(6):
        (root / f"train/cat/{i:03d}.png").write_bytes(b"no")
    with (
        pytest.warns(UserWarning, match="10 of 20"),
        pytest.warns(UserWarning, match=r"no training image of cat .*test: cat 0/0/3\)"),
    ):
        load(root, on_bad_image="skip", val_fraction=0)


def test_what_could_not_be_read_once_is_tried_again(tmp_path, load, monkeypatch):
    root = make(tmp_path / "set", {"": 10})
    read = folder.read_file

    def failing(path):
        if str(path).endswith("cat/003.png"):
            raise OSError(errno.EIO, "Input/output error", path)
        return read(path)

    monkeypatch.setattr(folder, "read_file", failing)
    with pytest.warns(match=r"1 of 20 images .* dropped:\n.*cat/003.*: Input/output error"):
        assert sum(sizes(load(root, on_bad_image="skip"))) == 19
    monkeypatch.undo()
    assert sum(sizes(load(root, on_bad_image="skip"))) == 20


def test_zips_of_windows_name_folders_with_backslashes_or_from_a_dot(tmp_path, load):
    root = make(tmp_path / "set", {"": 10})
    for name, system, start, slash in (("a.zip", 0, "", "\\"), ("b.zip", 3, "./", "/")):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            for file in sorted(root.rglob("*.png")):
                info = zipfile.ZipInfo(f"{start}{file.parent.name}{slash}{file.name}")
                info.create_system = system
                archive.writestr(info, file.read_bytes())
        assert load(tmp_path / name).fingerprint == load(root).fingerprint


def test_names_in_a_zip_of_macos_are_utf8(tmp_path, load):
    """The Finder's lack the flag that says so; \\x08 is its half of the two bytes of flags."""
    path = pack(make(tmp_path / "set", {"": 10}, classes=("Kühe", "Öchsle")), tmp_path / "a.zip")
    raw = path.read_bytes()
    for head, at in ((b"PK\3\4", 7), (b"PK\1\2", 9)):
        raw = re.sub(
            re.escape(head) + b"." * (at - 4) + b"\x08",
            lambda m: m[0][:-1] + b"\0",
            raw,
            flags=re.S,
        )
    path.write_bytes(raw)
    assert load(path).info.class_names == ("Kühe", "Öchsle")


def test_copies_of_an_image_are_named(tmp_path, load):
    root = make(tmp_path / "set", {"": 10})
    put(root / "dog/IMG_1 (1).png", 3)  # what cat/003.png is
    for _ in range(2):  # from the cache too
        with pytest.warns(match=r"1 of 21 images .* copies of others, .*1 \(1\)\.png of .*cat/003"):
            load(root)


def test_hidden_and_other_files_are_passed_over(tmp_path, load):
    root = make(tmp_path / "set", {"": 10})
    for name in (".DS_Store", "cat/._000.png", "cat/.hidden.png", "dog/Thumbs.db"):
        (root / name).write_bytes(b"junk")
    put(root / ".cache/x.png", 3)
    put(root / "cat/deeper/000.JPEG", 200)  # folders within a class belong to it
    for name in ("@eaDir/a.jpg", "dog/@eaDir/000.png/SYNOPHOTO_THUMB_M.jpg"):
        put(root / name, 5)
    assert sum(sizes(load(root))) == 21
    assert load(pack(root, tmp_path / "a.zip")).fingerprint == load(root).fingerprint
    put(root / "preview.png", 3)
    with pytest.warns(UserWarning, match=r"1 images .* no class folder.*preview\.png"):
        assert sum(sizes(load(root))) == 21
    (root / "preview.png").unlink()
    (root / "dog/phone.HEIC").write_bytes(b"\0\0\0\x18ftypheic")  # an image, and not passed over
    with pytest.raises(ValueError, match=r"phone\.HEIC: not an image"):
        load(root)


def test_symlink_loops_end_and_links_are_followed(tmp_path, load):
    root = make(tmp_path / "set", {"": 10})
    (root / "cat/again").symlink_to(root, target_is_directory=True)
    (root / "cat/itself").symlink_to("itself")
    make(tmp_path / "elsewhere", {"": 10}, classes=("ant", "bee", "emu"))  # other colours
    (root / "emu").symlink_to(tmp_path / "elsewhere/emu", target_is_directory=True)
    with pytest.warns(UserWarning, match="in a circle are not followed: cat/again, cat/itself"):
        dataset = load(root)
    assert dataset.info.class_names == ("cat", "dog", "emu")
    assert sum(sizes(dataset)) == 30


BAD_LAYOUTS = {
    "empty": (lambda r: r.mkdir(), r"no images in class folders.*PATH/train/CLASS"),
    "one": (lambda r: make(r, {"": 3}, ("cat",)), "two or more different classes; it has cat"),
    "no train": (lambda r: make(r, {"val": 3, "test": 3}), "holds test, val, .* without train"),
    "strange": (lambda r: make(r, {"": 3}, ("a\x1b[1m", "b\udce9")), r"a\\x1b\[1m, b\\udce9; re"),
    "flat test": (
        lambda r: (make(r, {"Train": 3}), put(r / "Test/0.png", 1), put(r / "Meta/0.png", 1)),
        "holds Train, which look like splits",
    ),
    "named": (
        lambda r: make(r, {"seg_train/seg_train": 3, "seg_test/seg_test": 3, "seg_pred": 0}),
        "holds seg_test, seg_train, which look like splits",
    ),
    "test beside": (
        lambda r: (make(r, {"": 3}), make(r / "test", {"": 3})),
        "holds test, which look like splits",
    ),
    "two vals": (lambda r: make(r, {"train": 3, "val": 3, "valid": 3}), "keep one"),
    "few": (lambda r: make(r, {"": 1}), "leave 2 for training and 0 for test"),
}


@pytest.mark.parametrize("name", BAD_LAYOUTS)
def test_bad_layouts_are_explained(name, tmp_path, load):
    build, message = BAD_LAYOUTS[name]
    build(tmp_path / name)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        load(tmp_path / name)


def test_paths_that_hold_no_data(tmp_path, load):
    for name in ("nowhere", "x" * 300, "a\0b"):
        with pytest.raises(ValueError, match=r"no such folder or archive.*PATH/train/CLASS"):
            load(tmp_path / name)
    (tmp_path / "notes.txt").write_text("x")
    os.mkfifo(tmp_path / "pipe.zip")
    for name in ("notes.txt", "pipe.zip"):
        with pytest.raises(ValueError, match="neither a folder nor an archive"):
            load(tmp_path / name)
    with pytest.raises(ValueError, match=r"cannot write to .*notes\.txt.*HSVIT_DATA_DIR"):
        load(make(tmp_path / "set", {"": 10}), data_dir=str(tmp_path / "notes.txt/data"))


def test_too_large_for_memory_is_streamed_with_equal_pixels(tmp_path, load):
    root = make(tmp_path / "set", {"train": 10, "test": 3})
    resident, streamed = load(root), load(root, resident_limit_bytes=26 * 6 * 6 * 3 - 1)
    assert resident.resident and not streamed.resident
    assert streamed.fingerprint == resident.fingerprint
    for a, b in ((resident.train, streamed.train), (resident.val, streamed.val)):
        np.testing.assert_array_equal(a.images, b.gather(np.arange(len(b))))
        np.testing.assert_array_equal(a.labels, b.labels)
    with pytest.raises(IndexError, match="out of bounds"):
        streamed.test.gather([6])
    (root / "test/dog/002.png").unlink()
    with pytest.raises(data.BadImage, match=r"test/dog/002\.png: cannot be read"):
        streamed.test.gather([5])


def test_the_second_time_only_changed_files_are_decoded(tmp_path, load, monkeypatch):
    root = make(tmp_path / "set", {"train": 10, "test": 3})
    calls = []
    first = load(root, progress=lambda *call: calls.append(call))
    assert calls[-1] == ("decoding images", 26, 26)
    with monkeypatch.context() as patch:
        patch.setattr("hsvit_jax.data.decode.read_image", None)
        again = load(root)
    assert again.fingerprint == first.fingerprint
    np.testing.assert_array_equal(again.train.images, first.train.images)
    assert not list((tmp_path / "data").rglob("*.part-*"))
    os.utime(put(root / "test/cat/000.png", 123), ns=(1, 1))
    assert load(root).test.images[0, 0, 0, 0] == 123
    one, other, aside = (root / f"test/{name}.bmp" for name in ("cat/9", "dog/9", "aside"))
    for file, value in ((one, 50), (other, 60)):
        os.utime(put(file, value), (1e9, 1e9))
    assert load(root).test.images[[3, 7], 0, 0, 0].tolist() == [50, 60]
    for old, new in ((one, aside), (other, one), (aside, other)):  # of one size and mtime
        old.rename(new)
    assert load(root).test.images[[3, 7], 0, 0, 0].tolist() == [60, 50]


def test_a_path_that_leads_elsewhere_is_decoded_again(tmp_path, load, monkeypatch):
    """Of files of the same names, sizes and times, as bitmaps and `rsync -t` have them."""
    lines = [f"photos/{n}/{i}.bmp,{n}" for i, n in enumerate(("cat", "dog") * 10)]
    for value, place in ((10, "A"), (20, "B")):
        for i, name in enumerate(("cat", "dog") * 10):
            file = put(tmp_path / f"{place}/photos/{name}/{i}.bmp", value + i)
            os.utime(file, (1e9, 1e9))
        (tmp_path / place / "t.csv").write_text("\n".join(["image,label", *lines]))
    for value, place in ((10, "A"), (20, "B")):
        monkeypatch.chdir(tmp_path / place)
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(place)
        table = data.load("csv=t.csv", image_size=(6, 6), data_dir=str(tmp_path / "data"))
        for found in (load("photos"), load(tmp_path / "link/photos"), table):
            pixels = np.concatenate([s.images for s in (found.train, found.val, found.test)])
            assert sorted(pixels[:, 0, 0, 0].tolist()) == list(range(value, value + 20))


def test_a_damaged_cache_is_built_again(tmp_path, load):
    root = make(tmp_path / "set", {"": 10})
    first = load(root)
    (folder,) = (tmp_path / "data/cache").iterdir()
    for damage in ("flip", "cut", "notes", "missing"):
        path = folder / ("notes.json" if damage == "notes" else "images.npy")
        raw = bytearray(path.read_bytes())
        if damage == "missing":
            path.unlink()
        elif damage == "cut":
            path.write_bytes(raw[:-50])
        else:
            raw[len(raw) // 2] ^= 4
            path.write_bytes(raw)
        with pytest.warns(UserWarning, match="damaged"):
            again = load(root)
        np.testing.assert_array_equal(again.train.images, first.train.images)
        assert load(root).fingerprint == first.fingerprint  # without a warning, which is an error


def tar_with(path: Path, *infos: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w") as archive:
        for info in infos:
            archive.addfile(info, io.BytesIO(b"\0" * info.size))
    return path


def test_hostile_archives(tmp_path, load, monkeypatch):
    up = tarfile.TarInfo("../evil.png")
    with pytest.raises(ValueError, match=r"unsafe name '\.\./evil\.png'"):
        load(tar_with(tmp_path / "up.tar", up))
    link = tarfile.TarInfo("cat/0.png")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    with (
        pytest.warns(UserWarning, match=r"links to images in .*link\.tar are ignored: cat/0\.png"),
        pytest.raises(ValueError, match="no images in class folders"),
    ):
        load(tar_with(tmp_path / "link.tar", link))
    link = zipfile.ZipInfo("cat/link.png")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    zipped = pack(make(tmp_path / "set", {"": 10}), tmp_path / "link.zip")
    with zipfile.ZipFile(zipped, "a") as archive:
        archive.writestr(link, "000.png")
    with pytest.warns(UserWarning, match=r"links to images in .*link\.zip .* cat/link\.png; pack"):
        assert sum(sizes(load(zipped))) == 20
    for name, why in (("x" * 300, "name too long"), ("cat/0.png", "File exists")):
        odd = [tarfile.TarInfo("cat/0.png"), tarfile.TarInfo(f"{name}/1.png")]
        with pytest.raises(archives.BadArchive, match=why):
            load(tar_with(tmp_path / "odd.tar", *odd))
    monkeypatch.setattr(archives, "_FLOOR_BYTES", 1000)
    monkeypatch.setattr(archives, "_MAX_RATIO", 2)
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("cat/0.png", b"\0" * 1_000_000)
    with pytest.raises(ValueError, match="more than 2 times its size"):
        load(tmp_path / "bomb.zip")
    monkeypatch.setattr(archives, "MAX_MEMBERS", 3)
    with pytest.raises(ValueError, match="more than 3 members"):
        load(tar_with(tmp_path / "many.tar", *(tarfile.TarInfo(f"{i}.txt") for i in range(5))))
    assert not (tmp_path / "evil.png").exists()
    assert not list((tmp_path / "data").rglob("*.part-*"))


def test_many_and_deep_folders_are_grouped_at_once(tmp_path, load):
    """In one pass over the files, without recursion; a depth that no set has is refused."""
    deep = "/".join(["a"] * 1200)
    with zipfile.ZipFile(tmp_path / "deep.zip", "w") as archive:
        for name in ("train", "test"):
            archive.writestr(f"{name}/{deep}/0.png", b"")
    with pytest.raises(ValueError, match=r"deep\.zip has more than 100 folders in train/a/"):
        load(tmp_path / "deep.zip")
    files = [
        listing.File(f"set/test_{i}/{part}/{k}.png", "")
        for i in range(4000)
        for k, part in enumerate(("left", "right"))
    ]
    dirs = frozenset(file.name.rpartition("/")[0] for file in files)
    passes = []

    class Counted(tuple):
        def __iter__(self):
            passes.append(len(self))
            return super().__iter__()

    with pytest.raises(ValueError, match=r"test_0, test_1, .* 3,995 more, which look like splits"):
        listing.arrange(listing.Tree("many.zip", Counted(files), dirs))
    inside = {f"train/{part}" for part in "ab"} | {f"aside_{i}" for i in range(4000)}
    files = [listing.File(f"{folder}/0.png", "") for folder in sorted(inside)]
    with pytest.warns(UserWarning, match=r"beside train are ignored: aside_0, .* 3,995 more"):
        listing.arrange(listing.Tree("aside.zip", Counted(files), frozenset(inside)))
    assert len(passes) < 20, passes  # not one for each folder


def test_every_unpacked_byte_counts(tmp_path, load, monkeypatch):
    """Those of members that nobody wants too, and a header is never read in at any length."""
    monkeypatch.setattr(archives, "_FLOOR_BYTES", 400_000)
    monkeypatch.setattr(archives, "_MAX_RATIO", 2)
    packed = tmp_path / "packed.tar.gz"
    tail = tar_with(tmp_path / "small.tar").read_bytes() + bytes(500_000)
    for body in (bomb(tarfile.REGTYPE), bomb(b"?"), tail):
        packed.write_bytes(gzip.compress(body))
        with pytest.raises(ValueError, match=r"packed\.tar\.gz unpacks to more than 2 times"):
            load(packed)
    member = tarfile.TarInfo("cat/0.png")
    member.pax_headers = {"comment": "x" * 300_000}
    with pytest.raises(ValueError, match=r"pax\.tar .*a header of 300,0\d\d bytes"):
        load(tar_with(tmp_path / "pax.tar", member))
    with zipfile.ZipFile(tmp_path / "bz.zip", "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("cat/0.png", b"")
    with pytest.raises(ValueError, match=r"bz\.zip .*cat/0\.png is neither stored nor deflated"):
        load(tmp_path / "bz.zip")


@pytest.mark.parametrize("name", ARCHIVES)
def test_damaged_archives_are_refused(name, tmp_path):
    """Cut off anywhere, a few bytes lost, or one bit changed: in one line, or all are there."""
    root = make(tmp_path / "set", {"": 10})
    path = pack(root, tmp_path / name)
    raw, rng = path.read_bytes(), np.random.default_rng(0)
    cuts = [len(raw) * i // 40 for i in range(40)]
    if name == "a.tar":  # at the edge of a member, where only the missing end mark tells
        with tarfile.open(path) as archive:
            cuts.append(archive.getmembers()[-3].offset)
    flipped = []
    for at, bit in zip(rng.integers(len(raw), size=60), rng.integers(8, size=60), strict=True):
        flipped.append(bytearray(raw))
        flipped[-1][at] ^= 1 << bit
    holed = [raw[:at] + raw[at + 300 :] for at in range(0, len(raw), len(raw) // 9)]
    refused = 0
    for i, damaged in enumerate((*(raw[:end] for end in cuts), *holed, *flipped)):
        path.write_bytes(damaged)
        try:
            archives.unpack(path, tmp_path / f"unpacked{i}")
        except archives.BadArchive as error:
            assert re.fullmatch(rf".*{name}\b.*", str(error))
            refused += 1
        else:
            assert len([*(tmp_path / f"unpacked{i}").rglob("*.png")]) == 20
    assert refused >= len(cuts)


def test_a_damaged_header_is_not_the_end(tmp_path):
    """Of a member in the middle, or of the attributes before it."""
    path = tmp_path / "pax.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for name in ("cat/0.png", "dog/0.png"):
            member = tarfile.TarInfo(name)
            member.pax_headers = {"comment": name}
            archive.addfile(member)
    whole = path.read_bytes()
    for old, new in ((b"21 comment=dog", b"00 comment=dog"), (b"dog/0.png\0", b"dog/1.png\0")):
        path.write_bytes(whole.replace(old, new))
        assert path.read_bytes() != whole
        with pytest.raises(archives.BadArchive, match=r"pax\.tar cannot be unpacked at 'cat/0"):
            archives.unpack(path, tmp_path)


def bomb(kind: bytes) -> bytes:
    """A tar of a member of 500,000 zeros, of a type that nobody knows, too."""
    info = tarfile.TarInfo("cat/0.png")
    info.size, info.type = 500_000, kind
    return info.tobuf() + bytes(512 * 977) + bytes(1024)


def test_leftovers_of_killed_processes_are_removed(tmp_path, load, monkeypatch):
    root = make(tmp_path / "set", {"": 10})
    folder = tmp_path / "data/cache"
    (folder / ".x.part-1").mkdir(parents=True)
    (folder / ".x.part-1/images.npy").write_bytes(b"half")
    os.utime(folder / ".x.part-1", (0, 0))  # of a host that is gone
    (folder / f".z.part-{cache._HOST}-1").mkdir()
    with cache.scratch_folder(folder / "y") as live:  # as another process would have it
        load(root)
        assert live.is_dir()
    with cache.scratch_folder(folder / "y") as live, monkeypatch.context() as elsewhere:
        elsewhere.setattr(cache, "_HOST", "another")
        elsewhere.setattr(cache.fcntl, "flock", lambda *_: None)  # locks that hosts do not share
        load(root)
        assert live.is_dir()

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ValueError, match=r"cannot write to .*cache \(No space left on device\)"):
        load(root, image_size=(7, 7))
    assert [p.name for p in folder.iterdir() if p.name.startswith(".")] == []
    monkeypatch.delattr(os, "posix_fallocate")  # as on macOS
    assert load(root, image_size=(7, 7)).info.image_size == (7, 7)
