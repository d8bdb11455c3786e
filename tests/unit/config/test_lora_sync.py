"""--lora-sync adapter needs an engine that applies adapters."""

import pytest

from fsdptrain.config import Config
from fsdptrain.errors import ConfigError

ADAPTER = {"lora_sync": "adapter", "lora_rank": 8}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lora_sync": "adapter"}, "--lora-sync has no effect"),
        (ADAPTER, "needs --rollout-engine vllm"),
        (
            {**ADAPTER, "rollout_engine": "vllm-server", "rollout_urls": ["http://1.1.1.1"]},
            "needs servers that the run starts",
        ),
    ],
)
def test_an_adapter_that_no_engine_applies_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        Config(hf_checkpoint="any", **values)
