"""A set transformer over the tokens of an observation, with pointer heads.

Tokens are the agent itself, the targets and the peers, without positions: any
number of agents and targets works with the same parameters. The parts of an
action are drawn one after the other: verb, then a pointer over target tokens,
then a pointer over peer tokens, then a symbol, each given the earlier ones.
"""

from collections.abc import Callable, Iterable
import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import chex
from envs.base import require
from flax import nnx
import jax
import jax.numpy as jnp
from rlcr_jax.collective import Collective
from rlcr_jax.observation import Action
from rlcr_jax.observation import MY_FEATURES
from rlcr_jax.observation import Observation
from rlcr_jax.observation import takes

_MASKED = -1e9  # Finite, so that a fully masked part has finite gradients.


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
  """Size of the policy."""

  width: int = 32  # Features per token, d.
  layers: int = 2
  heads: int = 2
  prior: str = ''  # Fixed offsets of verbs' logits, as 'answer=6,wait=-1'.

  def __post_init__(self):
    for field in ('width', 'layers', 'heads'):
      value = getattr(self, field)
      require(value >= 1, f'policy.{field}', value, '>= 1')
    require(
        self.width % self.heads == 0,
        'policy.heads',
        self.heads,
        f'a divisor of policy.width={self.width}',
    )
    self.offsets()

  def offsets(self) -> dict[str, float]:
    """The prior: by verb, what is added to its logit.

    It is what a fresh policy already prefers, as a language model has habits
    from before RL. The network learns on top of it.

    Raises:
      NotAllowedError: if `prior` is written otherwise.
    """
    result = {}
    for entry in self.prior.split(',') if self.prior else ():
      name, _, text = entry.partition('=')
      try:
        offset = float(text)
      except ValueError:
        offset = math.nan
      fits = bool(name) and math.isfinite(offset) and name not in result
      rule = "verb=number, joined by commas, each verb once, as 'answer=6'"
      require(fits, 'policy.prior', self.prior, rule)
      result[name] = offset
    return result


def _linear(d_in: int, d_out: int, rngs: nnx.Rngs, scale=1.0) -> nnx.Linear:
  init = nnx.initializers.variance_scaling(scale, 'fan_in', 'normal')
  return nnx.Linear(d_in, d_out, use_bias=False, kernel_init=init, rngs=rngs)


class _Block(nnx.Module):
  """Pre-norm attention with relation biases, then a ReLU MLP of width 2d."""

  def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
    d = config.width
    self.heads = config.heads
    residual = 1.0 / config.layers
    self.norm_attention = nnx.RMSNorm(d, rngs=rngs)
    self.norm_mlp = nnx.RMSNorm(d, rngs=rngs)
    self.qkv = _linear(d, 3 * d, rngs)
    self.out = _linear(d, d, rngs, residual)
    self.up = _linear(d, 2 * d, rngs, 2.0)
    self.down = _linear(2 * d, d, rngs, residual)
    # Per head: how much a target attends to what it needs, and to its needers.
    self.relation = nnx.Param(jnp.zeros((2, config.heads)))

  def __call__(self, x, mask, relations):
    rows, tokens, d = x.shape
    qkv = self.qkv(self.norm_attention(x))
    qkv = qkv.reshape(rows, tokens, 3, self.heads, d // self.heads)
    q, k, v = jnp.moveaxis(qkv, 2, 0)  # [C, T, H, d / H] each.
    logits = jnp.einsum('cthd,cshd->chts', q, k) / math.sqrt(d // self.heads)
    m = relations.shape[-1]
    bias = jnp.einsum('xcts,xh->chts', relations, self.relation[...])
    logits = logits.at[:, :, 1 : m + 1, 1 : m + 1].add(bias)
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], logits, _MASKED))
    mixed = jnp.einsum('chts,cshd->cthd', weights, v)
    x = x + self.out(mixed.reshape(rows, tokens, d))
    return x + self.down(jax.nn.relu(self.up(self.norm_mlp(x))))


class Sizes(NamedTuple):
  """Numbers of features, verbs and symbols."""

  me: int
  target: int
  peer: int
  verbs: int
  symbols: int


@dataclasses.dataclass(frozen=True)
class Vocabulary:
  """The names of what differs between the environments of a shared policy."""

  envs: tuple[str, ...]
  features: tuple[str, ...]  # Of targets, the environments' own.
  verbs: tuple[str, ...]

  @classmethod
  def of(cls, collectives: Iterable[Collective]) -> 'Vocabulary':
    """All names of some collectives, each once."""
    envs, features, verbs = [], [], []
    for collective in collectives:
      envs.append(collective.env.name)
      features += collective.env.feature_names
      verbs += [verb.name for verb in collective.verbs]
    return cls(*(tuple(dict.fromkeys(x)) for x in (envs, features, verbs)))


