"""Every test sees four CPU devices, compiles fast, and keeps what it compiled.

Arrays of different ranks are not broadcast silently.

The environment may say otherwise: `XLA_FLAGS= pytest` tests the programs as
they are optimised for users, and takes longer. Processes that tests start
inherit it all.
"""

import os
import pathlib

import jax
import pytest

_CACHE = pathlib.Path.home() / '.cache' / 'rlcr_jax' / 'xla'
_DEFAULTS = {
    'JAX_PLATFORMS': 'cpu',
    'JAX_NUM_CPU_DEVICES': 4,
    'JAX_COMPILATION_CACHE_DIR': str(_CACHE),
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': 0.0,
    'JAX_NUMPY_RANK_PROMOTION': 'raise',
}

os.environ.setdefault('XLA_FLAGS', '--xla_backend_optimization_level=0')
for name, value in _DEFAULTS.items():
  if name not in os.environ:
    os.environ[name] = str(value)
    jax.config.update(name.lower(), value)


@pytest.fixture(scope='module', autouse=True)
def _release_programs():
  """Forgets a module's programs: a process can map only so much of memory."""
  yield
  jax.clear_caches()
