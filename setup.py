"""Packaging. Floors only: the exact tested set is in requirements.lock."""

import pathlib

from setuptools import find_packages
from setuptools import setup

setup(
    name='rlcr_jax',
    version='0.1.0',
    description='Reinforcement learning from collective rewards, in JAX.',
    long_description=pathlib.Path('README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    author='The rlcr_jax Authors',
    license='Apache-2.0',
    python_requires='>=3.11',
    packages=find_packages(
        include=[
            'envs',
            'envs.*',
            'experiments',
            'experiments.*',
            'rlcr_jax',
            'rlcr_jax.*',
        ]
    ),
    package_data={'rlcr_jax': ['templates/*']},
    # Every floor was installed once, all together, and trained a small run.
    install_requires=[
        'absl-py>=2.3.1',
        'chex>=0.1.91',
        'flax>=0.12.0',
        'jax>=0.8.0',
        'jinja2>=3.1.4',
        'matplotlib>=3.9.4',
        'ml_collections>=1.1.0',
        'numpy>=2.0.2',
        'optax>=0.2.6',
        'orbax-checkpoint>=0.11.28',
        'rich>=13.9.4',
        'scipy>=1.14',
        'tensorboardX>=2.6.4',
    ],
    extras_require={
        'llm': [
            'gguf>=0.17',
            'jinja2>=3.1.4',
            'safetensors>=0.6',
            'tokenizers>=0.21',
        ],
        'test': [
            'packaging>=24.0',
            'pyink>=25.12',
            'pytest>=8.0',
            'pytest-xdist>=3.6',
            'pyyaml>=6.0',
            'rlax>=0.1.8',
            'ruff>=0.14',
        ],
        'tpu': ['jax[tpu]>=0.8.0'],
        'wandb': ['wandb>=0.22'],
        'xm': ['xmanager>=0.7'],
    },
)
