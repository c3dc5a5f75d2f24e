"""Loads a trained network from a checkpoint, and classifies images with it.

Networks, and Flax with them, are imported where one is built, as that takes long.
"""

import contextlib
import dataclasses
import io
import os
import warnings
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from hsvit_jax import augment, data, tasks
from hsvit_jax import config as config_lib
from hsvit_jax import mesh as mesh_lib
from hsvit_jax.text import few


@dataclasses.dataclass(frozen=True, eq=False)
class Classifier:
    """A trained network, with the names of its classes.

    Attributes:
      config: the configuration of its training.
      class_names: the name of each logit.
      model, params, stats: the network and its arrays.
      step: the checkpoint's step.
      mesh: the devices it runs on.
      aggregate: how the devices add the groups' CLS tokens, see `mesh.spread`.
      fingerprint: identifies the training data; None if unknown.
      temperature: divides the logits in `predict`; a report's calibration finds it.
    """

    config: Any = dataclasses.field(repr=False)
    class_names: tuple[str, ...]
    model: Any
    params: dict = dataclasses.field(repr=False)
    stats: dict = dataclasses.field(repr=False)
    step: int
    mesh: Mesh
    fingerprint: str | None = None
    aggregate: str = "psum"
    temperature: float = 1.0

    @property
    def image_size(self) -> tuple[int, int]:
        """Rows and columns of an input image."""
        return tuple(self.config.data.image_size)

    @property
    def channels(self) -> int:
        """Colour channels of an input image."""
        return self.config.data.channels

    def logits(self, images: Any, batch: int | None = None) -> np.ndarray:
        """Computes logits.

        Args:
          images: one image or several, each a path, a Pillow image or an array of any size, uint8
            or floats from 0 to 1; see `data.fit_image`. An array of several is (B, H, W[, C]).
          batch: images at a time; it defaults to `config.eval_batch`.

        Returns:
          float32 (B, K); for one image (K,).

        Raises:
          BadImage: an image cannot be used.
        """
        from hsvit_jax.train import evaluate

        images_BHWC, one = self._fitted(images)
        if not len(images_BHWC):
            return np.zeros((0, len(self.class_names)), np.float32)
        batch, count = batch or config_lib.eval_batch(self.config), len(images_BHWC)
        size = min(batch, 1 << (count - 1).bit_length())
        if size > count:  # each size of a batch is compiled
            images_BHWC = images_BHWC[[*range(count), *[0] * (size - count)]]
        split = data.Split(np.zeros(len(images_BHWC), np.int32), images_BHWC)
        out = []
        for part, _, valid in evaluate.padded_batches(split, batch, self.mesh.shape["data"]):
            logits = self._forward(self.params, self.stats, mesh_lib.put_batch(self.mesh, part))
            out.append(np.asarray(logits)[valid])
        logits_BK = np.concatenate(out)[:count]
        return logits_BK[0] if one else logits_BK

    def _fitted(self, images: Any) -> tuple[np.ndarray, bool]:
        """Images as uint8 (B, H, W, C) of the network's size, and whether there was only one."""
        if isinstance(images, list) and images and isinstance(images[0], list):
            images = np.asarray(images)
        shape, size, channels = getattr(images, "shape", ()), self.image_size, self.channels
        if shape[1:] == (*size, channels) and images.dtype == np.uint8:
            return np.asarray(images), False
        picture = hasattr(images, "mode") and not shape  # pandas columns have both
        file = isinstance(images, str | bytes | os.PathLike | io.IOBase)
        one = file or picture or len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3, 4))
        if not one and len(shape) == 3 and shape[0] == channels == 3:
            warnings.warn(
                f"an array {shape} is three grey images; a colour image is (h, w, 3)", stacklevel=4
            )
        fitted, fit = [], self.config.data.fit
        for number, image in enumerate([images] if one else images):
            try:
                fitted.append(data.fit_image(image, size, channels, fit))
            except data.BadImage as error:
                raise error if one else data.BadImage(f"image {number}: {error}") from error
        return np.stack(fitted) if fitted else np.zeros((0, *size, channels), np.uint8), one

    @cached_property
    def _forward(self) -> Any:
        """The forward pass, compiled once for each instance."""
        from hsvit_jax.train import evaluate

        forward = evaluate.make_forward(self.model, self.mesh, self.config, self.aggregate)
        return jax.jit(forward, out_shardings=mesh_lib.replicated(self.mesh))

    def predict(self, images: Any) -> np.ndarray:
        """Computes class probabilities of `images` (see `logits`), float32 (B, K) or (K,).

        Several labels have a probability each. Numbers are in the unit of the data, in float64.

        Raises:
          BadImage: an image cannot be used.
          ValueError: the network's logits are not finite.
        """
        logits = self.logits(images).astype(np.float64) / self.temperature
        if not np.isfinite(logits).all():
            raise ValueError(
                f"the logits of step {self.step} are not finite: choose another checkpoint "
                "(which=, --which)"
            )
        task = tasks.of(self.config)
        return task.answer(logits).astype(task.dtype)

    def embed(self, images: Any) -> np.ndarray:
        """Computes the input of the classifier's linear map, for HSViT the mean CLS token.

        Args:
          images: as for `logits`.

        Returns:
          float32 (B, D); for one image (D,).
        """
        return self._embedder.logits(images)

    @cached_property
    def _embedder(self) -> "Classifier":
        """The same network with the identity as its classifier."""
        fetched = mesh_lib.fetch(self.mesh, self.params)
        other = self.model.resized(num_classes=len(self.class_names) + 1)
        other_params, _ = other.init_shapes()
        of_classes = jax.tree.map(lambda x, y: x.shape != y.shape, fetched, other_params)
        leaves = zip(jax.tree.leaves(fetched), jax.tree.leaves(of_classes), strict=True)
        width = max(len(leaf) for leaf, changes in leaves if changes and leaf.ndim == 2)

        def replaced(leaf: jax.Array, changes: bool) -> Any:
            if not changes:
                return leaf
            return np.eye(width, dtype=np.float32) if leaf.ndim == 2 else np.zeros(width, "f")

        model = self.model.resized(num_classes=width)
        params = jax.tree.map(replaced, fetched, of_classes)
        params = mesh_lib.place(self.mesh, params, model)
        names = tuple(map(str, range(width)))
        return dataclasses.replace(self, model=model, params=params, class_names=names)

    def explain(self, images: Any) -> Any:
        """Computes the arrays that `hsvit visualize` draws: attention, feature maps, votes.

        Args:
          images: as for `logits`.

        Returns:
          a list with the `views.Views` of each image; for one image its own.
        """
        from hsvit_jax.classifier import views

        images_BHWC, one = self._fitted(images)
        found, voters_G = [], self.voters_G if self.model.voters else None
        for image_HWC in images_BHWC:
            arrays = jax.device_get(self._arrays(self.params, self.stats, image_HWC[None]))
            found.append(views.views_of(self.model, arrays, voters_G=voters_G))
        return found[0] if one else found

    @cached_property
    def _arrays(self) -> Any:
        """The network's views of a batch, compiled once for each instance."""

        def arrays(params: dict, stats: dict, images_BHWC: jax.Array) -> dict[str, Any]:
            pixels = self.config.data
            x_BHWC = augment.normalise(images_BHWC, tuple(pixels.mean), tuple(pixels.std))
            return self.model.views(params, stats, x_BHWC)

        return jax.jit(arrays, out_shardings=mesh_lib.replicated(self.mesh))

    def grad_cam(self, images: Any) -> np.ndarray | None:
        """Computes where images speak for their predicted class, by `grad_cam.grad_cam`.

        Args:
          images: as for `logits`.

        Returns:
          float32 (B, rows, columns), for one image (rows, columns); None without feature maps.
        """
        images_BHWC, one = self._fitted(images)
        heat_BHW = jax.device_get(self._cam(self.params, self.stats, images_BHWC))
        return heat_BHW[0] if one and heat_BHW is not None else heat_BHW

    @cached_property
    def _cam(self) -> Any:
        """Grad-CAM of a batch, compiled once for each instance."""
        from hsvit_jax.classifier.grad_cam import grad_cam

        def cam(params: dict, stats: dict, images_BHWC: jax.Array) -> jax.Array | None:
            pixels = self.config.data
            x_BHWC = augment.normalise(images_BHWC, tuple(pixels.mean), tuple(pixels.std))
            return grad_cam(self.model, params, stats, x_BHWC)

        return jax.jit(cam, out_shardings=mesh_lib.replicated(self.mesh))

    @cached_property
    def voters_G(self) -> np.ndarray:
        """The votes of the attention groups, float32 (G,): 0 for those lost in training."""
        votes_G = np.ones(self.model.config.groups, np.float32)
        votes_G[sorted(self.model.silent)] = 0
        if (vote_G := self.model.learned(self.params)) is not None:
            votes_G *= mesh_lib.fetch(self.mesh, vote_G) != 0
        return votes_G

    def cut(self, count: int) -> tuple[list[Any], Any]:
        """Cuts an HSViT into `count` parts and a head that run separately (`models.hsvit.parts`).

        Raises:
          ValueError: `count` does not divide the network's towers or attention groups.
        """
        from hsvit_jax.models.hsvit import parts

        params, stats = mesh_lib.fetch(self.mesh, (self.params, self.stats))
        pixels = self.config.data
        normalise = partial(augment.normalise, mean=pixels.mean, std=pixels.std)
        answer = tasks.of(self.config).answer
        return parts.cut(self.model, params, stats, count, normalise, answer)

    def fused(self) -> "Classifier":
        """Builds the same network for inference: a FastViT's branches become single convolutions.

        Raises:
          ValueError: the network has nothing to fuse.
        """
        model, params, stats = self.model.fused(*jax.device_get((self.params, self.stats)))
        config = self.config.copy_and_resolve_references()
        config.model.fused = True
        placed = mesh_lib.place(self.mesh, {"params": params, "stats": stats}, model)
        return dataclasses.replace(self, config=config, model=model, **placed)

    def evaluate(self, dataset: data.Dataset | data.Split | str) -> Any:
        """Evaluates images with labels: a data set's test split, or a split.

        Args:
          dataset: it, or its name, such as 'cifar10' or 'folder=photos'. Every image of a folder or
            table is evaluated, unless the network was trained on that folder or table.

        Returns:
          `train.evaluate.Evaluation`: loss, accuracy, confusion matrix; or `Scores`.

        Raises:
          ValueError: a class is unknown, images have another shape, or there are none.
        """
        if isinstance(dataset, str):
            dataset = self._load_data(dataset)
        if isinstance(dataset, data.Dataset):
            info, mine = dataset.info, (self.image_size, self.channels, self.config.data.fit)
            if (tuple(info.image_size), info.channels, info.fit) != mine:
                names = "image_size={}, channels={}, fit={!r}".format(*mine)
                raise ValueError(f"the network needs {names}: pass these to from_arrays")
            dataset = self.relabelled(dataset.test, dataset.info)
        task, shape = self.config.data.task, dataset.labels.shape[1:]
        classes, labels, images = len(self.class_names), dataset.labels, dataset.images
        if shape != (() if task == "classify" else (classes,)):
            raise ValueError(f"the network's labels are others: pass task={task!r} to from_arrays")
        if not shape and len(labels) and not 0 <= np.min(labels) <= np.max(labels) < classes:
            raise ValueError(f"labels must number the network's {classes} class_names from 0")
        if images is not None and images.dtype != np.uint8:
            raise ValueError(f"images must be uint8, not {images.dtype}: use hsvit_jax.from_arrays")
        return self._evaluator(self.params, self.stats, dataset, config_lib.eval_batch(self.config))

    def _load_data(self, name: str) -> data.Dataset:
        """Loads a data set by its name, with images as the network sees them."""
        from hsvit_jax import train
        from hsvit_jax.classifier import other_data

        other = self.config.copy_and_resolve_references().unlock()
        other.data.name = name
        config, own = other_data.configured(self, other)
        return train.load_data(config, test_only=not own and name.startswith(("folder=", "csv=")))

    def trained_on(self, config: Any) -> bool:
        """Returns whether a configuration names the training images, by any path."""
        from hsvit_jax import train

        if self.fingerprint is None or not config.data.name.startswith(("folder=", "csv=")):
            return False
        whole = config.copy_and_resolve_references().unlock()
        whole.data.fraction = 1.0
        found = train.load_data(whole, test_only=True)
        return found.subset(config.data.fraction).fingerprint == self.fingerprint

    @cached_property
    def _evaluator(self) -> Any:
        """The evaluation, compiled once for each instance."""
        from hsvit_jax.train import evaluate

        return evaluate.make_evaluator(self.model, self.mesh, self.config, self.aggregate)

    def relabelled(self, split: data.Split, info: data.DataInfo) -> data.Split:
        """Renumbers the labels of a data set's split as the network's classes, by their names.

        Raises:
          ValueError: the data set has a class that the network does not know.
        """
        known, names = self.class_names, info.class_names
        if extra := [name for name in names if name not in known]:
            raise ValueError(
                f"{info.name} has classes that the network does not know: {few(extra)}; it knows "
                f"{few(known)}. Rename them: class_names of from_arrays, or hsvit convert "
                "--class_names"
            )
        numbers_K = np.array([known.index(name) for name in names], np.int32)
        if split.labels.ndim == 1:
            return dataclasses.replace(split, labels=numbers_K[split.labels])
        if (missing := {*known} - {*names}) and info.task == "regress":
            raise ValueError(f"{info.name} needs the columns {few(sorted(missing))} too: add them")
        labels_NK = np.zeros((len(split), len(known)))  # a label that is not named is not there
        labels_NK[:, numbers_K] = split.labels
        return dataclasses.replace(split, labels=labels_NK)

    def read(self, path: str | Path) -> np.ndarray:
        """Reads an image file at the network's size, uint8 (H, W, C). Raises BadImage."""
        return data.read_image(path, self.image_size, self.channels, fit=self.config.data.fit)


