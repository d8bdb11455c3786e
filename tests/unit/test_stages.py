"""Stages of a run are named while they take long."""

import logging
import time

from fsdptrain import stages
from fsdptrain.trainer.phases import Stopwatch


def test_a_stage_is_named_after_a_second_and_later_only_if_it_takes_much_longer_than_before(caplog, monkeypatch):
    caplog.set_level(logging.INFO, stages.__name__)
    monkeypatch.setattr(stages, "_longest", {})
    watch = Stopwatch()
    for _ in range(2):
        with watch("collect"), watch("reward"):
            time.sleep(1.2)
    with watch("generate"):
        time.sleep(0.1)
    assert caplog.messages == ["rollout, rewarding: 1 s"]
    assert watch.seconds["reward"] > 2.4
