"""LeViX: LeViT's plan, a stem of convolutions and blocks without pre-norm, with linear mixing too.

Variants: levit (softmax), levip (Performer; the default), levil (Linformer), levin (Nyström). Exact
parameters at 32 px and 10 classes, and at 64 px and 200 classes (ViX paper, tables 3 and 4, which
omit Linformer's projections and misprint LeViP):

    levit                 624,970      649,480
    levip                 622,410      646,920
    levil                 768,330      792,840
    levin                 621,402      645,912

The paper's accuracy on CIFAR-10: LeViT 77.06, LeViP 79.50, LeViN 77.81 % (table 3). Our own on
CIFAR-10: not measured yet.

The recipe `paper`, and the maximum that Performer and Nyström divide by
(`model.batch_coupling=False`), are as for ViX (configs/vix.py), also what the recipe omits and the
tokens on digits.

    python -m hsvit_jax.main --config=configs/levix.py:levip,cifar10
    python -m hsvit_jax.main --config=configs/levix.py:levin,tiny_imagenet,paper
    python -m hsvit_jax.main --config=configs/levix.py:folder=my_images
"""

from hsvit_jax import config

get_config = config.for_network("levix")