class Encoder(nnx.Module):
  """Parameters without a head, for given feature sizes."""

  def __init__(self, config: TransformerConfig, sizes: Sizes, rngs: nnx.Rngs):
    d = config.width
    self.embed_me = _linear(sizes.me, d, rngs)
    self.embed_target = _linear(sizes.target, d, rngs)
    self.embed_peer = _linear(sizes.peer, d, rngs)
    self.blocks = nnx.List([_Block(config, rngs) for _ in range(config.layers)])
    self.norm = nnx.RMSNorm(d, rngs=rngs)

  def encode(self, obs: Observation):
    """Tokens [C, d], [C, M, d], [C, K, d] of me, the targets and the peers."""
    x = jnp.concatenate(
        [
            self.embed_me(obs.me)[:, None],
            self.embed_target(obs.targets),
            self.embed_peer(obs.peers),
        ],
        axis=1,
    )
    m = obs.targets.shape[1]
    always = jnp.ones((x.shape[0], 1 + m), bool)
    mask = jnp.concatenate([always, obs.legal_peer], axis=1)
    needs = obs.relations.astype(x.dtype)
    relations = jnp.stack([needs, jnp.swapaxes(needs, 1, 2)])
    for block in self.blocks:
      x = block(x, mask, relations)
    x = self.norm(x)
    return x[:, 0], x[:, 1 : 1 + m], x[:, 1 + m :]


class SetTransformer(Encoder):
  """Parameters of the policy: pointer heads."""

  def __init__(self, config: TransformerConfig, sizes: Sizes, rngs: nnx.Rngs):
    super().__init__(config, sizes, rngs)
    d, num_verbs = config.width, sizes.verbs
    self.verb = _linear(d, num_verbs, rngs, 0.01)
    self.verb_embedding = nnx.Param(
        rngs.params.normal((num_verbs, d)) / math.sqrt(d)
    )
    self.target_query = _linear(d, d, rngs)
    self.target_key = _linear(d, d, rngs)
    self.peer_query = _linear(d, d, rngs)
    self.peer_key = _linear(d, d, rngs)
    self.symbol = _linear(d, sizes.symbols, rngs, 0.01)

  def decode(
      self,
      tokens: tuple[chex.Array, chex.Array, chex.Array],
      obs: Observation,
      uses: dict[str, chex.Array],
      prior: chex.Array | None,
      choose: Callable[[str, chex.Array], chex.Array],
  ) -> tuple[Action, dict[str, chex.Array]]:
    """Goes through the parts of an action, each given the earlier ones.

    Args:
      tokens: from `encode`.
      obs: leaves [C, ...].
      uses: part → [V] bool, which verbs use it.
      prior: [V] float32, added to the logits of verbs; None: nothing.
      choose: `(part, logits [C, k]) → [C] int32`, draws or looks up.

    Returns:
      The action, and the masked logits of every part.
    """
    me, targets, peers = tokens
    rows = jnp.arange(me.shape[0])
    scale = 1.0 / math.sqrt(me.shape[-1])
    logits, chosen = {}, {}

    def part(name, values, legal):
      logits[name] = jnp.where(legal, values, _MASKED)
      picked = choose(name, logits[name])
      used = True if name == 'verb' else uses[name][chosen['verb']]
      chosen[name] = jnp.where(used, picked, 0)
      return chosen[name]

    preferred = self.verb(me)
    if prior is not None:
      preferred += prior[None, :]
    verb = part('verb', preferred, obs.legal_verb)
    context = me + self.verb_embedding[...][verb]
    query = self.target_query(context)
    pointers = jnp.einsum('cd,cmd->cm', query, self.target_key(targets)) * scale
    target = part('target', pointers, obs.legal_target[rows, verb])
    named = targets[rows, target] * uses['target'][verb][:, None]
    context = context + named
    query = self.peer_query(context)
    pointers = jnp.einsum('cd,ckd->ck', query, self.peer_key(peers)) * scale
    part('peer', pointers, obs.legal_peer)
    part('symbol', self.symbol(context), True)
    return Action(**chosen), logits


class ValueTransformer(Encoder):
  """Parameters of the critic: a value read off the agent's own token."""

  def __init__(self, config: TransformerConfig, sizes: Sizes, rngs: nnx.Rngs):
    super().__init__(config, sizes, rngs)
    self.head = _linear(config.width, 1, rngs, 0.01)

  def __call__(self, obs: Observation) -> chex.Array:
    """Values [C]."""
    return self.head(self.encode(obs)[0])[:, 0]


