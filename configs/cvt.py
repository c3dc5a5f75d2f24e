"""CvT, the convolutional vision transformer; a baseline of the HSViT paper's tables 2 and 3.

Variants: 13-patch4 (the default) and 21-patch4 of the HSViT paper's table 2; 13 and 21 with the
published first patch of 7 pixels. Exact parameters at 64 px and 200 classes, and at 224 px and 1000
classes:

    13-patch4          19,683,144   19,991,144
    21-patch4          31,308,360   31,616,360
    13                 19,689,480   19,997,480
    21                 31,314,696   31,622,696

Our accuracy: not measured yet. (`cvx` is another family: the ViX paper's own plan.)

As in the `transformers` library, a dropped path of the feed-forward also drops the example's
tokens; `--config.model.drop_path_of=branch` is the CvT paper's. The recipe `paper` is the HSViT
paper's (see configs/c4a8.py), at the learning rate 1e-4 for 13-patch4 on Food-101 and 21-patch4 on
Tiny-ImageNet (table 2, note 2; the authors' script for Tiny-ImageNet leaves CvT-21 at 1e-3).

    python -m hsvit_jax.main --config=configs/cvt.py:13-patch4,tiny_imagenet,paper
    python -m hsvit_jax.main --config=configs/cvt.py:13,imagenet
    python -m hsvit_jax.main --config=configs/cvt.py:folder=my_images
"""

from hsvit_jax import config

get_config = config.for_network("cvt")
