"""The share of a batch in which ranks idle, in closed form, where all parts cost the same and transfers nothing.

Source: Huang et al., "GPipe" (NeurIPS 2019), section 2.3, and Narayanan et al. (SC 2021), section 2.2, for
interleaved parts. The simulator counts the same for programs; these forms are for choosing sizes and for tests.
"""

from __future__ import annotations

from fractions import Fraction

from ds_vpipe.errors import Refusal


def bubble_share(num_stages: int, micro_batches: int, virtual_stages: int = 1) -> float:
    """Idle share of a synchronous pipeline's batch, ``b / (M + b)`` with ``b = (K-1) / v``, for every order.

    The interleaved order needs at least ``num_stages`` micro-batches for it.
    """
    fill = Fraction(num_stages - 1, virtual_stages)
    return float(fill / (micro_batches + fill))


def optimal_microbatches(num_stages: int, share: float = 0.1, virtual_stages: int = 1) -> int:
    """The fewest micro-batches per batch with which a synchronous pipeline idles for at most ``share`` of the time.

    Raises:
        VPipeConfigError: ``share`` is not between 0 and 1.
    """
    if not 0 < share < 1:
        raise Refusal("share", share, "a number between 0 and 1, such as 0.1", "change it").error()
    wanted = Fraction(str(share))  # as written: 0.1 is no binary fraction
    fewest = Fraction(num_stages - 1, virtual_stages) * (1 - wanted) / wanted
    return max(1, -(-fewest.numerator // fewest.denominator))
