"""Campaigns: programs that attack the trainer from outside. `python -m campaigns.NAME`; see CONTRIBUTING.md."""
