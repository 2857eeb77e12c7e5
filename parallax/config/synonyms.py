"""The terms of other trainers (transformers, Lightning, torchtitan, DeepSpeed, nanoGPT), and Parallax's settings."""

from __future__ import annotations

import difflib

_PRECISION = "precision=mixed_bf16"
_SAME = {
    "trainer.global_batch": (
        "batch_size bs batch global_batch_size total_batch_size train_batch_size batch_size_train effective_batch_size "
        "local_batch_size"
    ),
    "trainer.microbatch": (
        "gradient_accumulation_steps grad_accum_steps gradient_accumulation grad_accum accumulate_grad_batches "
        "per_device_train_batch_size per_device_batch_size per_gpu_batch_size train_micro_batch_size_per_gpu "
        "micro_batch_size microbatch_size micro_batch micro_batches num_microbatches n_microbatches microbatches"
    ),
    "trainer.steps": (
        "max_steps num_steps n_steps total_steps train_steps training_steps num_training_steps max_iters "
        "iters iterations num_iterations n_iters"
    ),
    "trainer.epochs": "epoch num_epochs n_epochs max_epochs num_train_epochs",
    "trainer.eval_every": "eval_steps eval_interval eval_freq evaluation_steps val_check_interval validate_every",
    "trainer.eval_batches": "eval_iters limit_val_batches val_batches validation_batches",
    "trainer.checkpoint_every": "save_steps save_interval save_every save_freq checkpoint_interval ckpt_every",
    "checkpoint.keep": "save_total_limit save_top_k keep_latest_k keep_checkpoints max_checkpoints",
    "trainer.patience": "early_stopping_patience early_stopping early_stopping_rounds stop_patience",
    "checkpoint.metric": "metric_for_best_model monitor best_metric",
    "metrics": "metric compute_metrics eval_metrics",
    "loss": "criterion loss_fn loss_function loss_type label_smoothing label_smoothing_factor class_weights",
    "trainer.resume": "resume_from_checkpoint resume_from load_checkpoint ckpt_path",
    "trainer.max_restarts": "restarts retries",
    "logger.print_every": "logging_steps log_every log_every_n_steps log_interval log_freq print_freq print_interval",
    "logger.to": "loggers report_to log_with tensorboard csv mlflow trackio log_dir tensorboard_dir logging_dir",
    "logger=wandb": "wandb use_wandb wandb_log weights_and_biases",
    "logger.project": "wandb_project mlflow_experiment",
    "callbacks": "callback hooks trainer_callbacks add_callback",
    "logger.tags": "wandb_tags run_tags",
    "optimizer.lr": "learning_rate max_lr peak_lr base_lr init_lr rate learningrate",
    "schedule.final": "final_rate min_lr end_lr lr_end min_lr_ratio lr_min final_lr",
    "schedule.warmup": "warmup_steps num_warmup_steps warmup_iters warmup_ratio",
    "optimizer.weight_decay": "wd decay l2",
    "optimizer.betas": "beta1 beta2 adam_beta1 adam_beta2 beta",
    "optimizer.eps": "adam_epsilon epsilon adam_eps",
    "optimizer.clip_norm": (
        "max_grad_norm grad_clip clip_grad gradient_clip_val gradient_clip gradient_clipping clip max_norm"
    ),
    "optimizer.clip_value": "clip_grad_value grad_clip_value max_grad_value",
    "ema=on": "use_ema model_ema with_ema ema_decay model_ema_decay ema_rate",
    "ema=average": "swa use_swa",
    "optimizer=adamw": "optim opt optimizer_name optim_name",
    "cluster.devices": (
        "gpus gpu num_gpus n_gpus n_gpu ngpu ngpus num_devices n_devices world_size nproc nproc_per_node num_processes "
        "procs ranks gpus_per_node devices_per_node tpu_cores"
    ),
    "cluster.kind": "device accelerator device_type backend use_cuda no_cuda cuda cpu",
    "cluster.threads": "num_threads omp_num_threads n_threads threads_per_process cores",
    "cluster.device_memory": "max_memory gpu_memory memory memory_limit vram mem budget max_gpu_memory device_budget",
    "cluster.host_memory": "cpu_memory ram host_ram",
    "precision=mixed_fp16": "fp16 amp use_amp half float16 autocast mixed_precision fp16_full_eval",
    _PRECISION: "bf16 bfloat16 dtype torch_dtype param_dtype",
    "precision=tf32": "tf32 allow_tf32",
    "data=dataset": "dataloader train_dataloader loader train_dataset",
    "data.workers": "num_workers dataloader_num_workers n_workers",
    "data.prefetch": "prefetch_factor",
    "data.last_batch": "drop_last",
    "data.collate": "collate_fn data_collator",
    "data.path": (
        "dataset dataset_name dataset_path data_path data_dir train_data train_file train_dir train_path corpus "
        "input_file dataroot"
    ),
    "data.validation": "val_split validation_split test_size val_size eval_fraction",
    "model.sequence": (
        "seq_len seq_length seqlen sequence_length max_length max_seq_len max_seq_length block_size context_length "
        "context n_ctx n_positions max_position_embeddings"
    ),
    "model.layers": "n_layer n_layers num_layers num_hidden_layers depth",
    "model.hidden": "n_embd d_model hidden_size hidden_dim embed_dim dim n_embed width",
    "model.heads": "n_head n_heads num_heads num_attention_heads",
    "model.vocabulary": "vocab_size vocab n_vocab",
    "model.pretrained": "model_name model_path checkpoint_path from_pretrained pretrained_model_name_or_path",
    "plan.stages": "pp pp_size pipeline_parallel pipeline_parallel_size pipeline_parallel_degree num_stages n_stages",
    "plan.replicas": (
        "dp dp_size ddp fsdp data_parallel data_parallel_size num_replicas strategy distributed zero zero_stage "
        "data_parallel_replicate_degree data_parallel_shard_degree"
    ),
    "plan.activations": (
        "gradient_checkpointing activation_checkpointing grad_checkpointing recompute checkpoint_activations "
        "activation_checkpoint"
    ),
    "plan.schedule": "pipeline_schedule pipeline_parallel_schedule pp_schedule",
    "swap=auto": "offload cpu_offload activation_offloading offload_optimizer offload_param",
    "swap=disk": "nvme nvme_path offload_folder",
    "compile": "torch_compile use_compile jit compiled compile_model",
    "seed": "random_seed manual_seed rng_seed data_seed",
    "name": "output_dir out_dir run_name exp_name experiment_name save_dir job_name logdir run_id",
}

