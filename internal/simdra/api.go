package simdra

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
)

// API is an API server with one Node, the ResourceSlices of one driver on it, and ResourceClaims.
// Like a real one it rejects a write to an object that has changed meanwhile, and a watch can start
// from a version.
type API struct {
	driver, node string
	// misuse reports requests that a driver must not make.
	misuse  func(format string, arguments ...any)
	address string
	codecs  serializer.CodecFactory

	mutex   sync.Mutex
	version int
	events  []event
	// A new epoch ends all watches. changed is closed and replaced with each event and request.
	epoch   int
	changed chan struct{}

	// The fields below are only read and changed within Do and Until. Slices has the slices by
	// name, Claims the claims by "namespace/name".
	Slices map[string]resourceapi.ResourceSlice
	Claims map[string]*resourceapi.ResourceClaim
	// NodeUID is empty while there is no Node.
	NodeUID types.UID
	// Away makes the server answer every request with 503.
	Away bool
	// Without removes the fields of features that are turned off.
	Without func(*resourceapi.ResourceSliceSpec)
	// Forgotten is the oldest version from which a watch can start.
	Forgotten int
	// Writes are "METHOD NAME@GENERATION", in order. Lists and Opened count the lists and watches
	// that were started; Watches counts those that are open.
	Writes                 []string
	Lists, Watches, Opened int
}

type event struct {
	version int
	kind    string
	slice   resourceapi.ResourceSlice
}

// NewAPI serves the driver on the node at a local address until ctx ends.
func NewAPI(ctx context.Context, driver, node string, misuse func(format string, arguments ...any)) (*API, error) {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "localhost:0")
	if err != nil {
		return nil, err
	}
	return ServeAPI(ctx, listener, driver, node, misuse)
}

// ServeAPI is NewAPI for an existing listener, which may be in memory.
func ServeAPI(
	ctx context.Context,
	listener net.Listener,
	driver, node string,
	misuse func(format string, arguments ...any),
) (*API, error) {
	scheme := runtime.NewScheme()
	if err := resourceapi.AddToScheme(scheme); err != nil {
		return nil, err
	}
	metav1.AddToGroupVersion(scheme, metav1.SchemeGroupVersion)
	a := &API{
		driver:  driver,
		node:    node,
		misuse:  misuse,
		address: listener.Addr().String(),
		codecs:  serializer.NewCodecFactory(scheme),
		version: 10,
		changed: make(chan struct{}),
		NodeUID: "node-uid",
		Slices:  map[string]resourceapi.ResourceSlice{},
		Claims:  map[string]*resourceapi.ResourceClaim{},
	}
	server := &http.Server{Handler: a, ReadHeaderTimeout: time.Minute}
	context.AfterFunc(ctx, func() { _ = server.Close() })
	go func() { _ = server.Serve(listener) }()
	return a, nil
}

// Config returns a client's configuration for the server.
func (a *API) Config() *rest.Config { return &rest.Config{Host: "http://" + a.address} }

// Do runs change, which may read and change what the server has.
func (a *API) Do(change func()) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	change()
	a.wake()
}

func (a *API) wake() { close(a.changed); a.changed = make(chan struct{}) }

// CutWatches ends all watches. Like Version and Store it must be called within Do.
func (a *API) CutWatches() { a.epoch++ }

// Version returns the version of the last change.
func (a *API) Version() int { return a.version }

