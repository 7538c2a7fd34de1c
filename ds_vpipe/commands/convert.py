"""A vPipe or PipeDream run as DeepSpeed JSON, hostfile and command.

Read are its YAML, its partition file and its mp_conf.json. A line says of each field that does not mean quite the same
here what it becomes, or that it becomes nothing. docs/migrating/vpipe.md explains every field.

examples:
  python -m ds_vpipe convert configs/bert_4vpipe.yml -o converted      writes ds_config.json, hostfile, launch.sh, ...
  python -m ds_vpipe convert configs/bert_4vpipe.yml --dry-run         only shows what would be written
  python -m ds_vpipe convert bert_4vpipe.yml --root ~/vpipe/runtime    paths in the YAML are relative to another folder
  python -m ds_vpipe convert bert_4vpipe.yml --bert-config my_bert.json --json

The result is started by: converted/launch.sh, with more arguments of the training script if you like:
--resume_from_checkpoint.
exit status: 0 converted, 2 a file is wrong or cannot be converted
"""

import argparse
import shlex
from pathlib import Path

from ds_vpipe.commands.argument_types import checked
from ds_vpipe.commands.arguments import Answer
from ds_vpipe.migration.vpipe import Conversion
from ds_vpipe.migration.vpipe_files import read_split, read_stage_maps, read_vpipe_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("yaml", type=Path, metavar="YAML", help="the file that driver.py takes as --config_file")
    parser.add_argument("--root", type=Path, metavar="DIR", help="where driver.py was started; default: looked for")
    parser.add_argument("--bert-config", metavar="SIZE|FILE", help="default: the size with as many layers as the split")
    parser.add_argument("--synthetic", action="store_true", help="train on random tokens, not on data_dir")
    group = parser.add_argument_group("output")
    folder = checked(Path, lambda path: path.is_dir() or not path.exists(), "a folder, new or there")
    what = "folder to write to; default: the YAML's name"
    group.add_argument("-o", "--output", type=folder, metavar="DIR", help=what)
    group.add_argument("--dry-run", action="store_true", help="write nothing, print the files")


def run(arguments: argparse.Namespace) -> Answer:
    file = read_vpipe_file(arguments.yaml)
    if arguments.synthetic:
        file = file.model_copy(update={"synthetic_data": True})
    output, root = arguments.output or Path(file.path.stem), arguments.root
    split = read_split(path) if (path := file.find("partition", root)) else None
    maps = read_stage_maps(path) if (path := file.find("config_file", root)) else None
    conversion = Conversion(file, split, maps, output, root, arguments.bert_config)
    files = conversion.files()
    written = [] if arguments.dry_run else [output / name for name in files]
    if written:
        output.mkdir(parents=True, exist_ok=True)
    for path in written:
        path.write_text(files[path.name], encoding="utf-8")
        path.chmod(0o755 if path.name == "launch.sh" else 0o644)
    result = {
        "ds_config": conversion.ds_config,
        "hosts": conversion.hosts,
        "stages": conversion.num_stages,
        "command": conversion.command,
        "remarks": [vars(remark) for remark in conversion.remarks],
        "files": [str(path) for path in written],
    }
    text = files.pop("conversion.txt")
    if arguments.dry_run:
        text += "".join(f"\n--- {output / name}\n{content}" for name, content in files.items())
    else:
        text += f"\nwritten: {', '.join(map(str, written))}\nto train: {shlex.join(conversion.command)}"
    return Answer(lambda: result, lambda: text.removesuffix("\n"))
