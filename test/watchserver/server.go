// Package watchserver is an in-memory API server of one kind of objects, for tests of code that lists and
// watches.
package watchserver

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
)

// Server stores objects of one kind as an API server does: every change has a version, a list has the
// version of the newest change, and a watch starts from a version. It can be away, end watches and forget
// old versions.
type Server struct {
	mu      sync.Mutex
	version int
	objects map[string]runtime.Object
	events  []versioned
	// forgotten is the version before which no watch can begin.
	forgotten int
	away      error
	watches   map[*openWatch]bool
	// lists and opened count answered requests.
	lists, opened int
}

type versioned struct {
	version int
	event   watch.Event
}

// New returns a Server without objects.
func New() *Server {
	return &Server{version: 1, objects: map[string]runtime.Object{}, watches: map[*openWatch]bool{}}
}

// openWatch is a watch in progress.
type openWatch struct {
	server *Server
	out    chan watch.Event
}

func (w *openWatch) ResultChan() <-chan watch.Event { return w.out }

// Stop closes the channel, as that of a watch by client-go does.
func (w *openWatch) Stop() {
	w.server.mu.Lock()
	defer w.server.mu.Unlock()
	w.server.end(w)
}

// Change stores the object, or removes the name if it is nil.
func (s *Server) Change(name string, object runtime.Object) {
	s.mu.Lock()
	defer s.mu.Unlock()
	old, there := s.objects[name]
	s.version++
	event := watch.Event{Type: watch.Modified, Object: object}
	switch {
	case object == nil && !there:
		return
	case object == nil:
		gone := old.DeepCopyObject()
		event = watch.Event{Type: watch.Deleted, Object: gone}
		delete(s.objects, name)
	case !there:
		event.Type = watch.Added
	}
	if object != nil {
		s.objects[name] = object
	}
	described, err := meta.Accessor(event.Object)
	if err != nil {
		panic(err)
	}
	described.SetResourceVersion(strconv.Itoa(s.version))
	s.events = append(s.events, versioned{s.version, event})
	for w := range s.watches {
		w.out <- watch.Event{Type: event.Type, Object: event.Object.DeepCopyObject()}
	}
}

// SetAway makes all requests fail with the error; nil makes the server reachable again. Watches end.
func (s *Server) SetAway(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.away = err
	s.endWatches()
}

// Expire ends all watches and forgets what happened so far, so that none can resume.
func (s *Server) Expire() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.version++
	s.forgotten = s.version
	s.endWatches()
}

// Drop ends all watches; they can resume.
func (s *Server) Drop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.endWatches()
}

func (s *Server) endWatches() {
	for w := range s.watches {
		s.end(w)
	}
}

func (s *Server) end(w *openWatch) {
	if s.watches[w] {
		close(w.out)
		delete(s.watches, w)
	}
}

// List returns all objects.
func (s *Server) List(context.Context, metav1.ListOptions) (runtime.Object, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.away != nil {
		return nil, s.away
	}
	s.lists++
	list := &metav1.List{ListMeta: metav1.ListMeta{ResourceVersion: strconv.Itoa(s.version)}}
	for _, object := range s.objects {
		list.Items = append(list.Items, runtime.RawExtension{Object: object.DeepCopyObject()})
	}
	return list, nil
}

// Watch returns the changes since a version, and then every later one.
func (s *Server) Watch(_ context.Context, options metav1.ListOptions) (watch.Interface, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.away != nil {
		return nil, s.away
	}
	from, err := strconv.Atoi(options.ResourceVersion)
	if err != nil {
		return nil, fmt.Errorf("version %q: %w", options.ResourceVersion, err)
	}
	w := &openWatch{server: s, out: make(chan watch.Event, 10_000)}
	if from < s.forgotten {
		// A server may also report this by an event.
		gone := apierrors.NewResourceExpired("too old").Status()
		gone.Code = http.StatusGone
		w.out <- watch.Event{Type: watch.Error, Object: &gone}
		close(w.out)
		return w, nil
	}
	s.opened++
	for _, e := range s.events {
		if e.version > from {
			w.out <- watch.Event{Type: e.event.Type, Object: e.event.Object.DeepCopyObject()}
		}
	}
	s.watches[w] = true
	return w, nil
}

// Answered returns how many lists and watches were answered.
func (s *Server) Answered() (lists, watches int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lists, s.opened
}
