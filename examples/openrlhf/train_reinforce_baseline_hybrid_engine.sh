#!/bin/bash
# REINFORCE++-baseline on one node: OpenRLHF's script of this name, with our module in place of openrlhf.cli.train_ppo_ray,
# `--use_spec_rollout`, and several episodes: reuse begins when a prompt comes back.
set -x

python3 -m openrlhf_integration.train_ppo_ray \
   --use_spec_rollout \
   --train.num_episodes 10 \
   --ref.num_nodes 1 \
   --ref.num_gpus_per_node 4 \
   --actor.num_nodes 1 \
   --actor.num_gpus_per_node 4 \
   --vllm.num_engines 2 \
   --vllm.tensor_parallel_size 2 \
   --vllm.gpu_memory_utilization 0.7 \
   --train.colocate_all \
   --vllm.enable_sleep \
   --ds.enable_sleep \
   --vllm.sync_backend nccl \
   --vllm.enforce_eager \
   --actor.model_name_or_path Qwen/Qwen3-4B-Thinking-2507 \
   --train.agent_func_path /path/to/agent_func.py \
   --ckpt.load_enable \
   --ckpt.output_dir exp/Qwen3-4B-Thinking \
   --ckpt.path exp/Qwen3-4B-Thinking/ckpt \
   --ckpt.save_hf \
   --ckpt.max_num 3 \
   --ckpt.save_steps 10 \
   --data.prompt_dataset zhuzilin/dapo-math-17k \
   --data.input_key prompt \
   --data.label_key label \
   --data.apply_chat_template \
   --data.max_len 74240 \
   --rollout.max_new_tokens 64000 \
   --rollout.batch_size 128 \
   --rollout.n_samples_per_prompt 8 \
   --rollout.micro_batch_size 8 \
   --train.batch_size 1024 \
   --train.micro_batch_size 1 \
   --train.dynamic_batch_enable \
   --train.max_tokens_per_gpu 16192 \
   --rollout.max_tokens_per_gpu 32768 \
   --algo.dynamic_filtering_enable \
   --algo.dynamic_filtering_range 0.0 1.0 \
   --ds.zero_stage 3 \
   --ds.param_dtype bf16 \
   --ds.packing_samples \
   --ds.ring_attn_size 2 \
   --ds.ring_attn_head_stride 2 \
   --actor.gradient_checkpointing_enable \
   --actor.adam.lr 5e-7 \
   --actor.entropy_coef 0.0 \
   --algo.advantage.estimator reinforce_baseline \
   --algo.kl.init_coef 1e-5 \
   --algo.kl.use_loss \
   --algo.kl.estimator k2 \
   --algo.advantage.is_correction_level token \
   --algo.advantage.is_correction_mode mask \
   --logger.tensorboard_dir exp/Qwen3-4B-Thinking/runs \
   --logger.logging_steps 1 \
   "$@"
