#!/bin/bash
# A real Slurm on this machine, without systemd and cgroups: N virtual nodes n0, n1, ... of C cores each. As root.
#   LAB_DIR=/some/folder slurm_up.sh [N=2] [C=2]      then: export SLURM_CONF=$LAB_DIR/slurm/slurm.conf; sinfo
# Two partitions: debug, and urgent, whose jobs preempt those of debug (they get SIGTERM, and 60 s before they are requeued).
set -eu
N=${1:-2}; C=${2:-2}; D=$LAB_DIR/slurm; H=$(hostname -s); PORT=${LAB_PORT:-17000}
mkdir -p "$D"/{munge,run,state,spool,log,tmp}; chmod 755 "$D" "$D"/*; chmod 700 "$D/munge"
# munge: a key and a socket of our own
head -c 128 /dev/urandom > "$D/munge/key"; chmod 400 "$D/munge/key"
munged --key-file="$D/munge/key" --socket="$D/run/munge.socket.2" --pid-file="$D/munged.pid" \
       --log-file="$D/munge/munged.log" --seed-file="$D/munge/seed"
{ cat /etc/hosts; for i in $(seq 0 $((N-1))); do echo "127.0.0.1 n$i"; done; } > "$D/hosts"
cat > "$D/slurm.conf" <<C
ClusterName=lab
SlurmctldHost=$H(127.0.0.1)
SlurmctldPort=$PORT
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$D/run/munge.socket.2
CredType=cred/munge
StateSaveLocation=$D/state
SlurmdSpoolDir=$D/spool/%n
SlurmctldPidFile=$D/slurmctld.pid
SlurmdPidFile=$D/slurmd.%n.pid
SlurmctldLogFile=$D/log/slurmctld.log
SlurmdLogFile=$D/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
TmpFS=$D/tmp/%n
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=5
MinJobAge=300
C
# TmpFS differs from node to node: two slurmds that share it take each other's PMIx folder.
for i in $(seq 0 $((N-1))); do
  echo "NodeName=n$i NodeAddr=127.0.0.1 Port=$((PORT+10+i)) CPUs=$C Sockets=1 CoresPerSocket=$C ThreadsPerCore=1 RealMemory=1000 State=UNKNOWN"
done >> "$D/slurm.conf"
echo "PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60" >> "$D/slurm.conf"
echo "PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF" >> "$D/slurm.conf"
export SLURM_CONF="$D/slurm.conf"
slurmctld -i -f "$SLURM_CONF"
# Each slurmd in a UTS namespace of its own, so that a rank's hostname is its node's: else MPIs take both for one node.
for i in $(seq 0 $((N-1))); do
  mkdir -p "$D/spool/n$i" "$D/tmp/n$i"
  unshare --uts --mount sh -c "hostname n$i; mount --bind $D/hosts /etc/hosts; exec slurmd -N n$i -f $SLURM_CONF"
done
for _ in $(seq 120); do
  [ "$(sinfo -h -N -p debug -t idle -o %N 2>/dev/null | sort -u | wc -l)" = "$N" ] && exit 0
  sleep 0.5
done
sinfo -N -l; exit 1
