#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# 100+ GiB of weights on a GPU under a real systemd: start, kill -9, restart, daemon-reexec, stop, with the memory in use
# after each step and the bytes checked by engines, one of which keeps its mapping through all of it.
#   gpu_systemd.sh BOOT     BOOT: a script that boots a systemd in an overlay of this machine (BOOT start|exec CMD|stop)
# Environment: PUBLISH_GIB (104: an engine publishes so much), MODEL_GIB (8: the checkpoint that the rank preloads),
#   PYTHONPATH (where wcache's dependencies are, if not installed), BINDS (more paths to show inside).
set -euo pipefail
boot=${1:?the script that boots a systemd}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
publish_gib=${PUBLISH_GIB:-104} model_gib=${MODEL_GIB:-8}
checkpoint=/var/tmp/wcache-bench/checkpoint
paths=$root:$root/tests:$root/tests/gpu:$root/scripts/bench${PYTHONPATH:+:$PYTHONPATH}
python=$(command -v python3)
worker=$root/scripts/bench/gpu_workers.py
export BINDS="/opt $root ${BINDS:-}"
missed=0 begun=0 over=0

used() { nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | head -n 1; }
inside() { bash "$boot" exec "$@"; }
now() { date +%s.%N; }
since() { echo "$(now) $1" | awk '{printf "%.2f s", $1 - $2}'; }
row() { printf '| %-46s | %10s | %7s MiB | %-44s |\n' "$1" "$2" "$(used)" "$3"; }
check() { # name, 0 or 1
    if [ "$2" -ne 0 ]; then
        echo "NOT SO: $1"
        missed=1
    fi
}
role() { inside env PYTHONPATH="$paths" "$python" "$worker" "$@"; }
state() { inside systemctl show wcache@0.service -p SubState -p StatusText -p NFileDescriptorStore --value | paste -sd' '; }
pid() { inside systemctl show wcache@0.service -p MainPID --value; }
ready() { # wait until another process than $1 is running and ready
    for _ in $(seq 600); do
        if [ "$(inside systemctl show wcache@0.service -p SubState --value)" = running ] && [ "$(pid)" != "$1" ]; then
            return 0
        fi
        sleep 0.05
    done
    echo "the rank did not become ready: $(state)"
    return 1
}
settle() { # wait until no more than $1 MiB are in use
    for _ in $(seq 100); do
        if [ "$(used)" -le "$1" ]; then return 0; fi
        sleep 0.1
    done
    return 1
}
look() { # a new engine attaches and looks at every tensor
    printf '\n' | role attach "$attach" | tail -n 1
}
# shellcheck disable=SC2317  # called by the trap
finish() {
    if [ "$begun" -eq 1 ]; then
        if [ "$over" -eq 0 ]; then inside journalctl -u 'wcache@*' -o cat --no-pager | tail -n 80 || true; fi
        bash "$boot" stop || true
    fi
    rm -rf /var/tmp/wcache-bench
}
trap finish EXIT

uuid=$(PYTHONPATH=$paths "$python" "$worker" devices '{}' </dev/null |
    "$python" -c 'import json, sys; print(json.load(sys.stdin)["uuids"][0])')
echo "$uuid, driver $(cat /sys/module/nvidia/version 2>/dev/null || echo unknown), kernel $(uname -r)"
PYTHONPATH=$paths "$python" -c "import sys, gpu, pathlib; gpu.make_checkpoint(pathlib.Path(sys.argv[1]), int(sys.argv[2]))" \
    "$checkpoint" "$model_gib"
begun=1
bash "$boot" start
inside bash -c "mkdir -p /etc/wcache && cat >/etc/wcache/wcache.toml" <<TOML
model = "$checkpoint"
backend = "cuda"
devices = ["$uuid"]
TOML
inside bash -c "cat >/usr/local/bin/wcache && chmod 755 /usr/local/bin/wcache" <<SH
#!/bin/sh
PYTHONPATH=$paths exec $python -m wcache "\$@"
SH
inside "$python" "$root/scripts/install" --wcache /usr/local/bin/wcache --reload
inside systemctl --version | head -n 1

attach=$(printf '{"socket": "/run/wcache/rank-0.sock", "gpu": "%s", "name": "systemd", "again": 1}' "$uuid")
base=$(used)
row "nothing runs" "" ""
t=$(now)
inside systemctl start wcache.target
row "systemctl start wcache.target, $model_gib GiB preloaded" "$(since "$t")" "$(state)"
t=$(now)
role publish "$(printf '{"socket": "/run/wcache/rank-0.sock", "gpu": "%s", "name": "systemd", "total": %d, "count": 1000}' \
    "$uuid" $((publish_gib << 30)))" </dev/null >/dev/null
row "an engine published $publish_gib GiB and ended" "$(since "$t")" "$(state)"
held=$(used)
check "at least $((publish_gib + model_gib - 2)) GiB are held" $((held - base < (publish_gib + model_gib - 2) * 1024))

coproc ENGINE { role attach "$attach"; }
read -r first <&"${ENGINE[0]}"
row "an engine is attached" "" "$(echo "$first" | cut -c1-40)"
serving=$(used)

for step in "kill -9" "kill -9 again" "systemctl restart wcache@0" "systemctl restart wcache.target" \
    "daemon-reexec, then kill -9"; do
    before=$(pid) t=$(now)
    case $step in
    *kill*)
        if [ "$step" != "${step#daemon-reexec}" ]; then inside systemctl daemon-reexec; fi
        inside systemctl kill -s KILL --kill-whom=main wcache@0.service
        ;;
    *)
        read -ra command <<<"$step"
        inside "${command[@]}"
        ;;
    esac
    ready "$before"
    took=$(since "$t")
    row "$step: ready again" "$took" "$(state)"
    settle $((serving + 2)) || true
    check "$step: memory is the same" $(($(used) > serving + 2 || $(used) < serving - 2))
    found=$(look)
    case $found in *'"wrong": 0'*) ;; *) check "$step: a new engine finds the bytes ($found)" 1 ;; esac
    settle $((serving + 2)) || true
    check "$step: the same memory again" $(($(used) > serving + 2 || $(used) < serving - 2))
done
loads=$(inside journalctl -u wcache@0.service -o cat --no-pager | grep -c 'loading shard from disk' || true)
row "loads from disk in all of this" "" "$loads"
check "the checkpoint was read once" $((loads != 1))
inside /usr/local/bin/wcache status || check "wcache status" 1
inside /usr/local/bin/wcache verify || check "wcache verify" 1

echo >&"${ENGINE[1]}"
read -r last <&"${ENGINE[0]}"
row "the engine that was attached all the time" "" "$last"
case $last in *'"wrong": 0'*) ;; *) check "the engine that stayed reads the same bytes" 1 ;; esac
engine=$ENGINE_PID
eval "exec ${ENGINE[1]}>&-"
wait "$engine" || true
settle "$held" || check "the engine's own memory is free" 1
row "it ended" "" ""
t=$(now)
inside systemctl stop wcache.target
settle "$base" || check "systemctl stop frees everything" 1
row "systemctl stop wcache.target" "$(since "$t")" "$(inside systemctl is-active wcache@0.service || true)"
if [ "$missed" -eq 0 ]; then
    over=1
    echo "everything as it should be"
fi
exit "$missed"
