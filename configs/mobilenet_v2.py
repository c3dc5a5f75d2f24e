"""MobileNetV2, alone: a baseline of the HSViT paper's tables 2 and 3, and a backbone of HSViT.

Variants, by width: 1.0 (the default) and 1.4. Exact parameters at 64 px and 200 classes, and at 224
px and 1000 classes (the size of the image changes none):

    1.0                 2,480,072    3,504,872
    1.4                 4,674,376    6,108,776

Our accuracy: not measured yet.

The network computes what the library of the HSViT paper computes. model.bn_momentum=0.997 keeps
statistics of many batches, as in the MobileNet paper.

The recipe `paper` is the HSViT paper's for its comparison (see configs/c4a8.py): images are
enlarged to 64 px, Food-101 to 128 and ImageNet to 224 px.

    python -m hsvit_jax.main --config=configs/mobilenet_v2.py:1.4,tiny_imagenet,paper
    python -m hsvit_jax.main --config=configs/mobilenet_v2.py:1.0,cifar10
    python -m hsvit_jax.main --config=configs/mobilenet_v2.py:folder=my_images
"""

from hsvit_jax import config

get_config = config.for_network("mobilenet_v2")
