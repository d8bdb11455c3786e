"""Agents: an endpoint with the OpenAI API, whose calls become training samples."""
