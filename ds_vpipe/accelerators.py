"""Accelerators of Hugging Face's Accelerate, and of its Trainer, in a script whose JSON asks for a pipeline.

They take every rank for a replica with data of its own. But they know ranks that share their data, those of tensor
parallelism, by their number in the DeepSpeed configuration: loaders, sizes of batches, lengths of schedules and scales
of losses follow from it. So it is the number of stages that Trainer is told there, for itself alone. Scripts with an
accelerator of their own count by ``num_processes``, which is the number of pipelines for them. What they gather, reduce
and split, which would be by rank, and steps of schedules, of which there would be one per rank, are set on the
accelerator.
Read in accelerate 1.15 and transformers 5.24, which offer no other way.
"""

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist

from ds_vpipe.after_init import after_init
from ds_vpipe.config.deepspeed_json import BLOCK, DeepSpeedJson
from ds_vpipe.errors import Refusal, VPipeConfigError
from ds_vpipe.requirements import refuse_others

_SHARING = "tensor_parallel"
_STAGES = "stages_of_a_pipeline"  # says in that part of the configuration whose ranks they are


@contextmanager
def accelerators_of_pipelines(stages_of: Callable[[Mapping[str, Any]], int]) -> Iterator[None]:
    """Context in which accelerators that are made know how many ranks are a pipeline.

    Args:
        stages_of: the number of stages by a DeepSpeed configuration with a ``"vpipe"`` block.
    """
    if importlib.util.find_spec("accelerate") is None:
        yield
        return
    from accelerate import Accelerator, PartialState

    def set_up(accelerator: Any) -> None:
        plugin = accelerator.state.deepspeed_plugin
        if plugin is None or BLOCK not in plugin.deepspeed_config:
            return
        _set_up(accelerator, plugin.deepspeed_config, stages_of(plugin.deepspeed_config))
        for module, kind, name, replacement in (
            ("transformers.integrations.deepspeed", "HfTrainerDeepSpeedConfig", "trainer_config_finalize", _finalize),
            ("transformers.trainer", "Trainer", "training_step", _with_losses_of_pipelines),
            ("transformers.trainer", "Trainer", "evaluation_loop", _evaluation_loop),
            ("transformers.trainer", "Trainer", "_maybe_log_save_evaluate", _with_losses_of_last_stages),
            ("transformers.trainer", "Trainer", "get_total_train_batch_size", _total_batch_size),
        ):
            found = getattr(sys.modules.get(module), kind, None)
            # Once, for the first of several accelerators.
            if found is not None and not isinstance(vars(found).get(name), functools.partialmethod):
                method = functools.partialmethod(replacement, getattr(found, name))
                of_trainer.enter_context(patch.object(found, name, method))

    slices = deepspeed.tp_model_init

    def whole(model: Any, *args: Any, **kwargs: Any) -> Any:
        return model if _STAGES in (kwargs.get("config") or {}).get(_SHARING, {}) else slices(model, *args, **kwargs)

    with (
        ExitStack() as of_trainer,
        after_init(PartialState, _count_ranks),
        after_init(Accelerator, set_up),
        patch.object(deepspeed, "tp_model_init", whole),
    ):
        yield


def stages_are_neighbours(ds_config: Mapping[str, Any]) -> bool:
    """Whether ranks of one pipeline have to follow each other, as those that share data do for an accelerator."""
    return _STAGES in ds_config.get(_SHARING, {})


def own_config(json: DeepSpeedJson, num_stages: int) -> tuple[DeepSpeedJson, bool]:
    """DeepSpeed configuration without the key for accelerators, and whether it was there.

    Raises:
        VPipeConfigError: an accelerator uses the engine, and does not know of its stages.
    """
    if stages_are_neighbours(json.content):
        return DeepSpeedJson({key: value for key, value in json.content.items() if key != _SHARING}), True
    state = sys.modules.get("accelerate.state")
    drives = state is not None and state.is_initialized() and state.AcceleratorState().deepspeed_plugin is not None
    if num_stages > 1 and drives:
        raise VPipeConfigError(
            f"initialize(): called by Accelerate or Trainer, which takes the {num_stages} ranks of a pipeline for "
            f"replicas; allowed is a script that ds_vpipe.run has started (deepspeed --module ds_vpipe.run train.py), "
            f"or a function within ds_vpipe.pipelines()"
        )
    return json, False


