"""hsvit power-search: how many tokens each block of a DeiT keeps."""

from absl import flags

from hsvit_jax import cli
from hsvit_jax.cli import EVERYTHING, Command, Request, define_path

COMMAND = Command(
    "Learns how many tokens each block of a trained DeiT keeps, by PoWER's soft extraction.",
    __name__,
    "$ --config=deit:ti,cifar100,paper --config.init.from=runs/deit-ti\n"
    "Writes the network and prints the command that resumes its training.",
    (
        (flags.DEFINE_float, "epochs", 1.0, "Epochs of the search; replaces train.epochs.", 0.0),
        (flags.DEFINE_float, "penalty", 1e-4, "Penalty of a token; larger keeps fewer.", 0.0),
        (flags.DEFINE_float, "rate", 1e-2, "Learning rate of the retention.", 0.0),
        (define_path, "out", "power.safetensors", "The file to write."),
    ),
    config=EVERYTHING,
    needs_config=True,
    exclusive=("epochs train.epochs train.steps",),
)


def run(request: Request) -> None:
    """Searches, writes the network, and prints what it keeps and the command of the third step."""
    from hsvit_jax import artifacts
    from hsvit_jax import config as config_lib
    from hsvit_jax.studies import power_search

    values, path = request.flags, cli.ending(request.flags.out, ".safetensors")
    artifacts.prepare_for(path)  # it may fail
    if path.exists():
        raise ValueError(f"--out={path} is there already: move it or choose another name")
    config = config_lib.override(request.config, [f"train.epochs={values.epochs}"])
    found = power_search.search(config, values.penalty, values.rate)
    artifacts.write_file(path, found.file)
    kept = ",".join(map(str, found.retained))
    print(
        f"tokens after each block's attention: {kept}, {found.share:.0%} of the "
        f"multiply-adds\n  network  {path}\n"
        f"  train    {request.train_line(**{'init.from': str(path)}, **found.changes)}"
    )
