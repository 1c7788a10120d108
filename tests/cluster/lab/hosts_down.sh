#!/bin/bash
# Ends the virtual hosts of hosts_up.sh: the death of a namespace's first process ends all others in it.
for file in "$LAB_DIR"/hosts/h*.pid; do
  [ -s "$file" ] && kill -9 "$(cat "$file")" 2>/dev/null
done
sleep 0.2
for name in $(ip netns list 2>/dev/null | cut -d' ' -f1 | grep '^mpshard-h'); do ip netns del "$name"; done
for link in $(ip -o link show 2>/dev/null | grep -o 'mpshard[0-9]*@' | tr -d @) br-mpshard; do ip link del "$link" 2>/dev/null; done
exit 0
