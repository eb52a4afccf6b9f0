package configsource

import (
	"fmt"
	"log/slog"
	"maps"
	"sync/atomic"

	"github.com/virgate/virgate/configs"
)

// partStore is a kube.Store that keeps a part of each object, by a key, and drops the rest. It can be
// read from any goroutine.
type partStore[T any] struct {
	// what names the objects in messages.
	what string
	// part extracts the needed part of an object; ok is false for an unrelated object. equal
	// compares two parts.
	part  func(object any) (key string, value T, ok bool)
	equal func(a, b T) bool
	// changed is called when a part or the failure has changed.
	changed func()
	log     *slog.Logger
	seen    atomic.Pointer[snapshot[T]]
}

// snapshot is what was last seen. It is immutable.
type snapshot[T any] struct {
	// parts are nil before the first list.
	parts map[string]T
	// failure is why they cannot be watched; nil if they can be.
	failure error
}

func (s *partStore[T]) load() snapshot[T] {
	if seen := s.seen.Load(); seen != nil {
		return *seen
	}
	return snapshot[T]{}
}

// pending is the error before the first list.
func (s *partStore[T]) pending() error {
	if failure := s.load().failure; failure != nil {
		return fmt.Errorf("%s: %w: %w", s.what, configs.ErrPending, failure)
	}
	return fmt.Errorf("%s: %w", s.what, configs.ErrPending)
}

// Update and the next three methods implement kube.Store.
func (s *partStore[T]) Update(object any) {
	if key, value, ok := s.part(object); ok {
		parts := maps.Clone(s.load().parts)
		if parts == nil {
			parts = map[string]T{}
		}
		parts[key] = value
		s.keep(parts)
	}
}

func (s *partStore[T]) Delete(object any) {
	if key, _, ok := s.part(object); ok {
		parts := maps.Clone(s.load().parts)
		delete(parts, key)
		s.keep(parts)
	}
}

func (s *partStore[T]) Replace(objects []any, _ string) {
	parts := make(map[string]T, len(objects))
	for _, object := range objects {
		if key, value, ok := s.part(object); ok {
			parts[key] = value
		}
	}
	s.keep(parts)
}

func (s *partStore[T]) keep(parts map[string]T) {
	last := s.load()
	if last.parts != nil && maps.EqualFunc(last.parts, parts, s.equal) {
		return
	}
	s.seen.Store(&snapshot[T]{parts: parts, failure: last.failure})
	s.changed()
}

func (s *partStore[T]) Failed(err error) {
	last := s.load()
	if fmt.Sprint(err) == fmt.Sprint(last.failure) {
		return
	}
	s.seen.Store(&snapshot[T]{parts: last.parts, failure: err})
	if err == nil {
		s.log.Info("API server answers again", "what", s.what)
	} else {
		s.log.Warn("API server not followed, what was last seen stays", "what", s.what, "error", err)
	}
	s.changed()
}
