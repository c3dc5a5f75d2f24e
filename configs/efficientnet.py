"""EfficientNet, alone: a baseline of the HSViT paper's tables 2 and 3, and a backbone of HSViT.

Variants: b0 (the default), b3, b4, b5. Exact parameters at 64 px and 200 classes, and at 224 px and
1000 classes (the size of the image changes none):

    b0                  4,263,748    5,288,548
    b3                 11,003,632   12,233,232
    b4                 17,907,216   19,341,616
    b5                 28,750,584   30,389,784

Our accuracy: not measured yet.

The network computes what the library of the HSViT paper computes. These settings restore the
EfficientNet paper: model.padding=same (zeros are right at any image size), model.drop=paths
(stochastic depth drops branches, not single values), model.bn_momentum=0.99 and
model.expand_bn_momentum=0.99 (statistics of many batches).

A side needs at least 32 px (model.padding=same: 17), so Fashion-MNIST is enlarged to 32.

The recipe `paper` is the HSViT paper's for its comparison (see configs/c4a8.py): images are
enlarged to 64 px, Food-101 to 128 px, and ImageNet to the native size: 224, 300, 380 or 456 px.

    python -m hsvit_jax.main --config=configs/efficientnet.py:b3,tiny_imagenet,paper
    python -m hsvit_jax.main --config=configs/efficientnet.py:b0,cifar10
    python -m hsvit_jax.main --config=configs/efficientnet.py:b0,folder=my_images
"""

from hsvit_jax import config

get_config = config.for_network("efficientnet")
