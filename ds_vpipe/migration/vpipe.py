"""A vPipe or PipeDream run in DeepSpeed's terms: JSON, hostfile, command, and remarks on what differs.

What vPipe does is taken from its code: apex's FusedLAMB with its defaults for what the YAML cannot say, and the
defaults of its training script for what the YAML does not.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from ds_vpipe.config import VPipeConfig
from ds_vpipe.errors import Refusal, read_json, show
from ds_vpipe.migration.vpipe_files import FIELDS, StageMaps, VPipeFile

MODEL_OF_LAYERS = {49: "large", 97: "large-48l"}
"""Sizes of this project's BERT that have as many layers as vPipe's models."""

LAYERS_OF_MODEL = {"tiny": 9, "mini": 9, "base": 25, **{name: count for count, name in MODEL_OF_LAYERS.items()}}
"""Layers of all sizes of this project's BERT."""

LOCAL = ("localhost", "127.0.0.1")
BSP_MICRO_BATCHES = 32
MACROBATCH_VERSIONS = 2
TOTAL_STEPS = 36320  # updates of the schedule that vPipe's BERT always trains with, whatever the YAML says; in its code
WARMUP_STEPS = TOTAL_STEPS // 5

_SCRIPT = Path("models/bert/train.py")
# What vPipe and PipeDream train each type of model with; apex's FusedLAMB also clips at norm 1.
_OPTIMIZERS: dict[str, tuple[str, dict[str, Any], float]] = {
    "bert": ("Lamb", {"betas": [0.9, 0.999], "eps": 1e-6}, 1.0),
    "translation": ("Adam", {"betas": [0.9, 0.999], "adam_w_mode": False}, 0.0),
    "image_classification": ("SGD", {"momentum": 0.9}, 0.0),
}
_WARMUP = {"warmup_num_steps": WARMUP_STEPS}
_ENDING = {"total_num_steps": TOTAL_STEPS, **_WARMUP}
_BERT_POLICIES: dict[str, dict[str, Any]] = {
    "polynomial": {"type": "PolyWarmupLR", "params": {**_ENDING, "degree": 0.5}},
    "linear": {"type": "LinearWarmupLR", "params": _ENDING},
    "cosine": {"type": "CosineWarmupLR", "params": _ENDING},
    "constant": {"type": "ConstantWarmupLR", "params": _WARMUP},
}
_EPOCH_POLICIES = {
    "step": '{"type": "StepWarmupLR", "params": {"step_size": UPDATES OF 30 EPOCHS, "gamma": 0.1}}',
    "polynomial": '{"type": "PolyWarmupLR", "params": {"total_num_steps": UPDATES OF ALL EPOCHS, "degree": 2}}',
    "exponential_decay": '{"type": "StepWarmupLR", "params": {"step_size": UPDATES OF ONE EPOCH, "gamma": 0.97}}',
}
Row = tuple[Any, ...]
"""Whether a remark holds, its field, new setting and reason, and its value if it is not the YAML's."""


@dataclass(frozen=True)
class Remark:
    """One field that means something else here, or nothing."""

    field: str  # with the file's name where it is not the YAML
    value: str  # as JSON where it can be, or "absent"
    becomes: str  # the new setting; empty if there is none
    why: str  # the difference, or what to do instead

    def __str__(self) -> str:
        return " ".join(f"{self.field} {self.value} -> {self.becomes or 'nothing'}; {self.why}".split())


class Hosts(dict[str, tuple[int, ...]]):
    """Devices of every host, hosts in the order of their first rank, devices in the order of their numbers.

    This is the order in which DeepSpeed's launcher numbers ranks; vPipe's driver did the same.
    """

    @classmethod
    def of(cls, machines: list[str]) -> Hosts:
        """Collect vPipe's ``HOST:GPU`` per rank."""
        pairs = [machine.split(":") for machine in machines]
        return cls({host: tuple(sorted(int(gpu) for name, gpu in pairs if name == host)) for host, _ in pairs})

    @property
    def first_devices(self) -> bool:
        """Whether every host's devices are numbered from 0 without a gap."""
        return all(gpus == tuple(range(len(gpus))) for gpus in self.values())

    def hostfile(self) -> str:
        """DeepSpeed's hostfile: a line ``HOST slots=N`` per host, N large enough for the highest device."""
        return "".join(f"{host} slots={max(gpus) + 1}\n" for host, gpus in self.items())

    def include(self) -> str:
        """The value of the launcher's ``--include``: ``HOST:GPU,GPU@HOST:GPU``."""
        return "@".join(f"{host}:{','.join(map(str, gpus))}" for host, gpus in self.items())


