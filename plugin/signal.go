package plugin

// signal says that there is something to look at. Nobody waits to give it, and
// a nil one goes nowhere.
type signal chan struct{}

func (s signal) give() {
	select {
	case s <- struct{}{}:
	default:
	}
}
