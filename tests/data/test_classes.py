"""Classes that a split lacks, and names that may be one class, are reported by every source."""

import contextlib
import csv
import os
import threading
import zipfile

import numpy as np
import pytest
from support.data_files import encoded, noise

import hsvit_jax
from hsvit_jax import data, main, text


def make(root, counts):
    """Class folders of a split each, of so many images: (train, val, test) by class."""
    number = 0
    for name, of in counts.items():
        for part, count in zip(("train", "val", "test"), of, strict=True):
            if count is not None:
                (root / part / name).mkdir(parents=True)
            for _ in range(count or 0):
                file = root / part / name / f"{number}.png"
                file.write_bytes(encoded(noise((8, 8, 3), number)))
                number += 1
    return root


def packed(root):
    with zipfile.ZipFile(root.with_suffix(".zip"), "w") as archive:
        for file in sorted(root.rglob("*")):
            archive.write(file, file.relative_to(root))
    return f"folder={root}.zip"


def tabled(root):
    with open(root / "table.csv", "w", newline="") as file:
        rows = [file.relative_to(root) for file in sorted(root.rglob("*.png"))]
        rows = [[str(row), row.parts[1], row.parts[0]] for row in rows]
        csv.writer(file).writerows([["image", "label", "split"], *rows])
    return f"csv={root / 'table.csv'}"


SOURCES = {"folder": lambda root: f"folder={root}", "archive": packed, "table": tabled}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("none", [0, None], ids=["empty folder", "no folder"])
def test_a_class_that_a_split_lacks_is_told_with_its_counts(source, none, tmp_path):
    cases = {
        "train": ({"a": (9, 2, 3), "b": (9, 2, 3), "c": (none, 1, 3)}, "training", "c 0/1/3"),
        "test": ({"a": (9, 2, 3), "b": (9, 2, 3), "c": (8, 2, none)}, "test", "c 8/2/0"),
        "held": ({"a": (9, 2, 3), "b": (8, none, none)}, "validation", "b 8/0/0"),
    }
    for name, (counts, split, told) in cases.items():
        place = SOURCES[source](make(tmp_path / name, counts))
        with pytest.warns(UserWarning, match=rf"no {split} image of .*test: {told}\)$") as caught:
            found = data.load(place, data_dir=str(tmp_path / "data"), image_size=(8, 8))
        assert len(caught) == 1 and found.info.class_names == tuple(counts)
        for part, number in zip((found.train, found.val, found.test), range(3), strict=True):
            expected = [of[number] or 0 for of in counts.values()]
            assert np.bincount(part.labels, minlength=len(counts)).tolist() == expected
        assert data.load(place, data_dir=str(tmp_path), image_size=(8, 8), test_only=True)


def test_an_empty_split_is_none(tmp_path):
    root = make(tmp_path / "set", {"a": (9, 0, 0), "b": (9, 0, None)})
    found = data.load(f"folder={root}", data_dir=str(tmp_path), image_size=(8, 8))
    assert [len(split) for split in (found.train, found.val, found.test)] == [14, 2, 2]


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("Cat", "cat", True),
        ("1", "1.0", True),
        ("07", "7", True),
        ("red\u00a0car ", "red car", True),
        ("cat\u200b", "cat", True),
        ("stra\u00dfe", "STRASSE", True),
        ("\uff23at", "cat", True),
        ("1", "10", False),
        ("cat", "cats", False),
        ("12345678901234567890123456", "12345678901234567890123457", False),
    ],
)
def test_names_that_may_be_one_class_are_told(one, other, alike):
    images, labels = noise((20, 8, 8, 3)), [one, other] * 10
    if not alike:
        hsvit_jax.from_arrays(images, labels)
        return
    pair = "/".join(map(text.one_line, sorted((one, other))))
    with pytest.warns(UserWarning, match="names that differ only in case, blanks or ") as caught:
        hsvit_jax.from_arrays(images, labels)
    assert f"or form: {pair}" in str(caught[0].message)


def test_blank_splits_of_a_table_are_counted(tmp_path):
    root = make(tmp_path / "set", {"a": (9, 2, 3), "b": (9, 2, 3)})
    place, text = tabled(root), (root / "table.csv").read_text()
    (root / "table.csv").write_text(text.replace(",val", ", "))
    with pytest.warns(UserWarning, match="4 of 28 lines have a blank split and count as train"):
        found = data.load(place, data_dir=str(tmp_path), val_fraction=0)
    assert (len(found.train), len(found.test)) == (22, 6)
    for part in ("train", "val", "test"):
        text = text.replace(f",{part}\n", ",\n").replace(f",{part}\r", ",\r")
    (root / "table.csv").write_text(text)
    found = data.load(place, data_dir=str(tmp_path))  # of no splits, as without the column
    assert [len(split) for split in (found.train, found.val, found.test)] == [20, 4, 4]


@pytest.mark.parametrize("config", ["c2a2:csv=PIPE", "PIPE"])
def test_a_pipe_is_no_table_and_no_configuration(config, tmp_path, capsys):
    """One without a writer would never end."""
    pipe, table = tmp_path / "pipe.py", "image,label\n0.png,a\n1.png,b\n"
    os.mkfifo(pipe)

    def feed():
        with contextlib.suppress(BrokenPipeError):
            pipe.write_text(table)

    threading.Thread(target=feed, daemon=True).start()
    argument = config.replace("PIPE", str(pipe))
    assert main.main(["hsvit", "train", f"--config={argument}", f"--workdir={tmp_path}/run"])
    assert "not a regular file" in capsys.readouterr().err
