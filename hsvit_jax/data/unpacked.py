"""Named sets as people have them: unpacked, or where torchvision puts them."""

import dataclasses
import itertools
import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from hsvit_jax.data import archives
from hsvit_jax.data.download import RemoteFile, digest_of, verify
from hsvit_jax.data.listing import Tree, walk

Forms = tuple[tuple[str, Mapping[str, str]], ...]


def _tables() -> tuple[dict[str, tuple[RemoteFile, ...]], dict[str, Forms], dict[str, str]]:
    """The three tables below, from published.txt."""
    published, forms, archive_names = {}, {}, {}
    text = (resources.files("hsvit_jax.data") / "published.txt").read_text("utf-8")
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        name, place, file, checksum, mebibytes = line.split()
        checksum = checksum.removeprefix("-")
        if "://" in place:
            remote = RemoteFile(f"{place}/{file}", checksum, int(mebibytes) << 20)
            published[name] = (*published.get(name, ()), remote)
        else:
            forms.setdefault(name, {}).setdefault((place, bool(checksum)), {})[file] = checksum
        if file.endswith(archives.SUFFIXES) and "/" not in name:  # a domain's is a common word
            archive_names[file] = name
    forms = {
        name: tuple((place, files) for (place, _), files in of.items())
        for name, of in forms.items()
    }
    return published, forms, archive_names


#: Set → the files it is published as; set → its forms, each the usual folder and files in it with
#: their published checksums, where there are any; name of an archive → set.
PUBLISHED, FORMS, _ARCHIVES = _tables()


@dataclasses.dataclass(frozen=True)
class Found:
    """A named set in one of its `FORMS`: the folder, and its files with their checksums."""

    folder: Path
    checksums: Mapping[str, str]

    def paths(self) -> tuple[list[Path], bool]:
        """The files, and whether all are as published, which those that were packed anew are not;
        ValueError for another one with a wrong checksum."""
        published = True
        for name, checksum in self.checksums.items():
            path = self.folder / name
            published &= bool(checksum) and digest_of(path, checksum) == checksum
            if checksum and not published and not name.endswith((".gz", ".zip")):
                verify(path, checksum)
        return [self.folder / name for name in self.checksums], published

    def identity(self) -> list:
        """Place, sizes and times of the files: other ones when a file changes."""
        stats = [(self.folder / name).stat() for name in self.checksums]
        return [[str(self.folder.resolve())], *([s.st_size, s.st_ctime_ns] for s in stats)]

    def tree(self) -> Tree:
        """All image and text files, named as in the archive."""
        tree = walk(self.folder, (".txt", ".json"))
        files = (file._replace(name=f"{self.folder.name}/{file.name}") for file in tree.files)
        return dataclasses.replace(tree, files=tuple(files))


def find(name: str, data_dir: Path) -> Found | None:
    """Finds a named set in `data_dir/name` or `data_dir`: in its usual folder, or right there."""
    for usual, checksums in FORMS.get(name, ()):
        for folder in (data_dir / name / usual, data_dir / usual, data_dir / name, data_dir):
            if all((folder / file).is_file() for file in checksums):
                return Found(folder, checksums)
    return None


def refuse_named(root: Path) -> None:
    """Raises ValueError, which says how to use it, for a folder or archive that is a named set."""
    root = root.absolute()
    name, data_dir = _ARCHIVES.get(root.name, ""), root.parent
    for base, known in itertools.product((*reversed(root.parents[:2]), root), FORMS):
        found = None if name else find(known, base)
        if found and root in (found.folder, *found.folder.parents):
            name, data_dir = known, base
    if name:
        where = "" if find(name, Path(os.devnull)) else f", with --config.data.dir={data_dir}"
        raise ValueError(
            f"folder={root.name}: this is {name}, which has a name of its own: use :{name} after "
            f"the colon{where}"
        )
