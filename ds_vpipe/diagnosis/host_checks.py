"""Checks of the hosts in a hostfile, and of what the launcher takes to them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ds_vpipe.diagnosis.facts import Facts, NodeFacts, RemoteFacts
from ds_vpipe.diagnosis.finding import Finding
from ds_vpipe.diagnosis.node_checks import check_node, interface_finding
from ds_vpipe.diagnosis.versions import PACKAGES

LARGEST_SKEW_S = 0.5
_NOT_HANDED_ON = ("GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS")
_LINE = re.compile(r"(\S+)\s+slots=(\d+)")


def parse_hostfile(path: str, text: str) -> tuple[dict[str, int], list[Finding]]:
    """Hosts with their slots, and what is wrong with the file; lines as DeepSpeed's launcher reads them."""
    hosts: dict[str, int] = {}
    findings: list[Finding] = []
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.match(line)
        where = f"{path} line {number}"
        if match is None or match[1].startswith("-"):  # which ssh would take for an option
            findings.append(Finding("error", "hostfile", f"{where}: {line!r}", "write HOST slots=N"))
        elif match[1] in hosts:
            findings.append(Finding("error", "hostfile", f"{where}: {match[1]} is there twice", "add up its slots"))
        elif int(match[2]) < 1:
            findings.append(Finding("error", "hostfile", f"{where}: {line!r}", "give at least one slot, or remove it"))
        else:
            hosts[match[1]] = int(match[2])
    if not hosts and not findings:
        findings.append(Finding("error", "hostfile", f"{path} names no host", "write a line HOST slots=N for each"))
    if not findings:
        text = f"{len(hosts)} host(s), {sum(hosts.values())} slots"
        findings.append(Finding("ok", "hostfile", text))
    return hosts, findings


def check_hosts(facts: Facts) -> list[Finding]:
    """The hostfile, the commands that it needs, and every host."""
    if facts.hostfile is None:
        return []
    hosts, findings = parse_hostfile(*facts.hostfile)
    if facts.commands.get("ssh") is None:
        remedy = "install an ssh client, or start every host by hand: deepspeed --no_ssh --node_rank R"
        findings.append(Finding("error", "ssh", "not installed", remedy))
    if len(hosts) > 1 and facts.commands.get("pdsh") is None:
        remedy = "install pdsh, or use deepspeed --launcher or --no_ssh"
        findings.append(Finding("error", "pdsh", f"not installed, and the hostfile has {len(hosts)} hosts", remedy))
    elif len(hosts) > 1:
        findings.append(Finding("ok", "pdsh", str(facts.commands["pdsh"])))
    local = sorted(set(hosts) & {"localhost", "127.0.0.1"})
    if len(hosts) > 1 and local:
        text = f"{local[0]} stands beside other hosts, which cannot reach it by that name"
        findings.append(Finding("warning", "hostfile", text, "write the name that the others know"))
    if len(hosts) > 1:
        findings += check_handed_on(facts)
        if "GLOO_SOCKET_IFNAME" not in _brought(facts):
            findings += [check_address(there.node) for there in facts.remote.values() if there.node is not None]
    for host, slots in hosts.items():
        if host in facts.remote:
            findings += check_host(facts.node, host, slots, facts.remote[host])
    return findings


def check_handed_on(facts: Facts) -> list[Finding]:
    """The launcher hands few variables on to other hosts, and not these; ``.deepspeed_env`` brings any."""
    brought = _brought(facts)
    findings = []
    for name in _NOT_HANDED_ON:
        if name in facts.node.environment and name not in brought:
            value = facts.node.environment[name]
            text = f"{value} here, and the launcher does not hand it on to other hosts"
            findings.append(Finding("warning", name, text, f"write {name}={value} into .deepspeed_env"))
    return findings


def _brought(facts: Facts) -> set[str]:
    """Variables that ``.deepspeed_env`` takes to other hosts."""
    return {line.partition("=")[0].strip() for text in facts.deepspeed_env.values() for line in text.splitlines()}


def check_address(node: NodeFacts) -> Finding:
    """Gloo offers other hosts the address that the host's own name has there."""
    if node.address is None or node.address.startswith("127."):
        text = f"the name {node.host} is {node.address or 'unknown'} there, where other hosts do not reach it"
        names = " or ".join(name for name in node.interfaces if name != "lo") or "its interface"
        return Finding("error", "address", text, f"write GLOO_SOCKET_IFNAME={names} into .deepspeed_env")
    return Finding("ok", "address", f"{node.host} is {node.address}")


