#!/usr/bin/env bash
# Everything that needs several real GPUs, in one call of under 8 minutes:
#
#     examples/multi_gpu_run.sh results/      # writes its tables and CSV files there
#
# It runs fx-fusion doctor, the GPU tests on distinct devices, and for each of the world sizes
# 2, 4 and 8 that the machine has GPUs for, the benchmarks of the kernels and of a decode step,
# both with NCCL among the candidates. Each step has a time limit; a step that fails or runs out
# of time doesn't keep the others from running, and the exit status is 1 if there was one.
#
# NVLink multicast is left off, for NCCL (NVLS) and for torch's symmetric memory: what is
# compared is what runs on every machine.
#
# PYTHON chooses the interpreter, LIMIT the seconds for everything (460).
set -uo pipefail

usage="usage: examples/multi_gpu_run.sh FOLDER"
folder=${1:?$usage}
mkdir -p "$folder" || exit 2
folder=$(cd "$folder" && pwd)
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python3}
deadline=$((SECONDS + ${LIMIT:-460}))
failed=()

export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
# The ranks have a GPU each; a daemon that lets them share one has no part in this.
unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY

# step SECONDS NAME COMMAND...: run it, show what it prints and keep that in FOLDER/NAME.txt
step() {
    local seconds=$1 name=$2 left=$((deadline - SECONDS)) start=$SECONDS status
    shift 2
    echo
    echo "== $name: $*"
    if ((left < 15)); then
        echo "== $name: not run, the time is up"
        failed+=("$name")
        return
    fi
    ((seconds < left)) || seconds=$left
    # The command ends by itself with a report; the signal is for one that hangs.
    timeout --kill-after=15 "$seconds" "$@" 2>&1 </dev/null | tee "$folder/$name.txt"
    status=${PIPESTATUS[0]}
    if ((status)); then
        failed+=("$name")
        echo "== $name: failed with status $status after $((SECONDS - start)) s"
    else
        echo "== $name: $((SECONDS - start)) s"
    fi
}

if ! gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())'); then
    echo "$python has no torch; set PYTHON to one that has it and fx_fusion." >&2
    exit 2
fi
if ((gpus < 2)); then
    echo "torch sees $gpus GPU(s); this needs 2 or more." >&2
    exit 2
fi
worlds=()
selected=""  # an expression for pytest: no test of more ranks than GPUs
for world in 2 3 4 6 8; do
    if ((world > gpus)); then
        selected+="${selected:+ and }not [$world- and not -$world]"
    elif ((world != 3 && world != 6)); then
        worlds+=("$world")
    fi
done

"$python" - <<'PY'
import platform
import torch
nccl = ".".join(map(str, torch.cuda.nccl.version()))
names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
print(f"{torch.cuda.device_count()} x {', '.join(sorted(names))}, torch {torch.__version__},")
print(f"CUDA {torch.version.cuda}, Python {platform.python_version()}, NCCL {nccl};")
print("NVLS (NVLink multicast): off, by NCCL_NVLS_ENABLE=0 and TORCH_SYMM_MEM_DISABLE_MULTICAST=1")
PY

# It builds the CPU kernel, if that isn't in the cache.
if "$python" -c 'import typer, rich' 2>/dev/null; then
    step 90 doctor "$python" -m fx_fusion.cli doctor
else
    step 90 doctor "$python" -m fx_fusion.doctor
fi

# What is left is shared: two fifths for the tests, the rest for the benchmarks of each world size.
# The tests are those that other GPUs may answer differently; make test-gpu runs all of them.
left=$((deadline - SECONDS))
chosen="test_ranks or large_calls or several_groups or absent_peer or killed or replays_with"
step $((2 * left / 5)) tests "$python" -m pytest -q -m gpu \
    -k "($chosen)${selected:+ and $selected}" \
    tests/gpu/test_one_shot.py tests/gpu/test_hand_captured.py

tokens=1,8,32,128 hidden=2880,4096,8192
((${#worlds[@]} == 1)) || tokens=8 hidden=2880,8192
left=$((deadline - SECONDS))
for world in "${worlds[@]}"; do
    share=$((left / ${#worlds[@]}))
    limit=$((share / 2))
    step "$limit" "kernels_$world" "$python" -m fx_fusion.bench.kernels \
        --world-size "$world" --tokens 1,8,32,128 --hidden-size "$hidden" \
        --timeout $((limit > 20 ? limit - 8 : limit)) --csv "$folder/kernels_$world.csv"
    step "$limit" "decode_$world" "$python" -m fx_fusion.bench.decode \
        --world-size "$world" --shapes gpt-oss-20b --layers 2 --tokens "$tokens" \
        --timeout $((limit > 40 ? limit - 20 : limit)) --csv "$folder/decode_$world.csv"
done

echo
if ((${#failed[@]})); then
    echo "failed: ${failed[*]}"
    exit 1
fi
echo "all steps passed in $SECONDS s; the files are in the folder given"
