"""ViT with patches of 4 or 16 pixels, a baseline of the HSViT paper's tables 2 and 3.

Variants: b-patch4 (the default), b-patch16, l-patch16. The paper's "ViT-B/16" of table 2 has
patches of 4 pixels. Exact parameters at 64 px and 200 classes, and at 224 px and 1000 classes:

    b-patch4           85,445,576   88,272,616
    b-patch16          85,814,216   86,567,656
    l-patch16         303,322,312  304,326,632

Our accuracy: not measured yet.

An image must be divisible by the patch. The recipe `paper` is the HSViT paper's (see
configs/c4a8.py), at the learning rate 1e-4 (table 2, note 2), and for Tiny-ImageNet with batch 128,
for Food-101 with 16, as in the authors' scripts.

    python -m hsvit_jax.main --config=configs/vit.py:b-patch4,tiny_imagenet,paper
    python -m hsvit_jax.main --config=configs/vit.py:b-patch4,digits
    python -m hsvit_jax.main --config=configs/vit.py:b-patch16,imagenet
"""

from hsvit_jax import config

get_config = config.for_network("vit")
