"""Options of the algorithms that cannot work together, or have no effect, are refused; repaired they are not."""

import pytest

from fsdptrain.config.keys import all_keys
from tests.unit.config.refusals import SFT, assert_refused

OFF_POLICY = {"global_batch_size": 64}

# (what is refused, what the line names, what repairs it)
REFUSED = [
    ({**SFT, "n_samples_per_prompt": 4}, ["--n-samples-per-prompt", "sft"], {"algorithm": "grpo"}),
    ({**SFT, "kl_loss_coef": 0.1}, ["--kl-loss-coef", "sft"], {"algorithm": "grpo"}),
    ({**SFT, "entropy_coef": 0.1}, ["--entropy-coef", "sft"], {"algorithm": "grpo"}),
    ({**SFT, "rollout_temperature": 0.7}, ["--rollout-temperature", "sft"], {"algorithm": "grpo"}),
    ({**SFT, "max_unscored_fraction": 0.5}, ["--max-unscored-fraction", "sft"], {"algorithm": "grpo"}),
    *(
        ({**SFT, "eval_interval": 0, key: value}, [all_keys()[key].flag, "never evaluates"], {"eval_interval": 5})
        for key, value in [
            ("reward", "exact"),
            ("environment", "calculator"),
            ("rollout_engine", "hf"),
            ("rollout_max_response_len", 7),
            ("rollout_max_batch_tokens", 20_000),
            ("log_num_samples", 2),
        ]
    ),
    ({**SFT, "rollout_batch_size": 8, "global_batch_size": 4}, ["--rollout-batch-size"], {"rollout_batch_size": 4}),
    ({"n_samples_per_prompt": 1}, ["--n-samples-per-prompt", "at least 2"], {"n_samples_per_prompt": 2}),
    ({"n_samples_per_prompt": 1}, ["--n-samples-per-prompt"], {"advantage_estimator": "my.advantages:baseline"}),
    ({"kl_loss_type": "k1"}, ["--kl-loss-type", "--kl-loss-coef"], {"kl_loss_coef": 0.001}),
    ({"ref_load": "y"}, ["--ref-load", "--kl-loss-coef"], {"kl_reward_coef": 0.001}),
    ({"ref_update_interval": 5}, ["--ref-update-interval", "--kl-reward-coef"], {"kl_reward_coef": 0.001}),
    (
        {"ref_update_interval": 1, "kl_loss_coef": 0.1},
        ["--ref-update-interval 1", "KL divergence 0", "--global-batch-size below 256"],
        {"ref_update_interval": 2},
    ),
    ({"kl_target": 0.1}, ["--kl-target", "--kl-loss-coef"], {"kl_loss_coef": 0.001}),
    ({"kl_horizon": 512, "kl_loss_coef": 0.1}, ["--kl-horizon", "--kl-target"], {"kl_target": 0.1}),
    (
        {"kl_horizon": 100, "kl_loss_coef": 0.1, "kl_target": 0.1},
        ["--kl-horizon 100", "256 samples", "10000 is usual"],
        {"kl_horizon": 256},
    ),
    (
        {"kl_target": 0.1, "kl_loss_coef": 0.1, "kl_reward_coef": 0.2},
        ["--kl-target 0.1", "--kl-loss-coef 0.1", "--kl-reward-coef 0.2", "choose one"],
        {"kl_loss_coef": 0.0},
    ),
    (
        {"kl_reward_coef": 0.1, "mask_truncated": True},
        ["--kl-reward-coef 0.1", "--mask-truncated", "--kl-loss-coef"],
        {"mask_truncated": False},
    ),
    ({"kl_reward_coef": 0.1, "kl_loss_type": "k1"}, ["--kl-loss-type", "in the loss"], {"kl_loss_coef": 0.001}),
    ({"kl_loss_coef": 0.1, "kl_reward_type": "k3"}, ["--kl-reward-type", "in the reward"], {"kl_reward_coef": 0.001}),
    ({"mismatch_rejection": "seq_mean_k3"}, ["--mismatch-rejection-max", "0.01"], {"mismatch_rejection_max": 0.01}),
    (
        {"mismatch_rejection_max": 0.1},
        ["--mismatch-rejection-max", "--mismatch-rejection, e.g."],
        {"mismatch_rejection": "token_k1", "use_rollout_logprobs": True},
    ),
    (
        {"algorithm": "ipo", "mismatch_rejection": "token_k1", "mismatch_rejection_max": 0.1},
        ["--mismatch-rejection", "ipo"],
        {"algorithm": "grpo"},
    ),
    *(
        ({**SFT, key: value}, [all_keys()[key].flag, "sft"], {"algorithm": "grpo"})
        for key, value in [
            ("kl_reward_coef", 0.1),
            ("rollout_top_p", 0.9),
            ("rollout_top_k", 5),
            ("rollout_min_p", 0.1),
        ]
    ),
    ({"eps_clip_high": 0.28}, ["--eps-clip-high", "--global-batch-size below 256"], OFF_POLICY),
    ({"eps_clip": 0.1}, ["--eps-clip ", "ratio is always 1"], {"use_rollout_logprobs": True}),
    ({"eps_clip_c": 3.0}, ["--eps-clip-c"], OFF_POLICY),
    ({"use_opsm": True}, ["--use-opsm", "ratio is always 1"], OFF_POLICY),
    ({**OFF_POLICY, "opsm_delta": 0.1}, ["--opsm-delta", "--use-opsm"], {"use_opsm": True}),
    ({**OFF_POLICY, "loss": "cispo", "eps_clip": 0.1}, ["--eps-clip ", "--loss cispo"], {"loss": "grpo"}),
    ({**OFF_POLICY, "algorithm": "gspo", "is_cap_high": 2.0}, ["--is-cap-high", "--loss gspo"], {"algorithm": "cispo"}),
    ({"algorithm": "cispo", "is_cap_high": 2.0}, ["--is-cap-high", "ratio is always 1"], OFF_POLICY),
    ({**OFF_POLICY, "sapo_tau_pos": 2.0}, ["--sapo-tau-pos", "--loss grpo"], {"loss": "sapo"}),
    ({"ipo_kl_coef": 0.1}, ["--ipo-kl-coef", "--loss grpo"], {"algorithm": "ipo"}),
    ({"algorithm": "ipo", "use_rollout_logprobs": True}, ["--use-rollout-logprobs", "ipo"], {"algorithm": "grpo"}),
    ({"algorithm": "ipo", "mismatch_correction": "tis"}, ["--mismatch-correction", "ipo"], {"algorithm": "grpo"}),
    ({"mismatch_high": 3.0}, ["--mismatch-high", "--mismatch-correction"], {"mismatch_correction": "tis"}),
    ({"max_staleness": 1}, ["--max-staleness 1", "--mismatch-correction tis"], {"mismatch_correction": "tis"}),
    ({"max_staleness": 1}, ["--loss grpo", "--use-rollout-logprobs"], {"use_rollout_logprobs": True}),
    ({"max_staleness": 1, "algorithm": "gspo"}, ["--max-staleness 1", "--loss gspo"], {"algorithm": "ipo"}),
    ({**SFT, "max_staleness": 1}, ["--max-staleness", "sft"], {"algorithm": "ipo"}),
    (
        {
            "max_staleness": 2,
            "algorithm": "ipo",
            "router_replay": "rollout",
            "rollout_engine": "vllm-server",
            "rollout_num_servers": 1,
        },
        ["--router-replay rollout", "--max-staleness 2"],
        {"max_staleness": 0},
    ),
    (
        {"mismatch_correction": "tis", "use_rollout_logprobs": True},
        ["--mismatch-correction", "--use-rollout-logprobs"],
        {"use_rollout_logprobs": False},
    ),
    ({"use_unbiased_kl": True}, ["--use-unbiased-kl", "--kl-loss-coef"], {"kl_loss_coef": 0.001}),
    ({"loss": "gpso"}, ["--loss", "'gpso'", "gspo", "package.module:function"], {"loss": "gspo"}),
    ({"loss": "sft"}, ["--loss sft", "--algorithm sft"], {"loss": "my.losses:mine"}),
    ({**SFT, "loss": "grpo"}, ["--loss", "--algorithm sft"], {"loss": "my.losses:mine"}),
    ({**SFT, "dynamic_sampling": True}, ["--dynamic-sampling ", "sft"], {"algorithm": "grpo"}),
    ({**SFT, "curriculum": "pass_rate"}, ["--curriculum ", "sft"], {"algorithm": "grpo"}),
    ({"min_group_spread": 0.1}, ["--min-group-spread", "without --dynamic-sampling"], {"dynamic_sampling": True}),
    ({"dynamic_sampling_max_rounds": 3}, ["--dynamic-sampling-max-rounds"], {"algorithm": "dapo"}),
    (
        {"algorithm": "dapo", "dynamic_sampling": False, "min_group_spread": 0.1},
        ["--min-group-spread"],
        {"dynamic_sampling": True},
    ),
    ({"curriculum_floor": 0.2}, ["--curriculum-floor", "--curriculum pass_rate"], {"curriculum": "pass_rate"}),
    ({"curriculum_decay": 0.9}, ["--curriculum-decay", "--curriculum pass_rate"], {"curriculum": "pass_rate"}),
    ({"eval_interval": 0, "pass_threshold": 0.5}, ["--pass-threshold", "evaluated"], {"curriculum": "pass_rate"}),
    ({"eval_size": 0, "pass_threshold": 0.5}, ["--pass-threshold", "--eval-interval"], {"eval_size": 8}),
    ({"eval_size": 0, "pass_threshold": 0.5}, ["--pass-threshold", "--length-penalty"], {"length_penalty": 0.2}),
    (
        {"advantage_estimator": "grppo"},
        ["--advantage-estimator", "'grppo'", "did you mean 'grpo'", "package.module:function"],
        {"advantage_estimator": "my.advantages:mine"},
    ),
    ({**SFT, "advantage_scale": "batch"}, ["--advantage-scale", "sft"], {"algorithm": "grpo"}),
    ({"multi_reward": "normalize_then_sum"}, ["--multi-reward", "one reward"], {"reward": ["math=0.9", "format=0.1"]}),
    ({"multi_reward": "normalize_then_sum"}, ["--multi-reward", "one reward"], {"length_penalty": 0.1}),
    (
        {"multi_reward": "normalize_then_sum", "reward": ["math", "format"], "algorithm": "dr_grpo"},
        ["--multi-reward normalize_then_sum", "--advantage-estimator dr_grpo", "--advantage-scale group"],
        {"advantage_scale": "group"},
    ),
    (
        {"multi_reward": "normalize_then_sum", "reward": ["math", "format"], "advantage_scale": "batch"},
        ["--multi-reward normalize_then_sum", "--advantage-scale batch"],
        {"advantage_estimator": "a.b:c", "advantage_scale": "auto"},
    ),
    ({"overlong_buffer": 64}, ["--overlong-buffer", "--overlong-penalty"], {"overlong_penalty": 1.0}),
    (
        {"overlong_penalty": 1.0, "overlong_buffer": 4096},
        ["--overlong-buffer 4096", "--rollout-max-response-len 2048"],
        {"overlong_buffer": 2048},
    ),
    ({**SFT, "overlong_penalty": 1.0}, ["--overlong-penalty", "sft"], {"algorithm": "grpo"}),
    ({**SFT, "mask_truncated": True}, ["--mask-truncated", "sft"], {"algorithm": "grpo"}),
    ({**SFT, "mismatch_correction": "tis"}, ["--mismatch-correction", "sft"], {"algorithm": "grpo"}),
    ({**SFT, "router_replay": "rollout"}, ["--router-replay", "sft"], {"algorithm": "grpo"}),
    ({"router_replay": "scoring"}, ["--router-replay", "--router-replay rollout"], OFF_POLICY),
    ({"router_replay": "scoring"}, ["--router-replay"], {"kl_reward_coef": 0.1}),  # which scores it on-policy too
    (
        {**OFF_POLICY, "router_replay": "scoring", "use_rollout_logprobs": True},
        ["--router-replay", "the policy is not scored"],
        {"router_replay": "rollout"},
    ),
    (
        {"router_aux_loss_coef": -0.1},
        ["--router-aux-loss-coef", "`config`", "-0.1"],
        {"router_aux_loss_coef": "config"},
    ),
    (
        {"router_bias_update_rate": 0.001, "lora_rank": 8},
        ["--router-bias-update-rate", "--lora-rank"],
        {"lora_rank": 0},
    ),
    ({"global_batch_size": 100}, ["--global-batch-size 100", "32", "8", "256", "e.g. 64"], OFF_POLICY),
    ({"global_batch_size": 512}, ["--global-batch-size 512", "e.g. 256"], OFF_POLICY),
    ({**OFF_POLICY, "steps_per_rollout": 3}, ["--steps-per-rollout 3", "make 4 steps of 64"], {"steps_per_rollout": 4}),
    (
        {"steps_per_rollout": 3, "epochs_per_rollout": 2},
        ["--steps-per-rollout 3", "multiple of --epochs-per-rollout 2", "e.g. 4"],
        {"steps_per_rollout": 4},
    ),
    (
        {"steps_per_rollout": 257},
        ["--steps-per-rollout 257", "= 256 samples", "at most 256"],
        {"steps_per_rollout": 256},
    ),
    ({**SFT, "steps_per_rollout": 2}, ["--steps-per-rollout", "sft"], {"algorithm": "grpo"}),
    ({**SFT, "epochs_per_rollout": 2}, ["--epochs-per-rollout", "sft"], {"algorithm": "grpo"}),
]


@pytest.mark.parametrize(("values", "named", "repair"), REFUSED, ids=[" ".join(named) for _, named, _ in REFUSED])
def test_what_cannot_work_is_one_line_with_the_way_out(values, named, repair):
    assert_refused(values, named, repair)
