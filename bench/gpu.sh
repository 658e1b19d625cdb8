#!/usr/bin/env bash
# Everything that only a GPU can tell, in under ten minutes: correctness of the operators on the device, then the memory and
# the speed sweeps, and a head in the graph against its products. Needs torch, triton, tabulate and this checkout; builds, fetches and installs nothing.
#
#     bash bench/gpu.sh OUT [python]
#
# Tables, JSON and pictures are in OUT as they are made; a second run goes on where the first was stopped.
set -uo pipefail
out=$(realpath -m "${1:?usage: bash bench/gpu.sh OUT [python]}")
python=${2:-python3}
cd "$(dirname "$0")/.."
mkdir -p "$out"
export PYTHONPATH=$PWD PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} # a group of one process needs no network

# what a report of a failure needs; a checkout that is not installed has no entry point, which is no reason to stop
"$python" -m slime_compile doctor 2>&1 | tee "$out/doctor.txt"
"$python" - <<'EOF' | tee "$out/stamp.txt" || exit 2
from bench.measure.cells import stamp, stamp_line
print(stamp_line(stamp()))
EOF
"$python" bench/gpu/check.py 2>&1 | tee "$out/check.txt"
checked=${PIPESTATUS[0]}
if [ "$checked" -ne 0 ]; then
    echo "bench/gpu/check.py ended with $checked: nothing is measured with operators that are not right" >&2
    exit "$checked"
fi
status=0
"$python" -m bench speed --out "$out" --resume --seconds 5 --minutes 2 2>&1 | tee "$out/speed.txt" || status=1
"$python" -m bench memory --out "$out" --resume --minutes 3.5 2>&1 | tee "$out/memory.txt" || status=1
"$python" bench/gpu/head.py "$out" 2>&1 | tee "$out/head.log" || status=1
exit "$status"
