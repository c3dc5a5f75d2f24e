"""HSViT-C4A8: 4 convolution blocks, 8 attention blocks in each of 16 groups.

6,873,354 parameters at 32 px and 10 classes, 6,885,704 at 64 px and 200
(HSViT paper, table 2). Accuracy, time and hardware of our own runs: docs/results.md.

The recipe `paper` (section 4.1): AdamW 1e-3, decay 0.01, cosine, 300 epochs. From the authors'
configurations, as the paper is silent: decay on every parameter, batch 512, a cosine that moves
once an epoch, no warm-up, gradient norm 0.01, RandAugment (2 ops, magnitude 9), MixUp or CutMix on
every batch, no crops, flips, erasing or label smoothing. Not as there: float32 (there mixed
float16; bf16 is near it), images are resized bicubically (there bilinearly; Food-101 is stretched
to 128×128, as there) and normalised as their set (there with other deviations for CIFAR-10,
ImageNet's for Tiny-ImageNet, not at all for Fashion-MNIST and Food-101), and the best checkpoint is
chosen on held-out training images, there on the test split (train.select_on=test,
data.val_fraction=0).

    python -m hsvit_jax.main --config=configs/c4a8.py                 # CIFAR-10, strong recipe
    python -m hsvit_jax.main --config=configs/c4a8.py:cifar100,paper  # the paper's recipe
    python -m hsvit_jax.main --config=configs/c4a8.py:folder=my_images
"""

from hsvit_jax import config

get_config = config.for_network("c4a8")
