"""ResNet, alone: a baseline of the HSViT paper's tables 2 and 3, and a backbone of HSViT.

Variants: 18, 34, 50 (the default), 101 and 152, by their layers. Exact parameters at 64 px and 200
classes, and at 224 px and 1000 classes (the size of the image changes none):

    18                 11,279,112   11,689,512
    34                 21,387,272   21,797,672
    50                 23,917,832   25,557,032
    101                42,909,960   44,549,160
    152                58,553,608   60,192,808

Our accuracy: not measured yet.

The recipe `paper` is the HSViT paper's for its comparison (see configs/c4a8.py): images are
enlarged to 64 px, Food-101 to 128 and ImageNet to 224 px. The network divides a side by 32 and
needs more than 16 px.

    python -m hsvit_jax.main --config=configs/resnet.py:50,tiny_imagenet,paper
    python -m hsvit_jax.main --config=configs/resnet.py:18,cifar10
    python -m hsvit_jax.main --config=configs/resnet.py:18,folder=my_images
"""

from hsvit_jax import config

get_config = config.for_network("resnet")
