"""CCX: a compact transformer behind convolutions and pools, with quadratic or linear mixing.

Variants: cct (softmax), ccp (Performer), ccl (Linformer), ccn (Nyström; the default). Exact
parameters at 32 px and 10 classes, and at 64 px and 200 classes (ViX paper, tables 3 and 4, which
leave out positions and Linformer's projections):

    cct                 1,036,619    1,061,129
    ccp                 1,038,155    1,062,665
    ccl                 1,184,075    1,208,585
    ccn                 1,037,147    1,061,657

The paper's accuracy on CIFAR-10: CCT 82.23, CCP 82.48, CCN 83.36 % (table 3). Our own on CIFAR-10:
not measured yet.

The recipe `paper` (section 4; the same for ViX, LeViX, CCX, CvX and PiX): AdamW 1e-3 without any
schedule, decay 0.01 on everything, betas 0.9 and 0.999, batch 64, no augmentation named. The paper
does not say how many epochs; the authors' scripts have 40 to 150, here 100. Not as there: mixed
precision (say bf16 for something near it), and the best of three runs. The feed-forward is 512 wide
and paths are dropped, as in the scripts; the paper says 256 and none. On digits the recipe `strong`
has 8×8 tokens, one for each pixel of the original images, and 16 landmarks or projected positions.

Performer and Nyström divide by a maximum for stability. The authors take it over the whole batch,
so that an image's logits depend on the images beside it; here it is each image's own
(`model.batch_coupling=False`), and the logits differ by 2e-3 to 4e-2 of the largest. A network
converted from the authors' weights computes as theirs does (True).

    python -m hsvit_jax.main --config=configs/ccx.py:ccn,cifar10
    python -m hsvit_jax.main --config=configs/ccx.py:cct,tiny_imagenet,paper
    python -m hsvit_jax.main --config=configs/ccx.py:folder=my_images
"""

from functools import partial

from hsvit_jax.config import variants

get_config = partial(variants.get_config, "ccx")
