"""Trains four towers of HSViT on four devices, which the CPU simulates.

python examples/towers.py [KEY=VALUE ...]

Each device holds one tower, a quarter of the kernels and attention groups; one all-reduce sums
their CLS tokens. On real accelerators leave the three environment variables out.
"""

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"  # set before jax is imported
os.environ["JAX_NUM_CPU_DEVICES"] = "4"
os.environ["NPROC"] = "8"  # threads for their collectives: twice the devices

import jax

import hsvit_jax

settings = sys.argv[1:] or ["train.epochs=2"]
towers = "model.towers=4", "mesh.group=4", "mesh.data=1"
config = hsvit_jax.get_config("c2a2:digits,fast", *towers, *settings)
result = hsvit_jax.fit(config, "runs/towers")
print(f"{jax.device_count()} devices: test {result.test}, {result.parameters:,} parameters")
