"""Makes the language model that RL begins with, and says what it can do.

  python -m experiments.warm_start \
      --config=experiments/configs/llm_tiny.py --workdir=runs/llm_tiny

The model is fine-tuned on what a scripted teacher's agents read and wrote and
goes to `workdir/warm_start`, a folder in Hugging Face's format. Training on the
same workdir begins with it; `--config.llm.model=DIR` begins another run so.
"""

from envs.base import require
from experiments import cli
from rich.table import Table
from rlcr_jax import evaluate
from rlcr_jax import files
from rlcr_jax import train


def main() -> None:
  """Makes the model, plays held-out tasks, prints what it can do."""
  config, workdir = cli.config(), cli.require_workdir()
  name = config.policy.name
  require(name == 'llm', 'policy.name', name, "'llm', to have a warm start")
  train.claim_workdir(train.checked(config), workdir)
  with cli.Bar(config.llm.warm_steps) as bar:
    run = train.build(config, workdir, bar)
    params = run.init().params
  cli.CONSOLE.print('playing held-out tasks ...')
  evaluator = evaluate.Evaluator(run, {'warm_start': params})
  _, deadline_ms = run.config.test_deadlines_ms()
  result = {
      mode: evaluator.summary(evaluator.play(mode, deadline_ms))
      for mode in ('warm_start', 'random', 'oracle')
  }
  result['warm_start'] |= evaluator.spoken['warm_start'].shares()
  files.write_json(workdir / 'warm_start.json', result)
  table = Table(title='Warm start, on held-out tasks')
  for column in ('', 'return', 'team', 'not understood', 'not allowed'):
    table.add_column(column)
  for mode, entry in result.items():
    low, high = entry['return_ci95']
    shares = [entry.get(f'{n}_share') for n in ('malformed', 'illegal')]
    table.add_row(
        mode.replace('_', ' '),
        f'{entry["return_mean"]:.3f} [{low:.3f}, {high:.3f}]',
        f'{entry["team_size_mean"]:.1f}',
        *('' if share is None else f'{share:.1%}' for share in shares),
    )
  cli.CONSOLE.print(table)


if __name__ == '__main__':
  cli.run(main)
