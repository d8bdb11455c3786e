"""Checks for option combinations that features reject. Imports no torch."""

from fsdptrain.features.prefix_sharing.checks import check_prefixes

CHECKS = (check_prefixes,)
