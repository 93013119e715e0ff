"""Tests of checkpoints: nothing is lost, and nothing bad is taken for good."""

import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rlcr_jax import checkpoints
from rlcr_jax import learner
from rlcr_jax.critic import CriticState


def make_state(step, width=8, devices=1, seed=0):
  """A learner's state whose every number is of use to tell it from others."""
  rng = np.random.default_rng(seed)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  params = {'w': draw(width, 3), 'b': draw(3)}
  optimizer = optax.chain(
      optax.clip_by_global_norm(1.0), optax.scale_by_adam(b1=0.9)
  )
  opt_state = optimizer.init(params)
  _, opt_state = optimizer.update(
      {'w': draw(width, 3), 'b': draw(3)}, opt_state
  )
  state = learner.LearnerState(
      params, opt_state, jnp.int32(step), jax.random.key(seed + 7)
  )
  return jax.device_put(state, sharding(devices))


def mesh(devices):
  return learner.default_mesh(devices, devices)


def sharding(devices):
  return jax.sharding.NamedSharding(mesh(devices), jax.sharding.PartitionSpec())


def leaves(state):
  plain = state._replace(key=jax.random.key_data(state.key))
  return [np.asarray(leaf) for leaf in jax.tree.leaves(plain)]


def assert_same(left, right):
  assert jax.tree.structure(left) == jax.tree.structure(right)
  for a, b in zip(leaves(left), leaves(right), strict=True):
    assert a.dtype == b.dtype and a.shape == b.shape
    assert a.tobytes() == b.tobytes()


def save(folder, *states):
  saved = checkpoints.Checkpoints(folder)
  for state in states:
    saved.save(state)
  saved.close()


def restore(folder, like=None, devices=1):
  saved = checkpoints.Checkpoints(folder)
  try:
    like = make_state(0, seed=1) if like is None else like
    return saved.restore(jax.device_put(like, sharding(devices)))
  finally:
    saved.close()


def latest_step(folder):
  saved = checkpoints.Checkpoints(folder)
  step = saved.latest_step()
  saved.close()
  return step


def contents(folder):
  return {
      path.relative_to(folder): path.read_bytes()
      for path in folder.rglob('*')
      if path.is_file()
  }


@pytest.fixture(scope='module')
def two_steps(tmp_path_factory):
  """Checkpoints of steps 2 and 4. Tests change copies of it."""
  folder = tmp_path_factory.mktemp('two_steps')
  save(folder, make_state(2, seed=2), make_state(4, seed=4))
  return folder


def test_round_trip_is_bitwise(two_steps):
  state = restore(two_steps)
  assert_same(state, make_state(4, seed=4))
  assert int(state.step) == 4
  # The key goes on as the same stream, not only as the same bits.
  expected = jax.random.normal(make_state(4, seed=4).key, (3,))
  np.testing.assert_array_equal(jax.random.normal(state.key, (3,)), expected)


def with_critic(state):
  """A state that has a critic too, of other numbers."""
  other = make_state(0, seed=9)
  critic = CriticState(other.params, other.opt_state)
  return jax.device_put(state._replace(critic=critic), sharding(1))


def test_a_critic_is_kept_too(tmp_path):
  save(tmp_path, with_critic(make_state(3)))
  state = restore(tmp_path, with_critic(make_state(0, seed=1)))
  assert_same(state, with_critic(make_state(3)))


@pytest.mark.parametrize('saved, asked', [(True, False), (False, True)])
def test_with_and_without_a_critic_are_other_runs(tmp_path, saved, asked):
  states = {True: with_critic(make_state(3)), False: make_state(3)}
  save(tmp_path, states[saved])
  with pytest.raises(checkpoints.CheckpointError):
    restore(tmp_path, states[asked])


@pytest.mark.parametrize('before, after', [(4, 1), (1, 4), (4, 2)])
def test_restores_on_another_number_of_devices(tmp_path, before, after):
  save(tmp_path, make_state(3, devices=before))
  state = restore(tmp_path, devices=after)
  assert_same(state, make_state(3, devices=after))
  for leaf in jax.tree.leaves(state.params):
    assert len(leaf.sharding.device_set) == after


