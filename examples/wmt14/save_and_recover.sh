#!/usr/bin/env bash
# Save and recover a run, as in the published sample: train on eight devices (model_parallel=4,
# data_parallel=2), delete a part of the last checkpoint, and resume on another layout with the
# same loss.
#
#   examples/wmt14/save_and_recover.sh [FOLDER]
#
# Two ranks use four logical devices each. Both ranks have all slices, so --replicas can write every
# part twice. Set PYTHON and HOROVODRUN to use other programs.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${1:-runs/wmt14-checkpoints}
python=${PYTHON:-.venv/bin/python}
horovodrun=${HOROVODRUN:-.venv/bin/horovodrun}
options=(examples/wmt14/train.py --faithful --lr "${LR:-1e-3}" --checkpoints "$folder" --resume
  --data "${DATA:-data/wmt14/wmt14.fr_en.txt}")

echo "Training two epochs on eight devices, model_parallel=4, data_parallel=2"
"$horovodrun" --gloo -np 2 "$python" "${options[@]}" --epochs 2 --replicas \
  --model_parallel 4 --local_devices 4

last=$(ls -d "$folder"/step-???????? | tail -n 1)
echo "Deleting a part of $last"
rm "$last/state.data-00001-of-00002"

echo "Resuming for two epochs on two devices, model_parallel=2, data_parallel=1"
"$python" "${options[@]}" --epochs 4 --model_parallel 2 --local_devices 2
