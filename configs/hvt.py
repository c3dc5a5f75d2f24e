"""HVT: a vision transformer whose token sequence is pooled after the first block of each stage.

Variants: ti-0 to ti-4 and s-0 to s-4 (M pooling stages; the default is s-4), scale-ti-4, s-2-2d,
s-4-conv, s-4-average, and other depths, heads and patches (tables 1 to 9). Exact parameters at 224
px and 100 classes, and at 224 px and 1000 classes:

    ti-1                5,561,956    5,735,656
    ti-4                5,577,700    5,751,400
    s-0                21,703,396   22,049,896
    s-1                21,740,644   22,087,144
    s-2                21,759,076   22,105,576
    s-4                21,772,132   22,118,632
    scale-ti-4         21,772,132   22,118,632
    s-2-2d             21,802,084   22,148,584

The paper's accuracy on CIFAR-100: HVT-Ti-4 69.51, HVT-S-4 75.43 % (tables 4 and 6). Our own on
CIFAR-100: not measured yet.

The recipe `paper` (section 5), for CIFAR-100 and every data set but ImageNet: images resized to 224
px, 300 epochs, AdamW 1.25e-4, decay 0.025 on kernels, batch 128; for ImageNet batch 1024 and 1e-3
(0.0005 by 1024/512); augmentation and schedule of DeiT: random resized crops of 8 to 100 % of the
area, flips, RandAugment as timm's m9-mstd0.5-inc1, erasing 0.25 with noise, MixUp 0.8 or CutMix 1.0
on every batch, label smoothing 0.1, repeated augmentation (an epoch shows a third of the images
three times each), 5 epochs of warm-up, cosine.

Differences from the authors' script: a crop is bilinear, from the resized image (theirs: bicubic,
from the file's pixels). RandAugment samples the nearest pixel (theirs: bicubic). Test images are
used whole (theirs, as in DeiT: the middle 224 of 256 pixels). Pixels are normalised by the data set
(theirs: by ImageNet). The cosine begins after the warm-up and ends at 0 (theirs: at epoch 0, ending
at 1e-5).

The patch is 16 from 112 px on, else the largest that leaves 7×7 tokens: 4 at 28 and 32 px, 8 at 64.

    python -m hsvit_jax.main --config=configs/hvt.py:s-4,cifar100,paper
    python -m hsvit_jax.main --config=configs/hvt.py:ti-4,digits
    python -m hsvit_jax.main --config=configs/hvt.py:folder=my_images
"""

from hsvit_jax import config

get_config = config.for_network("hvt")
