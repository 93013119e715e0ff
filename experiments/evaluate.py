"""Evaluates a trained run on held-out tasks and writes its report.

  python -m experiments.evaluate --workdir=runs/first

The configuration is the run's own (`config.json`).
"""

import json

from experiments import cli
import ml_collections
from rlcr_jax import evaluate
from rlcr_jax import report


def main() -> None:
  """Evaluates, prints the table, writes the report."""
  workdir = cli.require_workdir()
  path = workdir / 'config.json'
  if not path.exists():
    raise FileNotFoundError(
        f'workdir={str(workdir)!r} holds no run: {path} does not exist.'
    )
  config = ml_collections.ConfigDict(
      json.loads(path.read_text(encoding='utf-8'))
  )
  evaluation = evaluate.evaluate(config, workdir)
  page = report.write_report(workdir)
  for table in report.tables(evaluation):
    cli.CONSOLE.print(table)
  cli.CONSOLE.print(f'report: {page}')


if __name__ == '__main__':
  cli.run(main)
