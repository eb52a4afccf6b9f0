package nvml

import (
	"testing"

	"github.com/virgate/virgate/sharing"
)

func TestJudge(t *testing.T) {
	tests := []struct {
		name  string
		event Event
		text  string
		want  sharing.ErrorAction
	}{
		{"application error", Event{Type: EventXIDCritical, Data: 13}, "XID 13", sharing.IgnoreError},
		{"contained error", Event{Type: EventXIDCritical, Data: 94}, "XID 94", sharing.SuspectError},
		{"off the bus", Event{Type: EventXIDCritical, Data: 79}, "XID 79", sharing.FatalError},
		{"XID that nobody knows", Event{Type: EventXIDCritical, Data: 1 << 40}, "XID 1099511627776", sharing.SuspectError},
		{"double-bit error", Event{Type: EventDoubleBitECC, Data: 3}, "double-bit ECC error", sharing.SuspectError},
		{"single-bit error", Event{Type: EventSingleBitECC, Data: 3}, "", sharing.IgnoreError},
		{"another type", Event{Type: 1 << 2, Data: 79}, "", sharing.IgnoreError},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			found, action := judge(test.event, sharing.DefaultHealthRules())
			if found.text != test.text || action != test.want {
				t.Errorf("%q is %s, want %q, %s", found.text, action, test.text, test.want)
			}
		})
	}
}

func TestTemperatureText(t *testing.T) {
	const hot = "temperature 91 °C above 90 °C"
	tests := []struct {
		name         string
		celsius      int
		before, want string
	}{
		{"cool", 40, "", ""},
		{"at the limit", 90, "", ""},
		{"above the limit", 91, "", hot},
		{"hotter still", 99, hot, hot},
		{"cooler, but not enough", 86, hot, hot},
		{"cool again", 85, hot, ""},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if got := temperatureText(test.celsius, test.before, sharing.DefaultHealthRules()); got != test.want {
				t.Errorf("%q, want %q", got, test.want)
			}
		})
	}
}
