"""hsvit list: the networks, data sets, recipes, switches and trained networks that have names."""

import textwrap
from collections.abc import Iterable, Mapping

from hsvit_jax import config as config_lib
from hsvit_jax.cli import Request
from hsvit_jax.config import defaults
from hsvit_jax.models import FAMILIES
from hsvit_jax.train import init_from
from hsvit_jax.weights import sources

#: Every recipe and switch in a phrase.
ABOUT_WORDS: Mapping[str, str] = {
    "strong": "the default: 100 epochs (digits 12), with augmentation",
    "fast": "a dozen epochs, with crop and flip alone",
    "small": "the default for few images of one's own: length and batch follow from their number",
    "paper": "that of the network's own paper, often 300 epochs",
    "finetune": "for the weights of init.from: a low rate and a new classifier",
    "tiny": "a smoke run of a tiny network and eight steps: its accuracy means nothing",
    "bf16": "computation in bfloat16",
    "conv_only": "HSViT without attention",
    "attention_only": "HSViT without convolutions",
}


def run(request: Request) -> int:
    """Prints the names, each kind under the words that take them."""
    siblings = {
        f"{family.config_file or name}:": " ".join(family.variants)
        for name, family in FAMILIES.items()
        if name != "hsvit"
    }
    about = {name: ABOUT_WORDS[name] for name in (*config_lib.RECIPES, *config_lib.SWITCHES)}
    lines = [
        "networks, as in --config=c2a2 or --config=resnet:18",
        *_table({" ".join(FAMILIES["hsvit"].variants): "HSViT"} | siblings),
        "data sets, after the colon, as in --config=c2a2:cifar100",
        *_table({"named": " ".join(config_lib.DATA_SETS), "own": " ".join(defaults.DATA_KINDS)}),
        "recipes and switches, after the colon too, as in --config=c2a2:cifar100,fast,bf16",
        *_table(about),
        f"trained networks, as in {request.program} predict zoo:c2a2-digits IMAGE or "
        "--config.init.from=zoo:c2a2-digits",
        *_table({f"zoo:{name}": _trained(f"zoo:{name}") for name in sources.zoo()}),
    ]
    print("\n".join(lines))
    return 0


def _table(rows: Mapping[str, str]) -> Iterable[str]:
    width = max(map(len, rows))
    hanging = " " * (width + 4)
    for name, text in rows.items():
        start = f"  {name:<{width}}  "
        yield textwrap.fill(text, 100, initial_indent=start, subsequent_indent=hanging)


def _trained(source: str) -> str:
    """A trained network in a line: its data set, images, classes and measured accuracy."""
    stored = init_from.stored_network(source)
    size, data = stored.model.config.image_size, stored.config.data
    tested = stored.meta["measured"]["test"]
    return (
        f"{stored.config.model.variant} on {data.name}, {size[0]}×{size[1]} pixels, "
        f"{data.num_classes} classes, test accuracy {tested['accuracy']:.2%}"
    )
