"""The files of a conversion, the command that starts it, and where vPipe's own files are."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ds_vpipe.errors import Refusal, show
from ds_vpipe.migration.conversion import Conversion
from ds_vpipe.migration.machines import LOCAL
from ds_vpipe.migration.remark import Remark
from ds_vpipe.migration.vpipe_file import VPipeFile

_SCRIPT = Path("models/bert/train.py")


@dataclass(frozen=True)
class Paths:
    """Where the run's things are.

    Attributes:
        output: folder that the converted files are for.
        data: folder with the HDF5 shards; None for random tokens.
        run: folder for what training writes.
        script: the training script.
    """

    output: Path
    data: Path | None
    run: Path
    script: Path


def find_file(file: VPipeFile, key: str, root: Path | None) -> Path | None:
    """Where a file named in the YAML is, None if it names none.

    vPipe's driver is started in ``root`` and goes to ``directory`` below it; PipeDream's goes to the folder of the type
    of model. Without a ``root`` these folders are looked for here, beside the YAML and above it.

    Raises:
        VPipeConfigError: it is in none of them.
    """
    name = getattr(file, key)
    if name is None:
        return None
    tried = [folder / name for folder in _folders(file, root)]
    for path in tried:
        if path.is_file():
            return path
    allowed, remedy = "an existing file", "name the folder in which driver.py was started: --root DIR"
    reason = f"there is no {', no '.join(str(path) for path in tried)}"
    raise Refusal(f"{file.path}: {key}", name, allowed, remedy, reason).error()


def run_paths(file: VPipeFile, output: Path, root: Path | None) -> Paths:
    """Where the data are and where results go: below the first folder that exists of those that vPipe means."""
    folders = list(_folders(file, root))
    home = next((folder for folder in folders if folder.is_dir()), folders[0])
    data = None if file.synthetic_data or file.data_dir is None else home / file.data_dir
    if data is not None:
        data = next((path for folder in folders if (path := folder / str(file.data_dir)).is_dir()), data)
    run = home / (file.log_directory or "runs") / file.path.stem
    return Paths(output, data, run, training_script())


def path_remarks(file: VPipeFile, conversion: Conversion, paths: Paths) -> tuple[Remark, ...]:
    """What became of the fields that say where things are."""
    remarks = []
    if file.synthetic_data:
        remarks.append(Remark("kept", "synthetic_data", True, "--synthetic"))
        if file.data_dir is not None:
            remarks.append(Remark("dropped", "data_dir", file.data_dir, "", "the tokens are random"))
    elif conversion.arguments is None:
        remarks.append(Remark("dropped", "data_dir", file.data_dir, "", "your script reads the data"))
    elif paths.data is not None:
        why = "" if paths.data.is_dir() else "which is not on this machine: correct it in launch.sh"
        remarks.append(
            Remark("kept" if not why else "changed", "data_dir", file.data_dir, f"--data_dir {paths.data}", why)
        )
    if conversion.arguments is None:
        remarks.append(Remark("dropped", "log_directory", file.log_directory, "", "your script decides"))
    else:
        why = "without a folder for the time of the start; go on after a stop with: launch.sh --resume_from_checkpoint"
        remarks.append(Remark("changed", "log_directory", file.log_directory, f"--output_dir {paths.run}", why))
    return tuple(remarks)


def training_script() -> Path:
    """``models/bert/train.py``, in the current folder or where ds_vpipe is installed."""
    if _SCRIPT.is_file():
        return _SCRIPT
    return Path(__file__).parents[1] / _SCRIPT


def command(conversion: Conversion, paths: Paths) -> list[str]:
    """The command that starts training on all devices.

    One machine needs neither hostfile nor ssh: the command is for that machine. The launcher's own options come
    first.
    """
    hosts = conversion.hosts
    words = ["deepspeed"]
    if len(hosts.gpus) > 1:
        words += ["--hostfile", str(paths.output / "hostfile")]
        words += [] if hosts.first_devices else ["--include", hosts.include()]
        first = next(iter(hosts.gpus))
        words += [] if first in LOCAL else ["--master_addr", first]
    elif hosts.first_devices:
        words += ["--num_accelerators", str(hosts.count)]
    else:
        words += ["--include", f"localhost:{hosts.include().rpartition(':')[2]}"]
    config = ["--deepspeed_config", str(paths.output / "ds_config.json")]
    if conversion.arguments is None:
        return [*words, "--module", "ds_vpipe.run", "YOUR_SCRIPT.py", *config]
    words += [str(paths.script), *config, *conversion.arguments]
    words += ["--synthetic"] if paths.data is None else ["--data_dir", str(paths.data)]
    return [*words, "--output_dir", str(paths.run), "--save_strategy", "epoch"]


def texts(file: VPipeFile, conversion: Conversion, words: list[str]) -> dict[str, str]:
    """Names and contents of the files to write."""
    result = {
        "ds_config.json": ds_config_text(conversion),
        "hostfile": conversion.hosts.hostfile(),
        "conversion.txt": "".join(f"{remark}\n" for remark in conversion.remarks),
        "launch.sh": (
            "#!/usr/bin/env bash\n"
            f"# Trains what {show(file.path.name)} describes. Arguments go to the training script.\n"
            f"set -euo pipefail\ncd {shlex.quote(str(Path.cwd()))}\n"
            'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"\n'
        ),
    }
    if len(conversion.hosts.gpus) > 1:  # what the launcher hands on to other hosts
        result["deepspeed_env"] = "OMP_NUM_THREADS=1\n"
        name = Path(words[words.index("--hostfile") + 1]).with_name("deepspeed_env")
        result["launch.sh"] += (
            "# Variables for the other hosts, if there is no file of your own.\n"
            f"[[ -e ~/.deepspeed_env || -e .deepspeed_env || -v DS_ENV_FILE ]] ||\n"
            f"    export DS_ENV_FILE={shlex.quote(str(name.resolve()))}\n"
        )
    result["launch.sh"] += f'exec {shlex.join(words)} "$@"\n'
    return result


def write(folder: Path, files: dict[str, str]) -> list[Path]:
    """Write ``files`` into ``folder``, which is made if it does not exist; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "launch.sh").chmod(0o755)
    return [folder / name for name in files]


def ds_config_text(conversion: Conversion) -> str:
    """The DeepSpeed JSON, lists on one line as people write them."""
    lines: list[str] = []
    for key, value in conversion.ds_config.items():
        lines.append(f"  {json.dumps(key)}: {_indented(value, '  ')}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _indented(value: object, indent: str) -> str:
    if not isinstance(value, dict):
        return json.dumps(value)
    inner = ",\n".join(f"{indent}  {json.dumps(key)}: {_indented(item, indent + '  ')}" for key, item in value.items())
    return f"{{\n{inner}\n{indent}}}"


def _folders(file: VPipeFile, root: Path | None) -> Iterator[Path]:
    """Folders that the paths of ``file`` may be relative to, most likely first."""
    roots = [root] if root is not None else [Path(), file.path.parent, file.path.parent.parent]
    for folder in dict.fromkeys(roots):
        yield folder / (file.directory or file.model_type)
    yield from dict.fromkeys(roots)
