"""From a configuration to the learner of a language model."""

import pathlib
from typing import Any

from envs.base import require
from rlcr_jax.collective import Collective
from rlcr_jax.llm import learner
from rlcr_jax.llm import trainer
from rlcr_jax.llm import warm_start


def make_learner(
    resolved: Any,
    collectives: dict[str, Collective],
    workdir: pathlib.Path,
    progress: warm_start.Progress,
) -> learner.LlmLearner:
  """The learner of a run; nothing is loaded before it is used.

  Args:
    resolved: a `config.Resolved`.
    collectives: by the name of their environment.
    workdir: where the model goes, if it is made for this run.
    progress: called after every step of making it.

  Raises:
    ValueError: naming the field, its value and what is allowed.
  """
  config = resolved.llm
  mesh = trainer.make_mesh(config, resolved.run.num_devices)
  path = pathlib.Path(config.model)
  require(
      not config.model or path.exists(),
      'llm.model',
      config.model,
      'a Hugging Face folder or a GGUF file',
  )

  def get_model() -> learner.Model:
    found = warm_start.ensure(
        tuple(collectives.values()),
        config,
        resolved.rlcr,
        resolved.deadline.final_ms,
        mesh,
        workdir,
        progress,
    )
    return learner.load_model(config, found, mesh)

  parts = {
      name: learner.Part(
          collective, resolved.tasks()[name], resolved.weights[name]
      )
      for name, collective in collectives.items()
  }
  return learner.LlmLearner(
      parts, config, resolved.rlcr, get_model, workdir, resolved.incentive
  )
