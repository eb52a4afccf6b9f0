package nvml

import "testing"

func TestEventFault(t *testing.T) {
	tests := []struct {
		name  string
		event Event
		want  string
	}{
		{"graphics exception", Event{Type: EventXIDCritical, Data: 13}, ""},
		{"page fault", Event{Type: EventXIDCritical, Data: 31}, ""},
		{"stopped processing", Event{Type: EventXIDCritical, Data: 43}, ""},
		{"preemptive cleanup", Event{Type: EventXIDCritical, Data: 45}, ""},
		{"video processor", Event{Type: EventXIDCritical, Data: 68}, ""},
		{"context switch", Event{Type: EventXIDCritical, Data: 109}, ""},
		{"double-bit error as an XID", Event{Type: EventXIDCritical, Data: 48}, "XID 48"},
		{"off the bus", Event{Type: EventXIDCritical, Data: 79}, "XID 79"},
		{"XID that nobody knows", Event{Type: EventXIDCritical, Data: 1 << 40}, "XID 1099511627776"},
		{"double-bit error", Event{Type: EventDoubleBitECC, Data: 3}, "double-bit ECC error"},
		{"single-bit error", Event{Type: EventSingleBitECC, Data: 3}, ""},
		{"another type", Event{Type: 1 << 2, Data: 79}, ""},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if got := eventFault(test.event); got != test.want {
				t.Errorf("fault %q, want %q", got, test.want)
			}
		})
	}
}

func TestTemperatureFault(t *testing.T) {
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
			if got := temperatureFault(test.celsius, test.before); got != test.want {
				t.Errorf("fault %q, want %q", got, test.want)
			}
		})
	}
}

func TestJoinFaults(t *testing.T) {
	tests := []struct {
		name   string
		faults []string
		want   string
	}{
		{"none", nil, ""},
		{"only empty ones", []string{"", ""}, ""},
		{"one", []string{"", "lost", ""}, "lost"},
		{"two", []string{"lost", "XID 79"}, "lost, XID 79"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if got := joinFaults(test.faults...); got != test.want {
				t.Errorf("joined %q, want %q", got, test.want)
			}
		})
	}
}
