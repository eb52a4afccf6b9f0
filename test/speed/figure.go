package main

import "strconv"

// figure is one number that was found.
type figure struct {
	// name is what the budget calls it: "calls/8000/allocate-ratio".
	name  string
	value float64
	// unit is for people: "ms", "×" for a ratio, "" for a count.
	unit string
}

// prefixed puts the measurement's name before those of its figures.
func prefixed(measurement string, figures []figure) []figure {
	for i := range figures {
		figures[i].name = measurement + "/" + figures[i].name
	}
	return figures
}

// sizes are how many devices the node offers in turn.
var sizes = [...]int{80, 800, 8000}

// megabytes are millions of bytes.
func megabytes(bytes uint64) float64 { return float64(bytes) / 1e6 }

// number is a value for people: as many digits as say something.
func number(value float64) string {
	if value >= 100 {
		return strconv.FormatFloat(value, 'f', 0, 64)
	}
	return strconv.FormatFloat(value, 'f', 2, 64)
}
