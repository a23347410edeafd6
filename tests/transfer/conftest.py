"""The tiny run of the tests of training serves the tests of what is made of its models too."""

from train.conftest import make_config as make_config
