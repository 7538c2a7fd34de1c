#!/usr/bin/env bash
# Several nodes on one machine: network namespaces as hosts, an sshd in each, a real hostfile, pdsh, and the deepspeed
# launcher. First asks `doctor --hostfile`. Trains a small BERT on four stages over two hosts, three times:
#   1. undisturbed, started over ssh;
#   2. the same run, saving checkpoints, with a rank on the second host killed in the middle: the launcher must
#      end on its own, with an error, and no process may be left on either host;
#   3. resumed without ssh, one command per node, with --restarts, and with a rank killed again: it must end by itself,
#      with the losses of the undisturbed run, bit for bit.
# Installs pdsh, sshd and ip with apt-get if they are missing. Needs root and network namespaces: exit status 77 and one
# line where they may not be had. Removes what it has made. Usage: scripts/multinode_test.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

STEPS=24 KILL_AFTER=8
NODES=("vpipe$$-0" "vpipe$$-1") ADDRESSES=(10.77.0.1 10.77.0.2)
LIMIT=900 # seconds that any of the runs may take

unable() {
    echo "multinode_test: not run: $1" >&2
    exit 77
}

[[ $(id -u) == 0 ]] || unable "it needs root, to make network namespaces"
unshare --net --mount true 2>/dev/null || unable "network namespaces may not be made here"
declare -A package=([ip]=iproute2 [pdsh]=pdsh [ssh]=openssh-client [sshd]=openssh-server)
missing=()
for tool in "${!package[@]}"; do PATH=$PATH:/usr/sbin command -v "$tool" >/dev/null || missing+=("${package[$tool]}"); done
if ((${#missing[@]})); then
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}"; } \
        >/dev/null 2>&1 || unable "apt-get could not install ${missing[*]}"
fi

scripts/setup_env.sh >/dev/null
export PATH="$PWD/.venv/bin:$PATH"
work=$(mktemp -d)
daemons=() nodes=() folders=() # made here, and so removed at the end

clean_up() {
    for daemon in "${daemons[@]}"; do kill "$daemon" 2>/dev/null || true; done
    for node in "${nodes[@]}"; do
        for process in $(ip netns pids "$node" 2>/dev/null); do kill -9 "$process" 2>/dev/null || true; done
        ip netns del "$node" 2>/dev/null || true
    done
    for folder in "${folders[@]}"; do rmdir "$folder" 2>/dev/null || true; done
    rm -rf "$work"
}
trap clean_up EXIT
trap 'exit 143' TERM INT

# Two hosts and a cable between them.
for node in "${NODES[@]}"; do
    ip netns add "$node" 2>/dev/null || unable "ip netns may not make $node here"
    nodes+=("$node")
    ip -n "$node" link set lo up
done
ip link add eth0 netns "${NODES[0]}" type veth peer name eth0 netns "${NODES[1]}" || unable "veth is missing"
for number in 0 1; do
    ip -n "${NODES[number]}" addr add "${ADDRESSES[number]}/24" dev eth0
    ip -n "${NODES[number]}" link set eth0 up
done

# Keys and settings of ssh, seen by the namespaces only: they get a ~/.ssh of their own.
home=$(getent passwd "$(id -u)" | cut -d: -f6) # which ssh looks at, and not at $HOME
for folder in "$home/.ssh" /run/sshd; do # a place to mount them on, and one that sshd wants
    [[ -d $folder ]] || { mkdir -m 700 "$folder" && folders+=("$folder"); }
done
mkdir -m 700 "$work/ssh"
ssh-keygen -q -t ed25519 -N "" -f "$work/ssh/id_ed25519"
ssh-keygen -q -t ed25519 -N "" -f "$work/host_key"
cp "$work/ssh/id_ed25519.pub" "$work/ssh/authorized_keys"
printf 'StrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\nConnectTimeout 10\n' >"$work/ssh/config"
chmod 600 "$work"/ssh/*
on() { # on NUMBER COMMAND...: run it on a node
    local number=$1
    shift
    ip netns exec "${NODES[number]}" bash -c 'mount --bind "$0" "$1" && shift && exec "$@"' "$work/ssh" "$home/.ssh" "$@"
}
for number in 0 1; do
    on "$number" /usr/sbin/sshd -D -e -o "ListenAddress=${ADDRESSES[number]}" -o "HostKey=$work/host_key" \
        -o PermitRootLogin=prohibit-password -o StrictModes=no -o UsePAM=no -o PidFile=none \
        -o "AuthorizedKeysFile=$work/ssh/authorized_keys" -f /dev/null 2>"$work/sshd$number.log" &
    daemons+=($!)
done
for number in 0 1; do
    for attempt in {1..50}; do
        timeout 10 ip netns exec "${NODES[0]}" bash -c "exec 3<>/dev/tcp/${ADDRESSES[number]}/22" 2>/dev/null && break
        [[ $attempt -lt 50 ]] || { cat "$work/sshd$number.log" >&2; exit 1; }
        sleep 0.2
    done
done

# What a user has: a hostfile, and variables that ssh does not pass on.
printf '%s slots=2\n' "${ADDRESSES[@]}" >"$work/hostfile"
mkdir "$work/run"
variables=(OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu GLOO_SOCKET_IFNAME=eth0 "PATH=$PATH")
[[ -z ${TORCH_EXTENSIONS_DIR:-} ]] || variables+=("TORCH_EXTENSIONS_DIR=$TORCH_EXTENSIONS_DIR")
printf '%s\n' "${variables[@]}" >"$work/run/.deepspeed_env"
python - "$work/config.json" <<'PYTHON'
import json, sys

config = json.load(open("ds_configs/bert_tiny_cpu.json"))
config["steps_per_print"] = 1
config["vpipe"]["peer_timeout_s"] = 60
json.dump(config, open(sys.argv[1], "w"))
PYTHON

root=$PWD
launch() { # launch NUMBER LOG "OPTIONS OF THE LAUNCHER" [arguments of train.py]
    local number=$1 log=$2 options
    read -ra options <<<"$3"
    shift 3
    (
        cd "$work/run"
        export PYTHONPATH=$root "${variables[@]}" # what no ssh has to pass on
        # A save sets micro-batches in flight back: all runs do it.
        on "$number" timeout "$LIMIT" deepspeed --hostfile "$work/hostfile" --master_addr "${ADDRESSES[0]}" \
            "${options[@]}" "$root/models/bert/train.py" --deepspeed_config "$work/config.json" --synthetic \
            --max_steps "$STEPS" --save_strategy steps --save_steps "$((KILL_AFTER / 2))" "$@"
    ) >"$log" 2>&1
}
fail() {
    echo "multinode_test: FAILED: $1" >&2
    shift
    for log in "$@"; do
        echo "--- $log" >&2
        tail -n 40 "$log" >&2
    done
    exit 1
}
trains() { # trains NODE: processes of training there, of launchers too
    for process in $(ip netns pids "$1"); do
        if tr '\0' ' ' <"/proc/$process/cmdline" 2>/dev/null | grep -q "models/bert/train.py"; then echo "$process"; fi
    done
}

kill_a_rank() { # kill_a_rank OUTPUT UPDATES LOG: one of the second node, once the run has trained so many updates
    local waited lines victim
    for ((waited = 0; ; waited++)); do
        lines=$(grep -c . "$1/metrics.jsonl" 2>/dev/null || true)
        ((${lines:-0} < $2)) || break
        kill -0 "$launched" 2>/dev/null || fail "the run ended before it was killed" "$3"
        ((waited < LIMIT * 5)) || fail "no progress" "$3"
        sleep 0.2
    done
    victim=$(for process in $(trains "${NODES[1]}"); do
        # Command lines of the node's launcher and of supervisors name the script too; these have one thread.
        tr '\0' ' ' <"/proc/$process/cmdline" | grep -q "launcher.launch\|sshd\|bash" && continue
        threads=("/proc/$process/task/"*)
        ((${#threads[@]} == 1)) || echo "$process"
    done | tail -n 1)
    kill -9 "$victim"
}

echo "0. what doctor says of the two hosts"
(cd "$work/run" && on 0 env "PYTHONPATH=$root" "${variables[@]}" timeout "$LIMIT" \
    python -m ds_vpipe doctor --hostfile "$work/hostfile") >"$work/doctor.log" 2>&1 ||
    fail "doctor finds errors" "$work/doctor.log"
grep "ssh 10\|versions 10\|clock 10\|doctor" "$work/doctor.log" || fail "doctor has not reached the hosts" "$work/doctor.log"

echo "1. two hosts, two ranks each, over ssh and pdsh"
launch 0 "$work/whole.log" "" --output_dir "$work/whole" || fail "the undisturbed run ended with an error" "$work/whole.log"

echo "2. the same, and a rank on the second host is killed"
launch 0 "$work/killed.log" "" --output_dir "$work/killed" &
launched=$!
kill_a_rank "$work/killed" "$KILL_AFTER" "$work/killed.log"
if wait "$launched"; then
    fail "the launcher reported success although a rank was killed" "$work/killed.log"
fi
for ((waited = 0; ; waited++)); do
    left=$(for node in "${NODES[@]}"; do trains "$node"; done | xargs)
    [[ -n $left ]] || break
    ((waited < 30)) || fail "processes $left are left" "$work/killed.log"
    sleep 1
done
grep -m 1 -o "stage [0-9]* .*lost\|stage [0-9]* .*\(closed\|failed\|ended\).*" "$work/killed.log" | head -n 1 || true

echo "3. resumed without ssh, one command per node, with --restarts; a rank on the second host is killed again"
mv "$work/killed/metrics.jsonl" "$work/killed.jsonl"
resume=(--output_dir "$work/killed" --resume_from_checkpoint)
launch 1 "$work/resumed1.log" "--no_ssh --node_rank 1 --module ds_vpipe.run --restarts 1" "${resume[@]}" &
second=$!
launch 0 "$work/resumed.log" "--no_ssh --node_rank 0 --module ds_vpipe.run --restarts 1" "${resume[@]}" &
launched=$!
kill_a_rank "$work/killed" "$((KILL_AFTER / 2))" "$work/resumed.log"
wait "$launched" || fail "resuming failed" "$work/resumed.log" "$work/resumed1.log"
wait "$second" || fail "resuming failed on the second node" "$work/resumed1.log"
grep -o "rank [23] ended by SIGKILL; restart 1 of 1" "$work/resumed.log" || fail "no restart" "$work/resumed.log"

python - "$work" "$STEPS" <<'PYTHON' || fail "losses differ" "$work/resumed.log"
import json, re, sys
from pathlib import Path

work, steps = Path(sys.argv[1]), int(sys.argv[2])
whole, killed, resumed = (
    {row["step"]: row["loss"] for row in map(json.loads, (work / name).open()) if "loss" in row}
    for name in ("whole/metrics.jsonl", "killed.jsonl", "killed/metrics.jsonl")
)
assert [*whole] == [*range(1, steps + 1)], whole
assert killed and len(killed) < steps and killed.items() <= whole.items(), (whole, killed)
places = [int(place) for place in re.findall(r"Resumed after update (\d+)", (work / "resumed.log").read_text())]
assert len(places) == 2 and 0 < places[0] <= places[1] < steps, places
assert resumed == {step: whole[step] for step in range(places[0] + 1, steps + 1)}, (whole, resumed)
print(f"resumed after updates {places} of {steps}: losses equal those of the undisturbed run bit for bit")
PYTHON
echo "multinode_test: passed"
