"""How a run is dealt to devices: rows of the batch, and heads and hidden channels of the model.

Only arrays are placed. XLA finds out the rest, and attention computes each device's rows and heads.
"""

import math
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from common.model import LanguageModel


@dataclass(frozen=True)
class Devices:
    """A grid of devices.

    Attributes:
        data: how many parts rows are dealt in.
        tensor: how many parts heads and hidden channels are dealt in.
    """

    data: int = 1
    tensor: int = 1

    def check(self) -> None:
        """Ends the program if there are fewer devices. A CPU counts as as many as are asked for."""
        count = self.data * self.tensor
        if count > 1:
            jax.config.update("jax_num_cpu_devices", count)
        if len(jax.devices()) < count:
            sys.exit(f"error: expected {count} devices, found {len(jax.devices())}")

    @cached_property
    def mesh(self) -> Mesh:
        devices = jax.devices()[: self.data * self.tensor]
        return jax.make_mesh(
            (self.data, self.tensor), ("data", "tensor"), (AxisType.Auto,) * 2, devices=devices
        )

    def place_rows(self, rows: Any, axis: int = 0) -> jax.Array:
        """Deals an array's rows, which lie along `axis`, to the devices."""
        return self._place(rows, PartitionSpec(*[None] * axis, "data"))

    def place_state(self, model: LanguageModel, state: Any) -> Any:
        """Deals the weights of the model's layers in a state, and whatever has their shapes."""

        def place(path: tuple[Any, ...], array: jax.Array) -> jax.Array:
            names = {str(getattr(key, "name", getattr(key, "key", None))) for key in path}
            for name, axis in model.dealt_axes.items():
                if name in names and array.ndim > axis and array.shape[axis] % self.tensor == 0:
                    return self._place(array, PartitionSpec(*[None] * axis, "tensor"))
            return self._place(array, PartitionSpec())

        return jax.tree_util.tree_map_with_path(place, state)

    def _place(self, array: Any, spec: PartitionSpec) -> jax.Array:
        if math.prod(self.mesh.axis_sizes) == 1:
            return jax.numpy.asarray(array)
        return jax.device_put(array, NamedSharding(self.mesh, spec))
