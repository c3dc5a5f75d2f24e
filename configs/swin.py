"""Swin, attention in shifted windows: a baseline of the DHVT supplement's tables 1, 8 and 9.

Variants: t (the default), s and b, with windows of 7. Exact parameters at 224 px and 345 classes
(DomainNet), and at 224 px and 1000 classes:

    t                  27,784,659   28,288,354
    s                  49,102,563   49,606,258
    b                  87,096,849   87,768,224

Papers print 29 M for Swin-T (the supplement 29.0 M); the published code has the 28.3 M above. Its
FLOPs agree: 4.5 G, of multiply-adds.

The paper's accuracy of Swin-T: 81.3 % on ImageNet; pretrained there and fine-tuned, 88.22 % on
CIFAR-100 and 73.51 % on ClipArt. Our accuracy: not measured yet.

The recipe `paper` is the DHVT paper's for its comparison, at 224 px (see configs/dhvt.py, also for
its differences), with the stochastic depth of Swin's authors. The patch of 4 must divide an image;
on a smaller map, windows have the map's size.

    python -m hsvit_jax.main --config=configs/swin.py:t,cifar100,paper
    python -m hsvit_jax.main --config=configs/swin.py:digits
    python -m hsvit_jax.main --config=configs/swin.py:s,folder=my_images
"""

from hsvit_jax import config

get_config = config.for_network("swin")
