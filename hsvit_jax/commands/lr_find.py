"""hsvit lr-find: the loss of a short run whose learning rate grows."""

from absl import flags

from hsvit_jax import cli
from hsvit_jax.cli import EVERYTHING, Command, Request, define_path

COMMAND = Command(
    "Finds a learning rate: draws the loss of a short run whose rate grows.",
    __name__,
    "$ --config=c2a2:folder=my_images",
    (
        (flags.DEFINE_integer, "steps", 100, "Steps, each at a larger rate; at least 30.", 30),
        (define_path, "out", "lr-find.png", "A PNG to draw."),
    ),
    config=EVERYTHING,
    needs_config=True,
)


def run(request: Request) -> None:
    """Searches, draws, and prints the rates."""
    from hsvit_jax import artifacts
    from hsvit_jax.studies import lr_find

    path = cli.ending(request.flags.out)
    artifacts.prepare_for(path)  # it may fail
    found = lr_find.search(request.config, request.flags.steps)
    steepest, lowest = lr_find.choose(*found)
    lr_find.draw(*found, steepest, path)
    print(
        f"the loss falls fastest at a rate of {steepest:.1e}, is lowest at {lowest:.1e}, and was "
        f"followed to {found[0][-1]:.1e}\n"
        f"  plot   {path}\n"
        f"  train  {request.train_line(**{'optim.learning_rate': f'{steepest:.1e}'})}"
    )
