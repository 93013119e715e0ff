"""Text to token ids and back, and chat templates."""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import functools
import json
import pathlib
from typing import Any

from envs.base import NotAllowedError
from envs.base import require
import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from rlcr_jax import files
import tokenizers
from tokenizers import AddedToken
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers
from tokenizers import Regex
from tokenizers import trainers

_START, _END = '<|im_start|>', '<|im_end|>'
_TURN_ENDS = (_END, '<|eot_id|>', '<|eom_id|>', '<|end_of_text|>')
_CHAT_ML = (
    '{% for message in messages %}'
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# How Llama 3 and Qwen split text into words, from their `tokenizer.json`.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|@|"
    r' ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)
_SPLITS = {
    'llama-bpe': _WORDS.replace('@', r'\p{N}{1,3}'),
    'qwen2': _WORDS.replace('@', r'\p{N}'),
}
_CONTROL, _USER_DEFINED = 3, 4  # Token types of GGUF.


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """A vocabulary with its special tokens and its chat template."""

  backend: tokenizers.Tokenizer
  eos: str  # Ends a text.
  pad: str
  bos: str | None = None  # Only for templates: `encode` adds nothing.
  chat_template: str | None = None  # Jinja.

  def __post_init__(self):
    self.backend.no_padding()
    self.backend.no_truncation()
    for name in ('eos', 'pad'):
      token = getattr(self, name)
      known = token is not None and self.backend.token_to_id(token) is not None
      require(known, f'tokenizer: {name}_token', token, 'in the vocabulary')

  @property
  def vocab_size(self) -> int:
    """Number of tokens, special ones included."""
    return self.backend.get_vocab_size()

  @property
  def pad_id(self) -> int:
    """What fills rows up, which may be a token that has a meaning too."""
    return self.backend.token_to_id(self.pad)

  @property
  def bos_id(self) -> int | None:
    """What texts begin with, if the model was trained so."""
    return self.bos and self.backend.token_to_id(self.bos)

  @property
  def stop_ids(self) -> tuple[int, ...]:
    """Tokens that end a turn or a text, sorted."""
    ids = {self.backend.token_to_id(token) for token in (self.eos, *_TURN_ENDS)}
    return tuple(sorted(ids - {None}))

  def encode(self, text: str) -> list[int]:
    """Ids of a text in which special tokens may be spelled out."""
    return self.backend.encode(text, add_special_tokens=False).ids

  def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
    """The text of ids, with special tokens spelled out unless skipped."""
    ids = [int(i) for i in ids]
    return self.backend.decode(ids, skip_special_tokens=skip_special)

  def plain(self, text: str) -> str:
    """The text with a space for each special token that is spelled out.

    What agents write goes into the prompts of others, in which it must not end
    a turn or begin one.
    """
    for token in self.backend.get_added_tokens_decoder().values():
      text = text.replace(token.content, ' ')
    return text

  def chat(
      self, messages: Sequence[Mapping[str, str]], generate: bool = True
  ) -> str:
    """The text of a conversation, by the chat template.

    Args:
      messages: each with `role` (system, user, assistant) and `content`.
      generate: end where the assistant's next turn begins.

    Raises:
      NotAllowedError: if there is no template, or it refuses the messages.
    """
    template = _compile(self.chat_template)
    try:
      return template.render(
          messages=[dict(message) for message in messages],
          add_generation_prompt=generate,
          bos_token=self.bos or '',
          eos_token=self.eos,
          pad_token=self.pad,
      )
    except jinja2.TemplateError as error:
      raise NotAllowedError(f'The chat template fails: {error}') from error

  def save(self, directory: pathlib.Path | str) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`."""
    directory = pathlib.Path(directory)
    text = self.backend.to_str(pretty=True)
    files.write_text(directory / 'tokenizer.json', text)
    config = {
        'tokenizer_class': 'PreTrainedTokenizerFast',
        'clean_up_tokenization_spaces': False,
        'eos_token': self.eos,
        'pad_token': self.pad,
        'bos_token': self.bos,
        'chat_template': self.chat_template,
    }
    config = {key: value for key, value in config.items() if value is not None}
    files.write_json(directory / 'tokenizer_config.json', config)

  @classmethod
  def from_directory(cls, path: pathlib.Path | str) -> 'Tokenizer':
    """Reads the tokenizer of a Hugging Face directory."""
    path = pathlib.Path(path)
    source = path / 'tokenizer.json'
    if not source.exists():
      raise NotAllowedError(f'{source} is missing: give a folder with one.')
    try:
      backend = tokenizers.Tokenizer.from_file(str(source))
    except Exception as error:  # Of no narrower type.
      raise NotAllowedError(f'{source} cannot be read: {error}') from error
    config = read_json(path / 'tokenizer_config.json')
    template = config.get('chat_template')
    if isinstance(template, list):  # Several, by name.
      template = {t['name']: t['template'] for t in template}.get('default')
    if (path / 'chat_template.jinja').exists():
      template = (path / 'chat_template.jinja').read_text(encoding='utf-8')
    eos, pad, bos = (
        _spelling(config.get(f'{name}_token')) for name in ('eos', 'pad', 'bos')
    )
    return cls(backend, eos, pad or eos, bos, template)

  @classmethod
  def from_gguf(cls, reader: Any) -> 'Tokenizer':
    """Rebuilds the tokenizer that a `gguf.GGUFReader` finds in its file."""

    def get(name, default=None):
      field = reader.get_field(f'tokenizer.{name}')
      return default if field is None else field.contents()

    model = get('ggml.model')
    require(model == 'gpt2', 'tokenizer.ggml.model', model, 'gpt2')
    tokens, kinds = get('ggml.tokens'), get('ggml.token_type')
    pre = get('ggml.pre', '')
    backend = _byte_level_bpe(
        models.BPE(
            {token: i for i, token in enumerate(tokens)},
            [tuple(merge.split(' ')) for merge in get('ggml.merges')],
            ignore_merges=pre == 'llama-bpe',
        ),
        pre,
    )
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens(added)
    ids = (get(f'ggml.{name}_token_id') for name in ('eos', 'padding', 'bos'))
    eos, pad, bos = (None if i is None else tokens[i] for i in ids)
    return cls(backend, eos, pad or eos, bos, get('chat_template'))

  @classmethod
  def byte_level(cls, corpus: Iterable[str], vocab_size: int) -> 'Tokenizer':
    """Trains a byte-level BPE with ChatML, for tiny models.

    Args:
      corpus: texts of the kind that it is for. Other texts can be encoded too.
      vocab_size: at most so many tokens: 256 bytes, 2 special ones, merges.
    """
    fewest = len(pre_tokenizers.ByteLevel.alphabet()) + 2
    require(vocab_size >= fewest, 'vocab_size', vocab_size, f'>= {fewest}')
    backend = _byte_level_bpe(models.BPE(), 'smollm')
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_START, _END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(corpus, trainer)
    return cls(backend, _END, _END, _START, _CHAT_ML)


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """Reads a JSON object.

  Raises:
    NotAllowedError: if it is missing or is no object.
  """
  try:
    value = json.loads(path.read_text(encoding='utf-8'))
  except FileNotFoundError as error:
    raise NotAllowedError(f'{path} is missing.') from error
  except ValueError as error:
    raise NotAllowedError(f'{path} cannot be read: {error}') from error
  if not isinstance(value, dict):
    raise NotAllowedError(f'{path} cannot be read: it is not an object.')
  return value


def _byte_level_bpe(model: models.BPE, pre: str) -> tokenizers.Tokenizer:
  """A tokenizer that splits text in the way that GGUF calls `pre`."""
  backend = tokenizers.Tokenizer(model)
  whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
  if pre == 'smollm':
    steps = [pre_tokenizers.Digits(individual_digits=True), words]
  else:
    allowed = ', '.join(['smollm', *_SPLITS])
    require(pre in _SPLITS, 'tokenizer.ggml.pre', pre, allowed)
    steps = [pre_tokenizers.Split(Regex(_SPLITS[pre]), 'isolated'), whole]
  backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
  backend.decoder = decoders.ByteLevel()
  return backend


def _spelling(token: Any) -> str | None:
  """A special token of `tokenizer_config.json`, which may be an object."""
  return token['content'] if isinstance(token, dict) else token


@functools.cache
def _compile(template: str | None) -> jinja2.Template:
  """A template that cannot reach the interpreter: it came with the weights."""
  if template is None:
    raise NotAllowedError(
        'The tokenizer has no chat template: write one to'
        ' chat_template.jinja beside tokenizer.json.'
    )
  environment = ImmutableSandboxedEnvironment(
      trim_blocks=True,
      lstrip_blocks=True,
      extensions=['jinja2.ext.loopcontrols'],
  )
  environment.globals['raise_exception'] = _raise
  environment.filters['tojson'] = functools.partial(
      json.dumps, ensure_ascii=False
  )
  try:
    return environment.from_string(template)
  except jinja2.TemplateError as error:
    raise NotAllowedError(f'The chat template fails: {error}') from error


def _raise(message: str):
  raise jinja2.TemplateError(message)
