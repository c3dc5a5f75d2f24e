"""HSViT-C4A8: 4 convolution blocks, 8 attention blocks in each of 16 groups.

6,873,354 parameters at 32 px and 10 classes, 6,885,704 at 64 px and 200
(HSViT paper, table 2). Accuracy, time and hardware of our own runs: docs/results.md.

The recipe `paper` (section 4.1): AdamW 1e-3, decay 0.01, cosine, 300 epochs. The paper omits these,
which follow the authors' configurations: decay on every parameter, batch 512, a cosine that moves
once an epoch, no warm-up, gradient norm 0.01, RandAugment (2 ops, magnitude 9), MixUp or CutMix on
every batch, no crops, flips, erasing or label smoothing.

Differences from the authors' code: float32 (theirs: mixed float16; bf16 is close to it). Images are
resized bicubically (theirs: bilinearly); Food-101 is stretched to 128×128 in both. Images are
normalised by their data set (theirs: other deviations for CIFAR-10, ImageNet's for Tiny-ImageNet,
none for Fashion-MNIST and Food-101). The best checkpoint is chosen on held-out training images
(theirs: on the test split, as with train.select_on=test and data.val_fraction=0).

    python -m hsvit_jax.main --config=configs/c4a8.py                 # CIFAR-10, strong recipe
    python -m hsvit_jax.main --config=configs/c4a8.py:cifar100,paper  # the paper's recipe
    python -m hsvit_jax.main --config=configs/c4a8.py:folder=my_images
"""

from hsvit_jax import config

get_config = config.for_network("c4a8")
