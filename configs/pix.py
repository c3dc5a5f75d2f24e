"""PiX: PiT's plan, two stages with a pooling between them, with quadratic or linear mixing.

Variants: pit (softmax), pip (Performer), pin (Nyström), and each with `hybrid`, three convolutions
before it; the default is hybrid_pin. Exact parameters at 32 px and 10 classes, and at 64 px and 200
classes (ViX paper, table 5, which omits positions and CLS):

    pit                 1,028,362    1,078,344
    pip                 1,029,898    1,079,880
    pin                 1,028,890    1,078,872
    hybrid_pit          1,121,098    1,169,928
    hybrid_pip          1,122,634    1,171,464
    hybrid_pin          1,121,626    1,170,456

The paper's accuracy on CIFAR-10: PiT 63.49, PiN 69.41, hybrid PiN 74.00 % (table 5). Our own on
CIFAR-10: not measured yet.

The recipe `paper`, and the maximum that Performer and Nyström divide by
(`model.batch_coupling=False`), are as for ViX (configs/vix.py), also what the recipe omits and the
tokens on digits.

    python -m hsvit_jax.main --config=configs/pix.py:pin,hybrid,cifar10
    python -m hsvit_jax.main --config=configs/pix.py:pit,cifar10,paper
    python -m hsvit_jax.main --config=configs/pix.py:folder=my_images
"""

from hsvit_jax import config

get_config = config.for_network("pix")