_NONE = {
    "rows are copied to a device through pinned memory without a setting": "pin_memory",
    "there is no tensor parallelism; plan.stages and plan.replicas divide the work": (
        "tp tp_size tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size"
    ),
    "start one torchrun on each node, or use `parallax launch`": "nodes num_nodes nnodes n_nodes node_rank master_addr",
}

_HERE = {word: key for key, terms in _SAME.items() for word in terms.split()}
_REMARKS = {word: remark for remark, terms in _NONE.items() for word in terms.split()}


def counterpart(word: str) -> str:
    """Return the Parallax setting that corresponds to ``word``, a term of another trainer; empty if there is none.

    A setting is a key such as ``trainer.global_batch``, or an option such as ``precision=mixed_bf16``.

    >>> counterpart("batch_size"), counterpart("batch-sizes"), counterpart("lyers")
    ('trainer.global_batch', 'trainer.global_batch', '')
    """
    return _HERE.get(_known(word), "")


def remark(word: str) -> str:
    """Return advice for ``word``, a term of another trainer that has no corresponding setting; empty for an unknown
    term."""
    return _REMARKS.get(_known(word), "")


def _known(word: str) -> str:
    word = word.lower().replace("-", "_")
    if word in _HERE or word in _REMARKS:
        return word
    return next(iter(difflib.get_close_matches(word, [*_HERE, *_REMARKS], n=1, cutoff=0.9)), "")