def _count_ranks(state: Any) -> None:
    """Number of processes of a ``PartialState``, from the process group.

    On CPUs each of Accelerate's ranks with DeepSpeed takes itself for the only one.
    """
    if state.backend is None and dist.is_initialized():
        state.backend, state.num_processes, state.process_index = "gloo", dist.get_world_size(), dist.get_rank()
        state.local_process_index = int(os.environ.get("LOCAL_RANK", "0"))


def _set_up(accelerator: Any, ds_config: dict[str, Any], stages: int) -> None:
    """Accelerator that counts pipelines of ``stages`` ranks where it counts replicas.

    Trainer goes by ``autotp_size``, scripts go by ``num_processes``, which is 1.
    """
    accelerator.unwrap_model = functools.partial(_script_model, accelerator.unwrap_model)
    ranks = accelerator.num_processes
    if stages == 1 or ranks % stages or (_SHARING in ds_config and not stages_are_neighbours(ds_config)):
        return  # the last two are refused where the pipeline is made
    sharing = ds_config.get(_SHARING, {}).get("autotp_size", stages)
    if sharing != stages:  # for scripts that deal out data by what the JSON says
        why = "the ranks of a pipeline share their data"
        raise Refusal(f"{_SHARING}.autotp_size", sharing, str(stages), f"write {stages}", why).error()
    if accelerator.dispatch_batches:
        raise VPipeConfigError(
            "dispatch_batches of the accelerator: got True, allowed with several stages is False, with which every "
            "rank reads by itself; write False"
        )
    accelerator.dataloader_config.dispatch_batches = False  # None deals streamed data out to stages
    accelerator.stages = stages
    accelerator.prepare = functools.partial(_prepare, accelerator.prepare)
    gather_once = functools.partial(_gather, accelerator.gather, ranks, stages)
    by_scripts = {_STAGES: True}
    of_trainer = hasattr(accelerator.state.deepspeed_plugin.hf_ds_config, "trainer_config_finalize")
    # By accelerate launch Trainer's configuration comes after its accelerator, which later ones are to be like.
    if of_trainer and ds_config.get(_SHARING) != by_scripts:
        # Trainer divides what it gathers by copies itself, such as numbers of labels. It does not make sure that they
        # are copies: workers of its loaders draw random numbers by rank, so that a collator may mask other labels.
        ds_config[_SHARING] = {"autotp_size": stages, _STAGES: True}
        accelerator.gather = functools.partial(gather_once, copies=stages)
    elif ranks > stages:
        raise VPipeConfigError(
            f"pipeline.stages: got {stages} for {ranks} ranks, allowed with Accelerate are as many stages as ranks, as "
            f"replicas are supported with TrainingArguments(deepspeed=...) only; give a Trainer the JSON as "
            f"--deepspeed ds.json and not by accelerate launch, start {stages} ranks, or change it"
        )
    else:
        # Scripts count by num_processes themselves, and may not divide it.
        ds_config[_SHARING] = by_scripts
        kind = type(accelerator)
        accelerator.__class__ = type(kind.__name__, (kind,), {"num_processes": property(lambda _: 1)})
        accelerator.prepare_scheduler = functools.partial(_prepare, accelerator.prepare_scheduler)
        accelerator.gather = gather_once
        accelerator.reduce = functools.partial(_reduce_once, accelerator, gather_once, accelerator.reduce)
        accelerator.split_between_processes = lambda inputs, apply_padding=False: nullcontext(inputs)
    accelerator.gather_for_metrics = functools.partial(
        _gather_for_metrics, accelerator, accelerator.gather_for_metrics, gather_once, stages
    )


