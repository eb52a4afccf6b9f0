package sharing

import "testing"

func TestBoardFilterString(t *testing.T) {
	for want, filter := range map[string]BoardFilter{
		"0x20B010DE":            {a100ID, 0},
		"0x00B010DE:0x134F10DE": {0x00B010DE, 0x134F10DE},
	} {
		if got := filter.String(); got != want {
			t.Errorf("%v is written %s, want %s", filter, got, want)
		}
	}
}
