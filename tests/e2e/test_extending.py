"""A package outside of fsdptrain adds a loss, an advantage, a reward, an engine, a logger, a feature and options."""

from pathlib import Path

import yaml

from tests.e2e import command
from tests.e2e.command import TINY_RUN
from tests.packages import install

POINTS = [
    "loggers.acme = acme:Logger",
    "rollout.acme = acme:engine",
    "features.acme = acme:Scaled",
    "sections.acme = acme:AcmeConfig",
]

CODE = '''
import json
from dataclasses import replace

from fsdptrain.algo.losses import LOSSES
from fsdptrain.config import Section
from fsdptrain.feature import Feature
from fsdptrain.rollout.embedded.engine import build_hf_engine


def loss(batch, logprobs, config):
    output = LOSSES["reinforce"](batch, logprobs, config)
    return replace(output, metrics={**output.metrics, "acme/loss": output.loss.detach()})


def advantage(rewards, lengths):
    return [reward - max(rewards) for reward in rewards]


def reward(prompt, response):
    return float(len(response) % 3)


def engine(config, *, checkpoint, device):
    return build_hf_engine(config, checkpoint=checkpoint, device=device)


class Logger:
    def __init__(self, info):
        self.file = (info.output_dir / "acme.jsonl").open("a")

    def log(self, metrics, step):
        self.file.write(json.dumps({"step": step, **metrics}) + "\\n")

    def log_samples(self, samples, step):
        pass

    def close(self):
        self.file.close()


class AcmeConfig(Section):
    """Acme."""

    NAME = "acme"
    PREFIX = "acme_"

    scale: float = 1.0
    """Factor on the loss."""


class Scaled(Feature):
    """Counts packs, and scales the loss."""

    def __init__(self, scale):
        self.scale, self.packs = scale, 0

    @classmethod
    def enabled(cls, config):
        return config.section(AcmeConfig).scale != 1.0

    @classmethod
    def create(cls, config, checkpoint):
        return cls(config.section(AcmeConfig).scale)

    def loss_function(self, stock):
        def scaled(batch, logprobs, config):
            self.packs += 1
            output = stock(batch, logprobs, config)
            return replace(output, loss=self.scale * output.loss)

        return scaled

    def before_step(self, model, batches):
        return {"acme/packs": float(self.packs), "acme/scale": self.scale}
'''


def test_a_package_adds_one_of_each_and_a_step_trains_with_it(checkpoint: Path, tmp_path: Path) -> None:
    install(tmp_path / "site", "acme", "fsdptrain.plugins", POINTS, {"acme": CODE})
    argv = ["--hf-checkpoint", str(checkpoint), *TINY_RUN, "acme", "--output-dir", str(tmp_path / "run")]
    argv += ["--loss", "acme:loss", "--advantage-estimator", "acme:advantage", "--reward", "acme:reward"]
    argv += ["--rollout-engine", "acme", "--no-export", "--keep-last", "0", "--reward-workers", "0"]
    site = {"PYTHONPATH": str(tmp_path / "site")}
    result = command.run([*argv, "--acme-scale", "2.5"], tmp_path / "log", variables=site)
    assert result.code == 0, result.err
    trained = [row for row in command.rows_of(tmp_path / "run" / "acme.jsonl") if "acme/loss" in row]
    assert [row["acme/packs"] for row in trained] == [0.0, 2.0]
    assert [row["acme/scale"] for row in trained] == [2.5, 2.5]
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["acme"] == {"scale": 2.5}
