#!/usr/bin/env bash
# Everything that only a GPU can tell, in about ten minutes: correctness of the operators on the device, compute-sanitizer
# where there is one, the memory and the speed sweeps, and a head in the graph against its products. Needs torch, triton,
# tabulate and this checkout; builds, fetches and installs nothing.
#
#     bash bench/gpu.sh OUT [python]
#
# Each step has its own time limit, and the rest still run when one fails. Tables, JSON and pictures are in OUT as they are
# made, all of it together in OUT/gpu.md and OUT/gpu.json. A second run goes on where the first was stopped.
# Exit status: 0, or 1 where a step failed, or 2 without a device.
set -uo pipefail
out=$(realpath -m "${1:?usage: bash bench/gpu.sh OUT [python]}")
python=${2:-python3}
cd "$(dirname "$0")/.."
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} # a group of one process needs no network
: > "$out/steps.txt"
status=0

# step NAME SECONDS COMMAND...: its output is in OUT/NAME.log, how it ended in OUT/steps.txt
step() {
    local name=$1 limit=$2 begun=$SECONDS ended
    shift 2
    timeout --kill-after=10 "$limit" "$@" 2>&1 | tee "$out/$name.log"
    ended=${PIPESTATUS[0]}
    echo "$name $ended $((SECONDS - begun))" >> "$out/steps.txt"
    [ "$ended" -eq 0 ] && return
    status=1
    echo "step $name ended with $ended (124: after its $limit seconds); the others go on" >&2
}

"$python" - <<'EOF' | tee "$out/stamp.txt" || exit 2
from bench.measure.cells import stamp, stamp_line
print(stamp_line(stamp()))
EOF
"$python" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else 2)' || {
    echo "needs a CUDA device; torch finds none here. Nothing was measured." >&2
    exit 2
}
# what a report of a failure needs; a checkout that is not installed has no entry point, which is no reason to stop
step doctor "${GPU_DOCTOR_S:-60}" "$python" -m slime_compile doctor
step check "${GPU_CHECK_S:-150}" "$python" bench/gpu/check.py
if command -v compute-sanitizer > /dev/null; then
    step sanitizer "${GPU_SANITIZER_S:-90}" compute-sanitizer --error-exitcode 1 "$python" bench/gpu/check.py --small
else
    echo "compute-sanitizer is not here: not run" | tee "$out/sanitizer.log"
fi
step head "${GPU_HEAD_S:-120}" "$python" bench/gpu/head.py "$out"
step memory "${GPU_MEMORY_S:-150}" "$python" -m bench memory --out "$out" --resume --minutes 2
step speed "${GPU_SPEED_S:-150}" "$python" -m bench speed --out "$out" --resume --seconds 5 --minutes 2
"$python" bench/gpu/collect.py "$out" || status=1
exit "$status"
