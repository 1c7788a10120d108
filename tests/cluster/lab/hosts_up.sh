#!/bin/bash
# N virtual hosts h0, h1, ... on this machine: each with its own network, hostname, processes, IPC and /dev/shm, joined by a
# bridge, each with sshd. As root.
#   LAB_DIR=/some/folder [LAB_RATE=400mbit] hosts_up.sh [N=2]      then: $LAB_DIR/hosts/hx h0 hostname
# LAB_RATE limits every host's link, both ways.
set -eu
N=${1:-2}; D=$LAB_DIR/hosts; NET=${LAB_NET:-10.77.0}
mkdir -p "$D" /run/sshd; chmod 700 "$D"
ssh-keygen -q -t ed25519 -N '' -f "$D/hostkey"; ssh-keygen -q -t ed25519 -N '' -f "$D/id"
cp "$D/id.pub" "$D/authorized_keys"
cat > "$D/sshd_config" <<C
HostKey $D/hostkey
AuthorizedKeysFile $D/authorized_keys
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
AcceptEnv *
MaxStartups 100
UseDNS no
C
printf 'Host *\n  IdentityFile %s/id\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n' "$D" > "$D/ssh_config"
printf '#!/bin/sh\nexec /usr/bin/ssh -F %s/ssh_config "$@"\n' "$D" > "$D/ssh"  # the launchers' agent: ~/.ssh is not touched
cat > "$D/hx" <<C
#!/bin/sh
# hx HOST COMMAND...: run a command inside a virtual host
h=\$1; shift
exec nsenter -t \$(cat $D/\$h.pid) -n -u -m -i -p -- sh -c 'cd "\$0" && exec "\$@"' "\$PWD" "\$@"
C
chmod 755 "$D/ssh" "$D/hx"
ip link add br-mpshard type bridge
ip addr replace "$NET.254/24" dev br-mpshard; ip link set br-mpshard up
{ echo "127.0.0.1 localhost"; for i in $(seq 0 $((N-1))); do echo "$NET.$((i+1)) h$i"; done; } > "$D/hosts"
for i in $(seq 0 $((N-1))); do
  h=h$i
  ip netns add mpshard-$h
  ip link add mpshard$i type veth peer name eth0 netns mpshard-$h
  ip link set mpshard$i master br-mpshard up
  ip -n mpshard-$h addr add "$NET.$((i+1))/24" dev eth0
  ip -n mpshard-$h link set lo up; ip -n mpshard-$h link set eth0 up
  nsenter --net=/run/netns/mpshard-$h unshare --uts --mount --ipc --pid --fork --mount-proc \
    sh -c "hostname $h; mount --bind $D/hosts /etc/hosts; mount -t tmpfs tmpfs /dev/shm; mount -t sysfs sysfs /sys
           exec /usr/sbin/sshd -D -f $D/sshd_config -E $D/sshd.$h.log" >/dev/null 2>&1 </dev/null &
  parent=$!
  for _ in $(seq 50); do child=$(tr -d ' ' < /proc/$parent/task/$parent/children); [ -n "$child" ] && break; sleep 0.1; done
  echo "$child" > "$D/$h.pid"
done
for i in $(seq 0 $((N-1))); do
  for _ in $(seq 50); do "$D/hx" h0 "$D/ssh" h$i true >/dev/null 2>&1 && continue 2; sleep 0.2; done
  echo "h$i does not answer"; exit 1
done
[ -n "${LAB_RATE:-}" ] || exit 0
for i in $(seq 0 $((N-1))); do
  tc qdisc add dev mpshard$i root tbf rate "$LAB_RATE" burst 256kb latency 200ms
  "$D/hx" h$i tc qdisc add dev eth0 root tbf rate "$LAB_RATE" burst 256kb latency 200ms
done
