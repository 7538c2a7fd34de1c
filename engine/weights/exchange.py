"""Exchange of the memory of storages, for versions of torch that have none."""

from collections.abc import Callable, Sequence
from functools import cache

import torch

Exchange = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]
"""Exchanges the memory below the storages of two lists of tensors, pair by pair."""

_SOURCE = """
void exchange(const std::vector<at::Tensor>& ours, const std::vector<at::Tensor>& theirs) {
  for (size_t i = 0; i < ours.size(); ++i) {
    auto* left = ours[i].storage().unsafeGetStorageImpl();
    auto* right = theirs[i].storage().unsafeGetStorageImpl();
    right->set_data_ptr_noswap(left->set_data_ptr(std::move(right->mutable_data_ptr())));
  }
}
"""


def built_in() -> bool:
    """Whether this torch can exchange memory: from 2.12 on."""
    return hasattr(torch.UntypedStorage, "_swap_data_ptr_")


@cache
def built() -> Exchange:
    """Exchange in C++, which the first run of an environment builds within a minute."""
    from torch.utils.cpp_extension import load_inline

    found: Exchange = load_inline("ds_vpipe_exchange", _SOURCE, functions="exchange").exchange
    return found
