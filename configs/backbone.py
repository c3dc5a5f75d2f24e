"""HSViT on a convolutional network: each channel of its last map is a token (paper, table 3).

Variants by backbone: resnet18, resnet34, resnet50 (the default), resnet101, resnet152,
efficientnet_b0, _b3, _b4, _b5, mobilenet_v2_1.0 and mobilenet_v2_1.4; 64 groups, 2 attention
blocks, 8 heads, tokens as wide as the map has pixels, rounded up to a multiple of 8. The widths
depend on the size of the image. Exact parameters at 224 px and 1000 classes, and at 64 px and 200
classes:

    resnet18           12,920,904   11,222,400
    resnet50           25,338,440   23,566,208
    resnet101          44,330,568   42,558,336
    mobilenet_v2_1.4    6,131,848    4,371,904

With the native sizes of 380 and 456 px, efficientnet_b4 has 28,718,688 and efficientnet_b5
56,867,576 parameters for 1000 classes. Our accuracy: not measured yet.

The backbone's own settings have a section, such as --config.model.backbone_settings.drop_rate=0 for
an EfficientNet. model.trunk=sharded spreads the backbone's channels over mesh.group besides the
attention groups.

The recipe `paper`: the backbone pretrained and frozen, the native size, AdamW 1e-3 with decay 0.01,
2 epochs of warm-up, cosine per step, 30 epochs of batch 128, label smoothing 0.1, random resized
crops of 8 to 100 % of the area, flips, TrivialAugment, MixUp 0.2 or CutMix 1.0, erasing 0.1,
gradient norm 0.01. Weights are named with init.from; --config.init.freeze= (nothing) trains the
whole network.

Differences from the authors' script: a crop is taken on the device, from the image scaled to cover
the native size and cut to its centre (theirs: from the file's pixels). TrivialAugment samples the
nearest pixel (theirs: bilinear). The cosine ends at 0 (theirs: it counts from the warm-up's end and
stops at 1 % of the rate). Test images are cut to their centre (theirs: stretched, as with
data.fit=stretch).

    python -m hsvit_jax.main --config=configs/backbone.py:resnet50,imagenet,paper \\
        --config.init.from=PATH
    python -m hsvit_jax.main --config=configs/backbone.py:resnet18,cifar10
    python -m hsvit_jax.main --config=configs/backbone.py:mobilenet_v2_1.4,folder=my_images
"""

from hsvit_jax import config

get_config = config.for_network("hsvit_backbone")
