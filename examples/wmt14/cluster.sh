#!/bin/sh
# Train on two hosts, with one pipeline stage per host:
#
#     examples/wmt14/cluster.sh HOST1 HOST2 RANKS_PER_HOST [arguments of train.py]
#
# Several ranks per host share the batch, or each operation with --model_parallel. Both hosts need
# the repository at the same path, the environment of `make setup`, the data of preprocess.py,
# and ssh access from this host without a password.
set -eu
if [ $# -lt 3 ]; then
  sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
first=$1 second=$2 ranks=$3
shift 3

cd "$(dirname "$0")/../.."
# horovodrun assigns the first ranks, and therefore the first stage, to the first host.
exec .venv/bin/horovodrun --gloo -np $((2 * ranks)) -H "$first:$ranks,$second:$ranks" \
  .venv/bin/python examples/wmt14/train.py \
  --encoder_layer 2 --decoder_layer 2 --pipeline_stage 2 --micro_batch_num 4 "$@"