def _finalize(config: Any, original: Any, args: Any, model: Any, *others: Any) -> None:
    """``trainer_config_finalize``, for arguments with which Trainer does what it should where ranks share data."""
    if stages_are_neighbours(config.config):
        refuse_others({"transformers": sys.modules["transformers"].__version__})
    calls_encoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    generates = [("predict_with_generate", [False], "generate() calls the encoder, of which a stage has a part")]
    for name, allowed, reason in (
        *(generates if calls_encoder and (args.do_eval or args.do_predict) else ()),
        ("average_tokens_across_devices", [True], "Trainer divides tokens that it has not gathered by the stages"),
        ("include_num_input_tokens_seen", ["no"], "Trainer adds the tokens of all stages up"),
        ("train_sampling_strategy", ["random", "sequential", "group_by_length"], "its sampler deals out to all ranks"),
        ("label_smoothing_factor", [0.0], "it needs logits in training, which only the last stage has"),
        ("auto_find_batch_size", [False], "the next attempt needs the whole model, of which ranks have kept a stage"),
    ):
        if (given := getattr(args, name, allowed[0])) not in allowed and stages_are_neighbours(config.config):
            words = f"{' or '.join(map(repr, allowed))} with several stages"
            raise Refusal(f"TrainingArguments({name})", given, words, "leave it out", reason).error()
    given = getattr(args, "generation_batch_size", None)
    if given is not None and stages_are_neighbours(config.config):
        why = "each rank would generate completions for prompts of its own, and a pipeline trains those of one"
        words, fix = "no generation in training, with several stages", "train without a pipeline"
        raise Refusal("generation_batch_size", given, words, fix, why).error()
    original(config, args, model, *others)


