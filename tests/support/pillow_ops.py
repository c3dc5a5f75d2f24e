"""RandAugment's ops by Pillow, as torchvision calls it."""

import math

from PIL import Image, ImageEnhance, ImageOps


def pillow_op(image: Image.Image, op: str, magnitude: float) -> Image.Image:
    """The op as torchvision's PIL backend does it, NEAREST, filled with black."""
    enhancers = {name: getattr(ImageEnhance, name) for name in ("Brightness", "Contrast")}
    enhancers |= {"Color": ImageEnhance.Color, "Sharpness": ImageEnhance.Sharpness}
    if op in enhancers:
        return enhancers[op](image).enhance(1.0 + magnitude)
    if op in ("ShearX", "ShearY"):
        angle = math.radians(math.degrees(math.atan(magnitude)))
        x, y = (angle, 0.0) if op == "ShearX" else (0.0, angle)
        matrix = pillow_matrix(x, y, (0, 0), image.size, centre=(0.0, 0.0))
        return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST)
    if op in ("TranslateX", "TranslateY"):
        shift = (int(magnitude), 0) if op == "TranslateX" else (0, int(magnitude))
        centre = (image.width * 0.5, image.height * 0.5)
        matrix = pillow_matrix(0.0, 0.0, shift, image.size, centre=centre)
        return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST)
    if op == "Rotate":
        return image.rotate(magnitude, Image.Resampling.NEAREST)
    if op == "Posterize":
        return ImageOps.posterize(image, int(magnitude))
    if op == "Solarize":
        return ImageOps.solarize(image, magnitude)
    if op == "AutoContrast":
        return ImageOps.autocontrast(image)
    if op == "Equalize":
        return ImageOps.equalize(image)
    assert op == "Identity"
    return image


def pillow_matrix(shear_x, shear_y, shift, size, centre):
    """Inverse of translate · centre · shear · centre⁻¹, with no rotation and no scaling."""
    a, b = 1.0, -math.tan(shear_x)
    c, d = -math.tan(shear_y), math.tan(shear_y) * math.tan(shear_x) + 1.0
    x, y = -centre[0] - shift[0], -centre[1] - shift[1]
    return (d, -b, d * x - b * y + centre[0], -c, a, -c * x + a * y + centre[1])
