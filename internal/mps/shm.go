package mps

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// The clients of a unit may share memory in /dev/shm, and a daemon older than R580 shares a file there
// with them (serverFiles). Each unit has a tmpfs for that, which clients mount through the link
// <unit>/shm. The link points to
//
//	<unit>/memory  the unit's own tmpfs, in most cases
//	.shm/<unit>    in the tmpfs of MountShm, if this program's mounts do not reach the host
//	shm            the tmpfs of all units, which earlier versions made, until no pod holds the unit
const (
	shmLink   = "shm"
	ownShm    = "memory"
	hostShm   = ".shm"
	commonShm = "shm"
)

// serverFiles are the files that servers of older drivers make: cuda.shm.USER.PID.1, in hexadecimal
// (k8s-device-plugin#467). A client that does not see its server's fails. A server of R580 makes none,
// and needs no common /dev/shm.
const serverFiles = "cuda.shm.*"

func (u *unitRun) shm() string {
	if !u.OwnShm {
		return ""
	}
	return filepath.Join(u.dir(), shmLink)
}

// onCommonShm reports whether the unit's daemon and clients use the /dev/shm of all units.
func (s *supervisor) onCommonShm(unit string) bool {
	target, err := os.Readlink(filepath.Join(s.Root, unit, shmLink))
	return err == nil && target == filepath.Join("..", commonShm)
}

// prepareShm makes the unit's /dev/shm if it has none.
func (u *unitRun) prepareShm() error {
	if !u.OwnShm {
		return nil
	}
	u.shmLock.Lock()
	defer u.shmLock.Unlock()
	target, err := os.Readlink(u.shm())
	switch {
	case err == nil && (target != ownShm || isMountPoint(filepath.Join(u.dir(), ownShm))):
		return nil // Clients have it mounted.
	case err == nil:
		return u.makeShm()
	case errors.Is(err, syscall.EINVAL):
		if err := u.replaceNoLink(); err != nil {
			return err
		}
	case !errors.Is(err, os.ErrNotExist):
		return err
	}
	common := filepath.Join(u.Root, commonShm)
	if isMountPoint(common) && (servedBefore(u.dir()) || u.unit.MemoryParts == 0) {
		if err := makeDir(u.dir()); err != nil {
			return err
		}
		return os.Symlink(filepath.Join("..", commonShm), u.shm())
	}
	return u.makeShm()
}

// replaceNoLink removes what is in the place of the link. If a pod's container is restarted after the unit was
// removed, the container runtime makes a directory there. The programs in it do not share the daemon's memory.
func (u *unitRun) replaceNoLink() error {
	if os.Remove(u.shm()) == nil {
		return nil
	}
	aside := u.shm() + ".aside" // It is removed with the unit.
	if err := os.RemoveAll(aside); err != nil {
		return err
	}
	u.log.Warn("a directory is in the place of the unit's memory, renamed", "from", u.shm(), "to", aside)
	return os.Rename(u.shm(), aside)
}

// servedBefore reports whether a version without <unit>/shm had a daemon for the unit. This version
// makes the directory pipe last.
func servedBefore(dir string) bool {
	_, err := os.Lstat(filepath.Join(dir, "pipe"))
	return err == nil
}

// makeShm makes the unit's own memory and lets the link point to it.
func (u *unitRun) makeShm() error {
	if err := makeDir(u.dir()); err != nil {
		return err
	}
	target := ownShm
	if reaches, err := mountsReachHost(u.Proc, u.Root); err != nil {
		return err
	} else if reaches {
		total, err := memoryOf(filepath.Join(u.Proc, "meminfo"))
		if err != nil {
			return err
		}
		if err := mountTmpfs(filepath.Join(u.dir(), ownShm), total/2/uint64(max(1, u.unit.MemoryParts))&^3,
			"1777"); err != nil {
			return err
		}
	} else {
		all := filepath.Join(u.Root, hostShm)
		if !isMountPoint(all) {
			return fmt.Errorf(
				"no shared memory: %s is not a mount, and mounts below %s do not reach the host: "+
					"that requires virgate mps mount-shm before this program, or mountPropagation Bidirectional",
				all, u.Root)
		}
		if err := makeDir(filepath.Join(all, u.unit.ID)); err != nil {
			return err
		}
		//nolint:gosec // as /dev/shm
		if err := os.Chmod(filepath.Join(all, u.unit.ID), 0o777|os.ModeSticky); err != nil {
			return err
		}
		target = filepath.Join("..", hostShm, u.unit.ID)
	}
	return u.linkShm(target)
}

// linkShm lets the link point to the memory.
func (u *unitRun) linkShm(target string) error {
	next := u.shm() + ".next"
	if err := os.Remove(next); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := os.Symlink(target, next); err != nil {
		return err
	}
	return os.Rename(next, u.shm())
}

// leaveCommonShm moves a unit that no pod holds from the memory of all units to memory of its own.
// It reports whether the unit's daemon has to be restarted for that.
func (u *unitRun) leaveCommonShm() (left bool, err error) {
	if !u.unit.Vacant || !u.onCommonShm(u.unit.ID) {
		return false, nil
	}
	u.shmLock.Lock()
	defer u.shmLock.Unlock()
	if held, err := u.holdsCommonShm(); held || err != nil {
		return false, err
	}
	if err := u.makeShm(); err != nil { // Containers that start from now on use it.
		return false, err
	}
	if held, err := u.holdsCommonShm(); held || err != nil { // A container has started meanwhile.
		return false, errors.Join(err, u.linkShm(filepath.Join("..", commonShm)))
	}
	u.dropCommonShm()
	u.log.Info("MPS daemon and clients have a /dev/shm of their own from now on")
	return true, nil
}

