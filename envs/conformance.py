"""What every registered environment must satisfy, checked by playing it."""

from collections.abc import Callable
import dataclasses
import functools
import re
from typing import Any

from envs import base
from envs import random_play
import jax
import jax.numpy as jnp
import numpy as np

_TEAM = 4
_PLAYS = ((1, True), (_TEAM, False), (_TEAM, True))  # Agents; do they crowd?
_START = 0.05  # Most progress of an untouched world.
_TOLERANCE = 1e-5  # Of float32 sums.
_LATER_MS = 3_600_000


def parse_legal(text: str, verbs: tuple[base.VerbSpec, ...]) -> np.ndarray:
  """Reads the legal verbs back from `Environment.describe_view`.

  The text has one line per target, in the order of the targets:

    name i: state, note, verb i, verb i

  `name` is one word, the same for all targets and in `describe`, and `i` is the
  target's index. What follows is separated by commas: the state, then any
  number of notes and the commands that are legal on this target. A note is
  never equal to a command.

  Args:
    text: what `describe_view` returned.
    verbs: the environment's own.

  Returns:
    [V, M] bool.

  Raises:
    ValueError: naming the line that has another form.
  """
  legal = []
  for i, line in enumerate(text.splitlines()):
    match = re.fullmatch(rf'[A-Za-z]\w* {i}: (.+)', line)
    if match is None:
      raise ValueError(
          f'{line!r} is not of the form "name {i}: state, verb {i}".'
      )
    parts = match[1].split(', ')[1:]
    legal.append([f'{verb.name} {i}' in parts for verb in verbs])
  return np.array(legal, bool).reshape(-1, len(verbs)).T


def check_environment(
    env: base.Environment, key: jax.Array | None = None
) -> None:
  """Plays an environment at random and checks the contract of `base`.

  Args:
    env: what to check.
    key: of the tasks and of the player; the same key checks the same.

  Raises:
    AssertionError: naming the environment, the property and what broke it.
  """
  trial = _Trial(env, jax.random.key(0) if key is None else key)
  for name, check in _PROPERTIES.items():
    try:
      with jax.debug_key_reuse(False):  # The trial repeats calls on purpose.
        check(trial)
    except Exception as error:
      label = getattr(env, 'name', type(env).__name__)
      raise AssertionError(f'{label}: {name}: {error}') from error


def _require(condition: Any, message: str) -> None:
  if not condition:
    raise AssertionError(message)


