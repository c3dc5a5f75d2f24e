"""CCX: a compact transformer behind convolutions and pools, with quadratic or linear mixing.

Variants: cct (softmax), ccp (Performer), ccl (Linformer), ccn (Nyström; the default). Exact
parameters at 32 px and 10 classes, and at 64 px and 200 classes (ViX paper, tables 3 and 4, which
omit positions and Linformer's projections):

    cct                 1,036,619    1,061,129
    ccp                 1,038,155    1,062,665
    ccl                 1,184,075    1,208,585
    ccn                 1,037,147    1,061,657

The paper's accuracy on CIFAR-10: CCT 82.23, CCP 82.48, CCN 83.36 % (table 3). Our own on CIFAR-10:
not measured yet.

The recipe `paper`, and the maximum that Performer and Nyström divide by
(`model.batch_coupling=False`), are as for ViX (configs/vix.py), also what the recipe omits and the
tokens on digits. The feed-forward is 512 wide and paths are dropped, as in the scripts; the paper
states 256 and none.

    python -m hsvit_jax.main --config=configs/ccx.py:ccn,cifar10
    python -m hsvit_jax.main --config=configs/ccx.py:cct,tiny_imagenet,paper
    python -m hsvit_jax.main --config=configs/ccx.py:folder=my_images
"""

from hsvit_jax import config

get_config = config.for_network("ccx")
