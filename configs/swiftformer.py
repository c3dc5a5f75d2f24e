"""SwiftFormer: convolutional blocks and additive attention; a baseline of HSViT's table 2.

Variants: xs (the default), s, l1, l3. Exact parameters at 64 px and 200 classes, and at 224 px and
1000 classes:

    xs                  3,121,760    3,475,360
    s                   5,732,128    6,092,128
    l1                 11,441,920   12,057,920
    l3                 27,673,936   28,494,736

Our accuracy: not measured yet.

As in the `transformers` library, every query has the same weight in the attention's global query,
and the scores have no effect; `--config.model.queries=weighted` is the authors' code. The recipe
`paper` is the HSViT paper's (see configs/c4a8.py); CIFAR and Fashion-MNIST are enlarged to 64 px
there.

    python -m hsvit_jax.main --config=configs/swiftformer.py:xs,tiny_imagenet,paper
    python -m hsvit_jax.main --config=configs/swiftformer.py:s,cifar10
    python -m hsvit_jax.main --config=configs/swiftformer.py:folder=my_images
"""

from hsvit_jax import config

get_config = config.for_network("swiftformer")
