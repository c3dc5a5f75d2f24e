"""CvX: CvT's plan, three stages of a convolution and blocks, with quadratic or linear mixing.

Variants: cvt (softmax), cvp (Performer), cvl (Linformer), cvn (Nyström; the default). Exact
parameters at 32 px and 10 classes, and at 64 px and 200 classes (ViX paper, tables 3 and 4, which
omit norms and Linformer's projections):

    cvt                 1,102,602    1,127,112
    cvp                   830,730      855,240
    cvl                   976,650    1,001,160
    cvn                   829,722      854,232

The paper's accuracy on CIFAR-10: CvT 79.93, CvP 83.19, CvN 83.26 % (table 3). Our own on CIFAR-10:
not measured yet.

The recipe `paper`, and the maximum that Performer and Nyström divide by
(`model.batch_coupling=False`), are as for ViX (configs/vix.py), also what the recipe omits. On
digits the recipe `strong` has stages of 16×16, 8×8 and 8×8 tokens, and 16 landmarks or projected
positions.

    python -m hsvit_jax.main --config=configs/cvx.py:cvn,cifar10
    python -m hsvit_jax.main --config=configs/cvx.py:cvt,tiny_imagenet,paper
    python -m hsvit_jax.main --config=configs/cvx.py:folder=my_images
"""

from hsvit_jax import config

get_config = config.for_network("cvx")
