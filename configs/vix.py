"""ViX: a vision transformer on pixels with quadratic or linear mixing, plain and hybrid.

Mixers: vit (softmax), vip (Performer), vil (Linformer), vin (Nyström), fnet, mlp_mixer; `hybrid`
puts three convolutions before them, `rope` rotary positions (not for fnet and mlp_mixer). The
default is hybrid_vin. Exact parameters at 32 px and 10 classes, and at 64 px and 200 classes; the
paper's tables 1, 2 and 6 omit positions, CLS and Linformer's projections:

    vit                   661,770      687,432
    vin                   662,298      687,960
    hybrid_vit            754,506      779,016
    hybrid_vip            756,042      780,552
    hybrid_vil            902,218      926,728
    hybrid_vin            755,034      779,544
    hybrid_fnet           491,850      516,360
    hybrid_mlp_mixer    8,625,738    8,650,248
    hybrid_vin_rope       623,834      648,344

The paper's accuracy on CIFAR-10: ViT 56.81, ViN 65.06, hybrid ViT 73.94, hybrid ViN 75.26 % (best
of three runs, table 1). Our own on CIFAR-10: not measured yet.

The recipe `paper` (section 4; the same for ViX, LeViX, CCX, CvX and PiX): AdamW 1e-3 without a
schedule, decay 0.01 on everything, betas 0.9 and 0.999, batch 64, no augmentation. The paper does
not state the epochs; the authors' scripts have 40 to 150, this recipe 100. Dropout is each
script's; the paper states 0.

Differences from the authors' scripts: float32 (theirs: mixed precision; bf16 is close to it).
Pixels are normalised by the data set (theirs: by 0.5 for CIFAR-10). Tests run without dropout and
with running statistics (most scripts stay in training mode). The accuracy is one run's (theirs: the
best of three, on an unnamed split). On digits the recipe `strong` has 8×8 tokens, one for each
pixel of the original images, and 16 landmarks or projected positions.

Performer and Nyström divide by a maximum for stability. The authors take it over the whole batch,
so an image's logits depend on the images beside it. By default, each image has its own
(`model.batch_coupling=False`), and the logits differ by 2e-3 to 4e-2 of the largest. A network
converted from the authors' weights has True.

    python -m hsvit_jax.main --config=configs/vix.py:vin,hybrid,cifar10
    python -m hsvit_jax.main --config=configs/vix.py:vit,cifar10,paper
    python -m hsvit_jax.main --config=configs/vix.py:vin,hybrid,rope,folder=my_images
"""

from hsvit_jax import config

get_config = config.for_network("vix")
