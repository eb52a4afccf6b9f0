package features_test

import (
	"testing"

	"github.com/virgate/virgate/internal/features"
)

// vendorSpecific is a vendor-specific capability with the text and its length.
func vendorSpecific(text string) []byte {
	return append([]byte{0x09, 0x00, byte(3 + len(text))}, text...)
}

// hostRecord is the record of the hypervisor's driver.
const hostRecord = "\x00\x16" + "550.90.07\x00" + "r550_90\x00\x00\x00"

// space is a configuration space with these capabilities, from 0x40 on, 0x60 apart.
func space(capabilities ...[]byte) []byte {
	config := make([]byte, features.PCIConfigSize)
	copy(config, "\xde\x10")
	config[0x06], config[0x34] = 0x10, 0x40
	for i, capability := range capabilities {
		position := 0x40 + 0x60*i
		copy(config[position:], capability)
		if i+1 < len(capabilities) {
			config[position+1] = byte(position + 0x60)
		}
	}
	return config
}

func TestParseVGPU(t *testing.T) {
	vgpu := space([]byte{0x05, 0, 0x81}, vendorSpecific("VF"+hostRecord))
	changed := func(position int, to byte) []byte {
		config := append([]byte{}, vgpu...)
		config[position] = to
		return config
	}
	header := changed(0x34, 0x10)
	copy(header[0x10:], vendorSpecific("VF"+hostRecord))
	host := features.VGPU{HostVersion: "550.90.07", HostBranch: "r550_90"}
	for _, test := range []struct {
		name   string
		config []byte
		want   features.VGPU
		ok     bool
	}{
		{"vGPU", vgpu, host, true},
		{"after another record", space(vendorSpecific("VF" + "\x01\x16" + "twenty bytes of more" + hostRecord)), host, true},
		{"after another vendor-specific one", space(vendorSpecific("\x01\x00\x00"), vendorSpecific("VF"+hostRecord)), host, true},
		{"whole texts", space(vendorSpecific("VF" + "\x00\x16" + "0123456789" + "abcdefghij")), features.VGPU{HostVersion: "0123456789", HostBranch: "abcdefghij"}, true},
		{"no record", space(vendorSpecific("VF")), features.VGPU{}, true},
		{"a record without a length", space(vendorSpecific("VF" + "\x01\x00" + hostRecord)), features.VGPU{}, true},
		{"a record that is too long", space(vendorSpecific("VF" + "\x01\xff" + hostRecord)), features.VGPU{}, true},
		{"a short record", space(vendorSpecific("VF" + "\x00\x04ab")), features.VGPU{}, true},
		{"pass-through", space(vendorSpecific("\x01\x00\x00\x00\x00")), features.VGPU{}, false},
		{"signature alone", space(vendorSpecific("V")), features.VGPU{}, false},
		{"a capability beyond the space", changed(0xa2, 0x61), features.VGPU{}, false},
		{"a ring", changed(0x41, 0x40), features.VGPU{}, false},
		{"no list", changed(0x06, 0), features.VGPU{}, false},
		{"list within the header", header, features.VGPU{}, false},
		{"signature after its end", changed(0xa2, 4), features.VGPU{}, false},
		{"what is shown without SYS_ADMIN", vgpu[:64], features.VGPU{}, false},
		{"nothing", nil, features.VGPU{}, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got, ok := features.ParseVGPU(test.config); got != test.want || ok != test.ok {
				t.Errorf("%+v, %t, want %+v, %t", got, ok, test.want, test.ok)
			}
		})
	}
}

func FuzzParseVGPU(f *testing.F) {
	f.Add(space(vendorSpecific("VF" + hostRecord)))
	f.Fuzz(func(_ *testing.T, config []byte) { features.ParseVGPU(config) })
}
