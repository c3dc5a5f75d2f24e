"""DeiT, with and without a CLS token, and with PoWER's elimination of tokens.

Variants: ti, s (the default), ti-nocls, s-nocls, ti-power, s-power: the baselines of the HVT paper
(tables 1, 2, 4 and 9). The schedule of ti-power and s-power costs the paper's FLOPs; the paper does
not state its own. To learn a schedule, train ti, run `hsvit power-search` on that run, and continue
with the tokens that it prints (`model.retained`). Exact parameters at 224 px and 100 classes, and
at 224 px and 1000 classes:

    ti                  5,543,716    5,717,416
    ti-nocls            5,543,332    5,717,032
    s                  21,704,164   22,050,664
    s-nocls            21,703,396   22,049,896
    s-power            21,704,164   22,050,664

Our accuracy on CIFAR-100: not measured yet.

The recipe `paper` is the HVT paper's for its comparison (see configs/hvt.py): images of 224 px, 300
epochs, AdamW 1.25e-4, decay 0.025 on kernels, batch 128; for ImageNet batch 1024 and 1e-3. The
differences from DeiT's augmentation are listed there.

The patch is 16 from 112 px on, else the largest that leaves 7×7 tokens: 4 at 28 and 32 px, 8 at 64.

    python -m hsvit_jax.main --config=configs/deit.py:s,cifar100,paper
    python -m hsvit_jax.main --config=configs/deit.py:ti,digits
    python -m hsvit_jax.main --config=configs/deit.py:ti-power,folder=my_images
"""

from hsvit_jax import config

get_config = config.for_network("deit")
