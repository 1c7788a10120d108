#!/bin/bash
# What the lab needs, from Debian or Ubuntu: Slurm with munge, sshd, ip. As root.
set -eu
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends slurm-wlm munge libpmix2 libpmi2-0 iproute2 openssh-server openssh-client
# slurmd's pmix plugin opens libpmix.so, which only libpmix-dev would bring.
for library in /usr/lib/*-linux-gnu/pmix2/lib/libpmix.so.2; do
  [ -e "${library%.2}" ] || ln -s libpmix.so.2 "${library%.2}"
done
