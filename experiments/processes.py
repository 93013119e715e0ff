"""Runs commands as processes of this machine, a few at a time."""

import fcntl
import os
import pathlib
import shlex
import signal
import subprocess
import sys
from typing import NamedTuple

_PATIENCE_S = 10.0  # Between asking a process to end and killing it.


class _Running(NamedTuple):
  process: subprocess.Popen
  log: pathlib.Path


class Processes:
  """Commands that run now, by name. Each appends what it says to a log.

  A log is locked for as long as its process lives, so that what an earlier,
  killed starter left running is not run a second time.
  """

  def __init__(self, parallel: int):
    """Shares the CPU's cores out, unless the environment says otherwise.

    Args:
      parallel: how many may run at once.
    """
    self._parallel = parallel
    self._running: dict[str, _Running] = {}
    self._environment = dict(os.environ)
    if parallel > 1:
      share = max((os.cpu_count() or 1) // parallel, 1)
      self._environment.setdefault('JAX_NUM_CPU_DEVICES', str(share))

  def __enter__(self) -> 'Processes':
    return self

  def __exit__(self, *unused) -> None:
    self.stop()

  @property
  def free(self) -> int:
    """How many more may be started now."""
    return self._parallel - len(self._running)

  def start(self, name: str, command: list[str], log: pathlib.Path) -> None:
    """Starts a command.

    Args:
      name: what `ended` calls it.
      command: its first word, `python`, is this interpreter.
      log: where its output goes.

    Raises:
      BlockingIOError: if a process with this log is running.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open('ab', buffering=0) as stream:
      fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
      stream.write(f'$ {shlex.join(command)}\n'.encode())
      process = subprocess.Popen(
          [sys.executable, *command[1:]],
          stdin=subprocess.DEVNULL,
          stdout=stream,  # Inherits the lock.
          stderr=subprocess.STDOUT,
          env=self._environment,
      )
    self._running[name] = _Running(process, log)

  def ended(self) -> dict[str, str]:
    """What has ended since this was last asked.

    Returns:
      Why it failed, in one line, by name; empty if it did not.
    """
    result = {}
    for name, (process, log) in list(self._running.items()):
      if process.poll() is not None:
        result[name] = _why(process.returncode, log)
        del self._running[name]
    return result

  def stop(self) -> None:
    """Ends all that run, at first by asking."""
    processes = [running.process for running in self._running.values()]
    for process in processes:
      process.terminate()
    for process in processes:
      try:
        process.wait(_PATIENCE_S)
      except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    self._running.clear()


def _why(status: int, log: pathlib.Path) -> str:
  """The last line that a failed process said, or what killed it."""
  if status == 0:
    return ''
  if status < 0:
    return f'killed by {signal.Signals(-status).name}'
  lines = log.read_text(encoding='utf-8', errors='replace').split('\n')
  said = [line.strip() for line in lines if line.strip()]
  return said[-1].removeprefix('error: ')
