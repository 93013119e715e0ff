"""Trains a collective, and the baselines that the config asks for.

  python -m experiments.train --config=experiments/configs/default.py \
      --workdir=runs/first [--config.FIELD=VALUE ...]

Started again on the same workdir, it goes on from the newest checkpoint.
"""

from experiments import cli
from rlcr_jax import evaluate
from rlcr_jax import files
from rlcr_jax import report
from rlcr_jax import train


def main() -> None:
  """Trains, evaluates, and writes the report."""
  config, workdir = cli.config(), cli.require_workdir()
  train.claim_workdir(train.checked(config), workdir)
  done = workdir / 'DONE'
  if done.exists():
    cli.CONSOLE.print(
        f'{workdir} holds a finished run: nothing to do. Its report is'
        f' {workdir / "report.html"}.'
    )
    return
  with cli.Bar(config.steps) as bar:
    train.train(config, workdir, bar)
  cli.CONSOLE.print('evaluating on held-out tasks ...')
  evaluation = evaluate.evaluate(config, workdir)
  page = report.write_report(workdir)
  files.write_text(done, f'{config.steps} steps\n')
  for table in report.tables(evaluation):
    cli.CONSOLE.print(table)
  cli.CONSOLE.print(f'report: {page}')


if __name__ == '__main__':
  cli.run(main)
