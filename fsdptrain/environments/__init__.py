"""Environments of other frameworks, each in a Python of its own. The core does not import this folder."""