// holdsCommonShm reports whether a container of the unit has the memory of all units mounted. A pod
// that has ended may still have one.
func (u *unitRun) holdsCommonShm() (bool, error) {
	clients, err := u.clientsNow()
	if err != nil {
		return false, err
	}
	common := deviceOf(filepath.Join(u.Root, commonShm))
	for _, c := range clients[u.unit.ID] {
		if c.shm == common {
			u.log.Debug("the memory of all units is still held", "by", u.Who(c.pid))
			return true, nil
		}
	}
	return false, nil
}

// removeShm removes the unit's memory, which no pod holds any more.
func (u *unitRun) removeShm() error {
	if !u.OwnShm {
		return nil
	}
	u.shmLock.Lock()
	defer u.shmLock.Unlock()
	own := filepath.Join(u.dir(), ownShm)
	if isMountPoint(own) {
		// Empty it first: a mount namespace that still has it must not keep the memory.
		entries, err := os.ReadDir(own)
		if err != nil {
			return err
		}
		for _, e := range entries {
			if err := os.RemoveAll(filepath.Join(own, e.Name())); err != nil {
				return err
			}
		}
		if err := unmount(own); err != nil {
			return err
		}
	}
	if err := os.RemoveAll(filepath.Join(u.Root, hostShm, u.unit.ID)); err != nil {
		return err
	}
	if err := os.RemoveAll(u.dir()); err != nil {
		return err
	}
	u.dropCommonShm()
	return nil
}

// dropCommonShm unmounts the memory of all units if no unit uses it. The caller holds the lock.
func (s *supervisor) dropCommonShm() {
	common := filepath.Join(s.Root, commonShm)
	if reaches, err := mountsReachHost(s.Proc, s.Root); err != nil || !reaches || !isMountPoint(common) {
		return
	}
	entries, err := os.ReadDir(s.Root)
	if err != nil {
		return
	}
	for _, e := range entries {
		if checkUnitID(e.Name()) != nil {
			continue
		}
		dir := filepath.Join(s.Root, e.Name())
		if _, err := os.Lstat(filepath.Join(dir, shmLink)); s.onCommonShm(e.Name()) || err != nil && servedBefore(dir) {
			return
		}
	}
	if err := errors.Join(unmount(common), os.Remove(common)); err != nil {
		s.Logger.Warn("the memory of all units is still mounted", "at", common, "error", err)
	}
}

// client is a container that has a unit's pipe directory: one of its processes, and what is mounted
// at its /dev/shm.
type client struct {
	pid int
	shm string
}

// clientsNow returns the containers on the node that can be clients, by unit. It finds them by
// their mounts (proc(5)).
func (s *supervisor) clientsNow() (map[string][]client, error) {
	entries, err := os.ReadDir(s.Proc)
	if err != nil {
		return nil, err
	}
	clients, seen := map[string][]client{}, map[string]bool{}
	device, _, _ := strings.Cut(deviceOf(s.Root), "/")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		namespace, err := os.Readlink(filepath.Join(s.Proc, e.Name(), "ns/mnt"))
		if err != nil || seen[namespace] {
			continue // It has ended.
		}
		mounts, err := os.ReadFile(filepath.Join(s.Proc, e.Name(), "mountinfo"))
		if err != nil {
			continue
		}
		seen[namespace] = true
		if unit, shm := clientMounts(string(mounts), device); unit != "" {
			clients[unit] = append(clients[unit], client{pid, shm})
		}
	}
	return clients, nil
}

// clientMounts returns the unit whose pipe directory, on the device, is among the mounts, "" for
// none, and what is mounted at /dev/shm.
func clientMounts(mountinfo, device string) (unit, shm string) {
	for line := range strings.Lines(mountinfo) {
		// "36 35 98:0 /root /mount/point options - type source options"; the last mount at a path
		// is on top.
		fields := strings.Fields(line)
		if len(fields) < 5 {
			continue
		}
		if fields[4] == "/dev/shm" {
			shm = fields[2] + fields[3]
		}
		// A client has the directory at the same path as the daemon; see grant.MPSAccess.
		id, is := strings.CutSuffix(strings.TrimPrefix(fields[4], "/mps/"), "/pipe")
		if is && fields[2] == device && checkUnitID(id) == nil && strings.HasSuffix(fields[3], "/"+id+"/pipe") {
			unit = id
		}
	}
	return unit, shm
}

// clientsInterval is how old the list of clients may be if it is only shown to people.
const clientsInterval = 10 * time.Second

// strangers describes the programs that do not see the file of the unit's server, "" for none. If
// a pod mounts a volume at /dev/shm, that volume hides the unit's, because the kubelet lists a
// plugin's mounts before the pod's (makeMounts).
func (u *unitRun) strangers() string {
	if !u.OwnShm {
		return ""
	}
	if u.onCommonShm(u.unit.ID) {
		return "its programs share /dev/shm with those of other units until no pod holds it that was started before " +
			"the upgrade"
	}
	if files, err := filepath.Glob(filepath.Join(u.shm(), serverFiles)); err != nil || len(files) == 0 {
		return ""
	}
	u.shmLock.Lock()
	defer u.shmLock.Unlock()
	if time.Since(u.clientsAt) > clientsInterval {
		clients, err := u.clientsNow()
		if err != nil {
			return ""
		}
		u.clients, u.clientsAt = clients, time.Now()
	}
	own := deviceOf(u.shm())
	for _, c := range u.clients[u.unit.ID] {
		if who := u.Who(c.pid); c.shm != own && who != "" {
			return who + " has a volume of its own at /dev/shm, which its MPS daemon does not see"
		}
	}
	return ""
}