// Until waits until the condition holds. Its error is the context's.
func (a *API) Until(ctx context.Context, condition func() bool) error {
	for {
		a.mutex.Lock()
		ok, changed := condition(), a.changed
		a.mutex.Unlock()
		if ok {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Wipe deletes the slices whose names begin with prefix, as the kubelet and the garbage collector
// do.
func (a *API) Wipe(prefix string) {
	a.Do(func() {
		for _, slice := range a.Sorted() {
			if strings.HasPrefix(slice.Name, prefix) {
				a.delete(slice)
			}
		}
	})
}

// Store stores the slice as another client would.
func (a *API) Store(slice resourceapi.ResourceSlice) resourceapi.ResourceSlice {
	a.version++
	slice.ResourceVersion = strconv.Itoa(a.version)
	kind := "MODIFIED"
	if slice.UID == "" {
		kind, slice.UID = "ADDED", types.UID("uid-"+slice.ResourceVersion)
	}
	for i := range slice.Spec.Devices {
		for j := range slice.Spec.Devices[i].Taints {
			if taint := &slice.Spec.Devices[i].Taints[j]; taint.TimeAdded == nil {
				taint.TimeAdded = &metav1.Time{Time: metav1.Unix(int64(a.version), 0).Time}
			}
		}
	}
	if a.Without != nil {
		a.Without(&slice.Spec)
	}
	a.Slices[slice.Name] = *slice.DeepCopy()
	a.events = append(a.events, event{a.version, kind, *slice.DeepCopy()})
	return slice
}

func (a *API) delete(slice resourceapi.ResourceSlice) {
	a.version++
	delete(a.Slices, slice.Name)
	slice.ResourceVersion = strconv.Itoa(a.version)
	a.events = append(a.events, event{a.version, "DELETED", slice})
}

// Sorted returns the slices by name. Call it within Do or Until.
func (a *API) Sorted() []resourceapi.ResourceSlice {
	var all []resourceapi.ResourceSlice
	for _, slice := range a.Slices {
		all = append(all, slice)
	}
	slices.SortFunc(all, func(a, b resourceapi.ResourceSlice) int { return strings.Compare(a.Name, b.Name) })
	return all
}

// ServeHTTP implements http.Handler.
func (a *API) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	a.mutex.Lock()
	if a.Away {
		a.mutex.Unlock()
		refuse(w, http.StatusServiceUnavailable, metav1.StatusReasonServiceUnavailable)
		return
	}
	name, one := strings.CutPrefix(r.URL.Path, "/apis/resource.k8s.io/v1/resourceslices/")
	claim, ofClaims := strings.CutPrefix(r.URL.Path, "/apis/resource.k8s.io/v1/namespaces/")
	switch {
	case r.Method == http.MethodGet && r.URL.Path == "/api/v1/nodes/"+a.node:
		if a.NodeUID == "" {
			refuse(w, http.StatusNotFound, metav1.StatusReasonNotFound)
			break
		}
		answer(w, http.StatusOK, metav1.PartialObjectMetadata{
			TypeMeta:   metadataType,
			ObjectMeta: metav1.ObjectMeta{Name: a.node, UID: a.NodeUID},
		})
	case r.Method == http.MethodGet && r.URL.Path == "/apis/resource.k8s.io/v1/resourceclaims":
		list := resourceapi.ResourceClaimList{TypeMeta: typeOf("ResourceClaimList")}
		for _, claim := range a.Claims {
			list.Items = append(list.Items, *claim)
		}
		answer(w, http.StatusOK, list)
	case r.Method == http.MethodGet && ofClaims:
		if found := a.Claims[strings.Replace(claim, "/resourceclaims/", "/", 1)]; found == nil {
			refuse(w, http.StatusNotFound, metav1.StatusReasonNotFound)
		} else {
			answer(w, http.StatusOK, found)
		}
	case r.Method == http.MethodGet && r.URL.Query().Get("watch") != "":
		from, err := strconv.Atoi(r.URL.Query().Get("resourceVersion"))
		a.check(r, err == nil && r.URL.Query().Get("timeoutSeconds") != "")
		a.mutex.Unlock()
		a.watch(w, r, from)
		return
	case r.Method == http.MethodGet:
		a.check(r, true)
		a.Lists++
		answer(w, http.StatusOK, resourceapi.ResourceSliceList{
			TypeMeta: typeOf("ResourceSliceList"),
			ListMeta: metav1.ListMeta{ResourceVersion: strconv.Itoa(a.version)},
			Items:    a.Sorted(),
		})
	case r.Method == http.MethodPost || r.Method == http.MethodPut && one:
		a.serveWrite(w, r, name, body)
	case r.Method == http.MethodDelete && one:
		a.serveDelete(w, name, body)
	default:
		a.misuse("%s %s: nothing of a driver's", r.Method, r.URL)
		refuse(w, http.StatusNotFound, metav1.StatusReasonNotFound)
	}
	a.wake()
	a.mutex.Unlock()
}

func (a *API) check(r *http.Request, ok bool) {
	if got := r.URL.Query().Get("fieldSelector"); !ok || got != "spec.driver="+a.driver+",spec.nodeName="+a.node {
		a.misuse("%s %s, accepts %s: only the driver's slices on its node are to be read", r.Method, r.URL,
			r.Header.Get("Accept"))
	}
}

func (a *API) serveWrite(w http.ResponseWriter, r *http.Request, name string, body []byte) {
	object, _, err := a.codecs.UniversalDeserializer().Decode(body, nil, nil)
	sent, ok := object.(*resourceapi.ResourceSlice)
	if !ok {
		a.misuse("%s %s: %v", r.Method, r.URL, err)
		refuse(w, http.StatusBadRequest, metav1.StatusReasonBadRequest)
		return
	}
	sent.TypeMeta = typeOf("ResourceSlice")
	old, there := a.Slices[sent.Name]
	switch {
	case r.Method == http.MethodPost && there:
		refuse(w, http.StatusConflict, metav1.StatusReasonAlreadyExists)
		return
	case r.Method == http.MethodPut && !there:
		refuse(w, http.StatusNotFound, metav1.StatusReasonNotFound)
		return
	case r.Method == http.MethodPut &&
		(name != sent.Name || sent.ResourceVersion != old.ResourceVersion || sent.UID != old.UID):
		refuse(w, http.StatusConflict, metav1.StatusReasonConflict)
		return
	case r.Method == http.MethodPost && (sent.ResourceVersion != "" || sent.UID != ""):
		a.misuse("create %s with version %q and UID %q", sent.Name, sent.ResourceVersion, sent.UID)
	}
	a.Writes = append(a.Writes, fmt.Sprintf("%s %s@%d", r.Method,
		strings.TrimSuffix(sent.Name, "-"+a.driver+"-"+a.node), sent.Spec.Pool.Generation))
	answer(w, http.StatusOK, a.Store(*sent))
}

func (a *API) serveDelete(w http.ResponseWriter, name string, body []byte) {
	var options metav1.DeleteOptions
	if _, _, err := a.codecs.UniversalDeserializer().Decode(body, nil, &options); err != nil {
		a.misuse("delete %s: %v", name, err)
	}
	old, there := a.Slices[name]
	switch p := options.Preconditions; {
	case !there:
		refuse(w, http.StatusNotFound, metav1.StatusReasonNotFound)
	case p == nil || p.UID == nil || *p.UID != old.UID || p.ResourceVersion == nil ||
		*p.ResourceVersion != old.ResourceVersion:
		refuse(w, http.StatusConflict, metav1.StatusReasonConflict)
	default:
		a.Writes = append(a.Writes, "DELETE "+strings.TrimSuffix(name, "-"+a.driver+"-"+a.node))
		a.delete(old)
		answer(w, http.StatusOK, metav1.Status{
			TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
			Status:   "Success",
		})
	}
}

// watch sends the events after the version until the watch is ended.
func (a *API) watch(w http.ResponseWriter, r *http.Request, from int) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	if from < a.Forgotten {
		refuse(w, http.StatusGone, metav1.StatusReasonExpired)
		return
	}
	epoch := a.epoch
	a.Watches++
	a.Opened++
	defer func() { a.Watches--; a.wake() }()
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
	flusher := w.(http.Flusher)
	flusher.Flush()
	a.wake()
	for r.Context().Err() == nil && a.epoch == epoch {
		for _, e := range a.events {
			if e.version <= from {
				continue
			}
			from = e.version
			e.slice.TypeMeta = typeOf("ResourceSlice")
			if json.NewEncoder(w).Encode(map[string]any{"type": e.kind, "object": e.slice}) != nil {
				return
			}
		}
		flusher.Flush()
		changed := a.changed
		a.mutex.Unlock()
		select {
		case <-changed:
		case <-r.Context().Done():
		}
		a.mutex.Lock()
	}
}

var metadataType = metav1.TypeMeta{Kind: "PartialObjectMetadata", APIVersion: "meta.k8s.io/v1"}

func typeOf(kind string) metav1.TypeMeta {
	return metav1.TypeMeta{Kind: kind, APIVersion: resourceapi.SchemeGroupVersion.String()}
}

func answer(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body)
}

func refuse(w http.ResponseWriter, status int, reason metav1.StatusReason) {
	answer(w, status, metav1.Status{
		TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
		Status:   "Failure",
		Message:  "refused by the simulation",
		Reason:   reason,
		Code:     int32(status),
	})
}