def _layers_in(path: str) -> int:
    """Pipeline layers of the BERT in a file."""
    sizes, allowed = ", ".join(LAYERS_OF_MODEL), "a JSON file with the fields of BertConfig"
    fields = read_json(path, "--bert-config", f"{sizes}, or {allowed}", "correct the name")
    count = fields.get("num_hidden_layers")
    if type(count) is not int or count < 1:
        raise Refusal(f"num_hidden_layers in {path}", count, "an int >= 1", "correct it").error()
    return 2 * count + 1


class Conversion:
    """A converted run.

    Args:
        file: the YAML.
        split: its partition file, if it names one.
        maps: its ``config_file``, if it names one. One of the two is needed.
        output: folder for the converted files.
        root: folder in which vPipe's driver was started; None if it is to be looked for.
        model: size or JSON file of the BERT; default: the size with as many layers as ``split`` has.

    Raises:
        VPipeConfigError: the files contradict each other.
    """

    def __init__(
        self,
        file: VPipeFile,
        split: VPipeConfig | None,
        maps: StageMaps | None,
        output: Path,
        root: Path | None = None,
        model: str | None = None,
    ) -> None:
        self._file, self._maps, self._output = file, maps, output
        self._layers = list(split.partition) if split and isinstance(split.partition, tuple) else None
        self.num_stages = len(self._layers or (maps.modules if maps else ()))  # the other ranks are replicas
        self._replicas = self._check_ranks()
        self._bsp, self._bert = file.sync_mode == "bsp", file.model_type == "bert"
        self._alone = file.no_input_pipelining and not self._bsp
        self._asp = not self._bsp and not self._alone
        self._ahead = maps.depth[0] if maps and maps.depth else self.num_stages - 1
        self._batches = self._micro_batches()
        self._given_ratios = self._ratios(split, "recompute_ratio")
        self._swap_ratios = self._ratios(split, "swap_ratio")
        self._scheduler = self._find_scheduler()
        self.hosts = Hosts.of(file.machines)
        self._model = self._find_model(model) if self._bert else ""
        folders = list(file.folders(root))
        home = next((folder for folder in folders if folder.is_dir()), folders[0])
        tried = [folder / str(file.data_dir) for folder in folders]
        self._data = next((path for path in tried if path.is_dir()), home / str(file.data_dir))
        self._runs = home / (file.log_directory or "runs") / file.path.stem
        self.ds_config = self._json()
        self.command = self._command()
        rows = chain(self._training_rows(), self._start_rows())
        self.remarks = [self._remark(*row) for holds, *row in rows if holds]

    def _remark(self, field: str, becomes: str, why: str, *value: object) -> Remark:
        written = value[0] if value else self._file.given.get(field)
        return Remark(field, "absent" if written is None else show(written), becomes, why)

    def _check_ranks(self) -> int:
        """Replicas of every stage."""
        file, count, name = self._file, len(self._file.machines), f"{self._file.path}: machines"
        if self._maps is None:
            if count % self.num_stages:
                allowed = f"a multiple of {self.num_stages}, the stages of the partition"
                raise Refusal(name, count, allowed, "name so many devices, or give a config_file").error()
            return count // self.num_stages
        stages, replicas = len(self._maps.modules), len(self._maps.ranks[0])
        if stages != self.num_stages:
            reason = f"it has {stages} stages and the partition {self.num_stages}"
            where, allowed = f"{file.path}: config_file", "as many stages in both files"
            raise Refusal(where, file.config_file, allowed, "correct one of them", reason).error()
        if count != stages * replicas:
            reason = f"stage_to_rank_map in {file.config_file} has {stages * replicas} ranks"
            raise Refusal(name, count, "one device per rank", f"name {stages * replicas} devices", reason).error()
        return replicas

    def _micro_batches(self) -> int:
        """Micro-batches per update."""
        if self._bsp:
            return BSP_MICRO_BATCHES
        return min(MACROBATCH_VERSIONS, self._ahead + 1) if self._file.macrobatch and not self._alone else 1

    def _ratios(self, split: VPipeConfig | None, name: str) -> list[float]:
        """Ratios of every stage by the partition file, empty if there is none."""
        ratios = getattr(split.pipeline(self.num_stages, 1), name) if split else None
        return [int(ratio) if ratio == int(ratio) else ratio for ratio in ratios or ()]

    def _find_scheduler(self) -> dict[str, Any] | None:
        """The ``"scheduler"``, None where it depends on the size of the data."""
        policy = self._file.learning_rate_policy
        if policy not in (None, *_BERT_POLICIES, *_EPOCH_POLICIES):
            known = ", ".join(_BERT_POLICIES if self._bert else _EPOCH_POLICIES)
            raise Refusal(f"{self._file.path}: learning_rate_policy", policy, known, "write one of them").error()
        return _BERT_POLICIES.get(policy or "polynomial") if self._bert else None

    def _find_model(self, given: str | None) -> str:
        layers = sum(self._layers) if self._layers else None
        model = given or MODEL_OF_LAYERS.get(layers or 0)
        if model is None:
            sizes = ", ".join(f"{count} ({name})" for count, name in MODEL_OF_LAYERS.items())
            remedy = "name the model: --bert-config SIZE or FILE"
            where = f"{self._file.partition or self._file.config_file}: layers"
            raise Refusal(where, layers, sizes, remedy).error()
        if given is not None:
            found = LAYERS_OF_MODEL.get(given) or _layers_in(given)
            if layers not in (None, found):
                allowed = f"a BERT of {layers} layers, as the split has: num_hidden_layers {layers // 2}"
                raise Refusal("--bert-config", given, allowed, "name another one", f"it has {found} layers").error()
        return model

    def _json(self) -> dict[str, Any]:
        file, maps = self._file, self._maps
        optimizer: dict[str, Any] = {"gradient_clipping": 0.0}
        if file.model_type in _OPTIMIZERS:
            kind, params, clipping = _OPTIMIZERS[file.model_type]
            params = {"lr": file.learning_rate, **params, "weight_decay": file.weight_decay}
            optimizer = {"gradient_clipping": clipping, "optimizer": {"type": kind, "params": params}}
        # Without the key Adam would get settings against late gradients, which vPipe does nothing about.
        asp: dict[str, Any] = {"sync_mode": "asp", "weight_sync": "stash", "staleness": "off"}
        block: dict[str, Any] = asp if self._asp else {"sync_mode": "bsp"}
        modules = maps.modules if maps else [1]
        block["partition"] = self._layers or (modules if max(modules) > 1 else "parameters")
        ratios = self._given_ratios or [0] * self.num_stages
        if file.recompute:
            ratios = [1] * (self.num_stages - 1) + [ratios[-1]]
        if any(ratios):
            block["recompute_ratio"] = ratios
        if any(self._swap_ratios):
            block["swap_ratio"] = self._swap_ratios
        if maps and maps.depth and self._asp:
            block["stage_to_depth_map"] = maps.depth
        return {
            "train_micro_batch_size_per_gpu": file.batch_size,
            "gradient_accumulation_steps": self._batches,
            "steps_per_print": max(1, file.print_frequency // self._batches),
            **optimizer,
            **({} if self._scheduler is None else {"scheduler": self._scheduler}),
            "vpipe": block,
        }

    def _training_rows(self) -> Iterator[Row]:
        """Remarks on updates, stages, optimizer and schedule."""
        file, maps, block = self._file, self._maps, self.ds_config["vpipe"]
        asp, bert, steps = self._asp, self._bert, f"gradient_accumulation_steps {self._batches}"
        why = "vPipe's gradients were 4 times the mean, which LAMB notices only in clipping"
        yield self._bsp and bert, "sync_mode", steps, why
        why = "a batch gives the same update in any order of its micro-batches"
        yield self._bsp and file.no_input_pipelining, "no_input_pipelining", "", why
        why = "one micro-batch at a time is a synchronous pipeline with batches of one"
        yield self._alone, "no_input_pipelining", f'vpipe.sync_mode "bsp", {steps}', why
        yield not asp and file.macrobatch, "macrobatch", "", "bsp keeps one version of the weights anyway"
        copies = 1 + -(-self._ahead // self._batches)
        why = "an update after every two micro-batches, at the last stage too, which vPipe updated after every one"
        if copies > MACROBATCH_VERSIONS:
            why += (
                f"; stage 0 keeps {copies} versions, because vPipe's two are not those that micro-batches in flight"
                f" used: write {self._ahead} for two exact versions and a batch that is larger"
            )
        yield asp and file.macrobatch, "macrobatch", steps, why
        if maps and not self._layers:
            why = f"taken for layers; the model has to have {sum(maps.modules)}"
            if block["partition"] == "parameters":
                why = "modules are whole stages, whose layers are not known; python -m ds_vpipe plan finds a split"
            yield True, "module_to_stage_map", f"vpipe.partition {show(block['partition'])}", why, maps.modules
        ratios, becomes = self._given_ratios, f"vpipe.recompute_ratio {block.get('recompute_ratio')}"
        shares, why = any(0 < ratio < 1 for ratio in ratios), "a share of layers here, of lines of code in vPipe"
        if file.recompute:
            why = "recompute is True, and counts alone"
        yield shares, f"recompute_ratio in {file.partition}", becomes, why, ratios
        depth, why = maps and maps.depth, "a pipeline that drains after every batch has no depth to choose"
        yield depth and not asp, "stage_to_depth_map", "", why, depth
        kind, _, clipping = _OPTIMIZERS.get(file.model_type, ("", {}, 0.0))
        why = 'no public code says what these models were trained with: add an "optimizer"'
        yield not kind, "model_type", "", why
        why = (
            "apex's FusedLAMB does not scale weights without weight decay by their norm, which makes it Adam; Lamb "
            'does scale them: write "AdamW" for the same updates'
        )
        yield bert and not file.weight_decay, "weight_decay", f"optimizer {kind}", why
        why = "FusedLAMB's default, by the norm of the whole model here and of each stage in vPipe"
        yield clipping and not asp, "model_type", f"gradient_clipping {clipping:g}", why
        field, policy, found = "learning_rate_policy", file.learning_rate_policy, self._scheduler
        why = "vPipe's BERT did not read the field and trained with polynomial"
        yield found and policy not in (None, "polynomial"), field, f"scheduler {found and found['type']}", why
        entry, why = _EPOCH_POLICIES.get(policy or "step"), "vPipe knows this policy for BERT only"
        if entry:
            why = f'it goes by epochs, whose updates are not known here: add "scheduler": {entry}'
        yield not found, field, "", why
        why = "it lasts five epochs: add warmup_num_steps to the scheduler"
        if bert:
            why = "vPipe's BERT has no such option; the schedule has a warm-up of its own"
        yield file.lr_warmup, "lr_warmup", "", why

    def _start_rows(self) -> Iterator[Row]:
        """Remarks on script, files and devices."""
        file, hosts, bert, maps = self._file, self.hosts, self._bert, self._maps
        for key in () if bert else ("epochs", "data_dir", "log_directory", "synthetic_data"):
            yield getattr(file, key), key, "", "your script decides"
        why = "write the model as a PipelineModule: docs/migrating.md"
        yield not bert and file.module is not None, "module", "", why
        why = "layers are vPipe's blocks; the decoder has a bias and the loss next-sentence prediction, unlike vPipe's"
        yield bert, "module", f"--config_name {self._model}", why
        why = "an epoch is all files with 'training' in their names; vPipe's was the first of them"
        yield bert, "epochs", f"--num_train_epochs {file.epochs}", why
        why = "without a folder for the time of the start; go on after a stop with: launch.sh --resume_from_checkpoint"
        yield bert, "log_directory", f"--output_dir {self._runs}", why
        absent, why = not self._data.is_dir(), "which is not on this machine: correct it in launch.sh"
        yield bert and absent and not file.synthetic_data, "data_dir", f"--data_dir {self._data}", why
        yield bert and file.synthetic_data and file.data_dir is not None, "data_dir", "", "the tokens are random"
        yield "container" in file.given, "container", "", "start the command inside of it, on every host"
        why = 'metrics.jsonl has statistics of every stage; "timeline": {"enabled": true} records every pass'
        yield file.verbose_frequency, "verbose_frequency", "", why
        for key in file.given:
            yield key not in FIELDS, key, "", "vPipe does not read it"
        for key, value in ((maps and maps.model_extra) or {}).items():
            why = "not split over tensors here" if key == "mp_size" else "vPipe does not read it"
            yield True, f"{key} in {file.config_file}", "", why, value
        lines, first = ", ".join(hosts.hostfile().splitlines()), next(iter(hosts))
        why = "vPipe did not read the GPU's number and took 0, 1, ...; here it is what you wrote"
        yield not hosts.first_devices, "machines", f"{lines}; --include {hosts.include()}", why
        away, why = len(hosts) == 1 and first not in LOCAL, "a single machine needs neither hostfile nor ssh"
        yield away, "machines", f"start the command on {first}", why, first
        mixed = len(hosts) > 1 and any(host in LOCAL for host in hosts)
        why = "the other hosts cannot reach it by that name: write the name that they know"
        yield mixed, "machines", "a line of the hostfile", why, "localhost"
        ranks = list(chain(*maps.ranks)) if maps else []
        becomes = f"{self.num_stages} stages of {self._replicas} rank(s)"
        why = "stage s has the ranks sR .. sR+R-1 here: order the lines of the hostfile by stage"
        yield ranks != sorted(ranks), "stage_to_rank_map", becomes, why, maps and maps.stage_to_rank_map
        why = 'between stages, unless "vpipe" has "link": "nccl"; replicas reduce over NCCL on GPUs'
        yield file.distributed_backend == "nccl", "distributed_backend", "shared memory, between hosts Gloo", why

    def _command(self) -> list[str]:
        """The command that starts training on all devices.

        One machine needs neither hostfile nor ssh: the command is for that machine. The launcher's own options come
        first.
        """
        hosts, words, first = self.hosts, ["deepspeed"], next(iter(self.hosts))
        if len(hosts) > 1:
            words += ["--hostfile", str(self._output / "hostfile")]
            words += [] if hosts.first_devices else ["--include", hosts.include()]
            words += [] if first in LOCAL else ["--master_addr", first]
        elif hosts.first_devices:
            words += ["--num_accelerators", str(len(self._file.machines))]
        else:
            words += ["--include", f"localhost:{hosts.include().rpartition(':')[2]}"]
        config = ["--deepspeed_config", str(self._output / "ds_config.json")]
        if not self._bert:
            return [*words, "--module", "ds_vpipe.run", "YOUR_SCRIPT.py", *config]
        script = _SCRIPT if _SCRIPT.is_file() else Path(__file__).parents[1] / _SCRIPT
        words += [str(script), *config, "--config_name", self._model]
        words += ["--num_stages", str(self.num_stages)] if self._replicas > 1 else []
        words += ["--num_train_epochs", str(self._file.epochs)]
        words += ["--synthetic"] if self._file.synthetic_data else ["--data_dir", str(self._data)]
        return [*words, "--output_dir", str(self._runs), "--save_strategy", "epoch"]

    def files(self) -> dict[str, str]:
        """Names and contents of the files to write."""
        several = len(self.hosts) > 1
        environment = (
            "# Variables for the other hosts, if there is no file of your own.\n"
            f"[[ -e ~/.deepspeed_env || -e .deepspeed_env || -v DS_ENV_FILE ]] ||\n"
            f"    export DS_ENV_FILE={shlex.quote(str((self._output / 'deepspeed_env').resolve()))}\n"
        )
        launch = (
            "#!/usr/bin/env bash\n"
            f"# Trains what {show(self._file.path.name)} describes. Arguments go to the training script.\n"
            f"set -euo pipefail\ncd {shlex.quote(str(Path.cwd()))}\n"
            'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"\n'
            f"{environment if several else ''}"
            f'exec {shlex.join(self.command)} "$@"\n'
        )
        return {
            "ds_config.json": _text(self.ds_config) + "\n",
            "hostfile": self.hosts.hostfile(),
            "conversion.txt": "".join(f"{remark}\n" for remark in self.remarks),
            "launch.sh": launch,
            **({"deepspeed_env": "OMP_NUM_THREADS=1\n"} if several else {}),  # the launcher hands it on to other hosts
        }


def _text(value: object, indent: str = "") -> str:
    """JSON with lists on one line, as people write them."""
    if not isinstance(value, dict):
        return json.dumps(value)
    inner = ",\n".join(f"{indent}  {json.dumps(key)}: {_text(item, indent + '  ')}" for key, item in value.items())
    return f"{{\n{inner}\n{indent}}}"
