"""Samples of supervised fine-tuning: the labels of a dataset."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from fsdptrain.config import Config
from fsdptrain.data.chat import TurnRenderer
from fsdptrain.data.prompts import PromptStream
from fsdptrain.data.sft import sft_sample
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import RolloutError
from fsdptrain.trainer.samples.source import RolloutBatch, images_of, own_share


@dataclass
class SftSource:
    """Draws prompts from a stream, and uses their labels as responses."""

    stream: PromptStream
    tokenizer: PreTrainedTokenizerBase
    renderer: TurnRenderer
    num_prompts: int  # of all ranks
    in_flight: bool = False

    @classmethod
    def of(cls, config: Config, stream: PromptStream, tokenizer: PreTrainedTokenizerBase) -> "SftSource":
        renderer = TurnRenderer(tokenizer, data=config.data)
        return cls(stream, tokenizer, renderer, num_prompts=config.samples_per_rollout)

    def run_ahead(self, step: int) -> None:
        """Do nothing: SFT has no engine."""

    def collect(self, step: int) -> RolloutBatch:
        del step  # the stream tracks its position
        with raise_on_all_ranks(RolloutError, "--prompt-data"):
            asked = self.stream.next(self.num_prompts)
            for prompt in asked:
                self.stream.record(prompt)
            prompts = own_share(asked)
            samples = [sft_sample(prompt, self.tokenizer, renderer=self.renderer) for prompt in prompts]
            return RolloutBatch(samples, images=images_of(asked))
