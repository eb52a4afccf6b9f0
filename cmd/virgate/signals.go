package main

import (
	"os"
	"os/signal"
	"syscall"
)

// hangups makes a signal of each SIGHUP.
func hangups() (<-chan struct{}, func()) {
	signals, look := make(chan os.Signal, 1), make(chan struct{}, 1)
	signal.Notify(signals, syscall.SIGHUP)
	done := make(chan struct{})
	go func() {
		for {
			select {
			case <-signals:
				select {
				case look <- struct{}{}:
				default:
				}
			case <-done:
				return
			}
		}
	}()
	return look, func() { signal.Stop(signals); close(done) }
}
