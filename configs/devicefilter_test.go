package configs

import (
	"testing"

	"github.com/virgate/virgate/sharing"
)

func TestDeviceFilter(t *testing.T) {
	tests := []struct {
		text  string
		want  sharing.BoardFilter
		valid bool
	}{
		{"0x20B010DE", sharing.BoardFilter{Device: 0x20B010DE}, true},
		{"0x20b010de", sharing.BoardFilter{Device: 0x20B010DE}, true},
		{"0x20B010DE:0x134F10DE", sharing.BoardFilter{Device: 0x20B010DE, Subsystem: 0x134F10DE}, true},
		{"", sharing.BoardFilter{}, false},
		{"20B010DE", sharing.BoardFilter{}, false},
		{"0x20B010D", sharing.BoardFilter{}, false},
		{"0x20B010DE0", sharing.BoardFilter{}, false},
		{"0x00000000", sharing.BoardFilter{}, false},
		{"0x20B010DE:", sharing.BoardFilter{}, false},
		{"0x20B010DE:0x00000000", sharing.BoardFilter{}, false},
		{"0x20B010DE:0x134F10DE:0x1", sharing.BoardFilter{}, false},
		{"0x+0B010DE", sharing.BoardFilter{}, false},
		{"0x20B0_0DE", sharing.BoardFilter{}, false},
		{"A100", sharing.BoardFilter{}, false},
	}
	for _, test := range tests {
		got, err := ParseDeviceFilter(test.text)
		if got != test.want || (err == nil) != test.valid {
			t.Errorf("ParseDeviceFilter(%q) = %v, %v", test.text, got, err)
		}
	}
}
