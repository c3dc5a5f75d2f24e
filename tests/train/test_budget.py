"""What C2A2's compiled training step may cost: a change that makes it dearer has to say so here."""

import jax
import pytest
from support import hlo

from hsvit_jax import config as config_lib
from hsvit_jax.benchmark import jobs

BATCH = 16
#: FLOPs of one step's products and convolutions, every turn of a loop counted: four ninths of
#: a direct convolution's where Winograd's is taken. 1.69 G of them are Muon's, whatever the batch.
#: And its bytes besides the arguments.
FLOPS, WORKSPACE = 6_249_859_310, 50_791_712


@pytest.mark.slow
def test_the_step_is_within_its_budget():
    """The trainer's step for one device, at C2A2's own sizes and 32 pixels."""
    config = config_lib.get_config("c2a2", f"train.batch={BATCH}")
    run = jobs.prepare(config, False, jax.devices()[:1])
    compiled = jobs.train_job(run, True).compiled
    flops, transfers = hlo.count(compiled.as_text(), 1)
    assert flops == pytest.approx(FLOPS, rel=0.02)
    assert not transfers
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 1.1 * WORKSPACE
    # The batch is an argument, and no more besides the state, which is given back in its place.
    batch = BATCH * (32 * 32 * 3 + 4 + 4)
    besides = memory.argument_size_in_bytes - memory.alias_size_in_bytes
    assert besides == pytest.approx(batch, rel=0.01)
    assert memory.output_size_in_bytes == pytest.approx(memory.alias_size_in_bytes, rel=0.01)
