"""The text of docs/compatibility.md, from the matrix and from the tests that hold the other features.

Run as a program it writes the page: ``python tests/support/compatibility.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matrix

from ds_vpipe.config import VPipeConfig
from ds_vpipe.config.deepspeed_json import DeepSpeedJson
from ds_vpipe.config.unsupported import refuse_unsupported
from ds_vpipe.errors import VPipeConfigError

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "compatibility.md"

_INTRODUCTION = f"""\
Every row stands for all combinations of its columns with gradient clipping ({", ".join(matrix.CLIPPING)}), word
embeddings tied across stages or not, recompute ratio {" or ".join(f"{ratio:g}" for ratio in matrix.RECOMPUTE)}, and M =
{" or ".join(str(m) for m in matrix.MICRO_BATCHES)} micro-batches per batch, on {matrix.STAGES} stages. Each is trained
for {matrix.BATCHES} updates with SGD and compared with an independent replay in one process (`reference.py`); the
figure is the largest deviation of a parameter, relative to the largest entry of its tensor. More stages, other
optimizers and 50 updates with ties are in `test_exactness.py`, `test_precision.py`, `test_clipping.py` and
`test_ties.py`. DeepSpeed refuses fp16 on CPUs where it is slow; the tests tell it otherwise."""

FEATURES: list[tuple[str, list[tuple[str, str, str]]]] = [
    (
        "Data and layers",
        [
            ("Tensors of every dtype, None, nested tuples and lists between stages; shapes that change",
             "as they are, without a flag", "test_boundary.py::test_training_equals_one_process"),
            ("Frozen layers, layers that are functions, stages with nothing to train", "as in one process",
             "test_boundary.py::test_training_equals_one_process"),
            ("Weights that are normalised, pruned, quantized or recurrent, hooks of layers and gradients within their "
             "forward pass; recomputed and swapped too", "equal to the replay, bit for bit",
             "test_layer_kinds.py::test_equal_to_the_replay"),
            ("A module of a `PipelineModule` that is in no layer, such as one that functions among the layers use",
             "trained and saved on the last stage; a gradient on an earlier one is refused",
             "test_resume_steady.py::test_parameters_outside_of_layers_are_trained_by_the_last_stage_alone"),
            ("Complex parameters with ZeRO-1, bf16, fp16 or replicas", "refused",
             "test_build.py::test_complex_parameters_are_refused_where_their_real_parts_alone_would_be_trained"),
            ("Parameters in float64 with ZeRO-1 or replicas, in fp32", "refused",
             "test_build.py::test_parameters_in_float64_are_refused_where_deepspeed_would_make_others_of_them"),
            ("`model_parameters`, or an optimizer, of a whole model that layers are built around",
             "those of other stages are left out", "test_repartition.py::test_parameters_follow_their_layers"),
            ("Parameters of functions among the layers, in no layer", "refused with their first gradient",
             "test_repartition.py::test_a_parameter_of_a_function_is_refused_with_its_first_gradient"),
            ("Parameters that a script adds to the optimizer after `initialize()`",
             "refused, except for frozen ones in fp32",
             "test_script_changes.py::test_parameters_that_a_script_adds_are_refused_and_unfrozen_ones_trained"),
            ("PEFT: LoRA, DoRA, VeRA, IA3, prompts, `modules_to_save`, with tied embeddings too",
             "trained as by the reference, saved as PEFT reads it; only adapters have versions",
             "test_peft.py::test_every_method_is_saved_as_peft_reads_it"),
            ("Adapters on linear layers of 4 and 8 bits (bitsandbytes)", "likewise",
             "test_peft.py::test_adapters_are_trained_saved_and_resumed"),
            ("Trainer with data sets that are streams, 2 stages x 2 replicas", "bsp as one process",
             "test_trainer.py::test_streamed_data"),
            ("Trainer in asp, 2 and 3 stages, 2 stages x 2 replicas, tied words, epochs that end inside a batch",
             "as the independent replay", "test_trainer.py::test_asynchronous_training_is_the_replay"),
            ("TensorBoard and W&B of Trainer, 2 stages x 2 replicas", "get each value once, from one rank",
             "test_trainer.py::test_replicas_beside_stages"),
            ("Adapters with Trainer; frozen embeddings tied over stages",
             "bsp as one process, resumed bit for bit", "test_trainer.py::test_adapters"),
            ("Classifiers with adapters and Trainer, a checkpoint in every epoch", "bsp as one process",
             "test_trainer.py::test_adapters_of_a_classifier"),
            ("Trainer with `batch_rebalance`, label smoothing or `auto_find_batch_size`", "refused",
             "test_trainer.py::test_what_the_trainer_does_wrong_is_refused"),
            ("Losses and metrics that a script makes of what the model returns beside its loss",
             "as the model's own; in asp alone, without tensors of the script",
             "test_other_outputs.py::test_a_loss_of_the_script"),
            ("Outputs that a script unpacks, or goes through by key; sums of several losses", "as without a pipeline",
             "test_other_outputs.py::test_outputs_one_after_the_other"),
            ("Likewise, with other keys, positions or places of None later on", "refused where the script goes by them",
             "test_other_outputs.py::test_losses_that_would_be_left_out_are_refused"),
            ("`checkpoint()` of torch or DeepSpeed around blocks, by the model itself",
             "bit-identical; each block is checkpointed by itself",
             "test_split_models.py::test_blocks_are_checkpointed_in_the_place_of_functions_with_them"),
            ("`checkpoint()` in blocks, with attributes that `forward` sets before each call", "as in one process",
             "test_split_models.py::test_what_is_checkpointed_runs_again_with_attributes_of_its_own_micro_batch"),
            ("Calls with other strings each time", "tried out a few times, then compared",
             "test_split_branches.py::test_calls_with_other_strings_each_time_are_tried_out_a_few_times"),
            ("TRL's `SFTTrainer`", "bsp as one process, asp as the independent replay",
             "test_trl.py::test_fine_tuning"),
            ("TRL's `DPOTrainer`", "bsp as one process; refused in asp", "test_trl.py::test_preferences"),
            ("`Seq2SeqTrainer`", "evaluates and predicts each sample once, as one process",
             "test_trainer.py::test_synchronous_training_is_that_of_one_process"),
            ("A whole model's engine made after a pipeline, such as that of a reference model",
             "evaluates; refused with an optimizer", "test_loop_engine.py::test_a_whole_model_beside_the_pipeline"),
            ("A `forward` that calls a collective of all ranks", "refused where its first call does",
             "test_split_refusals.py::test_collectives_of_all_ranks"),
            ("Other versions of DeepSpeed, torch before 2.11, Trainer before transformers 5.19", "refused",
             "test_requirements.py::test_every_way_in_refuses_them"),
            ("Adapters in the layers of a `PipelineModule`", "trained as by the reference",
             "test_peft.py::test_layers_with_adapters_in_a_pipeline_module"),
            ("AdaLoRA", "refused", "test_peft.py::test_adalora_is_refused_on_every_rank"),
            ("ZeRO-1 with `offload_optimizer`: replicas, ties, vertical sync, `staleness`, skipped updates",
             "bit-identical to ZeRO-1 without it", "test_offload.py::test_equal_to_an_optimizer_on_the_device"),
            ("Stages with nothing to train under ZeRO-1 and bf16", "a placeholder for their optimizer",
             "test_boundary.py::test_stages_with_nothing_to_train_under_zero_and_bf16"),
            ("`training_data`, `deepspeed_io`, shuffling samplers", "read ahead by the first stage, in order",
             "test_features.py::test_loaders_of_deepspeed_are_read_in_their_order"),
            ("Iterators that refill their buffers", "what was read is trained, also after a save",
             "test_buffers.py::test_refilled_buffers_are_fresh_tensors"),
            ("Data that end anywhere", "`StopIteration` on every rank together; complete batches are trained",
             "test_data_end.py::test_every_length"),
            ("Loaders that start over in another order", "labels stay those of their inputs",
             "test_data_end.py::test_inputs_keep_their_labels"),
            ("Labels that are others on the first stage than on the last", "a warning",
             "test_data_end.py::test_labels_that_differ_between_first_and_last_stage_are_warned_of"),
            ("`loss_fn` absent, losses of one element in any shape, `get_additional_losses()`",
             "mean over the batch and the replicas, on every rank",
             "test_features.py::test_losses_that_the_model_reports_or_returns"),
            ("`loss_fn` that returns several losses; `fwd_outputs`, `total_loss`", "the first is trained",
             "test_pipeline_loops.py::test_an_engine_of_the_script_with_several_losses_and_ranks_in_another_order"),
            ("`set_has_attention_mask()`, `has_bool_tensors`; `loss`, `fwd_outputs` after a batch",
             "as DeepSpeed: the last output of a stage becomes one of bools",
             "test_features.py::test_masks_become_bools_and_losses_can_be_read"),
            ("A forward of the script's, in a subclass or around the module's",
             "runs; refused with `recompute_ratio`, `swap_ratio`, `virtual_stages`, `replan`",
             "test_features.py::test_a_forward_of_the_script_runs"),
            ("Scripts that write into weights between two batches; in place, `load_state_dict()`, averages for an "
             "evaluation", "passes in flight keep what they have used; equal to the replay",
             "test_script_changes.py::test_equal_to_the_replay"),
            ("Likewise tied weights", "in an empty pipeline, else one line on every rank",
             "test_script_changes.py::test_tied_weights_stay_as_the_script_has_set_them"),
            ("Likewise buffers and frozen weights", "in an empty pipeline, else one line on every rank",
             "test_script_changes.py::test_what_has_no_versions_changes_in_an_empty_pipeline"),
            ("LAMB next to ZeRO-1 in asp with weights tied over stages", "refused on every rank",
             "test_ties.py::test_lamb_of_a_vector_with_copies_is_refused"),
            ("`TiedLayerSpec` on several stages, in one stage, several at once",
             "the first stage owns the weight; copies follow, d updates behind",
             "test_ties.py::test_tied_weights_against_the_replay"),
        ],
    ),
    (
        "Ranks",
        [
            ("Pipeline x data 2x2, 4x2, 2x4, ZeRO-0 and ZeRO-1", "replicas stay bit-identical",
             "test_exactness.py::test_replicas"),
            ("Topologies with axes in another order", "neighbours in a pipeline are neighbouring ranks",
             "test_pipeline_loops.py::test_an_engine_of_the_script_with_several_losses_and_ranks_in_another_order"),
            ("A tensor-parallel axis in the topology", "untouched",
             "test_exactness.py::test_slices_beside_stages_and_replicas"),
            ("Tensor slices of which one rank reads: None for an iterator, `set_batch_fn()`", "as each with its own",
             "test_buffers.py::test_one_rank_of_a_tensor_slice_reads"),
            ("Megatron-DeepSpeed's calls in 2 stages x 2 slices: `set_batch_fn()`, `set_dataloader()`, "
             "`set_train_batch_size()` and `reset_activation_shape()` before every batch, `eval_batch()`, "
             "`engine.grid`; words tied by name or by a list, a mask of bools between stages, a client's optimizer, "
             "schedule, loader and state", "equal to the replay; bsp bit-identical to DeepSpeed",
             "test_megatron.py::test_asp_is_the_replay"),
            ("`prescale_gradients`, `gradient_predivide_factor`, `communication_data_type`",
             "as DeepSpeed, which alone rounds to that type where there is one replica",
             "test_reduction.py::test_reduction_over_replicas_as_the_stock_engine"),
        ],
    ),
    (
        "Staleness",
        [
            ("`staleness`: delay_warmup_updates", "equal to the reference",
             "test_delay_warmup_engine.py::test_against_the_reference"),
            ("`staleness`: synchronous_updates", "equal to the reference, and to bsp without clipping",
             "test_delay_warmup_engine.py::test_against_the_reference"),
            ("`staleness`: nadam, alone and with the others", "equal to the replay",
             "test_staleness_engine.py::test_every_method_against_the_replay"),
            ("nadam with FusedAdam, bf16, ZeRO-1", "on the master weights",
             "test_staleness_engine.py::test_around_other_optimizers_and_wrappers"),
            ("`weight_sync: \"none\"`: K, M, depths, recomputation, bf16, autocast, clipping; ties; end of data",
             "equal to the replay, in fp32 bit for bit; one version in memory", "test_no_stash.py"),
            ("Optimizer SOAP: fp32 and bf16, stash and vertical; resume, another split", "equal to the replay",
             "test_soap_engine.py"),
            ("`staleness`: \"auto\", and without the key; resume within the synchronous updates and after them",
             "as the settings that a line at the start names, bit for bit",
             "test_staleness_engine.py::test_the_default_is_the_settings_that_it_names"),
            ("Without the key, with other optimizers, one stage, or M >= K-1", "as with \"off\", bit for bit",
             "test_staleness_engine.py::test_the_default_leaves_alone"),
            ("SGD with nadam", "refused",
             "test_staleness_engine.py::test_refused_on_every_rank"),
            ("Checkpoints", "going on after a save = going on from it, bit for bit",
             "test_staleness_engine.py::test_resumed_bit_for_bit"),
            ("Checkpoints of engines without it, and for them", "load",
             "test_staleness_engine.py::test_checkpoints_of_engines_without_it_and_for_them"),
        ],
    ),
    (
        "Moves of layers while training runs",
        [
            ("`replan`, `repartition()` in asp: replicas, ZeRO-1, bf16, fp16, autocast, clipping, `staleness`, "
             "recomputation, schedulers",
             "as after a save and a resume with the new split, bit for bit",
             "test_layer_moves.py::test_a_move_is_a_save_and_a_resume"),
            ("Likewise with weights tied between the first and the last layer", "likewise",
             "test_layer_moves.py::test_a_move_is_a_save_and_a_resume"),
            ("Likewise in bsp, and with vertical sync", "bit-identical to a run without moves that is emptied as often",
             "test_layer_moves.py::test_bsp_and_vertical_do_not_depend_on_moves"),
            ("Likewise with other ties, `virtual_stages`, `activation_checkpoint_interval`, `swap_ratio`", "refused",
             "test_balance.py::test_what_cannot_move_is_refused_at_start"),
            ("Pieces of plain modules, in asp", "equal to the replay of their splits",
             "test_piece_moves.py::test_asp_is_the_replay_of_its_splits"),
            ("Likewise in bsp, and with vertical sync: ties of both ends, buffers, recomputation, bf16 with ZeRO-1",
             "bit-identical to a run without moves that is emptied as often",
             "test_piece_moves.py::test_bsp_and_vertical_do_not_depend_on_moves"),
            ("Plain modules with `replan`", "balanced; in bsp bit-identical to a run without",
             "test_balance.py::test_plain_modules_balance_themselves"),
            ("Likewise with other shared weights, `memory_budget`", "refused",
             "test_balance.py::test_plain_modules_that_cannot_move_are_refused_at_start"),
            ("A resume with `replan`", "the checkpoint's split if the JSON's is unchanged, else the JSON's",
             "test_balance.py::test_a_resume_follows_the_checkpoint_where_the_json_asks_for_what_it_asked_for"),
            ("`replan` with `\"stage_to_depth_map\": \"auto\"`: depths that follow; resume",
             "equal to the replay with these depths, bit for bit; the checkpoint's depths within the limits",
             "test_depth_changes.py::test_depths_that_follow_are_exact_and_resumed"),
            ("A change of split or depths that fails on one rank", "all ranks end at once, with its reason",
             "test_depth_changes.py::test_a_change_of_depths_that_fails_on_one_rank_ends_all_with_its_reason"),
            ("Counts, rates and strings that layers keep as attributes", "go along with a layer that moves",
             "test_layer_moves.py::test_extra_state_and_settings_move"),
            ("A layer whose modules or hooks the script has changed", "`replan` leaves it where it is",
             "test_live_balance.py::test_a_layer_that_the_script_has_changed_stays"),
            ("Likewise, or with other parameters or buffers, in `repartition()`", "one line on every rank",
             "test_balance.py::test_a_layer_that_cannot_be_built_elsewhere_ends_all_ranks_with_one_line"),
            ("`replan` with `\"moves\": \"live\"`: fp32 on CPUs, SGD, Adam, AdamW, `LayerSpec`s without buffers; other "
             "cases move in an empty pipeline", "equal to the replay, with checkpoints, evaluation and data that end "
             "on the way; in bsp and with vertical sync bit-identical to a run without it",
             "test_live_balance.py::test_decisions_that_are_carried_out_live_are_exact"),
            ("Likewise, killed on the way", "resumed with the checkpoint's split, equal to the replay",
             "test_killed_moves.py::test_a_kill_while_layers_move_leaves_the_old_split_or_the_new_one"),
            ("`replan` and layers that are frozen while training runs", "balanced anew",
             "test_balance.py::test_layers_that_are_frozen_go_to_the_stage_with_more_of_them"),
            ("`move_layer()`, to a neighbouring stage", "equal to the replay",
             "test_live_moves.py::test_moves_with_stashing_against_the_replay"),
            ("`move_layer()` with vertical sync and in bsp", "bit-identical to a run without moves",
             "test_live_moves.py::test_with_one_version_everywhere_moves_change_nothing"),
            ("`move_layer()` with buffers, clipping, recomputation, flat buffers, replicas", "refused",
             "test_live_moves.py::test_what_cannot_move_is_refused_on_every_rank_in_one_line"),
        ],
    ),
    (
        "Evaluation and checkpoints",
        [
            ("`eval_batch()` between any two batches, any size or shape, `return_logits`, `num_micro_batches`, ...",
             "training afterwards is bit-identical",
             "test_evaluation.py::test_training_does_not_notice_and_results_are_one_process"),
            ("`eval_batch()` with ties", "with the owner's newest weights",
             "test_tied_details.py::test_evaluation_uses_the_owners_newest"),
            ("`save_checkpoint()`, `load_checkpoint()` between any two batches",
             "going on after a save = going on from it, bit for bit", "test_resume.py::test_ten_points"),
            ("Checkpoints with ties, ZeRO-1, fp16, vertical sync, delayed clipping", "likewise",
             "test_resume.py::test_other_settings"),
            ("A run killed while it saves", "the checkpoint before loads", "test_resume.py::test_killed_while_saving"),
            ("`ds_vpipe.run --restarts N`, under deepspeed and Slurm", "all ranks start again, resumed bit for bit",
             "test_chaos.py::test_few_events"),
            ("`recovery` and `engine.recover()`: asp, vertical and bsp; M, depths, dropout, buffers, ties, replicas, "
             "`synchronous_updates`, data that end; killed anywhere", "bit-identical to a run without a failure",
             "test_recovery.py::test_a_recovered_run_is_one_without_a_failure"),
            ("Likewise in bf16, in fp16 (dynamic loss scale, skipped updates) and with ZeRO-1, offload too",
             "likewise, with master weights and loss scale",
             "test_recovery.py::test_states_of_wrapped_optimizers"),
            ("Likewise without a supervisor, in loops, with `move_layer()`, `repartition()`", "refused",
             "test_recovery.py::test_what_is_not_recovered_is_refused"),
            ("Likewise with other sizes than those of the state", "a line, and no recovery: the checkpoint counts",
             "test_recovery.py::test_states_of_other_sizes_are_not_taken"),
            ("`--restarts` under torchrun", "refused: `--max-restarts` does the same",
             "test_restarts.py::test_refused"),
            ("Checkpoints from steady state, hysteresis 2, a loss function with parameters", "likewise",
             "test_resume_steady.py::test_every_setting"),
            ("A rank that cannot write or read its part", "one line on every rank; one may go on",
             "test_checkpoint_failures.py::test_all_ranks_raise_and_may_go_on"),
            ("Tags that name no folder of their own, `client_state` with the engine's keys", "refused",
             "test_checkpoint_failures.py::test_refused_saves_leave_everything"),
            ("Lost and empty files, states of another optimizer, `custom_load_fn`", "refused, and nothing is loaded",
             "test_checkpoint_failures.py::test_refused_loads_change_nothing"),
            ("`record` and `python -m ds_vpipe replay`: dropout, ties, replicas, ZeRO-1 and bf16, NAdam, SOAP, "
             "vertical sync, bsp, loops, moves of `replan`", "the state at any update is that of the run, bit for bit",
             "test_run_replay.py::test_the_state_at_any_update_is_that_of_the_run"),
            ("`replay --find nan`", "names micro-batch, stage, layer and version of planted faults",
             "test_run_replay.py::test_a_planted_fault_is_found"),
            ("Our checkpoints in DeepSpeed's engine (bf16: with ZeRO-1)", "load",
             "test_checkpoint.py::test_saved_in_flight_loads_everywhere"),
            ("Likewise with ties", "copies stay equal there",
             "test_tied_checkpoints.py::test_copies_stay_equal_in_the_stock_engine"),
            ("Checkpoints of DeepSpeed's engine (bf16: with ZeRO-1)", "load",
             "test_reshape.py::test_checkpoints_of_the_stock_engine"),
            ("Universal checkpoints (`checkpoint.load_universal`) with ZeRO-1; refused without",
             "load; of what layers of one `TiedLayerSpec` key do not share, DeepSpeed's converter leaves one stage's",
             "test_checkpoint.py::test_universal_checkpoints"),
            ("Resume with another partition, number of stages, recompute ratio",
             "weights and optimizer states follow the layers",
             "test_reshape.py::test_other_stages_splits_and_ratios_in_fp32"),
            ("Resume with other replicas or another precision wrapper", "likewise",
             "test_reshape.py::test_other_replicas_in_bf16_with_zero"),
            ("Resume between fp32, bf16 and fp16, with and without ZeRO-1, from half precision",
             "begins with the master weights",
             "test_reshape.py::test_another_precision_begins_with_the_master_weights"),
            ("Likewise bf16 with ZeRO-1 and `grad_accum_dtype` fp32", "likewise",
             "test_reshape.py::test_partitions_that_are_saved_with_their_padding"),
            ("Resume of fp16 with ZeRO-1 switched on or off", "the dynamic loss scale goes on",
             "test_reshape.py::test_the_loss_scale_goes_on_with_and_without_zero"),
            ("Resume with weights only (`load_optimizer_states=False`)", "master weights are made from them",
             "test_resume_steady.py::test_weights_only"),
            ("Export to one state dict or safetensors", "`python -m ds_vpipe.export`",
             "test_export.py::test_export_has_the_trained_weights"),
            ("`set_train_batch_size()`", "between any two batches",
             "test_resume.py::test_batch_size_changes_between_batches"),
            ("`set_depths()`: K=3, 4, M=1, 2; every `weight_sync`, recomputation, AdamW, gloo, `delayed_global`, ties, "
             "fp16, `staleness`", "equal to the replay, with SGD in fp32 bit for bit",
             "test_depth_changes.py::test_equal_to_the_replay"),
            ("`set_depths()` at the end of data, beside evaluations and saves; resume; scripts that loop", "likewise",
             "test_depth_changes.py::test_at_the_end_of_data_beside_evaluation_and_saves"),
            ("`set_depths()` in bsp; with a stage that begins or ceases to be late and `staleness`; further apart than "
             "shared memory has room for", "refused",
             "test_depth_changes.py::test_what_does_not_fit_is_refused_on_every_rank"),
        ],
    ),
    (
        "Everything around",
        [
            ("Functions that a launcher calls on every rank, in any thread, within `ds_vpipe.pipelines()`",
             "train as scripts under `ds_vpipe.run`; an error ends all ranks",
             "test_functions.py::test_what_is_in_flight_at_the_end_is_trained"),
            ("`link` \"shared\", on a simulated accelerator too, \"ipc\" and \"nccl\" there: ties, every dtype, "
             "evaluation, saves, data end", "bit for bit as \"host\"",
             "test_payloads.py::test_evaluations_saves_and_the_end_of_the_data"),
            ("`\"link\": \"nccl\"` on the CPU, without NCCL, on one GPU, with fewer than 32 queues of it",
             "refused on every rank", "test_nccl_link.py::test_one_rank_that_cannot_is_named_on_all"),
            ("`\"link\": \"ipc\"` on the CPU, between hosts, with an accelerator whose memory torch does not share",
             "refused on every rank", "test_nccl_link.py::test_memory_that_cannot_be_shared_between_processes"),
            ("Learning-rate schedules of the JSON, client schedulers, `get_lr`, `global_steps`, `global_samples`",
             "once per update of each stage",
             "test_features.py::test_learning_rates_step_once_per_update_at_every_stage"),
            ("`_configure_optimizer()` after `initialize()`, `engine.lr_scheduler = ...`", "as given to `initialize()`",
             "test_pipeline_loops.py::test_optimizer_after_initialize_and_batches_read_before"),
            ("Classes derived from `VPipeEngine` with a `train_batch()` and `eval_batch()` of their own",
             "run DeepSpeed's schedules by name",
             "test_pipeline_loops.py::test_an_engine_of_the_script_with_several_losses_and_ranks_in_another_order"),
            ("GPT-NeoX's `generate.py`: arguments that compute the configuration, an optimizer of one parameter, "
             "weights alone from a checkpoint, one micro-batch of another shape in every "
             "`eval_batch(return_logits=True)`",
             "bit-identical to DeepSpeed",
             "test_pipeline_loops.py::test_a_pipeline_generates_text_as_deepspeeds"),
            ("`generate()` of a plain model that is split here, by every rank, with `use_cache=False`",
             "the tokens of the whole model; refused with a cache",
             "test_split_module.py::test_a_split_model_generates_as_the_whole_one"),
            ("Own schedules, and own methods in `_INSTRUCTION_MAP` for DeepSpeed's instructions", "refused",
             "test_pipeline_loops.py::test_what_is_not_carried_out_is_refused"),
            ("`steps_per_print`", "as DeepSpeed, and a line of statistics",
             "test_reporting.py::test_steps_are_printed_by_rank_0"),
            ("stages whose passes take longer than before, beside others", "named in a line, on CPUs",
             "test_statistics.py::test_who_waits_for_a_slow_stage_and_which_has_become_slow"),
            ("CSV, TensorBoard and W&B monitors", "losses, rates, scale, and each stage's statistics",
             "test_reporting.py::test_monitors_get_losses_rates_and_statistics"),
            ("`wall_clock_breakdown`", "DeepSpeed's timers on every stage",
             "test_reporting.py::test_wall_clock_breakdown_has_every_stage"),
            ("`flops_profiler`", "the first stage's forward pass",
             "test_reporting.py::test_flops_profile_is_of_the_first_stage"),
            ("`comms_logger`", "messages between stages as `isend` and `recv`",
             "test_reporting.py::test_communication_log_has_the_messages"),
            ("All of these at once", "change no bit of training", "test_reporting.py::test_telling_changes_nothing"),
            ("All of these with ties, fp16 and delayed clipping", "likewise",
             "test_tied_details.py::test_everything_tells_of_tied_weights"),
            ("`activation_checkpointing` block, `activation_checkpoint_interval`", "non-reentrant in asp",
             "test_activation_checkpointing.py::test_activation_checkpointing_keeps_versions_and_dropout"),
            ("`recompute_ratio` with draws of Python, NumPy, DeepSpeed's or Megatron's tracker",
             "those of the forward pass",
             "test_recompute.py::test_draws_that_torch_does_not_know_are_repeated"),
            ("`recompute_ratio` with draws from elsewhere", "refused, unless registered",
             "test_recompute.py::test_draws_of_an_unknown_tracker_are_refused"),
            ("`recompute_ratio` with statistics and counters in buffers and numbers of layers", "changed once",
             "test_recompute.py::test_layers_remember_every_micro_batch_once"),
            ("`recompute_ratio` with a branch that goes another way", "refused",
             "test_recompute.py::test_layers_that_take_another_way_are_refused_in_one_line"),
            ("`recompute_ratio`, `activation_checkpoint_interval` with a saved tensor that is changed in place",
             "autograd's error, as without",
             "test_recompute.py::test_what_autograd_refuses_it_refuses_in_recomputed_layers"),
            ("`recompute_ratio`, in asp `activation_checkpoint_interval`, with numbers and modes that a script changes",
             "those of the forward pass",
             "test_script_changes.py::test_layers_that_run_again_find_the_numbers_of_their_forward_pass"),
            ("`recompute_ratio` with weights that are frozen while training runs", "bit-identical to a run without",
             "test_script_changes.py::test_layers_that_run_again_are_trained_as_in_their_forward_pass"),
            ("`swap_ratio`, beside `recompute_ratio`, in asp and bsp, with ties, bf16 and ZeRO-1, virtual stages",
             "bit-identical to a run without",
             "test_swap_exactness.py::test_shares_and_recomputation"),
            ("Plain models that keep values outside their blocks for the next call",
             "equal to the whole model; refused where an earlier piece reads them",
             "test_kept_state.py::test_what_a_later_piece_keeps_for_an_earlier_one_is_refused"),
            ("`swap_ratio` with a plain Hugging Face model", "bit-identical to a run without",
             "test_swap_exactness.py::test_a_plain_model_that_is_split"),
            ("`swap_ratio` with a saved tensor that is changed in place", "autograd's error, as without",
             "test_swap.py::test_a_change_in_place_is_the_error_that_it_is_without_a_swap"),
            ("Parameters without dimensions or with elements in another order, which DeepSpeed cannot broadcast",
             "train", "test_precision.py::test_parameters_that_deepspeed_cannot_send"),
            ("`data_types.grad_accum_dtype` fp32 with bf16 and ZeRO-1", "bsp bit-identical to DeepSpeed, resume "
             "bit-identical", "test_fp32_accumulation.py::test_stock_engine_stashing_and_resume"),
            ("`data_types.grad_accum_dtype` fp32 in asp with tied layers: 4 stages, 2 stages x 2 replicas",
             "replay's bits, resume bit-identical", "test_fp32_accumulation.py::test_ties_in_asp"),
            ("`partition` and an optimizer or parameter groups that the script has built before, with ties and slices",
             "as with a module built with that split", "test_repartition.py::test_parameters_follow_their_layers"),
            ("`schedule` gpipe (bsp)", "bit-identical to DeepSpeed's 1F1B",
             "test_stock.py::test_gpipe_is_the_stock_engine"),
            ("`schedule` interleaved (bsp): training, evaluation, replicas, ZeRO-1, ties, data ends",
             "bit-identical to one part per stage",
             "test_interleaved_engine.py::test_equal_to_one_part_per_stage"),
            ("Checkpoints with interleaved, from and into one part per stage", "weights and states follow the layers",
             "test_interleaved_engine.py::test_checkpoints"),
            ("`timeline`", "what every rank did, in the order of its program",
             "test_recorder.py::test_a_recording_is_the_program"),
            ("`engine.compile()`", "bit-identical to not compiled (backends eager, aot_eager); inductor up to rounding",
             "test_features.py::test_a_compiled_module_keeps_its_versions"),
            ("`engine.compile()`, `block.compile()` of a plain model that is split here",
             "blocks are compiled, each by itself, except those of which the model keeps a value besides what they "
             "return; training bit-identical to not compiled (backend eager)",
             "test_loop_habits.py::test_blocks_are_compiled_and_the_interpreter_is_not"),
            ("`model.compile()` of a whole model that is split here", "nothing is compiled, with a warning",
             "test_loop_habits.py::test_blocks_are_compiled_and_the_interpreter_is_not"),
            ("`fp16.auto_cast` with a plain model that is split here", "as with DeepSpeed's engine, bit for bit in bsp",
             "test_loop_habits.py::test_deepspeed_casts_what_the_script_hands_in_and_nothing_between_stages"),
            ("`deepspeed.PipelineEngine = VPipeEngine`", "synchronous, unless the JSON has a `vpipe` block",
             "test_direct.py::test_engine_in_the_place_of_deepspeeds"),
        ],
    ),
]  # fmt: skip

REFUSED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"zero_optimization": {"stage": 1, "offload_param": {"device": "nvme"}}}, {}),
    ({"zero_optimization": {"zenflow": {}}}, {}),
    ({"zero_optimization": {"stage": 1, "elastic_checkpoint": True}}, {}),
    ({"zero_optimization": {"stage": 1}, "optimizer": {"type": "SOAP"}}, {}),
    ({"optimizer": {"type": "Muon"}}, {}),
    ({"optimizer": {"type": "Adam", "params": {"amsgrad": True}}}, {}),
    ({"amp": {"enabled": True}}, {}),
    ({"fp16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, {}),
    ({"expert_parallel": {"enabled": True}}, {}),
    ({"data_efficiency": {"enabled": True}}, {}),
    ({"data_efficiency": {"data_routing": {"random_ltd": {"enabled": True}}}}, {"sync_mode": "bsp"}),
    ({"curriculum_learning": {"enabled": True}}, {}),
    ({"elasticity": {"enabled": True}}, {}),
    ({"autotuning": {"enabled": True}}, {}),
    ({"hybrid_engine": {"enabled": True}}, {}),
    ({"tensor_parallel": {"autotp_size": 2}}, {}),
    ({"sequence_parallel_size": 2}, {}),
    ({"wall_clock_breakdown": True}, {}),
    ({"activation_checkpointing": {"contiguous_memory_optimization": True}}, {}),
    ({"pipeline": {"pipe_partitioned": True}}, {}),
    ({"pipeline": {"activation_checkpoint_interval": 1}}, {"recompute_ratio": 0.5}),
    ({"pipeline": {"activation_checkpoint_interval": 1}}, {"swap_ratio": 0.5}),
    ({"pipeline": {"activation_checkpoint_interval": 1}}, {"partition": "profile", "profile": "profile.json"}),
    (
        {"pipeline": {"activation_checkpoint_interval": 1}},
        {"sync_mode": "bsp", "schedule": "interleaved", "virtual_stages": 2},
    ),
    ({"checkpoint": {"writer": {"decoupled": True}}}, {}),
    ({"checkpoint": {"use_node_local_storage": True}}, {}),
    ({"datastates_ckpt": {}}, {}),
    ({"managed_gradient_accumulation": False}, {}),
]
"""DeepSpeed JSON and ``"vpipe"`` block for each cause."""

TESTED = [
    ("parameters of every stage against the oracle: 1, 2 and 4 stages, M in {1, 2, 4, 8}, SGD (bit for bit), AdamW and "
     "FusedAdam (1e-5), recompute ratios, stash and vertical, default and doubled depth, replicas; the comparison is "
     "shown to notice a backward pass with the newest weights", "exactness"),
    ("the 480 combinations of the first table", "matrix"),
    ("resuming at ten points of a run, with dropout, bit for bit; a run killed while it saves", "resume"),
    ("`bsp` in all three schedules, and one stage in `asp`: DeepSpeed's engine bit for bit", "stock or interleaved"),
    ("data that end anywhere, for depths that fall by more than one too; iterators that refill their buffers",
     "data_end or buffers"),
    ("failing, killed and hanging ranks, with replicas; locks and shared memory that killed runs leave",
     "failures or abort or builds"),
    ("three scripts that know nothing of pipelines, under DeepSpeed alone and on 2 and 4 stages; the model that each "
     "writes is read back whole", "plain_scripts or whole_state"),
    ("scripts with Trainer (transformers 5.24) and Accelerate 1.15 on 2 stages against the same as one process: masked "
     "and causal language models, classification, accumulation, schedules, metrics, predictions, the saved model; "
     "a loop with Megatron-DeepSpeed's calls", "clients"),
    ("architectures of Hugging Face's library in 2 and 4 stages against the whole model: a sample of "
     "[the zoo](data/zoo.md)", "zoo"),
    ("commands, tables, links and numbers of these documents", "documents or model_docs or benchmarks"),
]  # fmt: skip
"""What the tests hold, and the name that selects them."""

REPAIRED = [
    ("ZeRO-1 with replicas, a weight that one of them does not use", "gets gradients of other weights, or ranks wait",
     "its gradient is 0 there", "test_reduction.py::test_replicas_that_use_other_weights"),
    ("`ignore_unused_parameters: false` with `offload_optimizer`, frozen weights",
     "fails in its assertion", "not looked at: unused weights have zeros",
     "test_offload.py::test_weights_that_are_frozen_later"),
    ("ZeRO-1 with `offload_optimizer`, a weight that a batch does not use, or that was frozen",
     "the gradient of an earlier batch once more",
     "none", "test_offload.py::test_equal_to_an_optimizer_on_the_device"),
    ("`backward(loss, scale_wrt_gas=False)` of a plain model, with the very tensor that `engine(...)` returned",
     "divides its gradients by the accumulation steps all the same", "does not",
     "test_loop_engine.py::test_scale_wrt_gas_counts_for_any_loss"),
    ("fp16 without ZeRO", "the loss is never scaled, gradients are unscaled", "scaled",
     "test_matrix.py::test_equal_to_the_replay"),
    ("fp16, update in which the scale grows", "gradients are divided by the new scale",
     "divided by the one they were made with", "test_precision.py::test_fp16_with_dynamic_loss_scale"),
    ("fp16 and bf16 without ZeRO, start", "one update with zero gradients: weight decay, Adam's step count",
     "no such update", "test_precision.py::test_bf16"),
    ("bf16 without ZeRO", "checkpoints do not load", "they load", "test_resume.py::test_other_settings"),
    ("any end of a run on one host's CPUs", "69 MB per rank stay in `/dev/shm`", "nothing",
     "test_reduction_buffers.py::test_a_killed_run_with_replicas"),
    ("all-reduces on CPUs where `/dev/shm` has less room, as in containers", "ranks end by a segmentation fault",
     "gloo reduces, or one line", "test_reduction_buffers.py::test_buffers_that_do_not_fit"),
    ("a build of an operator that was killed, up to torch 2.13", "later starts wait for its lock for ever, in silence",
     "they take it over, or name it", "test_extension_builds.py::test_torch_builds_with_such_a_lock"),
    ("fp32 gradient clipping", "by the first stage's norm only", "by the whole model's",
     "test_clipping.py::test_whole_model_in_bsp"),
    ("gradient clipping with ties, optimizers that DeepSpeed does not fuse", "a tied weight counts once per stage",
     "once", "test_tied_details.py::test_bsp_clips_by_the_norm_of_the_whole_model"),
    ("`load_optimizer_states=False`, bf16 and fp16 without ZeRO", "the first update restores the old weights",
     "it does not", "test_resume_steady.py::test_weights_only"),
    ("a loss function with parameters", "not in checkpoints", "in them",
     "test_resume_steady.py::test_parameters_outside_of_layers"),
    ("what layers of one `TiedLayerSpec` key do not share, in a layer with `forward_fn`", "not in checkpoints",
     "comes back at a resume", "test_megatron.py::test_a_resume_with_the_scripts_own_loader_is_going_on"),
    ("a folder of checkpoints with brackets in its name, such as `lr=[0.1]`", "saves what it cannot load", "loads it",
     "test_checkpoint.py::test_saved_in_flight_loads_everywhere"),
    ("`elastic_checkpoint`, `use_node_local_storage` with several stages", "save what cannot be loaded",
     "refused at start", "test_config.py::test_unsupported_deepspeed_settings"),
    ("`wall_clock_breakdown`, flops profiler, two or more stages", "raise", "work",
     "test_reporting.py::test_wall_clock_breakdown_has_every_stage"),
    ("`set_train_batch_size()` of a whole model, after another number of micro-batches",
     "the next batch has too few or too many, unless their count is a multiple of the new number", "it has that number",
     "test_loop_habits.py::test_what_a_script_may_ask_and_set"),
    ("inputs of floats that layers hand on, such as a mask", "raise in the backward pass", "are handed on",
     "test_features.py::test_inputs_of_floats_may_be_handed_on"),
    ("layers that checkpoint a function themselves and give it values as attributes, without an interval",
     "it runs again with a later micro-batch's", "with its own",
     "test_recompute.py::test_what_layers_checkpoint_themselves_finds_what_belongs_to_its_micro_batch"),
    ("`activation_checkpoint_interval`, integer inputs", "gradients are lost", "they are not",
     "test_direct.py::test_checkpointing_by_interval_loses_no_gradient_of_integers"),
    ("`activation_checkpoint_interval` or `deepspeed.checkpointing.checkpoint` in a layer, with `torch_autocast`",
     "run again in fp32, or raise", "run again as the first time",
     "test_activation_checkpointing.py::test_checkpointed_layers_cast_the_same_twice"),
    ("`partition_method` profile, best", "raise", '`"partition": "profile"` plans the split from a profile',
     "test_configured_plan.py::test_an_engine_runs_by_the_plan"),
]  # fmt: skip


def _row(*texts: object) -> str:
    return "| " + " | ".join(str(text) for text in texts) + " |"


def _matrix() -> Iterator[str]:
    """A row per precision, and one per cause of a refusal."""
    yield _row("precision", "ZeRO", "replicas", "combinations", "result")
    yield _row(*["---"] * 5)
    refused: dict[str, list[matrix.Cell]] = {}
    for precision in matrix.PRECISIONS:
        cells = [cell for row in matrix.rows() if row[0] == precision for cell in matrix.cells(*row)]
        trained = [cell for cell in cells if cell.refusal() is None]
        if trained:
            yield _row(*_axes(trained), f"equal to the replay, within {matrix.TOLERANCES[precision]:g}")
        for cell in cells:
            if line := cell.refusal():
                refused.setdefault(line.split("; ")[1], []).append(cell)  # the reason
    for found in refused.values():
        yield _row(*_axes(found), f"refused: `{found[0].refusal()}`")


def _axes(cells: Sequence[matrix.Cell]) -> tuple[str, str, str, int]:
    """Precisions, ZeRO stages and replicas that are among the combinations, and how many these are."""
    precisions = list(dict.fromkeys(cell.precision for cell in cells))
    every = len(precisions) == len(matrix.PRECISIONS)
    zero, replicas = ({getattr(cell, name) for cell in cells} for name in ("zero", "replicas"))
    numbers = (" and ".join(map(str, sorted(values))) for values in (zero, replicas))
    return "every" if every else ", ".join(precisions), *numbers, len(cells)


def _refused() -> Iterator[str]:
    yield _row("in the JSON", "line")
    yield _row(*["---"] * 2)
    for ds_config, block in REFUSED:
        try:
            refuse_unsupported(DeepSpeedJson(ds_config), VPipeConfig.parse(block), matrix.STAGES)
        except VPipeConfigError as error:
            shown = json.dumps({**ds_config, **({"vpipe": block} if block else {})})[1:-1]
            yield _row(f"`{shown}`", f"`{error}`")
        else:
            raise AssertionError(f"{ds_config} is not refused")


def _sections() -> str:
    return ", ".join(f"[{title.lower()}](#{title.lower().replace(' ', '-')})" for title, _ in FEATURES)


def page() -> str:
    """The page."""
    lines = [
        "# Compatibility",
        "",
        "Written by `python tests/support/compatibility.py` from the data that the tests run.",
        "",
        f"On this page: [refused at start](#refused-at-start), {_sections()}, and "
        "[what is broken in DeepSpeed](#what-is-broken-in-deepspeed-0198-and-not-here).",
        "",
        "## Precision x ZeRO x replicas x clipping x ties x recompute x M, asynchronous",
        "",
        _INTRODUCTION,
        "",
        *_matrix(),
        "",
        "## How it is tested",
        "",
        "`scripts/test.sh -k NAME` runs the tests of a row, `scripts/multinode_test.sh` two hosts on this machine.",
        "",
        _row("what", "NAME"),
        _row(*["---"] * 2),
        *(_row(what, f"`{name}`") for what, name in TESTED),
        "",
        "## Refused at start",
        "",
        "On every rank, before anything is built. With several of them the line counts the others.",
        "",
        *_refused(),
        "",
        "## Features of DeepSpeed's pipeline engine",
        "",
        "In `asp`. In `bsp` parameters and losses equal DeepSpeed's engine bit for bit (`test_stock.py`), except for "
        "what it gets wrong (below), and up to rounding where a stage has several outputs with gradients, for "
        "each of which DeepSpeed makes a backward pass, and with `nn.Embedding(sparse=True)` and one replica. What "
        "an evaluation draws at random, as a loader that starts over does, is put back, and not in DeepSpeed's. With "
        "several outputs that have gradients an `activation_checkpoint_func` of the script that does not restore "
        "random states also draws more often in DeepSpeed's engine, as every backward pass runs its blocks again.",
    ]
    for title, features in FEATURES:
        lines += ["", f"### {title}", "", _row("feature", "meaning", "test"), _row(*["---"] * 3)]
        lines += [_row(feature, meaning, f"`{test}`") for feature, meaning, test in features]
    lines += ["", "## What is broken in DeepSpeed 0.19.8 and not here", ""]
    lines += [_row("where", "DeepSpeed", "ds_vpipe", "test"), _row(*["---"] * 4)]
    lines += [_row(where, theirs, ours, f"`{test}`") for where, theirs, ours, test in REPAIRED]
    return "\n".join(lines) + "\n"


def tests_named() -> list[str]:
    """Every test that the page names, as ``file::function`` or ``file``."""
    return [test for _, features in FEATURES for *_, test in features] + [test for *_, test in REPAIRED]


if __name__ == "__main__":
    PAGE.write_text(page())
