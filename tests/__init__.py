"""Tests of the package. Messages are those of the command line, which names flags."""

from fsdptrain import errors

errors.in_python = False
