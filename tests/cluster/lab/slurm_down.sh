#!/bin/bash
# Stops what slurm_up.sh started, by its pid files.
for file in "$LAB_DIR"/slurm/{slurmd.*,slurmctld,munged}.pid; do
  [ -s "$file" ] && kill "$(cat "$file")" 2>/dev/null
done
exit 0
