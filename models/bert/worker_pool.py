"""The same work on many items, shared among processes, with a progress bar."""

import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from tqdm import tqdm

from ds_vpipe.errors import VPipeError

Item = TypeVar("Item")


def for_each(work: Callable[[Item], object], items: Sequence[Item], workers: int, what: str) -> None:
    """Do ``work(item)`` for all items, in any order; the first failure ends it.

    Args:
        work: can be pickled, as a function of a module can.
        items: can be pickled.
        workers: processes; 1 for none but this one.
        what: what an item is, for the progress bar.

    Raises:
        VPipeError: what `work` raised, or a process was killed.
    """
    with tqdm(total=len(items), unit=what, disable=None if items else True, dynamic_ncols=True) as bar:
        if workers == 1 or len(items) < 2:
            for item in items:
                work(item)
                bar.update()
            return
        # Started anew and not forked: the tokenizer of this process may have threads.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(workers, len(items)), context, _one_thread) as pool:
            futures = [pool.submit(work, item) for item in items]
            try:
                _await(as_completed(futures), bar)
            except BrokenProcessPool as error:
                raise VPipeError(
                    f"a process that was to make a {what} has been killed, maybe for lack of memory: start again with"
                    f" fewer --preprocessing_num_workers; what is finished is kept"
                ) from error
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def _await(futures: Iterable[Future[object]], bar: "tqdm[object]") -> None:
    for future in futures:
        future.result()
        bar.update()


def _one_thread() -> None:
    os.environ["RAYON_NUM_THREADS"] = "1"  # the tokenizer's; processes share the cores already
