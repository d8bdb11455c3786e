"""What campaigns/fuzz.py draws, and the laws that it checks."""
