#!/bin/sh
# Runs the traces of this directory in ASTRA-sim, for @MACHINE@.
#   sh astra-sim.sh [AstraSim_Analytical_Congestion_Unaware [more options]]
# ASTRA-sim exits with 0 whether or not its ranks finish: here 1 if any does not, 2 if it crashed
# before all had said so, which may be after they finished.
sim=${1:-AstraSim_Analytical_Congestion_Unaware}
[ $# -gt 0 ] && shift
case "$sim" in /*) ;; */*) sim=$PWD/$sim ;; esac
case "$0" in */*) CDPATH= cd -- "${0%/*}" || exit 1 ;; esac
command -v "$sim" > /dev/null || { echo "astra-sim.sh: no program $sim" >&2; exit 127; }
chmod u+w workload.*.et
"$sim" \
  --workload-configuration=workload \
  --comm-group-configuration=comm_group.json \
  --system-configuration=system.json \
  --network-configuration=network.yml \
  --remote-memory-configuration=remote_memory.json \
  "$@" > astra-sim.log 2>&1
ended=$?
grep 'finished, ' astra-sim.log
finished=$(grep -o 'sys\[[0-9]*\] finished, ' astra-sim.log | sort -u | grep -c .)
[ "$finished" -eq @RANKS@ ] && ! grep -q 'unreleased\|callable is removed' astra-sim.log && exit 0
if [ "$finished" -lt @RANKS@ ] && [ "$ended" -ge 128 ]; then
  echo "astra-sim.sh: ASTRA-sim crashed ($ended) when $finished of @RANKS@ ranks had said that" \
    "they finished; lines may be lost: run it again, or the congestion-unaware backend" >&2
  exit 2
fi
echo "astra-sim.sh: $finished of @RANKS@ ranks finished; see astra-sim.log" >&2
exit 1
