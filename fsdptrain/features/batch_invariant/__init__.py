"""--deterministic-mode on a CPU: logprobs do not depend on what else is computed. See docs/deterministic.md."""
