"""A user's mistake is one line: the exit code, and what has to be named in it, for each.

Rows of the table: exit code, words, and texts of the message, the key and the fix above all. They
run in a folder that holds `run/metrics.jsonl` and the studies below; nothing else may lie there
afterwards. The sweep of the schema has the ranges of keys (tests/config).
"""

import shlex
from pathlib import Path

import pytest

from hsvit_jax import main

DIGITS = f"--config={Path(__file__).resolve().parents[1]}/configs/c2a2.py:digits,tiny"
STUDIES = {
    "own.py": "x = 1\n",
    "bad.py": "x = 1 / 0\n",
    "empty.py": "from hsvit_jax.studies.study import Study\n"
    "get_study = lambda: Study('t', 'x', 'l', [])\n",
    "typo.py": "from hsvit_jax.studies.study import Cell, Study\n"
    "get_study = lambda: Study('t', 'x', 'l', [Cell(1, 2, 'c2a2', ['model.depht=1'])])\n",
}
TABLE = """
# Commands, flags and --config.
2 | trian DIGITS                                        | trian, Did you mean train?
2 | validate x                                          | validate, Did you mean eval?
2 | --mode=train                                        | train needs --config=FILE
2 | --config.train.batch=5                              | train needs --config=FILE
2 | --config                                            | --config names no file
2 | --config=nope.py:digits                             | nope.py: No such file
2 | --config=there/vix.py:vin                           | --config=vix:vin
2 | DIGITSx                                             | Did you mean tiny?
2 | --config=c2a2:folder=                               | 'folder='
2 | DIGITS --config.train.batch abc                     | train.batch, 1 to 1048576, 'abc'
2 | DIGITS --wrokdir=x                                  | Did you mean: workdir
2 | DIGITS --epochs=5                                   | --epochs, --config.train.epochs=5
2 | DIGITS --lr 0.1                                     | --config.optim.learning_rate=...
2 | DIGITS --num_workers=4                              | leave it out
2 | DIGITS --resume                                     | the same command
2 | DIGITS --output_dir=x                               | --workdir=x
2 | train epochs=5 imgsz=64                             | epochs=5, --config.data.image_size=64
2 | eval x --batch-size=5                               | --config.eval.batch=5
2 | DIGITS stray                                        | unexpected words: stray
2 | eval x --workdir=y                                  | unexpected words: x
# Flags and keys of other commands.
2 | DIGITS --curve=x                                    | --curve, eval
2 | predict x --data=y                                  | --data, study
2 | predict --nojson x.png                              | --json
2 | summary DIGITS --distributed=off                    | --distributed
2 | summary DIGITS --config.train.epochs=2              | --config.train.epochs
2 | plan DIGITS --config.mesh.group=2                   | --config.mesh.group
2 | predict --checkpoint=x DIGITS y.png                 | --config, x
2 | eval --checkpoint=x DIGITS --config.mesh.gradients=bf16 | --config.mesh.gradients, data.name
2 | eval --checkpoint=x --config.eval.tta=flip          | --config.eval.tta, --config=FILE
2 | compare c2a2:digits --sedes=1                       | sedes
# What excludes each other.
2 | eval --checkpoint=x --workdir=y                     | --checkpoint, --workdir, remove one
2 | eval x --curve=x.png --drop_groups=1                | --curve, --drop_groups, remove one
2 | study fig5 --epochs=1 --config.train.steps=1        | --epochs, --config.train.steps
2 | benchmark DIGITS --batch=1 --config.train.batch=2   | --batch, --config.train.batch
2 | benchmark DIGITS --vs=true --peak                   | --vs, --peak
2 | compare c2a2:digits DIGITS                          | --config, SPEC
2 | compare c2a2:digits --fractions=0.1 --config.data.fraction=1 | --fractions, data.fraction
2 | compare c2a2:digits --config.seed=3                 | --seeds, --config.seed
# What is lacking.
2 | predict                                             | RUN IMAGE
2 | serve                                               | RUN, as in
2 | export x                                            | RUN OUT
2 | convert                                             | FILE
2 | compare                                             | SPEC
2 | curves                                              | RUN
2 | study                                               | NAME
2 | plan DIGITS                                         | --devices
2 | benchmark                                           | --config
# Values.
2 | predict --top_k=0                                   | --top_k=0
2 | serve x --wait=nan                                  | --wait=nan
2 | serve x --parts=2 --deadline=30                     | --deadline, --timeout
2 | eval --checkpoint=x --curve=x.pdf                   | --curve, .png
2 | curves run --out=curves                             | --out, .png
2 | curves . --out=run/curves.png                       | --out=run/curves.png
2 | export x y.pt                                       | y.pt, .safetensors, .onnx
2 | study fig55                                         | Did you mean fig5?
2 | study typo.py                                       | 2, 1, model.depht
2 | compare ' '                                         | --config names no file
2 | compare c2a2:digits,tinyx                           | Did you mean tiny?
2 | compare c2a2:digits --seeds=x                       | seed, 0 to 4294967295
2 | compare c2a2:digits --fractions=0.1,2               | data.fraction
2 | study fig5 DIGITS                                   | --config, NAME
2 | compare c2a2:digits --fractions=                    | expected numbers
# The request and its data.
1 | study own.py                                        | own.py, get_study
1 | study bad.py                                        | bad.py, ZeroDivisionError
1 | study empty.py                                      | empty.py, cells
1 | curves . --out=x.png                                 | metrics.jsonl
1 | DIGITS --config.train.batch=5000                    | train.batch=5000
1 | DIGITS --config.model.conv_kernels=3,3,3            | one entry for each of conv_channels
1 | summary --config=vix:vit --config.model.landmarks=8 | model.landmarks
1 | plan --config=c2a2:conv_only --devices=2 --config.model.depth=9 | model.depth
1 | DIGITS --config.mesh.group=3                        | mesh.group
2 | benchmark DIGITS --work=sleep                       | sleep, infer
1 | benchmark DIGITS --config.mesh.group=3              | mesh.group
1 | --config=c2a2:folder=/no/such                       | /no/such
1 | predict x x.png                                     | x.png
1 | eval --checkpoint=/no/such                          | /no/such does not exist
1 | eval --config=c2a2:cifar10                          | runs/c2a2-cifar10-strong-seed0
1 | predict --config=c2a2 --config.optim.beta1=0.8 own.py | runs/c2a2-cifar10-strong-beta10.8-seed0
"""
ROWS = [row.split("|") for row in TABLE.splitlines() if "|" in row]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("messages")
    (place / "run").mkdir()
    (place / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    for name, text in STUDIES.items():
        (place / name).write_text(text)
    return place


@pytest.mark.parametrize(("code", "words", "named"), ROWS, ids=[row[1].strip() for row in ROWS])
def test_a_mistake_is_one_line(capfd, folder, monkeypatch, code, words, named):
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    capfd.readouterr()
    found = main.main(["main", *shlex.split(words.replace("DIGITS", DIGITS))])
    out, err = capfd.readouterr()
    assert (found, out) == (int(code), ""), err
    assert [text for text in named.split(",") if text.strip() not in err] == [], err
    assert "Traceback" not in err and ("--help" in err) == (found == 2)
    assert sorted(folder.rglob("*")) == before  # a mistake leaves nothing behind
