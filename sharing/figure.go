package sharing

// Figure is a number that may be unknown, as the zero Figure is. What is unknown
// is shown nowhere, least of all as 0.
type Figure struct {
	Value float64
	Known bool
}

// KnownFigure is a number that is known.
func KnownFigure(value float64) Figure { return Figure{Value: value, Known: true} }

// plus is the sum, unknown if one of the two is.
func (f Figure) plus(other Figure) Figure {
	if !f.Known || !other.Known {
		return Figure{}
	}
	return KnownFigure(f.Value + other.Value)
}
