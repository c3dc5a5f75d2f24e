"""hsvit list: the networks, data sets, recipes, switches and trained networks that have names."""

import textwrap

from hsvit_jax.cli import Command, Request

COMMAND = Command(
    "Lists the networks, data sets, recipes and trained networks that have names.", __name__, "$"
)


def run(request: Request) -> None:
    """Prints the names, each kind under the words that take them."""
    from hsvit_jax import config as config_lib
    from hsvit_jax.config import words
    from hsvit_jax.models import DEFAULT, FAMILIES
    from hsvit_jax.weights import sources

    siblings = {family.config_file or name: family for name, family in FAMILIES.items()}
    hsvits = siblings.pop(DEFAULT.name).variants
    kinds = {
        "networks, as in --config=c2a2 or --config=resnet:18": {
            " ".join(hsvits): "HSViT",
            **{f"{name}:": " ".join(family.variants) for name, family in siblings.items()},
        },
        "data sets, after the colon, as in --config=c2a2:cifar100": {
            "named": " ".join(config_lib.DATA_SETS),
            "your own": ", ".join(words.DATA_KINDS),
        },
        "recipes and switches, after the colon too, as in --config=c2a2:cifar100,fast,bf16": {
            **words.RECIPES,
            **words.SWITCHES,
        },
        f"trained networks, as in {request.program} predict zoo:c2a2-digits IMAGE": {
            f"zoo:{name}": f"--config.init.from=zoo:{name}" for name in sources.zoo()
        },
    }
    for kind, rows in kinds.items():
        print(kind)
        width = max(map(len, rows))
        for name, text in rows.items():
            start, hanging = f"  {name:<{width}}  ", " " * (width + 4)
            fill = textwrap.TextWrapper(100, start, hanging, break_on_hyphens=False).fill
            print(fill(text))
