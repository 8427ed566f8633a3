#!/bin/sh
# The pods of the StatefulSet `whale` that take ranks, for an elastic run: `whale run --hosts-from ./pods.sh train.py`.
# Ranks follow `kubectl scale statefulset whale --replicas=N`: the list is read every two seconds.
SET=${SET:-whale}
n=0
while getent hosts "$SET-$n.$SET" >/dev/null; do
  echo "$SET-$n.$SET slots=${SLOTS:-1}"
  n=$((n + 1))
done
