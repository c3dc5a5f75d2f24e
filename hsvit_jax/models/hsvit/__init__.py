"""HSViT: its trunk of convolutions, attention groups and head, alone and on a CNN backbone."""

from hsvit_jax.models.hsvit.groups import Groups as Groups
from hsvit_jax.models.hsvit.hsvit import HSViT as HSViT
from hsvit_jax.models.hsvit.sizes import HSViTConfig as HSViTConfig
from hsvit_jax.models.hsvit.trunk import Trunk as Trunk
