package policy

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
)

// feed follows a few objects of the API server: it lists them once, then
// watches from there. client-go's Reflector is not used because it waits
// without looking at its context (v0.36, reflector.go, watchList), and because
// it does not say why it waits.
type feed struct {
	// what is followed, for messages: "node n1".
	what  string
	list  func(context.Context, metav1.ListOptions) (runtime.Object, error)
	watch func(context.Context, metav1.ListOptions) (watch.Interface, error)
	// into has the objects. It is called from one goroutine.
	into sink
	log  *slog.Logger
	// first is the wait after a first failure, spread how far apart nodes come back
	// whose watches were cut, patience how long a request may go unanswered, life
	// how long a watch may go on; 0 means the constants here and in pace.go.
	first, spread, patience, life time.Duration
}

// sink is where a feed puts what it sees.
type sink interface {
	// replace has all objects there are.
	replace([]runtime.Object)
	// put has one that is new or has changed, remove one that is gone.
	put(runtime.Object)
	remove(runtime.Object)
	// fail says why the objects cannot be followed; nil when they can be again.
	fail(error)
}

const (
	// answerTimeout ends a request that nobody answers.
	answerTimeout = 15 * time.Second
	// watchTimeout is after which the server ends a watch; it is between one and
	// two of that. A connection that died is noticed earlier, by HTTP/2's pings, and
	// a server that does not end it is left a minute later.
	watchTimeout = 30 * time.Minute
	// mostGarbled is how many watches from one version may break off before
	// everything is listed again.
	mostGarbled = 3
)

// run follows until ctx ends. What ends early is tried again after a pause: see
// pace.
func (f *feed) run(ctx context.Context) {
	pace := newPace(f.first, f.spread)
	version, garbled := "", 0
	for {
		started := time.Now()
		last := version
		var err error
		if version, err = f.follow(ctx, version); version != last {
			garbled = 0
		}
		switch {
		case ctx.Err() != nil:
			return
		case isExpired(err):
			f.log.Debug("watch expired, listing again", "what", f.what)
			version = ""
		case errors.Is(err, errCut): // It can go on from where it was.
		case errors.Is(err, errGarbled):
			f.into.fail(err)
			if garbled++; garbled == mostGarbled {
				version = ""
			}
		case err != nil:
			f.into.fail(err)
		}
		wait(ctx, pace.after(time.Since(started), err))
	}
}

func wait(ctx context.Context, pause time.Duration) {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}

// follow lists where no version is known, and watches until the watch ends. It
// returns the version up to which everything has been seen; no error when the
// server ended the watch in its time, errCut when it ended earlier.
func (f *feed) follow(ctx context.Context, version string) (string, error) {
	if version == "" {
		var err error
		if version, err = f.read(ctx); err != nil {
			return "", fmt.Errorf("list %s: %w", f.what, err)
		}
	}
	seconds := int64((1 + rand.Float64()) * watchTimeout.Seconds())
	watching, cancel := context.WithTimeout(ctx, cmp.Or(f.life, time.Duration(seconds)*time.Second+time.Minute))
	defer cancel()
	patience := cmp.Or(f.patience, answerTimeout)
	impatient, asked := time.AfterFunc(patience, cancel), time.Now()
	events, err := f.watch(watching, metav1.ListOptions{ResourceVersion: version, TimeoutSeconds: &seconds, AllowWatchBookmarks: true})
	switch answered := impatient.Stop(); {
	case err != nil && !answered && ctx.Err() == nil:
		return version, fmt.Errorf("watch %s: no answer in %s", f.what, patience)
	case err != nil:
		return version, fmt.Errorf("watch %s: %w", f.what, err)
	}
	defer events.Stop()
	f.into.fail(nil)
	for {
		select {
		case <-watching.Done():
			return version, ctx.Err()
		case event, open := <-events.ResultChan():
			if !open && time.Since(asked) < time.Duration(seconds)*time.Second {
				return version, errCut
			}
			if !open {
				return version, nil
			}
			if version, err = f.take(event, version); err != nil {
				return version, fmt.Errorf("%w %s: %w", errGarbled, f.what, err)
			}
		}
	}
}

// read lists what there is now, not what some server's cache has: a profile
// that was right once must not come back.
func (f *feed) read(ctx context.Context) (version string, err error) {
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(f.patience, answerTimeout))
	defer cancel()
	list, err := f.list(ctx, metav1.ListOptions{})
	if err != nil {
		return "", err
	}
	objects, err := meta.ExtractList(list)
	if err != nil {
		return "", err
	}
	described, err := meta.ListAccessor(list)
	if err != nil {
		return "", err
	}
	f.into.replace(objects)
	return described.GetResourceVersion(), nil
}

var (
	// errGarbled says that a watch was open and brought what is no news.
	errGarbled = errors.New("watch")
	errEvent   = errors.New("an event that says nothing")
)

func (f *feed) take(event watch.Event, version string) (string, error) {
	if event.Type == watch.Error {
		return version, apierrors.FromObject(event.Object)
	}
	object, err := meta.Accessor(event.Object)
	if err != nil {
		return version, errors.Join(errEvent, err)
	}
	switch event.Type {
	case watch.Added, watch.Modified:
		f.into.put(event.Object)
	case watch.Deleted:
		f.into.remove(event.Object)
	}
	return object.GetResourceVersion(), nil
}
