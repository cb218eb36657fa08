#!/bin/bash
# GRPO of a small model on one GPU, with local data and a reward function file.
set -ex
HERE=$(cd "$(dirname "$0")" && pwd)
WORK=${WORK:-out/openrlhf_single_gpu}

python3 "$HERE/prepare_data.py" --output "$WORK/sums.jsonl" --settings '{"max_terms": 3, "max_digits": 2}'

python3 -m openrlhf_integration.train_ppo_ray \
   --use_spec_rollout \
   --actor.model_name_or_path "${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}" \
   --reward.remote_url "$HERE/reward_func.py" \
   --data.prompt_dataset "$WORK/sums.jsonl" \
   --data.input_key input \
   --data.label_key label \
   --data.apply_chat_template \
   --data.max_len 1024 \
   --rollout.max_new_tokens 512 \
   --actor.num_gpus_per_node 1 \
   --ref.num_gpus_per_node 1 \
   --vllm.num_engines 1 \
   --vllm.tensor_parallel_size 1 \
   --vllm.gpu_memory_utilization 0.4 \
   --train.colocate_all \
   --vllm.enable_sleep \
   --ds.enable_sleep \
   --ds.zero_stage 2 \
   --ds.param_dtype bf16 \
   --ds.attn_implementation "${ATTENTION:-flash_attention_2}" \
   --algo.advantage.estimator group_norm \
   --algo.kl.init_coef 0 \
   --rollout.batch_size 64 \
   --rollout.n_samples_per_prompt 8 \
   --rollout.micro_batch_size 16 \
   --train.batch_size 512 \
   --train.micro_batch_size 8 \
   --train.num_episodes 10 \
   --actor.adam.lr 1e-6 \
   --ckpt.output_dir "$WORK/model" \
   --ckpt.path "$WORK/checkpoints" \
   --logger.tensorboard_dir "$WORK/tensorboard" \
   "$@"
