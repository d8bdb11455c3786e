"""What a changed option means for a run that resumes is declared with the option; the default is to refuse it."""

from fsdptrain.config import Config
from fsdptrain.config.keys import all_keys
from fsdptrain.config.rules import OnResume
from fsdptrain.config.section import Section

REFUSED = """
hf_checkpoint backend trust_remote_code prompt_data prompt_data_streaming prompt_split input_key
label_key metadata_key apply_chat_template chat_template_kwargs system_prompt eval_prompt_data eval_size
reward judge_model judge_rubric pass_threshold environment environment_command environment_kwargs
max_turns max_observation_len algorithm loss n_samples_per_prompt advantage_estimator advantage_scale eps_clip
eps_clip_high eps_clip_c is_cap_high sapo_tau_pos sapo_tau_neg use_opsm opsm_delta loss_aggregation
kl_loss_coef kl_loss_type use_unbiased_kl entropy_coef use_rollout_logprobs
mismatch_correction mismatch_low mismatch_high mismatch_rejection mismatch_rejection_max overlong_penalty
overlong_buffer mask_truncated dynamic_sampling dynamic_sampling_max_rounds sft_loss_on
optimizer rollout_max_prompt_len rollout_max_response_len rollout_temperature rollout_top_p rollout_top_k
rollout_min_p rollout_shuffle rollout_seed ref_load seed lora_rank lora_alpha
lora_targets load_in_4bit image_key train_vision
router_replay opd_loss opd_beta opd_top_k megatron_spec
"""


def test_options_that_make_another_experiment_are_listed() -> None:
    """A new option is refused on resume until it is marked TUNING or NEUTRAL, or listed here."""
    refused = [flat for flat, key in all_keys().items() if key.on_resume is OnResume.REFUSED]
    assert refused == REFUSED.split()
    assert Section.ON_RESUME is OnResume.REFUSED


def test_each_model_and_algorithm_has_a_folder_by_default() -> None:
    def folder(**values: object) -> str:
        return Config(**{"hf_checkpoint": "Qwen/Qwen3-4B", **values}).run.output_dir

    assert folder() == "runs/Qwen3-4B-grpo"
    assert folder(algorithm="sft", hf_checkpoint="/models/b/") == "runs/b-sft"
    assert folder(output_dir="x") == folder(run={"output_dir": "x"}) == "x"