def _with_losses_of_pipelines(trainer: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
    """``Trainer.training_step``, or another method that computes losses, for trainers with a loss of their own."""
    if "stages" not in vars(trainer.accelerator):
        return original(trainer, *args, **kwargs)
    with patch.object(trainer, "compute_loss", functools.partial(_loss_of_pipelines, trainer, trainer.compute_loss)):
        return original(trainer, *args, **kwargs)


def _loss_of_pipelines(trainer: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
    """``Trainer.compute_loss``, for which there are as many processes as pipelines, and what they gather is there once.

    Trainer itself multiplies by ``num_processes // get_tp_size()``, trainers derived from it by the first alone.
    """
    accelerator = trainer.accelerator
    gather = functools.partial(accelerator.gather, copies=1)
    with (
        patch.object(accelerator, "gather", gather),
        patch.object(accelerator, "reduce", functools.partial(_reduce_once, accelerator, gather, accelerator.reduce)),
        patch.object(type(accelerator), "num_processes", accelerator.state.num_processes // accelerator.stages),
        patch.object(trainer, "get_tp_size", lambda: 1),
    ):
        return original(*args, **kwargs)


def _evaluation_loop(trainer: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
    """``Trainer.evaluation_loop``, which ``Seq2SeqTrainer`` has gather by the accelerator's ``gather``.

    It casts weights for ``bf16_full_eval``, and lets optimizers put others in their place, before it evaluates.
    """
    if (drain := getattr(trainer.model_wrapped, "drain", None)) is not None:
        drain("evaluation")
    if getattr(trainer.gather_function, "func", None) is _gather:
        trainer.gather_function = functools.partial(trainer.gather_function, copies=1)
    return _with_losses_of_pipelines(trainer, original, *args, **kwargs)


def _with_losses_of_last_stages(trainer: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
    """``Trainer._maybe_log_save_evaluate``, which logs the mean over all ranks of their losses since the last time.

    In asp only those of last stages are of the micro-batches since then. With other stages' it would add up shares of
    different batches: a micro-batch has that of its number of tokens.
    """
    if (stages := vars(trainer.accelerator).get("stages")) is None:
        return original(trainer, *args, **kwargs)
    module = sys.modules["transformers.trainer"]
    gather = module.nested_gather
    with patch.object(module, "nested_gather", lambda *args: gather(*args)[stages - 1 :: stages]):
        return original(trainer, *args, **kwargs)


def _total_batch_size(trainer: Any, original: Any, args: Any) -> Any:
    """``Trainer.get_total_train_batch_size``, which by ``accelerate launch`` finds no ranks that share data."""
    sharing = trainer.get_tp_size()
    return original(trainer, args) * sharing // vars(trainer.accelerator).get("stages", sharing)


def _script_model(original: Any, *args: Any, **kwargs: Any) -> Any:
    """``Accelerator.unwrap_model``, which is to find the model that the script has made."""
    model = original(*args, **kwargs)
    return getattr(model, "user_module", model)


def _gather(original: Any, ranks: int, stages: int, tensor: Any, copies: int = 1) -> Any:
    """``Accelerator.gather``, of the first stages alone: theirs are the data that are trained."""
    from accelerate.utils import recursively_apply

    def of_first_stages(gathered: torch.Tensor) -> torch.Tensor:
        return gathered.unflatten(0, (ranks, -1))[::stages].repeat_interleave(copies, 0).flatten(0, 1)

    return recursively_apply(of_first_stages, original(tensor))


def _gather_for_metrics(
    accelerator: Any, original: Any, gather: Any, stages: int, input_data: Any, use_gather_object: bool = False
) -> Any:
    """``Accelerator.gather_for_metrics``, of the first stages alone."""
    from accelerate import accelerator as module

    gather_object = module.gather_object

    def gather_objects(objects: Any) -> Any:
        return gather_object([] if accelerator.process_index % stages else objects)

    with patch.object(accelerator, "gather", gather), patch.object(module, "gather_object", gather_objects):
        return original(input_data, use_gather_object)


def _reduce_once(
    accelerator: Any, gather: Any, original: Any, tensor: Any, reduction: str = "sum", scale: float = 1.0
) -> Any:
    """``Accelerator.reduce``, of what first stages have, but for triggers, which any rank may set."""
    from accelerate.utils import recursively_apply

    def reduced(value: torch.Tensor) -> torch.Tensor:
        of_pipelines: torch.Tensor = gather(value[None])
        if reduction == "max":
            return of_pipelines.amax(0)
        total = of_pipelines.sum(0, dtype=value.dtype)
        return total / len(of_pipelines) if reduction == "mean" else total

    if tensor is accelerator.flag_tensor:
        return original(tensor, "sum", scale)
    return recursively_apply(reduced, tensor)


def _prepare(prepare: Any, *args: Any, **kwargs: Any) -> Any:
    """``Accelerator.prepare`` with learning rates that change once for every batch, and not once for every rank.

    Optimizers that put other weights in their place for an evaluation do so once all micro-batches are trained. In asp,
    where those of stages overflow at different batches, a schedule does not wait for them: it is alike on all ranks.
    """
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler

    prepared = prepare(*args, **kwargs)
    all_made = prepared if isinstance(prepared, tuple) else (prepared,)
    engines = [made for made in all_made if hasattr(made, "drain")]
    for made in all_made:
        if type(made) is AcceleratedScheduler:
            made.split_batches = True  # as a batch of one process, whose schedule steps once
        if engines and isinstance(made, AcceleratedOptimizer):
            made.eval = functools.partial(_drained, engines[0].drain, made.eval)
            made.__has_overflow__ &= engines[0].pipeline.synchronous
    return prepared


def _drained(drain: Callable[[str], None], original: Callable[[], None]) -> None:
    """``AcceleratedOptimizer.eval``, as of schedule-free ones, whose averages are to be of all that is trained."""
    drain("optimizer.eval()")
    original()