def load(
    path: str | Path,
    which: str | int = "best",
    *,
    devices: list | None = None,
    group: int = 1,
    data: int = -1,
    aggregate: str = "psum",
) -> Classifier:
    """Loads a trained network.

    Args:
      path: a run's folder, a checkpoint folder, an exported file, or 'zoo:NAME'.
      which: the checkpoint: 'best' (or the latest if none was evaluated), 'latest', or a step.
      devices: they default to all of all processes, which then must call the same methods.
      group, data: devices that share the attention groups, and the images; -1 takes the rest.
      aggregate: 'psum', 'ordered' for equal bits on any number of devices, or 'bf16'.

    Raises:
      ValueError: there is no good checkpoint or file, another process has another one, or the
        devices do not fit the network.
    """
    from hsvit_jax import checkpoint
    from hsvit_jax.config import schema
    from hsvit_jax.runtime import coordination
    from hsvit_jax.weights.stored import digest, of_survivors, stored_network

    schema.KEYS["mesh.aggregate"].check("aggregate", aggregate)
    alone = devices is not None and {*mesh_lib.listed(devices)} <= {*jax.local_devices()}
    with checkpoint.alone() if alone else contextlib.nullcontext():
        stored = of_survivors(stored_network(path, which))
    if not alone:
        coordination.check_same("network", digest(stored.params, stored.stats))
    limit = stored.model.group_axis_limit
    mesh = mesh_lib.make(group, data, groups=limit, devices=devices, aggregate=aggregate)
    network = {"params": stored.params, "stats": stored.stats}
    placed = mesh_lib.place(mesh, network, stored.model)
    about = (stored.config, stored.class_names, stored.model)
    more = {"step": stored.step, "fingerprint": stored.fingerprint, "aggregate": aggregate}
    return Classifier(*about, **placed, mesh=mesh, **more)


