"""Keys of the "vpipe" block: values, default, meaning, example.

examples:
  python -m ds_vpipe config                                  all keys, as sections of Markdown
  python -m ds_vpipe config staleness                        one, and those of its object
  python -m ds_vpipe config --markdown > docs/configuration.md
  python -m ds_vpipe config --json                           as a JSON schema
"""

import argparse

from ds_vpipe.commands.arguments import Answer
from ds_vpipe.config import VPipeConfig
from ds_vpipe.config.keys import all_keys, as_markdown
from ds_vpipe.errors import Refusal, did_you_mean

_PAGE = """\
# Configuration

The `"vpipe"` block of the DeepSpeed JSON, key by key. Every key may be left out; `"vpipe": {}` is asynchronous training
with the module's own partition. Unknown keys, wrong values and combinations that do not work are refused at start, on
every rank, in one line. `python -m ds_vpipe check ds_config.json --stages 4` says before what is wrong with the JSON;
what depends on the model is seen at start alone.

Written by `python -m ds_vpipe config --markdown`.

"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("key", nargs="?", default="", metavar="KEY", help="name of a key; default all")
    parser.add_argument("--markdown", action="store_true", help="print docs/configuration.md")


def run(arguments: argparse.Namespace) -> Answer:
    known = [name for name, _ in all_keys(VPipeConfig)]
    if arguments.key and arguments.key not in known:
        remedy = f"name one of them, or none{did_you_mean(arguments.key, known)}"
        raise Refusal("key", arguments.key, ", ".join(known), remedy).error()
    if arguments.key and arguments.json:
        raise Refusal(
            "--json", True, "the option without a key", "leave one of them out", "the schema is of all"
        ).error()
    text = as_markdown(VPipeConfig, arguments.key)
    return Answer(VPipeConfig.model_json_schema, lambda: _PAGE + text if arguments.markdown else text)
