"""The cases of campaigns/bad_inputs.py, by group."""
