package mps

import (
	"path/filepath"
	"testing"
)

// FuzzUnitID checks that an accepted ID is one directory, right below the root.
func FuzzUnitID(f *testing.F) {
	for _, id := range []string{"GPU-8dcd427f-483b-b48f-d7e5-75fb19a52b76", "MIG-1", "GPU-..", "GPU-a/../../b", "MIG-GPU-1/3/0", "", "GPU-\x00", "GPU-1\n"} {
		f.Add(id)
	}
	f.Fuzz(func(t *testing.T, id string) {
		if checkUnitID(id) != nil {
			return
		}
		if path := filepath.Join("/root", id); filepath.Dir(path) != "/root" || filepath.Base(path) != id || len(id) > 40 {
			t.Errorf("%q is accepted, and its directory is %s", id, path)
		}
	})
}

// FuzzClientMounts checks that a container's mounts never yield an invalid unit ID.
func FuzzClientMounts(f *testing.F) {
	f.Add("36 35 0:25 /nvidia/mps/GPU-1/pipe /mps/GPU-1/pipe ro - tmpfs tmpfs rw\n37 35 0:45 / /dev/shm rw - tmpfs shm rw\n", "0:25")
	f.Add("36 35 0:25 / /mps/GPU-1/pipe", "0:25")
	f.Add("36 35 0:25 /GPU-1/pipe", "")
	f.Fuzz(func(t *testing.T, mountinfo, device string) {
		if unit, _ := clientMounts(mountinfo, device); unit != "" && checkUnitID(unit) != nil {
			t.Errorf("unit %q", unit)
		}
	})
}

// TestClientMounts checks which container is a client of which unit. The directory must be the unit's, not only
// have its name, and of two mounts at /dev/shm the last one counts.
func TestClientMounts(t *testing.T) {
	t.Parallel()
	const shm = "37 35 0:45 / /dev/shm rw - tmpfs shm rw\n"
	for _, test := range []struct{ name, mountinfo, unit, shm string }{
		{"a client", "36 35 0:25 /nvidia/mps/GPU-1/pipe /mps/GPU-1/pipe ro - tmpfs tmpfs rw\n" + shm, "GPU-1", "0:45/"},
		{"with a volume", "36 35 0:25 /nvidia/mps/GPU-1/pipe /mps/GPU-1/pipe ro - tmpfs tmpfs rw\n" + shm + "38 35 0:46 /x /dev/shm rw - tmpfs tmpfs rw\n", "GPU-1", "0:46/x"},
		{"another directory", "36 35 0:25 /elsewhere /mps/GPU-1/pipe rw - tmpfs tmpfs rw\n" + shm, "", "0:45/"},
		{"another file system", "36 35 0:26 /nvidia/mps/GPU-1/pipe /mps/GPU-1/pipe rw - tmpfs tmpfs rw\n", "", ""},
		{"virgate mps", "36 35 0:25 /nvidia/mps /mps rw shared:2 - tmpfs tmpfs rw\n", "", ""},
		{"nothing", "x\n\n", "", ""},
	} {
		if unit, shm := clientMounts(test.mountinfo, "0:25"); unit != test.unit || shm != test.shm {
			t.Errorf("%s: %q, %q", test.name, unit, shm)
		}
	}
}