def build_model(
    variant: str,
    *,
    image_size: int | tuple[int, int] = 32,
    channels: int = 3,
    num_classes: int = 10,
) -> Any:
    """Builds a named network without weights, with its paper's dropout.

    Args:
      variant: 'c2a2', 'c3a4', 'c4a8', or a family with its variant's words, as 'vix:vin,hybrid'.
      image_size: pixels, or (rows, columns).
      channels: image channels.
      num_classes: number of logits.

    Returns:
      a network: `init(key)` gives (params, stats), `apply(params, stats, images)` gives (logits,
      stats).

    Raises:
      ValueError: the name is unknown, or a size does not fit.
    """
    from hsvit_jax import models

    config = config_lib.get_config(variant)
    words = [word for word in map(str.strip, variant.partition(":")[2].split(",")) if word]
    if other := [w for w in words if config_lib.is_word(w) and w not in config_lib.SWITCHES]:
        raise ValueError(
            f"build_model({variant!r}): {few(other)} names no network; set image_size=, channels= "
            "and num_classes= for a data set"
        )
    rows, columns = np.broadcast_to(image_size, 2).tolist()
    own = config_lib.own_dropout(config.model)  # the default recipe sets another
    return models.build(
        config.model.to_dict() | {key.removeprefix("model."): value for key, value in own.items()},
        image_size=(rows, columns),
        channels=int(channels),
        num_classes=int(num_classes),
    )
