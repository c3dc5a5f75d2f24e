"""FastViT: sums of convolutions, fused for inference; in the comparison of HSViT's table 3.

Variants: t8, t12, s12, sa12, sa24 (the default), sa36, ma36. Exact parameters at 64 px and 200
classes, and at 256 px and 1000 classes, of the form that is trained:

    t8                  3,411,032    4,026,232
    sa12               10,760,968   11,580,968
    sa24               20,734,216   21,554,216
    sa36               30,707,464   31,527,464

Fused for inference (`--config.model.fused=True`, `hsvit_jax.load(RUN).fused()`) SA24 has 21,501,288
and SA36 31,457,256 at 256 px. The FastViT paper, and HSViT's table 3 after it, print 20.6 M and
30.4 M, but no form of the published code has so many; the printed 3.8 G and 5.6 G are the
multiply-adds of ours. Our accuracy: not measured yet.

The recipe `paper` is that of the authors' commands for ImageNet without distillation, at 256 px for
every data set; MA36 has the others' MixUp of 0.2 instead of 0.8. Other differences are listed in
configs/hvt.py.

    python -m hsvit_jax.main --config=configs/fastvit.py:sa24,imagenet,paper
    python -m hsvit_jax.main --config=configs/fastvit.py:t8,cifar10
    python -m hsvit_jax.main --config=configs/fastvit.py:sa36,folder=my_images
"""

from hsvit_jax import config

get_config = config.for_network("fastvit")
