"""The coefficients of the KL divergence to the reference."""

from collections.abc import Mapping
from dataclasses import dataclass

from fsdptrain.algo.kl import adapt_kl_coef
from fsdptrain.config import Config
from fsdptrain.errors import ConfigError
from fsdptrain.types import Metrics

REF_KL = "policy/ref_kl"  # mean over loss tokens, of the KL in the loss if any, else in the reward [nats]


@dataclass
class KlControl:
    """The KL coefficients of a run. `scale` is the factor that --kl-target has adapted so far; checkpoints store it."""

    config: Config
    scale: float = 1.0

    @property
    def loss_coef(self) -> float:
        return self.config.algorithm.kl_loss_coef * self.scale

    @property
    def reward_coef(self) -> float:
        return self.config.algorithm.kl_reward_coef * self.scale

    def adapt(self, metrics: Mapping[str, float]) -> Metrics:
        """Adapt `scale` to the KL divergence of this rollout. Returns the coefficient that this rollout used."""
        algorithm = self.config.algorithm
        if algorithm.kl_target is None:
            return {}
        if REF_KL not in metrics:
            raise ConfigError(
                f"--kl-target needs {REF_KL}, which --loss {algorithm.loss} does not report: end it in "
                "fsdptrain.algo.objective.total, use --kl-reward-coef, or leave --kl-target out"
            )
        used = self.loss_coef or self.reward_coef
        self.scale = adapt_kl_coef(
            self.scale,
            metrics[REF_KL],
            target=algorithm.kl_target,
            num_samples=self.config.samples_per_rollout,
            horizon=algorithm.kl_horizon,
        )
        return {"kl/coef": used}
