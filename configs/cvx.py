"""CvX: CvT's plan, three stages of a convolution and blocks, with quadratic or linear mixing.

Variants: cvt (softmax), cvp (Performer), cvl (Linformer), cvn (Nyström; the default). Exact
parameters at 32 px and 10 classes, and at 64 px and 200 classes (ViX paper, tables 3 and 4, which
leave out norms and Linformer's projections):

    cvt                 1,102,602    1,127,112
    cvp                   830,730      855,240
    cvl                   976,650    1,001,160
    cvn                   829,722      854,232

The paper's accuracy on CIFAR-10: CvT 79.93, CvP 83.19, CvN 83.26 % (table 3). Our own on CIFAR-10:
not measured yet.

The recipe `paper` (section 4; the same for ViX, LeViX, CCX, CvX and PiX): AdamW 1e-3 without any
schedule, decay 0.01 on everything, betas 0.9 and 0.999, batch 64, no augmentation named. The paper
does not say how many epochs; the authors' scripts have 40 to 150, here 100. Not as there: mixed
precision (say bf16 for something near it), and the best of three runs. On digits the recipe
`strong` has stages of 16×16, 8×8 and 8×8 tokens, and 16 landmarks or projected positions.

Performer and Nyström divide by a maximum for stability. The authors take it over the whole batch,
so that an image's logits depend on the images beside it; here it is each image's own
(`model.batch_coupling=False`), and the logits differ by 2e-3 to 4e-2 of the largest. A network
converted from the authors' weights computes as theirs does (True).

    python -m hsvit_jax.main --config=configs/cvx.py:cvn,cifar10
    python -m hsvit_jax.main --config=configs/cvx.py:cvt,tiny_imagenet,paper
    python -m hsvit_jax.main --config=configs/cvx.py:folder=my_images
"""

from functools import partial

from hsvit_jax.config import variants

get_config = partial(variants.get_config, "cvx")
