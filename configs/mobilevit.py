"""MobileViT: inverted residuals and transformers over places; a baseline of HSViT's table 2.

Variants: xs (the default), s, xxs. Exact parameters at 64 px and 200 classes, and at 256 px and
1000 classes:

    xs                  2,009,848    2,317,848
    s                   5,065,832    5,578,632
    xxs                 1,015,224    1,272,024

Our accuracy: not measured yet.

The recipe `paper` is the HSViT paper's (see configs/c4a8.py); CIFAR and Fashion-MNIST are enlarged
to 64 px there. At 64 px the last layer's attention has one patch, so its queries and keys have no
effect.

    python -m hsvit_jax.main --config=configs/mobilevit.py:xs,tiny_imagenet,paper
    python -m hsvit_jax.main --config=configs/mobilevit.py:s,cifar10
    python -m hsvit_jax.main --config=configs/mobilevit.py:folder=my_images
"""

from hsvit_jax import config

get_config = config.for_network("mobilevit")
