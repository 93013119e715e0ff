"""Runs test files with pytest, where a build tool starts one per target."""

import sys

import pytest

if __name__ == '__main__':
  sys.exit(pytest.main(sys.argv[1:]))
