package nvml

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/virgate/virgate/sharing"
)

// finding is something that speaks against a unit.
type finding struct {
	cause sharing.HealthCause
	// text keeps its words while the matter is the same: a text that changed with
	// every reading would look like news.
	text string
}

// lost is the finding at a board that no longer answers, or that the driver no
// longer lists.
func lost() finding { return finding{sharing.CauseLost, "lost"} }

// unread is the finding at what may be there, and was not found.
func unread() finding { return finding{sharing.CauseProbe, "cannot be read"} }

func unreadable(err error) finding {
	return finding{sharing.CauseProbe, "cannot be read: " + cause(err)}
}

// judge is what an event says against the unit that it names, and what that
// means. An event that says nothing against the hardware is ignored.
func judge(e Event, rules sharing.HealthRules) (finding, sharing.ErrorAction) {
	switch {
	case e.Type&EventXIDCritical != 0:
		return finding{sharing.CauseXID, "XID " + strconv.FormatUint(e.Data, 10)}, rules.XID(e.Data)
	case e.Type&EventDoubleBitECC != 0:
		return finding{sharing.CauseECC, "double-bit ECC error"}, rules.DoubleBitECC
	}
	return finding{}, sharing.IgnoreError
}

// temperatureText is what a board's temperature says against it after a
// reading, given what the one before it said ("" for nothing). It keeps the
// figure that began it.
func temperatureText(celsius int, before string, rules sharing.HealthRules) string {
	switch {
	case before == "" && celsius > rules.TemperatureLimit:
		return fmt.Sprintf("temperature %d °C above %d °C", celsius, rules.TemperatureLimit)
	case before != "" && celsius <= rules.TemperatureSafe:
		return ""
	}
	return before
}

// with adds those of more that are not there yet, and shares nothing with list.
func with(list []finding, more ...finding) []finding {
	list = slices.Clone(list)
	for _, f := range more {
		if !slices.Contains(list, f) {
			list = append(list, f)
		}
	}
	return list
}

// describe is the findings in words, "" for none.
func describe(lists ...[]finding) string {
	var texts []string
	for _, f := range slices.Concat(lists...) {
		texts = append(texts, f.text)
	}
	return strings.Join(texts, ", ")
}
