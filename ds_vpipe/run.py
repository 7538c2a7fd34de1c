"""Run a DeepSpeed script unchanged, with ds_vpipe's engine where its JSON has a ``"vpipe"`` block.

Usage::

    deepspeed --module ds_vpipe.run train.py --deepspeed_config cfg.json
    deepspeed --module ds_vpipe.run -m package.train --deepspeed_config cfg.json
    deepspeed --module ds_vpipe.run --restarts 3 train.py --deepspeed_config cfg.json

With ``--restarts N`` all ranks are started again, N times at most, when one has failed; ``DS_VPIPE_RESTART`` counts the
restarts. The launcher puts ``--local_rank=N`` before the script's name; the script gets it as its first argument,
where it is without ds_vpipe.
"""

import functools
import importlib.util
import os
import runpy
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ds_vpipe.errors import PipelinePeerError, VPipeConfigError, VPipeError, one_line, say
from ds_vpipe.restarts import refusal, supervise
from ds_vpipe.uncollected import freeze, uncollected

USAGE = (
    "usage: deepspeed [launcher options] --module ds_vpipe.run [--restarts N] (SCRIPT | -m MODULE) [script arguments]"
)


def main(argv: list[str]) -> int:
    """Run the script or module named in ``argv``; the exit status for a wrong command line or configuration is 2."""
    before, named, restarts = list[str](), list(argv), "0"
    while named and named[0].startswith(("--local_rank", "--local-rank", "--restarts")):
        option, given, value = named[0].partition("=")
        if option == "--restarts":
            restarts = value if given else "".join(named[1:2])
            del named[: 1 if given else 2]
        else:
            before.append(named.pop(0))
    if not named:
        print(f"ds_vpipe.run: no script given; {USAGE}", file=sys.stderr)
        return 2
    if restarts != "0" and "DS_VPIPE_REPLAY" not in os.environ:  # a replay ends where it fails
        if (refused := refusal(restarts, os.environ)) is not None:
            print(f"ds_vpipe.run: {refused}", file=sys.stderr)
            return 2
        if (status := supervise(int(restarts), _import)) is not None:
            return status
    as_module = named[0] == "-m"
    name, *arguments = (named[1:] or [""]) if as_module else named
    if not (_is_module(name) if as_module else Path(name).is_file()):
        lacks = (
            f"which is not found from {sys.path[0] or 'the current folder'!r}" if as_module else "which is not a file"
        )
        print(f"ds_vpipe.run: got {'module' if as_module else 'script'} {name!r}, {lacks}; {USAGE}", file=sys.stderr)
        return 2

    try:
        return _run(name, as_module, before, arguments)
    except VPipeError as error:
        say(str(error))
        freeze()  # Python would look at all that the script has imported once more, while others wait
        return 2 if isinstance(error, VPipeConfigError) else 1
    except KeyboardInterrupt:
        say("interrupted by SIGINT, as Ctrl-C sends it")
        return 128 + signal.SIGINT


def _run(name: str, as_module: bool, before: list[str], arguments: list[str]) -> int:
    """Run a script or module with ours in the place of DeepSpeed's ``initialize``."""
    if "deepspeed" not in sys.modules:  # else the process has done something before
        _import()
    sys.argv = [name, *before, *arguments]
    if not as_module and not getattr(sys.flags, "safe_path", False):  # which Python has from 3.11 on
        sys.path[0] = str(Path(name).resolve().parent)
    with _in_place() as engines:
        try:
            if as_module:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(name, run_name="__main__")
        except SystemExit as end:
            if not _ends_well(end):
                raise
        for engine in engines():
            if (end_of_script := getattr(engine, "script_end", None)) is not None:
                end_of_script.complete()
    return 0


@contextmanager
def pipelines() -> Iterator[None]:
    """Context in which a function trains as a script under ``ds_vpipe.run``.

    For launchers that call a function on every rank. In it ``deepspeed.initialize``, Trainer and Accelerate make
    pipelines where the JSON has a ``"vpipe"`` block. At its end what is still in flight is trained, and engines are
    destroyed; an error of the function ends training on all ranks.

    Raises:
        VPipeError: what is in flight cannot be trained.
        PipelinePeerError: another rank failed, is lost, or did not answer in time.
    """
    with _in_place() as engines:
        leaving: SystemExit | None = None
        try:
            yield
        except SystemExit as end:
            if not _ends_well(end):
                raise
            leaving = end
        for engine in engines():
            if (end_of_script := getattr(engine, "script_end", None)) is not None:
                end_of_script.end_block()
            engine.destroy()
        if leaving is not None:
            raise leaving


