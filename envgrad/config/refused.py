"""Fields of ``TrainingArguments`` that cannot act here."""

from __future__ import annotations

REFUSED: dict[str, str] = {
    "auto_find_batch_size": "a smaller batch would break groups apart; lower max_tokens_per_microbatch instead",
    "average_tokens_across_devices": "loss denominators are always global here; leave it at True",
    "bf16_full_eval": "evaluation samples as training does, in the precision of bf16; set that",
    "batch_eval_metrics": "evaluation plays episodes and has no prediction batches; remove it",
    "data_seed": "tasks are drawn by `seed`; set that",
    "dataloader_drop_last": "there is no dataloader of rows; remove it",
    "dataloader_in_order": "there is no dataloader of rows; remove it",
    "dataloader_multiprocessing_context": "there is no dataloader of rows; remove it",
    "dataloader_num_workers": "there is no dataloader of rows; environments run concurrently by themselves",
    "dataloader_persistent_workers": "there is no dataloader of rows; remove it",
    "dataloader_pin_memory": "there is no dataloader of rows; remove it",
    "dataloader_prefetch_factor": "there is no dataloader of rows; remove it",
    "eval_accumulation_steps": "evaluation plays episodes and keeps no predictions; remove it",
    "eval_do_concat_batches": "evaluation plays episodes and keeps no predictions; remove it",
    "eval_use_gather_object": "evaluation plays episodes and keeps no predictions; remove it",
    "deepspeed": "this version trains in one process, without it; remove it",
    "fp16_full_eval": "evaluation samples as training does, in the precision of fp16; set that",
    "fsdp": "this version trains in one process, without it; remove it",
    "include_for_metrics": "evaluation plays episodes and has no compute_metrics; remove it",
    "include_num_input_tokens_seen": "token counts are logged every step as tokens/*; remove it",
    "label_names": "there are no labels in policy gradients; remove it",
    "label_smoothing_factor": "there are no labels in policy gradients; leave it at 0",
    "length_column_name": "rows are packed by their token counts; remove it",
    "liger_kernel_config": "it replaces the model's forward, which computes the log-probs here; remove it",
    "neftune_noise_alpha": "noise in the embeddings would change the log-probs that were sampled; leave it unset",
    "parallelism_config": "context and sequence parallelism are not supported; remove it",
    "per_device_eval_batch_size": "evaluation plays eval_tasks tasks of num_generations_eval episodes at once, as many "
    "as max_concurrent_episodes lets; set those",
    "prediction_loss_only": "evaluation plays episodes; remove it",
    "remove_unused_columns": "all columns go to reset and the reward functions; leave it at False",
    "torch_empty_cache_steps": "rows are packed to a token budget; lower max_tokens_per_microbatch instead",
    "torch_compile": "packed rows change shape every step; leave it off",
    "train_sampling_strategy": "tasks come from the task stream, in its order; leave it unset",
    "use_cache": "the sampler keeps keys and values by itself, and training needs none; remove it",
    "use_liger_kernel": "it replaces the model's forward, which computes the log-probs here; leave it off",
}
"""Fields of ``TrainingArguments`` that cannot act here, with the reason and the fix."""
