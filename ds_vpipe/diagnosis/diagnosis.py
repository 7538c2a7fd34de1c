"""All checks, on all facts."""

from __future__ import annotations

from ds_vpipe.diagnosis.facts import Facts
from ds_vpipe.diagnosis.finding import Finding
from ds_vpipe.diagnosis.host_checks import check_deepspeed_env, check_hosts
from ds_vpipe.diagnosis.node_checks import check_backends, check_gpus, check_node, check_ports
from ds_vpipe.diagnosis.versions import check_versions


def diagnose(facts: Facts) -> list[Finding]:
    """What is well and what is not, in the order in which things are needed."""
    nodes = {host: there.node for host, there in facts.remote.items() if there.node is not None}
    return [
        *check_versions(facts.node),
        *check_backends(facts),
        *check_gpus(facts),
        *check_node(facts.node),
        *check_ports(facts),
        *check_hosts(facts),
        *check_deepspeed_env(facts.deepspeed_env, nodes or {facts.node.host: facts.node}),
    ]
