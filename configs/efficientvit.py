"""EfficientViT (MSRA), cascaded attention in windows; in the comparison of HSViT's table 3.

Variants: m0, m1, m2, m3, m4, m5 (the default). Exact parameters at 64 px and 200 classes, and at
224 px and 1000 classes, the biases of attention (for smaller windows at 64 px) included:

    m0                  2,194,364    2,349,436
    m2                  4,007,062    4,187,554
    m4                  8,495,556    8,804,228
    m5                 12,165,028   12,473,772

The HSViT paper prints 12.4 M and 0.5 G for M5, the latter multiply-adds. Our accuracy: not measured
yet.

The recipe `paper` is that of the authors' script for ImageNet, at 224 px for every data set. Its
rate is 4e-3 for 2,048 images (the paper says 1e-3); it omits the clipping of gradients by the norms
of the weights, and differs as configs/hvt.py lists. BatchNorm precedes the classifier, so a batch
of two images has no gradient.

    python -m hsvit_jax.main --config=configs/efficientvit.py:m5,imagenet,paper
    python -m hsvit_jax.main --config=configs/efficientvit.py:m0,cifar10
    python -m hsvit_jax.main --config=configs/efficientvit.py:folder=my_images
"""

from hsvit_jax import config

get_config = config.for_network("efficientvit")
