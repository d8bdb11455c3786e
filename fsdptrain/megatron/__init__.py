"""Training on megatron-core. Only this package imports megatron, and only with --backend megatron."""
