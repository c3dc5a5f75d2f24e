"""Draws three class folders of small pictures to try the package on.

python examples/draw_shapes.py my_images
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "my_images")
random = np.random.default_rng(0)
for name in ("circle", "square", "triangle"):
    (folder / name).mkdir(parents=True, exist_ok=True)
    for index in range(80):
        ground = random.integers(100, 180, (8, 8, 3), np.uint8)
        image = Image.fromarray(ground).resize((64, 64), Image.Resampling.BICUBIC)
        x, y, radius = random.integers((24, 24, 12), (40, 40, 22)).tolist()
        colour = tuple(random.integers(0, 256, 3).tolist())
        draw = ImageDraw.Draw(image)
        if name == "circle":
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), colour)
        else:
            sides = 4 if name == "square" else 3
            draw.regular_polygon((x, y, radius), sides, int(random.integers(0, 360)), colour)
        image.filter(ImageFilter.GaussianBlur(1)).save(folder / name / f"{index:03}.jpg")
print(f"wrote 240 pictures to {folder}")
