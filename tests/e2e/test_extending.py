"""A package outside of fsdptrain adds a loss, an advantage, a reward, an engine, a logger and a feature."""

from pathlib import Path

from tests.e2e import command
from tests.e2e.command import TINY_RUN
from tests.packages import install

POINTS = ["loggers.acme = acme:Logger", "rollout.acme = acme:engine", "features.acme = acme:Scaled"]

CODE = '''
import json
from dataclasses import replace

from fsdptrain.algo.losses import LOSSES
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


class Scaled(Feature):
    """Counts packs, and doubles the loss."""

    packs = 0

    @classmethod
    def enabled(cls, config):
        return True

    def finish_loss(self, output, batch, logprobs):
        self.packs += 1
        return replace(output, loss=2 * output.loss)

    def after_step(self, *, updated):
        return {"acme/packs": float(self.packs)}
'''


def test_a_package_adds_one_of_each_and_a_step_trains_with_it(checkpoint: Path, tmp_path: Path) -> None:
    install(tmp_path / "site", "acme", "fsdptrain.plugins", POINTS, {"acme": CODE})
    argv = ["--hf-checkpoint", str(checkpoint), *TINY_RUN, "acme", "--output-dir", str(tmp_path / "run")]
    argv += ["--loss", "acme:loss", "--advantage-estimator", "acme:advantage", "--reward", "acme:reward"]
    argv += ["--rollout-engine", "acme", "--no-export", "--keep-last", "0"]
    result = command.run_with_path(argv, tmp_path / "log", tmp_path / "site")
    assert result.code == 0, result.err
    trained = [row for row in command.rows_of(tmp_path / "run" / "acme.jsonl") if "acme/loss" in row]
    assert [row["acme/packs"] for row in trained] == [1.0, 2.0]
