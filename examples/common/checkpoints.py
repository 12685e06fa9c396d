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

    def restore_metrics(self) -> Metrics:
        """Reads the metrics of the newest checkpoint."""
        return Metrics.from_dict(self._restore(metrics=ocp.args.JsonRestore()).metrics)

    def restore_state(self, like: Any) -> Any:
        """Reads the state of the newest checkpoint.

        Args:
            like: a state with the structure, shapes and dtypes of the one that was saved.
        """
        return self._restore(state=ocp.args.StandardRestore(like)).state

    def _restore(self, **items: ocp.args.CheckpointArgs) -> Any:
        return self._manager.restore(self.newest, args=ocp.args.Composite(**items))
