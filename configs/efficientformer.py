"""EfficientFormer, pooling blocks and then attention; a baseline of HSViT's tables 2 and 3.

Variants: l1 (the default), l3. Exact parameters at 64 px and 200 classes, and at 224 px and 1000
classes, both heads and the biases of attention (for 2×2 and 7×7 places) included:

    l1                 11,571,168   12,289,928
    l3                 30,583,760   31,406,000

Our accuracy: not measured yet.

The recipe `paper` is the HSViT paper's (see configs/c4a8.py); CIFAR and Fashion-MNIST are enlarged
to 64 px there. At 32 px the last map is one pixel, and attention has nothing to compare.

    python -m hsvit_jax.main --config=configs/efficientformer.py:l1,tiny_imagenet,paper
    python -m hsvit_jax.main --config=configs/efficientformer.py:l3,imagenet
    python -m hsvit_jax.main --config=configs/efficientformer.py:folder=my_images
"""

from hsvit_jax import config

get_config = config.for_network("efficientformer")
