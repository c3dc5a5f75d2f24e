"""Trains attention groups on a pretrained ResNet-18, which stays as it is, for images of one's own.

python examples/pretrained_backbone.py my_images hub:microsoft/resnet-18 [KEY=VALUE ...]

In place of the model of the hub, which needs the extra `hub` and a network once, a file does:
resnet18.safetensors with the names of `transformers`, torchvision or timm.
"""

import sys

import hsvit_jax

if len(sys.argv) < 3:
    sys.exit(__doc__)
folder, weights, *settings = sys.argv[1:]
config = hsvit_jax.get_config(
    f"backbone:resnet18,folder={folder}",
    f"init.from={weights}",
    "init.freeze=backbone",
    # For a minute on a laptop; ResNet-18 was made for 224 pixels.
    *(settings or ["data.image_size=64", "train.epochs=8"]),
)
result = hsvit_jax.fit(config, "runs/pretrained-backbone")
print(f"test {result.test}, {result.parameters:,} parameters, curves in {result.curves}")
