"""Checkpoints of a run: the training state and the metrics so far."""

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from common.curves import Metrics


class Checkpoints:
    """The newest checkpoint in a folder, written by orbax."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._manager = ocp.CheckpointManager(
            folder,
            options=ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False),
        )

    @property
    def newest(self) -> int | None:
        """Updates done before the newest checkpoint; None: there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, metrics: Metrics) -> None:
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), metrics=ocp.args.JsonSave(metrics.as_dict())
            ),
        )

    def restore(self, like: Any) -> tuple[Any, Metrics]:
        """Reads the newest checkpoint.

        Args:
            like: a state with the shapes and dtypes of the one that was saved.
        """
        restored = self._manager.restore(
            self.newest,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(like), metrics=ocp.args.JsonRestore()
            ),
        )
        return restored.state, Metrics.from_dict(restored.metrics)
