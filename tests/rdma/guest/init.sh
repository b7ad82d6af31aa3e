#!/bin/busybox sh
# The guest's first process. Loads the modules, makes the host's files its root (read-only, over 9p), runs the job that lies
# in the shared folder, says how it ended and turns the machine off.
alias b=/bin/busybox
b mount -t proc proc /proc
b mount -t sysfs sys /sys
b mount -t devtmpfs dev /dev
for module in $(b cat /modules/order); do
    b insmod "/modules/$module" || echo "guest: cannot load $module"
done

share() { b mount -t 9p -o "$3,trans=virtio,version=9p2000.L,msize=512000" "$1" "$2"; }

share host /host ro,cache=loose || { echo "guest: no root file system"; b poweroff -f; }
b mount -t proc proc /host/proc
b mount -t sysfs sys /host/sys
b mount -t devtmpfs dev /host/dev
b mkdir -p /host/dev/shm /host/dev/pts
b mount -t tmpfs shm /host/dev/shm
b mount -t devpts pts /host/dev/pts
b mount -t tmpfs run /host/run
b mkdir -p /host/run/job /host/run/tmp
share job /host/run/job rw || { echo "guest: no shared folder"; b poweroff -f; }
b ip link set lo up
echo "guest: up after $(b cut -d' ' -f1 /proc/uptime) s"
b chroot /host /bin/sh /run/job/job.sh </dev/null 2>&1
echo "guest: job ended with $?"
b poweroff -f