@dataclasses.dataclass(frozen=True)
class _Shared:
  """Parameters that fit a collective, alone or among several.

  Networks of several collectives share their parameters if they are given one
  `Vocabulary` of all. What has the same name (a feature, a verb) has the same
  parameters; each network takes the rows that it needs, so a collective pays
  nothing for the others.
  """

  kind: ClassVar[type[Encoder]]

  collective: Collective
  config: TransformerConfig = TransformerConfig()
  vocabulary: Vocabulary | None = None  # None: of this collective alone.

  def _sizes(self) -> Sizes:
    """Those of the own collective."""
    c = self.collective

    def glimpse(key):
      task = c.env.sample_task(key)
      rules = c.config.rules(1)
      return c.observe(task, rules, c.reset(task, rules, key), jnp.int32(0))

    obs = jax.eval_shape(glimpse, jax.random.key(0))
    return Sizes(
        me=obs.me.shape[-1],
        target=obs.targets.shape[-1],
        peer=obs.peers.shape[-1],
        verbs=obs.legal_verb.shape[-1],
        symbols=c.config.num_symbols,
    )

  def _shared_sizes(self) -> Sizes:
    """Those of the vocabulary."""
    sizes, own = self._sizes(), Vocabulary.of([self.collective])
    whole = self.vocabulary or own
    more = lambda field: len(getattr(whole, field)) - len(getattr(own, field))
    return sizes._replace(
        me=sizes.me + more('envs') + more('verbs'),
        target=sizes.target + more('features'),
        verbs=len(whole.verbs),
    )

  def _build(self, sizes: Sizes, key: jax.Array) -> Encoder:
    return self.kind(self.config, sizes, nnx.Rngs(params=key))

  def _module(self, params: nnx.State) -> Any:
    build = lambda: self._build(self._sizes(), jax.random.key(0))
    return nnx.merge(nnx.graphdef(nnx.eval_shape(build)), self._own(params))

  def _own(self, params: nnx.State) -> nnx.State:
    """The parameters of the own collective, taken from the shared ones."""
    if self.vocabulary is None:
      return params
    own, whole = Vocabulary.of([self.collective]), self.vocabulary
    place = lambda field: [
        getattr(whole, field).index(name) for name in getattr(own, field)
    ]
    # Columns of `Observation.me`: a constant, for which every environment has
    # a row of its own, other features, the last verb, the seat.
    first, verbs = len(whole.envs), place('verbs')
    middle, seat = len(MY_FEATURES) - 1, first + len(MY_FEATURES) - 1
    behind = seat + len(whole.verbs)
    sizes = self._sizes()
    me = place('envs') + list(range(first, first + middle))
    me += [seat + verb for verb in verbs]
    me += range(behind, behind + sizes.me - len(me))
    target, rest = place('features'), len(whole.features)
    target += range(rest, rest + sizes.target - len(target))
    take = lambda x, rows, axis=0: jnp.take(x, jnp.array(rows), axis)
    own = nnx.to_pure_dict(params)
    own['embed_me']['kernel'] = take(own['embed_me']['kernel'], me)
    own['embed_target']['kernel'] = take(own['embed_target']['kernel'], target)
    if 'verb' in own:
      own['verb']['kernel'] = take(own['verb']['kernel'], verbs, 1)
      own['verb_embedding'] = take(own['verb_embedding'], verbs)
    return own

  def init(self, key: jax.Array) -> nnx.State:
    """Fresh parameters: verbs, symbols nearly uniform and values nearly 0."""
    return nnx.state(self._build(self._shared_sizes(), key))


class TransformerPolicy(_Shared):
  """The set transformer behind the policy protocol."""

  kind = SetTransformer

  def _uses(self) -> dict[str, chex.Array]:
    verbs = self.collective.verbs
    return {part: takes(verbs, part) for part in ('target', 'peer', 'symbol')}

  def _prior(self) -> chex.Array | None:
    offsets = self.config.offsets()
    if not offsets:
      return None
    names = (verb.name for verb in self.collective.verbs)
    return jnp.array([offsets.get(name, 0.0) for name in names])

  def sample(self, params, keys, obs):
    """See `policies.base.Policy`."""
    parts = ('verb', 'target', 'peer', 'symbol')
    split = jax.vmap(lambda key: jax.random.split(key, len(parts)))(keys)
    draws = {name: split[:, i] for i, name in enumerate(parts)}
    draw = jax.vmap(jax.random.categorical)
    module = self._module(params)
    action, logits = module.decode(
        module.encode(obs),
        obs,
        self._uses(),
        self._prior(),
        lambda name, logits: draw(draws[name], logits).astype(jnp.int32),
    )
    return action, self._score(action, logits)[0]

  def log_prob(self, params, obs, action):
    """See `policies.base.Policy`."""
    module = self._module(params)
    _, logits = module.decode(
        module.encode(obs),
        obs,
        self._uses(),
        self._prior(),
        lambda name, logits: getattr(action, name),
    )
    return self._score(action, logits)

  def _score(self, action: Action, logits: dict[str, chex.Array]):
    """Log-probability and entropy [C], summed over the parts in use."""
    uses = self._uses()
    log_prob = entropy = jnp.zeros(action.verb.shape)
    for name, values in logits.items():
      used = 1.0 if name == 'verb' else uses[name][action.verb]
      log_p = jax.nn.log_softmax(values)
      taken = jnp.take_along_axis(log_p, getattr(action, name)[:, None], 1)
      log_prob += used * taken[:, 0]
      entropy -= used * jnp.sum(jnp.exp(log_p) * log_p, axis=1)
    return log_prob, entropy


class TransformerCritic(_Shared):
  """A set transformer with one value, behind the critic protocol."""

  kind = ValueTransformer

  def value(self, params, obs):
    """See `policies.base.Critic`."""
    return self._module(params)(obs)