@contextmanager
def _in_place() -> Iterator[Callable[[], list[Any]]]:
    """Context in which ds_vpipe's functions make the engines; yields a function that lists those made in it."""
    with uncollected(for_good=False):
        import deepspeed
        from deepspeed.pipe import PipelineModule

        from ds_vpipe.accelerators import accelerators_of_pipelines
        from ds_vpipe.after_init import after_init
        from ds_vpipe.distributed_samplers import DistributedSamplers
        from ds_vpipe.engine.engine import VPipeEngine
        from ds_vpipe.engine.loop.engine import VPipeLoopEngine
        from ds_vpipe.engine.modules.split_module import stages_of_json
        from ds_vpipe.engine.reduction_buffers import unnamed_buffers
        from ds_vpipe.extension_builds import extension_builds
        from ds_vpipe.initialization import deepspeed_initialize, initialize

    samplers, made, modules = DistributedSamplers(), list[weakref.ref[Any]](), list[bool]()

    @functools.wraps(deepspeed_initialize())
    def initialize_and_deal(*args: Any, **kwargs: Any) -> Any:
        engine, *others = initialize(*args, **kwargs)
        if isinstance(engine, VPipeLoopEngine):
            samplers.deal(engine.dp_world_size, engine.grid.data_parallel_id)
        return (engine, *others)

    # The script may build, and make a world, before it comes to initialize().
    accelerators = accelerators_of_pipelines(stages_of_json)
    with (
        patch.object(deepspeed, "initialize", initialize_and_deal), samplers.watching(), accelerators,
        extension_builds(), unnamed_buffers(), blocks_are_read(),
        after_init(VPipeEngine, lambda one: made.append(weakref.ref(one))),
        after_init(PipelineModule, lambda _: modules.append(True)),
    ):  # fmt: skip

        def engines() -> list[Any]:
            found = (reference() for reference in made)
            return [engine for engine in found if engine is not None and not engine.forked]

        why = ""
        try:
            yield engines
        except BaseException as error:
            if not _ends_well(error):
                why = f"its script failed: {one_line(error)}"
                for engine in engines():
                    engine.failures.script_failed(error)
            raise
        finally:
            if not made and (why or modules):
                _say_that_none_comes(why or "its script has ended")
    if not made and os.environ.get("RANK", "0") == "0":
        say('no pipeline was made: no JSON with a "vpipe" block has come to deepspeed.initialize()')


def _say_that_none_comes(why: str) -> None:
    """Let ranks that make an engine know that this one makes none: they would wait for it."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    from ds_vpipe.engine.links.groups import Groups, Peer

    rank = dist.get_rank()
    with suppress(PipelinePeerError):  # the store is gone, with all who would ask
        Groups(Peer(0, rank), 1.0).leave(f"rank {rank} makes no engine: {why}")


def _ends_well(error: BaseException) -> bool:
    """Whether a script has ended by itself and without a failure."""
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _import() -> None:
    """Import what every rank imports before its script."""
    with uncollected(for_good=True):
        import deepspeed  # noqa: F401

        import ds_vpipe.engine.loop.engine  # noqa: F401


@contextmanager
def blocks_are_read() -> Iterator[None]:
    """Inside, a ``"vpipe"`` block in the JSON of a pipeline engine that does not read it is refused."""
    from deepspeed.runtime.pipe.engine import PipelineEngine

    from ds_vpipe.after_init import after_init
    from ds_vpipe.config.deepspeed_json import DeepSpeedJson
    from ds_vpipe.engine.deepspeed_internals import PatchedPipelineEngine

    def refuse_unread(engine: Any) -> None:
        kind, json = type(engine), DeepSpeedJson(engine._config._param_dict)
        if json.block is not None and not issubclass(kind, PatchedPipelineEngine):
            raise VPipeConfigError(
                f"vpipe: got a block for a {kind.__qualname__} of {kind.__module__}, which is an engine of DeepSpeed, "
                f"allowed are deepspeed.initialize() and classes derived from ds_vpipe.VPipeEngine; derive it from "
                f"that, or remove the block"
            )

    with after_init(PipelineEngine, refuse_unread):
        yield


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # no such package; no name
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
