package configs

import (
	"fmt"
	"strconv"
	"time"

	"github.com/virgate/virgate/sharing"
)

// What a profile may ask of health: the times are those that a person would
// wait for, the temperatures those that a board can have.
const (
	shortestQuiet      = time.Second
	longestQuiet       = 24 * time.Hour
	highestTemperature = 150
)

// otherXIDs is the key for XIDs that have none of their own.
const otherXIDs = "other"

// readHealth reads the section health over the defaults, and then what NVIDIA's
// variables say.
func readHealth(v value, overrides Overrides) sharing.HealthRules {
	rules := sharing.DefaultHealthRules()
	f := v.mapping(keysOf("health")...)
	if len(f.entries) > 0 {
		v.note("Virgate's own; in NVIDIA's plugin a GPU that reported an XID never comes back")
	}
	for _, e := range f.field("xids").pairs() {
		action, ok := readAction(e.value)
		if e.value.absent() {
			e.value.problem(expectedAction)
		}
		if e.key == otherXIDs {
			rules.OtherXIDs = orElse(action, ok, rules.OtherXIDs)
			continue
		}
		code, err := strconv.ParseUint(e.key, 10, 31)
		if err != nil || code == 0 || strconv.FormatUint(code, 10) != e.key {
			v.source.problem(place{v.source.file, e.line, e.value.path}, quote(e.key), "expected the number of an XID, or "+otherXIDs)
		} else if ok {
			rules.XIDs[code] = action
		}
	}
	action, ok := readAction(f.field("ecc"))
	rules.DoubleBitECC = orElse(action, ok, rules.DoubleBitECC)
	readQuietTimes(f, &rules)
	readTemperature(f.field("temperature"), &rules)
	applyCheckVariables(v.source, overrides, &rules)
	return rules
}

func orElse[T any](read T, ok bool, otherwise T) T {
	if ok {
		return read
	}
	return otherwise
}

const expectedAction = "expected ignore, suspect or fatal"

func readAction(v value) (sharing.ErrorAction, bool) {
	text, ok := v.text()
	if !ok {
		return "", false
	}
	switch action := sharing.ErrorAction(text); action {
	case sharing.IgnoreError, sharing.SuspectError, sharing.FatalError:
		return action, true
	}
	v.problem(expectedAction)
	return "", false
}

// readQuietTimes reads both times. A quiet time above the default longest one
// raises that, unless the document names it.
func readQuietTimes(f fields, rules *sharing.HealthRules) {
	quiet, ok := readQuietTime(f.field("quietTime"))
	rules.QuietTime = orElse(quiet, ok, rules.QuietTime)
	longest, ok := readQuietTime(f.field("maxQuietTime"))
	rules.MaxQuietTime = orElse(longest, ok, max(rules.MaxQuietTime, rules.QuietTime))
	if rules.MaxQuietTime < rules.QuietTime {
		f.field("maxQuietTime").problem(fmt.Sprintf("expected quietTime, which is %s, or more", rules.QuietTime))
	}
}

func readQuietTime(v value) (time.Duration, bool) {
	text, ok := v.text()
	if !ok {
		return 0, false
	}
	quiet, err := time.ParseDuration(text)
	if err != nil || quiet < shortestQuiet || quiet > longestQuiet {
		v.problem("expected a duration from 1s to 24h, such as 5m")
		return 0, false
	}
	return quiet, true
}

func readTemperature(v value, rules *sharing.HealthRules) {
	f := v.mapping(keysOf(pathTemperature)...)
	hysteresis := rules.TemperatureLimit - rules.TemperatureSafe
	if limit, ok := f.field("limit").number(); ok {
		if limit < 1 || limit > highestTemperature {
			f.field("limit").problem(fmt.Sprintf("expected degrees Celsius from 1 to %d", highestTemperature))
			return
		}
		rules.TemperatureLimit = limit
	}
	if degrees, ok := f.field("hysteresis").number(); ok {
		if degrees < 0 || degrees > rules.TemperatureLimit {
			f.field("hysteresis").problem("expected degrees from 0 to the limit")
			return
		}
		hysteresis = degrees
	}
	rules.TemperatureSafe = max(rules.TemperatureLimit-hysteresis, 0)
}
