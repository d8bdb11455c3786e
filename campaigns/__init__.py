"""Campaigns: long programs that attack the trainer from outside. Run one by `python -m campaigns.NAME`.

Each begins with what must hold, prints its progress, and writes campaigns/results/NAME.json. `make campaigns` runs all.
"""
