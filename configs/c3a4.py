"""HSViT-C3A4: 3 convolution blocks, 4 attention blocks in each of 16 groups.

2,242,826 parameters at 32 px and 10 classes, 2,255,176 at 64 px and 200
(HSViT paper, table 2). Accuracy, time and hardware of our own runs: docs/results.md.

    python -m hsvit_jax.main --config=configs/c3a4.py                 # CIFAR-10, strong recipe
    python -m hsvit_jax.main --config=configs/c3a4.py:cifar100,paper  # the paper's recipe
    python -m hsvit_jax.main --config=configs/c3a4.py:folder=my_images
"""

from hsvit_jax import config

get_config = config.for_network("c3a4")
