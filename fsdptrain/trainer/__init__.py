"""The training loop: collect samples, train on them, sync the weights to the engine, repeat."""
