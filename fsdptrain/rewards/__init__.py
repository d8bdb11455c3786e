"""Verifiable rewards, computed by code."""
