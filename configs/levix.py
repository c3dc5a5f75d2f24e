"""LeViX: LeViT's plan, a stem of convolutions and blocks without pre-norm, with linear mixing too.

Variants: levit (softmax), levip (Performer; the default), levil (Linformer), levin (Nyström). Exact
parameters at 32 px and 10 classes, and at 64 px and 200 classes (ViX paper, tables 3 and 4, which
leave out Linformer's projections and misprint LeViP):

    levit                 624,970      649,480
    levip                 622,410      646,920
    levil                 768,330      792,840
    levin                 621,402      645,912

The paper's accuracy on CIFAR-10: LeViT 77.06, LeViP 79.50, LeViN 77.81 % (table 3). Our own on
CIFAR-10: not measured yet.

The recipe `paper` (section 4; the same for ViX, LeViX, CCX, CvX and PiX): AdamW 1e-3 without any
schedule, decay 0.01 on everything, betas 0.9 and 0.999, batch 64, no augmentation named. The paper
does not say how many epochs; the authors' scripts have 40 to 150, here 100. Not as there: mixed
precision (say bf16 for something near it), and the best of three runs. On digits the recipe
`strong` has 8×8 tokens, one for each pixel of the original images, and 16 landmarks or projected
positions.

Performer and Nyström divide by a maximum for stability. The authors take it over the whole batch,
so that an image's logits depend on the images beside it; here it is each image's own
(`model.batch_coupling=False`), and the logits differ by 2e-3 to 4e-2 of the largest. A network
converted from the authors' weights computes as theirs does (True).

    python -m hsvit_jax.main --config=configs/levix.py:levip,cifar10
    python -m hsvit_jax.main --config=configs/levix.py:levin,tiny_imagenet,paper
    python -m hsvit_jax.main --config=configs/levix.py:folder=my_images
"""

from functools import partial

from hsvit_jax.config import variants

get_config = partial(variants.get_config, "levix")
