#!/usr/bin/env bash
# Checks Virgate on this machine's GPUs and leaves what was seen in $OUT. It sets no
# clock, no mode and resets nothing. As root, where nvidia-cuda-mps-control is, it runs
# MPS and small CUDA programs on one idle GPU. Exit code 0 says that all of it held.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
out=${OUT:-$PWD/out}
mkdir -p "$out"

if ! command -v nvidia-smi >/dev/null; then
  echo 'gpu: no nvidia-smi, which the findings are held against' >&2
  exit 1
fi
{
  nvidia-smi -L
  nvidia-smi --query-gpu=index,uuid,pci.bus_id,name,memory.total,driver_version,mig.mode.current,ecc.mode.current,persistence_mode --format=csv
  nvidia-smi topo -m
  nvidia-smi -q | grep -E -A 3 '^GPU|Reset Status|Recovery Action|Virtualization Mode'
  uname -sr
} >"$out/machine.txt" 2>&1

failed=0
step() { # NAME COMMAND…: runs it and keeps its output
  echo "gpu: $1"
  "${@:2}" >"$out/$1.txt" 2>&1 || { failed=1; echo "gpu: $1 failed:" >&2; tail -n 40 "$out/$1.txt" >&2; }
}
export VIRGATE_DRIVER=required VIRGATE_TRACE=$out/trace.jsonl VIRGATE=$PWD/virgate CUDA_CLIENT=$PWD/cudaclient OUT=$out
step conformance ./driver.test -test.v -test.run '^TestConformance$'
step checks ./gpu.test -test.v
step plan ./virgate plan --node nvml --record "$out/plan.jsonl"
step replay ./virgate plan --node "trace:$out/plan.jsonl"
# The recording has other UUIDs.
named() { sed -E 's/[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}/UUID/g' "$1"; }
diff <(named "$out/plan.txt") <(named "$out/replay.txt") || failed=1
exit "$failed"
