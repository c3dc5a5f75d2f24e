"""Trains attention groups on a pretrained ResNet-18, which is frozen, for custom images.

python examples/pretrained_backbone.py my_images hub:microsoft/resnet-18 [KEY=VALUE ...]

In place of the model of the hub, which needs the extra `hub` and a network once, a file does:
resnet18.safetensors with the names of `transformers`, torchvision or timm.
"""

import sys

import hsvit_jax

if len(sys.argv) < 3:
    sys.exit(__doc__)
folder, weights, *settings = sys.argv[1:]
# For a minute on a laptop: small images, which go through the frozen ResNet-18 once, so none is
# augmented. It was made for 224 pixels.
plain = ("augment.crop_padding=0", "augment.flip=false", "augment.mixup=0", "augment.cutmix=0")
config = hsvit_jax.get_config(
    f"backbone:resnet18,folder={folder}",
    f"init.from={weights}",
    "init.freeze=backbone",
    *(settings or ["data.image_size=64", "init.cache=runs/features", *plain]),
)
result = hsvit_jax.fit(config, "runs/pretrained-backbone")
print(f"test {result.test}, {result.parameters:,} parameters, curves in {result.curves}")
