package cdi

import (
	"fmt"
	"path/filepath"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"
)

// complete holds that each entry has the device nodes of its unit: nvcdi leaves
// those out that it does not find in dev, and says so nowhere but in its log. A
// container would start without its GPU, and an entry without anything in it
// makes the whole spec invalid.
func complete(u unit, entries []specs.Device, dev string) error {
	for _, entry := range entries {
		board, capabilities := 0, 0
		for _, node := range entry.ContainerEdits.DeviceNodes {
			if number, ok := strings.CutPrefix(node.Path, "/dev/nvidia"); ok && number != "" && strings.Trim(number, "0123456789") == "" {
				board++
			}
			if strings.HasPrefix(node.Path, "/dev/nvidia-caps/") {
				capabilities++
			}
		}
		// A GPU instance has one and its compute instance another.
		const needed = 2
		switch {
		case board == 0:
			return fmt.Errorf("no node of the board in %s", dev)
		case u.partition != nil && capabilities < needed:
			return fmt.Errorf("%d of %d nodes of its capabilities in %s", capabilities, needed, filepath.Join(dev, "nvidia-caps"))
		}
	}
	return nil
}