class _Trial:
  """An environment, a few plays of it, and its methods in one call."""

  def __init__(self, env: base.Environment, key: jax.Array):
    self.env = env
    self.key, self.play_key = jax.random.split(key)

  @functools.cached_property
  def plays(self) -> list[list[random_play.Landing]]:
    """One per entry of `_PLAYS`, each of its own task."""
    keys = jax.random.split(self.play_key, len(_PLAYS))
    plays = [
        random_play.play(self.env, key, *how)
        for key, how in zip(keys, _PLAYS, strict=True)
    ]
    _require(all(plays), 'a task is finished before anything was done')
    return plays

  @property
  def landings(self) -> list[random_play.Landing]:
    """Those of all plays."""
    return [landing for play in self.plays for landing in play]

  @property
  def instants(self) -> list[random_play.Instant]:
    """Before the first landing and after each, in all plays."""
    return [
        now
        for play in self.plays
        for now in (play[0].before, *(landing.after for landing in play))
    ]

  @functools.cached_property
  def few(self) -> list[random_play.Landing]:
    """From beginning, middle and end of the plays of a team."""
    return [
        play[(len(play) - 1) * i // 2]
        for play in self.plays[1:]
        for i in range(3)
    ]

  @functools.cached_property
  def rows(self) -> list[tuple]:
    """Arguments of `call`, from those few landings."""
    return [
        (at.task, at.before.world, at.before.knows, at.turns, at.key)
        for at in self.few
    ]

  @functools.cached_property
  def compiled(self) -> Callable[..., dict[str, Any]]:
    """`call` under `jit`."""
    return jax.jit(self.call)

  def call(self, task, world, knows, turns, key) -> dict[str, Any]:
    """What every method of the contract returns."""
    env, now_ms = self.env, turns.now_ms
    sampling, chance = jax.random.split(key)
    turn_ms = jnp.asarray(random_play.turn_ms(env))
    return {
        'sample_task': env.sample_task(sampling),
        'reset': env.reset(task),
        'view': env.view(task, world, knows[0]),
        'land': env.land(task, world, turns, knows, chance),
        'progress': env.progress(task, world, now_ms),
        'finished': env.finished(task, world),
        'bounds': env.bounds(task, len(knows), now_ms, turn_ms),
    }


def _types(tree: Any) -> dict[str, str]:
  """Type and shape of every leaf, by its place in the tree."""
  return {
      jax.tree_util.keystr(path): f'{x.dtype}{list(x.shape)}'
      for path, x in jax.tree_util.tree_leaves_with_path(tree)
  }


def _wrong_type(got: Any, want: Any) -> str:
  """The first place of another type, shape or structure; empty if none."""
  types, wanted = _types(got), _types(want)
  for place in types | wanted:
    if types.get(place) != wanted.get(place):
      return f'{place} is {types.get(place)}, not {wanted.get(place)}'
  return ''


def _difference(got: Any, want: Any, slack: float = 0.0) -> str:
  """The first place where two trees differ; empty if they are equal."""
  if fault := _wrong_type(got, want):
    return fault
  leaves = map(jax.tree.leaves, (got, want))
  for place, x, y in zip(_types(got), *leaves, strict=True):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      x, y = jax.random.key_data(x), jax.random.key_data(y)
    x, y = np.asarray(x), np.asarray(y)
    near = slack if jnp.issubdtype(x.dtype, jnp.floating) else 0.0
    if not np.allclose(x, y, rtol=near, atol=near, equal_nan=True):
      return f'{place} is {x.tolist()}, not {y.tolist()}'
  return ''


def _check_statics(trial: _Trial) -> None:
  env = trial.env
  _require(
      dataclasses.is_dataclass(env) and type(env).__dataclass_params__.frozen,
      f'{type(env).__name__} must be a frozen dataclass',
  )
  _require(env.num_targets >= 1, f'num_targets is {env.num_targets}, not >= 1')
  columns, first = env.feature_names, base.PLANNING_FEATURES
  _require(
      columns[: len(first)] == first and len(set(columns)) == len(columns),
      f'feature_names must begin with {first}, without doubles: {columns}',
  )


def _check_verbs(trial: _Trial) -> None:
  verbs = trial.env.verbs
  names = [verb.name for verb in verbs]
  _require(verbs and len(set(names)) == len(names), f'names double: {names}')
  _require(
      any(verb.acts_on_environment and not verb.learns for verb in verbs),
      'none acts on the environment and does more than learn',
  )
  for verb in verbs:
    # `Turns` carries one target to `land`, and neither a peer nor a symbol.
    for field, right in (
        ('name', isinstance(verb.name, str) and verb.name.isidentifier()),
        ('takes_target', verb.takes_target is True),
        ('takes_peer', verb.takes_peer is False),
        ('takes_symbol', verb.takes_symbol is False),
        ('talks', verb.talks is False),
        ('output_tokens', 1 <= verb.output_tokens < np.inf),
        ('tool_ms', isinstance(verb.tool_ms, int) and verb.tool_ms >= 0),
        ('acts_on_environment', isinstance(verb.acts_on_environment, bool)),
        ('learns', isinstance(verb.learns, bool)),
    ):
      _require(right, f'{verb.name}: {field}={getattr(verb, field)!r}')


def _check_types(trial: _Trial) -> None:
  env, n = trial.env, _TEAM
  m, v, f = env.num_targets, len(env.verbs), len(env.feature_names)
  array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
  number, time = array(jnp.float32), array(jnp.int32)
  ints, bools = array(jnp.int32, n), array(bool, n)
  knows = array(bool, n, m)
  task = jax.eval_shape(env.sample_task, trial.key)
  world = jax.eval_shape(env.reset, task)
  turns = base.Turns(ints, ints, ints, bools, time)
  want = {
      'sample_task': task,
      'reset': world,
      'view': base.TargetView(
          array(jnp.float32, m, f), array(bool, v, m), array(bool, m, m)
      ),
      'land': (world, knows, base.Outcome(bools)),
      'progress': number,
      'finished': array(bool),
      'bounds': base.Bounds(number, time, time),
  }
  got = jax.eval_shape(trial.call, task, world, knows, turns, trial.key)
  fault = _wrong_type(got, want)
  _require(not fault, fault)


def _check_seeds(trial: _Trial) -> None:
  tasks = jax.vmap(trial.env.sample_task)(jax.random.split(trial.key, 8))
  one = lambda i: jax.tree.map(lambda x: x[i], tasks)
  _require(
      any(_difference(one(i), one(0)) for i in range(1, 8)),
      'eight keys give the same task',
  )


def _check_jit(trial: _Trial) -> None:
  *row, key = trial.rows[1]
  with jax.debug_key_reuse(True):
    plain = trial.call(*row, jax.random.clone(key))
  fault = _difference(trial.compiled(*row, key), plain, _TOLERANCE)
  _require(not fault, f'under jit, {fault}')


def _check_vmap(trial: _Trial) -> None:
  stack = lambda *trees: jax.tree.map(lambda *x: jnp.stack(x), *trees)
  loop = stack(*[trial.compiled(*row) for row in trial.rows])
  batch = jax.jit(jax.vmap(trial.call))(*stack(*trial.rows))
  fault = _difference(batch, loop, _TOLERANCE)
  _require(not fault, f'under vmap, {fault}')


def _check_idle(trial: _Trial) -> None:
  """Only turns that land count, and only those with the world's own verbs."""
  env, land = trial.env, jax.jit(trial.env.land)
  rng = np.random.default_rng(0)
  for at in trial.landings:
    lands, now = at.turns.lands, at.before
    agents = len(lands)
    idle = lands & False
    # Those who do not land are at any verb, legal or not, on any target.
    verb = rng.integers(-1, len(env.verbs) + 3, agents, np.int32)
    target = rng.integers(0, env.num_targets, agents, np.int32)
    noise = at.turns._replace(
        verb=jnp.where(lands, at.turns.verb, verb),
        target=jnp.where(lands, at.turns.target, target),
    )
    none = at.turns._replace(verb=verb, target=target, lands=idle)
    foreign = len(env.verbs) + jnp.arange(agents)
    foreign = at.turns._replace(verb=foreign, lands=~idle)
    unchanged = (now.world, now.knows, base.Outcome(idle))
    landed = (at.after.world, at.after.knows, base.Outcome(at.effective))
    for what, turns, want in (
        ('when no turn lands', none, unchanged),
        ("when verbs that are not the world's own land", foreign, unchanged),
        ('when those who do not land are at other things', noise, landed),
    ):
      got = land(at.task, now.world, turns, now.knows, at.key)
      slack = _TOLERANCE if want is landed else 0.0  # Of another program.
      fault = _difference(got, want, slack)
      _require(not fault, f'{what} at {turns.now_ms} ms, {fault}')


def _check_outcome(trial: _Trial) -> None:
  for at in trial.landings:
    learned = (at.after.knows != at.before.knows).any(axis=1)
    wrong = (learned | at.effective) & ~at.turns.lands
    _require(
        not wrong.any(),
        f'{at.turns.now_ms} ms: an agent whose turn does not land learns'
        ' something or is effective',
    )
    changed = learned.any() | bool(_difference(at.after.world, at.before.world))
    _require(
        changed == at.effective.any(),
        f'{at.turns.now_ms} ms: effective={at.effective.tolist()}, but'
        f' something changed: {bool(changed)}',
    )


def _check_progress(trial: _Trial) -> None:
  for play in trial.plays:
    start = play[0].before.progress
    _require(0 <= start <= _START, f'it is {start} in an untouched world')
    for at in play:
      old, new, now_ms = at.before.progress, at.after.progress, at.turns.now_ms
      _require(0 <= new <= 1, f'it is {new} at {now_ms} ms')
      _require(
          new >= old or not trial.env.monotone,
          f'it falls from {old} to {new} at {now_ms} ms',
      )
    if at.after.finished or not trial.env.accrues:
      later = trial.env.progress(at.task, at.after.world, now_ms + _LATER_MS)
      _require(
          later == new,
          f'it becomes {later} from {new} while nothing lands',
      )


def _check_bounds(trial: _Trial) -> None:
  for now in trial.instants:
    team, bounds = len(now.knows), now.bounds
    _require(
        now.progress <= bounds.progress + _TOLERANCE,
        f'{team} agents have progress {now.progress} at {now.now_ms} ms, above'
        f' the bound {bounds.progress}',
    )
    path, serial = bounds.critical_path_ms, bounds.serial_ms
    _require(
        0 <= path <= serial, f'critical_path_ms={path}, serial_ms={serial}'
    )
    _require(
        not now.finished or now.now_ms >= max(path, -(-serial // team)),
        f'{team} agents finish at {now.now_ms} ms, in spite of'
        f' critical_path_ms={path} and serial_ms={serial}',
    )


def _check_features(trial: _Trial) -> None:
  names = trial.env.feature_names
  for now in trial.instants:
    features = np.asarray(now.views.features)  # [N, M, F]
    finite = np.isfinite(features).all(axis=(0, 1))
    bad = [name for name, ok in zip(names, finite, strict=True) if not ok]
    _require(not bad, f'{bad} at {now.now_ms} ms')


def _check_planning(trial: _Trial) -> None:
  env = trial.env
  column = {name: i for i, name in enumerate(env.feature_names)}
  acts = np.array([not verb.learns for verb in env.verbs])
  advise = jax.jit(jax.vmap(env.reference_verb))
  for now in trial.instants:
    features, legal, _ = map(np.asarray, now.views)
    open_, missing = features[..., column['open']], column['missing']
    may = (open_ == 1) & (features[..., missing] == 0)  # [N, M]
    _require(
        np.isin(open_, (0, 1)).all() and (may == legal[:, acts].any(1)).all(),
        f'{now.now_ms} ms: a verb that does more than learn must be legal where'
        ' `open` is 1 and `missing` is 0, and only there',
    )
    advice = np.asarray(advise(*now.views[:2]))  # [N, M]
    does = np.maximum(advice, 0)
    allowed = np.take_along_axis(legal, does[:, None], axis=1)[:, 0]
    _require(
        ((advice < 0) | (allowed & acts[does])).all(),
        f'{now.now_ms} ms: reference_verb must be legal and do more than learn,'
        f' or be -1: {advice.tolist()}',
    )


def _check_text(trial: _Trial) -> None:
  env = trial.env
  name = lambda text: re.findall(r'^(\w+ \d+):', text, flags=re.MULTILINE)
  for at in trial.few:
    now, agent = at.after, len(at.effective) - 1
    legal = now.views.legal[agent]
    args = (at.task, now.world, now.knows[agent], legal)
    task, view = env.describe(at.task), env.describe_view(*args)
    _require(
        (task, view) == (env.describe(at.task), env.describe_view(*args)),
        'two calls with the same arguments give different texts',
    )
    absent = [target for target in name(view) if target not in name(task)]
    _require(not absent, f'describe has no line for {absent}')
    _require(
        len({target.split()[0] for target in name(view)}) == 1,
        f'describe_view must call its targets by one name: {view!r}',
    )
    fault = _difference(parse_legal(view, env.verbs), legal)
    _require(not fault, f'the legal verbs read from {view!r}: {fault}')


_PROPERTIES: dict[str, Callable[[_Trial], None]] = {
    'static parameters': _check_statics,
    'well-formed verbs': _check_verbs,
    'stable types and shapes': _check_types,
    'tasks differ by key': _check_seeds,
    'turns that do not land change nothing': _check_idle,
    'outcomes are true': _check_outcome,
    'progress': _check_progress,
    'progress and times within bounds': _check_bounds,
    'features are finite': _check_features,
    'features say what is legal': _check_planning,
    'text round-trips': _check_text,
    'jit equals no jit, no key used twice': _check_jit,
    'vmap equals a loop': _check_vmap,
}
