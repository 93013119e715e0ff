"""Full-state checkpoints: parameters, optimiser, step and key."""

import contextlib
import gc
import pathlib
import sys
import time

import jax
import orbax.checkpoint as ocp
from rlcr_jax.learner import LearnerState


class CheckpointError(RuntimeError):
  """A checkpoint that cannot be used; nothing was changed."""


def _storable(state: LearnerState) -> dict[str, object]:
  """A pytree of plain arrays: typed keys are stored as their data."""
  stored = state._asdict() | {'key': jax.random.key_data(state.key)}
  return {name: value for name, value in stored.items() if value is not None}


class Checkpoints:
  """The checkpoints of one run, `directory/<step>/` each.

  A step is written under a temporary name and then renamed, so that a run that
  is killed while saving still has its last complete checkpoint.
  """

  def __init__(self, directory: pathlib.Path, keep: int = 2):
    self._directory = directory
    self._manager = ocp.CheckpointManager(
        directory.absolute(),
        options=ocp.CheckpointManagerOptions(max_to_keep=keep),
    )

  def latest_step(self) -> int | None:
    """The number of updates in the newest complete checkpoint."""
    return self._manager.latest_step()

  def save(self, state: LearnerState) -> None:
    """Writes the state after `state.step` updates, and waits for it."""
    step = int(state.step)
    if step != self.latest_step():
      self._manager.save(step, args=ocp.args.StandardSave(_storable(state)))
      self._manager.wait_until_finished()

  def restore(self, like: LearnerState) -> LearnerState:
    """The newest checkpoint, on the devices where `like` is.

    It may have been saved on another number of devices.

    Args:
      like: a state of the expected structure, shapes, dtypes and shardings.

    Raises:
      CheckpointError: if it is damaged or belongs to another kind of run.
    """
    step = self.latest_step()
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        _storable(like),
    )
    try:
      with _quiet():
        found = self._manager.restore(
            step, args=ocp.args.StandardRestore(target)
        )
    except Exception as error:  # Orbax raises many kinds for a damaged file.
      raise CheckpointError(
          f'checkpoint {self._directory / str(step)} cannot be restored: it is'
          ' damaged or from another kind of run. Remove that folder to go on'
          ' from an earlier one, or choose another --workdir.'
          f' ({_first_line(error)})'
      ) from error
    if int(found['step']) != step:
      raise CheckpointError(
          f'checkpoint {self._directory / str(step)} holds step'
          f' {int(found["step"])}: it must hold step {step}.'
      )
    return LearnerState(
        **(found | {'key': jax.random.wrap_key_data(found['key'])})
    )

  def close(self) -> None:
    """Releases the manager's threads."""
    self._manager.close()


@contextlib.contextmanager
def _quiet():
  """Mutes what abandoned reads print from their own threads when they end."""
  hooks = sys.unraisablehook, sys.excepthook
  sys.unraisablehook = sys.excepthook = lambda *unused: None
  try:
    yield
  except Exception:
    gc.collect()
    time.sleep(0.5)  # Reads that were under way complain when they end.
    raise
  finally:
    sys.unraisablehook, sys.excepthook = hooks


def _first_line(error: Exception) -> str:
  return f'{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}'
