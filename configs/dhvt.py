"""DHVT: a vision transformer with convolutions in embedding and feed-forward, and head tokens.

Variants: t-patch4 (the default), t-patch2, s-patch4, s-patch2 for 32 px; t-patch16, s-patch16 and
t-imagenet for 224 px; and the ablations of the supplement's tables 2 to 5. Exact parameters at 32
px and 100 classes, and at 32 px and 10 classes:

    t-patch4            6,008,650    5,991,280
    t-patch2            5,845,162    5,827,792
    s-patch4           23,425,450   23,390,800
    s-patch2           22,766,698   22,732,048

The paper's accuracy on CIFAR-100: DHVT-T 80.98, DHVT-S 82.82 %, both with patches of 4 (supplement,
table 4). Our own on CIFAR-100: not measured yet.

The recipe `paper`: 300 epochs, AdamW 1e-3, batch 512, 5 epochs of warm-up (the authors' script for
CIFAR, and table 5), decay 0.05; for ImageNet 5e-4 and 10 epochs of warm-up (supplement, section
4.1; the script has batch 256); for DomainNet 5e-4 (0.001 by 256/512), batch 256 and 20 epochs of
warm-up (the script; t-patch16 or s-patch16); 224 px for every data set by the variants with patches
of 16; augmentation and schedule of DeiT: crops of the image padded by 4 pixels up to 32 px, as the
authors', and random resized ones of 8 to 100 % of the area for larger images, flips, RandAugment as
timm's m9-mstd0.5-inc1, erasing 0.25 with noise, MixUp 0.8 or CutMix 1.0 on every batch, label
smoothing 0.1, repeated augmentation (an epoch shows a third of the images three times each),
cosine.

Differences from the authors' script: a resized crop is bilinear, from the resized image (theirs:
bicubic, from the file's pixels). RandAugment samples the nearest pixel (theirs: bicubic). Only
kernels decay (theirs: also head tokens' embeddings and affine maps). Test images of 224 px are used
whole (theirs: the middle of 256 px). Pixels are normalised by the data set (theirs: by ImageNet).
The cosine begins after the warm-up and ends at 0 (theirs: at epoch 0, ending at 1e-5).

The recipe `finetune` (supplement, tables 1 and 8), for weights trained on ImageNet: a fresh
classifier, 224 px (t is then t-imagenet, s s-patch16), 100 epochs, AdamW 2.5e-4 (0.0005 by
256/512), decay 1e-8, batch 256, 2 epochs of warm-up. As in the authors' script, augmentation is
that of `paper`, but an epoch shows every image once, and pixels are normalised by ImageNet. Unlike
there, the network trains in training mode (theirs: in evaluation mode, so BatchNorm keeps its
statistics and no path is dropped).

    python -m hsvit_jax.main --config=configs/dhvt.py:t,patch4,cifar100,paper
    python -m hsvit_jax.main --config=configs/dhvt.py:digits
    python -m hsvit_jax.main --config=configs/dhvt.py:t,finetune,cifar100 --config.init.from=PATH
"""

from hsvit_jax import config

get_config = config.for_network("dhvt")
