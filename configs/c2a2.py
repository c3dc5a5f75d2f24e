"""HSViT-C2A2: 2 convolution blocks, 2 attention blocks in each of 16 groups.

812,298 parameters at 32 px and 10 classes, 824,648 at 64 px and 200
(HSViT paper, table 2). Accuracy, time and hardware of our own runs: docs/results.md.

    python -m hsvit_jax.main --config=configs/c2a2.py                 # CIFAR-10, strong recipe
    python -m hsvit_jax.main --config=configs/c2a2.py:cifar100,paper  # the paper's recipe
    python -m hsvit_jax.main --config=configs/c2a2.py:folder=my_images
"""

from hsvit_jax import config

get_config = config.for_network("c2a2")
