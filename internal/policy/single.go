package policy

import (
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/virgate/virgate/configs"
)

// errNotThere says that an object does not exist.
var errNotThere = errors.New("not there")

// single is a sink that keeps one part of one object. Only the feed writes it.
type single[T any] struct {
	// what and name are the object's, for messages and to know it by.
	what, name string
	// project takes from the object what is wanted; equal compares that.
	project func(runtime.Object) (T, bool)
	equal   func(a, b T) bool
	changed func()
	log     *slog.Logger
	seen    atomic.Pointer[sight[T]]
}

// sight is what was last seen. It is immutable.
type sight[T any] struct {
	// known says that the object has been looked for, there that it exists.
	known, there bool
	value        T
	// trouble says why it cannot be followed; nil when it can.
	trouble error
}

func (s *single[T]) load() sight[T] {
	if seen := s.seen.Load(); seen != nil {
		return *seen
	}
	return sight[T]{}
}

// value returns what the object says. The error is configs.ErrPending before it
// has been looked for, or that it is not there. While the API server cannot be
// reached it is as last seen.
func (s *single[T]) value() (T, error) {
	seen := s.load()
	var none T
	switch {
	case seen.there:
		return seen.value, nil
	case seen.known:
		return none, fmt.Errorf("%s: %w", s.what, errNotThere)
	case seen.trouble != nil:
		return none, fmt.Errorf("%s: %w: %w", s.what, configs.ErrPending, seen.trouble)
	}
	return none, fmt.Errorf("%s: %w", s.what, configs.ErrPending)
}

func (s *single[T]) replace(objects []runtime.Object) {
	for _, object := range objects {
		if s.is(object) {
			s.put(object)
			return
		}
	}
	s.store(sight[T]{known: true})
}

func (s *single[T]) put(object runtime.Object) {
	value, ok := s.project(object)
	if ok && s.is(object) {
		s.store(sight[T]{known: true, there: true, value: value})
	}
}

func (s *single[T]) remove(object runtime.Object) {
	if s.is(object) {
		s.store(sight[T]{known: true})
	}
}

func (s *single[T]) is(object runtime.Object) bool {
	described, err := meta.Accessor(object)
	return err == nil && described.GetName() == s.name
}

func (s *single[T]) store(next sight[T]) {
	last := s.load()
	next.trouble = last.trouble
	if last.known && last.there == next.there && s.equal(last.value, next.value) {
		return
	}
	s.seen.Store(&next)
	s.changed()
}

func (s *single[T]) fail(err error) {
	next := s.load()
	said := next.trouble
	next.trouble = err
	s.seen.Store(&next)
	switch {
	case err == nil && said != nil:
		s.log.Info("API server answers again", "what", s.what)
	case err != nil && (said == nil || said.Error() != err.Error()):
		s.log.Warn("API server not followed, what was last seen stays", "what", s.what, "error", err)
		s.changed()
	}
}
