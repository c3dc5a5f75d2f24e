"""Steps compiled for NVIDIA GPUs by jax's plugin for CUDA 13, on a machine that has none."""

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from support import hlo

from hsvit_jax import config as config_lib
from hsvit_jax import mesh as mesh_lib
from hsvit_jax.benchmark import jobs
from hsvit_jax.models import FAMILIES
from hsvit_jax.ops import conv
from hsvit_jax.train import evaluate, step
from hsvit_jax.weights.stored import averaged

pytestmark = pytest.mark.cuda

#: What the compiler asks of a GPU: an H200.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448 registers_per_core_limit: 65536
  registers_per_block_limit: 65536 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 150000000000 cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H200"
"""


def compiled(spec, work, count, *settings):
    """The text of a step's program for `count` GPUs, and the size of the mesh's group axis."""
    options = {"target_config": H200, "topology": f"1x1x{count}"}
    devices = list(topologies.get_topology_desc(platform="cuda", **options).devices)
    with conv.traced_for("cuda"):
        config = config_lib.get_config(spec, "train.batch=32", *settings)
        run = jobs.prepare(config, False, devices)
        rows = mesh_lib.batch_sharding(run.mesh)
        shape = (32, *run.dataset.train.images.shape[1:])
        images = jax.ShapeDtypeStruct(shape, np.uint8, sharding=rows)
        state = step.from_plain(step.state_template(run), run.state_shape)
        if work == "train":
            number = jax.ShapeDtypeStruct((32,), np.int32, sharding=rows)
            function, arguments = step.jit_step(run), (state, (images, number, number))
        else:
            of_run = run.model, run.mesh, run.config, run.config.mesh.aggregate
            function, arguments = evaluate.make_forward(*of_run), (*averaged(state), images)
        lowered = function.trace(*arguments).lower(lowering_platforms=("cuda",))
    options = {"xla_gpu_autotune_level": 0}
    try:
        program = lowered.compile(options)
    except jax.errors.JaxRuntimeError as error:
        if "deviceless" not in str(error):
            raise
        # Without a GPU nothing can choose among some products' kernels of Triton's.
        program = lowered.compile({**options, "xla_gpu_enable_triton_gemm": False})
    return program.as_text(), run.mesh.shape[mesh_lib.GROUP]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_s_evaluation_compiles(family):
    """That of ResNet has ended the process (jax 0.11.2)."""
    compiled(f"{'c2a2' if family == 'hsvit' else family}:cifar10,tiny", "infer", 1)


def test_gpus_add_the_cls_tokens_of_all_groups_in_one_all_reduce():
    program = compiled("c2a2:digits,tiny", "infer", 4, "mesh.group=4", "mesh.data=1")
    assert hlo.count(*program)[1] == {("group", "all-reduce"): 32 * 16 * 4}


def test_a_training_step_compiles_for_several_gpus():
    program = compiled("c2a2:digits,tiny", "train", 4, "mesh.group=2", "mesh.data=2")
    assert hlo.count(*program)[1].keys() == {("group", "all-reduce"), ("data", "all-reduce")}