def test_a_new_folder_has_no_step(tmp_path):
  assert latest_step(tmp_path / 'new') is None


def test_keeps_the_last_two(tmp_path):
  save(tmp_path, *(make_state(step) for step in (1, 2, 3)))
  steps = sorted(int(p.name) for p in tmp_path.iterdir() if p.name.isdigit())
  assert steps == [2, 3]
  assert latest_step(tmp_path) == 3


def test_saving_a_step_again_writes_nothing(tmp_path):
  save(tmp_path, make_state(1))
  before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob('*')}
  save(tmp_path, make_state(1))
  assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob('*')} == before


def truncate(path):
  os.truncate(path, path.stat().st_size // 2)


def garble(path):
  path.write_bytes(bytes(byte ^ 0xFF for byte in path.read_bytes()))


@pytest.mark.parametrize('damage', [truncate, garble, pathlib.Path.unlink])
@pytest.mark.parametrize('pattern', ['default/d/*', 'default/manifest.ocdbt'])
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
def test_a_damaged_checkpoint_is_told_in_one_line(
    tmp_path, two_steps, damage, pattern
):
  folder = tmp_path / 'copy'
  shutil.copytree(two_steps, folder)
  (path,) = (folder / '4').glob(pattern)
  damage(path)
  before = contents(folder)
  with pytest.raises(checkpoints.CheckpointError) as told:
    restore(folder)
  text = str(told.value)
  assert str(folder / '4') in text and 'damaged' in text and '\n' not in text
  assert contents(folder) == before
  # What it says helps: without that folder, the earlier one is used.
  shutil.rmtree(folder / '4')
  assert_same(restore(folder), make_state(2, seed=2))


def test_a_checkpoint_without_its_arrays_is_told_in_one_line(
    tmp_path, two_steps
):
  folder = tmp_path / 'copy'
  shutil.copytree(two_steps, folder)
  shutil.rmtree(folder / '4' / 'default')
  with pytest.raises(checkpoints.CheckpointError) as told:
    restore(folder)
  assert '\n' not in str(told.value)


def without_bias(state):
  return state._replace(params={'w': state.params['w']})


@pytest.mark.parametrize(
    'like',
    [
        lambda: make_state(0, width=16),
        lambda: make_state(0, width=4),
        lambda: without_bias(make_state(0)),
    ],
)
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
def test_a_foreign_checkpoint_is_told_in_one_line(two_steps, like):
  before = contents(two_steps)
  with pytest.raises(checkpoints.CheckpointError) as told:
    restore(two_steps, like())
  text = str(told.value)
  assert str(two_steps / '4') in text and 'another kind of run' in text
  assert '\n' not in text
  assert contents(two_steps) == before


def test_a_renamed_checkpoint_is_told(tmp_path, two_steps):
  shutil.copytree(two_steps / '4', tmp_path / '9')
  with pytest.raises(checkpoints.CheckpointError, match='step 4.*step 9'):
    restore(tmp_path)


class Killed(BaseException):
  """Nothing catches it, as nothing catches a kill."""


def test_an_interrupted_save_leaves_the_last_one(tmp_path, monkeypatch):
  save(tmp_path, make_state(2, seed=2))

  def kill(*unused, **unused_too):
    raise Killed

  with monkeypatch.context() as patch:
    patch.setattr(os, 'rename', kill)  # The last thing that a save does.
    with pytest.raises(Killed):
      save(tmp_path, make_state(4, seed=4))
  assert list(tmp_path.glob('4*'))  # Something was left behind.
  assert latest_step(tmp_path) == 2
  assert_same(restore(tmp_path), make_state(2, seed=2))
  save(tmp_path, make_state(4, seed=4))
  assert_same(restore(tmp_path), make_state(4, seed=4))
