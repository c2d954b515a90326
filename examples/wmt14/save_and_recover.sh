#!/usr/bin/env bash
# The published sample's run that is saved and recovered: it trains on eight devices, operations
# cut in four and the batch in two; loses a part of its last checkpoint; and goes on, on another
# layout, with the loss that it had.
#
#   examples/wmt14/save_and_recover.sh [FOLDER]
#
# Two ranks drive four logical devices each. Both have all slices, so that every part can be
# written twice (--replicas). PYTHON and HOROVODRUN choose other programs.
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
echo "Losing a part of $last"
rm "$last/state.data-00001-of-00002"

echo "Going on for two epochs on two devices, model_parallel=2, data_parallel=1"
"$python" "${options[@]}" --epochs 4 --model_parallel 2 --local_devices 2
