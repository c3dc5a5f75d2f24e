"""T2T-ViT, whose tokens are joined step by step: a baseline of DHVT's supplement, tables 8 and 9.

Variants: 7, 14 (the default), 19 and 24, by their blocks, with Performers between the soft splits,
and t-14 with softmax attention there. Exact parameters at 224 px and 345 classes (DomainNet), and
at 224 px and 1000 classes, the fixed random features and positions among them:

    7                   4,141,887    4,310,222
    14                 21,293,375   21,545,550
    19                 38,883,327   39,177,422
    24                 63,769,919   64,105,934
    t-14               21,288,895   21,541,070

The supplement prints 5.2 G FLOPs for T2T-ViT-14; the published code has 4.8 G multiply-adds.

The paper's accuracy: T2T-ViT-7 71.7, T2T-ViT-14 81.5 % on ImageNet; the latter pretrained there and
fine-tuned, 87.33 % on CIFAR-100 and 74.59 % on ClipArt. Our accuracy: not measured yet.

The recipe `paper` is the DHVT paper's for its comparison, at 224 px (see configs/dhvt.py, also for
its differences); the authors' own decays by 0.05 too, by 0.03 for T2T-ViT-7. Their published
weights need `model.qk_scale` = width^-0.5, 0.05103103630798288 for T2T-ViT-14.

    python -m hsvit_jax.main --config=configs/t2t.py:14,cifar100,paper
    python -m hsvit_jax.main --config=configs/t2t.py:digits
    python -m hsvit_jax.main --config=configs/t2t.py:7,folder=my_images
"""

from hsvit_jax import config

get_config = config.for_network("t2t")
