"""ResNeXt, a ResNet with grouped convolutions: a baseline of the DHVT supplement's table 7.

Variants: 50-32x4d (the default) and 101-32x8d, by layers, groups and base width. Exact parameters
at 224 px and 345 classes (DomainNet; the paper prints 23.7 M), and at 224 px and 1000 classes:

    50-32x4d           23,686,809   25,028,904
    101-32x8d          87,449,241   88,791,336

The paper's accuracy on DomainNet, ResNeXt-50 trained from scratch: ClipArt 72.93, Painting 64.37,
Sketch 68.52, Infograph 34.85, Real 82.15, Quickdraw 73.73 %. Our accuracy: not measured yet.

The recipe `paper` is the DHVT paper's for its comparison, at 224 px (see configs/dhvt.py, also for
its differences). The network divides a side by 32 and needs more than 16 px.

    python -m hsvit_jax.main --config=configs/resnext.py:50-32x4d,cifar100,paper
    python -m hsvit_jax.main --config=configs/resnext.py:digits
    python -m hsvit_jax.main --config=configs/resnext.py:folder=my_images
"""

from hsvit_jax import config

get_config = config.for_network("resnext")
