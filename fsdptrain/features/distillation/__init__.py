"""On-policy distillation: a teacher's logprobs of the policy's own samples. See docs/distillation.md."""
