"""ViX: a vision transformer on pixels with quadratic or linear mixing, plain and hybrid.

Mixers: vit (softmax), vip (Performer), vil (Linformer), vin (Nyström), fnet, mlp_mixer; `hybrid`
puts three convolutions before them, `rope` rotary positions (not for fnet and mlp_mixer). With no
word for it the variant is hybrid_vin. Exact parameters at 32 px and 10 classes, and at 64 px and
200 classes; the paper's tables 1, 2 and 6 leave out positions, CLS and Linformer's projections:

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

The recipe `paper` (section 4; the same for ViX, LeViX, CCX, CvX and PiX): AdamW 1e-3 without any
schedule, decay 0.01 on everything, betas 0.9 and 0.999, batch 64, no augmentation named. The paper
does not say how many epochs; the authors' scripts have 40 to 150, here 100. Not as there: mixed
precision (say bf16 for something near it), pixels normalised by 0.5 (CIFAR-10), tests without
dropout and by running statistics (most of the scripts never leave the training mode), and the best
of three runs, whose split it does not name. Dropout is what the scripts have for each variant; the
paper says 0. On digits the recipe `strong` has 8×8 tokens, one for each pixel of the original
images, and 16 landmarks or projected positions.

Performer and Nyström divide by a maximum for stability. The authors take it over the whole batch,
so that an image's logits depend on the images beside it; here it is each image's own
(`model.batch_coupling=False`), and the logits differ by 2e-3 to 4e-2 of the largest. A network
converted from the authors' weights computes as theirs does (True).

    python -m hsvit_jax.main --config=configs/vix.py:vin,hybrid,cifar10
    python -m hsvit_jax.main --config=configs/vix.py:vit,cifar10,paper
    python -m hsvit_jax.main --config=configs/vix.py:vin,hybrid,rope,folder=my_images
"""

from hsvit_jax import config

get_config = config.for_network("vix")