def check_host(here: NodeFacts, host: str, slots: int, there: RemoteFacts) -> list[Finding]:
    """One host: is it reached, does it have the same software, is its clock right, has it as many GPUs?"""
    if there.error:
        return [Finding("error", f"ssh {host}", there.error, _ssh_remedy(host, there.error))]
    findings = [Finding("ok", f"ssh {host}", f"reached, round trip {there.round_trip_s * 1000:.0f} ms")]
    findings += _clock(host, there)
    node = there.node
    if node is None:
        remedy = "the launcher runs the same path there: install Python and the packages at it"
        return [*findings, Finding("error", f"python {host}", there.probe_error or "no answer", remedy)]
    differing = [
        f"{name} {node.packages.get(name) or 'missing'} (here {here.packages.get(name) or 'missing'})"
        for name in PACKAGES
        if _public(node.packages.get(name)) != _public(here.packages.get(name))
    ]
    if node.python != here.python:
        differing.insert(0, f"python {node.python} (here {here.python})")
    if differing:
        text = ", ".join(differing)
        findings.append(Finding("error", f"versions {host}", text, "install the same on all hosts: constraints.txt"))
    else:
        findings.append(Finding("ok", f"versions {host}", "as here"))
    if node.gpus is not None and len(node.gpus) < slots:
        text = f"{slots} slots and {len(node.gpus)} GPUs"
        findings.append(Finding("error", f"GPUs {host}", text, "correct slots= in the hostfile"))
    # The shell of ssh has not the environment of the run, which the launcher brings.
    quiet = ("ok", "OMP_NUM_THREADS")
    findings += [found for found in check_node(node) if found.level not in quiet and found.check not in quiet]
    return findings


def _public(version: str | None) -> str | None:
    return None if version is None else version.partition("+")[0]


def _clock(host: str, there: RemoteFacts) -> list[Finding]:
    if there.skew_s is None:
        return [Finding("warning", f"clock {host}", "not measured", "see that date +%s.%N works there")]
    text = f"{there.skew_s:+.3f} s, known to {there.round_trip_s / 2:.3f} s"
    if abs(there.skew_s) - there.round_trip_s / 2 > LARGEST_SKEW_S:
        remedy = "run chrony or ntpd on all hosts; logs and recordings are out of step until then"
        return [Finding("warning", f"clock {host}", text, remedy)]
    return [Finding("ok", f"clock {host}", text)]


def _ssh_remedy(host: str, error: str) -> str:
    said = error.lower()
    if "host key" in said:
        return f"accept its key once: ssh {host} true"
    if "permission denied" in said:
        return f"give it your key: ssh-copy-id {host}"
    if "resolve" in said or "not known" in said:
        return "correct the name in the hostfile, or add it to /etc/hosts or ~/.ssh/config"
    return "see that it is up, that sshd runs there and that no firewall is between"


def check_deepspeed_env(files: Mapping[str, str], nodes: Mapping[str, NodeFacts]) -> list[Finding]:
    """``.deepspeed_env``: every line is ``KEY=VALUE``, which the launcher counts on, and interfaces exist.

    Args:
        files: texts by path.
        nodes: the machines on which the values will hold, by host.
    """
    findings = []
    for path, text in files.items():
        wrong = None
        for number, line in enumerate(text.splitlines(), start=1):
            key, equals, value = line.partition("=")
            if not equals or not re.fullmatch(r"\s*[A-Za-z_]\w*\s*", key):
                wrong = Finding(
                    "error",
                    path,
                    f"line {number}: {line!r}",
                    "write KEY=VALUE in every line; the launcher takes neither comments nor empty lines",
                )
                findings.append(wrong)
            elif key.strip().endswith("_SOCKET_IFNAME"):
                found = [interface_finding(key.strip(), value.strip(), node) for node in nodes.values()]
                findings += [item for item in found if item.level != "ok"]
        if wrong is None:
            findings.append(Finding("ok", path, f"{len(text.splitlines())} variable(s) for all hosts"))
    return findings
