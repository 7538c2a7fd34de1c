"""Choice of ``"staleness": "auto"``, as experiments support it.

They are those of docs/convergence.md. A function of plain values, so that training, ``check``, ``plan`` and
``forecast`` choose alike, and a resumed run as the one before it. Where no experiment is like the pipeline nothing is
chosen, and a line says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ds_vpipe.config import VPipeConfig
from ds_vpipe.config.deepspeed_json import DeepSpeedJson
from ds_vpipe.config.staleness import Auto, Staleness, refuse_options, without_moments
from ds_vpipe.schedules.pipeline import Pipeline, WeightSync
from ds_vpipe.tables import counted

SHARES = ("synchronous_updates", "delay_warmup_updates")
"""Keys whose values are, in a table of settings, shares of all updates."""

OF_SCRIPT = "an optimizer of the script's own"
"""Words for an optimizer that no JSON names."""

_NADAM = {"nadam": True}
_ADAM, _SOAP = ("adam", "adamw"), ("soap",)  # DeepSpeed's Adam decays weights as AdamW does
_WITH_MOMENTS = (*_ADAM, "lamb", "fusedadam", "muadam", "muadamw")  # for NAdam, of DeepSpeed's names


class Choice(NamedTuple):
    """Settings chosen, and one line about them.

    None for none, and an empty line where there is nothing to say.
    """

    settings: Staleness | None
    line: str = ""
    is_warning: bool = False


@dataclass(frozen=True)
class _Row:
    """Experiments, and the settings that were best in them."""

    latest: int  # updates that their gradients were late by at most
    optimizers: tuple[str, ...]
    settings: Mapping[str, Any]
    weight_sync: tuple[WeightSync, ...] = ("stash",)

    @property
    def needs_length(self) -> bool:
        """Whether the settings depend on the updates of the whole run."""
        return any(key in SHARES for key in self.settings)


# The first that fits counts. Losses are against synchronous AdamW or NAdam, of all with K stages and M = 1 unless M is
# named: docs/data/convergence.md, convergence_soap.md, convergence_k32.md and convergence_other.md.
_EXPERIMENTS = (
    # K = 4 -10.6 %, K = 8 -9.3 %, K = 16 -7.8 %: nothing is needed
    _Row(15, _SOAP, {}),
    # K = M = 4 -0.5 %, 8 -0.2 %, 16 -0.2 %; AdamW without +0.8, +0.7, +1.3 %. K = M = 4 without a stash +0.1 %
    _Row(1, _ADAM, _NADAM, ("stash", "none")),
    # K = 4 -0.1 %; without +7.3 %
    _Row(3, _ADAM, {**_NADAM, "synchronous_updates": 0.2}),
    # K = 8 +0.3 %; without +38 %
    _Row(7, _ADAM, {**_NADAM, "synchronous_updates": 0.2, "delay_warmup_updates": 0.2}),
    # K = 16 +1.0 %; without +59 %. K = 32 +6.4 %
    _Row(31, _ADAM, {**_NADAM, "synchronous_updates": 0.2, "delay_warmup_updates": 0.4}),
    # In a run of unknown length: K = 4 +4.6 %, K = 8 +7.1 %, one seed
    _Row(7, _ADAM, _NADAM),
)

# SOAP with K = 32, against itself synchronous: -1.4 % with half the rate and twice the updates, +13 % without
_WITH_MORE_UPDATES = 31


def choose_staleness(given: Staleness | None, pipeline: Pipeline, optimizer: str, total_updates: int | None) -> Choice:
    """Settle the key ``"staleness"``.

    Args:
        given: what the block has; None if it has no such key, which is ``"auto"`` where a gradient is more than one
            update late.
        pipeline: that runs, with its depths.
        optimizer: its type in the JSON, or other words for one that no experiment had.
        total_updates: of the whole run, None if that is not known.
    """
    late, weight_sync = pipeline.delays[0], pipeline.weight_sync
    if not isinstance(given, Auto | None):
        return Choice(None if given.word else given)
    if given is None and late <= 1:
        return Choice(None)
    if late == 0:
        return Choice(None, 'staleness: "auto" is none, as no gradient is late')
    found = (
        row
        for row in _EXPERIMENTS
        if late <= row.latest
        and optimizer.lower() in row.optimizers
        and weight_sync in row.weight_sync
        and (total_updates or not row.needs_length)
    )
    row, updates = next(found, None), counted(late, "update")
    begin = f"staleness: gradients are up to {updates} late (K={pipeline.num_stages}, M={pipeline.micro_batches})"
    if row is None:
        stashes = weight_sync == "stash"
        against = "" if stashes else f' and weight_sync "{weight_sync}"'
        soap = optimizer.lower() in _SOAP
        remedies = {
            'weight_sync "stash"': not stashes,
            "the optimizer SOAP": not soap and late <= _EXPERIMENTS[0].latest,
            "half the learning rate and twice the updates": soap and stashes and late <= _WITH_MORE_UPDATES,
            f"M = {pipeline.depths[0]}": late > 1,
            "settings of your own": True,
        }
        return Choice(
            None,
            f"{begin}; no settings are known for {optimizer}{against} with such delays, and nothing is done. Take "
            f"{' or '.join(remedy for remedy, helps in remedies.items() if helps)} (docs/convergence.md); "
            f'"staleness": "off" ends this line',
            is_warning=True,
        )
    if not row.settings:
        return Choice(None, "" if given is None else f"{begin}, and {optimizer} needs nothing (docs/convergence.md)")
    settings = of_length(row.settings, total_updates or 0)
    is_short = late > 1 and not row.needs_length
    length = "" if late == 1 else " in a run of unknown length" if is_short else f" and {total_updates} updates"
    more = "; that is not enough: give total_num_steps in the scheduler, or take the optimizer SOAP" * is_short
    return Choice(
        Staleness.model_validate(settings),
        f'{begin}; for {optimizer}{length} "auto" chooses {json.dumps(settings)}, which sets the betas too '
        f'(docs/convergence.md){more}; "staleness": "off" turns it off',
        is_short,
    )


def settled(
    config: VPipeConfig,
    pipeline: Pipeline,
    ds_config: DeepSpeedJson,
    own_optimizer: str | None = None,
    updates: int | None = None,
) -> tuple[VPipeConfig, Choice]:
    """The block with settings in the place of ``"auto"`` and ``"off"``, and the choice.

    Args:
        config: the block.
        pipeline: that runs, with its depths.
        ds_config: the JSON around the block.
        own_optimizer: type of the one that the script brings, if any, or :data:`OF_SCRIPT`; it counts, not the JSON's.
        updates: of this run, where it is shorter than the one that the JSON is for.

    Raises:
        VPipeConfigError: the settings do not work with the JSON's optimizer.
    """
    total = max(0, ds_config.whole("scheduler.params.total_num_steps") or 0)
    total = total if updates is None else min(total, updates)
    optimizer = own_optimizer or _optimizer(ds_config)
    choice = choose_staleness(config.staleness, pipeline, optimizer, total or None)
    corrects = choice.settings is not None and choice.settings.nadam is not None
    named = None if own_optimizer else ds_config.optimizer
    if corrects and named is not None:
        if named.lower() not in _WITH_MOMENTS:
            raise without_moments(named)
        refuse_options(ds_config.optimizer_params)
    return config.model_copy(update={"staleness": choice.settings}), choice


def of_length(settings: Mapping[str, Any], updates: int) -> dict[str, Any]:
    """Settings for a run of so many updates, of settings with :data:`SHARES`."""
    return {key: round(value * updates) if key in SHARES else value for key, value in settings.items()}


def _optimizer(ds_config: DeepSpeedJson) -> str:
    """Type of the JSON's optimizer, with what makes it one that no experiment had."""
    name, params = ds_config.optimizer, ds_config.optimizer_params
    if name is None:
        return OF_SCRIPT
    decays_otherwise = name.lower() == "adam" and params.get("adam_w_mode") is False and params.get("weight_decay")
    odd = [key for key in ("amsgrad", "maximize") if params.get(key)] + ["adam_w_mode false"] * bool(decays_otherwise)
    odd += ["bias_correction false"] * (params.get("bias_correction") is False)
    return f"{name} with {odd[0]}" if odd else name
