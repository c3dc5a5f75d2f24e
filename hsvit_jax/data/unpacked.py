"""Named sets as people have them: unpacked, or where torchvision puts them."""

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path

from hsvit_jax.data.download import verify
from hsvit_jax.data.listing import Tree, walk

_CIFAR10_MD5 = {
    "data_batch_1": "md5:c99cafc152244af753f735de768cd75f",
    "data_batch_2": "md5:d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "md5:54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "md5:634d18415352ddfa80567beed471001a",
    "data_batch_5": "md5:482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "md5:40351d587109b95175f43aff81a1287e",
    "batches.meta": "md5:5ff9c542aee3614f3951f8cda6e48888",
}
_CIFAR100_MD5 = {
    "train": "md5:16019d7e3df5f24257cddd939b257f8d",
    "test": "md5:f0ef6b0ae62326f3e7ffdfab6717acfc",
    "meta": "md5:7973b15100ade9c7d40fb424638fde48",
}
_FASHION_MD5 = {
    "train-images-idx3-ubyte.gz": "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "md5:25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "md5:bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "md5:bb300cfdad3c16e7a12a480ee83cd310",
}
_CIFAR10_FILES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")

#: Set → its forms: the usual folder, and files in it with their published checksums, where there
#: are any.
FORMS: Mapping[str, tuple[tuple[str, Mapping[str, str]], ...]] = {
    "cifar10": (
        ("cifar-10-batches-py", _CIFAR10_MD5),
        ("cifar-10-batches-bin", dict.fromkeys((*_CIFAR10_FILES, "batches.meta.txt"), "")),
        (".", {"cifar-10-python.tar.gz": "md5:c58f30108f718f92721af3b95e74349a"}),
    ),
    "cifar100": (
        ("cifar-100-python", _CIFAR100_MD5),
        ("cifar-100-binary", dict.fromkeys(("train.bin", "test.bin", "fine_label_names.txt"), "")),
        (".", {"cifar-100-python.tar.gz": "md5:eb9058c3a382ffc7106e4002c42a8d85"}),
    ),
    "fashion_mnist": (
        ("FashionMNIST/raw", _FASHION_MD5),
        ("FashionMNIST/raw", dict.fromkeys((name[:-3] for name in _FASHION_MD5), "")),
    ),
    "tiny_imagenet": (
        ("tiny-imagenet-200", dict.fromkeys(("words.txt", "val/val_annotations.txt"), "")),
    ),
    "food101": (("food-101", dict.fromkeys(("meta/train.json", "meta/test.json"), "")),),
    **{
        f"domainnet/{name}": ((name, {f"../{name}_train.txt": "", f"../{name}_test.txt": ""}),)
        for name in ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
    },
}
#: The sets' archives, by the names that they are published with.
_ARCHIVES = {
    "cifar-10-binary.tar.gz": "cifar10",
    "cifar-10-python.tar.gz": "cifar10",
    "cifar-100-binary.tar.gz": "cifar100",
    "cifar-100-python.tar.gz": "cifar100",
    "tiny-imagenet-200.zip": "tiny_imagenet",
    "food-101.tar.gz": "food101",
}


@dataclasses.dataclass(frozen=True)
class Found:
    """A named set in one of its `FORMS`: the folder, and its files with their checksums."""

    folder: Path
    checksums: Mapping[str, str]

    @property
    def published(self) -> bool:
        """Whether every file has a published checksum."""
        return all(self.checksums.values())

    def paths(self) -> list[Path]:
        """The files, once their checksums are right; ValueError for one that is not."""
        for name, checksum in self.checksums.items():
            if checksum:
                verify(self.folder / name, checksum)
        return [self.folder / name for name in self.checksums]

    def identity(self) -> list:
        """Place, sizes and times of the files: other ones when a file changes."""
        stats = [(self.folder / name).stat() for name in self.checksums]
        return [[str(self.folder.resolve())], *([s.st_size, s.st_mtime_ns] for s in stats)]

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
        raise ValueError(
            f"folder={root.name}: this is {name}, which has a name of its own: use :{name} after "
            f"the colon, with --config.data.dir={data_dir}"
        )
