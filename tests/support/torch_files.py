"""PyTorch files of a family by its name: settings, tensors, and the trees made of them."""

import types

from hsvit_jax import config as configs
from hsvit_jax import models, train
from hsvit_jax.weights import torch


class FakeTensor:
    """As much of a torch tensor as a state dict's reader touches."""

    def __init__(self, array, width=None):
        self.array, self.width = array, width or array.itemsize

    @property
    def dtype(self):
        return f"torch.{self.array.dtype.kind}{8 * self.width}"

    def element_size(self):
        return self.width

    def is_floating_point(self):
        return self.array.dtype.kind == "f"

    def detach(self):
        tensor = FakeTensor(self.array, self.width)
        tensor.numpy = lambda: self.array  # a parameter itself has no NumPy
        return tensor


def fake_torch(load):
    """As much of the module torch, with `load` for its own."""
    return types.SimpleNamespace(load=load, Tensor=FakeTensor, bfloat16="torch.bf16")


def settings(family, tensors, given):
    """Sections `model` and `data` that a file tells."""
    return torch.sections(models.FAMILIES[family], tensors, given)


def build(model, data):
    """The network of both sections, by way of what `convert` writes: a valid configuration."""
    config = configs.base("cifar10", model)
    config.data.update(data)
    written = configs.from_json(configs.to_json(config))
    network = train.build_model(written)
    configs.validate(written)
    assert written == config
    return network


def listing(family, network):
    """Every tensor of such a network's file."""
    return torch.table(family).entries(network)


def load(family, tensors, network):
    """(params, stats) of a file."""
    return torch.table(family).load(tensors, network)
