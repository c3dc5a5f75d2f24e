"""SMT, scale-aware modulation and then self-attention; in the comparison of HSViT's table 3.

Variants: t (the default), s, b, l. Exact parameters at 64 px and 200 classes, and at 224 px and
1000 classes:

    t                  11,096,136   11,506,536
    s                  22,140,552   22,550,952
    b                  31,626,952   32,037,352
    l                  79,974,344   80,589,544

The SMT paper, and HSViT's table 3 after it, print 20.5 M for SMT-S; the published code has 22.55 M,
and with its depths the 4.7 G that the paper prints: multiply-adds without those of attention's
products. Our accuracy: not measured yet.

The recipe `paper` is that of the authors' scripts for ImageNet, at 224 px for every data set; its
differences are listed in configs/hvt.py.

    python -m hsvit_jax.main --config=configs/smt.py:t,imagenet,paper
    python -m hsvit_jax.main --config=configs/smt.py:t,cifar10
    python -m hsvit_jax.main --config=configs/smt.py:s,folder=my_images
"""

from hsvit_jax import config

get_config = config.for_network("smt")
